"""Child processes that answer one question at a time, within a time limit.

A child is any command that writes a line of JSON when it is ready, {} or {"error": "..."}, then
reads a line of JSON and writes one, again and again, until its input ends. One that takes too long
or dies is replaced; the question it was asked has no answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import selectors
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

START_LIMIT = 120.0  # seconds for a child to load what it needs


class Answer(NamedTuple):
    """The answer to a question, or why there is none."""

    value: Any  # None if there is no answer
    problem: str | None = None  # "timed out" or "crashed"


class WorkerError(RuntimeError):
    """A child that cannot begin; the message is its own."""


class Workers:
    """A few children that share out the questions. They start when they are first needed.

    Children are started as programs, never by fork: they inherit neither threads nor JAX.

    Args:
      command: what to start.
      count: children at most.
      time_limit: seconds for one answer.
    """

    def __init__(self, command: Sequence[str], count: int, time_limit: float):
        self._command, self._limit = list(command), time_limit
        self._idle: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="jaxgrpo-worker")
        atexit.register(self.close)

    def ask(self, questions: Sequence[Any]) -> list[Answer]:
        """The answers, in order.

        Raises: WorkerError if a child cannot begin.
        """
        return list(self._threads.map(self._ask, questions))

    def close(self) -> None:
        """Ends the children; the next question starts new ones."""
        children = []
        with contextlib.suppress(queue.Empty):
            while True:
                children.append(self._idle.get_nowait())
        for child in children:
            if child is not None:
                child.kill()
            self._idle.put(None)

    def _ask(self, question: Any) -> Answer:
        child, answer = self._idle.get(), None
        try:
            child = child or _Child(self._command)
            answer = child.ask(question, self._limit)
            return answer
        finally:
            # What has no answer, or was interrupted, leaves a child in an unknown state.
            if child is not None and (answer is None or answer.problem):
                child.kill()
                child = None
            self._idle.put(child)


class _Child:
    """One started child."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._pending = b""
        first = self._read(START_LIMIT)
        problem = first.problem or (first.value or {}).get("error")
        if problem:
            self.kill()
            raise WorkerError(problem)

    def ask(self, question: Any, limit: float) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it died since the last answer
            return Answer(None, "crashed")
        return self._read(limit)

    def _read(self, limit: float) -> Answer:
        """The next line of the child; a problem if none comes in time or its output ends."""
        assert self._process.stdout is not None
        output, deadline = self._process.stdout.fileno(), time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return Answer(None, "timed out")
                part = os.read(output, 65536)
                if not part:
                    return Answer(None, "crashed")
                self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            return Answer(json.loads(line))
        except ValueError:
            return Answer(None, "crashed")

    def kill(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten input of a dead child
                    pipe.close()
        self._process.wait()
