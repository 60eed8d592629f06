"""Baselines and scales taken from the samples of one prompt."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import (
    AdvantageTransform,
    Scheduled,
    at_step,
    read,
    stateless,
    with_value,
)
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics
from jaxgrpo.core.types import Rollouts, Signal

_SINGLETONS = ("zero", "raw")


def subtract_group_mean(singleton: str = "zero") -> AdvantageTransform:
    """Subtracts the mean over the samples of a prompt.

        a[p, g] = r[p, g] - mean_g r[p, g]

    Uses unmasked samples only. Exactly 0 in flat groups (max == min) and with fewer than two
    unmasked samples, where the mean says nothing.

    Args:
      singleton: of a group with one unmasked sample: "zero", or "raw": its value as it is (verl).

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; alone, it is the advantage of
    Dr. GRPO, Liu et al. 2025, arXiv 2503.20783. verl keeps a single sample's raw reward.
    """
    _check_singleton("subtract_group_mean", singleton)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, group = stats.widen(signal.value), stats.of_groups(signal)
        raw = value if singleton == "raw" else None
        centred = _unless_flat(signal, group, value - group.mean, raw)
        return (centred if raw is not None else _remember_centred(centred, group)), {}

    return stateless("subtract_group_mean", apply, levels=(2,), relative=True)


def divide_by_group_std(
    eps: Scheduled = 1e-6, ddof: int = 1, singleton: str = "zero"
) -> AdvantageTransform:
    """Divides each value by the standard deviation of its group.

        a[p, g] = r[p, g] / (std_g r[p, g] + eps)

    Uses unmasked samples only. Exactly 0 in flat groups (max == min) and with fewer than two
    unmasked samples, also without a baseline before it. The standard deviation is that of the
    values it gets; a baseline before it, the same for a whole group, does not change it.

    Args:
      eps: added to the standard deviation, in units of reward; a number or a function of the step.
      ddof: 0 divides by n, 1 by n - 1.
      singleton: of a group with one unmasked sample: "zero", or "raw": a deviation of 1 (verl).

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2. The paper gives neither eps nor
    ddof; TRL takes ddof 1 and eps 1e-4, verl ddof 1 and eps 1e-6.
    """
    _check_singleton("divide_by_group_std", singleton)
    stats.check_ddof("divide_by_group_std", ddof)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        group = stats.of_groups(signal)
        std = stats.std(value, signal.mask, ddof=ddof, about=group)
        added = at_step(eps, rollouts, value.dtype)
        # Where the group is flat the divisor may be 0: it is replaced, not only its quotient.
        divisor = jnp.where(group.flat, 1 + added, std + added)
        divisor = jnp.where(divisor > 0, divisor, jnp.inf)  # eps 0 and a variance that underflows
        divided = value / divisor
        return _unless_flat(signal, group, divided, divided if singleton == "raw" else None), {}

    return stateless("divide_by_group_std", apply, levels=(2,), relative=True)


def subtract_leave_one_out_mean(singleton: str = "zero") -> AdvantageTransform:
    """Subtracts from each sample the mean of the others of its prompt.

        a[p, g] = r[p, g] - sum_{j != g} r[p, j] / (n - 1) = n / (n - 1) (r[p, g] - mean_g r)

    The baseline does not know its own sample, so the expected gradient is that of the mean reward;
    with the mean over all samples it is (1 - 1/n) of it. n counts unmasked samples. Exactly 0 in
    flat groups and with fewer than two unmasked samples.

    Args:
      singleton: of a group with one unmasked sample: "zero", or "raw": its value as it is.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: RLOO, Ahmadian et al. 2024, arXiv 2402.14740. verl's `rloo` keeps a single sample's
    raw reward, its `rloo_vectorized` gives 0.
    """
    _check_singleton("subtract_leave_one_out_mean", singleton)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        group = stats.of_groups(signal)
        number = group.count.astype(value.dtype)
        alone = number / jnp.maximum(number - 1, 1) * (value - group.mean)
        return _unless_flat(signal, group, alone, value if singleton == "raw" else None), {}

    return stateless("subtract_leave_one_out_mean", apply, levels=(2,), relative=True)


def subtract_group_median() -> AdvantageTransform:
    """Subtracts the median over the samples of a prompt: one outlier does not move the others.

        a[p, g] = r[p, g] - median_g r[p, g]

    The median of an even number is the mean of the middle two. With rewards in {0, 1} the larger
    side gets 0: of 1 0 0 0 only the success is trained on. Uses unmasked samples only; exactly 0 in
    flat groups and with fewer than two unmasked samples.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: MC-GRPO, arXiv 2601.22582, which draws an odd number of samples and leaves the middle
    one out of the update; here its advantage is 0.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        group = stats.of_groups(signal)
        return _unless_flat(signal, group, value - _median(value, signal.mask)), {}

    return stateless("subtract_group_median", apply, levels=(2,), relative=True)


def subtract_length_weighted_mean(singleton: str = "zero") -> AdvantageTransform:
    """Subtracts the mean over the samples of a prompt, each weighing as many tokens as it has.

        a[p, g] = r[p, g] - sum_g L[p, g] r[p, g] / sum_g L[p, g]        L = sum_t token_mask

    The baseline of least variance where a sample's squared gradient grows as its length. Without
    any token the baseline is 0. Exactly 0 in flat groups and with fewer than two unmasked samples.

    Args:
      singleton: of a group with one unmasked sample: "zero", or "raw": its value as it is (verl).

    Signal: [P, G] -> [P, G], mask unchanged; reads token_mask [P, G, T].  Raises: InputError on
    token-level values [P, G, T].
    Source: OPO, Hao et al. 2025, arXiv 2505.23585.
    """
    _check_singleton("subtract_length_weighted_mean", singleton)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        tokens = read("subtract_length_weighted_mean", rollouts, "token_mask").astype(bool)
        length = jnp.where(signal.mask, tokens.sum(-1, dtype=jnp.int32), 0).astype(value.dtype)
        total = length.sum(1, keepdims=True)
        # Weights that add up to 1 first: length times a huge reward would overflow.
        share = length / jnp.maximum(total, 1)
        baseline = jnp.where(signal.mask, share * value, 0).sum(1, keepdims=True)
        raw = value if singleton == "raw" else None
        group = stats.of_groups(signal)
        return _unless_flat(signal, group, value - baseline, raw), {}

    return stateless("subtract_length_weighted_mean", apply, levels=(2,), relative=True)


def divide_by_group_mean(eps: Scheduled = 0.0) -> AdvantageTransform:
    """Divides each value by the mean of its group: the fewer succeed, the more each weighs.

        a[p, g] = r[p, g] / (mean_g r[p, g] + eps),  0 where the mean is not above 0

    A scale, not a baseline: put it before subtract_group_mean(), which leaves a mean of 0. A flat
    group of successes gets 1 throughout, and 0 behind that baseline.

    Args:
      eps: added to the mean, in units of reward; a number or a function of the step.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: MaxRL, arXiv 2602.02710: with rewards in {0, 1} the expected gradient is that of
    sum_{k <= G} pass@k / k, the log-likelihood of success cut after G terms.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        mean = stats.mean(value, signal.mask)
        positive = mean > 0
        divisor = jnp.where(positive, mean + at_step(eps, rollouts, value.dtype), 1)
        return with_value(signal, jnp.where(positive, value / divisor, 0)), {}

    return stateless("divide_by_group_mean", apply, levels=(2,))


def _unless_flat(
    signal: Signal, group: stats.Summary, value: Array, raw: Array | None = None
) -> Signal:
    """The value, but exactly 0 in flat groups; with `raw`, that of a single unmasked sample."""
    after = jnp.where(group.flat, 0, value)
    if raw is not None:
        after = jnp.where(group.count == 1, raw, after)
    return with_value(signal, after)


def _remember_centred(centred: Signal, group: stats.Summary) -> Signal:
    """What is known of groups less their mean: a subtraction rounds all their values alike.

    Their mean is 0 but for the rounding of the mean that was subtracted.
    """

    def less_mean(end: Array) -> Array:
        after = stats.widen(end) - jnp.where(group.count > 0, group.mean, 0)
        return jnp.where(group.flat & (group.count > 0), 0, after).astype(centred.value.dtype)

    ends = less_mean(group.low), less_mean(group.high)
    found = stats.Summary(*ends, jnp.zeros_like(group.mean), group.count)
    return stats.remember(centred, found)


def _check_singleton(name: str, singleton: str) -> None:
    if singleton not in _SINGLETONS:
        raise InputError(
            f"{name}: singleton = {singleton!r}, expected one of {', '.join(_SINGLETONS)}"
        )


def _median(value: Float[Array, "P G"], mask: Bool[Array, "P G"]) -> Float[Array, "P 1"]:
    """The median of unmasked entries; what it says of groups without any does not matter."""
    number = stats.count(mask)
    low, high = jnp.maximum(number - 1, 0) // 2, number // 2
    if value.shape[1] <= stats.FEW:
        # The k-th smallest is the largest of those with at most k smaller ones: no sort.
        smaller = stats.count_lower(value, mask)

        def smallest(rank: Array) -> Array:
            within = mask & (smaller <= rank)
            return jnp.where(within, value, -jnp.inf).max(1, keepdims=True)

        pair = smallest(low), smallest(high)
    else:
        order = jnp.sort(jnp.where(mask, value, jnp.inf), axis=1)
        high = jnp.minimum(high, value.shape[1] - 1)
        pair = jnp.take_along_axis(order, low, 1), jnp.take_along_axis(order, high, 1)
    # Halved before they are added: two huge rewards would overflow.
    return pair[0] / 2 + pair[1] / 2
