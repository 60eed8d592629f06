"""A contest: contenders timed in turn, their ratios, and the table and numbers that come of it.

A benchmark states its contenders and what a row says of each; arguments, heading, timing and
printing are the same in all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import Interval, describe, interval, timed

Outcome = TypeVar("Outcome")

Row = tuple[str, Sequence[str], Mapping[str, Any]]
"""What the row is about, its other cells, and its numbers by what they measure."""


def parser(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a module, with its lines as they stand."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)


def names(text: str) -> list[str]:
    """The type of an argument that is a list with commas between; empty: none."""
    return text.split(",") if text else []


def begin(width: int = 110, **more: Any) -> tuple[dict[str, Any], Console]:
    """Prints device, version and commit. Returns them, and the console for what follows.

    Args:
      width: of the console.
      more: what to say instead of what `describe` does.
    """
    about, console = describe() | more, Console(width=width)
    console.print(f"{about['device']}, jax {about['jax']}, commit {about['commit']}")
    return about, console


def timer(call: Callable[..., Any], *arguments: Any) -> Callable[[int], float]:
    """A contender: seconds of a call, the median of five behind one that is not timed.

    The first one puts the threads of another contender to sleep.
    """
    return lambda _: float(np.median([timed(call, *arguments)[1] for _ in range(6)][1:]))


def in_turn(
    contenders: Mapping[str, Callable[[int], Outcome]], rounds: int, warm_up: int = 0
) -> dict[str, list[Outcome]]:
    """What each returns of each round, so that a busy machine is busy for all.

    Args:
      contenders: functions of the number of the round, from 1, which may be a seed.
      warm_up: rounds before, whose outcomes are left out.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contenders}
    for number in range(1 - warm_up, rounds + 1):
        for name, run in contenders.items():
            outcome = run(number)
            if number > 0:
                outcomes[name].append(outcome)
    return outcomes


def over(upper: Iterable[float], lower: Iterable[float]) -> Interval:
    """The ratio of two contenders, round by round."""
    return interval([above / below for above, below in zip(upper, lower, strict=True)])


def within(value: float, limit: float | None) -> str:
    """Whether a limit is kept, as a cell; empty where there is none."""
    return "" if limit is None else "yes" if value <= limit else "NO"


def show(
    console: Console, columns: Sequence[str], rows: Iterable[Row], title: str | None = None
) -> dict[str, Any]:
    """Prints a table when all its rows are measured. Returns their numbers as "MEASURE/NAME"."""
    table, numbers = Table(*columns, title=title), {}
    for name, cells, measures in rows:
        table.add_row(name, *cells)
        numbers |= {f"{measure}/{name}": value for measure, value in measures.items()}
    console.print(table)
    return numbers
