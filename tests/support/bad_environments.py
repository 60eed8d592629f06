"""Own code for tests: tools and environments that are wrong, each in a way of its own."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import Any

import jax.numpy as jnp

from jaxgrpo import Rules

NUMBER = 3


def nothing(completions, **columns):
    return [0.0] * len(completions)


def wants_environments(completions, environments, **columns):
    return [0.0] * len(completions)


def parse(text):
    """Every turn has three calls: of no tool, one that cannot be read, and `act`."""
    return text, [{"name": "fly", "arguments": {"to": "sea"}}, 7, {"name": "act"}]


def look(words: str) -> str:
    """Looks.

    Args:
        words: for what
    """
    return words


def untyped(words):
    """Looks.

    Args:
        words: for what
    """


def undocumented(words: str) -> str:
    return words


def unexplained(words: str) -> str:
    """Looks."""
    return words


def starred(*words: str) -> str:
    """Looks.

    Args:
        words: for what
    """
    return str(words)


def wordy(words: str) -> str:
    """Looks.

    Args:
        words: for what
    """
    return words


def wait():
    for _ in range(6000):
        time.sleep(0.01)


class Good:
    """TRL's protocol."""

    def reset(self, **row) -> Any:
        return None

    def act(self) -> Any:
        """Acts."""
        return "fine"

    def get_reward(self) -> Any:
        return 1.0


class Gym:
    def reset(self, seed) -> Any:
        return "go"

    def step(self, text) -> Any:
        return "no", 0.5, False


instance = Good()


def shared() -> Good:
    return instance


def makes_nothing():
    return None


class NoReset:
    def act(self) -> str:
        """Acts."""
        return "fine"


class NeedsBoard(Good):
    def __init__(self, board):
        self.board = board


class NoLicence(Good):
    def __init__(self):
        raise OSError("no licence")


class Exits(Good):
    def __init__(self):
        sys.exit(3)


class Untyped(Good):
    def move(self, number):
        return number


class Looks(Good):
    def look(self, words: str) -> str:
        """Looks.

        Args:
            words: for what
        """
        return words


class ColumnMissing(Good):
    def reset(self, board, **row):
        return board


class ColumnUnexpected(Good):
    def reset(self):
        return None


class Unseeded(Gym):
    def reset(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return "go"


class Wordy(Good):
    def reset(self, **row):
        return "x" * 400


# What breaks, or answers in words, while samples are drawn.


class ResetRaises(Good):
    def reset(self, **row):
        raise KeyError("board")


class ResetList(Good):
    def reset(self, **row):
        return ["x"]


class ResetSlow(Good):
    def reset(self, **row):
        wait()


class ResetExits(Good):
    def reset(self, **row):
        sys.exit(3)


class ActRaises(Good):
    def act(self):
        """Acts."""
        raise ValueError("no such place")


class ActNothing(Good):
    def act(self):
        """Acts."""


class ResetLong(Good):
    def reset(self, **row):
        return "x" * 200_000


class ActLong(Good):
    def act(self):
        """Acts."""
        return "x" * 200_000


class ActSlow(Good):
    def act(self):
        """Acts."""
        wait()


class ActExits(Good):
    def act(self):
        """Acts."""
        sys.exit(3)


class AsyncExits(Good):
    async def act(self):
        """Acts."""
        sys.exit(3)


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


class AsyncPanics(Good):
    async def act(self):
        """Acts."""
        raise Panic("out of bounds")


class AsyncFine(Good):
    async def act(self):
        """Acts."""
        await asyncio.sleep(0.2)
        return "fine"


class ActUnwritable(Good):
    def act(self):
        """Acts."""

        class Odd:
            def __str__(self):
                raise RuntimeError("no text")

        return Odd()


class ActSurrogate(Good):
    def act(self):
        """Acts."""
        return "a\ud800b"


class ActWantsMore(Good):
    def act(self, place: str):
        """Acts.

        Args:
            place: where
        """
        return place


class RewardRaises(Good):
    def get_reward(self):
        raise RuntimeError("lost the board")


class RewardText(Good):
    def get_reward(self):
        return "good"


class RewardDigits(Good):
    def get_reward(self):
        return "0.5"


class RewardInfinite(Good):
    def get_reward(self):
        return math.inf


class RewardNone(Good):
    def get_reward(self):
        return None


class RewardSlow(Good):
    def get_reward(self):
        wait()


class ResetNothing(Gym):
    def reset(self, seed):
        return None


class StepNothing(Gym):
    def step(self, text):
        return None


class StepTwo(Gym):
    def step(self, text):
        return "no", 1.0


class StepPaysText(Gym):
    def step(self, text):
        return "no", "much", False


class StepPaysInfinity(Gym):
    def step(self, text):
        return "no", math.inf, False


class StepSaysNothing(Gym):
    def step(self, text):
        return None, 0.5, False


class StepLong(Gym):
    def step(self, text):
        return "x" * 200_000, 0.5, False


class StepRaises(Gym):
    def step(self, text):
        raise ValueError("illegal move")


# Rules in JAX.


def begin(key, row):
    return jnp.int32(0)


def branching(state, tokens, length):
    return state if tokens[0] > 3 else -state


secret = Rules(lambda key, row: row["secret"], branching)
untraceable = Rules(begin, branching)
