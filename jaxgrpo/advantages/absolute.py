"""Advantages that judge a sample by itself: no group, so nothing is flat."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, stateless
from jaxgrpo.errors import InputError
from jaxgrpo.metrics import Metrics, mean
from jaxgrpo.types import Rollouts, Signal


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
        value, mask = signal.value, signal.mask
        if threshold is not None:
            success = value >= at_step(threshold, rollouts, value.dtype)
            return _signs(signal, success), {}
        binary = (value == 0) | (value == 1)
        _refuse(value, mask & ~binary)
        metrics: Metrics = {"refused": mean(~binary, mask)}
        return _signs(dataclasses.replace(signal, mask=mask & binary), value == 1), metrics

    return stateless("sign", apply, levels=(2,))


def clip_advantage(low: Scheduled, high: Scheduled) -> AdvantageTransform:
    """Cuts each value to [-low, high]; the sign stays.

    Args:
      low: the largest loss, positive; a number or a function of the step.
      high: the largest gain, positive.

    Signal: [P, G] or [P, G, T], mask unchanged.  Raises: InputError on bounds that are not
    positive.
    """
    for name, bound in {"low": low, "high": high}.items():
        if not callable(bound) and not bound > 0:
            raise InputError(f"clip_advantage: {name} = {bound}, expected a positive number")

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = signal.value
        low_now, high_now = (at_step(bound, rollouts, value.dtype) for bound in (low, high))
        cut = jnp.clip(value, -low_now, high_now)
        return dataclasses.replace(signal, value=cut), {"clipped": mean(cut != value, signal.mask)}

    return stateless("clip_advantage", apply)


def _signs(signal: Signal, success: Array) -> Signal:
    value = jnp.where(success, 1, -1).astype(signal.value.dtype)
    return dataclasses.replace(signal, value=jnp.where(signal.mask, value, 0))


def _refuse(value: Array, wrong: Array) -> None:
    if isinstance(value, Tracer) or isinstance(wrong, Tracer):
        return
    if bool(wrong.any()):
        found = float(value[wrong][0])
        raise InputError(
            f"sign takes rewards in {{0, 1}} but got {found:g}: give threshold=..., the lowest"
            " reward that is a success, or put sign on a reward that is 0 or 1"
        )
