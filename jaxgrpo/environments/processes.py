"""Tools and environments in processes with limits of time and memory, which no call can leave.

Each environment lives in a process of its own, so that one that dies breaks one sample, however
many calls run at once. Tools, which keep nothing between calls, take turns in a few. All are forks
of one process that has loaded the user's code (`workers.Forks`).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from jaxgrpo.core.errors import InputError, cut, one_line, written
from jaxgrpo.rewards.workers import Child, Forks, Pool, WorkerError

PROGRAM = Path(__file__).with_name("call_program.py")

ENDINGS = {
    "timed_out": "took more than {:g} s",
    "crashed": "ended its process",
    "memory": "needed more memory than rollout.call_memory",
}
"""How a call ends its process."""

UNREADABLE = (
    "with rollout.call_workers environments live in processes of their own, which rewards cannot "
    "read: give the environment get_reward, or leave call_workers out"
)


class Broken(Exception):
    """An environment that cannot go on: its sample is not scored.

    Args:
      ending: one of `ENDINGS` where its process has ended, or its time.
    """

    def __init__(self, text: str, ending: str = ""):
        super().__init__(text)
        self.ending = ending

    @classmethod
    def raised(cls, name: str, error: BaseException) -> Broken:
        """By an error of its own code, called `name`."""
        return cls(cut(f"{name} raised {type(error).__name__}: {written(error, str)}"))


class Ended(Exception):
    """A call that ended its process, in one of `ENDINGS`."""

    def __init__(self, ending: str, seconds: float):
        super().__init__(ENDINGS[ending].format(seconds))
        self.ending = ending


class Processes:
    """The processes of a run's tools and environments. They begin with the first call.

    Args:
      functions: what they run: tools and factories of environments by what messages call them.
      count: of calls that run at once.
      memory: GiB that each process may map.

    Raises: InputError where one of the functions cannot be loaded in another process.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], count: int, memory: float):
        self._async = {
            where for where in functions if inspect.iscoroutinefunction(functions[where])
        }
        pickled = {where: _pickle(where, function) for where, function in functions.items()}
        options = pickle.dumps((_files(functions.values()), pickled))
        self.forks = Forks(PROGRAM, options, int(memory * 2**30))
        self.pool = Pool(self.forks.begin, count)
        try:
            with self.pool.turn():
                pass
        except WorkerError as error:
            raise InputError(
                f"rollout.call_workers: {', '.join(functions)} cannot be loaded in a process of "
                f"{memory:g} GiB (rollout.call_memory): {one_line(error)}"
            ) from error
        finally:  # what is refused before its first call leaves none behind
            self.close()

    def tool(self, where: str) -> Remote:
        """The tool that messages call so."""
        return Remote(self, where, where in self._async)

    def environment(self, where: str, example: Any, methods: Iterable[str]) -> RemoteEnvironment:
        """One that the factory makes, with those of these and the protocols' methods that the
        example has."""
        return RemoteEnvironment(self, where, example, methods)

    def close(self) -> None:
        """Ends all of them; the next call begins others."""
        self.pool.close()
        self.forks.close()


class RemoteEnvironment:
    """An environment in a process of its own, which begins with the first `reset`."""

    def __init__(self, processes: Processes, where: str, example: Any, methods: Iterable[str]):
        self.child: Child | None = None
        self.ending = "crashed"  # of its process, once that is lost
        for name in {"reset", "step", "get_reward", *methods}:
            method = getattr(example, name, None)
            setattr(self, name, None)
            if callable(method):
                is_async = inspect.iscoroutinefunction(method)
                remote = Remote(processes, where, is_async, name, self)
                with contextlib.suppress(ValueError):  # some functions written in C have none
                    remote.__signature__ = inspect.signature(method)
                setattr(self, name, remote)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise InputError(f"environments[...].{name}: {UNREADABLE}")


class Remote:
    """A function in another process: a tool, or a method of an environment."""

    __signature__: inspect.Signature

    def __init__(
        self,
        processes: Processes,
        where: str,
        is_async: bool,
        method: str = "",
        environment: RemoteEnvironment | None = None,
    ):
        self._processes, self._where, self._method = processes, where, method
        self._environment, self.is_async = environment, is_async

    def __call__(
        self,
        arguments: Mapping[str, Any],
        seconds: float,
        read: Callable[[Any], Any],
        *positional: Any,
    ) -> Any:
        """What `read` makes of its result, there.

        Args:
          seconds: of wall time, from when fewer than `count` calls are running.

        Raises: Ended; Broken as `read` does; an exception with the name and text of any other one.
        """
        call = self._where, self._method, read, positional, dict(arguments)
        line = json.dumps([0, [base64.b64encode(pickle.dumps(call)).decode()]]) + "\n"
        with self._processes.pool.turn(self._find_child(seconds)) as child:
            answer = child.ask(line, seconds)
            kind, *parts = answer.value or [str(answer.problem).replace(" ", "_")]
            child.is_lost |= kind in ENDINGS
        if kind in ENDINGS:
            if self._environment is not None:
                self._environment.ending = kind
            raise Ended(kind, seconds)
        if kind == "broken":
            raise Broken(*parts)
        if kind == "raised":
            name, text = parts
            raise type(name, (Exception,), {})(text)
        return parts[0]

    def _find_child(self, seconds: float) -> Child | None:
        """The process of its environment; None: that of any tool.

        Raises: Ended where an earlier call has ended it.
        """
        environment = self._environment
        if environment is None:
            return None
        is_lost = environment.child is None or environment.child.is_lost
        if is_lost and self._method == "reset":
            environment.child = self._processes.forks.begin()
        elif is_lost:
            raise Ended(environment.ending, seconds)
        return environment.child


def _pickle(where: str, function: Callable[..., Any]) -> bytes:
    """Raises: InputError where another process cannot find it."""
    try:
        data = pickle.dumps(function)
    except Exception as error:
        problem = one_line(error)
    else:
        problem = "it is of the program that runs, or of a notebook"
        if b"__main__" not in data:
            return data
    raise InputError(
        f"rollout.call_workers: another process cannot load {where} ({problem}): put it at the top "
        "of a file of its own, and name that, as path/file.py:name, or import it from there"
    )


def _without_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a partial calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _files(functions: Iterable[Callable[..., Any]]) -> list[tuple[str, str]]:
    """The modules of functions, with their files, that are not found by their names."""
    bare = [_without_arguments(function) for function in functions]
    names = dict.fromkeys(str(getattr(function, "__module__", "")) for function in bare)
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    is_found = lambda name: PathFinder.find_spec(name.partition(".")[0]) is not None  # noqa: E731
    return [(name, file) for name, file in files.items() if file and not is_found(name)]
