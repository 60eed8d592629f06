"""Tools: functions that a model may call, as TRL and transformers know them.

A tool is a function, plain or async, with type hints and a Google docstring, of which transformers
makes the schema that chat templates write. It returns something whose text is the answer. One that
raises, or takes too long, answers with the error: the model reads it and may go on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError, cut, find, refusing, written
from jaxgrpo.data import limits
from jaxgrpo.environments.calls import Call
from jaxgrpo.environments.processes import Ended, Remote
from jaxgrpo.rewards.python import TIME_LIMIT, choose
from jaxgrpo.rewards.workers import WorkerError

LONGEST_TEXT = 100_000  # characters of an answer
MOST_CALLS = 16  # of one turn that are run

NOT_TOOLS = ("reset", "get_reward")
"""Methods of an environment that a model cannot call, as in TRL, nor those that begin with "_"."""

_LOOP = limits.EventLoop("jaxgrpo-tools")


class Tool(NamedTuple):
    """A function that a model may call."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]  # as chat templates read it


class InThread(NamedTuple):
    """A function, for `run_limited`, of which all calls run in the thread of a caller."""

    caller: limits.Caller
    function: Callable[..., Any]


Function = Callable[..., Any] | InThread


class Result(NamedTuple):
    """The answer to a call."""

    text: str
    problem: str = ""  # what kind of failure it was; empty: none


def python(code: str) -> str:
    """Runs a Python program and returns what it prints, and the value of its last expression.

    Args:
        code: the program; nothing is remembered from earlier ones
    """
    printed = choose(None).run(code, "", TIME_LIMIT, True)
    endings = {
        "": "",
        "failed": "[the program ended with an error]",
        "stopped": f"[stopped at a limit: {TIME_LIMIT:g} s, memory or output]",
    }
    return printed.text + endings[printed.problem]


BUILT_IN = {"python": python}
"""Tools by the names that a config uses."""


def find_built_in(name: str) -> Callable[..., Any]:
    """The tool of that name.

    Raises: InputError where there is none, with the nearest; for `python` without a sandbox.
    """
    function = find("tool", name, BUILT_IN)
    choose(None)
    return function


def make_tool(function: Any, where: str) -> Tool:
    """A tool with its schema.

    Args:
      where: opens messages.

    Raises: InputError where transformers can make no schema of its hints and docstring.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    if not callable(function):
        raise InputError(f"{where}: a {type(function).__name__}: give a function")
    name = getattr(function, "__name__", "")
    unnamed = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
    problem = (
        f"{where}: no schema can be made of {name or 'it'} ({{reason}}): give every argument a "
        "type hint and a line under Args: in a Google docstring"
    )
    with refusing(problem):
        arguments = inspect.signature(function).parameters.values()
        if any(entry.kind in unnamed for entry in arguments):
            raise InputError(
                f"{where}: {name} has arguments that a call cannot name (*args, or those before "
                "/): give each a name"
            )
        schema = get_json_schema(function)
    return Tool(name, function, schema)


def make_tools(functions: Iterable[Any], where: str) -> list[Tool]:
    """Tools with names of their own. Raises: InputError as `make_tool`, or where two share one."""
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = make_tool(function, where)
        if tool.name in tools:
            raise InputError(f"{where}: two tools are called {tool.name!r}: rename one")
        tools[tool.name] = tool
    return [*tools.values()]


def tool_methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an environment that are tools, by their attributes: the public ones that are
    bound to an object, as TRL finds them, but without reading properties."""
    names = [name for name in dir(environment) if name[0] != "_" and name not in NOT_TOOLS]
    stored = {name: inspect.getattr_static(environment, name, None) for name in names}
    is_read = lambda entry: callable(entry) or isinstance(entry, classmethod)  # noqa: E731
    members = {n: getattr(environment, n) for n, entry in stored.items() if is_read(entry)}
    return {name: member for name, member in members.items() if inspect.ismethod(member)}


def run_calls(calls: Sequence[Call], tools: Mapping[str, Function], seconds: float) -> list[Result]:
    """The answers to the calls of a turn, in order.

    As in TRL, those that are async begin behind the others, and run side by side, but where each
    has a process: what they change is not changed by the others at the same time.

    Args:
      tools: name -> what it runs.
      seconds: that each may take.
    """
    results = [_refusal(number, call, tools) for number, call in enumerate(calls)]
    functions = {n: tools[calls[n].name] for n, result in enumerate(results) if result is None}
    waiting = {}
    for number, function in sorted(functions.items(), key=lambda entry: _is_async(entry[1])):
        waiting[number] = _begin(function, calls[number].arguments, seconds)
    return [result or waiting[number]() for number, result in enumerate(results)]


def _refusal(number: int, call: Call, tools: Mapping[str, Function]) -> Result | None:
    """The answer to a call that is not run; None: it is."""
    if number >= MOST_CALLS:
        text = f"a turn may have {MOST_CALLS} calls, and this is number {number + 1}"
        return _failed(text, "too_many")
    if call.problem:
        return _failed(call.problem, "malformed")
    if call.name not in tools:
        names = ", ".join(tools) or "none"
        return _failed(f"Tool {call.name} not found. There are: {names}", "unknown")
    return None


def run_limited(
    function: Function,
    arguments: Mapping[str, Any],
    seconds: float,
    read: Callable[[Any], Any],
    *positional: Any,
) -> Any:
    """What `read`, a function of a module, makes of its result, awaited where it is async.

    Raises: what they raise; Ended after so many seconds: it is then left in a thread, which ends at
      its next line of Python, or killed with its process where it is `Remote`.
    """
    if isinstance(function, Remote):
        return function(arguments, seconds, read, *positional)
    caller = limits.Caller("jaxgrpo-call")
    if isinstance(function, InThread):
        caller, function = function
    if inspect.iscoroutinefunction(function):
        return read(_begin_async(function(*positional, **arguments), seconds)())

    def call() -> tuple[Any, bool]:
        """What is read, as the text of an object may take long too; or what is to be awaited."""
        result = function(*positional, **arguments)
        is_async = inspect.iscoroutine(result)  # a plain function may give what an async one makes
        return (result if is_async else read(result)), is_async

    try:
        result, is_async = caller.call(seconds, call)
    except limits.TimedOut:
        raise Ended("timed_out", seconds) from None
    return read(_begin_async(result, seconds)()) if is_async else result


def _is_async(function: Function) -> bool:
    is_remote = isinstance(function, Remote)
    return function.is_async if is_remote else inspect.iscoroutinefunction(function)


def _begin(
    function: Function, arguments: Mapping[str, Any], seconds: float
) -> Callable[[], Result]:
    """Begins an async function, and runs another one. Returns: what waits for the answer."""
    if isinstance(function, InThread) or not inspect.iscoroutinefunction(function):
        result = _answer(lambda: run_limited(function, arguments, seconds, read_text))
        return lambda: result

    async def call() -> Any:  # which raises where it does not take the arguments
        return await function(**arguments)

    waiting = _begin_async(call(), seconds)
    return lambda: _answer(lambda: read_text(waiting()))


def _answer(text: Callable[[], str]) -> Result:
    try:
        return Result(text())
    except WorkerError:  # a fault of the machine, which is no answer
        raise
    except Ended as error:
        return _failed(f"it {error}", error.ending)
    except Exception as error:
        return _failed(written(error, str) or type(error).__name__, "raised")


def read_text(result: Any) -> str:
    """What a tool returned, as the model reads it."""
    words = join_blocks(result)
    return cut_off(str(result) if words is None else words)


def cut_off(text: str) -> str:
    """An answer as it can be written, without what is too long of it."""
    left_out = len(text) - LONGEST_TEXT
    more = f" ... ({left_out} characters left out)" if left_out > 0 else ""
    return writable(text[:LONGEST_TEXT]) + more


def join_blocks(value: Any) -> str | None:
    """The texts of a list of content blocks, as TRL takes them; None: it is no such list.

    Raises: TypeError for a block that is no text.
    >>> join_blocks([{"type": "text", "text": "It "}, {"type": "text", "text": "is 3."}])
    'It is 3.'
    >>> join_blocks([{"type": "car", "name": "T"}])
    """
    if not isinstance(value, list) or not value or not all(map(_is_block, value)):
        return None
    kinds = [block["type"] for block in value]
    if strays := [kind for kind in kinds if kind != "text"]:
        raise TypeError(f"it returned content of type {strays[0]!r}: models read texts alone here")
    return "".join(str(block["text"]) for block in value)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) and str(value.get("type")) in value


def _failed(text: str, problem: str) -> Result:
    """TRL's words for a failure: the text of a dict."""
    return Result(str({"error": cut(writable(text))}), problem)


def writable(text: str) -> str:
    """The text, with "?" for what UTF-8 cannot write: half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _begin_async(coroutine: Any, seconds: float) -> Callable[[], Any]:
    async def limited() -> Any:
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                return await limits.without_exit(coroutine)
        except TimeoutError:
            if not scope.expired():  # its own, as of a request
                raise
            raise Ended("timed_out", seconds) from None

    result = _LOOP.begin(limited())

    def wait() -> Any:
        try:
            return result(seconds + 1)
        except limits.TimedOut:  # the loop itself is blocked
            raise Ended("timed_out", seconds) from None

    return wait
