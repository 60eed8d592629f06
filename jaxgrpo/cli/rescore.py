"""`jaxgrpo rescore`: what other rewards would have said about the samples that a run saved."""

from __future__ import annotations

import contextlib
import itertools
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxgrpo.advantages.stats import added
from jaxgrpo.cli.inference import write_rows
from jaxgrpo.cli.samples import find_steps, read_step
from jaxgrpo.config import files as configs
from jaxgrpo.config.keys import RewardKeys
from jaxgrpo.config.world import COLUMNS, load_environments
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.storage import Place
from jaxgrpo.environments.serving.endpoint import is_program
from jaxgrpo.evaluation import agreement
from jaxgrpo.evaluation.agreement import Agreement
from jaxgrpo.rewards import RewardError, RewardLog
from jaxgrpo.rewards.protocol import Reward, check, reads_any
from jaxgrpo.rollout.judging import merge_logs, step_progress
from jaxgrpo.rollout.texts import Texts, among_all, call_on_texts
from jaxgrpo.training.inputs import load_run_rows
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import LOOK, Document, facts, show_table
from jaxgrpo.training.records.folder import plain
from jaxgrpo.training.records.reading import is_number
from jaxgrpo.training.records.report.html import check_writable
from jaxgrpo.training.records.report.record import (
    RewardSum,
    reward_sum,
    shown,
    visible,
    weighted_rewards,
)
from jaxgrpo.training.rewarding import print_failures, resolve_rewards
from jaxgrpo.training.stored_policy import read_run

TOTAL = "total"
"""The weighted sum of the new rewards, where there are several."""

SHOWN = 60  # characters of a prompt in a message

HEAD = ("step", "reward", "old", "new", "Spearman", "side", "rank", "unscored", "flat", "live")
LEGEND = {
    "old, new": "means of the weighted sum that was saved, and of the new reward",
    "Spearman": "the correlation of the two, over the samples of the step",
    "side, rank": "samples on another side of their group's mean, or with another rank in it",
    "flat, live": "groups that would become so",
}

Row = Mapping[str, Any]

_add = jax.jit(added)


class StepScores(NamedTuple):
    """The samples of a step, N of them, and what new rewards say about them."""

    rows: list[dict[str, Any]]
    scores: dict[str, np.ndarray]  # name -> float32 [N], NaN = not scored
    log: RewardLog


def rescore(
    run: str,
    rewards: Sequence[str],
    step: int | None = None,
    out: str | None = None,
    as_json: bool = False,
    overrides: Sequence[str] = (),
) -> int | Document:
    """Judges the saved samples of a run again, by other rewards, without a model.

    Rewards get what they get in training: completions, as conversations where samples have turns
    and prompts are messages, token ids, columns of data and progress. Labels are not flipped.

    Args:
      rewards: names of the run's own rewards, with their options and weights; of built-in ones; or
        own code, "file.py:function". The others have the weight 1.
      step: that has a file of samples; None: all of them.
      out: a file for a line of JSON per sample.
      overrides: of keys of the config, such as "data.path=moved.jsonl".

    Returns: the exit code, or the numbers of the table.
    Raises: InputError where the run has no samples or other data than when it saved them, a reward
      does not exist or asks for a column that is not there, and as rewards do.
    """
    folder, config = read_run(run)
    config = configs.from_dict(configs.to_tables(config), overrides, is_stored=True)
    steps = find_steps(folder, step)
    names = ["config.toml", *(f"samples/step_{number}.jsonl" for number in steps)]
    check_writable(out, inputs=[*config.data.paths, *(str(folder / name) for name in names)])
    process.start("cpu")  # which sums rewards, and computes nothing else
    data = (
        load_run_rows(config.data, config.model, config.rollout, config.tools, config.environments)
        if config.data.path
        else []
    )
    by_title = {entry.title: entry for entry in config.rewards}
    entries = [by_title.get(name, RewardKeys(use=name)) for name in rewards]
    judges = find_judges(entries, config.rollout.max_completion_tokens, data)
    samples, left_out = _read_spoken(folder, steps, bool(config.tools or config.environments))
    _check_same(samples, data, config.environments, str(folder))
    results = [judge_step(rows, data, judges, config.train.steps) for rows in samples]
    console, summing = Console(highlight=False), reward_sum(configs.to_tables(config))
    print_failures(console, ChainMap(*(scored.log.messages for scored in results)))
    numbers = [entry for scored in results for entry in compare_step(scored, judges, summing)]
    if out:
        write_rows(out, (line for scored in results for line in _lines(scored)))
    if as_json:
        return Document({"left_out": left_out, "rows": numbers})
    _show(console, numbers, left_out)
    return 0


def _read_spoken(
    folder: Place, steps: Sequence[int], is_answered: bool
) -> tuple[list[list[dict[str, Any]]], int]:
    """The samples of each step whose completions are known as rewards get them, and how many are
    not. Raises: InputError where none is."""
    left_out, samples = 0, []
    for step in steps:
        rows = read_step(folder, step)
        spoken = [row for row in rows if "messages" in row or not (is_answered or "turns" in row)]
        left_out += len(rows) - len(spoken)
        samples += [spoken] if spoken else []
    if not samples:
        raise InputError(
            f"{folder}: no conversation was saved with its samples, as by older versions and where "
            "rollouts wait (rollout.staleness): rewards would see other completions than in "
            "training"
        )
    return samples, left_out


def find_judges(
    entries: Sequence[RewardKeys], max_completion_tokens: int, data: Sequence[Row]
) -> tuple[Reward, ...]:
    """The rewards that entries of a config name.

    Args:
      data: rows of the run's data set; none: they are from Python.

    Raises: InputError where one does not exist, or asks for what is not there.
    """
    judges = resolve_rewards(entries, max_completion_tokens)
    for judge in judges:
        if reads_any(judge.function, COLUMNS):
            raise InputError(
                f"rewards.{judge.name} reads the environments of samples, which are gone with the "
                "run: take a reward that reads completions"
            )
        try:
            check(judge.name, judge.function, _columns(data))
        except RewardError as error:
            if data:
                raise
            remedy = "the run got its rows from Python: save them to a file, --set data.path=FILE"
            raise InputError(f"{error}; {remedy}") from error
    return judges


def _columns(data: Sequence[Row]) -> list[str]:
    """The columns that rewards get."""
    return [name for name in data[0] if name != "prompt"] if data else []


def judge_step(
    rows: list[dict[str, Any]],
    data: Sequence[Row],
    judges: Sequence[Reward],
    max_steps: int,
) -> StepScores:
    """Calls rewards once on the samples of a step, but those whose environment broke: NaN.

    Args:
      rows: of the step's file of samples.
      data: rows of the run's data set; none: rewards get no columns.
      max_steps: of the run, for the rewards' `trainer_state`.
    """
    ordinals = list(dict.fromkeys(row["ordinal"] for row in rows))
    places = np.flatnonzero([not row.get("problem") for row in rows])
    sound = [rows[place] for place in places.tolist()]
    texts = Texts(
        [row["prompt"] for row in sound],
        [row["completion"] for row in sound],
        [row["completion_ids"] for row in sound],
        [ordinals.index(row["ordinal"]) for row in sound],
        [row["messages"] for row in sound if "messages" in row],
    )
    columns = {name: [data[row["row"]][name] for row in sound] for name in _columns(data)}
    step = rows[0]["step"] - 1
    progress = step_progress(step, min(ordinals), len(ordinals), len(data), max_steps)
    scores, log = call_on_texts(judges, texts, columns, progress)
    table = among_all(scores, places, len(rows))
    return StepScores(rows, table, merge_logs([log], [places], len(rows), 1))


def compare_step(
    scored: StepScores, judges: Sequence[Reward], summing: RewardSum
) -> Iterator[dict[str, Any]]:
    """The numbers of each new reward, and of their sum, beside the sum of the old ones.

    Args:
      summing: how the run adds up rewards.
    """
    group = np.array([row["ordinal"] for row in scored.rows])
    old = _totals(scored.rows, summing, group)
    new = {name: values.astype(float) for name, values in scored.scores.items()}
    if len(judges) > 1:
        weights = {judge.name: judge.weight for judge in judges}
        judged = zip(*new.values(), strict=True)
        rows = [{"rewards": dict(zip(new, values, strict=True))} for values in judged]
        new |= {TOTAL: _totals(rows, RewardSum(weights, summing.adds_scored), group)}
    for name, values in new.items():
        numbers: Agreement = agreement.compare(old, values, group)
        yield {"step": scored.rows[0]["step"], "reward": name, **numbers._asdict()}


def _totals(rows: Sequence[Row], summing: RewardSum, group: np.ndarray) -> np.ndarray:
    """The sum of each row's rewards, as a chain takes it (`added`); NaN where there is none."""
    terms = [weighted_rewards(row, summing) for row in rows]
    numbers, places = np.unique(group, return_inverse=True)
    ranks = [int((group[:place] == group[place]).sum()) for place in range(len(group))]
    longest = max(1, *(len(parts or ()) for parts in terms))
    table = np.zeros((longest, len(numbers), max(ranks) + 1), np.float32)
    mask = np.zeros(table.shape[1:], bool)
    for parts, place, rank in zip(terms, places, ranks, strict=True):
        table[: len(parts or ()), place, rank] = parts or ()
        mask[place, rank] = parts is not None
    totals = np.asarray(_add([*jnp.asarray(table)], jnp.asarray(mask)))
    return np.where(mask, totals, np.nan)[places, ranks].astype(float)


def _check_same(
    samples: Sequence[Sequence[Row]],
    data: Sequence[Row],
    environments: Mapping[str, str],
    where: str,
) -> None:
    """Raises: InputError where the data set has another prompt for a saved sample.

    Args:
      samples: of each step.
      data: rows of the run's data set; none: they are from Python.
      environments: of the run. What a program asks first is the prompt, whatever the row says.
      where: opens messages.
    """
    rows = itertools.chain.from_iterable(samples if data else ())
    strays = [row for row in rows if not _has_its_prompt(row, data)]
    if strays and _has_program(environments):
        strays = [row for row in strays if row["row"] >= len(data)]
    if not strays:
        return
    row = strays[0]
    number, current = row["row"], "no such row"
    if 0 <= number < len(data):
        current = repr(shown(data[number]["prompt"])[:SHOWN])
    raise InputError(
        f"{where}: its data has another prompt in row {number} than the samples of step "
        f"{row['step']}: {current} and not {shown(row['prompt'])[:SHOWN]!r}; give the data that it "
        "was trained on, --set data.path=..."
    )


def _has_its_prompt(row: Row, data: Sequence[Row]) -> bool:
    """Whether a saved sample has the prompt of its row; what `reset` said may follow it."""
    if not 0 <= row["row"] < len(data):
        return False
    saved, current = row["prompt"], plain(data[row["row"]]["prompt"])
    return current == saved or ("messages" in row and shown(saved).startswith(shown(current)))


def _has_program(environments: Mapping[str, str]) -> bool:
    """Whether a program asks for turns; not where own code cannot be loaded any more."""
    with contextlib.suppress(InputError):
        return any(map(is_program, load_environments(environments).values()))
    return False


def _lines(scored: StepScores) -> Iterator[dict[str, Any]]:
    """A line of --out for each sample: its place, what was saved and what is said now."""
    for place, row in enumerate(scored.rows):
        logged = {name: values[place] for name, values in scored.log.extra.items()}
        yield {
            **{name: row[name] for name in ("step", "ordinal", "row", "sample")},
            "saved": row["rewards"],
            "rewards": {name: float(values[place]) for name, values in scored.scores.items()},
            **({"extra": logged} if logged else {}),
        }


def _show(console: Console, numbers: Sequence[Row], left_out: int) -> None:
    """Prints the table and what its columns mean."""

    def cell(value: Any, form: str) -> str:
        return f"{value:{form}}" if is_number(value) else "–"

    rows = [
        [
            *(str(entry["step"]), visible(entry["reward"])),
            *(cell(entry[name], ".3f") for name in ("old_mean", "new_mean", "spearman")),
            *(cell(entry[name], ".1%") for name in ("sign_changed", "rank_changed")),
            *(str(entry[name]) for name in ("unscored", "now_flat", "now_informative")),
        ]
        for entry in numbers
    ]
    show_table(console, [HEAD, *rows], text=(1,), collapse_padding=True, **LOOK)
    reason = {"left out": f"{left_out} samples, whose conversations were not saved"}
    facts(console, LEGEND | (reason if left_out else {}))
