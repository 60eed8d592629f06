"""The program that runs inside bubblewrap: a model's program, or the tests of a row.

It needs Python's own library alone, and nothing that stands here has to be kept from the program
that it runs: whatever comes out is a claim about values, and who judges it is another process.

    run VALUE LENGTH    executes so many bytes of stdin as a program; the rest of stdin is its own
    calls               reads a program, then answers each call of its functions
    tests               runs test cases, whose calls of the program's functions go out as lines

The last two read and write lines of JSON. Values in them are plain: see `encode`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import itertools
import json
import os
import resource
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TextIO

ITEMS = 1_000_000  # of an iterator that leave the sandbox
FILES = 32  # open at the same time

_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
}
"""What holds values, by its name on the way."""


class NotPlain(TypeError):
    """What cannot leave the sandbox."""


def encode(value: Any) -> Any:
    """A value as JSON can write it: scalars as they are, others as [kind, ...].

    Raises: NotPlain for what is no number, text, bytes, None, or collection of these. An object of
    a class of the program's own never gets out, nor its own way of comparing.

    >>> encode({"a": (1, 2**70)})
    ['dict', 'a', ['tuple', 1, ['int', '0x400000000000000000']]]
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else ["int", hex(value)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, dict):
        return ["dict", *(encode(part) for pair in value.items() for part in pair)]
    for kind in (list, tuple, set, frozenset, collections.deque):
        if isinstance(value, kind):
            return [kind.__name__, *map(encode, value)]
    if isinstance(value, Iterable):
        return ["iterator", *map(encode, itertools.islice(value, ITEMS))]
    raise NotPlain(f"a {type(value).__name__} is no plain value")


def decode(written: Any) -> Any:
    """What `encode` wrote. Raises: ValueError for anything else.

    >>> decode(encode([{1: {2}}, b"ab", 1 + 2j]))
    [{1: {2}}, b'ab', (1+2j)]
    """
    if not isinstance(written, list):
        return written
    kind, *parts = written
    if kind in _LISTS:
        return _LISTS[kind]([decode(part) for part in parts])
    if kind == "dict":
        flat = [decode(part) for part in parts]
        return dict(zip(flat[::2], flat[1::2], strict=True))
    if kind == "int":
        return int(parts[0], 16)
    if kind == "bytes":
        return bytes.fromhex(parts[0])
    if kind in ("complex", "range"):
        return {"complex": complex, "range": range}[kind](*parts)
    raise ValueError(f"unknown kind {kind!r}")


def confine(seconds: int, memory: int, user: int) -> None:
    """Gives up root, where it has it, and takes the limits of the system; none can be undone.

    Args:
      seconds: of processor time.
      memory: bytes that may be mapped.
      user: number to become; 0: stay.
    """
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_NPROC: 0,  # neither processes nor threads
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def make_hook() -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook, which a program cannot take away: it keeps ctypes from programs, where that is
    a part of Python itself, a new Python that has no hook, and what leads to the hook.

    A program can reach the globals and the locals that stand in frames, and what an import is given
    may compare as it likes. So what decides is made of literals, and no name means the hook: who
    had it could give it other code.
    """

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        """Raises: ImportError, which modules of the library expect where there is no ctypes."""
        if event == "builtins.id":  # of which `deepcopy` takes many
            return
        if event == "import" and "".join(("", args[0])).rpartition(".")[2] in ("ctypes", "_ctypes"):
            raise ImportError("there is no ctypes in the sandbox")
        if event.startswith(("ctypes.", "gc.get_", "os.exec", "cpython.PyInterpreterState_New")):
            raise PermissionError(f"{event} is refused in the sandbox")

    return refuse


def run(shows_value: bool, length: int) -> None:
    """Executes a program as Python does; with `shows_value` as its prompt does: the value of a
    last expression is printed, and so is what it raises."""
    code = b""
    while len(code) < length and (part := os.read(0, length - len(code))):
        code += part
    module = _module("__main__", code.decode())
    if not shows_value:
        exec(_compiled(code), module.__dict__)
        return
    import ast
    import traceback

    try:
        tree = ast.parse(code, "program.py")
        has_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        last = tree.body.pop() if has_value else None
        exec(_compiled(tree), module.__dict__)
        if isinstance(last, ast.Expr):
            expression = _compiled(ast.Expression(last.value), "eval")
            value = eval(expression, module.__dict__)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except Exception as error:
        is_syntax = isinstance(error, SyntaxError)
        frames = None if is_syntax or not error.__traceback__ else error.__traceback__.tb_next
        traceback.print_exception(type(error), error, frames, file=sys.stdout)


def answer_calls() -> None:
    """Executes a program, and then calls its functions with what the lines say."""
    requests, answers = _channel()
    code = json.loads(requests.readline())
    module = _module("program", code)
    exec(_compiled(code), module.__dict__)
    for line in requests:
        _, name, args, kwargs = json.loads(line)
        try:
            if name not in vars(module):
                raise NameError(f"name {name!r} is not defined")
            value = vars(module)[name](*decode(args), **decode(kwargs))
            text = json.dumps(["value", encode(value)])
        except Exception as error:
            text = json.dumps(["error", type(error).__name__, str(error)[:1000]])
        print(text, file=answers)


def run_tests() -> None:
    """Runs a setup and cases, and reports whether each passed.

    What is missing before a function of the program was called is the fault of the tests, and so is
    an argument that cannot go to the program.
    """
    requests, answers = _channel()
    setup, cases, functions = json.loads(requests.readline())
    calls: list[str] = []

    def bind(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            request = json.dumps(["call", name, encode(args), encode(kwargs)])
            calls.append(name)
            print(request, file=answers)
            kind, *parts = json.loads(requests.readline())
            if kind == "value":
                return decode(parts[0])
            raise _exception(*parts)

        return call

    module = _module("tests", setup)
    module.__dict__.update({name: bind(name) for name in functions})
    for number, case in enumerate([setup, *cases]):
        calls.clear()
        try:
            exec(_compiled(case), module.__dict__)
        except Exception as error:
            is_missing = number == 0 or isinstance(error, ModuleNotFoundError)
            is_broken = isinstance(error, NotPlain) or (is_missing and not calls)
            print(json.dumps(["broken" if is_broken else "failed"]), file=answers)
            if number == 0:
                return
        else:
            if number:
                print('["passed"]', file=answers)


def _exception(name: str, message: str) -> Exception:
    """What a call raised, if it is built in: tests may expect it.

    As in generators, by PEP 479, what would end a loop of the tests without a word is an error.
    """
    if name in ("StopIteration", "StopAsyncIteration"):
        return RuntimeError(f"{name}: {message}")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # some want more than a message
            return kind(message)
    return Exception(f"{name}: {message}")


def _compiled(code: Any, kind: str = "exec") -> types.CodeType:
    """Code as Python runs it, and not with the future that this file imports: an annotation that
    names nothing is an error there."""
    return compile(code, "program.py", kind, dont_inherit=True)


def _module(name: str, code: str) -> types.ModuleType:
    """An empty module; random numbers in it are the same each time."""
    if "random" in code:
        import random

        random.seed(0)
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _channel() -> tuple[TextIO, TextIO]:
    """Standard input and output, which read and write nothing from here on."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, 0)
    os.dup2(empty, 1)
    return requests, answers


def main() -> None:
    role, seconds, memory, user, *options = sys.argv[1:]
    sys.argv = ["program.py"]  # a program that is called with a file may read that and no stdin
    for name in ("exit", "quit"):  # which Python has from `site`, and that finds packages too
        setattr(builtins, name, sys.exit)
    confine(int(seconds), int(memory), int(user))
    sys.addaudithook(make_hook())
    if role == "run":
        run(options[0] == "1", int(options[1]))
    else:
        {"calls": answer_calls, "tests": run_tests}[role]()


if __name__ == "__main__":
    main()
