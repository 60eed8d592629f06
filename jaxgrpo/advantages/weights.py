"""Weights of whole groups: how much a prompt's advantages count, sign and mask unchanged."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, stateless
from jaxgrpo.advantages.reading import needs_of, samples
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, Signal


def shrink_rare_success(
    count: Scheduled = 2, reward: str | None = None, threshold: Scheduled | None = None
) -> AdvantageTransform:
    """Shrinks groups with few successes: a lucky one of a hard prompt teaches less.

        a[p, g] = a[p, g] min(1, N[p] / count),  N[p] = the group's number of successes

    Without a success nothing is rare and the group stays as it is: its values are 0 behind a
    baseline in any case, and the failures that `sign` keeps alive are kept.

    Args:
      count: so many successes count in full; a number or a function of the step.
      reward: name of the reward or field [P, G] that says success, NaN = not judged; None: the
        signal, so behind the baseline of rewards in {0, 1} the values above 0.
      threshold: the lowest value that is a success; None: any value above 0.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T],
    on a count that is not positive.
    Metrics: shrunk_groups, the share of groups with a sample.
    Source: methods against overly hard samples, arXiv 2605.28388, name the harm; the rule is ours.
    """
    if not callable(count) and not count > 0:
        raise InputError(f"shrink_rare_success: count = {count}, expected more than 0 successes")

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        read = samples("shrink_rare_success", reward, signal, rollouts)
        if threshold is None:
            success = read.value > 0
        else:
            success = read.value >= at_step(threshold, rollouts, read.value.dtype)
        number = stats.count(read.mask & success).astype(read.value.dtype)
        share = jnp.minimum(1, number / at_step(count, rollouts, number.dtype))
        factor = jnp.where(number == 0, 1, share)
        scored = signal.mask.any(axis=1, keepdims=True)
        return _times(signal, factor), {"shrunk_groups": mean(factor < 1, scored)}

    return stateless("shrink_rare_success", apply, needs=needs_of(reward), levels=(2,))


def weight_by_absolute_advantage(normalise: bool = False) -> AdvantageTransform:
    """Weighs each group by the mean size of its advantages, so by how much its samples disagree.

        a[p, g] = a[p, g] w[p],  w[p] = mean_g |a[p, g]|

    Behind the normalisation of rewards in {0, 1} by the population deviation w is
    2 sqrt(p (1 - p)), p the group's success rate: prompts at the edge count most.

    Args:
      normalise: divides w by its mean over the groups with a sample. Off, the weights also change
        the size of the update, as any weights do; on, that of one group depends on the others.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: weight, its mean over groups before normalising.
    Source: ours; the closed form is exact.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        return _weighed(signal, stats.mean(jnp.abs(signal.value), signal.mask), normalise)

    return stateless("weight_by_absolute_advantage", apply, levels=(2,))


def weight_by_learnability(
    reward: str | None = None, normalise: bool = False
) -> AdvantageTransform:
    """Weighs each group by the variance of its rewards: p (1 - p) where they are 0 or 1.

        a[p, g] = a[p, g] w[p],  w[p] = mean_g (r[p, g] - mean_g r)^2

    The success rate p is that of the group; a prompt always or never solved weighs exactly 0.

    Args:
      reward: name of the reward or field [P, G] whose variance it is, NaN = not judged. None: the
        signal, which must not have been divided by its deviation: a baseline such as
        `subtract_group_mean` leaves the variance as it is, behind `divide_by_group_std` it is
        about 1 for every group. Behind that, name the reward.
      normalise: divides w by its mean over the groups with a sample, as
        `weight_by_absolute_advantage` does.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: weight, its mean over groups before normalising.
    Source: LILO, arXiv 2502.12272, which chooses prompts by p (1 - p) before they are trained on;
    here it weighs those that were sampled.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        read = samples("weight_by_learnability", reward, signal, rollouts)
        flat = stats.is_flat(read.value, read.mask)
        weight = jnp.where(flat, 0, stats.variance(read.value, read.mask))
        return _weighed(signal, weight, normalise)

    return stateless(
        "weight_by_learnability", apply, needs=needs_of(reward), levels=(2,), relative=True
    )


def _weighed(signal: Signal, weight: Array, normalise: bool) -> tuple[Signal, Metrics]:
    scored = signal.mask.any(axis=1, keepdims=True)
    metrics: Metrics = {"weight": mean(weight, scored)}
    if normalise:
        average = stats.mean(weight, scored, axis=0)
        # Where every weight is 0 they stay 0.
        weight = weight / jnp.where(average > 0, average, 1)
    return _times(signal, weight), metrics


def _times(signal: Signal, factor: Array) -> Signal:
    value = stats.widen(signal.value) * factor.astype(stats.widen(signal.value).dtype)
    return dataclasses.replace(signal, value=value.astype(signal.value.dtype))
