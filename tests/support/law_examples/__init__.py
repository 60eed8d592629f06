"""Examples of every part and recipe, by topic: what the laws (tests/advantages) run over.

A module here has `parts()`, name -> list of the steps of chains, and `recipes()`, name -> list of
chains; a part or recipe without an example fails the laws.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def parts() -> dict[str, list[tuple[Any, ...]]]:
    """Name of a part -> chains that use it, as tuples of steps."""
    return _gather("parts")


def recipes() -> dict[str, list[Any]]:
    """Name of a recipe -> chains that it makes of its options."""
    return _gather("recipes")


def _gather(what: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for module in sorted(entry.name for entry in pkgutil.iter_modules(__path__)):
        examples = getattr(importlib.import_module(f"{__name__}.{module}"), what, dict)()
        assert not table.keys() & examples.keys(), f"{module}: {table.keys() & examples.keys()}"
        table |= examples
    return table
