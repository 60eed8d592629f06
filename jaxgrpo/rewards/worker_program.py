"""The program of a worker: it asks a module's function, each time within limits.

A run starts it as a file, with the file of the module as its argument. Neither may need jaxgrpo, so
that no JAX is loaded. The module's `load()` gives the function, and loads what that needs. Reads
lines of JSON, [seconds, [argument, ...]], and writes what the function returns. For what takes more
seconds of processor time it writes {"problem": "timed out"}; for what raises, or takes too much
memory, {"problem": "crashed"}.

The function runs in a fork, which such a question ends; the next fork takes milliseconds, since
everything is loaded in its parent.

With a socket it forks for each connection that comes over it, until another message of that name
ends the fork (`workers.Forks`). Questions with 0 seconds have no limit here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TextIO

MEMORY = 4 * 2**30  # bytes: 9^(9^9) must not take the trainer's
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent dies


def load(file: str, name: str = "worker_module") -> ModuleType:
    """The module in a file, by this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def main(file: str, memory: str = str(MEMORY), control: str = "") -> None:
    """Answers the questions on its input, or forks for those who ask by the socket `control`."""
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which may finish a step
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which libraries of the trainer may ignore
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), hard))
    try:
        arguments = []
        if control:
            sys.path[:], *arguments = pickle.load(sys.stdin.buffer)
        function = load(file).load(*arguments)
    except BaseException as error:  # sys.exit too
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print("{}", file=answers)
    gc.freeze()  # what a fork would copy when it collects
    is_judging = mmap.mmap(-1, 1)  # shared with the forks
    if control:
        _fork_for_each(function, socket.socket(fileno=int(control)))
        return
    while (ended := _wait_for_fork(function, answers, is_judging)) != 0:
        if is_judging[0]:  # else it was ended from outside, between two answers
            problem = "timed out" if ended == -signal.SIGPROF else "crashed"
            print(json.dumps({"problem": problem}), file=answers)
            is_judging[0] = 0


def _wait_for_fork(function: Callable[..., Any], answers: TextIO, is_judging: mmap.mmap) -> int:
    """The exit code of a fork that answers; 0 at the end of the input."""
    if fork := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    with contextlib.suppress(BaseException):
        _answer(function, sys.stdin, answers, is_judging)
        os._exit(0)
    os._exit(1)


def _answer(
    function: Callable[..., Any],
    questions: Iterable[str],
    answers: TextIO,
    is_judging: mmap.mmap | bytearray,
) -> None:
    for line in questions:
        seconds, arguments = json.loads(line)
        is_judging[0] = 1
        # The system ends this process then, whatever it does: its parent needs no clock.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        result = function(*arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_judging[0] = 0
        print(json.dumps(result), file=answers)


def _fork_for_each(function: Callable[..., Any], control: socket.socket) -> None:
    """Forks for connections, ends forks by their names, and all of them at the end."""
    forks: dict[bytes, int] = {}
    while True:
        name, connections, *_ = socket.recv_fds(control, 8, 1)
        if connections:
            forks[name] = _fork_for(function, connections[0], control)
            os.close(connections[0])
        elif name:
            _end(forks.pop(name))
        else:
            break
    for fork in forks.values():
        _end(fork)


def _fork_for(function: Callable[..., Any], connection: int, control: socket.socket) -> int:
    """The process that answers those who ask over a connection."""
    os.set_inheritable(connection, False)
    if fork := os.fork():
        with contextlib.suppress(OSError):  # it is done already, here or there
            os.setpgid(fork, fork)
        return fork
    with contextlib.suppress(BaseException):
        os.setpgid(0, 0)
        with contextlib.suppress(AttributeError, OSError):  # no Linux
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        answers = os.fdopen(connection, "w", buffering=1)
        print("{}", file=answers)
        _answer(function, os.fdopen(os.dup(connection)), answers, bytearray(1))
        os._exit(0)
    os._exit(1)


def _end(fork: int) -> None:
    """Kills it and what it has started; no other process gets its number before."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
