"""Environments of the packages gymnasium and textarena, as objects of Gym's protocol in text.

    environment = "gymnasium:FrozenLake-v1?is_slippery=false"
    environment = "textarena:GuessTheNumber-v0"

Each is imported when a run names it. `find` gives what makes one; `partners.GymPartner` answers a
sample with it.

Sources: Gymnasium's toy text; textarena.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from jaxgrpo.core.errors import InputError, cut, one_line
from jaxgrpo.data.written import split_options
from jaxgrpo.rewards.builtin import after_thought

ACTIONS = {
    "FrozenLakeEnv": ("left", "down", "right", "up"),
    "CliffWalkingEnv": ("up", "right", "down", "left"),
    "TaxiEnv": ("south", "north", "east", "west", "pickup", "dropoff"),
    "BlackjackEnv": ("stick", "hit"),
}
"""What the actions of gymnasium's environments are called; those of others have numbers alone."""

PLACES = ("red", "green", "yellow", "blue", "the taxi")
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m")
_LAST_ACTION = re.compile(r"^ *\(\w+\)\n", re.MULTILINE)

_drawing = threading.Lock()
"""Of Python's own random numbers, which the games of textarena draw from."""


def find(name: str) -> Callable[[], Any] | None:
    """What makes the environment of a name "PACKAGE:NAME"; None for own code.

    It raises InputError where the package is missing, or has no such environment that a sample
    could talk to.
    """
    package, _, rest = name.partition(":")
    if package not in _KINDS:
        return None
    return functools.partial(_make, package, rest)


def _make(package: str, rest: str) -> Any:
    return _KINDS[package](*split_options(rest))


class Gymnasium:
    """An environment of gymnasium with a finite list of actions.

    A turn is read for the last name or number of an action in it. One without any is answered by
    the list of actions: it costs a turn, and changes nothing else.
    """

    def __init__(self, name: str, options: Mapping[str, Any]):
        where = f"gymnasium:{name}"
        gymnasium = _import("gymnasium", where)
        spec = gymnasium.registry.get(name)
        if spec is None:
            raise InputError(
                f"{where}: gymnasium has no {name!r}: {_nearest(name, gymnasium.registry)}"
            )
        try:
            self._environment = gymnasium.make(name, **options)
            if "ansi" in self._environment.metadata.get("render_modes", ()):
                self._environment = gymnasium.make(name, render_mode="ansi", **options)
        except Exception as error:  # of the package, of one that it needs, or of an option
            raise InputError(f"{where} cannot be made: {cut(one_line(error))}") from error
        self._base = self._environment.unwrapped
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise InputError(
                f"{where}: its actions are {cut(str(space))}: take one with a list of them"
            )
        first, count = int(space.start), int(space.n)
        numbers = {str(number): number for number in range(first, first + count)}
        named = ACTIONS.get(type(self._base).__name__, ())
        self._actions = {**dict(zip(named, numbers.values(), strict=False)), **numbers}
        self._pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(self._actions)})(?![\w-]|\.\d)", re.I)
        self._list = ", ".join(named or numbers)

    def reset(self, seed: int) -> str:
        observation, _ = self._environment.reset(seed=seed)
        return f"{self._describe(observation)}\nActions: {self._list}."

    def step(self, text: str) -> tuple[str, float, bool]:
        mentioned = self._pattern.findall(after_thought(text))
        if not mentioned:
            return f"No action in this turn. Write one of: {self._list}.", 0.0, False
        action = self._actions[mentioned[-1].lower()]
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return self._describe(observation), float(reward), bool(terminated or truncated)

    def _describe(self, observation: Any) -> str:
        """The state as a text: the grid where the environment draws one, and what it hides."""
        kind = type(self._base).__name__
        if kind == "BlackjackEnv":
            total, card, has_ace = (int(value) for value in observation)
            ace = "a usable ace" if has_ace else "no usable ace"
            return f"Your cards add up to {total} with {ace}. The dealer shows {card}."
        if self._environment.render_mode != "ansi":
            return f"State: {observation}"
        grid = self._environment.render()
        # A colour alone shows the place of the agent.
        mark = r"[\1]" if kind == "FrozenLakeEnv" else r"\1"
        grid = _COLOURED.sub(mark, _LAST_ACTION.sub("", grid)).strip("\n")
        if kind == "TaxiEnv":
            row, column, passenger, goal = (int(v) for v in self._base.decode(observation))
            state = f"The taxi is in row {row}, column {column}, the passenger at "
            return f"{grid}\n{state}{PLACES[passenger]}, the destination is {PLACES[goal]}."
        return grid


class TextArena:
    """A game of textarena for one player: what it says since the last turn, and its final reward.

    Its games draw from Python's own random numbers. Each has a state of these of its own here, and
    they take turns, so that a game does not depend on those that are played beside it.
    """

    def __init__(self, name: str, options: Mapping[str, Any]):
        self._where = f"textarena:{name}"
        self._state: Any = None
        with self._alone():
            textarena = _import("textarena", self._where)
            games = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
            if name not in games:
                raise InputError(
                    f"{self._where}: textarena has no {name!r}: {_nearest(name, games)}"
                )
            try:
                with _without_downloads():
                    self._game = textarena.make(name, **options)
                    self._game.reset(num_players=1, seed=0)
            except SyntaxError as error:
                version = ".".join(map(str, sys.version_info[:2]))
                raise InputError(
                    f"{self._where}: the game's file is no Python {version} ({error}): take "
                    "Python 3.12 or later, or another game"
                ) from error
            except LookupError as error:
                raise InputError(
                    f"{self._where}: {cut(_lacks(error))}: fetch NLTK's lists once, python -m "
                    "nltk.downloader words averaged_perceptron_tagger_eng, or take another game"
                ) from error
            except Exception as error:  # of a game for two, without its files or its judge
                raise InputError(f"{self._where} cannot be made: {cut(one_line(error))}") from error
        base = self._game
        while isinstance(base, textarena.Wrapper):
            base = base.env
        self._base = base
        if not isinstance(base.state, textarena.SinglePlayerState):
            raise InputError(f"{self._where} is a game for several: take a game for one player")

    def reset(self, seed: int) -> str:
        with self._alone():
            self._game.reset(num_players=1, seed=seed)
            return self._news()

    def step(self, text: str) -> tuple[str, float, bool]:
        with self._alone():
            is_done, _ = self._game.step(text)
            rewards = self._game.close()[0] if is_done else None
            return self._news(), float((rewards or {}).get(0, 0.0)), bool(is_done)

    def _news(self) -> str:
        """What the game said since the last turn, without what the player did."""
        _, messages = self._base.get_observation()
        return "\n".join(text for sender, text, *_ in messages if sender != 0)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside it the game draws its own random numbers."""
        with _drawing:
            before = random.getstate()
            if self._state is not None:
                random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(before)


_KINDS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "gymnasium": Gymnasium,
    "textarena": TextArena,
}


def _import(package: str, where: str) -> ModuleType:
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{where} needs the package {package}, which is not installed: "
            f'pip install "jaxgrpo[envs]" (or {package} by itself)'
        )
    return importlib.import_module(package)


def _nearest(name: str, names: Iterable[str]) -> str:
    names = [*names]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"it has {len(names)} others"


@contextlib.contextmanager
def _without_downloads() -> Iterator[None]:
    """Within it NLTK fetches nothing: games ask it to when they are imported."""
    nltk: Any = _import("nltk", "textarena")
    download, nltk.download = nltk.download, lambda *names, **options: False
    try:
        yield
    finally:
        nltk.download = download


def _lacks(error: LookupError) -> str:
    resource = re.search(r"Resource '?(?:\x1b\[\d+m)?(\w+)", str(error))
    return f"{resource[1]!r} is missing" if resource else f"it lacks {one_line(error)}"
