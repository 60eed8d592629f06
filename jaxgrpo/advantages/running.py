"""Baselines and scales from a running estimate over batches: one number, no rows remembered.

A baseline that had seen its own sample would be biased, so each part reads its state first and
updates it afterwards. State is saved with the run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, check_at_least
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal


def ema_baseline(decay: Scheduled = 0.9, initial: float = 0.0) -> AdvantageTransform:
    """Subtracts the running mean of the mean rewards of earlier batches.

        a[p, g] = r[p, g] - b                       b as it was before this batch
        n <- decay n + 1,   b <- b + (m - b) / n    m the mean of this batch's unmasked values

    The weights of the batches are decay^age over their sum, from the first batch on: no start-up
    bias, and the second batch already has the mean of the first. A batch without a scored sample
    changes nothing.

    Args:
      decay: weight of the past, in [0, 1): 0 remembers the last batch only; a number or a
        function of the step.
      initial: the baseline of the first batch, in units of reward. 0 knows nothing of the reward
        and is unbiased; 0.5 suits rewards in {0, 1}.

    Signal: [P, G] -> [P, G], mask unchanged.  State: mean [], weight [].  Metrics: baseline.
    Source: Williams 1992, REINFORCE with a reinforcement-comparison baseline.
    """
    check_share("ema_baseline", "decay", decay, below_one=True)

    def init(spec: RolloutSpec) -> dict[str, Array]:
        return {"mean": zeros(()), "weight": zeros(())}

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        dtype = state["mean"].dtype
        baseline = jnp.where(state["weight"] > 0, state["mean"], jnp.asarray(initial, dtype))
        value = stats.widen(signal.value)
        after = value - baseline.astype(value.dtype)
        weight = at_step(decay, rollouts, dtype) * state["weight"] + 1
        batch = _whole_mean(signal).astype(dtype)
        new = {"mean": state["mean"] + (batch - state["mean"]) / weight, "weight": weight}
        after = replace_value(signal, after)
        return after, _unless_empty(signal, new, state), {"baseline": mean(baseline)}

    return AdvantageTransform("ema_baseline", init, update, levels=(2,))


def divide_by_running_scale(
    decay: Scheduled = 0.99, eps: float = 1e-8, initial: float | None = None
) -> AdvantageTransform:
    """Divides by the running standard deviation of the values of earlier batches.

        a = x / (s + eps),   s^2 the variance of earlier values, those of a batch weighing decay^age

    One number for the whole batch, fixed before it: the expected gradient keeps its direction. An
    s of exactly 0 (all values were equal) divides by 1. A batch whose values are all equal counts
    with variance exactly 0.

    Args:
      decay: weight of the past, in [0, 1); a number or a function of the step.
      eps: added to s, in units of reward.
      initial: s of the first batch; None takes the deviation of that batch itself, so that the
        scale of the rewards never matters.

    Signal: [P, G] or [P, G, T], mask unchanged.  State: mean, variance, weight, each [].
    Metrics: scale, the s that was used.
    Source: reward scaling of common PPO codes (Engstrom et al. 2020, arXiv 2005.12729), which
    takes the deviation of discounted returns and includes the present batch.
    """
    check_share("divide_by_running_scale", "decay", decay, below_one=True)
    check_at_least("divide_by_running_scale", 0, eps=eps)
    if initial is not None and not initial > 0:
        raise InputError(f"divide_by_running_scale: initial = {initial}, expected above 0 or None")

    def init(spec: RolloutSpec) -> dict[str, Array]:
        return {name: zeros(()) for name in ("mean", "variance", "weight")}

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        dtype = state["mean"].dtype
        moments = _whole_moments(signal, dtype)
        first = jnp.sqrt(moments[1]) if initial is None else jnp.asarray(initial, dtype)
        scale = jnp.where(state["weight"] > 0, jnp.sqrt(state["variance"]), first)
        divisor = jnp.where(scale > 0, scale + eps, 1)
        value = stats.widen(signal.value)
        after = replace_value(signal, value / divisor.astype(value.dtype))
        new = _mixed(state, at_step(decay, rollouts, dtype), *moments)
        return after, _unless_empty(signal, new, state), {"scale": mean(divisor)}

    return AdvantageTransform("divide_by_running_scale", init, update)


def _whole_mean(signal: Signal) -> Array:
    """The mean of all unmasked values, []; 0 without any."""
    return stats.mean(signal.value.reshape(-1), signal.mask.reshape(-1), axis=0)[0]


def _mixed(state: Any, decay: Any, average: Array, variance: Array) -> dict[str, Array]:
    """The moments of what was seen and of a new batch, the old ones weighing `decay` as much."""
    weight = decay * state["weight"] + 1
    share, gap = 1 / weight, average - state["mean"]
    # Within both, and between their means; a mean of squares would cancel in float32.
    within = (1 - share) * state["variance"] + share * variance
    between = share * (1 - share) * jnp.square(gap)
    return {"mean": state["mean"] + share * gap, "variance": within + between, "weight": weight}


def _whole_moments(signal: Signal, dtype: Any) -> tuple[Array, Array]:
    """Mean and variance of all unmasked values, []; exact where they are all equal."""
    value, mask = stats.widen(signal.value).reshape(-1), signal.mask.reshape(-1)
    flat = stats.is_flat(value, mask, axis=0)[0]
    some = mask.any()
    # The rounded mean of equal values is not one of them, and would give them a variance.
    low = jnp.where(some, stats.extremes(value, mask, axis=0)[0][0], 0)
    average = jnp.where(flat, low, stats.mean(value, mask, axis=0)[0])
    variance = jnp.where(flat, 0, stats.variance(value, mask, axis=0)[0])
    return average.astype(dtype), variance.astype(dtype)


def _unless_empty(signal: Signal, new: Any, old: Any) -> Any:
    some = signal.mask.any()
    return jax.tree.map(lambda one, other: jnp.where(some, one, other), new, old)


def check_share(name: str, option: str, value: Scheduled, below_one: bool = False) -> None:
    """Refuses a share outside [0, 1], before anything runs; a schedule is not looked at."""
    if callable(value):
        return
    if not 0 <= value <= 1 or (below_one and value == 1):
        expected = "0 or more and below 1" if below_one else "between 0 and 1"
        raise InputError(f"{name}: {option} = {value}, expected {expected}")


def zeros(shape: tuple[int, ...]) -> Array:
    """State that knows nothing yet."""
    return jnp.zeros(shape, jnp.result_type(float))


def replace_value(signal: Signal, value: Array) -> Signal:
    """The signal with another value, in the dtype of its own."""
    return dataclasses.replace(signal, value=value.astype(signal.value.dtype))
