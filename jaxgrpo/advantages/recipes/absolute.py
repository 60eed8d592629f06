"""Methods that judge a sample by itself: flat groups keep their signal."""

from __future__ import annotations

from jaxgrpo.advantages import absolute
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum


def sign(threshold: Scheduled | None = None, weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then +1 for a success and -1 for a failure; flat groups keep their signal.

    Use it when most groups are flat (`frac_reward_zero_std`): with few samples per prompt, or with
    prompts that nearly always fail.

    Args:
      threshold: the lowest sum that is a success; None: sums must be 0 or 1.

    Source: Gradient starvation, arXiv 2605.07689.
    """
    return chain(weighted_sum(weights), absolute.sign(threshold), name="sign")
