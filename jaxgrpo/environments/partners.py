"""What answers one sample: tools, an environment of TRL's protocol, or one of Gym's.

TRL's: `reset(**row) -> str | None` and public methods, which are tools; `get_reward() -> float`, if
it is there, is one more reward. Gym's: `reset(seed=...) -> observation` and
`step(text) -> observation, reward, done[, info]`, or with done in two parts, as Gymnasium has it.

Sources: TRL's GRPOTrainer (environment_factory); Gymnasium, textarena.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxgrpo.core.errors import InputError, cut, explaining_own_code, refusing, written
from jaxgrpo.data.chat import Chat, Message
from jaxgrpo.data.limits import Caller
from jaxgrpo.environments.calls import Parser, Reading, cast
from jaxgrpo.environments.processes import ENDINGS, Broken, Ended, Processes
from jaxgrpo.environments.serving.fields import Completion
from jaxgrpo.environments.tools import (
    LONGEST_TEXT,
    Function,
    InThread,
    Tool,
    cut_off,
    join_blocks,
    make_tools,
    run_calls,
    run_limited,
    tool_methods,
    writable,
)
from jaxgrpo.rewards.protocol import LARGEST, accepted
from jaxgrpo.rewards.workers import WorkerError

LONGEST = 2**31 - 1  # tokens of a turn where nothing else bounds it


class Opening(NamedTuple):
    """A prompt in place of the row's."""

    tokens: list[int]
    messages: list[Message] | None  # the same; None: it is a text
    limit: int = LONGEST  # tokens of the first turn


class Answer(NamedTuple):
    """What follows a turn."""

    reading: Reading  # the turn, as it was read
    messages: list[Message]  # the answer; empty: the conversation is over
    reward: float = math.nan  # of the turn; NaN: it has none
    calls: int = 0
    problems: tuple[str, ...] = ()  # kinds of failures of the calls
    error: str = ""  # the first that was raised, as the model reads it
    tokens: list[int] | None = None  # of the answer; None: as the chat template writes it
    is_fork: bool = False  # the tokens are the whole conversation, rewritten
    limit: int = LONGEST  # tokens of the next turn


@runtime_checkable
class Partner(Protocol):
    """The other side of one sample's conversation."""

    environment: Any  # the user's object; None: there are tools alone

    def open(self, row: Mapping[str, Any], seed: int) -> str | Opening | None:
        """Starts again. Returns: what joins the last message of the prompt. Raises: Broken."""
        ...

    def take(self, completion: Completion | None, is_last: bool) -> None:
        """Gets each turn, before it is answered. The last one is not answered; None: it was the
        one before, behind whose answer there is no room."""
        ...

    def read(self, text: str) -> Reading:
        """What a turn says."""
        ...

    def answer(self, text: str) -> Answer:
        """What follows a turn. Raises: Broken."""
        ...

    def reward(self) -> float | None:
        """What the environment gives for the whole conversation; None: nothing. Raises: Broken."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """What samples of some rows talk to."""

    name: str  # of the environment's class; "": tools alone
    make: Callable[[], Partner]
    tools: tuple[Tool, ...]  # whose schemas the prompt shows
    has_reward: bool  # the environment gives one
    answers_last: bool = False  # the last turn too, whose reward counts though nothing follows it
    check_row: Callable[[Mapping[str, Any]], None] = lambda row: None
    """raises InputError where `reset` does not take the columns of a row"""
    close: Callable[[], None] = lambda: None
    """lets programs end that wait for an answer of its partners"""

    def shown_in(self, chat: Chat) -> Chat:
        """How prompts are written out with its tools."""
        return chat._replace(tools=tuple(tool.schema for tool in self.tools))


class ToolPartner:
    """Runs the calls of a turn; a turn without calls ends the conversation."""

    def __init__(
        self,
        tools: Mapping[str, Any],
        methods: Mapping[str, str],
        parse: Parser,
        seconds: float,
        environment: Any = None,
        caller: Caller | None = None,
    ):
        self.environment, self._parse, self._seconds = environment, parse, seconds
        bound = {
            name: getattr(environment, place)
            for name, place in methods.items()
            if hasattr(environment, place)  # an object may lack what the first had
        }
        self._methods = {name: _within(caller, method) for name, method in bound.items()}
        self._functions, self._caller = {**tools, **self._methods}, caller

    def open(self, row: Mapping[str, Any], seed: int) -> str | None:
        if self.environment is None:
            return None
        reset = self.environment.reset
        arguments = _reset_arguments(reset, row, seed, is_gym=False)
        return _run("reset", _within(self._caller, reset), arguments, self._seconds, read_words)

    def take(self, completion: Completion | None, is_last: bool) -> None:
        """Nothing but the text is read."""

    def read(self, text: str) -> Reading:
        return self._parse(text)

    def answer(self, text: str) -> Answer:
        reading = self.read(text)
        results = run_calls(reading.calls, self._functions, self._seconds)
        for call, result in zip(reading.calls, results, strict=True):
            # In a thread it runs on, and would change what later calls read.
            if result.problem in ENDINGS and call.name in self._methods:
                text = f"{call.name} {Ended(result.problem, self._seconds)}"
                raise Broken(text, result.problem)
        messages: list[Message] = [
            {"role": "tool", "name": call.name or "unknown", "content": result.text}
            | ({"tool_call_id": call.id} if call.id else {})
            for call, result in zip(reading.calls, results, strict=True)
        ]
        problems = tuple(result.problem for result in results if result.problem)
        error = next((result.text for result in results if result.problem == "raised"), "")
        return Answer(reading, messages, math.nan, len(reading.calls), problems, error)

    def reward(self) -> float | None:
        get_reward = getattr(self.environment, "get_reward", None)
        if get_reward is None:
            return None
        get_reward = _within(self._caller, get_reward)
        return _run("get_reward", get_reward, {}, self._seconds, read_reward)


class GymPartner:
    """Steps an environment by the text of each turn; its observation is the user's next message."""

    def __init__(self, seconds: float, environment: Any, caller: Caller | None):
        self.environment, self._seconds, self._caller = environment, seconds, caller
        self.total = 0.0

    def open(self, row: Mapping[str, Any], seed: int) -> str | None:
        self.total = 0.0
        reset = self.environment.reset
        arguments = _reset_arguments(reset, row, seed, is_gym=True)
        begin = _within(self._caller, reset)
        return _run("reset", begin, arguments, self._seconds, read_observation)

    def take(self, completion: Completion | None, is_last: bool) -> None:
        """Nothing but the text is read."""

    def read(self, text: str) -> Reading:
        return _without_calls(text)

    def answer(self, text: str) -> Answer:
        step = _within(self._caller, self.environment.step)
        observation, value, is_done = _run("step", step, {}, self._seconds, read_step, text)
        if math.isfinite(value):
            self.total += value
        messages: list[Message] = [{"role": "user", "content": observation}]
        return Answer(self.read(text), [] if is_done else messages, value)

    def reward(self) -> float | None:
        return self.total


def make_kind(
    factory: Callable[[], Any] | None,
    functions: Mapping[str, Any],
    tools: tuple[Tool, ...],
    find_parser: Callable[[], Parser],
    seconds: float,
    where: str,
    processes: Processes | None = None,
) -> Kind:
    """What rows of an environment talk to; calls its factory twice.

    Args:
      factory: makes an environment; None: there are tools alone.
      functions: name -> tool beside the environment's.
      find_parser: gives the parser of calls, where there is something to call.
      where: opens messages.
      processes: where environments live; None: in this one.

    Raises: InputError where the factory fails or gives one object twice, or what it makes is no
      environment, or one of Gym's protocol beside tools; and as `find_parser`.
    """
    if factory is None:
        parts = _typed(find_parser(), tools), seconds
        return Kind("", lambda: ToolPartner(functions, {}, *parts), tools, False)
    begin = functools.partial(_begin, factory, where, processes is None)
    environment = _example(begin, where)
    name, reset = type(environment).__name__, environment.reset
    members = tool_methods(environment)
    names = {method.__name__: attribute for attribute, method in members.items()}
    if processes is not None:
        begin = lambda: (processes.environment(where, environment, members), None)  # noqa: E731
    is_gym = callable(getattr(environment, "step", None)) and _is_gym(environment)
    is_gym &= "step" in dir(environment) or not members  # what `__getattr__` gives is no tool
    check_row = functools.partial(_check_reset, f"{where}: {name}.reset", reset, is_gym)
    if is_gym:
        if functions:
            raise InputError(
                f"{where}: `step` of {name} reads the text of a turn, and no calls: leave `tools` "
                "out, or write a class without `step` whose methods are tools"
            )
        return Kind(name, lambda: GymPartner(seconds, *begin()), (), True, True, check_row)
    tools += _make_methods(members, functions, f"{where}: {name}")
    parse = _typed(find_parser(), tools) if functions or members else _without_calls
    return Kind(
        name,
        lambda: ToolPartner(functions, names, parse, seconds, *begin()),
        tools,
        callable(getattr(environment, "get_reward", None)),
        check_row=check_row,
    )


def _make_methods(
    members: Mapping[str, Any], functions: Mapping[str, Any], where: str
) -> tuple[Tool, ...]:
    """The tools of an environment. Raises: InputError where one has the name of another tool."""
    methods = make_tools(members.values(), where)
    if twice := functions.keys() & {tool.name for tool in methods}:
        raise InputError(f"{where} and tools have both a tool {min(twice)!r}: rename one of them")
    return (*methods,)


def _without_calls(text: str) -> Reading:
    """A turn where there is nothing to call."""
    return Reading(text, [])


def _typed(parse: Parser, tools: Sequence[Tool]) -> Parser:
    """The parser, with values of the types that the tools take."""
    schemas = [tool.schema for tool in tools]
    return lambda text: cast(parse(text), schemas)


def _begin(factory: Callable[[], Any], where: str, in_thread: bool) -> tuple[Any, Caller | None]:
    """An environment, and the thread in which it is made and called.

    Raises: InputError where no thread can be started, or the factory fails.
    """

    def make() -> Any:
        with explaining_own_code(where):
            return factory()

    if not in_thread:
        return make(), None
    caller = Caller("jaxgrpo-environment")
    try:
        caller.begin()
    except RuntimeError as error:
        raise InputError(
            f"{where}: each environment has a thread, and beside {threading.active_count()} there "
            f"is none for another ({error}): take fewer samples, or raise the limit on threads"
        ) from error
    return caller.call(None, make), caller


def _example(begin: Callable[[], tuple[Any, Caller | None]], where: str) -> Any:
    """An environment. Raises: InputError as `make_kind`."""
    problem = f"{where}: it cannot be made ({{reason}}): give a class that takes no arguments"
    with refusing(problem, TypeError):
        (environment, _), (second, _) = begin(), begin()
    name = type(environment).__name__
    if not callable(getattr(environment, "reset", None)):
        raise InputError(
            f"{where}: {name} has no method reset: give a class with reset(**row) and methods that "
            "are tools, or with reset(seed) and step(text)"
        )
    if second is environment:
        raise InputError(
            f"{where}: it gives the same {name} twice, and samples would write into one another's: "
            "make a new object in each call"
        )
    return environment


def _reset_arguments(
    reset: Callable[..., Any], row: Mapping[str, Any], seed: int, is_gym: bool
) -> dict[str, Any]:
    """Of TRL's protocol all columns, and a seed where one is named; of Gym's a seed, and the
    columns that are named."""
    seeds = row_seed(row, seed)
    if is_gym:
        return {**accepted(reset, row, ()), **seeds}
    return {**row, **accepted(reset, seeds, ("seed",))}


def row_seed(row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The argument `seed` of a sample: its row's, where that has one; None: it has none."""
    value = row.get("seed")
    return {"seed": seed if value is None else value}


def _check_reset(
    where: str, reset: Callable[..., Any], is_gym: bool, row: Mapping[str, Any]
) -> None:
    check_arguments(where, reset, _reset_arguments(reset, row, 0, is_gym))


def check_arguments(where: str, function: Callable[..., Any], arguments: Iterable[str]) -> None:
    """Raises InputError where a function does not take these arguments."""
    problem = (
        f"{where} is called with {', '.join(arguments)} ({{reason}}): let it take these (columns "
        "of the data, and what a run adds), or all by **row"
    )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    with refusing(problem, TypeError):
        signature.bind(**dict.fromkeys(arguments))


def _is_gym(environment: Any) -> bool:
    """Whether `step` can be called with an action alone and is described as no tool: by a type
    hint, a docstring of its own (that of gymnasium's base class reads like one), and no tuple that
    it returns."""
    try:
        step = inspect.signature(environment.step)
    except ValueError:  # written in C, of which no schema can be made
        return True
    try:
        step.bind("")
    except TypeError:
        return False
    is_described = "Args:" in (environment.step.__doc__ or "")
    is_described &= "tuple" not in str(step.return_annotation).lower()
    action, *_ = step.parameters.values()
    return not (is_described and action.annotation is not action.empty)


def read_words(observation: Any) -> str | None:
    """What `reset` of TRL's protocol returned. Raises: Broken; TypeError as `join_blocks`."""
    words = observation if isinstance(observation, str) else join_blocks(observation)
    if words is None and observation is not None:
        raise Broken(f"reset returned a {type(observation).__name__}: return a text or None")
    return None if words is None else _short_enough(words)


def read_reward(value: Any) -> float | None:
    """What `get_reward` returned. Raises: Broken."""
    return None if value is None else read_number("get_reward", value)


def read_observation(value: Any) -> str | None:
    """What `reset` of Gym's protocol returned."""
    observation = value[0] if isinstance(value, tuple) else value  # with an info beside it
    return None if observation is None else _short_enough(str(observation))


def _short_enough(words: str) -> str:
    """What `reset` returned, as it can be written. Raises: Broken: a question is not cut off."""
    if len(words) > LONGEST_TEXT:
        raise Broken(f"reset returned {len(words)} characters: return at most {LONGEST_TEXT}")
    return writable(words)


def read_step(outcome: Any) -> tuple[str, float, bool]:
    """Observation, reward and whether it is over, of what `step` returned. Raises: Broken.

    >>> [read_step(("no", 1, False, *more))[2] for more in ((True,), (True, {}), ({"steps": 3},))]
    [True, True, False]
    """
    if not isinstance(outcome, tuple) or len(outcome) not in (3, 4, 5):
        kind = type(outcome).__name__
        raise Broken(f"step returned a {kind}: return observation, reward, done")
    observation, reward, *ends = outcome
    has_parts = len(ends) == 3 or isinstance(ends[-1], (bool, np.bool_))  # and no info
    is_done = any(map(bool, ends[: 1 + has_parts]))
    content = "" if observation is None else cut_off(str(observation))
    return content, read_number("step", reward), is_done


def read_number(name: str, value: Any) -> float:
    """A reward that a function returned; NaN: none. Raises: Broken."""
    try:
        if isinstance(value, (str, bytes, complex, np.complexfloating)):  # as of a reward
            raise TypeError
        number = float(value)
    except Exception:  # of the value's own code too
        text = cut(written(value))
        raise Broken(f"{name} returned the reward {text}: return a number") from None
    if abs(number) > LARGEST:
        raise Broken(f"{name} returned the reward {number:g}: return at most {LARGEST:g}")
    return number


def _within(caller: Caller | None, method: Callable[..., Any]) -> Function:
    """A method of an environment as it is called: in its thread, but where it is async."""
    if caller is None or inspect.iscoroutinefunction(method):
        return method
    return InThread(caller, method)


def _run(
    name: str,
    function: Function,
    arguments: Mapping[str, Any],
    seconds: float,
    read: Callable[[Any], Any],
    *positional: Any,
) -> Any:
    try:
        return run_limited(function, arguments, seconds, read, *positional)
    except (Broken, WorkerError):
        raise
    except Ended as error:
        raise Broken(f"{name} {error}", error.ending) from None
    except Exception as error:
        raise Broken.raised(name, error) from error
