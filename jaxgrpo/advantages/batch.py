"""Scales taken from the whole batch: all unmasked samples, or tokens, of all prompts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, Signal

_KEEP = ("zeros", "zero_groups", "nothing")
_EPS_PLACES = ("std", "variance")


def divide_by_batch_std(
    eps: Scheduled = 1e-6, ddof: int = 1, include_flat: bool = True
) -> AdvantageTransform:
    """Divides each value by the standard deviation of the whole batch.

        a[p, g] = r[p, g] / (std_{p, g} r[p, g] + eps)

    The standard deviation is that of the values it gets, so order is meaning: behind
    subtract_group_mean() it is that of the centred rewards (ScaleRL), before it that of the raw
    ones (TRL's "batch", Lite PPO). Unmasked samples only; exactly 0 throughout where all counted
    values of the batch are equal, or fewer than two are there.

    Args:
      eps: added to the standard deviation, in units of reward; a number or a function of the step.
      ddof: 0 divides by n, 1 by n - 1.
      include_flat: False counts only groups whose values are not all equal.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: std.
    Source: ScaleRL, arXiv 2510.13786; Lite PPO, arXiv 2508.08221. Neither gives eps nor ddof, nor
    whether flat groups count; TRL takes 1e-4, 1 and counts them.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(divide_by_batch_std(eps=0.0, ddof=0), [[3.0, 1.0], [1.0, 3.0]])[0].tolist()
    [[3.0, 1.0], [1.0, 3.0]]
    """
    base.check_divisor("divide_by_batch_std", eps, ddof)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        moments = _moments(signal, ddof, include_flat)
        std, flat = jnp.sqrt(moments.variance), moments.flat
        # Where all is flat the divisor may be 0: it is replaced, not only its quotient.
        divisor = jnp.where(flat, 1, std + base.at_step(eps, rollouts, value.dtype))
        divisor = jnp.where(divisor > 0, divisor, jnp.inf)  # eps 0 and a variance that underflows
        divided = jnp.where(flat, 0, value / divisor)
        return base.with_value(signal, divided), {"std": mean(std)}

    return base.stateless("divide_by_batch_std", apply, levels=(2,))


def whiten_batch(
    eps: Scheduled = 1e-8,
    ddof: int = 1,
    eps_in: str = "variance",
    keep: str = "zeros",
    include_flat: bool = True,
) -> AdvantageTransform:
    """Subtracts the mean of the whole batch and divides by its standard deviation.

        eps_in = "variance":  a = (r - mean r) / sqrt(var r + eps)
        eps_in = "std":       a = (r - mean r) / (std r + eps)

    Over all unmasked samples of values [P, G], over all unmasked tokens of [P, G, T], where a long
    sample weighs as many times as it has tokens. Exactly 0 throughout where all counted values
    are equal, or fewer than two are there.

    The mean would push what was exactly 0, flat groups and rejected tokens, off 0; `keep` says
    what stays.

    Args:
      eps: in units of reward, or of its square; a number or a function of the step.
      ddof: 0 divides by n, 1 by n - 1.
      eps_in: "variance" (verl, 1e-8) or "std" (TRL, 1e-4).
      keep: what stays exactly 0: "zeros", each 0; "zero_groups", groups that are 0 throughout;
        "nothing", for values without a baseline, where 0 is a reward like any other.
      include_flat: False counts only groups whose values are not all equal.

    Signal: [P, G] or [P, G, T], mask unchanged.  Metrics: mean, std.
    Source: REINFORCE++, arXiv 2501.03262, which has no baseline and keeps nothing; neither verl
    nor TRL keeps anything.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(whiten_batch(eps=0.0, ddof=0), [[3.0, 1.0], [1.0, 3.0]])[0].tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    base.check_divisor("whiten_batch", eps, ddof)
    base.check_choice("whiten_batch", _EPS_PLACES, eps_in=eps_in)
    base.check_choice("whiten_batch", _KEEP, keep=keep)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        near, above, variance, flat, zero_groups = _moments(signal, ddof, include_flat)
        eps_value = base.at_step(eps, rollouts, above.dtype)
        std = jnp.sqrt(variance)
        divisor = std + eps_value if eps_in == "std" else jnp.sqrt(variance + eps_value)
        divisor = jnp.where(flat | ~(divisor > 0), jnp.inf, divisor)
        silent = {"zeros": signal.value == 0, "zero_groups": zero_groups, "nothing": False}[keep]
        white = jnp.where(silent, 0, ((stats.widen(signal.value) - near) - above) / divisor)
        return base.with_value(signal, white), {"mean": mean(near + above), "std": mean(std)}

    return base.stateless("whiten_batch", apply)._replace(compares_groups=keep == "nothing")


class _Moments(NamedTuple):
    """Of all unmasked values of the batch, or of those in groups that are not flat."""

    near: Array  # [], as in `stats.Summary`
    above: Array  # [], the mean less `near`
    variance: Array  # []
    flat: Array  # [] bool, all that count are equal, or fewer than two do
    zero_groups: Array  # [P, 1] or [P, 1, 1] bool, prompts that are 0 throughout


def _moments(signal: Signal, ddof: int, include_flat: bool) -> _Moments:
    """Two passes: the mean of squares less the squared mean cancels.

    Added up group by group, or sample by sample: one long sum would lose digits in float32.
    """
    value, mask = stats.widen(signal.value), signal.mask
    if value.ndim == 3:
        # Kept in memory: widened once more inside each sum they would cost more than the sums.
        value, mask = jax.lax.optimization_barrier((value, mask))
    axes = tuple(range(1, value.ndim))
    rows = _summarize_tokens(value, mask) if value.ndim == 3 else stats.summary(value, mask)
    low, high = rows.low.min(axes, keepdims=True), rows.high.max(axes, keepdims=True)
    number = rows.count.sum(axes, keepdims=True, dtype=jnp.int32)
    live = jnp.ones_like(mask, shape=number.shape)
    if not include_flat:
        live = (low != high) & (number > 1)
    lowest, highest = jnp.where(live, low, jnp.inf).min(), jnp.where(live, high, -jnp.inf).max()
    near = stats.anchor(lowest, highest)
    above = (rows.near - near) + rows.above
    total = jnp.where(live, above * rows.count.astype(value.dtype), 0).sum(axes).sum()
    live_count = jnp.where(live, number, 0).sum(dtype=jnp.int32)
    above = total / jnp.maximum(live_count, 1).astype(value.dtype)
    squares = jnp.where(mask & live, jnp.square((value - near) - above), 0)
    squares = squares.sum(-1, keepdims=True).sum(axes).sum()
    degrees = jnp.maximum(live_count - ddof, 1).astype(value.dtype)
    flat = (lowest == highest) | (live_count < 2)
    zero = (number == 0) | ((low == 0) & (high == 0))
    return _Moments(near, above, squares / degrees, flat, zero)


def _summarize_tokens(value: Array, mask: Array) -> stats.Summary:
    """As `stats.summary` of each sample's tokens, but low and high may include 0 if they differ.

    Values are 0 where masked, and CPUs reduce without a mask several times as fast as with one.
    """
    number = stats.count_tokens(mask)[..., None]
    low = value.min(-1, keepdims=True, initial=0)
    high = value.max(-1, keepdims=True, initial=0)
    equal = jnp.where(high > 0, high, low)  # what all unmasked tokens are, if they are equal
    differ = (mask & (value != equal)).any(-1, keepdims=True)
    low = jnp.where(number > 0, jnp.where(differ, low, equal), jnp.inf)
    high = jnp.where(number > 0, jnp.where(differ, high, equal), -jnp.inf)
    average = value.sum(-1, keepdims=True) / jnp.maximum(number, 1).astype(value.dtype)
    return stats.Summary(low, high, jnp.zeros_like(average), average, number)
