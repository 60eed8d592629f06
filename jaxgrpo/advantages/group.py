"""Baselines and scales taken from the samples of one prompt."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, stateless
from jaxgrpo.errors import InputError
from jaxgrpo.metrics import Metrics
from jaxgrpo.types import Rollouts, Signal


def subtract_group_mean() -> AdvantageTransform:
    """Subtracts the mean over the samples of a prompt.

        a[p, g] = r[p, g] - mean_g r[p, g]

    Uses unmasked samples only. Exactly 0 in flat groups (max == min) and with fewer than two
    unmasked samples, where the mean says nothing.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; alone, it is the advantage of
    Dr. GRPO, Liu et al. 2025, arXiv 2503.20783. verl keeps a single sample's raw reward; 0 here.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        group = stats.summary(signal.value, signal.mask)
        centred = stats.widen(signal.value) - group.mean
        return _replace(signal, jnp.where(group.flat, 0, centred)), {}

    return stateless("subtract_group_mean", apply, levels=(2,), relative=True)


def divide_by_group_std(eps: Scheduled = 1e-6, ddof: int = 1) -> AdvantageTransform:
    """Divides each value by the standard deviation of its group.

        a[p, g] = r[p, g] / (std_g r[p, g] + eps)

    Uses unmasked samples only. Exactly 0 in flat groups (max == min) and with fewer than two
    unmasked samples, also without a baseline before it. The standard deviation is that of the
    values it gets; a baseline before it, the same for a whole group, does not change it.

    Args:
      eps: added to the standard deviation, in units of reward; a number or a function of the step.
      ddof: 0 divides by n, 1 by n - 1.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2. The paper gives neither eps nor
    ddof; TRL takes ddof 1 and eps 1e-4, verl ddof 1 and eps 1e-6.
    """
    if ddof not in (0, 1):
        raise InputError(f"divide_by_group_std: ddof = {ddof}, expected 0 (by n) or 1 (by n - 1)")

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        group = stats.summary(signal.value, signal.mask)
        std = stats.std(signal.value, signal.mask, ddof=ddof, about=group.mean)
        # Where the group is flat the divisor may be 0: it is replaced, not only its quotient.
        divisor = jnp.where(group.flat, 1, std + at_step(eps, rollouts, value.dtype))
        return _replace(signal, jnp.where(group.flat, 0, value / divisor)), {}

    return stateless("divide_by_group_std", apply, levels=(2,), relative=True)


def _replace(signal: Signal, value) -> Signal:
    return dataclasses.replace(signal, value=value.astype(signal.value.dtype))
