"""A thread that watches a run: it shows what takes long, and ends a process that does not go on.

A hung call cannot be ended from outside, and while it hangs the main thread obeys no signal. So the
process ends as a whole, with the stacks of its threads on stderr; the last checkpoint stands. Where
several processes run, each has a watchdog, and the first that ends tells the others why.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from jaxgrpo.rewards import limits
from jaxgrpo.training.processes import parent, peers, process

STUCK = 4
"""The exit code of a run that was stuck."""

TICK = 0.5  # seconds between two looks
BACKSTOP = 60.0  # seconds after `stuck_after` at which a process ends that runs no thread of Python


class Watchdog:
    """Watches from `with` on; `phase` says what the run begins to do, which counts as progress.

    Args:
      show: is called with what the run does and for how many seconds, about twice a second.
      saved_line: says what of the run is saved.
      stop_grace: seconds from a stop signal until the process ends.
      stuck_after: seconds without progress until it ends; 0: never.
    """

    def __init__(
        self,
        show: Callable[[str, float], None],
        saved_line: Callable[[], str],
        stop_grace: float,
        stuck_after: float,
    ):
        self._show, self._saved_line = show, saved_line
        self._grace, self._limit = stop_grace, stuck_after
        self._phase = "start", time.monotonic()
        self._called = 0.0  # when the newest call of a reward began
        # The stop signal, and when it must have ended.
        self._stop_request: tuple[int, float] | None = None
        self._stop_time = 0.0  # when that came
        self._is_over = False
        self._bell, self._rope = os.pipe()
        self._old_descriptor: int | None = None  # the descriptor that signals were written to
        self._old_stop: Any = None  # what Ctrl-Z did
        self._hook = threading.excepthook
        self._thread = threading.Thread(target=self._watch, name="jaxgrpo-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        os.set_blocking(self._rope, False)
        self._hook, threading.excepthook = threading.excepthook, _say_in_a_line
        if _is_main_thread():
            # Written when a signal arrives, even if the main thread runs no Python.
            self._old_descriptor = signal.set_wakeup_fd(self._rope, warn_on_full_buffer=False)
            if parent.is_child():  # Ctrl-Z stops both at once, and this one before it is ready
                self._old_stop = signal.signal(signal.SIGTSTP, lambda *_: None)
        self._wind()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        threading.excepthook = self._hook
        if self._old_descriptor is not None:
            signal.set_wakeup_fd(self._old_descriptor, warn_on_full_buffer=False)
        if self._old_stop is not None:
            signal.signal(signal.SIGTSTP, self._old_stop)
        os.write(self._rope, b"\0")
        self._thread.join()
        if self._limit:
            faulthandler.cancel_dump_traceback_later()
        for end in (self._bell, self._rope):
            os.close(end)

    def phase(self, name: str) -> None:
        """The run begins to do this: progress."""
        self._phase = name, time.monotonic()
        if self._old_descriptor is not None and _is_main_thread():
            with contextlib.suppress(OSError, ValueError):  # it was closed, which `_watch` says
                # An event loop of code that the run called may have taken it, and not given back.
                signal.set_wakeup_fd(self._rope, warn_on_full_buffer=False)

    def _watch(self) -> None:
        try:
            while not self._is_over:
                self._listen()
                self._wind()
                self._look(time.monotonic())
                if parent.rests():
                    self._rest()
        except BaseException as error:  # without this thread nothing ends a run that hangs
            why = "code that the run called, a reward for example, may have closed its files"
            self._end(1, f"the watch of the run failed ({type(error).__name__}: {error}): {why}")

    def _listen(self) -> None:
        poller = select.poll()  # select.select refuses descriptors from 1024 on
        poller.register(self._bell, select.POLLIN)
        if poller.poll(1000 * TICK):
            for number in os.read(self._bell, 64):
                if number in process.STOP_SIGNALS:
                    self._hear(number)

    def _wind(self) -> None:
        """Sets the timer that ends the process if no thread gets the interpreter's lock any more.

        It runs in C. A regular expression that never ends holds the lock, for example.
        """
        if self._limit:
            later = self._limit + BACKSTOP
            faulthandler.dump_traceback_later(later, exit=True, file=parent.stacks())

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if self._stop_request is None:
            self._stop_request, self._stop_time = (number, now + self._grace), now
            process.announce_stop()
            process.ask_to_stop(number)  # the handler may be another one's, which stops nothing
        elif limits.in_session():  # the handler raises KeyboardInterrupt
            return
        elif number == signal.SIGINT and now - self._stop_time > parent.ECHO:
            # The handler ends at once, if the main thread comes to it.
            self._stop_request = number, now + TICK

    def _rest(self) -> None:
        """Stops this process until it is continued. That time is not one of being stuck."""
        faulthandler.cancel_dump_traceback_later()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._wind()
        self.phase(self._phase[0])

    def _look(self, now: float) -> None:
        """Shows the phase, and ends the process where it has to."""
        (doing, since), reward = self._phase, limits.running()
        if reward is not None:
            doing, self._called = f"{doing} ({reward.name})", reward.since
        lasted = now - max(since, self._called)
        if self._stop_request is not None and now > self._stop_request[1]:
            number = self._stop_request[0]
            why = f"asked to stop by {signal.Signals(number).name}, it did not come to an end"
            self._end(128 + number, f"{why} in time (run.stop_grace = {self._grace:g} s): {doing}")
        if reward is not None and reward.is_lost(now):
            why = f"does not end at its timeout of {reward.timeout:g} s"
            self._end(STUCK, f"the reward {reward.name} {why}: code of a library holds it")
        if self._limit and now - max(since, limits.newest_change()) > self._limit:
            why = f"no progress for run.stuck_after = {self._limit:g} s"
            remedy = "if that is no mistake, raise it; a reward can have a `timeout`"
            self._end(STUCK, f"{why}: {doing}; {remedy}")
        self._show(doing, lasted)

    def _end(self, code: int, text: str) -> NoReturn:
        try:
            parent.say(f"\n{text}\n")
            parent.say(f"{self._saved_line()}; what the threads are doing:\n")
            faulthandler.dump_traceback(file=parent.stacks())
            peers.fail(code, text)
        finally:
            os._exit(code)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _say_in_a_line(crash: threading.ExceptHookArgs) -> None:
    """What has ended a thread, without its stack: a library's, where a reward closed its files."""
    name = crash.thread.name if crash.thread else "a thread"
    stack = traceback.extract_tb(crash.exc_traceback)
    where = f" ({stack[-1].filename}, line {stack[-1].lineno})" if stack else ""
    text = f"{name} ended with {crash.exc_type.__name__}: {crash.exc_value}{where}\n"
    parent.say(text)
