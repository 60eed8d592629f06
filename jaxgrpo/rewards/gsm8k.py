"""The final number of a worked solution, and whether it is the right one."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from jaxgrpo.rewards.texts import after_thought, text_of

LONGEST = 100  # digits; a longer number is nobody's answer, and costs time to compare
MARKS = 16  # of a text, from its end: one that holds only marks costs no more than another

_FRACTION = r"\\[dt]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])\s*([0-9]))"
_SPELLINGS = [
    (re.compile(r"\\left|\\right|\\[,;:!](?=[0-9,])"), ""),  # LaTeX's thin spaces in a number
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})"), ""),
    (re.compile("[\u2212\u2010\u2011\uff0d]"), "-"),
    (re.compile(rf"(?<=[0-9])\s*(?={_FRACTION})"), " "),  # 2\frac{1}{2} is two and a half
    (re.compile(_FRACTION), r"\1\3/\2\4"),
]
"""How texts spell what NUMBER reads in one way only."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z.)%])[-+])?"  # "7-5" is a difference, "x = -5" a sign
    r"(?:(?:\\?[$€£¥]\s?){1,3}(?P<inner>-)?)?"
    rf"(?:(?P<whole>{_DIGITS})"
    rf"(?:(?P<decimals>\.[0-9]+)|(?:\s(?P<over>[0-9]{{1,3}}))?\s?/\s?(?P<under>{_DIGITS}))?"
    r"|(?<![0-9A-Za-z])(?P<bare>\.[0-9]+))"
)
"""A sign, a currency, digits with or without commas, decimals or a fraction."""

_MARKER = re.compile(
    r"####"
    r"|(?i:\banswer\b[*_]*(?:\s+(?:is|was)\b|\s*[:=]))"
    r"|^[ \t]*[*_]*A[*_]*:"
    r"|\\f?boxed\s*(?=\{)",
    re.MULTILINE,
)
_OPERATOR = re.compile(r"\s*(?:[-+*/×÷=^x]|\\times|\\cdot|\\div)\s*[-($\\.0-9]")
_OPENING = re.compile(r"[\s*_:=~`(\[]*(?:\\[(\[]\s*)?")  # before a number that stands at once


def gsm8k_answer(
    completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the completion's final number equals that of the gold answer, else 0.0.

    The final number stands behind the last of these marks that has one: `####`, `answer is`,
    `answer:`, `A:` at the start of a line, `\\boxed{...}`. Behind a mark it is the number that
    follows at once; where words or a calculation follow, the one after the last `=` of the line
    (of the paragraph behind `A:`), else its last. Without a mark it is the text's last number.
    Only what follows a `</think>` is read, where there is one.

    Numbers are compared exactly, as fractions: `1,234`, `1234.00`, `$1,234`, `1{,}234`, `1234
    clips`, `2468/2` and `\\frac{2468}{2}` are equal, and so are `50%` and `50`; `0.333` is not 1/3.
    Number words and powers of ten ("seven", "1e3", "5 million") are not read.

    Args:
      completions: texts, or messages.
      answer: the gold answers as the data set writes them: a GSM8K solution that ends with
        `#### 72`, or the bare number, as a text or a number.

    Returns: one score each; None where the gold answer holds no number: not scored.
    Source: Cobbe et al. 2021, arXiv 2110.14168, whose solutions end with `#### `. Their grader
    reads only that mark and compares texts, so that 72.0 is not 72.

    >>> gsm8k_answer(["48+24=72. #### 72", "It is $1,234.50.", "I don't know"],
    ...              ["... #### 72", "1234.5", "3"])
    [1.0, 1.0, 0.0]
    """
    del columns
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        right = gold_number(gold)
        found = None if right is None else final_number(text_of(completion))
        scores.append(None if right is None else float(found == right))
    return scores


def gold_number(answer: Any) -> Fraction | None:
    """The number of a gold answer: a number as it is, a text by its final number."""
    if isinstance(answer, numbers.Real) and not isinstance(answer, bool):
        return Fraction(str(answer)) if math.isfinite(answer) else None
    return final_number(answer) if isinstance(answer, str) else None


def final_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer; None where it holds none.

    >>> final_number("The answer is 6 * 12 = 72 clips.")
    Fraction(72, 1)
    """
    text = after_thought(text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    for marker in reversed(list(_MARKER.finditer(text))[-MARKS:]):
        found = _marked(_segment(text, marker))
        if found is not None:
            return _value(found)
    last = _last(NUMBER.finditer(text))
    return None if last is None else _value(last)


def _segment(text: str, marker: re.Match[str]) -> str:
    """What a mark speaks of: the braces' inside, the paragraph of `A:`, else the line.

    Where nothing else stands on the mark's line it speaks of the next one that has text.
    """
    rest = text[marker.end() :]
    if "boxed" in marker.group():
        return _braces(rest)
    end = "\n\n" if marker.group().endswith("A:") else "\n"
    return rest.lstrip(" \t\r\n*_:").split(end, 1)[0]


def _braces(text: str) -> str:
    """The inside of the braces that `text` begins with; all of it where they are not closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[1:place]
    return text[1:]


def _marked(segment: str) -> re.Match[str] | None:
    opening = _OPENING.match(segment)
    begin = opening.end() if opening else 0
    first = NUMBER.match(segment, begin)
    line = segment.find("\n")
    more = line >= 0 and NUMBER.search(segment, line)  # "A: 3 on Monday,\nthen 4, so 7"
    if first and not more and not _OPERATOR.match(segment, first.end()):
        return first
    behind = NUMBER.search(segment, segment.rfind("=") + 1) if "=" in segment else None
    return behind or _last(NUMBER.finditer(segment))


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    found = None
    for match in matches:
        found = match
    return found


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match; None for a fraction over 0 and for more digits than LONGEST."""
    if match.end() - match.start() > LONGEST:
        return None
    whole = (match["whole"] or "0").replace(",", "")
    value = Fraction(whole + (match["decimals"] or match["bare"] or ""))
    if match["under"]:
        under = int(match["under"].replace(",", ""))
        if not under:
            return None
        mixed = match["over"] is not None  # 2 1/2
        value = value + Fraction(int(match["over"]), under) if mixed else value / under
    return -value if "-" in (match["sign"], match["inner"]) else value
