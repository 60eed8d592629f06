"""The type checker of the tests: beartype, with whole numbers allowed where a float may stand."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping._decorator import _destring_annotation

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_plain_types_by_beartype_alone() -> None:
    """A function whose annotations name no shapes has none to compare with one another: without a
    record of them a call is checked in two microseconds instead of thirty, and a run in which all
    are checked takes half the time. Call it before `jaxtyping.install_import_hook`, whose decorator
    it wraps."""
    record_shapes = jaxtyping.jaxtyped

    def jaxtyped(**options: Any) -> Callable[[Any], Any]:
        with_shapes = record_shapes(**options)

        def decorate(target: Any) -> Any:
            keeps = inspect.isclass(target) or names_shapes(target)
            return with_shapes(target) if keeps else plain(target)

        return decorate

    jaxtyping.jaxtyped = jaxtyped


def names_shapes(function: Callable[..., Any]) -> bool:
    """Whether an annotation has a name of jaxtyping's, or of a type that was made of one."""
    names = re.findall(r"\w+", " ".join(map(str, function.__annotations__.values())))
    types = (function.__globals__.get(name) for name in names)
    return any(getattr(type_, "__module__", "").startswith("jaxtyping") for type_ in types)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its calls checked. What an annotation names later allows anything, as with
    jaxtyping."""
    texts = function.__annotations__
    function.__annotations__ = {
        name: _destring_annotation(text, function.__globals__) for name, text in texts.items()
    }
    checked = check(function)
    function.__annotations__ = texts
    checked.__annotations__ = texts
    return checked
