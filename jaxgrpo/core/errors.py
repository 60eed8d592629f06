"""Mistakes in what a user gave, as opposed to defects of the program, and messages for them."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar


class InputError(ValueError):
    """What was given cannot be used. A command prints the message alone and exits with 2.

    The message says where, what was given, what was expected, what to do.
    """


class NotGiven(InputError):
    """A field or attribute is read that was not given.

    Args:
      name: of the field or attribute that is missing.
    """

    def __init__(self, name: str, message: str):
        self.name = name
        super().__init__(message)


class ConfigError(InputError):
    """Everything that is wrong with a config, in one message.

    Args:
      source: the file, or whatever the config was read from.
      problems: one message each, beginning with the path of the key.
    """

    def __init__(self, source: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {item}" for item in problems)]))


T = TypeVar("T")


@contextlib.contextmanager
def refusing(message: str | Callable[[Any], str], *kinds: type[Exception]) -> Iterator[None]:
    """Turns an error of these kinds (none: of any) that its block raises into an InputError.

    Args:
      message: of the InputError, with "{kind}" and "{reason}" for the type and the message of the
        error; or a function of the error.
    """
    kinds = kinds or (Exception,)
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        if isinstance(message, str):
            message = message.replace("{kind}", type(error).__name__)
            raise InputError(message.replace("{reason}", one_line(error))) from error
        raise InputError(message(error)) from error


def refuse_all(title: str, problems: Collection[str]) -> None:
    """Raises: InputError with the title and a line for each problem, if there are any."""
    if problems:
        raise InputError("\n  ".join([title, *problems]))


def one_line(error: BaseException) -> str:
    """The message of another library's error, in one line."""
    return " ".join(str(error).split())


def suggest(name: Any, known: Iterable[str]) -> str:
    """What to say after an unknown name: the nearest known one in any case, else all of them.

    Args:
      name: as it was given: a number where a name belongs is unknown too.

    >>> suggest("GROP", ["grpo", "sign"])
    "did you mean 'grpo'? Known: grpo, sign"
    """
    known = sorted(known)
    lowered = {one.lower(): one for one in known}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=0.6)
    hint = f"did you mean {lowered[near[0]]!r}? " if near else ""
    return f"{hint}Known: {', '.join(known) or 'none'}"


def find(what: str, name: Any, table: Mapping[str, T]) -> T:
    """The entry of a table. Raises: InputError naming the nearest entry."""
    if not isinstance(name, str) or name not in table:
        raise InputError(f"unknown {what} {name!r}: {suggest(name, table)}")
    return table[name]


def build(what: str, spec: Mapping[str, Any], table: Mapping[str, Callable[..., T]]) -> T:
    """What {"use": name in the table or a factory of one's own, option: value, ...} makes.

    Raises: InputError on an unknown name or option, with the nearest known one.

    >>> build("number", {"use": "twice", "value": 4}, {"twice": lambda value: 2 * value})
    8
    """
    if "use" not in spec:
        raise InputError(f"{what} {dict(spec)} has no name: write {{ use = ..., ... }}")
    use, options = spec["use"], {name: value for name, value in spec.items() if name != "use"}
    factory = find(what, use, table) if isinstance(use, str) else use
    name = use if isinstance(use, str) else getattr(use, "__name__", repr(use))
    if not callable(factory):
        raise InputError(f"{what} {name} is neither a name nor a function")
    made: Any = call(f"{what} {name}", factory, options)
    return made


def call(where: str, factory: Callable[..., T], options: Mapping[str, Any]) -> T:
    """`factory(**options)`; an option that it does not take, or misses, is an InputError.

    Args:
      where: opens the message: the name of the part.
    """
    signature = inspect.signature(factory)
    named, takes_all = keywords(signature)
    for option in options:
        if option not in named and not takes_all:
            raise InputError(f"{where}: unknown option {option!r}: {suggest(option, named)}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InputError(f"{where}: {error}; it takes {signature}") from None
    return factory(**options)


def keywords(signature: inspect.Signature) -> tuple[dict[str, bool], bool]:
    """Arguments that may be given by keyword -> has a default, and whether any keyword is taken."""
    parameters = signature.parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {one.name: one.default is not one.empty for one in parameters if one.kind in by_keyword}
    return named, any(one.kind is one.VAR_KEYWORD for one in parameters)
