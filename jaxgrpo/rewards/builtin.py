"""The built-in rewards, for right answers, form and length, and how they read a completion."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxgrpo.core.errors import InputError, pattern_problem
from jaxgrpo.data.written import text_of_value

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORM = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_STATED = re.compile(r"<confidence>(.*?)</confidence>", re.DOTALL)
SHARE = 5  # the default cache is 1 / SHARE of the length limit, as DAPO's 4096 of 20480

LONGEST = 100  # digits; a longer number answers no question, and costs time to compare
MARKS = 16  # of a text, from its end: one that holds only marks costs no more than another

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_CURRENCY = r"\\?[$€£¥]"
_DECIMAL = rf"{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+"
_FRACTION = r"\\[dt]?frac" + "".join(
    rf"\s*(?:\{{\s*(?P<minus_{part}>-)?\s?(?:{_CURRENCY}\s?)?(?P<{part}>{_DECIMAL})\s*\}}"
    rf"|(?P<{part}_digit>[0-9]))"
    for part in ("top", "bottom")
)


def _quotient(fraction: re.Match[str]) -> str:
    r"""A fraction of LaTeX as NUMBER reads one: \frac{1,500}{-3} is -1,500/3."""
    signs = fraction["minus_top"], fraction["minus_bottom"]
    top, bottom = (fraction[part] or fraction[f"{part}_digit"] for part in ("top", "bottom"))
    return f"{'-' if signs.count('-') == 1 else ''}{top}/{bottom}"


_SPACED = rf"-[ \t]+(?={_CURRENCY}|\.?[0-9])"  # a sign only where nothing is subtracted from
_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\left|\\right|\\[,;:!](?=[0-9,])"), ""),  # LaTeX's thin spaces in a number
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})"), ""),
    (re.compile("[\u2212\u2010-\u2013\uff0d]"), "-"),
    (re.compile(r"(?<=[A-Za-z])(\s?\}?)\s?\^\s?(?:\{\s?-?[0-9]+\s?\}|-?[0-9]+)"), r"\1"),  # m^2
    (re.compile(r"\s?\^\s?(?:\\circ(?![A-Za-z])|\{\s?\\circ\s?\})"), "°"),
    (re.compile(rf"(?<=[0-9])\s*(?={_FRACTION})"), " "),  # 2\frac{1}{2} is two and a half
    (re.compile(_FRACTION), _quotient),
    (re.compile(rf"([={{(\[:][ \t]*|(?<![0-9A-Za-z)\]}}%.\\])\$){_SPACED}"), r"\1-"),
    (re.compile(rf"\A\s*{_SPACED}(?=[$€£¥\\ ]*[0-9.,/]+\s*\Z)"), "-"),  # a text that is a number
]
"""How texts spell what NUMBER reads in one way only."""

NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z.)%])[-+])?"  # "7-5" is a difference, "x = -5" a sign
    rf"(?:(?:{_CURRENCY}\s?){{1,3}}(?P<inner>-)?)?"
    rf"(?:(?P<integer>{_DIGITS})"
    r"(?:(?P<decimals>\.[0-9]+)|\s(?P<over>[0-9]{1,3})(?=\s?/\s?\.?[0-9]))?"
    r"|(?<![0-9A-Za-z])(?P<bare>\.[0-9]+))"
    rf"(?:\s?/\s?(?P<under>{_DECIMAL}))?"
)
"""A sign, a currency, digits with or without commas, decimals or a fraction."""

_LABELS = "step|part|case|stage|phase|method|option|question|problem|example|section"
_HEADING = rf"[#*_ \t]{{0,9}}(?:(?i:{_LABELS})[ \t]+[0-9]|[1-9][.)][ \t]+[*_]*[A-Z])"
_MARKER = re.compile(
    rf"####(?!{_HEADING})"  # "#### Step 2", "#### 2. Sum up" are headings of Markdown
    r"|<answer>"
    r"|(?i:(?<![A-Za-z0-9])answer\b[\"'*_]*(?:\s+(?:is|was)\b|\s*[:=]))"
    r"|^[ \t]*[*_]*A[*_]*:"
    r"|\\(?:boxed|fbox)\s*(?=\{)",
    re.MULTILINE,
)
_OPERATOR = re.compile(r"\s*(?:[-+*/×÷=^x]|\\times|\\cdot|\\div)\s*[-($\\.0-9]")
_OPENING = re.compile(r"[\s*_:=~`\"'(\[]*(?:\\[(\[]\s*)?")  # before a number that follows at once
_MINUS = re.compile(rf"[ \t*_:=~`\"'(\[]*{_SPACED}")  # on a new line it would be a bullet
_DISPLAY = re.compile(
    r"[\s*_:]*(?:(?:\\[\[(]|\$\$|```(?:te?xt|math|(?:la)?tex)?|\\begin\{[a-z]+\*?\})"
    r"[ \t]*\r?\n\s*)+"
)
_CLOSING = re.compile(r"\\[])]|\$\$|```|\\end\{")


def completion_text(completion: Any) -> str:
    """The text of a completion in either form; of several messages the last one's.

    >>> completion_text("2"), completion_text([{"role": "assistant", "content": "2"}])
    ('2', '2')
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def after_thought(text: str) -> str:
    """What follows the last </think>, or the text if it has none; "" where a thought that begins
    with <think> has not ended: what a model considers is not yet its answer.

    >>> after_thought("<think>6 or 7</think>7"), after_thought("<think>6 or 7"), after_thought("7")
    ('7', '', '7')
    """
    answer = text.rpartition(TAGS[1])[2]
    return "" if answer.lstrip().startswith(TAGS[0]) else answer


def last_tagged(pattern: re.Pattern[str], text: str, closing: str) -> str | None:
    """What the last match of a pattern for a pair of tags holds; None if it has none.

    Text behind the last closing tag is not searched: each of many tags that nothing closes would
    be looked for a partner up to the end, which takes the square of their number.

    >>> last_tagged(re.compile("<b>(.*?)</b>"), "<b>1</b> <b>2</b> <b>3", "</b>")
    '2'
    """
    before, closed, _ = text.rpartition(closing)
    tagged = pattern.findall(before + closed)
    return tagged[-1] if tagged else None


def stated_confidence(completion: Any) -> float | None:
    """The number between the last pair of <confidence> tags, if it is in [0, 1].

    None: it states none, or one that cannot be read ("high", "80%", 7). That is not 0, which would
    be a good confidence for a wrong answer. An earlier pair does not replace the last.

    Args:
      completion: a text, or messages.

    Source: the form is that of Damani et al. 2025, arXiv 2507.16806.

    >>> stated_confidence("<answer>7</answer><confidence> 0.8 </confidence>")
    0.8
    >>> stated_confidence("<confidence>1</confidence> no: <confidence>unsure</confidence>")
    """
    stated = last_tagged(_STATED, completion_text(completion), "</confidence>")
    try:
        confidence = -1.0 if stated is None else float(stated)
    except ValueError:
        return None
    return confidence if 0 <= confidence <= 1 else None


def has_format(
    completions: Sequence[Any], pattern: str | None = None, **columns: Any
) -> list[float]:
    """1.0 if the whole text has the asked form, else 0.0.

    The form is `<think>thoughts</think><answer>answer</answer>`: each tag once, in this order, text
    that is not blank inside both pairs, nothing but white space around and between them.

    Args:
      completions: texts, or messages.
      pattern: another form, as a regular expression that must match the text from its first
        character to its last; `.` matches line ends too.

    A tag that the tokenizer holds as a special token is not in the text, since special tokens are
    left out of it; nor is one that the prompt already opened.
    Source: the form is that of DeepSeek-R1, arXiv 2501.12948, table 1.

    >>> has_format(["<think>6*7</think> <answer>42</answer>", "<answer>42</answer>"])
    [1.0, 0.0]
    >>> has_format(["so 42", "so 42!"], pattern="so [0-9]+")
    [1.0, 0.0]
    """
    del columns
    matches = _has_tags if pattern is None else re.compile(pattern, re.DOTALL).fullmatch
    return [float(bool(matches(completion_text(completion)))) for completion in completions]


def overlong_penalty(
    completion_ids: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    cache: int | None = None,
    **columns: Any,
) -> list[float]:
    """DAPO's soft penalty for length, in tokens.

        L = number of tokens, the end token included
        0                                  if L <= max_tokens - cache
        (max_tokens - cache - L) / cache   if max_tokens - cache < L <= max_tokens
        -1                                 if L > max_tokens

    Args:
      max_tokens: in a run by default rollout.max_completion_tokens.
      cache: width of the slope, in tokens; by default a fifth of max_tokens. 0: no slope.

    Raises: InputError without max_tokens, or if cache is not in 0 ... max_tokens.
    Source: Yu et al. 2025, arXiv 2503.14476, equation 13: max_tokens = 20480, cache = 4096.

    >>> overlong_penalty([[7] * 80, [7] * 90, [7] * 100, [7] * 101], max_tokens=100, cache=20)
    [0.0, -0.5, -1.0, -1.0]
    """
    del columns
    if max_tokens is None:
        raise InputError("length: max_tokens is missing: give the longest completion, in tokens")
    check_length(max_tokens, cache)
    width = max_tokens // SHARE if cache is None else cache
    return [
        0.0 if n <= max_tokens - width else max(-1.0, (max_tokens - width - n) / max(width, 1))
        for n in map(len, completion_ids)
    ]


def check_format(pattern: Any = None) -> None:
    """Raises: InputError if the pattern is no regular expression."""
    if pattern is not None and (problem := pattern_problem(pattern)):
        raise InputError(f"pattern = {pattern!r}: {problem}")


def check_length(max_tokens: Any = None, cache: Any = None) -> None:
    """Raises: InputError if a length is no whole number, or the cache is wider than the limit."""
    for name, value, least in (("max_tokens", max_tokens, 1), ("cache", cache, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise InputError(f"{name} = {value!r}: expected a whole number of tokens, >= {least}")
    if max_tokens is not None and cache is not None and cache > max_tokens:
        raise InputError(
            f"cache = {cache}: more than max_tokens = {max_tokens}, so every completion would be "
            f"punished; set it to {max_tokens} or less"
        )


def _has_tags(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in TAGS):  # first: then the pattern takes linear time
        return False
    form = _FORM.fullmatch(text)
    return form is not None and all(map(str.strip, form.groups()))


def gsm8k_answer(
    completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 if the completion's final number equals that of the gold answer, else 0.0.

    The final number is the one after the last of these marks that has one: `####`, `answer is`,
    `answer:`, `A:` at the start of a line, `<answer>`, `\\boxed{...}`. Behind a mark it is the
    number that follows at once; if words or a calculation follow, the one after the last `=` of the
    line (of the paragraph after `A:`, of the inside of the tags), else its last. Without a mark it
    is the text's last number. Headings such as `#### Step 2` and `#### 2. Sum up` are no marks.
    Only what follows a `</think>` is read, if there is one, and nothing of a text that begins with
    `<think>` and has none.

    Numbers are compared exactly, as fractions: `1,234`, `1234.00`, `$1,234`, `1{,}234`, `1234
    clips`, `2468/2` and `\\frac{2468}{2}` are equal, and so are `50%` and `50`; `0.333` is not 1/3.
    A minus may be any dash. With a space behind it, it is a sign only where an answer begins, or
    behind one of `= { ( [ $ :`. Exponents of units, as in `18 m^2`, are no numbers.
    Number words and powers of ten ("seven", "1e3", "5 million") are not read.

    Args:
      completions: texts, or messages.
      answer: the gold answers as the data set writes them: a GSM8K solution that ends with
        `#### 72`, or the bare number, as a text or a number.

    Returns: one score each; None if the gold answer holds no number: not scored.
    Source: Cobbe et al. 2021, arXiv 2110.14168, whose solutions end with `#### `. Their grader
    reads only that mark and compares texts, so that 72.0 is not 72.

    >>> gsm8k_answer(["48+24=72. #### 72", "It is $1,234.50.", "I don't know"],
    ...              ["... #### 72", "1234.5", "3"])
    [1.0, 1.0, 0.0]
    """
    del columns
    golds = map(gold_number, answer)
    return [
        None if gold is None else float(final_number(completion_text(completion)) == gold)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def gold_number(answer: Any) -> Fraction | None:
    """The number of a gold answer: a number as it is, a text by its final number."""
    if isinstance(answer, (numbers.Real, Decimal)) and not isinstance(answer, bool):
        is_finite = isinstance(answer, numbers.Rational) or math.isfinite(answer)
        return Fraction(text_of_value(answer)) if is_finite else None
    return final_number(answer) if isinstance(answer, str) else None


def final_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer; None if it holds none.

    >>> final_number("The answer is 6 * 12 = 72 clips.")
    Fraction(72, 1)
    """
    text = after_thought(text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    for marker in reversed(list(_MARKER.finditer(text))[-MARKS:]):
        number = _marked(_segment(text, marker))
        if number is not None:
            return _value(number)
    return _value(_last(NUMBER.finditer(text)))


def _segment(text: str, marker: re.Match[str]) -> str:
    """The text that a mark points to: the inside of braces or tags, the paragraph of `A:`, else the
    line.

    If nothing else is on the mark's line, it is the next line that has text. Where that opens
    displayed mathematics or a fence, it is what is inside.
    """
    tail, mark = text[marker.end() :], marker.group()
    if "box" in mark:
        return _braces(tail)
    end = TAGS[3] if mark == TAGS[2] else "\n\n" if mark.endswith("A:") else "\n"
    if end == "\n" and (display := _DISPLAY.match(tail)):
        tail, end = _CLOSING.split(tail[display.end() :], maxsplit=1)[0], "\n\n"
    minus = _MINUS.match(tail)
    tail = f"-{tail[minus.end() :]}" if minus else tail.lstrip(" \t\r\n*_:")
    return tail.split(end, 1)[0]


def _braces(text: str) -> str:
    """The inside of the braces that `text` begins with; all of it if they are not closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[1:place]
    return text[1:]


def _marked(segment: str) -> re.Match[str] | None:
    opening = _OPENING.match(segment)
    first = NUMBER.match(segment, opening.end() if opening else 0)
    line = segment.find("\n")
    more = line >= 0 and NUMBER.search(segment, line)  # "A: 3 on Monday,\nthen 4, so 7"
    if first and not more and not _OPERATOR.match(segment, first.end()):
        return first
    last = NUMBER.search(segment, segment.rfind("=") + 1) if "=" in segment else None
    return last or _last(NUMBER.finditer(segment))


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    *_, last = None, *matches
    return last


def _value(match: re.Match[str] | None) -> Fraction | None:
    """The number of a match; None for a fraction over 0 and for more digits than LONGEST."""
    if match is None or match.end() - match.start() > LONGEST:
        return None
    integer = (match["integer"] or "0").replace(",", "")
    value = Fraction(integer + (match["decimals"] or match["bare"] or ""))
    if match["under"]:
        under = Fraction(match["under"].replace(",", ""))
        if not under:
            return None
        mixed = match["over"] is not None  # 2 1/2
        value = value + int(match["over"]) / under if mixed else value / under
    return -value if "-" in (match["sign"], match["inner"]) else value
