"""Calling the rewards of a run on a batch of completions.

Awaiting async rewards together, from code that is not async.

Rewards that are wrong now and then, on purpose: how much noise a method bears.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import time
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.rewards.protocol import (
    LISTS,
    RewardError,
    RewardFunction,
    TrainerState,
    accepted,
    check,
    numbers,
)

SHOWN = 300  # characters of each text in a message
CREATED = inspect.CORO_CREATED
SEARCH = 10.0  # seconds spent on finding the completion that a reward fails on


class RewardLog(NamedTuple):
    """What the rewards said of a batch beside their scores."""

    extra: dict[str, list[Any]]  # column -> a value per completion, as JSON holds it
    metrics: dict[str, tuple[float, int]]  # name -> sum and number of the values
    failed: dict[str, int]  # reward with on_error = "unscored" -> completions it failed on
    messages: dict[str, str]  # reward that failed -> what it raised, and on which sample

    def numbers(self) -> dict[str, float]:
        """The step's metrics: means of what was logged, rewards/NAME/errors in completions."""
        means = {name: total / count for name, (total, count) in self.metrics.items()}
        return means | {f"rewards/{name}/errors": float(n) for name, n in self.failed.items()}


def call_rewards(
    rewards: Mapping[str, RewardFunction],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    *,
    trainer_state: TrainerState | None = None,
    on_error: Mapping[str, str] | None = None,
) -> tuple[dict[str, np.ndarray], RewardLog]:
    """Calls each reward once on N completions; those that are async run at the same time.

    Args:
      rewards: name -> function; the names appear in the result and in messages.
      columns: name -> N entries, the data set's columns beside the prompt.
      on_error: name -> "raise" (the default) or "unscored": what follows where a reward raises.

    Returns: name -> float32 [N], NaN = could not be scored; and what the rewards logged.

    Raises: RewardError where a reward asks for a keyword that does not exist, raises and is not
    "unscored" (the message shows a completion it fails on), or returns or logs the wrong number or
    type of values. ValueError where the inputs do not have one length.
    """
    given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    lists = {**given, **columns}
    count = len(completions)
    _check_lengths(lists, count)
    for name, function in rewards.items():
        check(name, function, columns)
    modes = {name: (on_error or {}).get(name, "raise") for name in rewards}
    failed = {name: 0 for name, mode in modes.items() if mode == "unscored"}
    if not count:
        return {name: np.empty(0, np.float32) for name in rewards}, RewardLog({}, {}, failed, {})
    state = trainer_state or TrainerState()
    calls = {name: _Call(name, function, lists, state) for name, function in rewards.items()}
    scores, messages = {}, {}
    for name, outcome in _outcomes(calls, modes).items():
        if isinstance(outcome, Raised):
            failed[name], messages[name] = count, calls[name].failure(outcome.error)
            outcome = [None] * count
            calls[name].forget()
        scores[name] = numbers(name, outcome, count)
    return scores, RewardLog(_columns(calls, count), _metrics(calls), failed, messages)


class _Call:
    """One reward about to judge one batch, and what it logs while it does."""

    def __init__(
        self,
        name: str,
        function: RewardFunction,
        lists: Mapping[str, Sequence[Any]],
        state: TrainerState,
    ):
        self.name, self.function, self.given = name, function, lists
        self.state = state
        self.count = len(lists["completions"])
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def forget(self) -> None:
        """Drops what was logged: a call that failed may have logged a part."""
        self.extra, self.metrics = {}, {}

    def start(self) -> Any:
        """The values, an awaitable of them, or Raised."""
        return self._attempt(self.given, self._log_extra, self._log_metric)

    def failure(self, error: BaseException) -> str:
        """What was raised and on which completion, found by calling halves of the batch again."""
        low, high = 0, self.count
        deadline = time.monotonic() + SEARCH
        while high - low > 1 and time.monotonic() < deadline:
            middle = (low + high) // 2
            if self._fails(low, middle):
                high = middle
            elif self._fails(middle, high):
                low = middle
            else:
                break
        single = high - low == 1
        where = f"completion {low}" if single else f"completions {low} to {high - 1} together"
        shown = {key.removesuffix("s"): self.given[key] for key in LISTS[:2]}
        asked = accepted(self.function, self.given)
        shown |= {key: values for key, values in asked.items() if key not in LISTS}
        return "\n".join(
            [
                f"rewards.{self.name} raised {type(error).__name__} on {where}: {error}",
                *(f"  {key} = {_shorten(values[low])}" for key, values in shown.items()),
            ]
        )

    def _fails(self, start: int, end: int) -> bool:
        part = {key: values[start:end] for key, values in self.given.items()}
        outcome = self._attempt(part, lambda *_: None, lambda *_: None)
        if inspect.isawaitable(outcome):
            (outcome,) = wait_for([outcome])
        return isinstance(outcome, Raised)

    def _attempt(self, lists: Mapping[str, Sequence[Any]], log_extra: Any, log_metric: Any) -> Any:
        logs = {"trainer_state": self.state, "log_extra": log_extra, "log_metric": log_metric}
        try:
            return self.function(**accepted(self.function, {**lists, **logs}))
        except Exception as error:
            return Raised(error)

    def _log_extra(self, column: Any, values: Any) -> None:
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
            raise RewardError(
                f"rewards.{self.name}: log_extra({column!r}, ...) got a {type(values).__name__}: "
                "give a list with one value per completion"
            )
        # As in TRL, values of several calls follow one another: some rewards log one at a time.
        self.extra.setdefault(str(column), []).extend(map(_storable, values))

    def _log_metric(self, name: Any, value: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(
                f"rewards.{self.name}: log_metric({name!r}, {value!r}): give a number"
            ) from None
        if math.isfinite(number):
            self.metrics.setdefault(str(name), []).append(number)


def _outcomes(calls: Mapping[str, _Call], modes: Mapping[str, str]) -> dict[str, Any]:
    """What each reward returned, or Raised, in their order.

    Raises: RewardError on the first that raises and is not to be left unscored.
    """

    def settle(name: str, outcome: Any) -> None:
        if not isinstance(outcome, Raised):
            return
        error = outcome.error
        if isinstance(error, (RewardError, KeyboardInterrupt, SystemExit)):
            raise error
        if modes[name] == "raise":
            raise RewardError(calls[name].failure(error)) from error

    outcomes: dict[str, Any] = {}
    try:
        for name, call in calls.items():
            outcomes[name] = call.start()
            settle(name, outcomes[name])
        awaited = {name: value for name, value in outcomes.items() if inspect.isawaitable(value)}
        if awaited:
            outcomes |= zip(awaited, wait_for(list(awaited.values())), strict=True)
            for name in awaited:
                settle(name, outcomes[name])
    finally:
        for value in outcomes.values():
            # Never begun, since another reward has raised: it would warn that nobody awaited it.
            if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == CREATED:
                value.close()
    return outcomes


def _columns(calls: Mapping[str, _Call], count: int) -> dict[str, list[Any]]:
    """The logged columns; one that two rewards log bears the reward's name too."""
    logged = [column for call in calls.values() for column in call.extra]
    columns = {}
    for name, call in calls.items():
        for column, values in call.extra.items():
            if len(values) != count:
                raise RewardError(
                    f"rewards.{name}: log_extra({column!r}, ...) got {len(values)} values for "
                    f"{count} completions: give one for each, None where there is none"
                )
            columns[f"{name}/{column}" if logged.count(column) > 1 else column] = values
    return columns


def _metrics(calls: Mapping[str, _Call]) -> dict[str, tuple[float, int]]:
    metrics: dict[str, tuple[float, int]] = {}
    for call in calls.values():
        for name, values in call.metrics.items():
            total, count = metrics.get(name, (0.0, 0))
            metrics[name] = (total + sum(values), count + len(values))
    return metrics


def _check_lengths(keywords: Mapping[str, Sequence[Any]], count: int) -> None:
    for keyword, values in keywords.items():
        if len(values) != count:
            raise ValueError(
                f"rewards are called with {count} completions but {len(values)} entries of "
                f"{keyword!r}: repeat prompts and columns once per sample"
            )


def _storable(value: Any) -> Any:
    """A logged value as JSON holds it: arrays as lists, what is no number or text as its repr."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return _storable(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _storable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(entry) for entry in value]
    return repr(value)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


class Raised(NamedTuple):
    """What a call raised in the place of a value."""

    error: BaseException


def wait_for(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all, which run at the same time; Raised(error) where one fails.

    They run in one event loop of a thread of its own. So this works where a loop is running
    already, as in a notebook, and what a reward keeps between calls (a session, a lock) stays with
    its loop.
    """
    future = asyncio.run_coroutine_threadsafe(_gather(awaitables), _loop())
    try:
        return future.result()
    except BaseException:  # a signal, while waiting
        future.cancel()
        raise


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="jaxgrpo-rewards", daemon=True).start()
    return loop


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*map(_outcome, awaitables)))


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except BaseException as error:  # one that left its task would end the loop's thread
        return Raised(error)


def flipped(
    scores: Mapping[str, np.ndarray],
    log: RewardLog,
    noise: Mapping[str, float],
    seed: int,
    step: int,
    ordinal: np.ndarray,
) -> tuple[dict[str, np.ndarray], RewardLog]:
    """The scores with a share of the 0/1 rewards turned over, and their log, which tells of it.

        r -> 1 - r    where draw(seed, reward, step, ordinal, sample) < flip

    A draw depends on nothing else: two methods that are given the same prompts under one seed meet
    the same noise. What is unscored stays so. The log gets rewards/NAME/flipped, the share of the
    scored samples that were turned over.

    Args:
      scores: name -> [P, G], NaN = not scored.
      noise: name -> flip, the probability, for the rewards that have one.
      ordinal: [P], places in the prompt stream.

    Raises: RewardError where such a reward gives anything but 0 and 1.
    """
    turned, metrics = dict(scores), dict(log.metrics)
    for name, flip in noise.items():
        value = scores[name]
        scored = np.isfinite(value)
        odd = value[scored & (value != 0) & (value != 1)]
        if len(odd):
            raise RewardError(
                f"rewards.{name} gave {odd[0]:g}, and flip = {flip:g} turns over rewards that are "
                "0 or 1: take flip out, or a reward of 0 and 1"
            )
        chosen = scored & (_draws(seed, name, step, ordinal, value.shape[1]) < flip)
        turned[name] = np.where(chosen, 1 - value, value).astype(value.dtype)
        metrics[f"rewards/{name}/flipped"] = (float(chosen.sum()), max(1, int(scored.sum())))
    return turned, log._replace(metrics=metrics)


def _draws(seed: int, name: str, step: int, ordinal: np.ndarray, samples: int) -> np.ndarray:
    """Uniform numbers [P, G]; those of a prompt begin alike whatever the size of its group."""
    source = zlib.crc32(name.encode())
    of_prompt = ([seed, source, step, int(place)] for place in ordinal)
    return np.stack([np.random.default_rng(entropy).random(samples) for entropy in of_prompt])
