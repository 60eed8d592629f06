"""The values of a test that `make test` tries, those of `make test-all`, and the rest.

`make test-long` runs what is too long for `make test-all`: mostly the rest of the families, fields,
recipes and sizes that it tries some of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

LONG = (pytest.mark.full, pytest.mark.long)
"""The marks of what only `make test-long` runs."""


def long(test: Any) -> Any:
    """Leaves a test to `make test-long`."""
    for mark in LONG:
        test = mark(test)
    return test


def long_but(full: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of one argument of a test that are all marked full, and long but for some.

    Raises: ValueError where one of `full` is none of them.
    """
    values = list(values)
    _check(full, values)
    return [
        pytest.param(value, marks=pytest.mark.full if value in full else LONG) for value in values
    ]


def full_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of one argument of a test: all but `quick` are marked full.

    Raises: ValueError where a quick value is none of them.
    """
    values = list(values)
    _check(quick, values)
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.full) for value in values
    ]


def all_but(full: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of one argument of a test, of which `full` are marked so. Raises: as `full_but`."""
    values = list(values)
    _check(full, values)
    return full_but([value for value in values if value not in full], values)


def every_third(values: Iterable[Any]) -> list[Any]:
    """Values of one argument: the first of each three is quick, the others are marked full."""
    values = list(values)
    return full_but(values[::3], values)


def _check(some: Collection[Any], values: Collection[Any]) -> None:
    if unknown := [value for value in some if value not in values]:
        raise ValueError(f"not among the values of the test: {unknown}")
