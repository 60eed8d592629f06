"""Names and options that users write: found, or refused with the nearest known one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jaxgrpo.core.errors import InputError

T = TypeVar("T")


def suggest(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown name: the nearest known one in any case, else all of them.

    >>> suggest("GROP", ["grpo", "sign"])
    "did you mean 'grpo'? Known: grpo, sign"
    """
    known = sorted(known)
    lowered = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    hint = f"did you mean {lowered[near[0]]!r}? " if near else ""
    return f"{hint}Known: {', '.join(known) or 'none'}"


def find(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of a table. Raises: InputError naming the nearest entry."""
    if name not in table:
        raise InputError(f"unknown {what} {name!r}: {suggest(name, table)}")
    return table[name]


def call(where: str, factory: Callable[..., T], options: Mapping[str, Any]) -> T:
    """`factory(**options)`; an option that it does not take, or misses, is an InputError.

    Args:
      where: opens the message: the name of the part.
    """
    signature = inspect.signature(factory)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    named = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for option in options:
            if option not in named:
                raise InputError(f"{where}: unknown option {option!r}: {suggest(option, named)}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InputError(f"{where}: {error}; it takes {signature}") from None
    return factory(**options)
