"""Tools and environments that other processes load, and how each kind of them goes wrong."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
import time
from typing import Any


def add(a: int, b: int = 2) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def later(a: int) -> str:
    """Waits a little.

    Args:
        a: what comes back
    """
    await asyncio.sleep(0.05)
    return f"late {a}"


def fail(a: int) -> str:
    """Fails.

    Args:
        a: nothing
    """
    raise ValueError(f"no {a}")


def leave() -> str:
    """Raises what is no Exception."""
    raise SystemExit("over")


def lock() -> Any:
    """Returns what cannot be pickled."""
    return threading.Lock()


def spin() -> str:
    """Keeps the interpreter's lock, and catches what Python raises in it."""
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue


def match() -> str:
    """Never comes back from C."""
    return str(re.match(r"(a|aa)+$", "a" * 100 + "b"))


def sleep() -> str:
    """Waits for longer than it may."""
    time.sleep(600)
    return "done"


def eat() -> str:
    """Takes memory until there is none."""
    blocks = []
    while True:
        blocks.append(bytearray(2**26))


def die() -> str:
    """Ends its process."""
    os._exit(7)


def crash() -> str:
    """Writes where it may not."""
    import ctypes

    return str(ctypes.string_at(0))


def spawn() -> int:
    """Starts a program that goes on, and says its number."""
    return subprocess.Popen(["sleep", "600"]).pid


def where() -> str:
    """Says in which process it runs."""
    return str(os.getpid())


TOOLS: dict[str, Any] = {
    function.__name__: function
    for function in (
        *(add, later, fail, leave, lock, spin, match, sleep, eat, die, crash, spawn, where),
    )
}

BAD = {"spin": "timed_out", "match": "timed_out", "sleep": "timed_out"}
BAD |= {"eat": "memory", "die": "crashed", "crash": "crashed"}
"""Tools that end their process -> how"""


class Game:
    """As TRL has them, with every tool as a method."""

    def reset(self, start: int = 0, seed: int = 0, **row: Any) -> str | None:
        self.count = start + seed % 7
        return f" From {self.count}."

    def up(self) -> str:
        """Counts up."""
        self.count += 1
        return str(self.count)

    async def soon(self) -> int:
        """Counts up later."""
        self.count += 1
        return self.count

    def bad(self, name: str) -> Any:
        """Does what the tool of that name does.

        Args:
            name: of a tool
        """
        return TOOLS[name]()

    def where(self) -> int:
        """Says in which process it lives."""
        return os.getpid()

    def get_reward(self) -> float:
        if self.count > 99:
            die()
        return float(self.count)


class Walk:
    """As Gymnasium has them, with what cannot be pickled beside the rest."""

    def reset(self, *, seed: int, low: int = 0) -> tuple[int, Any]:
        self.place = low + seed % 5
        return self.place, threading.Lock()

    def step(self, action: str) -> tuple[int, float, bool, bool, Any]:
        if action in TOOLS:
            TOOLS[action]()
        self.place += len(action)
        return self.place, self.place / 3, False, self.place > 9, threading.Lock()


class Refuses:
    """It cannot begin again."""

    def reset(self, **row: Any) -> str | None:
        raise KeyError("board")


class Talks(Game):
    """It says what is no text."""

    def reset(self, **row: Any) -> Any:
        return [1]
