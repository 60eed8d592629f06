"""The arithmetic task with a stated confidence, to learn calibration on.

    47+38=   7+8=15 4+3+1=8 85<confidence>0.9</confidence>
    47~38=   7+8=15 4+3+1=8 85<confidence>0.5</confidence>

Problems, levels and careless solutions are those of `arithmetic`. Half of the problems have the
sign "~": about equal. Their answer is the sum or one more, by a coin of each row, which nothing in
the prompt tells. Who adds without a mistake is always right about "+", and half of the time about
"~". Without such noise all problems are solved in the end, and the right confidence is a constant.

In the warm-start corpus a solution, right or careless, ends with each of the CONFIDENCES of its
sign. They lean by a tenth to what suits the sign, as a pretrained model's confidence does, and say
next to nothing: AUROC 0.50. What a method for calibration has to teach is to say which problems are
noise. (From a base that cannot tell the signs apart at all, 240 steps taught one confidence for
both: the reward of one token in twenty is too faint to find the sign by.)

The tags are one token each and no special tokens: rewards see them in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks.arithmetic import arithmetic
from jaxgrpo.data.tasks.base import Task, Worked, rights

NOISY = "~"  # in place of "+" where the answer is the sum or one more
OPENING, CLOSING = "<confidence>", "</confidence>"
CONFIDENCES = {
    "+": {"0.1": 0.3, "0.5": 0.3, "0.9": 0.4},
    NOISY: {"0.1": 0.3, "0.5": 0.4, "0.9": 0.3},
}
"""The share of each confidence in the corpus, by sign: all far from certain of what they say."""


def stating(solution: str, confidence: str) -> str:
    """A solution that ends with a confidence.

    >>> stating("6+1=7 17", "0.9")
    '6+1=7 17<confidence>0.9</confidence>'
    """
    return f"{solution}{OPENING}{confidence}{CLOSING}"


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of arithmetic, each with the sign "~" by a coin, and then one more by another.

    Raises: InputError on an unknown split.
    """
    random = np.random.default_rng([seed, split == "test", 1])
    coins = random.integers(2, size=(count, 2)).tolist()
    pairs = zip(arithmetic.rows(split, count, seed), coins, strict=True)
    return [_with_noise(row, increment) if noisy else row for row, (noisy, increment) in pairs]


def _with_noise(row: dict[str, Any], increment: int) -> dict[str, Any]:
    answer = str(int(row["answer"]) + increment)
    return {**row, "prompt": row["prompt"].replace("+", NOISY), "answer": answer}


def corpus() -> list[Worked]:
    """Every solution of arithmetic's corpus with either sign and every confidence."""
    return [
        Worked(prompt.replace("+", sign), stating(solution, confidence), probability * share / 2)
        for prompt, solution, probability in arithmetic.corpus()
        for sign, shares in CONFIDENCES.items()
        for confidence, share in shares.items()
    ]


def extract_answer(completion: str) -> str:
    """The answer of the solution, whatever confidence follows it.

    >>> extract_answer("7+8=15 4+3+1=8 85<confidence>0.9</confidence>")
    '85'
    """
    return arithmetic.extract_answer(completion.partition(OPENING)[0])


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if the solution ends with the answer, with or without a confidence behind it; else 0.0.

    >>> score(["1+1=2 12<confidence>0.1</confidence>", "12", "13"], ["12"] * 3)
    [1.0, 1.0, 0.0]
    """
    del columns
    return rights(map(extract_answer, completions), answer)


confidence: Task = arithmetic._replace(
    name="confidence",
    alphabet=(*arithmetic.alphabet, ".", NOISY, OPENING, CLOSING),
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)
