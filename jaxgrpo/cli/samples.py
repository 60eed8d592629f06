"""`jaxgrpo samples`: what a run's policy wrote at a step, with rewards, advantage and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place
from jaxgrpo.training.records.console import Document
from jaxgrpo.training.records.reading import is_number, read_samples, sample_steps
from jaxgrpo.training.records.report.record import (
    RewardSum,
    mean_advantage,
    read_run,
    reward_sum,
    shown,
    total_reward,
    visible,
)

LIMIT = 10
NEAREST = 4  # steps that a message names

Row = Mapping[str, Any]


def show_samples(
    run: str,
    step: int | None = None,
    sort: str | None = None,
    ascending: bool = False,
    contains: str | None = None,
    limit: int = LIMIT,
    as_json: bool = False,
) -> int | Document:
    """Prints samples of a step of a run, whole. Returns the exit code.

    Args:
      step: that has a file of samples; None: the newest.
      sort: "reward" (the weighted sum), "length" in tokens, or "advantage"; the largest first, and
        those without the number last. None: as they were drawn.
      ascending: the smallest first.
      contains: a text that the prompt or the completion must hold, as it stands.
      limit: how many to print at most.

    Raises: InputError if the run or the step has no samples.
    """
    if limit < 1:
        raise InputError(f"--limit {limit}: expected 1 or more")
    if ascending and sort is None:
        raise InputError("--ascending: of what? give --sort reward, length or advantage")
    folder = storage.place_as_named(run)
    record = read_run(folder)
    rows = read_step(folder, find_steps(folder, step)[-1])
    summing = reward_sum(record.config)
    matching = [row for row in rows if contains is None or _holds(row, contains)]
    if sort is not None:
        matching = ordered(matching, measures(summing)[sort], ascending)
    if as_json:
        return Document(_document(rows, matching, limit, summing))
    console = Console(highlight=False)
    for row in matching[:limit]:
        console.print(_title(row, summing), soft_wrap=True)
        console.print(Text(visible(shown(row["prompt"])), style="dim"), soft_wrap=True)
        console.print(Text(visible(shown(row["completion"]))), soft_wrap=True, end="\n\n")
    console.print(_summary(rows, matching, limit, sort, ascending), markup=False, soft_wrap=True)
    return 0


def measures(summing: RewardSum) -> dict[str, Callable[[Row], float | None]]:
    """What samples can be sorted by -> the number of a row; None where it has none."""
    return {
        "reward": lambda row: total_reward(row, summing),
        "length": lambda row: len(row["completion_ids"]),
        "advantage": lambda row: mean_advantage(row["advantage"]),
    }


def ordered(
    rows: Sequence[Row], measure: Callable[[Row], float | None], ascending: bool
) -> list[Row]:
    """The rows by a number, equal ones as they stood; those without it last."""
    pairs = [(measure(row), row) for row in rows]
    sign = 1 if ascending else -1
    pairs.sort(key=lambda entry: (entry[0] is None, sign * (entry[0] or 0.0)))
    return [row for _, row in pairs]


def find_steps(folder: Place, step: int | None) -> list[int]:
    """The steps of a run that have samples, or the one that is asked for.

    Raises: InputError if there are none, naming the nearest that have some.
    """
    steps = sorted(sample_steps(folder))
    if not steps:
        raise InputError(
            f"{folder}: the run has no samples yet; run.samples_every says after how many steps it "
            "writes some"
        )
    if step is not None and step not in steps:
        near = sorted(sorted(steps, key=lambda candidate: abs(candidate - step))[:NEAREST])
        raise InputError(
            f"--step {step}: {folder} has no samples of it; the nearest steps that have some are "
            f"{', '.join(map(str, near))}, the last is {steps[-1]}"
        )
    return steps if step is None else [step]


def read_step(folder: Place, step: int) -> list[dict[str, Any]]:
    """The samples of a step that has a file of them. Raises: InputError where it is empty."""
    rows = read_samples(folder, step)
    if not rows:
        file = folder / "samples" / f"step_{step}.jsonl"
        raise InputError(f"{file} holds no sample: take the file away, or give another --step")
    return rows


def _holds(row: Row, text: str) -> bool:
    return any(text in shown(row[name]) for name in ("prompt", "completion"))


def _title(row: Row, summing: RewardSum) -> Text:
    """One line with the place of a sample and all its numbers."""
    total, mean = total_reward(row, summing), mean_advantage(row["advantage"])
    rewards = ", ".join(
        f"{visible(name)} {_number(value, '.4g')}" for name, value in row["rewards"].items()
    )
    parts = [
        f"row {row['row']}, sample {row['sample']}",
        f"reward {_number(total, '.4g')}" + (f" ({rewards})" if rewards else ""),
        f"advantage {_number(mean, '+.3g')}",
        f"{len(row['completion_ids'])} tokens" + (", cut" if row["truncated"] else ""),
    ]
    return Text(" · ".join(parts), style="bold")


def _document(
    rows: Sequence[Row], matching: Sequence[Row], limit: int, summing: RewardSum
) -> dict[str, Any]:
    """What `show_samples` prints, for --json."""
    names = ("row", "sample", "prompt", "completion", "rewards", "truncated")
    numbers = measures(summing)
    return {
        "step": rows[0]["step"],
        "samples": len(rows),
        "matching": len(matching),
        "shown": [
            {name: row[name] for name in names}
            | {name: measure(row) for name, measure in numbers.items()}
            for row in matching[:limit]
        ],
    }


def _number(value: Any, form: str) -> str:
    return f"{value:{form}}" if is_number(value) else "–"


def _summary(
    rows: Sequence[Row], matching: Sequence[Row], limit: int, sort: str | None, ascending: bool
) -> str:
    first = f", {'lowest' if ascending else 'highest'} {sort} first" if sort else ""
    fit = "" if len(matching) == len(rows) else f" {len(matching)} that hold the text, of"
    more = "; --limit shows more" if len(matching) > limit else ""
    count = min(len(matching), limit)
    return f"{count} of{fit} {len(rows)} samples of step {rows[0]['step']}{first}{more}"
