"""Programs in Monty, an interpreter in Rust of a part of Python, in which there is no way out.

Each program has a process of its own, of the pool that pydantic-monty keeps. What Monty has of
Python is a part: no inheritance, no `yield` or `del`, few modules, `input()` but not `sys.stdin`.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import importlib.util
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from jaxgrpo.rewards.programs import (
    MEMORY,
    PRINTED,
    Printed,
    Sandbox,
    Tests,
    Verdict,
)

PROCESSES = 64  # at the same time; more wait
DEPTH = 1000  # calls in calls
CALLS = 1_000_000  # of a program's functions by the tests of a row
SUSPENSIONS = 1000  # names that a program has not, and lines that it reads beyond its input
SHOW = "print(repr(_value))"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
GROUPS = (list, tuple, set, frozenset)
_CROSSING = """
def _make_crossing(kind_of=type, to_list=list, make_range=range, write=repr):
    views = type({}.keys()), type({}.values()), type({}.items())
    refused = slice, type, type(len), type(_make_crossing)

    def to_program(value):
        kind = kind_of(value)
        if kind in refused:
            raise NotImplementedError(f"a {kind.__name__} does not get out of Monty")
        is_view = kind is make_range or kind in views or kind.__name__.endswith("iterator")
        return to_list(value) if is_view else value

    def to_tests(value):
        is_range = kind_of(value) is make_range
        return is_range, write(value) if is_range else to_program(value)

    def from_program(answer):
        is_range, value = answer
        return make_range(*value) if is_range else value

    return to_program, to_tests, from_program

_to_program, _to_tests, _from_program = _make_crossing()
"""
"""What runs inside Monty, where a range, a view or an iterator would get out as its text. It keeps
what is built in, since programs and tests have names of their own for that."""
_OVERRIDE = """
def {0}(*args, **kwargs):
    args = [_to_program(value) for value in args]
    kwargs = {{name: _to_program(value) for name, value in kwargs.items()}}
    return _from_program(_program_{0}(*args, **kwargs))
"""
_LOST = re.compile(
    r"range\(-?\d+, -?\d+(?:, -?\d+)?\)|dict_(?:keys|values|items)\(.*\)"
    r"|slice\(.*\)|<[\w.]+ object>|<function .*>",
    re.DOTALL,
)
"""The text of what did not get out of Monty, inside another value. A program's own text may be one,
which is so rare that it counts as one too."""
UNSUPPORTED = ("NotImplementedError", "ModuleNotFoundError")
# Monty has no EOFError and none can be brought in. Nothing that reads raises a SyntaxError.
ALIASES = "IOError = EnvironmentError = OSError\nEOFError = SyntaxError\n"
_ABSENT = re.compile(
    r"name '(?P<name>\w+)' is not defined"
    r"|module '(?P<module>[\w.]+)' has no attribute '(?P<attribute>\w+)'"
    r"|cannot import name '(?P<part>\w+)' from '(?P<source>[\w.]+)'.*"
    r"|(?:type object )?'(?P<type>\w+)'(?: object)? has no attribute '(?P<method>\w+)'"
    r"|(?P<fault>Internal error in monty: .*)"
)
"""What Monty says where it lacks something, or a program has made a mistake"""


def find_problem() -> str | None:
    """Why Monty runs no program on this machine; None: it does."""
    if importlib.util.find_spec("pydantic_monty") is None:
        return "pydantic-monty is not installed"
    try:
        _pool()
    except OSError as error:
        return f"Monty does not run: {error}"
    return None


def make_sandbox() -> Sandbox:
    """The sandbox; `find_problem` says whether it can be used here."""
    return Sandbox("monty", run, judge)


def run(program: str, stdin: str, seconds: float, shows_value: bool) -> Printed:
    """What a program prints; see `Sandbox`."""
    from pydantic_monty import CollectString, MontyError

    texts, printed = stdin.splitlines(), CollectString(PRINTED)
    lines = iter(texts)

    def read_line(*prompt: Any) -> str:
        del prompt
        line = next(lines, None)
        if line is None:
            raise SyntaxError("EOF when reading a line")  # see ALIASES
        return line

    with _checkout(seconds, len(texts) + SUSPENSIONS) as session:
        names = ENDS if shows_value else {**ENDS, "input": read_line}
        try:
            if not shows_value:
                session.feed_run(ALIASES)
            value = session.feed_run(program, external_lookup=names, print_callback=printed)
            if shows_value and value is not None:
                _show(session, value, printed)
        except MontyError as error:
            problem = _problem(error)
            if _name(error) == "SystemExit":
                return Printed(printed.output, problem)
            message = f"{_message(error)}\n" if shows_value else ""
            is_shown = shows_value and problem in ("failed", "unsupported")
            return Printed(printed.output + message, "" if is_shown else problem)
        except (TypeError, ValueError) as error:  # a value that does not get out or in
            return Printed(printed.output + (f"{error!r}\n" if shows_value else ""))
    return Printed(printed.output)


def _show(session: Any, value: Any, printed: Any) -> None:
    """Prints a value as at a prompt, where limits hold: a list may hold another one twice, which
    holds another one twice, and its text has no end."""
    from pydantic_monty import MontyError

    try:
        session.feed_run(SHOW, inputs={"_value": value}, print_callback=printed)
    except MontyError as error:
        if _name(error) != "RuntimeError":
            raise
        # An object of a class of the program's, which does not get in again.
        words = f"<{getattr(value, 'name', type(value).__name__)} object>"
        session.feed_run("print(_value)", inputs={"_value": words}, print_callback=printed)


def judge(program: str, tests: Tests, seconds: float, stops: bool) -> Verdict:
    """How a program does in tests, which run in a second process; see `Sandbox`."""
    from pydantic_monty import MontyError

    total, functions, pairs = len(tests.cases), tests.functions, _pool().pairs
    with pairs, _checkout(seconds) as solver, _checkout(seconds, CALLS) as judging:
        try:
            solver.feed_run(ALIASES + _CROSSING)
            inputs = {"__name__": "program"}
            solver.feed_run(program, inputs=inputs, external_lookup=ENDS, print_callback=_drop)
        except MontyError as error:
            return Verdict(0, total, _problem(error))
        except ValueError:  # the value of a last expression, which no test reads
            pass
        calls = _Calls(solver, seconds)
        names = {
            f"_program_{name}": functools.partial(calls.call, name) for name in tests.functions
        }
        overrides = "".join(map(_OVERRIDE.format, functions))
        setup = f"{ALIASES}{_CROSSING}{overrides}{tests.setup}"
        passed = 0
        for number, case in enumerate((setup, *tests.cases)):
            count, is_raised, is_lacking = calls.count, False, False
            try:
                judging.feed_run(f"{case}\nNone", external_lookup=names, print_callback=_drop)
            except MontyError as error:
                is_raised, is_lacking = True, not number or _is_lacking(error)
            # What Monty does not have is missed before a function of the program is called.
            if is_lacking and calls.count == count:
                return Verdict(0, total, "broken")
            passed += number > 0 and not is_raised and not calls.problem
            if calls.problem or (is_raised and (stops or not number)):
                break
    lack = "unsupported" if calls.is_lacking and passed < total else ""
    return Verdict(passed, total, calls.problem or lack)


class _Calls:
    """Calls of a program's functions, which end when its time has passed."""

    def __init__(self, solver: Any, seconds: float):
        self._solver, self._end = solver, time.monotonic() + seconds
        self.count, self.problem, self.is_lacking = 0, "", False

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Whether its value is a range, and the value, or the numbers of the range.

        Raises: what it raises; TypeError for what is no plain value; NotImplementedError for what
        Monty does not hand out, and before the call is counted for such arguments.
        """
        from pydantic_monty import MontyError

        if _has_lost([*args, *kwargs.values()]):
            raise NotImplementedError("an argument does not get out of Monty")
        self.count += 1
        if self.problem or time.monotonic() > self._end:
            self.problem = self.problem or "stopped"
            raise TimeoutError("the time of the program has passed")
        inputs = {"_args": args, "_kwargs": kwargs}
        code = f"_to_tests({name}(*_args, **_kwargs))"
        try:
            is_range, value = self._solver.feed_run(
                code, inputs=inputs, external_lookup=ENDS, print_callback=_drop
            )
        except MontyError as error:
            problem = _problem(error)
            self.is_lacking |= problem == "unsupported"
            if problem == "stopped":
                self.problem = problem
            if not _name(error):
                raise TimeoutError(_message(error)) from None
            raise error.exception() from None
        if is_range:
            return True, tuple(map(int, re.findall(r"-?\d+", value)))
        if not _is_plain(value):
            raise TypeError("the function returned what is no plain value")
        if _has_lost([value]):
            self.is_lacking = True
            raise NotImplementedError("a part of the value does not get out of Monty")
        return False, value


def _is_plain(value: Any) -> bool:
    """Whether it is made of numbers, texts and collections, and has no class of the program's.

    >>> _is_plain([1, {"a": (2, None)}]), _is_plain([object()])
    (True, False)
    """
    kinds = {dict, *GROUPS, *PLAIN}
    return all(type(part) in kinds for part in _parts(value))


def _has_lost(values: list[Any]) -> bool:
    """Whether values hold what Monty handed out as a text. A text alone is one.

    >>> _has_lost(["range(0, 3)", 3]), _has_lost([["range(0, 3)"]])
    (False, True)
    """
    collections = (value for value in values if type(value) is not str)
    parts = itertools.chain.from_iterable(map(_parts, collections))
    return any(type(part) is str and _LOST.fullmatch(part) for part in parts)


def _parts(value: Any) -> Iterator[Any]:
    """A value and all that it holds, each once: a list may hold another one twice, which holds
    another one twice, ..."""
    rest, places = [value], set[int]()
    while rest:
        part = rest.pop()
        if id(part) in places:
            continue
        places.add(id(part))
        if type(part) is dict:
            rest += [*part, *part.values()]
        elif type(part) in GROUPS:
            rest += part
        yield part


def _name(error: Any) -> str:
    """The name of the exception that ended a program; "" where its process is lost."""
    is_raised = type(error).__name__ in ("MontyRuntimeError", "MontySyntaxError")
    return type(error.exception()).__name__ if is_raised else ""


def _problem(error: Any) -> str:
    """The `Printed.problem` of what Monty raised."""
    name = _name(error)
    if _is_lacking(error):
        return "unsupported"
    if name == "SystemExit" and not str(error.exception()):
        return ""
    return "stopped" if name in ("", "TimeoutError", "MemoryError") else "failed"


def _is_lacking(error: Any) -> bool:
    """Whether a program failed for want of what Python has and Monty has not.

    What a module has is looked up where this process has loaded it, and nothing is loaded.
    """
    name = _name(error)
    absent = _ABSENT.fullmatch(str(error.exception())) if name else None
    if absent is None or absent["fault"]:
        return name in UNSUPPORTED or absent is not None
    if absent["name"]:
        return absent["name"] in {*dir(builtins), *ENDS}
    if absent["type"]:
        return hasattr(getattr(builtins, absent["type"], None), absent["method"])
    module = absent["module"] or absent["source"]
    is_loaded = module in sys.modules and module.partition(".")[0] in sys.stdlib_module_names
    return is_loaded and hasattr(sys.modules[module], absent["attribute"] or absent["part"])


def _leave(code: Any = None) -> NoReturn:
    """Ends a program. Raises: SystemExit, of which Monty keeps a text: empty where all is well."""
    raise SystemExit("" if code in (None, 0) else str(code))


ENDS = {"exit": _leave, "quit": _leave}
"""Functions that Monty has not"""


def _message(error: Any) -> str:
    display: Callable[[], str] | None = getattr(error, "display", None)
    return str(error) if display is None else display()


def _drop(stream: str, text: str) -> None:
    """Drops what programs and tests print."""


def _checkout(seconds: float, suspensions: int = SUSPENSIONS) -> Any:
    """A process for one program. It sleeps in no time, and its random numbers are the same.

    Args:
      suspensions: how often it may ask this process for something; its clock stands meanwhile.
    """
    return _pool().processes.checkout(
        limits={
            "max_feed_duration_secs": seconds,
            "max_memory": MEMORY,
            "max_recursion_depth": DEPTH,
            "max_suspensions": suspensions,
        },
        os_policy={"sleep": "zero", "random_start": {"seed": 0}},
    )


class _Pool(NamedTuple):
    processes: Any
    pairs: threading.Semaphore
    """taken by who needs two of them: else all could be with judges that wait for their second"""


@functools.cache
def _pool() -> _Pool:
    """Raises: OSError where there is no program, or it does not start."""
    from pydantic_monty import Monty

    pool = Monty(max_processes=PROCESSES, max_checkouts_per_worker=1)
    pool.__enter__()
    atexit.register(pool.__exit__, None, None, None)
    return _Pool(pool, threading.Semaphore(PROCESSES // 2))
