"""How a reward is called, and what it may return.

    fn(prompts=[...], completions=[...], completion_ids=[...], **columns) -> [1.0, 0.0, None, ...]

One call judges N completions; there is none for N = 0. Every keyword is a list of N entries: a
data-set column is repeated for each sample of its prompt. A reward names the keywords it wants and
gets only those, or takes all of them by **kwargs. It returns one number per completion; None or
NaN: could not be scored.
Source: the protocol of TRL's GRPOTrainer, called by keyword.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jaxgrpo.errors import InputError

RewardFunction = Callable[..., Any]
"""Called by keyword; returns a list, or a 1-d array, of N numbers or None."""

PASSED = ("prompts", "completions", "completion_ids")
"""Keywords that every reward may ask for; no column bears these names."""

LARGEST = float(np.finfo(np.float32).max)
SHOWN = 300  # characters of each text in a message


class RewardError(InputError):
    """A reward that cannot be called, fails or returns something else than one number each."""


def call_rewards(
    rewards: Mapping[str, RewardFunction],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> dict[str, np.ndarray]:
    """Calls each reward once on N completions.

    Args:
      rewards: name -> function; the names appear in the result and in messages.
      columns: name -> N entries, the data set's columns beside the prompt.

    Returns: name -> float32 [N], NaN = could not be scored.

    Raises: RewardError where a reward asks for a keyword that does not exist, raises (the message
    shows a completion it fails on), or returns the wrong number or type of values. ValueError
    where the inputs do not have one length.
    """
    count = len(completions)
    given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    _check_lengths({**given, **columns}, count)
    scores = {}
    for name, function in rewards.items():
        check(name, function, columns)
        if not count:
            scores[name] = np.empty(0, np.float32)
            continue
        keywords = _accepted(function, {**given, **columns})
        try:
            values = function(**keywords)
        except Exception as error:
            raise RewardError(_failure(name, function, keywords, given, error)) from error
        scores[name] = _numbers(name, values, count)
    return scores


def check(name: str, function: Any, columns: Iterable[str]) -> None:
    """Refuses a reward that asks for keywords nobody gives, or columns with a reserved name.

    Raises: RewardError that names the reward, the keyword and the columns there are.
    """
    columns = list(columns)
    reserved = sorted(set(columns) & set(PASSED))
    if reserved:
        raise RewardError(
            f"column {reserved[0]!r} has a name that rewards get from the trainer: rename it"
        )
    if not callable(function):
        raise RewardError(f"rewards.{name} is a {type(function).__name__}: give a function")
    named, _ = _parameters(function)
    missing = [
        parameter.name
        for parameter in named.values()
        if parameter.default is parameter.empty and parameter.name not in (*PASSED, *columns)
    ]
    if missing:
        there = ", ".join([*PASSED, *columns])
        raise RewardError(
            f"rewards.{name} asks for {', '.join(map(repr, missing))}, which nobody gives "
            f"(there are: {there}): rename the argument, give it as an option of the reward, or "
            "add the column to the data"
        )


def bind(name: str, function: RewardFunction, options: Mapping[str, Any]) -> RewardFunction:
    """The reward with its options fixed; a column of the same name does not replace an option.

    Raises: RewardError where the function takes no argument of an option's name.
    """
    if not options:
        return function
    named, takes_all = _parameters(function)
    unknown = [option for option in options if option not in named and not takes_all]
    if unknown:
        takes = ", ".join(parameter for parameter in named if parameter not in PASSED) or "none"
        raise RewardError(f"rewards.{name}: no option {unknown[0]!r}: it takes {takes}")
    return functools.partial(function, **options)


def options_of(function: RewardFunction) -> list[str]:
    """The arguments of a reward that have a default, beside those every reward may ask for."""
    named, _ = _parameters(function)
    return [
        parameter.name
        for parameter in named.values()
        if parameter.default is not parameter.empty and parameter.name not in PASSED
    ]


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Parameters that may be given by keyword, and whether any keyword is taken."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return {}, True
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in by_keyword}
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _accepted(function: RewardFunction, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords to pass: those it names, or all; never one that `bind` has fixed."""
    named, takes_all = _parameters(function)
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    return {
        keyword: values
        for keyword, values in keywords.items()
        if (takes_all or keyword in named) and keyword not in fixed
    }


def _check_lengths(keywords: Mapping[str, Sequence[Any]], count: int) -> None:
    for keyword, values in keywords.items():
        if len(values) != count:
            raise ValueError(
                f"rewards are called with {count} completions but {len(values)} entries of "
                f"{keyword!r}: repeat prompts and columns once per sample"
            )


def _numbers(name: str, values: Any, count: int) -> np.ndarray:
    """The returned values as float32 [N], None as NaN."""
    expected = "return a list with one number per completion, None = not scored"
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        raise RewardError(f"rewards.{name} returned a {type(values).__name__}: {expected}")
    if getattr(values, "ndim", 1) != 1:
        raise RewardError(f"rewards.{name} returned an array of shape {values.shape}: {expected}")
    if len(values) != count:
        raise RewardError(
            f"rewards.{name} returned {len(values)} values for {count} completions: {expected}"
        )
    scores = np.empty(count, np.float32)
    for place, value in enumerate(values):
        where = f"rewards.{name} returned {value!r} for completion {place}"
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError  # float("1") would hide a missing conversion
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise RewardError(f"{where}, a {type(value).__name__}: {expected}") from None
        if abs(number) > LARGEST:
            raise RewardError(f"{where}: give a finite float32, or None = not scored")
        scores[place] = number
    return scores


def _failure(
    name: str,
    function: RewardFunction,
    keywords: Mapping[str, Sequence[Any]],
    given: Mapping[str, Sequence[Any]],
    error: Exception,
) -> str:
    """What was raised and on which completion, found by calling halves of the batch again."""
    low, high = 0, len(given["completions"])
    while high - low > 1:
        middle = (low + high) // 2
        if _fails(function, keywords, low, middle):
            high = middle
        elif _fails(function, keywords, middle, high):
            low = middle
        else:
            break
    where = f"completion {low}" if high - low == 1 else f"completions {low} to {high - 1} together"
    sample = {"prompt": given["prompts"], "completion": given["completions"]}
    sample |= {key: values for key, values in keywords.items() if key not in PASSED}
    return "\n".join(
        [
            f"rewards.{name} raised {type(error).__name__} on {where}: {error}",
            *(f"  {key} = {_shorten(values[low])}" for key, values in sample.items() if values),
        ]
    )


def _fails(
    function: RewardFunction, keywords: Mapping[str, Sequence[Any]], start: int, end: int
) -> bool:
    try:
        function(**{key: values[start:end] for key, values in keywords.items()})
    except Exception:
        return True
    return False


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
