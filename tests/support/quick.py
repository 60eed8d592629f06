"""The values of a test that `make test` tries; the rest are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of one argument of a test: all but `quick` are marked full.

    Raises: ValueError where a quick value is none of them.
    """
    values = list(values)
    if unknown := [value for value in quick if value not in values]:
        raise ValueError(f"not among the values of the test: {unknown}")
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.full) for value in values
    ]


def all_but(full: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of one argument of a test, of which `full` are marked so."""
    values = list(values)
    return full_but([value for value in values if value not in full], values)


def every_third(values: Iterable[Any]) -> list[Any]:
    """Values of one argument: the first of each three is quick, the others are marked full."""
    values = list(values)
    return full_but(values[::3], values)
