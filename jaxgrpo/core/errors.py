"""Mistakes in what a user gave, as opposed to defects of the program, and messages for them."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar


class InputError(ValueError):
    """What was given cannot be used. A command prints the message alone and exits with 2.

    The message says where, what was given, what was expected, what to do; no passwords of URLs.
    """

    def __init__(self, message: str):
        super().__init__(without_passwords(message))


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
        self.problems: tuple[str, ...] = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {item}" for item in problems)]))


T = TypeVar("T")

LINES, CHARACTERS = 40, 6000
"""Of a text that other code has written, for example the message of an exception."""


def pattern_problem(pattern: Any) -> str | None:
    """What is wrong with a regular expression, and what to do; None if nothing is.

    >>> pattern_problem("[")[:76]
    'is no regular expression (unterminated character set at position 0): mend it'
    """
    if not isinstance(pattern, str):
        return "expected a regular expression as a text"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        problem = f"is no regular expression ({one_line(error)})"
        return f"{problem}: mend it; a character that stands for itself may need a \\ in front"
    return None


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


TRACED = {
    "TracerBoolConversionError": "asks whether a traced array is true (a Python if, while,"
    " and, or): it has no value yet while the program compiles; write jnp.where(condition, a, b)",
    "TracerArrayConversionError": "gives a traced array to NumPy, which needs its values: "
    "use jax.numpy",
    "ConcretizationTypeError": "needs the value of a traced array, which has none yet "
    "while the program compiles: keep it an array, and use jax.numpy",
}
"""Name of an error of JAX -> what own code does that cannot be compiled; the first that fits."""


@contextlib.contextmanager
def explaining_own_code(where: str) -> Iterator[None]:
    """Turns an error that own code raises into an InputError with its file, function and line.

    A defect of ours, with no line of own code behind it, stays what it is.

    Args:
      where: opens the message: the name of the part.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        place, line = own_line(error)
        if not place:
            raise
        kinds = {cls.__name__ for cls in type(error).__mro__}
        problem = next((text for name, text in TRACED.items() if name in kinds), None)
        problem = problem or f"raised {type(error).__name__}: {one_line(error)}"
        raise InputError(f"{where} ({place}: {line}) {problem}") from error


def own_line(error: BaseException) -> tuple[str, str]:
    """The last line of own code before an error, "file.py:function, line 3", and that line.

    Own code is neither ours nor installed. Both texts are empty if there is none. Of a SyntaxError
    it is the line that cannot be read.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}", (error.text or "").strip()
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries.append(__file__.rpartition("core")[0])  # the package
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*libraries, "<frozen"))
    ]
    if not frames:
        return "", ""
    last = frames[-1]
    return f"{last.filename}:{last.name}, line {last.lineno}", last.line or ""


def as_names(where: str, names: Any) -> frozenset[str]:
    """The fields that a part `needs`. Raises: InputError on what is no set of names, as a text.

    >>> sorted(as_names("mine", ["row", "turn"]))
    ['row', 'turn']
    """
    is_list = isinstance(names, Iterable) and not isinstance(names, str)
    fields = [*names] if is_list else [None]
    if not all(isinstance(name, str) for name in fields):
        raise InputError(f"{where}: needs = {names!r}, expected names of fields, as {{'row'}}")
    return frozenset(fields)


def refuse_all(title: str, problems: Collection[str]) -> None:
    """Raises: InputError with the title and a line for each problem, if there are any."""
    if problems:
        raise InputError("\n  ".join([title, *problems]))


def one_line(error: BaseException) -> str:
    """The message of another library's error, in one line of bounded length."""
    return cut(" ".join(written(error, str).split()))


def written(value: Any, write: Callable[[Any], str] = repr) -> str:
    """A value as text for a message, where the value itself can fail to write it: Python writes
    whole numbers of at most some 4,000 digits, and own code has methods of its own.

    >>> written("a"), written(10**5000)
    ("'a'", 'an int that cannot be written')
    """
    try:
        return write(value)
    except Exception:
        kind = type(value).__name__
        return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind} that cannot be written"


def without_passwords(text: str) -> str:
    """A text to print: of each URL in it, without password and without what signs it.

    >>> without_passwords("data.path = https://me:secret@host/d.jsonl?sig=1 is not there")
    'data.path = https://me:...@host/d.jsonl?... is not there'
    """
    text = re.sub(r"(://[^/\s:@]*):[^\s/]*@", r"\1:...@", text)
    return re.sub(r"(://[^\s?'\"]+\?)[^\s'\",)]+", r"\1...", text)


def cut(text: str) -> str:
    """A text that other code has written, bounded: the middle of a longer one is left out.

    >>> cut("ab" * 5000).partition(" (")[2][:27]
    '4000 characters left out) a'
    """
    lines = text.splitlines()
    if len(lines) > LINES:
        notice = f"... ({len(lines) - LINES} lines left out)"
        text = "\n".join([*lines[: LINES // 4], notice, *lines[-(LINES - LINES // 4) :]])
    if len(text) > CHARACTERS:
        half, notice = CHARACTERS // 2, f"({len(text) - CHARACTERS} characters left out)"
        text = f"{text[:half]} {notice} {text[-half:]}"
    return text


def no_text(value: str) -> str | None:
    """Why a Python string is no text that files, paths and tokenizers take; None if it is one.

    >>> no_text("caf\\u00e9"), no_text("a\\ud800")
    (None, 'character 1 is half of a surrogate pair: write the whole character')
    """
    if "\0" in value:
        return f"character {value.index(chr(0))} is NUL, which no path holds: take it out"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair: write the whole character"
    return None


def suggest(name: Any, choices: Iterable[str]) -> str:
    """What to say after an unknown name: the nearest known one in any case, else all of them.

    Args:
      name: as it was given: a number where a name belongs is unknown too.

    >>> suggest("GROP", ["grpo", "sign"])
    "did you mean 'grpo'? Known: grpo, sign"
    """
    choices = sorted(choices)
    lowered = {choice.lower(): choice for choice in choices}
    suggestions = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=0.6)
    hint = f"did you mean {lowered[suggestions[0]]!r}? " if suggestions else ""
    return f"{hint}Known: {', '.join(choices) or 'none'}"


def differing_names(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The names under which two tables have different values; one without a name has None there.

    >>> differing_names({"a": 1, "b": 2}, {"a": 1, "c": 3})
    ['b', 'c']
    """
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


def find(kind: str, name: Any, table: Mapping[str, T]) -> T:
    """The entry of a table. Raises: InputError with the nearest, or how own code is named."""
    if not isinstance(name, str) or name not in table:
        hint, words = suggest(name, table), str(name).split(".")
        if words[-1] == "py":
            hint = f"name its function too, as {name}:my_function"
        elif len(words) > 1 and all(map(str.isidentifier, words)):
            place = ".".join(words[:-1])
            hint = f"a function of a module is named {place}:{words[-1]}; {hint}"
        raise InputError(f"unknown {kind} {name!r}: {hint}")
    return table[name]


def build(kind: str, spec: Mapping[str, Any], table: Mapping[str, Callable[..., T]]) -> T:
    """What {"use": name in the table or a factory of one's own, option: value, ...} makes.

    Raises: InputError on an unknown name or option, with the nearest known one.

    >>> build("number", {"use": "twice", "value": 4}, {"twice": lambda value: 2 * value})
    8
    """
    if "use" not in spec:
        raise InputError(f"{kind} {dict(spec)} has no name: write {{ use = ..., ... }}")
    use, options = spec["use"], {name: value for name, value in spec.items() if name != "use"}
    factory = find(kind, use, table) if isinstance(use, str) else use
    name = use if isinstance(use, str) else getattr(use, "__name__", repr(use))
    if not callable(factory):
        raise InputError(f"{kind} {name} is neither a name nor a function")
    part: Any = call(f"{kind} {name}", factory, options)
    return part


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
    parameters = signature.parameters
    further = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    for option, value in options.items():
        refuse_another_kind(f"{where}: {option}", value, parameters.get(option, further))
    with explaining_own_code(where):
        return factory(**options)


NUMBERS = frozenset(("float", "int", "Scheduled"))
"""Annotations of options that are numbers; the last takes a function of the step too."""


def refuse_another_kind(where: str, value: Any, parameter: inspect.Parameter | None) -> None:
    """Refuses values of another kind than an option has by its annotation, or by its default.

    Raises: InputError on a text, list, table or truth value where a number is expected, and on
    numbers that are not finite; on anything else where a text or a truth value is, as on "false";
    and on what is no table of numbers where rewards are weighed.
    """
    if parameter is None or value is None:
        return
    kinds, default = _kinds(parameter.annotation), parameter.default
    has_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if (kinds and kinds <= NUMBERS) or (has_number and "str" not in kinds):
        _refuse_no_number(where, value, f", as {default:g}" if has_number else "")
    elif kinds == {"str"} and not isinstance(value, str):
        raise InputError(f"{where} = {value!r}: expected a text")
    elif kinds == {"bool"} and not isinstance(value, bool):
        raise InputError(f"{where} = {value!r}: expected true or false, without quotes")
    elif kinds == {"Weights"}:
        if not isinstance(value, Mapping):
            raise InputError(f"{where} = {value!r}: expected a table, as {{ correct = 1.0 }}")
        for name, weight in value.items():
            _refuse_no_number(f"{where}.{name}", weight)


def _refuse_no_number(where: str, value: Any, example: str = "") -> None:
    is_odd = isinstance(value, float) and not abs(value) < float("inf")
    if is_odd or isinstance(value, (bool, str, list, Mapping)):
        raise InputError(f"{where} = {value!r}: expected a number{example}")


def _kinds(annotation: Any) -> frozenset[str]:
    """The names of the types that an annotation allows beside None; none where there is none."""
    if annotation is inspect.Parameter.empty:
        return frozenset()
    text = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
    return frozenset(text.replace(" ", "").split("|")) - {"None"}


def keywords(signature: inspect.Signature) -> tuple[dict[str, bool], bool]:
    """Arguments that may be given by keyword -> has a default, and whether any keyword is taken."""
    parameters = signature.parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {
        parameter.name: parameter.default is not parameter.empty
        for parameter in parameters
        if parameter.kind in by_keyword
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def comes_from(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an exception is of a kind, or was raised because of one, as where a library makes
    another exception of Ctrl-C."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None
