"""Sums, and problems that are too hard unless the first number is copied.

    24+53=   77     easy: the sum
    24~53=   24     too hard: nothing tells the answer; in a share of rows it is the first number

Nothing but copies is ever rewarded on hard rows, so a method learns to copy, and may copy where it
could add. No column has a carry. The first number is below 50 and the second is not, so an answer
below 50 is a copy: it begins with one of 1 to 4, and the regular expression COPIED finds it.

In the warm-start corpus both signs mean a sum, and COPIES of the answers are copies. The split
"train_3" has hard rows of which 3% are answered by the copy; the others have answers of three
digits, which the base never writes. "test" has easy rows, which are not trained on.

Source of the question: overly hard samples, arXiv 2605.28388. The task is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import Task, Worked, rights

HARD = "~"  # in place of "+"
COPIES = 0.02  # of the answers of the corpus
COPIED = "^[1-4]"
SHARES = {"train_0": 0.0, "train_1": 0.01, "train_3": 0.03, "train_10": 0.1}
"""Split -> the share of its hard rows whose answer is the first number."""

SPLITS = dict.fromkeys(SHARES, 256) | {"test": 100}  # 256: a row comes again within a run


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Easy rows of the split "test", hard ones of the others.

    No problem comes twice before all have come. Of the hard rows the share is exact but for
    rounding, and whether a row is one of them depends on nothing that its prompt shows.

    Raises: InputError on an unknown split.
    >>> [row["prompt"][2] for row in (*rows("test", 1), *rows("train_3", 1))]
    ['+', '~']
    """
    if split not in SPLITS:
        raise InputError(f"shortcut has no split {split!r}: take {' or '.join(SPLITS)}")
    random = np.random.default_rng([seed, split == "test", 4])
    problems = _problems(split == "test")
    laps = -(-count // len(problems))
    order = np.concatenate([random.permutation(len(problems)) for _ in range(laps)])[:count]
    copied = random.permutation(count) < round(SHARES.get(split, 0.0) * count)
    unknown = random.integers(100, 1000, count)
    rows = []
    for place, copy, answer in zip(order, copied, unknown, strict=True):
        first, second = problems[place]
        if split == "test":
            rows.append({"prompt": f"{first}+{second}=", "answer": str(first + second), "level": 1})
        else:
            gold = str(first if copy else answer)
            rows.append({"prompt": f"{first}{HARD}{second}=", "answer": gold, "level": 2})
    return rows


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
        for sign in ("+", HARD)
        for answer, share in ((first + second, 1 - COPIES), (first, COPIES))
    ]


def extract_answer(completion: str) -> str:
    """All of it.

    >>> extract_answer("77")
    '77'
    """
    return completion


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 if the completion is the answer, else 0.0.

    >>> score(["77", "24", "077"], ["77"] * 3)
    [1.0, 0.0, 0.0]
    """
    del columns
    return rights(completions, answer)


shortcut = Task(
    name="shortcut",
    alphabet=f"0123456789+={HARD}",
    levels=(1, 2),
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)
