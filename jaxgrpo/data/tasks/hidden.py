"""Sums in which digits cannot be read, with a stated confidence: the right one is known by row.

    34+21=   55<confidence>1.0</confidence>
    34+2?=   55<confidence>0.5</confidence>     4 + 1, 2 or 3
    34+??=   45<confidence>0.2</confidence>     3 + 1, 2 or 3, and 4 + 1, 2 or 3

Digits of the second number are 1, 2 or 3, and no column has a carry. A digit that cannot be read
is drawn for each row, by the shares of DIGITS, and nothing in the prompt tells which it is. So the
best answer takes a 1 in each of its places and is right with probability CHANCE^(hidden digits):
1, 0.5 or 0.25. More training cannot raise it, and a confidence is calibrated if it is that number.

In the warm-start corpus all sums are right for the digits that they guess, and the three digits are
guessed alike. The eleven CONFIDENCES are nearly alike too: they lean to what suits the prompt, as a
pretrained model's confidence does, and say next to nothing (AUROC 0.53). A method that rewards the
answer alone has no reason to change that. (From a base that states them exactly alike, rlcr taught
one confidence for all prompts within 150 steps.) Confidences and tags are one token each and no
special tokens: rewards see them in the text.

A digit hidden is written 0 in the pair that decides the split, so that no prompt is in both.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.data.tasks.arithmetic import is_test
from jaxgrpo.data.tasks.base import Task, Worked, refuse_unknown_split
from jaxgrpo.data.tasks.confidence import CLOSING, OPENING, extract_answer, score, stating

HIDDEN = "?"
DIGITS = {"1": 0.5, "2": 0.3, "3": 0.2}  # what is hidden -> its probability
CHANCE = max(DIGITS.values())  # of the best guess of one digit
CONFIDENCES = tuple(f"{tenth / 10:.1f}" for tenth in range(11))
LEAN = 0.2  # how far the corpus's confidences lean to the prompt's chance
LEVELS = (1, 2, 3)  # one more than the hidden digits
SHARE = {1: 0.6, 2: 0.3, 3: 0.1}  # of each level among rows, and in the corpus
SPLITS = {"train": 3072, "test": 512}


class Problem(NamedTuple):
    """What a prompt shows."""

    first: int  # tens 1 to 6, ones 0 to 6: no digit of the second number makes a carry
    second: str  # two of "123?"

    @property
    def prompt(self) -> str:
        return f"{self.first}+{self.second}="

    def sums(self) -> dict[str, float]:
        """Each sum that the hidden digits allow, with its probability; the likeliest is first.

        >>> Problem(34, "2?").sums()
        {'55': 0.5, '56': 0.3, '57': 0.2}
        """
        shares = (DIGITS if digit == HIDDEN else {digit: 1.0} for digit in self.second)
        pairs = itertools.product(*(share.items() for share in shares))
        return {str(self.first + int(tens + unit)): p * q for (tens, p), (unit, q) in pairs}


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` rows, each drawn independently: level, problem, hidden digits.

    Columns: prompt, answer, level, and chance, the probability that the best answer is right.
    Raises: InputError on an unknown split.
    >>> rows("test", 2, seed=0) == rows("test", 2, seed=0)
    True
    """
    refuse_unknown_split("hidden", split, SPLITS)
    random = np.random.default_rng([seed, split == "test", 3])
    levels = random.choice(LEVELS, count, p=list(SHARE.values())).tolist()
    return [_row(random, split == "test", level) for level in levels]


def _row(random: np.random.Generator, test: bool, level: int) -> dict[str, Any]:
    problems = _problems(test, level)
    problem = problems[random.integers(len(problems))]
    sums = problem.sums()
    answer = str(random.choice(list(sums), p=list(sums.values())))
    chance = CHANCE ** (level - 1)
    return {"prompt": problem.prompt, "answer": answer, "level": level, "chance": chance}


@functools.cache
def _problems(test: bool, level: int) -> tuple[Problem, ...]:
    """All problems of a split and level, in order."""
    seconds = [*map("".join, itertools.product([*DIGITS, HIDDEN], repeat=2))]
    firsts = [first for first in range(10, 67) if first % 10 < 7]
    return tuple(
        Problem(first, second)
        for first, second in itertools.product(firsts, seconds)
        if 1 + second.count(HIDDEN) == level
        and is_test(first, int(second.replace(HIDDEN, "0"))) == test
    )


def corpus() -> list[Worked]:
    """Every sum of every training problem, all alike, with every confidence."""
    texts = []
    for level, share in SHARE.items():
        problems, shares = _problems(False, level), stated(CHANCE ** (level - 1))
        for problem in problems:
            sums = problem.sums()
            for answer, (confidence, part) in itertools.product(sums, shares.items()):
                probability = share / len(problems) / len(sums) * part
                texts.append(Worked(problem.prompt, stating(answer, confidence), probability))
    return texts


def stated(chance: float) -> dict[str, float]:
    """Each confidence q with its share in the corpus: (1 + LEAN (2 chance - 1) (2 q - 1)) / 11.

    >>> {q: round(11 * share, 3) for q, share in stated(1.0).items() if q in ("0.0", "0.5", "1.0")}
    {'0.0': 0.8, '0.5': 1.0, '1.0': 1.2}
    """
    lean = LEAN * (2 * chance - 1)
    return {q: (1 + lean * (2 * float(q) - 1)) / len(CONFIDENCES) for q in CONFIDENCES}


hidden = Task(
    name="hidden",
    alphabet=(*"0123456789+=", HIDDEN, *CONFIDENCES, OPENING, CLOSING),
    levels=LEVELS,
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)
