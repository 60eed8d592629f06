"""Child processes that answer one question at a time, within a time limit.

A child is any command that writes a line of JSON when it is ready, {} or {"error": "..."}, then
reads a line of JSON, [seconds, question], and writes one, again and again, until its input ends. It
writes {"problem": "timed out"} if the question takes it more seconds of processor time, and
"crashed" if there is no answer for another reason. One that writes nothing in time, or dies, is
replaced; that takes seconds, so a child does better to lose no more than a fork of itself.

`Forks` gives children that are forks of one process which has loaded everything: they take
milliseconds to begin.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import pickle
import queue
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxgrpo.core.errors import InputError

START_LIMIT = 120.0  # seconds for a child to load what it needs
GRACE = 5.0  # seconds beyond a limit after which a child is taken for lost
QUICK = 0.5  # seconds for an answer while others wait
QUICKEST = 0.1  # and where the batch has spent its budget
REMEMBERED = 100_000  # questions without an answer


PROGRAM = Path(__file__).with_name("worker_program.py")


class Answer(NamedTuple):
    """The answer to a question, or why there is none."""

    value: Any  # None if there is no answer
    problem: str | None = None  # "timed out" or "crashed"


class WorkerError(RuntimeError):
    """A child that cannot begin; the message is its own."""


class Workers:
    """A few children that share out the questions. They start when they are first needed.

    Equal questions are asked once. Each has `QUICK` seconds at first, and `QUICKEST` where the
    budget is spent; those that need more come last, with the time limit, as long as the budget
    lasts. A question that had no answer in `QUICK` seconds is remembered and not asked again.

    Children are started as programs, never by fork: they inherit neither threads nor JAX.

    Args:
      command: what to start.
      count: children at most.
      time_limit: seconds of processor time for one answer.
      budget: seconds that the questions of a batch without an answer may take.
      grace: seconds of wall time beyond a limit after which a child is replaced.
      environment: variables of the children beside those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        time_limit: float,
        budget: float,
        grace: float = GRACE,
        environment: Mapping[str, str] | None = None,
    ):
        variables = {**os.environ, **(environment or {})}
        self._pool = Pool(lambda: start(command, variables), count)
        self._limit, self._grace = time_limit, grace
        self._budget, self._count = budget, count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="jaxgrpo-worker")
        self._lock = threading.Lock()
        self._lost = 0.0  # seconds, of all children, on questions of this batch without an answer
        self._problems: dict[bytes, Answer] = {}

    def ask(self, questions: Sequence[Any]) -> list[Answer]:
        """The answers, in order.

        Raises: WorkerError if a child cannot begin.
        """
        self._lost = 0.0
        texts = [json.dumps(question) for question in questions]
        past_answers = {text: self._problems.get(_key(text)) for text in texts}
        answers = {text: answer for text, answer in past_answers.items() if answer is not None}
        fresh = [text for text in past_answers if text not in answers]
        answers.update(zip(fresh, self._threads.map(self._ask_quickly, fresh), strict=True))
        slow = [text for text in fresh if answers[text].problem == "timed out"]
        answers.update(zip(slow, self._threads.map(self._ask_at_length, slow), strict=True))
        return [answers[text] for text in texts]

    def close(self) -> None:
        """Ends the children; the next question starts new ones."""
        self._pool.close()

    def _ask_quickly(self, text: str) -> Answer:
        return self._ask(text, min(QUICK if self._has_budget() else QUICKEST, self._limit))

    def _ask_at_length(self, text: str) -> Answer:
        """The answer within the time limit; none at once where it has been tried so long already,
        or the batch has no budget left."""
        if self._limit <= QUICK or not self._has_budget():
            return Answer(None, "timed out")
        return self._ask(text, self._limit)

    def _has_budget(self) -> bool:
        return self._lost < self._budget * self._count

    def _ask(self, text: str, seconds: float) -> Answer:
        with self._pool.turn() as child:
            began = time.monotonic()
            answer = child.ask(f"[{seconds}, {text}]\n", seconds + self._grace)
            was_long = seconds >= min(QUICK, self._limit)
            is_its_fault = was_long if answer.problem == "timed out" else not child.is_lost
            self._note(text, answer, time.monotonic() - began, is_its_fault)
        return answer

    def _note(self, text: str, answer: Answer, seconds: float, is_its_fault: bool) -> None:
        """Counts the time of a question without an answer; remembers it if it is its own fault."""
        with self._lock:
            if not answer.problem:
                self._problems.pop(_key(text), None)
                return
            self._lost += seconds
            if is_its_fault:
                self._problems[_key(text)] = answer
            if len(self._problems) > REMEMBERED:
                del self._problems[next(iter(self._problems))]


@functools.cache
def find_workers(
    module: Path,
    count: int,
    time_limit: float,
    budget: float,
    environment: tuple[tuple[str, str], ...] = (),
) -> Workers:
    """The workers that ask the function of a module (`PROGRAM`), the same for the same arguments.

    Args:
      count: of children, and never more than the machine has cores.
    """
    # -P: the program's folder is not searched for modules, so that none of ours hides another.
    command = [sys.executable, "-P", str(PROGRAM), str(module)]
    count = min(count, os.cpu_count() or 1)
    return Workers(command, count, time_limit, budget, environment=dict(environment))


def check_options(time_limit: Any, batch_limit: Any, workers: Any) -> None:
    """Raises: InputError if an option of a reward that asks workers is out of range."""
    for name, limit in {"time_limit": time_limit, "batch_limit": batch_limit}.items():
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if not number or not math.isfinite(limit) or limit <= 0:
            raise InputError(f"{name} = {limit!r}: expected seconds above 0")
    if type(workers) is not int or workers < 1:
        raise InputError(f"workers = {workers!r}: expected a whole number of processes, >= 1")


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Pool:
    """Children that take questions in turn. They start when they are first needed.

    Args:
      begin: starts one.
      count: of them, which is how many questions are under way at once.
    """

    def __init__(self, begin: Callable[[], Child], count: int):
        self._begin = begin
        self._idle: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(None)

    @contextlib.contextmanager
    def turn(self, child: Child | None = None) -> Iterator[Child]:
        """One that is idle, or `child` in its place; killed behind it if a question lost it.

        Raises: WorkerError if it cannot begin.
        """
        idle = self._idle.get()
        try:
            if child is None:
                child = idle = idle or self._begin()
            yield child
        finally:
            if child is not None and child.is_lost:
                child.kill()
                idle = None if child is idle else idle
            self._idle.put(idle)

    def close(self) -> None:
        """Ends the children that are idle."""
        children = []
        with contextlib.suppress(queue.Empty):
            while True:
                children.append(self._idle.get_nowait())
        for child in children:
            if child is not None:
                child.kill()
            self._idle.put(None)


class Child:
    """What reads questions and writes answers, a line each. It ends with this object.

    Args:
      end: kills it.

    Raises: WorkerError if it cannot begin.
    """

    def __init__(self, questions: IO[bytes], answers: IO[bytes], end: Callable[[], None]):
        self._questions, self._answers = questions, answers
        self._end = weakref.finalize(self, _end, end, questions, answers)
        self._pending, self.is_lost = b"", True
        first = self._read(START_LIMIT)
        problem = first.problem or (first.value or {}).get("error")
        if problem:
            self.kill()
            raise WorkerError(problem)

    def ask(self, line: str, limit: float) -> Answer:
        """The answer to a question, within so many seconds of wall time."""
        self.is_lost = True  # until it answers: one that is interrupted is in an unknown state
        try:
            self._questions.write(line.encode())
            self._questions.flush()
        except (OSError, ValueError):  # it died since the last answer, or was killed
            return Answer(None, "crashed")
        answer = self._read(limit)
        return Answer(None, **answer.value) if isinstance(answer.value, dict) else answer

    def kill(self) -> None:
        """Ends it, and what it has started."""
        self.is_lost = True
        self._end()

    def _read(self, limit: float) -> Answer:
        """The next line of the child; a problem if none comes in time or its output ends."""
        output, deadline = self._answers.fileno(), time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0 or not selector.select(seconds_left):
                    return Answer(None, "timed out")
                part = os.read(output, 65536)
                if not part:
                    return Answer(None, "crashed")
                self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = Answer(json.loads(line))
        except ValueError:
            return Answer(None, "crashed")
        self.is_lost = False
        return answer


def _end(end: Callable[[], None], *pipes: IO[bytes]) -> None:
    end()
    for pipe in pipes:
        with contextlib.suppress(OSError):  # unwritten input of a dead child
            pipe.close()


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    control: socket.socket | None = None,
    **files: Any,
) -> Child:
    """A child that is a program. Raises: WorkerError if it cannot begin.

    Args:
      control: the program ends when this is closed, and is killed if it does not.
      files: of `subprocess.Popen`, in place of pipes.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # In a group of its own, so that its forks are killed with it.
    process = subprocess.Popen(command, process_group=0, env=environment, **{**pipes, **files})
    assert process.stdout is not None

    def end() -> None:
        if control is not None:
            control.close()
        if _is_unreaped(process, GRACE if control is not None else 0.0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    return Child(process.stdin or process.stdout, process.stdout, end)


def _is_unreaped(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Waits so long for a child to end, and leaves it as it is. Whether its number is still its
    own: once it is reaped, as where SIGCHLD is ignored, a kill would hit another group."""
    if sys.platform != "linux":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return True
    over, pause = time.monotonic() + seconds, 0.001
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PID, process.pid, options) is None and time.monotonic() < over:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True
    return False


class Forks:
    """Children that are forks of one process, each in a group of its own.

    That process loads a module once, and none of our threads or of JAX. It begins with the first
    child, and again where it has died. What they print goes to the standard error.

    Args:
      module: whose `load(options)` gives the function that answers.
      options: for it.
      memory: bytes that each child may map.
    """

    def __init__(self, module: Path, options: bytes, memory: int):
        self._command = [sys.executable, "-P", str(PROGRAM), str(module), str(memory)]
        self._options, self._count = options, 0
        self._parent: tuple[Child, socket.socket] | None = None
        self._children: weakref.WeakSet[Child] = weakref.WeakSet()
        self._lock = threading.Lock()

    def begin(self) -> Child:
        """A child. Raises: WorkerError if the module cannot be loaded."""
        with self._lock:
            if self._parent is not None:
                with contextlib.suppress(OSError, WorkerError):
                    return self._fork(self._parent[1])
            self._parent = self._start()
            return self._fork(self._parent[1])

    def close(self) -> None:
        """Ends all children; the next one starts their parent again."""
        with self._lock:
            for child in [*self._children]:
                child.kill()
            if self._parent is not None:
                self._parent[0].kill()
            self._parent = None

    def _start(self) -> tuple[Child, socket.socket]:
        control, its_end = socket.socketpair()
        with its_end, tempfile.TemporaryFile() as options:
            pickle.dump((list(map(os.path.abspath, sys.path)), self._options), options)
            options.seek(0)
            number = its_end.fileno()
            command = [*self._command, str(number)]
            return start(
                command, os.environ, control, stdin=options, stderr=None, pass_fds=(number,)
            ), control

    def _fork(self, control: socket.socket) -> Child:
        self._count += 1
        name = self._count.to_bytes(8)
        connection, its_end = socket.socketpair()
        with connection, its_end:
            socket.send_fds(control, [name], [its_end.fileno()])
            pipes = connection.makefile("wb"), connection.makefile("rb")
        child = Child(*pipes, functools.partial(_tell, control, name))
        self._children.add(child)
        return child


def _tell(control: socket.socket, name: bytes) -> None:
    """Has a fork ended."""
    with contextlib.suppress(OSError):  # its parent is gone, and it with it
        control.send(name)
