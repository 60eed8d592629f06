"""The program of a worker: it asks a module's function, each time within limits.

A run starts it as a file, with the file of the module as its argument. Neither may need jaxgrpo, so
that no JAX is loaded. The module's `load()` gives the function, and loads what that needs. Reads
lines of JSON, [seconds, [argument, ...]], and writes what the function returns. For what takes more
seconds of processor time it writes {"problem": "timed out"}; for what raises, or takes too much
memory, {"problem": "crashed"}.

The function runs in a fork, which such a question ends; the next fork takes milliseconds, since
everything is loaded in its parent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

MEMORY = 4 * 2**30  # bytes: 9^(9^9) must not take the trainer's


def load(file: str) -> Callable[..., Any]:
    """The function of the module in a file."""
    spec = importlib.util.spec_from_file_location("worker_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module.load()


def main(file: str) -> None:
    """Answers the questions on its input."""
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which may finish a step
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which libraries of the trainer may ignore
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        function = load(file)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print("{}", file=answers)
    gc.freeze()  # what a fork would copy when it collects
    is_judging = mmap.mmap(-1, 1)  # shared with the forks
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
        for line in sys.stdin:
            seconds, arguments = json.loads(line)
            is_judging[0] = 1
            # The system ends this process then, whatever it does: its parent needs no clock.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            result = function(*arguments)
            signal.setitimer(signal.ITIMER_PROF, 0)
            is_judging[0] = 0
            print(json.dumps(result), file=answers)
        os._exit(0)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
