"""Advantages that judge a sample by itself: no group, so nothing is flat."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import (
    AdvantageTransform,
    Scheduled,
    at_step,
    check_at_least,
    stateless,
    with_value,
)
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, Signal


def sign(threshold: Scheduled | None = None) -> AdvantageTransform:
    """+1 for a success, -1 for a failure, whatever the others of the group did.

        a[p, g] = 2 r[p, g] - 1                    rewards in {0, 1}
        a[p, g] = +1 if r[p, g] >= threshold else -1

    Flat groups stay alive: all-fail groups push away from what was tried, all-pass groups confirm.

    Args:
      threshold: the lowest reward that is a success; a number or a function of the step. None:
        rewards must be 0 or 1.

    Signal: [P, G] -> [P, G].  Without a threshold another reward is an InputError where values
    are known, and masked and counted ("refused") under jit, where nothing can be raised.
    Source: Gradient starvation, arXiv 2605.07689 (A = 2r - 1). The threshold is ours.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal, success, metrics = successes("sign", signal, threshold, rollouts)
        return _replace(signal, jnp.where(success, 1, -1)), metrics

    return stateless("sign", apply, levels=(2,))


def asymmetric(cost: Scheduled = 1.0, threshold: Scheduled | None = None) -> AdvantageTransform:
    """+1 for a success, -cost for a failure, whatever the others of the group did.

        a[p, g] = r[p, g] - cost (1 - r[p, g])                  rewards in {0, 1}

    cost 1 is `sign`, cost 0 REINFORCE without a baseline. In expectation each cost gives the same
    direction, (1 + cost) times the gradient of the success rate; all-fail groups alone give
    cost / G times that of pass@G.

    Args:
      cost: of a failure; a number, not below 0, or a function of the step.
      threshold: the lowest reward that is a success; None: rewards must be 0 or 1.

    Signal: [P, G] -> [P, G].  Other rewards as with `sign`; so is the metric "refused".
    Source: equation 8 of Gradient starvation, arXiv 2605.07689.
    """
    check_at_least("asymmetric", 0, cost=cost)  # below 0 failures would be praised

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal, success, metrics = successes("asymmetric", signal, threshold, rollouts)
        value = stats.widen(signal.value)
        failed = jnp.broadcast_to(-jnp.asarray(at_step(cost, rollouts, value.dtype)), value.shape)
        return _replace(signal, jnp.where(success, 1, failed.astype(value.dtype))), metrics

    return stateless("asymmetric", apply, levels=(2,))


def conditional_sign(threshold: Scheduled | None = None) -> AdvantageTransform:
    """Less the group mean where a group has both, sign where all succeed or all fail.

        a[p, g] = s[p, g] - mean_g s[p, g]   mixed group         s = 1 for a success, else 0
        a[p, g] = 2 s[p, g] - 1              flat group

    A single unmasked sample is a flat group.

    Args:
      threshold: the lowest reward that is a success; None: rewards must be 0 or 1.

    Signal: [P, G] -> [P, G].  Other rewards as with `sign`; so is the metric "refused".
    Source: our mixture of the two advantages of Gradient starvation, arXiv 2605.07689.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal, success, metrics = successes("conditional_sign", signal, threshold, rollouts)
        reward = success.astype(stats.widen(signal.value).dtype)
        rate = stats.mean(reward, signal.mask)
        mixed = (rate > 0) & (rate < 1)
        return _replace(signal, jnp.where(mixed, reward - rate, 2 * reward - 1)), metrics

    return stateless("conditional_sign", apply, levels=(2,))


def subtract_constant(baseline: Scheduled) -> AdvantageTransform:
    """Subtracts one number from every sample.

        a[p, g] = r[p, g] - baseline

    A constant changes the variance of the gradient, not its expectation.

    Args:
      baseline: in units of reward; a number or a function of the step.

    Signal: [P, G] -> [P, G], mask unchanged.
    Source: Williams 1992, REINFORCE with a baseline.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        return _replace(signal, value - at_step(baseline, rollouts, value.dtype)), {}

    return stateless("subtract_constant", apply, levels=(2,))


def clip_advantage(
    limit: Scheduled | None = None, low: Scheduled | None = None, high: Scheduled | None = None
) -> AdvantageTransform:
    """Cuts values to a range round 0.

        a = min(max(a, low), high)        low <= 0 <= high, so no sign is ever flipped

    Args:
      limit: both at once: -limit and limit. A number or a function of the step, as are the others.
      low: the lowest value, not above 0; None: no bound.
      high: the highest value, not below 0; None: no bound.

    Signal: [P, G] or [P, G, T], mask unchanged.  Metrics: clipped, the share of unmasked entries.
    Raises: InputError on bounds on the wrong side of 0; a schedule's are cut to 0 instead.
    """
    if (limit is None) == (low is None and high is None):
        raise InputError("clip_advantage: give limit, or low, high or both of them")
    if limit is not None and not callable(limit) and not limit >= 0:
        raise InputError(f"clip_advantage: limit = {limit}, expected 0 or more")
    low, high = (_minus(limit), limit) if limit is not None else (low, high)
    for name, bound, right in (("low", low, -1), ("high", high, 1)):
        if bound is not None and not callable(bound) and not bound * right >= 0:
            side = "not above" if right < 0 else "not below"
            raise InputError(
                f"clip_advantage: {name} = {bound}, expected a number {side} 0: it would flip signs"
            )

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        cut = value
        if high is not None:
            cut = jnp.minimum(cut, jnp.maximum(at_step(high, rollouts, value.dtype), 0))
        if low is not None:
            cut = jnp.maximum(cut, jnp.minimum(at_step(low, rollouts, value.dtype), 0))
        return _replace(signal, cut), {"clipped": mean(cut != value, signal.mask)}

    return stateless("clip_advantage", apply)


def successes(
    name: str, signal: Signal, threshold: Scheduled | None, rollouts: Rollouts
) -> tuple[Signal, Array, Metrics]:
    """(signal, which samples succeeded, metrics) of a part that takes rewards in {0, 1}.

    Without a threshold another reward is an InputError where values are known, and masked and
    counted ("refused") under jit.
    """
    value, mask = signal.value, signal.mask
    if threshold is not None:
        return signal, value >= at_step(threshold, rollouts, value.dtype), {}
    binary = (value == 0) | (value == 1)
    _refuse(name, value, mask & ~binary)
    metrics: Metrics = {"refused": mean(~binary, mask)}
    return dataclasses.replace(signal, mask=mask & binary), value == 1, metrics


def _replace(signal: Signal, value: Array) -> Signal:
    return with_value(signal, jnp.where(signal.mask, value, 0))


def _minus(bound: Scheduled) -> Scheduled:
    return (lambda step: -bound(step)) if callable(bound) else -bound


def _refuse(name: str, value: Array, wrong: Array) -> None:
    if isinstance(value, Tracer) or isinstance(wrong, Tracer):
        return
    if bool(wrong.any()):
        found = float(value[wrong][0])
        raise InputError(
            f"{name} takes rewards in {{0, 1}} but got {found:g}: give threshold=..., the lowest"
            f" reward that is a success, or put {name} on a reward that is 0 or 1"
        )
