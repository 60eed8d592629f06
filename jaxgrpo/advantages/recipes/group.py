"""Methods that compare the samples of one prompt."""

from __future__ import annotations

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import (
    divide_by_group_mean,
    divide_by_group_std,
    subtract_group_mean,
    subtract_leave_one_out_mean,
)
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum


def grpo(
    eps: Scheduled = 1e-6, ddof: int = 1, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, then normalise within the group.

        a[p, g] = (r[p, g] - mean_g r) / (std_g r + eps), exactly 0 in flat groups

    Use it when prompts are of middle difficulty, and as what the others are compared with.

    Args:
      eps: added to the standard deviation, in units of reward.
      ddof: 1 divides the variance by n - 1 (TRL, verl), 0 by n.

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2. TRL's numbers are those of
    eps 1e-4; verl's are these, but for a group of one sample (its raw reward there, 0 here).
    """
    return chain(
        weighted_sum(weights),
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        name="grpo",
    )


def dr_grpo(weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then subtract the group mean: no division, so hard prompts are not blown up.

        a[p, g] = r[p, g] - mean_g r

    Use it when few samples of a hard prompt succeed: their advantage stays below 1.

    Source: Liu et al. 2025, arXiv 2503.20783. Its loss divides by a constant: reduction
    `constant(length)`.
    """
    return chain(weighted_sum(weights), subtract_group_mean(), name="dr_grpo")


def rloo(weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then subtract the mean of the others: Dr. GRPO times n / (n - 1).

        a[p, g] = r[p, g] - sum_{j != g} r[p, j] / (n - 1), exactly 0 in flat groups

    Use it when the group baseline should be unbiased: the mean of GRPO contains the sample
    itself, which shrinks the gradient by 1 - 1/G.

    Source: Ahmadian et al. 2024, arXiv 2402.14740. A group of one sample gives 0; verl's loop
    keeps its raw reward.
    """
    return chain(weighted_sum(weights), subtract_leave_one_out_mean(), name="rloo")


def maxrl(eps: Scheduled = 0.0, weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then what is above the group mean in units of that mean: the rarer, the heavier.

        a[p, g] = (r[p, g] - mean_g r) / (mean_g r + eps), 0 where the mean is not above 0

    With rewards in {0, 1} the expected gradient is that of sum_{k < G} pass@k / k: the
    log-likelihood of success cut after G - 1 terms. Rewards should not be negative.

    Use it when hard prompts should weigh most: it climbs the log of the success rate.

    Args:
      eps: added to the mean, in units of reward; SkyRL takes 1e-6.

    Source: MaxRL, arXiv 2602.02710. SkyRL keeps the raw reward of a single sample; 0 here.
    """
    return chain(
        weighted_sum(weights), divide_by_group_mean(eps), subtract_group_mean(), name="maxrl"
    )
