"""Methods that scale by the whole batch."""

from __future__ import annotations

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.batch import divide_by_batch_std, whiten_batch
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import subtract_group_mean
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum
from jaxgrpo.advantages.tokens import to_tokens
from jaxgrpo.core.errors import InputError

_BASELINES = ("none", "group")


def lite_ppo(
    eps: Scheduled = 1e-4, ddof: int = 1, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, then subtract the group mean and divide by the standard deviation of the batch.

        a[p, g] = (r[p, g] - mean_g r) / (std_{p, g} r + eps), exactly 0 in flat groups

    The standard deviation is that of the raw sums, so it is divided by before centring.

    Use it when groups are small, so that their own deviation is noise and that of the batch is
    not.

    Args:
      eps: added to the standard deviation, in units of reward.
      ddof: 1 divides the variance by n - 1 (TRL), 0 by n.

    Source: Lite PPO, arXiv 2508.08221, which gives neither eps nor ddof: they are those of TRL's
    scale_rewards = "batch". Its loss is averaged over tokens: reduction `token_mean`.
    """
    return chain(
        weighted_sum(weights),
        divide_by_batch_std(eps, ddof),
        subtract_group_mean(),
        name="lite_ppo",
    )


def reinforce_pp(
    baseline: str = "none",
    eps: Scheduled = 1e-8,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, perhaps less the group mean, then whitened over all tokens of the batch.

        a[p, g, t] = (r[p, g] - m) / sqrt(v + eps)     m, v over all tokens that the policy chose

    The return of each token is the whole reward: it comes at the last token, undiscounted. A long
    sample weighs as many times as it has tokens.

    Use it when rewards are not 0 or 1 and one scale for the whole batch is wanted, not one per
    group.

    Args:
      baseline: "none": REINFORCE++, flat groups keep their signal; "group": REINFORCE++-baseline,
        flat groups stay exactly 0, and their zeros count in m and v.
      eps: added to the variance, in squared units of reward.
      ddof: 1 divides the variance by n - 1 (verl), 0 by n.

    Reads token_mask.  Source: REINFORCE++, arXiv 2501.03262, without the KL in the reward. verl
    whitens flat groups away from 0.
    """
    if baseline not in _BASELINES:
        raise InputError(
            f"reinforce_pp: baseline = {baseline!r}, expected one of {', '.join(_BASELINES)}"
        )
    if baseline == "none":
        before, keep = (), "nothing"
    else:
        before, keep = (subtract_group_mean(),), "zero_groups"
    return chain(
        weighted_sum(weights),
        *before,
        to_tokens(),
        whiten_batch(eps, ddof, keep=keep),
        name="reinforce_pp",
    )
