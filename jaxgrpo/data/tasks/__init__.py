"""Generated, verifiable tasks: rows to train and to test on, a scorer, a warm-start corpus.

Data are named "task:NAME:SPLIT" in a configuration; `load` gives their rows.
"""

from __future__ import annotations

from typing import Any

from jaxgrpo.core import errors
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks import arithmetic, calculator, confidence, hidden, report, sql, sums
from jaxgrpo.data.tasks.base import Task, Worked

__all__ = ["PREFIX", "Task", "Worked", "find", "load", "tasks"]

PREFIX = "task:"

tasks: dict[str, Task] = {
    task.name: task
    for task in (
        *(arithmetic.arithmetic, calculator.calculator, confidence.confidence, hidden.hidden),
        *(report.report, sql.sql, sums.sums),
    )
}


def find(name: str) -> Task:
    """The task of that name.  Raises: InputError with the nearest name."""
    return errors.find("task", name, tasks)


def load(spec: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of "task:NAME:SPLIT": dicts with the columns prompt, answer and level.

    Args:
      count: rows; None takes the task's own number for the split.
      seed: which rows, and their order.

    Raises: InputError if the form, the task or the split is unknown, or count is below 1.
    >>> load("task:arithmetic:train", count=1)[0].keys()
    dict_keys(['prompt', 'answer', 'level'])
    """
    parts = spec.split(":")
    if len(parts) != 3 or parts[0] + ":" != PREFIX:
        raise InputError(f"{spec!r} names no task: write task:NAME:SPLIT, as task:arithmetic:train")
    task, split = find(parts[1]), parts[2]
    if split not in task.splits:
        raise InputError(f"{spec!r}: no split {split!r}: take {' or '.join(task.splits)}")
    count = task.splits[split] if count is None else count
    if count < 1:
        raise InputError(f"{spec!r}: count = {count} rows: take at least 1")
    return task.rows(split, count, seed)
