r"""Sums whose answers can be written in three formats, of which each has its own success rate.

    24+53=   77      plain, the digits
             r77     from the right: the ones come first
             s7 7    spaced

No column has a carry. In the warm-start corpus the shares of the formats and the probabilities that
an answer in one is right are those of FORMATS: the format most often written is the one most often
wrong. A wrong answer has one more or one less in the tens. PATTERNS are the formats' regular
expressions, for `eval.formats`.

Source of the question: Echo Chamber, arXiv 2504.07912. The task is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import Task, Worked, rights


class Format(NamedTuple):
    """How an answer is written, and how often the corpus does so."""

    text: str  # with {0} for the tens and {1} for the ones
    share: float
    success: float  # the probability that it is right


FORMATS = {
    "plain": Format("{0}{1}", 0.6, 0.5),
    "reversed": Format("r{1}{0}", 0.3, 0.7),
    "spaced": Format("s{0} {1}", 0.1, 0.9),
}
PATTERNS = {"plain": "^[0-9]", "reversed": "^r", "spaced": "^s"}
SPLITS = {"train": 1024, "test": 256}


def write(number: int, name: str) -> str:
    """A number of two digits in a format.

    >>> [write(73, name) for name in FORMATS]
    ['73', 'r37', 's7 3']
    """
    return FORMATS[name].text.format(*divmod(number, 10))


NUMBERS = {write(number, name): str(number) for name in FORMATS for number in range(10, 100)}
"""Every answer in a format -> the number."""


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` problems of a split, none twice before all have come."""
    problems = arithmetic.problems(split == "test", 1)
    random = np.random.default_rng([seed, split == "test", 5])
    laps = -(-count // len(problems))
    order = np.concatenate([random.permutation(len(problems)) for _ in range(laps)])[:count]
    pairs = (problems[place] for place in order)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": 1} for a, b in pairs]


def corpus() -> list[Worked]:
    """The answers of every training problem in each format, right ones and wrong ones."""
    problems = arithmetic.problems(False, 1)
    return [
        Worked(f"{a}+{b}=", write(a + b + offset, name), form.share * chance / len(problems))
        for a, b in problems
        for name, form in FORMATS.items()
        for offset, chance in _chances(a + b, form.success).items()
    ]


def _chances(number: int, success: float) -> dict[int, float]:
    """What answers are off by -> probability; wrong ones have two digits too."""
    wrong = [offset for offset in (-10, 10) if 10 <= number + offset < 100]
    return {0: success} | {offset: (1 - success) / len(wrong) for offset in wrong}


def extract_answer(completion: str) -> str:
    """The number, whatever its format; what is in none of them stays as it is.

    >>> [extract_answer(text) for text in ("73", "r37", "s7 3", "s73", "r7 3")]
    ['73', '73', '73', 's73', 'r7 3']
    """
    return NUMBERS.get(completion, completion)


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if the completion is the answer in one of the formats, else 0.0.

    >>> score(["73", "r37", "s7 3", "r73"], ["73"] * 4)
    [1.0, 1.0, 1.0, 0.0]
    """
    del columns
    return rights(map(extract_answer, completions), answer)


TASK = Task(
    name="formats",
    alphabet="0123456789+= rs",
    levels=(1,),
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)
