"""Advantages for the best of several samples, and pairs of samples."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.absolute import successes
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, stateless, with_value
from jaxgrpo.core import onepass
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal


def max_minus_second() -> AdvantageTransform:
    """The best sample of a prompt gets what it is ahead of the second; all others get 0.

        a[p, g] = r[p, g] - max_{j != g} r[p, j]   where that is above 0, else 0

    This is the best of the group less the best without the sample: what it adds to pass@G. Two
    that share the first place add nothing: 0. Uses unmasked samples only; exactly 0 in flat groups
    and with fewer than two unmasked samples. Behind divide_by_group_std() it is verl's
    `grpo_passk`.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: pass@k training, arXiv 2503.19595. The expected gradient is that of the expected best
    reward of G, over G; verl refuses single samples.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = stats.widen(signal.value), signal.mask
        best, number = _highest(value, mask)
        first = mask & (value == best)
        second, others = _highest(value, mask & ~first)
        alone = (number == others + 1) & (number > 1)
        ahead = best - jnp.where(alone, second, best)
        return with_value(signal, jnp.where(alone & first, ahead, 0)), {}

    return stateless("max_minus_second", apply, levels=(2,), relative=True)


def _highest(value: Array, mask: Array) -> tuple[Array, ...]:
    """(the highest unmasked sample of each prompt, how many are unmasked)."""
    return onepass.reduce(onepass.highest(value, mask), onepass.number(mask), axis=1)


def leave_one_out_pass_at_k(k: int, threshold: Scheduled | None = None) -> AdvantageTransform:
    """The exact leave-one-out advantage of pass@k, estimated from all n samples of the prompt.

        U = 1 - C(n - c, k) / C(n, k)                     c successes of n unmasked samples
        a[p, g] = n (U - U without sample g)

    As U is unbiased, and U without g independent of g, the expected gradient is exactly that of
    pass@k, k (1 - p)^(k - 1) times that of the success rate p. k = 1 is leave-one-out (RLOO).
    Groups with n - c < k give 0: U is 1 already. Exactly 0 in flat groups, and where n <= k, which
    says nothing without g.

    Args:
      k: samples of which one has to succeed, from 1 to group_size - 1; for k = group_size take
        max_minus_second.
      threshold: the lowest reward that is a success; None: rewards must be 0 or 1.

    Signal: [P, G] -> [P, G].  Other rewards as with `sign`; so is the metric "refused".
    Raises: InputError on k < 1, and before compiling on k >= group_size.  Metrics: too_few, the
    share of groups with unmasked samples, but no more than k.
    Source: the estimator of Chen et al. 2021, arXiv 2107.03374; as a reward, arXiv 2505.15201.
    """
    if k < 1:
        raise InputError(f"leave_one_out_pass_at_k: k = {k}, expected at least 1")

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal, success, metrics = successes("leave_one_out_pass_at_k", signal, threshold, rollouts)
        number = stats.count(signal.mask)
        value = _leave_one_out(success, signal.mask, k, stats.widen(signal.value).dtype)
        few = {"too_few": mean(number <= k, number > 0)}
        return with_value(signal, value), {**metrics, **few}

    whole = stateless("leave_one_out_pass_at_k", apply, levels=(2,), relative=True)

    def init(spec: RolloutSpec) -> tuple[()]:
        if spec.group_size <= k:
            raise InputError(
                f"rollout.group_size = {spec.group_size}: leave_one_out_pass_at_k(k={k}) leaves one"
                " sample out of more than k: draw more samples or lower k; for k = group_size take"
                " max_minus_second"
            )
        return ()

    return whole._replace(init=init)


def contrastive_pairs() -> AdvantageTransform:
    """Compares each sample with each other of its prompt: pairs won less pairs lost.

        a[p, g] = (#{j: r[p, j] < r[p, g]} - #{j: r[p, j] > r[p, g]}) / n

    With rewards in {0, 1} this is (1/n) sum over pairs (success, failure) of +1 for the success
    and -1 for the failure, and equals less the group mean. Other rewards enter by their order
    only, so an outlier counts as any other. Uses unmasked samples only; exactly 0 in flat groups
    and with fewer than two unmasked samples.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: the pairwise reading of centring, Gradient starvation, arXiv 2605.07689; ranks are ours.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = signal.value, signal.mask
        won = stats.count_lower(value, mask)
        lost = stats.count_lower(-value, mask)
        dtype = stats.widen(value).dtype
        number = jnp.maximum(stats.count(mask), 1).astype(dtype)
        return with_value(signal, (won - lost).astype(dtype) / number), {}

    return stateless("contrastive_pairs", apply, levels=(2,), relative=True)


def _leave_one_out(success: Array, mask: Array, k: int, dtype: Any) -> Array:
    """n (U - U without the sample) of pass@k, [P, G]; 0 in groups without a success or n <= k."""
    number = stats.count(mask).astype(dtype)
    wins = stats.count(mask & success).astype(dtype)
    losses = number - wins
    # C(n - c, k) / C(n, k), the chance that k of them all fail, factor by factor.
    drawn = jnp.arange(k, dtype=dtype)[None, :]
    left = jnp.maximum(losses - drawn, 0) / jnp.maximum(number - drawn, 1)
    gain = number * k * left.prod(axis=1, keepdims=True) / jnp.maximum(number - k, 1)
    value = jnp.where(success, gain, -gain * wins / jnp.maximum(losses, 1))
    return jnp.where((number > k) & (wins > 0), value, 0)
