"""Scales taken from the whole batch: all unmasked samples, or tokens, of all prompts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, stateless, with_value
from jaxgrpo.core import onepass
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, Metrics
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
    """
    stats.check_ddof("divide_by_batch_std", ddof)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        _, variance, flat, _ = _moments(signal, ddof, include_flat)
        std = jnp.sqrt(variance)
        # Where all is flat the divisor may be 0: it is replaced, not only its quotient.
        divisor = jnp.where(flat, 1, std + at_step(eps, rollouts, value.dtype))
        divisor = jnp.where(divisor > 0, divisor, jnp.inf)  # eps 0 and a variance that underflows
        divided = jnp.where(flat, 0, value / divisor)
        return with_value(signal, divided), {"std": _one(std)}

    return stateless("divide_by_batch_std", apply, levels=(2,))


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
    """
    stats.check_ddof("whiten_batch", ddof)
    _check_choice("eps_in", eps_in, _EPS_PLACES)
    _check_choice("keep", keep, _KEEP)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        mean, variance, flat, zero_groups = _moments(signal, ddof, include_flat)
        added = at_step(eps, rollouts, mean.dtype)
        std = jnp.sqrt(variance)
        divisor = std + added if eps_in == "std" else jnp.sqrt(variance + added)
        divisor = jnp.where(flat | ~(divisor > 0), jnp.inf, divisor)
        value = stats.widen(signal.value)
        silent = {"zeros": value == 0, "zero_groups": zero_groups, "nothing": False}[keep]
        white = jnp.where(silent, 0, (value - mean) / divisor)
        return with_value(signal, white), {"mean": _one(mean), "std": _one(std)}

    return stateless("whiten_batch", apply)


class _Moments(NamedTuple):
    """Of all unmasked values of the batch, or of those in groups that are not flat."""

    mean: Array  # []
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
        first = _of_tokens(value, mask, include_flat)
    else:
        first = _of_samples(stats.of_groups(signal), include_flat)
    mean = first.total / jnp.maximum(first.number, 1).astype(value.dtype)
    squares = _total(jnp.where(mask, jnp.square(value - mean), 0), first.counted)
    degrees = jnp.maximum(first.number - ddof, 1).astype(value.dtype)
    zero = first.zero.reshape(-1, *(1,) * (value.ndim - 1))
    return _Moments(mean, squares / degrees, first.flat | (first.number < 2), zero)


class _First(NamedTuple):
    """What the first pass over a batch tells."""

    total: Array  # [] of the values that count
    number: Array  # [] int32, of them
    counted: Array  # [P, 1] or [1, 1] bool, the prompts that count
    flat: Array  # [] bool, all of them equal
    zero: Array  # [P, 1] bool, prompts that are 0 throughout


def _of_samples(group: stats.Summary, include_flat: bool) -> _First:
    counted = jnp.ones_like(group.flat) if include_flat else ~group.flat
    total, number, low, high = (
        one[0, 0]
        for one in onepass.reduce(
            onepass.total(group.mean * group.count.astype(group.mean.dtype), counted),
            onepass.total(group.count, counted),
            onepass.lowest(group.low, counted),
            onepass.highest(group.high, counted),
            axis=0,
        )
    )
    zero = (group.count == 0) | ((group.low == 0) & (group.high == 0))
    return _First(total, number, counted, low == high, zero)


def _of_tokens(value: Array, mask: Array, include_flat: bool) -> _First:
    """Values are 0 where masked: reductions without a mask are several times as fast on a CPU.

    If all unmasked values are equal to c, c is the highest of all entries, masked zeros included,
    where it is above 0, and the lowest where it is not.
    """
    tokens = stats.count_tokens(mask)
    low, high = value.min(-1, initial=0), value.max(-1, initial=0)
    own = jnp.where(high > 0, high, low)
    low, high = low.min(1, keepdims=True), high.max(1, keepdims=True)
    zero = (low == 0) & (high == 0)
    if include_flat:
        low, high = low.min(0, keepdims=True), high.max(0, keepdims=True)
    equal = jnp.where(high > 0, high, low)
    differs = ((own != equal) & (tokens > 0)).any(1, keepdims=True)
    known = differs.any() if include_flat else differs.all()
    differs = differs | jax.lax.cond(known, lambda: differs, lambda: _differ(value, mask, equal))
    counted = jnp.ones((1, 1), bool) if include_flat else differs
    number = jnp.where(counted, tokens, 0).sum(dtype=jnp.int32)
    return _First(_total(value, counted), number, counted, ~differs.any(), zero)


def _differ(value: Array, mask: Array, equal: Array) -> Array:
    """[P, 1], where an unmasked token is not `equal`; a pass that is rarely needed."""
    return (mask & (value != equal[..., None])).any(-1).any(1, keepdims=True)


def _total(value: Array, counted: Array) -> Array:
    """The sum over the prompts that count, sample by sample."""
    if value.ndim == 3:
        value = value.sum(-1)
    return jnp.where(counted, value, 0).sum(-1).sum()


def _one(value: Array) -> Mean:
    """A number of the whole batch as a metric."""
    return Mean(total=value, weight=jnp.ones_like(value))


def _check_choice(option: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise InputError(f"whiten_batch: {option} = {given!r}, expected {', '.join(allowed)}")
