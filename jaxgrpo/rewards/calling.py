"""Calling the rewards of a run on a batch: sync and async, their failures, logs and label noise."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import math
import signal
import threading
import time
import zlib
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import cut, no_text, own_line, written
from jaxgrpo.data.limits import EventLoop, TimedOut, ending_forks, restoring_process
from jaxgrpo.data.written import storable
from jaxgrpo.rewards.limits import SLACK, call_within, during, in_session, leave
from jaxgrpo.rewards.protocol import (
    BY_NAME,
    LISTS,
    Reward,
    RewardError,
    TrainerState,
    accepted,
    check,
    numbers,
)

CREATED = inspect.CORO_CREATED
SPOKEN = ""
"""The entry of `RewardLog.columns` that no reward logged: the prompt and messages of samples that
were answered, and why one cannot be scored."""
SHOWN = 300  # characters of each text in a message
SEARCH = 10.0  # seconds spent on finding the completion that a reward fails on

_LOOP = EventLoop("jaxgrpo-rewards")


class RewardLog(NamedTuple):
    """What the rewards of a batch logged beside their scores, and how they failed."""

    columns: dict[str, dict[str, list[Any]]]  # reward -> column -> a JSON value per completion
    metrics: dict[str, tuple[float, int]]  # name -> sum and number of the values
    failed: dict[str, int]  # reward with on_error = "unscored" -> completions it failed on
    messages: dict[str, str]  # reward that failed -> what it raised, and on which sample

    @property
    def extra(self) -> dict[str, list[Any]]:
        """Column -> its values; a column that two rewards log has the reward's name in front."""
        logged = {name: columns for name, columns in self.columns.items() if name != SPOKEN}
        names = [column for columns in logged.values() for column in columns]
        return {
            f"{reward}/{column}" if names.count(column) > 1 else column: values
            for reward, columns in logged.items()
            for column, values in columns.items()
        }

    def numbers(self) -> dict[str, float]:
        """The step's metrics: means of what was logged, rewards/NAME/errors in completions."""
        means = {name: total / count for name, (total, count) in self.metrics.items()}
        return means | {f"rewards/{name}/errors": float(n) for name, n in self.failed.items()}


def call_rewards(
    rewards: Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    *,
    group_ids: Sequence[int] | None = None,
    trainer_state: TrainerState | None = None,
    living: Mapping[str, Sequence[Any]] = {},
) -> tuple[dict[str, np.ndarray], RewardLog]:
    """Calls each reward once on N completions; those that are async run at the same time.

    Args:
      rewards: their names appear in the result and in messages. What one that raises does:
        `on_error`. To call sys.exit, or to take more than `timeout` for the N completions, is to
        raise.
      columns: name -> N entries, the data set's columns beside the prompt.
      group_ids: which prompt each is a sample of; None: each of another one.
      living: what answered the samples, as columns, whose entries are not copied.

    Returns: name -> float32 [N], NaN = could not be scored; and what the rewards logged.

    Raises: RewardError if a reward asks for a keyword that does not exist, raises and is not
    "unscored" (the message shows a completion), or returns or logs the wrong number or type of
    values. ValueError if the inputs do not have one length.
    """
    count = len(completions)
    groups = [*(range(count) if group_ids is None else group_ids)]
    trainer_lists = zip(LISTS, (prompts, completions, completion_ids, groups), strict=True)
    lists = {**dict(trainer_lists), **columns, **living}
    _refuse_other_lengths(lists, count)
    for reward in rewards:
        check(reward.name, reward.function, [*columns, *living])
    state = trainer_state or TrainerState()
    calls = [_Call(reward, lists, count, state, living) for reward in rewards]
    _run(calls if count else ())
    scores = {call.name: numbers(call.name, call.outcome, count) for call in calls}
    return scores, RewardLog(
        columns={call.name: call.columns() for call in calls if call.extra},
        metrics=merge_metrics(call.sums() for call in calls),
        failed={call.name: count if call.message else 0 for call in calls if call.unscored},
        messages={call.name: call.message for call in calls if call.message},
    )


def _refuse_other_lengths(lists: Mapping[str, Sequence[Any]], count: int) -> None:
    for keyword, values in lists.items():
        if len(values) != count:
            raise ValueError(
                f"rewards are called with {count} completions but {len(values)} entries of "
                f"{keyword!r}: repeat prompts and columns once per sample"
            )


def merge_metrics(
    logged: Iterable[Mapping[str, tuple[float, int]]],
) -> dict[str, tuple[float, int]]:
    """Sums and numbers of values added up by name."""
    merged: dict[str, tuple[float, int]] = {}
    for metrics in logged:
        for name, (total, count) in metrics.items():
            previous = merged.get(name, (0.0, 0))
            merged[name] = (previous[0] + total, previous[1] + count)
    return merged


class _Raised(NamedTuple):
    """What a call raised instead of returning a value."""

    error: BaseException


@dataclasses.dataclass
class _Call:
    """The call of one reward on one batch: what it returns, logs or raises."""

    reward: Reward
    lists: Mapping[str, Sequence[Any]]
    count: int  # of completions
    state: TrainerState
    living: Collection[str]  # names of lists whose entries are not copied
    outcome: Any = ()  # its values, or an awaitable of them
    message: str = ""  # what it raised
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    metrics: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    threads: set[threading.Thread] = dataclasses.field(default_factory=set)  # before it began

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def unscored(self) -> bool:
        """Whether its scores are NaN if it raises, instead of the run's end."""
        return self.reward.on_error == "unscored"

    @property
    def timeout(self) -> float | None:
        return self.reward.timeout

    def start(self) -> None:
        self.threads.update(threading.enumerate())
        self.finish(self._attempt(self.lists, self._log_extra, self._log_metric))

    def finish(self, outcome: Any) -> None:
        """Takes the outcome of the call: its values, an awaitable of them, or _Raised.

        Raises: RewardError if the reward raised and may not be left unscored.
        """
        self.outcome = outcome
        if not isinstance(outcome, _Raised):
            return
        if isinstance(outcome.error, RewardError):
            raise outcome.error
        if isinstance(outcome.error, TimedOut):
            leave(self.threads)
            message = self._late()
        else:
            message = self._failure(outcome.error)
        if not self.unscored:
            raise RewardError(message) from outcome.error
        # What it logged before it failed is a part at best.
        self.message, self.outcome = message, [None] * self.count
        self.extra, self.metrics = {}, {}

    def sums(self) -> dict[str, tuple[float, int]]:
        """name of a logged metric -> sum and number of its values."""
        return {name: (sum(values), len(values)) for name, values in self.metrics.items()}

    def columns(self) -> dict[str, list[Any]]:
        """Its logged columns. Raises: RewardError if one has not a value for each completion."""
        for column, values in self.extra.items():
            if len(values) != self.count:
                raise RewardError(
                    f"rewards.{self.name}: log_extra({column!r}, ...) got {len(values)} values for "
                    f"{self.count} completions: give one for each, None where there is none"
                )
        return self.extra

    def _late(self) -> str:
        return (
            f"rewards.{self.name} was not done with {self.count} completions within timeout = "
            f"{self.timeout:g} s, and was ended: raise its timeout, or give each completion a limit"
        )

    def _failure(self, error: BaseException) -> str:
        """What was raised and on which completion, found by calling halves of the batch again."""
        low, high = 0, self.count
        deadline = time.monotonic() + SEARCH
        while high - low > 1 and time.monotonic() < deadline:
            middle = (low + high) // 2
            halves = ((low, middle), (middle, high))
            failing = next((half for half in halves if self._fails(*half)), None)
            if failing is None:
                break
            low, high = failing
        several = high - low > 1
        where = f"completions {low} to {high - 1} together" if several else f"completion {low}"
        shown_values = {key.removesuffix("s"): self.lists[key] for key in LISTS[:2]}
        arguments = self._accepted(self.lists)
        shown_values |= {key: values for key, values in arguments.items() if key not in LISTS}
        lines = [f"  {key} = {_shorten(values[low])}" for key, values in shown_values.items()]
        place, code = own_line(error)
        kind, text = type(error).__name__, cut(written(error, str))
        raised = [f"rewards.{self.name} raised {kind} on {where}: {text}"]
        raised += [f"  in {place}: {code}"] if place else []
        return "\n".join([*raised, *lines])

    def _fails(self, start: int, end: int) -> bool:
        part = {key: values[start:end] for key, values in self.lists.items()}
        outcome = self._attempt(part, lambda *_: None, lambda *_: None)
        if inspect.isawaitable(outcome):
            (outcome,) = _wait_for({self.name: (outcome, self.timeout)})
        return isinstance(outcome, _Raised)

    def _attempt(self, lists: Mapping[str, Sequence[Any]], log_extra: Any, log_metric: Any) -> Any:
        logs = {"trainer_state": self.state, "log_extra": log_extra, "log_metric": log_metric}
        arguments = self._accepted({**lists, **logs})
        private_arguments = {
            key: self._copied(key, lists[key]) if key in lists else arguments[key]
            for key in arguments
        }
        try:
            with (
                during(self.name, self.timeout),
                ending_forks(f"rewards.{self.name}"),
                restoring_process(),
            ):
                return call_within(self.timeout, lambda: self.reward.function(**private_arguments))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and _is_ctrl_c():
                raise
            return _Raised(error)

    def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What it is called with. Of what answered the samples TRL passes environments alone."""
        by_name = {*BY_NAME, *self.living} - {"environments"}
        return accepted(self.reward.function, arguments, by_name)

    def _copied(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        """A list of its own: what it changes in place reaches no other reward and not the data.

        Entries that are one object, as the row's of a prompt with several samples, stay one.
        """
        if key == "completion_ids":
            return [list(ids) for ids in values]  # deepcopy would look at every number
        if key in self.living:
            return values
        try:
            return copy.deepcopy(values)
        except Exception as error:
            raise RewardError(
                f"rewards.{self.name}: the column {key!r} holds a value that cannot be copied "
                f"({type(error).__name__}: {written(error, str)}), and every reward gets a copy: "
                "keep such a value in the reward's file, and what identifies it in the data"
            ) from error

    def _log_extra(self, column: Any, values: Any) -> None:
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
            raise RewardError(
                f"rewards.{self.name}: log_extra({column!r}, ...) got a {type(values).__name__}: "
                "give a list with one value per completion"
            )
        # As in TRL, values of several calls follow one another: some rewards log one at a time.
        self.extra.setdefault(str(column), []).extend(map(storable, values))

    def _log_metric(self, name: Any, value: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise RewardError(
                f"rewards.{self.name}: log_metric({name!r}, {_shorten(value)}): give a number"
            ) from None
        if problem := no_text(str(name)):  # no tracker takes it
            raise RewardError(f"rewards.{self.name}: log_metric({name!r}, ...): {problem}")
        if math.isfinite(number):
            self.metrics.setdefault(str(name), []).append(number)


def _run(calls: Sequence[_Call]) -> None:
    """Starts the calls in order, then waits for all that are async together.

    Raises: RewardError on the first that raises and may not be left unscored.
    """
    try:
        for call in calls:
            call.start()
        waiting = [call for call in calls if inspect.isawaitable(call.outcome)]
        if waiting:
            outcomes = _wait_for({call.name: (call.outcome, call.timeout) for call in waiting})
            for call, outcome in zip(waiting, outcomes, strict=True):
                call.finish(outcome)
    finally:
        for call in calls:
            # Never begun, since another reward has raised: it would warn that it was never awaited.
            value = call.outcome
            if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == CREATED:
                value.close()


def _is_ctrl_c() -> bool:
    """Whether a KeyboardInterrupt comes from the user: not if the run handles the signal, but for a
    second one in a session."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler or in_session()


def _wait_for(named: Mapping[str, tuple[Awaitable[Any], float | None]]) -> list[Any]:
    """The results of all, which run at the same time; _Raised(error) for those that fail.

    Args:
      named: name of the reward -> what to wait for, and for how many seconds.

    Raises: RewardError if all have a limit and the loop is blocked beyond it.
    """
    names = ", ".join(named)
    limits = [limit for _, limit in named.values() if limit is not None]
    longest = max(limits) + SLACK if len(limits) == len(named) else None
    wait = _LOOP.begin(_gather(list(named.values())))
    try:
        with during(names), restoring_process():
            return wait(longest)
    except TimedOut as error:
        raise RewardError(
            f"rewards.{names}: blocked the event loop beyond its timeout: an async def has to "
            "await whatever takes long; run what cannot be awaited by asyncio.to_thread"
        ) from error


async def _gather(awaitables: Sequence[tuple[Awaitable[Any], float | None]]) -> list[Any]:
    async def outcome(awaitable: Awaitable[Any], limit: float | None) -> Any:
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                return await awaitable
        except BaseException as error:  # one that left its task would end the loop's thread
            return _Raised(TimedOut() if scope.expired() else error)

    return await asyncio.gather(*(outcome(*pair) for pair in awaitables))


def _shorten(value: Any) -> str:
    text = written(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def flipped(
    scores: Mapping[str, np.ndarray],
    log: RewardLog,
    rewards: Sequence[Reward],
    seed: int,
    step: int,
    ordinal: np.ndarray,
) -> tuple[dict[str, np.ndarray], RewardLog]:
    """Label noise: the scores with a share of the 0/1 rewards flipped, and the share in the log.

        r -> 1 - r    if draw(seed, reward, step, ordinal, sample) < flip

    A draw depends on nothing else: two methods that get the same prompts under one seed meet the
    same noise. What is unscored stays so. The log gets rewards/NAME/flipped, the share of the
    scored samples that were flipped.

    Args:
      scores: name -> [P, G], NaN = not scored.
      rewards: with the probability `flip` of each.
      ordinal: [P], places in the prompt stream.

    Raises: RewardError if such a reward gives anything but 0 and 1.
    """
    noisy, metrics = dict(scores), dict(log.metrics)
    for name, flip in ((reward.name, reward.flip) for reward in rewards if reward.flip):
        value = scores[name]
        scored = np.isfinite(value)
        odd = value[scored & (value != 0) & (value != 1)]
        if len(odd):
            raise RewardError(
                f"rewards.{name} gave {odd[0]:g}, and flip = {flip:g} flips rewards that are "
                "0 or 1: take flip out, or a reward of 0 and 1"
            )
        flips = scored & (sample_draws(seed, name, step, ordinal, value.shape[1]) < flip)
        noisy[name] = np.where(flips, 1 - value, value).astype(value.dtype)
        metrics[f"rewards/{name}/flipped"] = (float(flips.sum()), max(1, int(scored.sum())))
    return noisy, log._replace(metrics=metrics)


def sample_draws(seed: int, name: str, step: int, ordinal: np.ndarray, samples: int) -> np.ndarray:
    """Uniform numbers [P, G]; those of a prompt begin alike whatever the size of its group."""
    source = zlib.crc32(name.encode())
    seeds = ([seed, source, step, int(place)] for place in ordinal)
    return np.stack([np.random.default_rng(entropy).random(samples) for entropy in seeds])
