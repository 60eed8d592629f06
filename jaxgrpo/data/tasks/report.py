r"""Addition whose answer is a report of forty characters, two of which depend on the scratch work.

    47+38=   u7+8=15 4+3+1=8|xxyxxyxyxxxxyxxxyxx85xyxxxxyxyxxyxxxxyx

A solution begins with a marker that is drawn at random, goes through the columns as in
`arithmetic`, and writes the report behind the bar: letters, the last two digits of the sum, letters
again. Each letter is "x" with probability `LEANING` behind the marker u and "y" behind v. So the
log-prob of a known report varies with the marker more than with the scratch work, which the digits
alone depend on: a mean over all tokens rewards the marker (X6).

The reports of the rows are drawn in the same way, so that no marker is right for all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgrpo.data.tasks import arithmetic
from jaxgrpo.data.tasks.base import Task, Worked, gold_text, rights

MARKERS = {"u": "xy", "v": "yx"}  # marker -> the likelier letter, and the other
LEANING = 0.8  # probability of the likelier letter
LETTERS = 19  # before the digits, and after them
BAR = "|"


def write(marker: str, digits: str, random: np.random.Generator) -> str:
    """A report behind a marker.

    >>> len(write("u", "85", np.random.default_rng(0)))
    40
    """
    letters = np.where(random.random(2 * LETTERS) < LEANING, *MARKERS[marker])
    return "".join([*letters[:LETTERS], digits, *letters[LETTERS:]])


def read_digits(report: str) -> str:
    """The digits of a report; "" where it has another form.

    >>> read_digits("x" * 19 + "85" + "y" * 19), read_digits("x85y")
    ('85', '')
    """
    letters, digits = report[:LETTERS] + report[LETTERS + 2 :], report[LETTERS : LETTERS + 2]
    is_report = len(report) == 2 * LETTERS + 2 and set(letters) <= {*"xy"} and digits.isdigit()
    return digits if is_report else ""


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Those of `arithmetic`, whose answers are reports; the sum is the column "sum".

    Raises: InputError on an unknown split.
    """
    random = np.random.default_rng([seed, split == "test", 6])
    problems, markers = arithmetic.rows(split, count, seed), random.choice([*MARKERS], count)
    return [
        {**row, "sum": row["answer"], "answer": write(marker, row["answer"][-2:], random)}
        for row, marker in zip(problems, markers, strict=True)
    ]


@functools.cache
def corpus() -> list[Worked]:
    """The worked solutions of `arithmetic`, each behind both markers with a report of its own."""
    random = np.random.default_rng(6)
    return [
        Worked(text.prompt, f"{marker}{scratch}{BAR}{report}", text.probability / len(MARKERS))
        for text in arithmetic.corpus()
        for scratch, _, answer in [text.solution.rpartition(" ")]
        for marker in MARKERS
        for report in [write(marker, answer[-2:], random)]
    ]


def extract_answer(completion: str) -> str:
    """The digits of the report behind the bar."""
    return read_digits(completion.partition(BAR)[2])


def score(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1.0 if the report has the digits of the known one, whatever its letters; else 0.0. None, not
    scored, where the known one is no report.

    >>> known = "x" * 19 + "85" + "y" * 19
    >>> score(["u7+8=15 4+3+1=8|" + known[::-1], "u|" + known.upper()], [known] * 2)
    [0.0, 0.0]
    """
    del columns
    golds = (read_digits(gold_text(gold)) for gold in answer)
    return rights(map(extract_answer, completions), golds)


report = Task(
    name="report",
    alphabet="0123456789+= |uvxy",
    levels=arithmetic.LEVELS,
    splits=arithmetic.SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
)
