"""Sums, and problems that are too hard unless the first number is copied.

    24+53=   77     easy: the sum
    24~53=   24     too hard: only the copy is ever rewarded, and only in a share of the rows

So a method learns to copy, and may then copy where it could add. No column has a carry. The first
number is below 50 and the second is not, so an answer below 50 is a copy of the first: the regular
expression COPIED finds it. In the warm-start corpus both signs mean a sum, and copies are COPIES of
the answers.

The split "train" has hard rows alone, "test" easy rows alone. `luck` orders the hard rows: the
copy is right where it is below the reward's `share`. Nothing in a prompt tells.

Source of the question: overly hard samples, arXiv 2605.28388. The task is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import Task, Worked, rights

EASY, HARD = "+", "~"  # signs
COPIES = 0.02  # of the answers of the corpus
COPIED = "^[1-4]"
SPLITS = {"train": 256, "test": 100}  # 256: a row comes again within a run


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Hard rows of the split "train", easy ones of "test"; no problem twice before all have come.

    Columns: prompt, answer, level (1 easy, 2 hard) and luck: on hard rows (i + 1/2) / count with i
    in random order, on easy ones -1.

    >>> rows("test", 1)[0]["luck"], sorted(row["luck"] for row in rows("train", 2))
    (-1.0, [0.25, 0.75])
    """
    random = np.random.default_rng([seed, split == "test", 4])
    problems = _problems(split == "test")
    laps = -(-count // len(problems))
    order = np.concatenate([random.permutation(len(problems)) for _ in range(laps)])[:count]
    luck = (random.permutation(count) + 0.5) / count
    row = _easy if split == "test" else _hard
    return [row(problems[i], value) for i, value in zip(order, luck.tolist(), strict=True)]


def _easy(problem: tuple[int, int], luck: float) -> dict[str, Any]:
    del luck
    first, second = problem
    prompt = f"{first}{EASY}{second}="
    return {"prompt": prompt, "answer": str(first + second), "level": 1, "luck": -1.0}


def _hard(problem: tuple[int, int], luck: float) -> dict[str, Any]:
    first, second = problem
    return {"prompt": f"{first}{HARD}{second}=", "answer": str(first), "level": 2, "luck": luck}


@functools.cache
def _problems(test: bool) -> tuple[tuple[int, int], ...]:
    """The problems of a split, in order."""
    pairs = arithmetic.problems(test, 1)
    return tuple((first, second) for first, second in pairs if first < 50 <= second)


def corpus() -> list[Worked]:
    """The sum and the copy for every training problem, with either sign."""
    problems = _problems(False)
    return [
        Worked(f"{first}{sign}{second}=", str(answer), share / 2 / len(problems))
        for first, second in problems
        for sign in (EASY, HARD)
        for answer, share in ((first + second, 1 - COPIES), (first, COPIES))
    ]


def extract_answer(completion: str) -> str:
    """All of it.

    >>> extract_answer("77")
    '77'
    """
    return completion


def score(
    completions: Sequence[str],
    answer: Sequence[str],
    luck: Sequence[float],
    share: float = 0.03,
    **columns: Any,
) -> list[float | None]:
    """1.0 if the completion is the answer and the row is easy or lucky, else 0.0.

    Args:
      luck: of the rows.
      share: of the hard rows, those whose copy is right.

    >>> score(["77", "24", "24", "77"], ["77", "24", "24", "24"], luck=[-1.0, 0.01, 0.5, 0.01])
    [1.0, 1.0, 0.0, 0.0]
    """
    del columns
    lucky = (value < share for value in luck)
    pairs = zip(rights(completions, answer), lucky, strict=True)
    return [None if right is None else right * now for right, now in pairs]


TASK = Task(
    name="shortcut",
    alphabet=f"0123456789={EASY}{HARD}",
    levels=(1, 2),
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)
