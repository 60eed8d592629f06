"""What else makes the samples of a run: trees, right samples of earlier steps, texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config.keys import EvalKeys, ExperienceKeys, RolloutKeys, TreeKeys
from jaxgrpo.config.off_policy import completion_key, refuse_weights
from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import REPLAYED, Params, Prompts, only_tokens
from jaxgrpo.data.prompts import check_tokens, name_row, token_ids
from jaxgrpo.losses import Objective
from jaxgrpo.rollout import dialogue, trees
from jaxgrpo.rollout.answers import answer_end_tokens
from jaxgrpo.rollout.batch import Drawing
from jaxgrpo.rollout.drift import DRIFT
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.prefixes import PREFIX
from jaxgrpo.rollout.trees import Trees
from jaxgrpo.training.pretrained import Pretrained

EXCLUDES = {
    "tree.branch": {
        "refill": "groups that are left over have no room for the fields of trees",
        "staleness": "samples that wait have no room for the fields of trees",
        "goals": "a branch would begin with the goal of another sample",
        "interrupt": "a branch may leave another sample within the text",
    },
    "experience.share": {
        "refill": "a group is judged by what replaces it",
        "staleness": "what is right now is known too late",
        "goals": "a kept sample would begin with another text",
        "prefixes": "a kept sample would follow another prompt",
        "early_stop": "a sample that was stopped is none of the policy's",
    },
    "data.completion": {
        "refill": "the texts of a row are the same each time",
        "staleness": "texts are of no policy",
        "goals": "texts begin as they are written",
        "interrupt": "no text is interrupted",
        "early_stop": "no text is stopped",
    },
    "replay": {
        "refill": "no flat group can be replaced",
        "staleness": "each step trains on its own file",
        "goals": "samples begin as they were drawn",
        "interrupt": "no sample is interrupted",
        "prefixes": "prompts begin as they were sampled",
    },
}
"""What else makes samples -> keys of `rollout` that do not go with it, and why."""

Rows = Sequence[Mapping[str, Any]]
Draw = Callable[[Params, Prompts, np.ndarray], Drawing]


def refuse_excluded(
    name: str, rollout: RolloutKeys, remedy: str = "leave one of the two out"
) -> None:
    """Raises: InputError for a key of `rollout` that does not go with a name of EXCLUDES."""
    for key, reason in EXCLUDES[name].items():
        if getattr(rollout, key):
            raise InputError(f"{name}: with rollout.{key} {reason}; {remedy}")


def refuse_unread(
    keys: TreeKeys | ExperienceKeys | EvalKeys,
    switch: str,
    example: str,
    names: Collection[str] | None = None,
) -> None:
    """Raises: InputError for a key of a table that acts on nothing without another, `switch`.

    Args:
      names: of the keys that it is about; None: all of the table.
    """
    defaults = vars(type(keys)())
    for name, value in vars(keys).items():
        if value != defaults[name] and (names is None or name in names):
            raise InputError(
                f"{switch.partition('.')[0]}.{name} = {value!r}: nothing reads it without "
                f"{switch}; set that, as {example}, or leave it out"
            )


def make_trees(keys: TreeKeys, rollout: RolloutKeys, experience_share: float) -> Trees | None:
    """How the samples of a run grow; None: each by itself.

    Raises: InputError where they would not be as many as a group has, and for keys that act on no
      tree or do not go with trees.
    """
    if keys.branch is None:
        return refuse_unread(keys, "tree.branch", '"uniform"')
    refuse_excluded("tree.branch", rollout)
    if "percentile" in (rollout.early_stop or {}):
        raise InputError(
            "tree.branch: chains are the first samples of a prompt, so that "
            "rollout.early_stop.percentile can choose none; set rollout.early_stop.confidence"
        )
    if experience_share:
        raise InputError("tree.branch: a sample of experience is no leaf; leave one of the two out")
    longest = rollout.max_completion_tokens
    grown = Trees(**vars(keys), group_size=rollout.group_size, longest=longest)
    trees.check(grown)
    return grown


def brought_fields(
    grown: Trees | None,
    rollout: RolloutKeys,
    share: float,
    has_turns: bool,
    needs: Collection[str] = (),
    forks: bool = False,
    recorded: records.Shapes = (),
) -> dict[str, Any]:
    """Name -> shape of the fields that drawing and collecting add.

    Args:
      share: `experience.share`.
      has_turns: whether samples are answered.
      needs: what the method reads that is no column of the data.
      forks: whether conversations may be rewritten.
      recorded: `rollout.engine.record_shapes` of the model.

    Raises: InputError where samples of earlier steps would need a record.
    """
    samples = rollout.prompts_per_step, rollout.group_size
    fields: dict[str, Any] = {}
    tokens = (*samples, rollout.max_completion_tokens)
    for name, sizes in recorded:
        fields[name] = jax.ShapeDtypeStruct((*tokens, *sizes), records.DTYPES[name])
    if records.SUPPORT in fields:
        _refuse_earlier_samples(share, needs)
    if share:
        fields[REPLAYED] = jax.ShapeDtypeStruct(samples, np.bool_)
    if DRIFT in needs:
        fields[DRIFT] = jax.ShapeDtypeStruct(samples[:1], np.float32)
    if rollout.prefixes is not None:
        fields[PREFIX] = jax.ShapeDtypeStruct(samples[:1], np.int32)
    if has_turns:
        turns = (*samples, rollout.max_turns)
        fields[dialogue.TURN] = jax.ShapeDtypeStruct(tokens, np.int32)
        fields[dialogue.VERSION] = jax.ShapeDtypeStruct(tokens, np.int32)
        fields[dialogue.REWARD] = jax.ShapeDtypeStruct(turns, np.float32)
        fields[dialogue.STATE] = jax.ShapeDtypeStruct(turns, np.int32)
        if forks:
            fields[dialogue.FORK] = jax.ShapeDtypeStruct(tokens, np.int32)
        fields[dialogue.CUT] = jax.ShapeDtypeStruct(turns, np.bool_)
    if grown is not None:
        fields[trees.TREE] = jax.ShapeDtypeStruct(samples, np.int32)
        fields[trees.ANCESTORS] = jax.ShapeDtypeStruct((*samples, grown.depths), np.int32)
        fields[trees.DEPTH] = jax.ShapeDtypeStruct(tokens, np.int32)
    return fields


def _refuse_earlier_samples(share: float, needs: Collection[str]) -> None:
    if share or DRIFT in needs:
        reader = f"experience.share = {share:g}" if share else "the drift of a recipe"
        raise InputError(
            f'train.support = "replay": {reader} scores samples of earlier steps, whose support '
            "is not stored; leave one of the two out"
        )


def make_writer(
    column: str,
    rows: Rows,
    pretrained: Pretrained,
    rollout: RolloutKeys,
    settings: SamplingSettings,
    chain: AdvantageTransform,
    objective: Objective,
    brought: Collection[str] = (),
) -> Draw:
    """What gives the texts of a column as the samples of its rows, each with an end token.

    They take the place of drawing alone: rewards judge them, teachers score them, the loss sees
    samples of another policy. Their `policy_version` is -1 and `behavior_logp` 0, which nothing
    may read.

    Args:
      column: of a text, or of a list of `rollout.group_size` texts.
      chain, objective: of the run.
      brought: fields that come with samples which are drawn.

    Raises: InputError where there is no such column, a text is none or too long, samples are to be
      answered or to grow, or are weighed by how likely they were to what drew them.
    """
    where = completion_key(column)
    refuse_excluded("data.completion", rollout)
    if grown := sorted({*brought} - {records.EXPERTS}):
        raise InputError(f"{where}: texts have no {grown[0]}; leave out what adds it to samples")
    refuse_weights(where, chain, objective)
    samples, longest = rollout.group_size, rollout.max_completion_tokens
    encoded = _encode(where, column, rows, pretrained, rollout, settings.stop_tokens)

    def draw(params: Params, prompts: Prompts, key: np.ndarray) -> Drawing:
        del params, key
        shape = len(prompts.row), samples
        tokens = np.full((*shape, longest), settings.pad_token, np.int32)
        mask = np.zeros((*shape, longest), bool)
        for place, row in enumerate(np.asarray(prompts.row).tolist()):
            for sample in range(samples):
                ids = encoded[row * samples + sample]
                tokens[place, sample, : len(ids)], mask[place, sample, : len(ids)] = ids, True
        rollouts = only_tokens(prompts, tokens, mask)
        return Drawing((_ for _ in ()), lambda: rollouts)

    return draw


def _encode(
    where: str,
    column: str,
    rows: Rows,
    pretrained: Pretrained,
    rollout: RolloutKeys,
    stop_tokens: Sequence[int],
) -> list[np.ndarray]:
    """The tokens of all texts, `rollout.group_size` for each row."""
    if column not in rows[0]:
        raise InputError(f"{where}: the data have no such column; they have {', '.join(rows[0])}")
    samples, longest = rollout.group_size, rollout.max_completion_tokens
    texts = [_texts(where, rows, place, column, samples) for place in range(len(rows))]
    tokenizer, vocab_size = pretrained.tokenizer, pretrained.model.config.vocab_size
    flat = token_ids(tokenizer, [text for row_texts in texts for text in row_texts], column)
    end = answer_end_tokens(tokenizer, stop_tokens)
    encoded = [np.asarray([*ids, *end], np.int32) for ids in flat]
    for place, ids in enumerate(encoded):
        if len(ids) > longest:
            raise InputError(
                f"{where}: {name_row(rows, place // samples)}: a text of {len(ids)} tokens with "
                f"its end, and rollout.max_completion_tokens = {longest}: set it to that or more"
            )
    repeated_rows = [row for row in rows for _ in range(samples)]
    check_tokens(repeated_rows, encoded, tokenizer, vocab_size, column)
    return encoded


def _texts(where: str, rows: Rows, place: int, column: str, samples: int) -> list[str]:
    """The texts of a row, one for each sample."""
    value = rows[place][column]
    texts = [value] if isinstance(value, str) else value
    is_list = isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
    if not is_list or len(texts) != samples:
        raise InputError(
            f"{where}: {name_row(rows, place)} holds {value!r}, expected "
            f"{'a text' if samples == 1 else f'a list of {samples} texts'}, as many as "
            f"rollout.group_size = {samples}"
        )
    return list(texts)
