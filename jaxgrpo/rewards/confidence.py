"""Rewards for a model that says how sure it is, as RLCR has them: accuracy, Brier score, form.

A completion ends with its confidence: an answer, then `<confidence>0.8</confidence>` once, with a
number in [0, 1] and nothing but white space behind it. What comes before it is judged by another
reward, the scorer. All three rewards are 0 where the form is not met: to take a confidence of 0
instead would pay wrong answers in full.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgrpo.core.errors import find
from jaxgrpo.data.tasks import tasks
from jaxgrpo.rewards import builtin, mathematics
from jaxgrpo.rewards.builtin import completion_text, stated_confidence
from jaxgrpo.rewards.protocol import BuiltIn, option_names

OPENING, CLOSING = "<confidence>", "</confidence>"
SUCCESS = 0.5  # a scorer's value above it is a success


def _reading_messages(score: BuiltIn) -> BuiltIn:
    """A task's score of completions that may be messages: it reads the last one's text."""

    @functools.wraps(score)
    def judge(completions: Sequence[Any], *answers: Any, **columns: Any) -> Sequence[float | None]:
        return score([builtin.completion_text(each) for each in completions], *answers, **columns)

    return judge


SCORERS: dict[str, BuiltIn] = {
    **{task.name: _reading_messages(task.score) for task in tasks.values()},
    "gsm8k_answer": builtin.gsm8k_answer,
    "math": mathematics.math_answer,
}
"""The built-in rewards that judge an answer: what a scorer may be."""


def confidence_format(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 if the completion has an answer and then its confidence, in this form; else 0.0.

    >>> confidence_format(["so 4<confidence>0.8</confidence>", "<confidence>1</confidence>", "4"])
    [1.0, 0.0, 0.0]
    """
    del columns
    return [float(_answer(completion) is not None) for completion in completions]


def accuracy(
    completions: Sequence[Any],
    answer: Sequence[Any],
    scorer: str = "gsm8k_answer",
    **columns: Any,
) -> list[float | None]:
    """c: 1.0 if the answer before the confidence is right, else 0.0; 0.0 without the form.

    Args:
      completions: texts, or messages.
      answer: the gold answers, as the scorer reads them.
      scorer: a name in SCORERS.

    Returns: one score each; None if the scorer cannot score it.

    >>> texts = ["#### 4<confidence>0.8</confidence>", "#### 5<confidence>0.8</confidence>", "4"]
    >>> accuracy(texts, ["4"] * 3)
    [1.0, 0.0, 0.0]
    """
    return [right for right, _ in _judged(completions, answer, scorer, columns)]


def brier(
    completions: Sequence[Any],
    answer: Sequence[Any],
    scorer: str = "gsm8k_answer",
    **columns: Any,
) -> list[float | None]:
    """1 - (c - q)^2 with the correctness c and the stated confidence q; 0.0 without the form.

    Its expectation is highest at q = the chance of being right.

    Args: as in `accuracy`.
    Source: Damani et al. 2025, arXiv 2507.16806.

    >>> texts = ["#### 4<confidence>0.5</confidence>", "#### 5<confidence>0</confidence>", "4"]
    >>> brier(texts, ["4"] * 3)
    [0.75, 1.0, 0.0]
    """
    return [
        None if right is None else 0.0 if stated is None else 1 - (right - stated) ** 2
        for right, stated in _judged(completions, answer, scorer, columns)
    ]


def check_scorer(scorer: Any = "gsm8k_answer") -> None:
    """Raises: InputError on an unknown scorer, with the nearest name."""
    find("scorer", scorer, SCORERS)


def _judged(
    completions: Sequence[Any], answer: Sequence[Any], scorer: str, columns: Mapping[str, Any]
) -> list[tuple[float | None, float | None]]:
    """(c, q) of each completion: c None if it is not scored; (0, None) without the form."""
    texts = [_answer(completion) for completion in completions]
    scored_places = [place for place, text in enumerate(texts) if text is not None]
    judge = find("scorer", scorer, SCORERS)
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    lists |= {"completions": texts, "answer": answer}
    options = option_names(judge)  # a column may have the name of one
    arguments = {
        name: [values[i] for i in scored_places]
        for name, values in lists.items()
        if name not in options
    }
    scores = dict(zip(scored_places, judge(**arguments), strict=True))
    judged: list[tuple[float | None, float | None]] = []
    for place, completion in enumerate(completions):
        if place not in scores:
            judged.append((0.0, None))
        else:
            score = scores[place]
            right = None if score is None else float(score > SUCCESS)
            judged.append((right, stated_confidence(completion)))
    return judged


def _answer(completion: Any) -> str | None:
    """What comes before the confidence; None where the form is not met."""
    text = completion_text(completion)
    answer, opened, tail = text.partition(OPENING)
    once = opened and text.count(OPENING) == text.count(CLOSING) == 1
    ends = tail.rstrip().endswith(CLOSING) and answer.strip()
    return answer if once and ends and stated_confidence(text) is not None else None
