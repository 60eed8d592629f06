"""Limits of time and memory for what other people wrote: rewards, chat templates, tokenizers.

No function can be ended from outside while its process lives on. In the main thread a timer's
signal interrupts it: Python code, whatever waits, regular expressions and operations on whole
numbers end with TimedOut. Code of a library that neither returns to Python nor looks for signals
runs on; if it gives up the interpreter's lock, another thread can stop waiting for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from jaxgrpo.core.errors import one_line

AGAIN = 1.0  # seconds until the next signal, if the function caught the exception
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What stops a run: training/processes/parent.py, which loads nothing of ours, has them too."""

STATUS = Path("/proc/self/statm")
"""Begins with the pages that the process has mapped; Linux has it."""

T = TypeVar("T")


class TimedOut(BaseException):
    """Raised inside a function at its time limit.

    No Exception: `except Exception: score = 0` in a reward would make a wrong answer of it.
    """


def within(seconds: float, function: Callable[[], T]) -> T:
    """Its result. Raises: TimedOut after so many seconds.

    By `interrupted_after` where signals arrive, in the main thread; else by `left_after`.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return (interrupted_after if is_main else left_after)(seconds, function)


def interrupted_after(seconds: float, function: Callable[[], T]) -> T:
    """Its result. Raises: TimedOut inside it after so many seconds. For the main thread alone.

    Uses the signal SIGALRM and the timer of real time, which the function must then leave alone.

    >>> interrupted_after(0.05, lambda: time.sleep(9))
    Traceback (most recent call last):
    jaxgrpo.data.limits.TimedOut
    """
    armed = True

    def ring(number: int, frame: object) -> None:
        if armed:
            raise TimedOut

    handler = signal.signal(signal.SIGALRM, ring)
    began = time.monotonic()
    seconds_left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        try:
            return function()
        finally:
            armed = False
    finally:
        remaining = max(seconds_left - (time.monotonic() - began), 1e-3) if seconds_left else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)


def left_after(seconds: float, function: Callable[[], T]) -> T:
    """Its result. Raises: TimedOut after so many seconds, while it runs on in a thread.

    Python code in that thread ends, code of a library need not: for functions that change nothing.
    A panic of a library in Rust, which is no Exception, is raised as RuntimeError.

    >>> left_after(0.05, lambda: time.sleep(9))
    Traceback (most recent call last):
    jaxgrpo.data.limits.TimedOut
    """
    return Caller("jaxgrpo-limited").call(seconds, function)


class Caller:
    """Calls functions one after another in a thread of its own, as `left_after` does each.

    So what belongs to a thread, as a connection of sqlite3, serves from one call to the next. The
    thread begins with the first call and ends with this object. After a call that took too long
    the next one begins another.
    """

    def __init__(self, name: str):
        self._name = name
        self._tasks: queue.SimpleQueue[Any] | None = None

    def begin(self) -> queue.SimpleQueue[Any]:
        """What its thread runs. Raises: RuntimeError where no thread can be started."""
        if self._tasks is None:
            tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
            thread = threading.Thread(target=_run_all, args=(tasks,), name=self._name, daemon=True)
            thread.start()
            self._thread, self._tasks = thread, tasks
            self._end = weakref.finalize(self, tasks.put, None)
        return self._tasks

    def call(self, seconds: float | None, function: Callable[[], T]) -> T:
        """Its result. Args: seconds: that it may take; None: any."""
        tasks = self.begin()
        outcome: Future[T] = Future()
        tasks.put((function, outcome))
        if outcome not in wait([outcome], seconds).done:
            end = ctypes.pythonapi.PyThreadState_SetAsyncExc
            end(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit))
            self._end()
            self._tasks = None
            raise TimedOut
        error = outcome.exception()
        try:
            if error is None or isinstance(error, Exception):
                return outcome.result()
            raise RuntimeError(f"{type(error).__name__}: {one_line(error)}") from error
        finally:
            del error, outcome  # an error that its own frame holds keeps this object


def _run_all(tasks: queue.SimpleQueue[Any]) -> None:
    """Runs what comes, up to None."""
    for function, outcome in iter(tasks.get, None):
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)
        del function, outcome  # or they live until the next one comes


async def without_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    """What it gives. What it raises that is no Exception, as `sys.exit` or a panic of a library in
    Rust, is raised as RuntimeError, and does not end the loop with all that runs beside it."""
    try:
        return await coroutine
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {one_line(error)}") from error


class EventLoop:
    """An event loop in a thread of its own, which begins with the first coroutine.

    So async code runs where a loop is running already, as in a notebook, and what it keeps between
    calls (a session, a lock) stays with its loop.
    """

    def __init__(self, name: str):
        self._name, self._lock = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Callable[[float | None], T]:
        """Runs it beside the others.

        Returns: (seconds; None: any) -> its result. Raises what it raises; TimedOut after so many
          seconds, when the loop itself is blocked: the next coroutine begins another.
        """
        with self._lock:  # of two loops what is kept between calls would belong to one
            if (loop := self._loop) is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name=self._name, daemon=True).start()
                self._loop = loop
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)

        def result(seconds: float | None) -> T:
            try:
                if future in wait([future], seconds).done:
                    return future.result()
                with self._lock:
                    self._loop = None if self._loop is loop else self._loop
                raise TimedOut
            finally:
                future.cancel()  # where a signal came while it waits, too

        return result


@contextlib.contextmanager
def ending_forks(name: str) -> Iterator[None]:
    """Ends a process that the block forks and that comes to the end of the block.

    It would take the steps of a run a second time, and write them into the same folder.

    Args:
      name: of the code in the block, for the message.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            text = f"{name}: a process that it forked did not end by itself, and is ended\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode("utf-8", "backslashreplace"))
            os._exit(1)


@contextlib.contextmanager
def restoring_process() -> Iterator[None]:
    """Puts back what the block has changed of the process and a run needs.

    What STOPS do, where they were handled or ignored: libraries take SIGTERM or SIGINT for
    themselves when they are loaded or called, and a run would hear no stop signal. That SIGPIPE is
    ignored: a reader that is gone would kill the process. A timer that was begun and
    not stopped, as by signal.alarm: it would go off within the run. And stdin, stdout and stderr,
    where they were closed: the next file that is opened would get what is printed.
    """
    is_main = threading.current_thread() is threading.main_thread()  # no other changes handlers
    numbers = (*STOPS, signal.SIGPIPE) if is_main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    had_timer = not is_main or any(signal.getitimer(signal.ITIMER_REAL))
    try:
        yield
    finally:
        if not had_timer and any(signal.getitimer(signal.ITIMER_REAL)):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            is_default = handler in (None, signal.SIG_DFL)
            if not is_default and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for number in range(3):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
                os.set_inheritable(number, True)


@contextlib.contextmanager
def memory(extra_bytes: int) -> Iterator[None]:
    """Within it the process can map so many bytes more; beyond them Python raises MemoryError.

    Of use where only Python runs: a library may end the process. Without effect beside Linux.
    """
    if not STATUS.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(STATUS.read_text().split()[0]) * resource.getpagesize()
    limits = [
        limit for limit in (mapped + extra_bytes, soft, hard) if limit != resource.RLIM_INFINITY
    ]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
