"""Time limits of rewards, and which reward is running now.

A reward is interrupted (`data.limits`). Where that has no effect, training/processes/watchdog.py,
which reads `running`, can only end the process. A thread that is left alone would be worse: it
would go on changing what later calls read, and a regular expression in it stops every other thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Set
from typing import NamedTuple, TypeVar

from jaxgrpo.data.limits import interrupted_after
from jaxgrpo.rewards.protocol import RewardError

SLACK = 30.0  # seconds beyond its limit after which a reward will not come back

T = TypeVar("T")


class Running(NamedTuple):
    """A reward that is being called."""

    name: str
    since: float  # time.monotonic()
    timeout: float | None = None

    def is_lost(self, now: float) -> bool:
        """Whether it is so far beyond its limit that it will not come back."""
        return self.timeout is not None and now - self.since > self.timeout + SLACK


def in_session() -> bool:
    """Whether a user is at a prompt of Python, as in a notebook: the process outlives a run."""
    return hasattr(sys, "ps1")


_calls: list[Running] = []
_newest_change = 0.0
_left: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def running() -> Running | None:
    """The reward that this process is calling; read by other threads too."""
    return _calls[-1] if _calls else None


@contextlib.contextmanager
def during(name: str, timeout: float | None = None) -> Iterator[None]:
    """Within it, this reward is `running`."""
    global _newest_change
    _newest_change = time.monotonic()
    _calls.append(Running(name, _newest_change, timeout))
    try:
        yield
    finally:
        _calls.pop()
        _newest_change = time.monotonic()


def newest_change() -> float:
    """The time.monotonic() at which a call of a reward began or ended last; 0: there was none.

    A call may be over before anybody asks what is `running`.
    """
    return _newest_change


def leave(earlier_threads: Set[threading.Thread]) -> None:
    """Takes the threads that were not there before for those of a reward that timed out."""
    _left.update(
        thread
        for thread in threading.enumerate()
        if thread not in earlier_threads and not thread.daemon
    )


def has_left_threads() -> bool:
    """Whether threads live that a reward left at its limit; Python would wait for them at exit."""
    return any(thread.is_alive() for thread in _left)


def call_within(seconds: float | None, function: Callable[[], T]) -> T:
    """Its result. Raises: TimedOut after so many seconds; None has no limit.

    Raises: RewardError outside the main thread, where no signal arrives.

    >>> call_within(0.05, lambda: time.sleep(9))
    Traceback (most recent call last):
    jaxgrpo.data.limits.TimedOut
    """
    if seconds is None:
        return function()
    if threading.current_thread() is not threading.main_thread():
        raise RewardError(
            f"timeout = {seconds:g} of a reward: training runs in a thread, and a limit works in "
            "the main thread only; call jaxgrpo.train there, take timeout out, or make the reward "
            "an async def"
        )
    return interrupted_after(seconds, function)
