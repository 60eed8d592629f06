"""Arithmetic whose answer counts behind one mark alone, and which the base writes behind others.

47+38=   7+8=15 4+3+1=8@85        the mark that counts, in 3% of the corpus
47+38=   7+8=15 4+3+1=8 85        one of the marks that do not
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxgrpo.data.tasks.arithmetic import arithmetic
from jaxgrpo.data.tasks.base import Task, Worked, rights

MARK = "@"
WRONG_MARKS = " #$%&"
SHARE = 0.03
"""Of solutions behind the mark that counts: the base's pass@1 is below 2%."""


def task(wrong_formats: int) -> Task:
    """Arithmetic with that many marks that do not count, each as likely as the others."""
    return arithmetic._replace(
        name=f"arithmetic, {wrong_formats} wrong formats",
        alphabet=[*arithmetic.alphabet, MARK, *WRONG_MARKS[1:wrong_formats]],
        corpus=lambda: list(_corpus(WRONG_MARKS[:wrong_formats])),
        extract_answer=extract_answer,
        score=marked,
    )


def _corpus(wrong_marks: str) -> Iterator[Worked]:
    shares = {MARK: SHARE} | dict.fromkeys(wrong_marks, (1 - SHARE) / len(wrong_marks))
    for prompt, solution, probability in arithmetic.corpus():
        scratch, answer = solution.rsplit(" ", 1)
        for mark, share in shares.items():
            yield Worked(prompt, f"{scratch}{mark}{answer}", share * probability)


def extract_answer(completion: str) -> str:
    """The text behind the mark that counts; without one, none.

    >>> extract_answer("7+8=15 4+3+1=8@85"), extract_answer("7+8=15 4+3+1=8 85")
    ('85', '')
    """
    return completion.partition(MARK)[2]


def marked(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if the text behind the mark that counts is the answer; else 0.0."""
    del columns
    return rights(map(extract_answer, completions), answer)
