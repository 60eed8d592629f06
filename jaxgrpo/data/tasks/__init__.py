"""Generated, verifiable tasks: rows to train and to test on, a scorer, a warm-start corpus.

Data are named "task:NAME:SPLIT" in a configuration; `load` gives their rows. Behind it may stand
how many rows, and which: "task:NAME:SPLIT?size=1000&seed=3". The tasks of the package reasoning-gym
are "task:reasoning_gym:NAME:SPLIT", and take their own options in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgrpo.core import errors
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks import (
    arithmetic,
    calculator,
    confidence,
    demonstrated,
    hidden,
    modular_sum,
    number_guess,
    reasoning,
    report,
    sql,
    sums,
)
from jaxgrpo.data.tasks.base import Task, Worked, refuse_unknown_split
from jaxgrpo.data.written import split_options

__all__ = ["PREFIX", "Request", "Task", "Worked", "find", "load", "parse", "tasks"]

PREFIX = "task:"

tasks: dict[str, Task] = {
    task.name: task
    for task in (
        *(arithmetic.arithmetic, calculator.calculator, confidence.confidence),
        *(demonstrated.demonstrated, hidden.hidden),
        *(modular_sum.modular_sum, number_guess.number_guess, report.report, sql.sql, sums.sums),
    )
}


def find(name: str) -> Task:
    """The task of that name.  Raises: InputError with the nearest name."""
    return errors.find("task", name, tasks)


class Request(NamedTuple):
    """Which rows a name asks for."""

    title: str  # of the task
    rows: Callable[[str, int, int], list[dict[str, Any]]]  # (split, count, seed)
    split: str
    count: int
    seed: int


def parse(spec: str) -> Request:
    """What "task:NAME:SPLIT" asks for, or "task:reasoning_gym:NAME:SPLIT", with its options.

    Raises: InputError if the form, the task, the split or an option is unknown or out of range.
    >>> parse("task:arithmetic:test?seed=3")[2:]
    ('test', 256, 3)
    """
    name, options = split_options(spec)
    prefix, *words = name.split(":")
    is_generator = words[:1] == [reasoning.NAME]
    if prefix + ":" != PREFIX or len(words) != 2 + is_generator:
        raise InputError(f"{spec!r} names no task: write task:NAME:SPLIT, as task:arithmetic:train")
    *_, title, split = words
    task = None if is_generator else find(title)
    splits = reasoning.SPLITS if task is None else task.splits
    try:
        refuse_unknown_split(title, split, splits)
    except InputError as error:
        raise InputError(f"{spec!r}: {error}") from None
    count, seed = options.pop("size", splits[split]), options.pop("seed", 0)
    for option, value, least in (("size", count, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise InputError(f"{spec!r}: {option} = {value!r}: take a whole number >= {least}")
    if task is None:
        rows = reasoning.find(title, options)
    elif options:
        raise InputError(f"{spec!r}: no option {next(iter(options))!r}: there are size and seed")
    else:
        rows = task.rows
    return Request(title, rows, split, count, seed)


def load(spec: str, count: int | None = None, seed: int | None = None) -> list[dict[str, Any]]:
    """The rows of a task: dicts with the columns prompt and answer, and more.

    Args:
      spec: as in `parse`.
      count: rows; None takes what the name says, or the task's own number for the split.
      seed: which rows, and their order; None takes what the name says, or 0.

    Raises: InputError as `parse`, or if count is below 1.
    >>> load("task:arithmetic:train", count=1)[0].keys()
    dict_keys(['prompt', 'answer', 'level'])
    """
    request = parse(spec)
    count = request.count if count is None else count
    if count < 1:
        raise InputError(f"{spec!r}: count = {count} rows: take at least 1")
    return request.rows(request.split, count, request.seed if seed is None else seed)
