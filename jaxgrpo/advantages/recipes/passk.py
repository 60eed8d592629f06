"""Methods for the best of several samples."""

from __future__ import annotations

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import divide_by_group_std
from jaxgrpo.advantages.passk import leave_one_out_pass_at_k, max_minus_second
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum


def passk(
    k: int | None = None,
    threshold: Scheduled | None = None,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then what each sample adds to pass@k; exactly 0 in flat groups.

        k = None:  a = (max_g r - second) / (std_g r + eps) for the best sample, 0 for the others
        k:         a = n (U - U without the sample), U = 1 - C(n - c, k) / C(n, k)

    Without k the whole group is one draw, of any rewards, scaled as verl's `grpo_passk` is. With k
    rewards are successes or failures, and the expected gradient is exactly that of pass@k.

    Use it when what counts is the best of several samples, as with a verifier behind the model.

    Args:
      k: samples of which one has to succeed, below group_size; None: the group.
      threshold: with k, the lowest sum that is a success; None: sums must be 0 or 1.
      eps: without k, added to the standard deviation, in units of reward.
      ddof: without k, 1 divides the variance by n - 1, 0 by n.

    Source: arXiv 2503.19595 without k; with k, the estimator of arXiv 2107.03374 less itself
    without the sample.
    """
    if k is None:
        steps = (divide_by_group_std(eps, ddof), max_minus_second())
    else:
        steps = (leave_one_out_pass_at_k(k, threshold),)
    return chain(weighted_sum(weights), *steps, name="passk")
