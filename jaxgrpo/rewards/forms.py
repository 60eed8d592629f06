"""The form of a completion: its text, tags and stated confidence; rewards for tags and length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxgrpo.core.errors import InputError

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORM = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_STATED = re.compile(r"<confidence>(.*?)</confidence>", re.DOTALL)
SHARE = 5  # the default cache is 1 / SHARE of the length limit, as DAPO's 4096 of 20480


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
    texts = map(text_of, completions)
    if pattern is not None:
        form = re.compile(pattern, re.DOTALL)
        return [float(form.fullmatch(text) is not None) for text in texts]
    return [float(_has_tags(text)) for text in texts]


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
    lengths = map(len, completion_ids)
    return [
        0.0 if n <= max_tokens - width else max(-1.0, (max_tokens - width - n) / max(width, 1))
        for n in lengths
    ]


def check_format(pattern: Any = None) -> None:
    """Raises: InputError if the pattern is no regular expression."""
    if pattern is None:
        return
    if not isinstance(pattern, str):
        raise InputError(f"pattern = {pattern!r}: give a regular expression as a text")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"pattern = {pattern!r} is no regular expression: {error}") from None


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


def text_of(completion: Any) -> str:
    """The text of a completion in either form; of several messages the last one's.

    >>> text_of("2"), text_of([{"role": "assistant", "content": "2"}])
    ('2', '2')
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def after_thought(text: str) -> str:
    """What follows the last </think>; the whole text if there is none."""
    return text.rpartition(TAGS[1])[2]


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
    stated = _STATED.findall(text_of(completion))
    try:
        confidence = float(stated[-1]) if stated else -1.0
    except ValueError:
        return None
    return confidence if 0 <= confidence <= 1 else None
