"""Where the rollouts of a run come from: its own policy and rewards, or files of saved ones.

Saved rollouts take the place of prompts, sampling and rewards (`jaxgrpo replay`). Step n trains on
file (n - 1) mod the number of files. All that follows sampling is the usual run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError, differing_names
from jaxgrpo.core.records import SUPPORT
from jaxgrpo.core.types import (
    ARRAYS,
    REPLAYED,
    SAMPLE_ARRAYS,
    Params,
    Prompts,
    Rollouts,
    Stream,
    Waiting,
)
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.data.storage import checksum
from jaxgrpo.models import routing
from jaxgrpo.models.api import ExpertsKind, LayerKind, ModelConfig
from jaxgrpo.rewards import RewardLog
from jaxgrpo.rollout import trees
from jaxgrpo.rollout.batch import Drawing
from jaxgrpo.rollout.dialogue import FORK, VERSION
from jaxgrpo.rollout.judging import RolloutSource
from jaxgrpo.rollout.selection import sequential
from jaxgrpo.training.collecting.growing import refuse_excluded
from jaxgrpo.training.records import rollout_files

SIZES = (
    *("prompts_per_step", "group_size"),
    *("max_prompt_tokens", "max_completion_tokens"),
)
"""Keys of `rollout`: the sizes of rollouts, P, G, S and T."""

OF_THE_START = ("model.", "lora.", "train.seed")
OF_UPDATES = (
    *("recipe", "advantage", "scores", "data.answer_cuts", "loss.", "reference.", "optimizer."),
    *("rollout.", "train."),
)
"""What keys begin with that decide the weights that a run begins with, and what updates make of
them."""

Rows = dict[tuple[int, bytes], int]
"""(row in a file, -1 where it names none; its prompt's tokens) -> row of the replay"""

SavedRollouts = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]
"""Files of rollouts, or one."""


class Replay(NamedTuple):
    """Files of rollouts that were read once and fit a config."""

    files: tuple[Path, ...]
    checksums: tuple[str, ...]  # crc32 of each file
    rewards: tuple[frozenset[str], ...]  # names of each file
    fields: tuple[frozenset[str], ...]
    data: PromptData  # their prompts, each once
    load: Callable[[int], Rollouts]  # file -> host arrays in the sizes of the config

    @property
    def common_fields(self) -> frozenset[str]:
        """Those that all files hold."""
        return frozenset.intersection(*self.fields)

    @property
    def has_forks(self) -> bool:
        """Whether some sample may hold a rewritten conversation."""
        return any(FORK in names for names in self.fields)


def replay_config(
    files: SavedRollouts, config: str | None = None, overrides: Sequence[str] = ()
) -> Config:
    """The config of `jaxgrpo replay`: one step per file, and a run folder of its own. Data that it
    names need not be there.

    Args:
      config: a TOML file or a shipped config's name; None: that of the run that wrote the files.
      overrides: as in `config.files.load`; they go before what is said above.

    Raises: InputError where `config` is None and the files are not those of one run.
    """
    paths = rollout_paths(files)
    if config is None:
        homes = {path.absolute().parent.parent / "config.toml" for path in paths}
        home = homes.pop()
        if homes or not home.is_file():
            why = "they are of several runs" if homes else f"there is no {home}"
            raise InputError(f"replay {paths[0]}: which config? {why}: give --config CONFIG")
        config = str(home)
    base_config = configs.load(config, overrides, is_stored=True)
    defaults = {
        "train.steps": len(paths),
        "run.dir": f"{base_config.run.dir.rstrip('/')}-replay",
        "run.rollouts_every": 0,  # they are there already
    }
    set_keys = configs.named_keys(overrides)
    unset_defaults = {name: value for name, value in defaults.items() if name not in set_keys}
    return configs.make_config(base_config, unset_defaults, is_stored=True)


def rollout_paths(files: SavedRollouts) -> tuple[Path, ...]:
    """Files of rollouts as paths. Raises: InputError if there is none."""
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not paths:
        raise InputError("rollouts: no file is given; give one or more (docs/rollouts.md)")
    return tuple(Path(path).absolute() for path in paths)


def read_files(
    rollout: RolloutKeys,
    run_keys: Mapping[str, Any],
    files: SavedRollouts,
    tokenizer: Any,
    model: ModelConfig,
    end_tokens: Sequence[int],
) -> Replay:
    """Reads and checks every file.

    The data set of a replay is what its files hold: each prompt once, decoded, in the order in
    which they appear. Prompts of one row, or of equal tokens where a file names no rows, are one.

    Args:
      run_keys: `decisive_keys` of the run.

    Raises: InputError on a file that is wrong or does not fit the config.
    """
    paths = rollout_paths(files)
    remedy = "leave the key out of the config, in a copy of it that you give by --config"
    refuse_excluded("replay", rollout, remedy)
    load = functools.partial(
        _load_own,
        kinds=model.kinds,
        vocab_size=model.vocab_size,
        end_tokens=end_tokens,
        without_text=model.without_text,
    )
    shared = [_shared_policies(run_keys, path) for path in paths]
    numbers: Rows = {}
    encoded, sums, rewards, fields = [], [], [], []
    for path in paths:
        rollouts = load(path)
        _check_sizes(rollout, path, rollouts)
        sums.append(checksum([path.read_bytes()]))
        rewards.append(frozenset(rollouts.rewards))
        fields.append(frozenset(rollouts.fields))
        for key, ids in _prompts(path, rollouts):
            if numbers.setdefault(key, len(encoded)) == len(encoded):
                encoded.append(ids)
    texts = tokenizer.batch_decode(encoded, clean_up_tokenization_spaces=False)

    @functools.lru_cache(maxsize=1)  # three functions of a step read it
    def load_fitted(place: int) -> Rollouts:
        _refuse_changed(paths[place], sums[place])
        rollouts = _fit_to_config(rollout, paths[place], load(paths[place]), numbers)
        return _with_shared_versions(rollouts, shared[place])

    data = PromptData([{"prompt": text} for text in texts], encoded, 0)
    return Replay(paths, tuple(sums), tuple(rewards), tuple(fields), data, load_fitted)


def _refuse_changed(path: Path, expected: str) -> None:
    """Raises: InputError where a file is not what it was when the run began. Args: its crc32."""
    if path.is_file() and (present := checksum([path.read_bytes()])) != expected:
        raise InputError(
            f"{path}: its crc32 is {present}, and was {expected} when the run began: put the file "
            "back and go on by the same command with --resume auto"
        )


def _with_shared_versions(rollouts: Rollouts, count: float) -> Rollouts:
    """The rollouts, whose versions are -1 where they are none of the first `count` policies."""

    def as_shared(version: Any) -> Any:
        return np.where(version < count, version, -1).astype(version.dtype)

    named = {name: as_shared(rollouts.fields[name]) for name in {VERSION} & rollouts.fields.keys()}
    version, fields = as_shared(rollouts.policy_version), {**rollouts.fields, **named}
    return dataclasses.replace(rollouts, policy_version=version, fields=fields)


def _shared_policies(run_keys: Mapping[str, Any], path: Path) -> float:
    """Policies that this run has in common with the run that wrote a file, from step 0 on.

    All with the same start and method, that of step 0 with the same start; none otherwise. The
    number of steps of a policy says no more than that: its weights are not in the file. A file that
    lies in no run folder is trusted.
    """
    home = path.parent.parent / "config.toml"
    if not home.is_file():
        return np.inf
    with contextlib.suppress(InputError):
        file_keys = decisive_keys(
            configs.flat(configs.to_tables(configs.load(home, is_stored=True)))
        )
        names = differing_names(run_keys, file_keys)
        at_start = any(name.startswith(OF_THE_START) for name in names)
        return 0 if at_start else 1 if names else np.inf
    return 0


def decisive_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config that decide the weights of its policies, where rewards are given.

    Args:
      keys: all of it, flat.
    """
    prefixes = OF_THE_START + OF_UPDATES
    decisive = {name: value for name, value in keys.items() if name.startswith(prefixes)}
    if keys["optimizer.schedule"] == "constant":
        del decisive["train.steps"]
    if keys["reference.reset_patience"]:  # evaluations decide when the reference is reset
        decisive |= {name: value for name, value in keys.items() if name.startswith("eval.")}
    return decisive | {"weights": [reward.get("weight", 1.0) for reward in keys["rewards"]]}


def _load_own(path: Path, kinds: Sequence[LayerKind], **checks: Any) -> Rollouts:
    """The rollouts of a file, without the experts of another model where this one has none.

    Raises: InputError where they cannot be those of its layers, or the file is wrong.
    """
    rollouts = rollout_files.load(path, **checks)
    if records.EXPERTS not in rollouts.fields:
        return rollouts
    sizes, experts = routing.recorded(kinds), np.asarray(rollouts.fields[records.EXPERTS])
    if sizes is None:
        plain = records.without(rollouts.fields, {*records.DTYPES} - {records.EXPERTS})
        return dataclasses.replace(rollouts, fields=plain)
    feeds = [kind.feed for kind in kinds if isinstance(kind.feed, ExpertsKind)]
    numbers, shape = [feed.number for feed in feeds], experts.shape[3:]
    is_fitting = shape == sizes and (experts < np.array(numbers)[:, None]).all()
    if not (is_fitting and (experts >= records.NONE).all()):
        raise InputError(
            f"{path}: fields.{records.EXPERTS} has experts {experts.min()} to {experts.max()} in "
            f"(layers, experts of a token) = {shape}, but the model has {max(numbers)} experts in "
            f"{sizes}: replay it with the model that drew the samples, or take the field out"
        )
    return rollouts


def _prompts(path: Path, rollouts: Any) -> list[tuple[tuple[int, bytes], np.ndarray]]:
    """What tells the prompts of a file apart, and their tokens."""
    named = "row" in rollout_files.names_in(path)
    lengths = rollouts.prompt_mask.sum(-1)
    tokens = [row[:n] for row, n in zip(rollouts.prompt_tokens, lengths, strict=True)]
    rows = rollouts.row if named else np.full(len(tokens), -1)
    return [((int(row), ids.tobytes()), ids) for row, ids in zip(rows, tokens, strict=True)]


def _check_sizes(rollout: RolloutKeys, path: Path, rollouts: Rollouts) -> None:
    """Raises InputError, with the keys to set, unless the rollouts are of the config's sizes."""
    count, samples, steps = rollouts.token_mask.shape
    sizes = (count, samples, rollouts.prompt_mask.shape[1], steps)
    limits = [getattr(rollout, name) for name in SIZES]
    wrong = [
        (name, size, limit)
        for name, size, limit in zip(SIZES, sizes, limits, strict=True)
        if (size > limit if name.startswith("max_") else size != limit)
    ]
    if wrong:
        settings = ", ".join(f"rollout.{name} = {limit}" for name, _, limit in wrong)
        remedy = " ".join(f"rollout.{name}={size}" for name, size, _ in wrong)
        shape = "{} prompts x {} samples, {} prompt and {} completion positions".format(*sizes)
        raise InputError(f"{path}: holds {shape}, but {settings}: give --set {remedy}")


def _fit_to_config(rollout: RolloutKeys, path: Path, rollouts: Any, numbers: Rows) -> Rollouts:
    """The rollouts in the sizes of the config, with the rows of the replay."""
    steps = rollout.max_completion_tokens
    keys = [key for key, _ in _prompts(path, rollouts)]

    def pad(array: np.ndarray, size: int) -> np.ndarray:
        pairs = [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])]
        return np.pad(array, pairs)

    lengths = {"S": rollout.max_prompt_tokens, "T": steps}
    padded_arrays = {
        name: pad(getattr(rollouts, name), lengths[axes[-1]])
        for name, (axes, _) in ARRAYS.items()
        if axes.endswith(tuple(lengths))
    }
    shape = rollouts.token_mask.shape
    fields = {
        name: pad(value, steps) if value.shape == shape else value
        for name, value in rollouts.fields.items()
    }
    fields |= records.lengthened(fields, steps)
    row: Any = np.array([numbers[key] for key in keys], np.int32)
    return dataclasses.replace(rollouts, **padded_arrays, fields=fields, row=row)


def refuse_other_files(
    saved: Mapping[str, Any] | None,
    has_begun: bool,
    replay: Replay | None,
    meta: Mapping[str, Any],
) -> None:
    """A resumed run takes the files that it began with, or samples of its own.

    Args:
      saved: replay.json of the run folder; None: there is none.
      has_begun: whether the folder holds a run.
      meta: what its newest checkpoint holds beside its arrays; {} where there is none.
    """
    replayed = "inputs" in meta and "rows" not in meta["inputs"]  # see `fingerprints.input_facts`
    if saved is None and replayed:
        raise InputError(
            "the run in run.dir replays files of rollouts, and its replay.json, which names them, "
            "is gone: put it back, or set run.dir to another folder"
        )
    if not has_begun or (saved is None and replay is None):
        return
    if saved is None:
        raise InputError(
            "the run in run.dir samples for itself: go on with it by `jaxgrpo train`, or set "
            "run.dir to another folder"
        )
    if replay is None or list(replay.checksums) != saved["crc32"]:
        names = [str(name) for name in saved["files"]] or ["none"]
        raise InputError(
            f"the run in run.dir replays {len(saved['files'])} files of rollouts, from "
            f"{names[0]} to {names[-1]}: go on with it by `jaxgrpo replay` and "
            "the same files, or set run.dir to another folder"
        )


def to_json(replay: Replay) -> str:
    """The text of replay.json: the files of a replay, in order, and their checksums."""
    content = {"files": [str(path) for path in replay.files], "crc32": list(replay.checksums)}
    return json.dumps(content, indent=2) + "\n"


OF_TOKENS = {trees.ANCESTORS, trees.DEPTH, FORK, REPLAYED, *records.DTYPES}
"""Fields of files that are read wherever they are: what shared tokens of trees are counted by,
where conversations were rewritten, which samples are of earlier steps, and what was recorded."""


def needed_support(replay: Replay, is_taken_again: bool, has_ratios: bool) -> set[str]:
    """The field of what tokens were drawn among, if a run takes it again.

    Args:
      has_ratios: whether ratios are measured from the log-probs in the files.

    Raises: InputError where files have it, and such a run would not.
    """
    if not is_taken_again and has_ratios:
        for path, columns in zip(replay.files, replay.fields, strict=True):
            if SUPPORT in columns:
                raise InputError(
                    f"{path}: its log-probs are among the tokens of fields.{SUPPORT}, and the "
                    'trainer\'s would be among all: set train.support = "replay" and '
                    'rollout.top_k, or loss.proximal = "trainer"'
                )
    return {SUPPORT} if is_taken_again else set()


def rollout_source_from_files(
    replay: Replay, rewards: Collection[str], fields: Collection[str]
) -> RolloutSource:
    """Saved rollouts: each function returns its part of what the file of the step holds.

    The prompt policy that comes with them is never asked.

    Args:
      rewards: names of the run's rewards.
      fields: names of those that its method reads; others in the files are left out.

    Raises: InputError where a file has other rewards, or lacks a field.
    """
    for path, names, columns in zip(replay.files, replay.rewards, replay.fields, strict=True):
        if names != set(rewards):
            raise InputError(
                f"{path}: holds rewards called {', '.join(sorted(names))}, but the config's are "
                f"called {', '.join(sorted(rewards))}: give these the names, by `name` in rewards"
            )
        if missing := sorted(set(fields) - columns):
            raise InputError(
                f"{path}: the method reads the fields {', '.join(missing)}, which are not there; "
                f"it holds {', '.join(sorted(columns)) or 'none'}: write fields.{missing[0]} too"
            )

    def load_step(step: int) -> Rollouts:
        return replay.load(step % len(replay.files))

    def select(stream: Stream, step: int) -> tuple[Stream, Prompts]:
        names = [field.name for field in dataclasses.fields(Prompts) if field.name != "step"]
        rollouts = load_step(step)
        arrays: dict[str, Any] = {name: getattr(rollouts, name) for name in names}
        return stream, Prompts(**arrays, step=np.asarray(step, np.int32))  # pyright: ignore[reportArgumentType]

    def draw(params: Params, prompts: Prompts, key: np.ndarray) -> Drawing:
        saved = load_step(int(prompts.step))
        arrays: dict[str, Any] = {name: getattr(saved, name) for name in SAMPLE_ARRAYS}
        rollouts = Rollouts(**vars(prompts), **arrays, rewards={}, fields={})
        return Drawing((_ for _ in ()), lambda: rollouts)

    def reward(stream: Stream, rollouts: Rollouts, *_: Any) -> tuple[Stream, Rollouts, RewardLog]:
        saved = load_step(int(rollouts.step))
        names = {*fields} | (OF_TOKENS & saved.fields.keys())
        values = {name: saved.fields[name] for name in sorted(names)}
        judged = dataclasses.replace(rollouts, rewards=saved.rewards, fields=values)
        return stream, judged, RewardLog({}, {}, {}, {})

    return RolloutSource(sequential(), select, draw, reward, Waiting(), None)
