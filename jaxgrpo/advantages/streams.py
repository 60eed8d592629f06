"""Transforms that know several rewards: each reward is a stream until `sum_rewards`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, Streams, at_step
from jaxgrpo.advantages.chains import chain
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, accumulate_dtype
from jaxgrpo.core.names import suggest
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal


def sum_rewards(**weights: Scheduled) -> AdvantageTransform:
    """Adds the weighted streams to one signal.

        r[p, g] = sum_name weight[name] * stream[name][p, g]

    Without weights every stream weighs 1. With weights each stream must be named: one that is not
    meant to count gets weight 0, and is then not read at all. A sample that one of the summed
    streams could not score is masked: a sum over the others would be another reward.

    Args:
      weights: name of the stream = weight, a number or a function of the step.

    Streams: [P, G] each -> Signal [P, G], unmasked where all summed streams are.
    Raises: InputError (a ValueError) on weights without a stream and streams without a weight.
    """

    return _sum("sum_rewards", weights, lambda masks: functools.reduce(operator.and_, masks))


def sum_scored(**weights: Scheduled) -> AdvantageTransform:
    """Adds the weighted streams to one signal; what a stream could not score counts 0 in it.

        r[p, g] = sum_name weight[name] * stream[name][p, g]     over the streams that scored it

    `sum_rewards` masks such a sample instead: its sum is another reward than that of its group.
    A sample that none of them could score is masked.

    Args:
      weights: name of the stream = weight, a number or a function of the step; none: all 1.

    Streams: [P, G] each -> Signal [P, G], unmasked where any summed stream is.
    Raises: InputError (a ValueError) on weights without a stream and streams without a weight.
    Source: TRL 1.16, which adds what is not NaN. Ours only in `like_trl`.
    """

    return _sum("sum_scored", weights, lambda masks: functools.reduce(operator.or_, masks))


def per_reward(transform: AdvantageTransform) -> AdvantageTransform:
    """Applies a transform of one signal to each stream by itself, with a state of its own.

    GRPO sums and then normalises; GDPO normalises per reward and then sums:
    `chain(per_reward(chain(subtract_group_mean(), divide_by_group_std())), sum_rewards())`.
    A mask that the transform sets holds for its stream; `sum_rewards` unites them.

    Streams: [P, G] each -> the same names.  Raises: InputError on a transform that takes streams.
    """
    if transform.kind != "signal->signal":
        raise InputError(
            f"per_reward({transform.name}) needs a transform of one signal, but it takes the"
            " streams: put it beside per_reward in the chain"
        )
    # A chain of one re-zeroes and checks, whatever was given.
    inner = transform if transform.steps else chain(transform, name=transform.name)

    def init(spec: RolloutSpec) -> dict[str, Any]:
        return {name: inner.init(spec) for name in spec.rewards}

    def update(streams: Streams, state: Any, rollouts: Rollouts) -> tuple[Streams, Any, Metrics]:
        if set(state) != set(streams):
            raise InputError(
                f"per_reward has state for the streams {sorted(state)} but got {sorted(streams)}:"
                " use the state that init(spec) returned for these rewards"
            )
        after: Streams = {}
        new_state: dict[str, Any] = {}
        metrics: Metrics = {}
        for name, stream in streams.items():
            after[name], new_state[name], more = inner.update(stream, state[name], rollouts)
            metrics |= {f"{name}/{metric}": value for metric, value in more.items()}
        return after, new_state, metrics

    return AdvantageTransform(
        f"per_reward_{transform.name}",
        init,
        update,
        needs=transform.needs,
        kind="streams->streams",
        levels=inner.levels,
        relative=transform.relative,
        ordered=transform.ordered,
        importance=transform.importance,
    )


def stream(
    name: str, function: Callable[[Rollouts], Array], needs: tuple[str, ...] = ()
) -> AdvantageTransform:
    """Adds a stream computed from the rollouts; entries that are not finite are masked.

    So is a sample that every stream before it has masked: nothing brings it back.

    Args:
      name: of the new stream, as `sum_rewards` knows it.
      function: rollouts -> [P, G].
      needs: names of the fields that it reads.

    Streams: those given and the new one.  Raises: InputError where the name is taken.
    """

    def init(spec: RolloutSpec) -> tuple[()]:
        check_free(name, spec.rewards)
        return ()

    def update(streams: Streams, state: Any, rollouts: Rollouts) -> tuple[Streams, Any, Metrics]:
        check_free(name, tuple(streams))
        value = function(rollouts)
        expected = next(iter(streams.values())).value.shape
        if value.shape != expected:
            raise InputError(
                f"stream {name!r} has shape {value.shape}, expected [P, G] = {expected}"
            )
        there = functools.reduce(operator.or_, (one.mask for one in streams.values()))
        scored = jnp.isfinite(value) & there
        added = Signal(value=jnp.where(scored, value, 0), mask=scored)
        return {**streams, name: added}, state, {}

    return AdvantageTransform(
        f"stream_{name}",
        init,
        update,
        needs=frozenset(needs),
        kind="streams->streams",
        levels=(2,),
        provides=(name,),
    )


def _sum(
    part: str, weights: Mapping[str, Scheduled], unite: Callable[[list[Array]], Array]
) -> AdvantageTransform:
    """The weighted sum of the streams that count; `unite` makes one mask of theirs."""

    def init(spec: RolloutSpec) -> tuple[()]:
        counted(part, weights, spec.rewards)
        return ()

    def update(streams: Streams, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        dtype, sum_dtype = common_dtypes(streams)
        first = next(iter(streams.values()))
        total = jnp.zeros(first.value.shape, sum_dtype)
        masks = []
        for name, weight in counted(part, weights, tuple(streams)).items():
            weight = at_step(weight, rollouts, sum_dtype)
            total = total + weight * streams[name].value.astype(sum_dtype)
            masks.append(streams[name].mask)
        mask = unite(masks) if masks else jnp.ones_like(first.mask)
        return Signal(value=total.astype(dtype), mask=mask), state, {}

    return AdvantageTransform(part, init, update, kind="streams->signal", levels=(2,))


def check_free(name: str, streams: tuple[str, ...]) -> None:
    """Raises: InputError where a stream of that name is there already."""
    if name in streams:
        raise InputError(f"stream {name!r} exists already: {', '.join(streams)}; take another name")


def counted(
    step: str, weights: Mapping[str, Scheduled], streams: tuple[str, ...]
) -> dict[str, Scheduled]:
    """The streams that are summed, with their weights: weight 0 leaves a stream unread.

    Args:
      step: opens the message of an error.
      weights: of every stream, or of none (all count with weight 1).

    Raises: InputError on weights without a stream and streams without a weight.
    """
    for name in weights:
        if name not in streams:
            raise InputError(
                f"{step}: weight {name!r} has no reward of that name: {suggest(name, streams)}"
            )
    for name in streams:
        if weights and name not in weights:
            raise InputError(
                f"{step}: reward {name!r} has no weight: name every reward"
                f" (weight 0 leaves it out) or none; weights: {', '.join(weights)}"
            )
    given = {name: weights.get(name, 1.0) for name in streams}
    return {name: weight for name, weight in given.items() if callable(weight) or weight != 0}


def common_dtypes(streams: Streams) -> tuple[Any, Any]:
    """(dtype of one signal made of the streams, dtype to add them in).

    Streams of one dtype give that dtype; of several, the widest that sums are taken in.
    """
    dtypes = {stream.value.dtype for stream in streams.values()}
    widest = max(map(accumulate_dtype, dtypes), key=lambda dtype: dtype.itemsize)
    return (next(iter(dtypes)) if len(dtypes) == 1 else widest), widest
