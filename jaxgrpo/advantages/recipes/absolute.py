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


def asymmetric(
    cost: Scheduled = 1.0, threshold: Scheduled | None = None, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, then +1 for a success and -cost for a failure; flat groups keep their signal.

    Use it when failures should teach, but less than successes: `cost` sets how much all-fail
    groups push away.

    Args:
      cost: of a failure: 1 is `sign`, 0 is `reinforce`.
      threshold: the lowest sum that is a success; None: sums must be 0 or 1.

    Source: equation 8 of Gradient starvation, arXiv 2605.07689.
    """
    return chain(weighted_sum(weights), absolute.asymmetric(cost, threshold), name="asymmetric")


def conditional_sign(
    threshold: Scheduled | None = None, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, then less the group mean in mixed groups, and +1 or -1 in flat ones.

    Use it when mixed groups should be judged by their mean and flat ones not be lost.

    Args:
      threshold: the lowest sum that is a success; None: sums must be 0 or 1.

    Source: ours, of the two advantages of Gradient starvation, arXiv 2605.07689.
    """
    return chain(
        weighted_sum(weights), absolute.conditional_sign(threshold), name="conditional_sign"
    )


def reinforce(baseline: Scheduled = 0.0, weights: Weights | None = None) -> AdvantageTransform:
    """The sum itself, less a constant; flat groups keep their signal.

        a[p, g] = r[p, g] - baseline

    Use it when rewards are centred already, or as the plain method that others are to beat;
    flat groups keep their signal.

    Args:
      baseline: in units of reward; it changes the variance of the gradient, not its expectation.

    Source: Williams 1992; as one of the formulations of Gradient starvation, arXiv 2605.07689.
    """
    return chain(weighted_sum(weights), absolute.subtract_constant(baseline), name="reinforce")
