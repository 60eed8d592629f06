"""The arithmetic task with a stated confidence, to learn calibration on.

    47+38=   7+8=15 4+3+1=8 85<confidence>0.9</confidence>

Problems, levels and careless solutions are those of `arithmetic`. In the warm-start corpus every
solution, right or careless, ends with each of CONFIDENCES equally often. So the base states a
confidence that says nothing, while its success depends on the problem: near 1 without a carry,
rarely right with one. What a method for calibration has to teach is to say so.

The tags are one token each and no special tokens: rewards see them in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxgrpo.data.tasks.arithmetic import arithmetic
from jaxgrpo.data.tasks.base import Worked

OPENING, CLOSING = "<confidence>", "</confidence>"
CONFIDENCES = ("0.1", "0.5", "0.9")
"""What the base states: one for each share of success, with something between them."""


def stating(solution: str, confidence: str) -> str:
    """A solution that ends with a confidence.

    >>> stating("6+1=7 17", "0.9")
    '6+1=7 17<confidence>0.9</confidence>'
    """
    return f"{solution}{OPENING}{confidence}{CLOSING}"


def corpus() -> list[Worked]:
    """Every solution of arithmetic's corpus with every confidence; probabilities add up to 1."""
    return [
        Worked(prompt, stating(solution, confidence), probability / len(CONFIDENCES))
        for prompt, solution, probability in arithmetic.corpus()
        for confidence in CONFIDENCES
    ]


def answer_of(completion: str) -> str:
    """The answer of the solution, whatever confidence follows it.

    >>> answer_of("7+8=15 4+3+1=8 85<confidence>0.9</confidence>")
    '85'
    """
    return arithmetic.answer_of(completion.partition(OPENING)[0])


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 if the solution ends with the answer, with or without a confidence behind it; else 0.0.

    >>> score(["1+1=2 12<confidence>0.1</confidence>", "12", "13"], ["12"] * 3)
    [1.0, 1.0, 0.0]
    """
    del columns
    pairs = zip(completions, answer, strict=True)
    return [float(answer_of(text) == str(gold)) for text, gold in pairs]


confidence = arithmetic._replace(
    name="confidence",
    alphabet=(*arithmetic.alphabet, ".", OPENING, CLOSING),
    corpus=corpus,
    answer_of=answer_of,
    score=score,
)
