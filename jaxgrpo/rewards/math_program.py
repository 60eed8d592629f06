"""What a worker knows that compares mathematical answers (worker_program.py).

It needs math-verify and nothing of jaxgrpo. A question is [gold, completion], and its answer the
score: 1.0, 0.0 or null. For the completion null it is how the gold answer is read, in words, or
null.

Math-verify reads LaTeX. Unicode, names such as `pi` and mixed numbers are first written as LaTeX,
in gold answers and completions alike: it would read a part of them, 2 of `2√3`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

DECIMALS = 6  # in which floats are compared, as in math-verify; more for numbers below 0.01
PRECISION = 15  # digits in which other numbers are, as in math-verify; more for the same
GOLDS = 4096  # whose readings are remembered
LONGEST = 300  # characters between answer tags that are taken for a formula

LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\fbox|\\\(|\\\[|\\begin\{")

_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("×✕✖", r"\times "),
        **dict.fromkeys("·⋅∙", r"\cdot "),
        **dict.fromkeys("\u2212\u2010\u2011\u2012", "-"),
        **dict.fromkeys("°º", r"^{\circ}"),
        **dict.fromkeys("\u200b\u2061\u2062", ""),
        "÷": r"\div ",
        "±": r"\pm ",
        "∓": r"\mp ",
        "≈": r"\approx ",
        "∈": r"\in ",
        "∞": r"\infty ",
        "\u2215": "/",
    }
)
"""Signs that math-verify does not know, or not in texts without LaTeX."""

_BRACES = r"\{[^{}]*\}"
for _ in range(4):  # braces in braces
    _BRACES = rf"\{{(?:[^{{}}]|{_BRACES})*\}}"
_GROUP = re.compile(_BRACES)
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_ROOT = re.compile(
    rf"([√∛∜])\s*({_PARENTHESES}|{_BRACES}|{_NUMBER}|\\frac{_BRACES}{_BRACES}"
    rf"|\\sqrt(?:\[\d\])?{_BRACES}|\\(?!sqrt)[a-z]+|[A-Za-zπ])"
)
_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}
_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|log|ln|exp|pi"
_TIMES = {
    "dozen": "12",
    "thousand": "10^{3}",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
}


def _root(match: re.Match[str]) -> str:
    sign, operand = match.groups()
    inside = operand[1:-1] if operand[0] in "({" else operand
    return rf"\sqrt{_INDEX[sign]}{{{inside}}}"


def _mixed(match: re.Match[str]) -> str:
    """Three and a half of `3 1/2`; what is no proper fraction stays."""
    integer, over, under = match.groups()
    return rf"{integer}\frac{{{over}}}{{{under}}}" if int(over) < int(under) else match.group()


def _repeating(match: re.Match[str]) -> str:
    r"""Twenty-one ninths of `2.\overline{3}`."""
    before, once, again = match[1], match[2], match[3] or match[4]
    less, digits = int(f"0{before}{once}"), int(f"{before}{once}{again}")
    return rf"\frac{{{digits - less}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}"


_SPELLINGS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\(?:boxed|fbox)\s*(?=\{)", r"\\boxed"),
    (r"\\varnothing(?![A-Za-z])|\\\{\s+\\\}", r"\\emptyset "),
    (r"(?<!\\)~(?!=)|\\(?:bf|it|rm)(?![A-Za-z])", " "),
    (r"(\^\s*(?:\\circ|\{\s*\\circ\s*\}))\s*[CF](?![A-Za-z])", r"\1"),
    (r"(?<![\w)])\u2013(?=[\d.])", "-"),  # an en dash that is a sign, and no range
    (r"(?<![\\A-Za-z])sqrt(?=[\s(\d{A-Za-z])", "√"),
    (r"(?<![\\A-Za-z])cbrt(?=[\s(\d{A-Za-z])", "∛"),
    (rf"(?<![\\A-Za-z])({_NAMES})(?![A-Za-z])", r"\\\1"),
    (r"(?<![\\A-Za-z])(?:[Ii]nfinity|inf)(?![A-Za-z])", r"\\infty "),
    (r"\^\{(\d+)\}[⁄/]_\{(\d+)\}|(?<!\d)(\d+)⁄(\d+)", r"\\frac{\1\3}{\2\4}"),
    (r"(?<=[\w)}])\*\*(?=[\w(){-])", "^"),  # and no bold type
    (r"\^\s*([-+]\s*(?:\d+|[a-z]))", r"^{\1}"),
    (r"(?<=\d)(?:\\[,;:! ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", ""),
    (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)", lambda match: match.group().replace(" ", "")),
    (rf"(?<![\w.])({_NUMBER})[eE]([-+]?)0*(\d+)(?!\w|\.\d)", r"\1 \\cdot 10^{\2\3}"),
    (r"(?<![\w./^}])(\d+) +(\d+) ?/ ?(\d+)(?!\w|[./]\d)", _mixed),
    (
        r"(?<![\w.,}])(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)"
        r"(?:\s*\{(\d{1,20})\}|\s*(\d))(?!\d|\s*\\(?:overline|bar|dot))",
        _repeating,
    ),
    (r"(?<=\d)\s*\^\s*(\{\s*)?\\(?:text|textrm|mathrm|mbox)\{(?:st|nd|rd|th)\}(?(1)\s*\})", ""),
    (r"(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])", ""),
    (r"(?<=\d)\s*(?:percent(?:age)?|pct)\b", "%"),
    (rf"(\\[dt]?frac\s*(?:{_BRACES}|\d)\s*(?:{_BRACES}|\d))\s*\\?%", r"\1"),
    (rf"(?<=\d)\s*({'|'.join(_TIMES)})s?\b", lambda match: rf" \cdot {_TIMES[match[1]]}"),
]
"""How texts write what LaTeX writes otherwise, in this order."""
_COMPILED = [(re.compile(pattern), latex) for pattern, latex in _SPELLINGS]

_ENVIRONMENT = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$((?:\\\$|[^$])+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_CLOSED_BOX = re.compile(r"\\boxed\{.+\}", re.DOTALL)
_TOKEN = (
    rf"\\[a-zA-Z]+|{_BRACES}|\[\d\]|{_NUMBER}|[-+*/^_=()!π]"
    r"|(?<![A-Za-z])(?<!\d )[A-Za-z](?=[\^_(])|(?<=[\d})])[A-Za-z](?![A-Za-z])"
)
_RUN = re.compile(rf"(?:{_TOKEN})(?:\s*(?:{_TOKEN}))*")
_WORD = re.compile(rf"(?<![\\A-Za-z{{])(?!(?:{_NAMES}|and|or)(?![A-Za-z]))[A-Za-z]{{2,}}")
_FORMULA = re.compile(r"\\(?:sqrt|frac|pi|infty|cdot|times|div|pm)|π|[\^_]\{")
"""What makes a run of mathematics more than math-verify reads in a text without LaTeX."""

_CURRENCY = re.compile(
    r"(?:(?:US)?\\?[$€£¥₹]|\bRs\b\.?)(?=\s?[-\d.\\])|(?<=[\d}])\s?(?:[€£¥₹]|\\\$)"
)
_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_INSIDE = re.compile(rf"(?<!\\){_BRACES}")
_SET = re.compile(r"(?:\\left)?\\\{(.*?)(?:\\right)?\\\}", re.DOTALL)
_LEADING = re.compile(r"(?:=|\\(?:approx|simeq)(?![A-Za-z]))\s*")
_UNIT = re.compile(
    r"(?P<rest>.*(?:[\d})!π]|\\pi(?=\s)))(?P<gap>\s*)(?P<first>[A-Za-z]+)\.?"
    r"(?P<more>(?:[\s/-]+[A-Za-z]+\.?)*)(?:\^(?:\d|\{\d\}))?",
    re.DOTALL,
)
_WORDS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)\{(\s*[-+.\d$€£¥][^{}]*)\}")
_SHORT_UNITS = {"mm", "cm", "dm", "km", "ft", "yd", "mi", "mg", "kg", "ml", "lb", "hr", "mph"}
_SHORT_UNITS |= {"USD", "EUR", "GBP"}
_WRAPPERS = re.compile(r"\\(?:text|math)?(?:bf|it|rm)?(?![A-Za-z])|[{}$*~]")
_CHOICE = re.compile(
    r"(?:[Oo]ption|[Cc]hoice)?\s*[(\[]?([A-J])(?:[)\].:]+(?:[ \t]+(?!.*\b[B-J]\b).*)?|\s*)"
)
"""A letter, perhaps with its text behind it, which names no other letter."""
_NAMED_CHOICE = re.compile(
    r"(?i:\b(?:answer|option|choice)(?:\s+is|\s+was|\s*:))\W*(?i:(?:option|choice)\W+)?"
    r"([A-J])(?![\w'’]|\W*(?:or|and)\W|\s*[,/]\s*[A-J]\b)"
)
_CONNECTING = {"and", "or", "to", "if", "for", "mod", "when", "where", "not"}


def as_latex(text: str) -> str:
    r"""A text whose mathematics is LaTeX: Unicode, names and numbers are written as LaTeX has them.

    >>> as_latex("2√3 and 3½ or 10⁻⁵")
    '2\\sqrt{3} and 3\\frac{1}{2} or 10^{-5}'
    """
    if not text.isascii():
        runs = itertools.groupby(text.translate(_SYMBOLS), _kind)
        text = "".join(_spelled(kind, "".join(letters)) for kind, letters in runs)
    for pattern, latex in _COMPILED:
        text = pattern.sub(latex, text)
    while (rooted := _ROOT.sub(_root, text)) != text:  # the inner roots first, then those around
        text = rooted
    return text


def _kind(letter: str) -> str:
    """How Unicode derives a character from others: "<super>", "<sub>", "<fraction>"; "" if not.

    Sets of numbers stay as they are: ℝ is more than R.
    """
    return "" if letter in "ℂℕℚℝℤ" else unicodedata.decomposition(letter).partition(" ")[0]


def _spelled(kind: str, letters: str) -> str:
    if not kind.startswith("<"):
        return letters
    plain = unicodedata.normalize("NFKC", letters).translate(_SYMBOLS)
    if kind == "<fraction>":  # here, since the digits of a mixed number stand in front of it
        return re.sub(r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}", plain)
    return {"<super>": f"^{{{plain}}}", "<sub>": f"_{{{plain}}}"}.get(kind, plain)


def bare(content: str) -> str:
    r"""Mathematics without what stands around it: `=`, currency, units in words, a full stop.

    A text of words alone becomes a `\text{}`: as a product of letters it would equal its anagrams.

    >>> bare("100 dollars"), bare(r"\text{$5}"), bare(r"\approx 3"), bare("2, 3 and 5")
    ('100', '5', '3', '2, 3 and 5')
    >>> bare("no solution")
    '\\text{no solution}'
    """
    content = content.strip()
    if words := _WORDS.fullmatch(content):
        content = words[1]
    if leading := _LEADING.match(content):
        content = content[leading.end() :]
    content = _CURRENCY.sub("", content).strip()
    content = re.sub(r"(?<=[\w})])\s*\.$", "", content)
    if re.fullmatch("[A-Za-z][A-Za-z' -]*[A-Za-z]", content) and re.search("[A-Za-z]{3}", content):
        return content if _CONNECTING & {*content.split()} else rf"\text{{{content}}}"
    unit = _UNIT.fullmatch(content)
    if unit is None or re.search(r"\\text|(?<![\\A-Za-z])[A-Za-z]{3}", unit["rest"]):
        return both_signs(content)
    first, more = unit["first"], unit["more"]
    is_word = bool(unit["gap"]) and len(first) > 2 and bool(re.search("[aeiou]", first))
    is_unit = is_word or first in _SHORT_UNITS or first + more == "m/s"
    is_left_out = is_unit and not _CONNECTING & {first, *more.split()}
    return both_signs(unit["rest"] if is_left_out else content)


def both_signs(latex: str) -> str:
    r"""Both numbers of a fraction or root with one plus-minus in it: math-verify reads `\pm` alone
    or between the terms of a sum.

    >>> both_signs(r"\frac{1 \pm \sqrt{5}}{2}"), both_signs(r"1 \pm \sqrt{5}")
    ('\\frac{1 + \\sqrt{5}}{2}, \\frac{1 - \\sqrt{5}}{2}', '1 \\pm \\sqrt{5}')
    """
    is_inside = any(_SIGNS.search(group) for group in _INSIDE.findall(latex))
    if not is_inside or len(_SIGNS.findall(latex)) > 1:
        return latex
    members = _SET.fullmatch(latex)
    latex = members[1] if members else latex
    return ", ".join(_SIGNS.sub(sign, latex) for sign in "+-")


def in_tags(text: str) -> str:
    r"""What stands in the last pair of answer tags: as a box, unless it has formulas or is a
    sentence. Without such a pair, or with nothing in it, the text as it is.

    >>> in_tags("<answer>(1, 2)</answer>."), in_tags("<answer>It is 7</answer>"), in_tags("7")
    ('\\boxed{(1, 2)}', 'It is 7', '7')
    """
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    content = content.strip()
    if not closed or not opened or not content:
        return text
    word = _WORD.search(content)  # in a sentence a number follows it
    is_prose = LATEX.search(content.replace(r"\begin", ""))
    is_prose = is_prose or (word and re.search(r"\d", content[word.end() :]))
    is_box = not is_prose and len(content) <= LONGEST and content.count("{") == content.count("}")
    return rf"\boxed{{{content}}}" if is_box else content


def marked(text: str) -> str:
    r"""A completion whose mathematics is LaTeX, bare, and between signs of mathematics or in boxes.

    >>> marked("So it is 2√3."), marked(r"So it is \boxed{3 1/2 cups}.")
    ('So it is $2\\sqrt{3}$.', 'So it is \\boxed{3\\frac{1}{2}}.')
    """
    text = as_latex(text)
    if text.count("$") % 2:
        text = re.sub(r"(?<!\\)\$(?=\s?[\d.])", "", text)  # dollars
    if _BOX.search(text) or r"\begin" in text:
        pieces, end = [], 0
        text = _ENVIRONMENT.sub(_bare_environment, text)
        for box in _BOX.finditer(text):
            inside = _GROUP.match(text, box.end())
            if inside and box.start() >= end:
                pieces += [text[end : box.end()], "{", bare(inside.group()[1:-1]), "}"]
                end = inside.end()
        return "".join([*pieces, text[end:]])
    pieces, end = [], 0
    for environment in _ENVIRONMENT.finditer(text):
        pieces += [_RUN.sub(_between_signs, text[end : environment.start()])]
        pieces += [_bare_environment(environment)]
        end = environment.end()
    return "".join([*pieces, _RUN.sub(_between_signs, _CURRENCY.sub("", text[end:]))])


def _between_signs(match: re.Match[str]) -> str:
    r"""A run of mathematics as $...$, if it holds more than math-verify reads without LaTeX."""
    run = match.group()
    inside = run.lstrip("=*/^_)! ")
    if not _FORMULA.search(inside):
        return run
    return f"{run[: len(run) - len(inside)]}${inside.rstrip('=(-+*/^_ ')}$"


def _bare_environment(match: re.Match[str]) -> str:
    content = next(filter(None, match.groups()))
    return match.group() if _BOX.search(content) else match.group().replace(content, bare(content))


def choice(text: str) -> str | None:
    r"""The letter of a multiple choice that a text gives: in its last box, else behind `answer is`
    or `Answer:`, or on its only line. None for another answer.

    >>> choice(r"\boxed{\textbf{(C) } 12}"), choice("The answer is **C**."), choice("2C")
    ('C', 'C', None)
    """
    boxes = [*_BOX.finditer(text)]
    inside = _GROUP.match(text, boxes[-1].end()) if boxes else None
    plain = _WRAPPERS.sub("", inside.group() if inside else text).strip()
    letters = _NAMED_CHOICE.findall(plain)
    match = _CHOICE.fullmatch(plain)
    return letters[-1] if letters else match[1] if match else None


class Reading(NamedTuple):
    """How a gold answer is read."""

    values: list[Any]  # sympy's object, and its text
    with_units: bool  # whether letters at the end of an answer are a unit
    letter: str | None = None  # of a multiple choice


class Grader:
    """Compares completions with gold answers by math-verify, which is loaded here."""

    def __init__(self) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
        from sympy import sstr

        latex, words = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
        as_letters = dataclasses.replace(latex.normalization_config, units=False)
        algebra = dataclasses.replace(latex, normalization_config=as_letters)
        self._latex = {True: latex, False: algebra}  # by whether letters at the end are units
        functions: Any = (parse, verify, sstr)  # whose types know no limit of None
        self._words, (self._parse, self._verify, self._sstr) = words, functions
        self._read_gold = functools.lru_cache(GOLDS)(self._parse_gold)

    def grade(self, gold: str, completion: str | None) -> float | str | None:
        """1.0, 0.0, or None if the gold answer is not read; for no completion how it is read."""
        reading = self._read_gold(gold)
        if reading is None:
            return None
        if completion is None:
            return self._sstr(reading.values[0], full_prec=False)
        text = in_tags(completion)
        if reading.letter and (letter := choice(text)):
            return float(letter == reading.letter)
        return float(self._equal(reading.values, self._read(text, reading.with_units)))

    def _parse_gold(self, gold: str) -> Reading | None:
        """A gold answer, if it is read as a whole and equals itself in a box."""
        content = gold_content(gold)
        if content is None:  # a solution that ends with its answer
            values = self._read(gold, True)
            is_read = len(values) > 1 and self._equal(values[:1], values[:1])
            return Reading(values, True) if is_read else None
        latex = bare(as_latex(content))
        box = rf"\boxed{{{latex}}}"
        values = self._read_boxes(box, True)
        with_units = not has_variables(values)
        values = values if with_units else self._read_boxes(box, False)
        if len(values) < 2 or has_lost(latex, values[-1]):
            return None
        itself = self._read(rf"\boxed{{{content}}}", with_units)
        is_read = self._equal(values[:1], itself)
        return Reading(values, with_units, choice(box)) if is_read else None

    def _read(self, text: str, with_units: bool) -> list[Any]:
        """The answer that a completion gives: sympy's object, and its text.

        Where it has boxes, that of the last, or none: what it says besides is no answer.
        """
        text = marked(text)
        if r"\boxed{" in text:
            return self._read_boxes(text, with_units)
        kinds = (self._latex[with_units], self._words)
        return self._parse(text, extraction_config=kinds, parsing_timeout=None)

    def _read_boxes(self, text: str, with_units: bool) -> list[Any]:
        """As `_read`, of boxes alone: the last one's text where the grammar refuses a part."""
        if not _CLOSED_BOX.search(text):
            return []
        return self._parse(
            text,
            extraction_config=(self._latex[with_units],),
            extraction_mode="first_match",
            parsing_timeout=None,
        )

    def _equal(self, gold: list[Any], answer: list[Any]) -> bool:
        extra = extra_digits([*gold[:1], *answer[:1]])
        verify = functools.partial(
            self._verify,
            float_rounding=DECIMALS + extra,
            numeric_precision=PRECISION + extra,
            timeout_seconds=None,
        )
        sets = as_sets(gold[:1] + answer[:1]) if gold and answer else None
        return verify(gold, answer) or (sets is not None and verify(*sets))


def gold_content(gold: str) -> str | None:
    r"""The mathematics of a gold answer; None for a text with a `\boxed{}` or several formulas.

    >>> gold_content("$x$"), gold_content("3½"), gold_content(r"so \boxed{3}")
    ('x', '3½', None)
    """
    environment = _ENVIRONMENT.fullmatch(gold.strip())
    if environment and not _BOX.search(gold):
        return next(filter(None, environment.groups()))
    dollars = re.sub(r"^(US)?\$(?=\s?[\d.])", "", gold.strip())
    return None if LATEX.search(dollars.replace(r"\begin", "")) else dollars


def has_variables(values: list[Any]) -> bool:
    """Whether an expression has letters that are no unit: `x + 2d`, but not `x = 2 m`."""
    value = values[0] if values else None
    value = getattr(value, "rhs", value)
    return bool(getattr(value, "free_symbols", ()))


def has_lost(latex: str, text: str) -> bool:
    r"""Whether a text that was read has fewer digits than what it was read from, or two numbers
    side by side, which would be multiplied or added.

    >>> has_lost(r"5\text{ hours }30\text{ minutes}", "5"), has_lost(r"12\text{ cm}^2", "12")
    (True, False)
    """
    exponent = re.compile(r"(?<=[A-Za-z}])\^(\d|\{\d\})$")
    digits = [len(re.findall(r"\d", part)) for part in (exponent.sub("", latex), text)]
    beside = re.search(r"(?<![_\d])\d+\s+\d", latex)  # not in \log_2 8
    return digits[1] < digits[0] or beside is not None


def as_sets(values: Sequence[Any]) -> list[Any] | None:
    """Two answers as sympy's sets of numbers: solved inequalities in one letter, at least one of
    them, and intervals. None for all else: a list of two numbers would equal an open interval."""
    solved = [_solutions(value) for value in values]
    letters = {letter for value in values for letter in getattr(value, "free_symbols", ())}
    sets = [
        value if type(value).__name__ in ("Interval", "Union") else entry
        for value, entry in zip(values, solved, strict=True)
    ]
    is_solved = any(entry is not None for entry in solved) and len(letters) == 1
    return sets if is_solved and all(entry is not None for entry in sets) else None


def _solutions(value: Any) -> Any:
    """The numbers that fulfil a solved inequality, such as `2 < x <= 5`; None for all else. One
    that is still to be solved may be that of the question.

    Math-verify reads both "and" and "or" as a list: conditions that exclude each other are "or".
    """
    name = type(value).__name__
    if name not in ("And", "FiniteSet"):
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            return value.as_set() if _is_bound(value) else None
        return None
    first, *rest = map(_solutions, value.args)
    for part in rest:
        if first is None or part is None:
            return None
        is_either = name == "FiniteSet" and first.is_disjoint(part)
        first = first.union(part) if is_either else first.intersect(part)
    return first


def _is_bound(value: Any) -> bool:
    """Whether it is an inequality between a letter and a number."""
    if getattr(value, "rel_op", "") not in ("<", "<=", ">", ">="):
        return False
    kinds = {(side.is_Symbol, side.is_number) for side in value.args}
    return kinds == {(True, False), (False, True)}


def extra_digits(values: Iterable[Any]) -> int:
    """The decimals beyond `DECIMALS` that tell the smallest numbers of some expressions apart."""
    sizes = [abs(size) for value in values for size in _numbers(value)]
    exponents = [math.floor(math.log10(size)) for size in sizes if 1e-100 < size < 1e-2]
    return max((-exponent - 2 for exponent in exponents), default=0)


def _numbers(value: Any) -> Iterable[float]:
    """The numbers in an expression; a calculation with numbers alone is one number."""
    if getattr(value, "is_number", False):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            yield abs(complex(value.evalf(4)))
        return
    for part in getattr(value, "args", ()):
        yield from _numbers(part)


def load() -> Callable[[str, str | None], float | str | None]:
    """What a worker asks: the score of a completion."""
    grade = Grader().grade
    grade("x^2", r"\boxed{x \cdot x}")  # loads what sympy loads late, outside of any limit
    return grade
