"""Transforms that take samples or groups out of what follows: statistics, loss and denominators."""

from __future__ import annotations

import dataclasses

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, read, stateless
from jaxgrpo.metrics import Metrics, mean
from jaxgrpo.types import Rollouts, Signal


def mask_zero_variance() -> AdvantageTransform:
    """Masks every group whose unmasked values are all equal, and groups with fewer than two.

    Their advantage would be 0 in any case; masked, they leave the denominator of the loss too.
    Without this step they count in it with advantage 0 (TRL, verl).

    Signal: [P, G] -> [P, G], mask cut.  Raises: InputError on token-level values [P, G, T].
    Metrics: masked_groups, the share of groups with a sample that went.
    Source: DAPO, arXiv 2503.14476, section 3.2, without its refill, which is a prompt policy.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        flat = stats.is_flat(signal.value, signal.mask)
        scored = signal.mask.any(axis=1, keepdims=True)
        masked = dataclasses.replace(signal, mask=signal.mask & ~flat)
        return masked, {"masked_groups": mean(flat & scored)}

    return stateless("mask_zero_variance", apply, levels=(2,))


def mask_truncated() -> AdvantageTransform:
    """Masks samples that were cut by the length limit.

    Before the baseline it takes them out of statistics and loss, after it out of the loss only:
    rewards 0 0 1 1, the last truncated, less the group mean: -1/3 -1/3 2/3 or -1/2 -1/2 1/2.

    Signal: [P, G] or [P, G, T], mask cut.  Metrics: masked, the share of unmasked samples.
    Source: DAPO, arXiv 2503.14476, section 3.4 (overlong filtering); where it stands is not given.
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        truncated = read("mask_truncated", rollouts, "truncated").astype(bool)
        widened = signal.mask.ndim == 3
        there = signal.mask.any(-1) if widened else signal.mask
        mask = signal.mask & ~(truncated[..., None] if widened else truncated)
        return dataclasses.replace(signal, mask=mask), {"masked": mean(truncated, there)}

    return stateless("mask_truncated", apply)
