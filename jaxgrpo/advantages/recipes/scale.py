"""Recipes of large runs, as far as they are advantages: groups without a difference leave."""

from __future__ import annotations

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.batch import divide_by_batch_std
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import divide_by_group_std, subtract_group_mean
from jaxgrpo.advantages.length import overlong_penalty
from jaxgrpo.advantages.masks import mask_zero_variance
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum
from jaxgrpo.core.errors import InputError


def dapo(
    buffer: int | None = None,
    limit: int | None = None,
    penalty: Scheduled = 1.0,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Groups without a difference leave, long completions pay, then GRPO's normalisation.

    Groups are judged by the rewards alone, before the penalty: else the lengths of a group of
    failures would keep it. Only the advantages of DAPO: its clip range and mean over tokens are
    loss.surrogate `clip` with low 0.2, high 0.28 and loss.reduction `token_mean`, sampling until
    the batch is full is a prompt policy, and its overlong filter is the step `mask_truncated`.

    Use it when many groups are flat or many samples cut: they leave the denominator instead of
    diluting it.

    Args:
      buffer: tokens before the limit in which the penalty grows; None: no penalty.
      limit: in tokens; None: the T of the rollouts.
      penalty: the largest deduction, in units of reward.
      eps: added to the standard deviation, in units of reward.
      ddof: 1 divides the variance by n - 1 (verl), 0 by n.

    Source: Yu et al. 2025, arXiv 2503.14476, with buffer 4096 and limit 20480.
    """
    if buffer is None and (limit is not None or penalty != 1.0):
        raise InputError("dapo: limit and penalty are those of the length penalty: give buffer too")
    lengths = () if buffer is None else (overlong_penalty(buffer, limit, penalty),)
    return chain(
        weighted_sum(weights),
        mask_zero_variance(),
        *lengths,
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        name="dapo",
    )


def scale_rl(
    eps: Scheduled = 1e-4, ddof: int = 1, weights: Weights | None = None
) -> AdvantageTransform:
    """Groups without a difference leave; the group mean is subtracted, the batch's std divides.

        a[p, g] = (r[p, g] - mean_g r) / (std_pg (r - mean_g r) + eps)

    The deviation is that of the centred values over all groups that stay. Only the advantages of
    ScaleRL: its loss (CISPO, the mean over each prompt's tokens) and not sampling prompts again
    that are solved nine times of ten stand in the loss and the prompt policy.

    Use it when runs are long and batches large.

    Args:
      eps: added to the standard deviation, in units of reward.
      ddof: 1 divides the variance by n - 1, 0 by n.

    Source: Khatri et al. 2025, arXiv 2510.13786. It gives neither eps nor ddof.
    """
    return chain(
        weighted_sum(weights),
        mask_zero_variance(),
        subtract_group_mean(),
        divide_by_batch_std(eps, ddof),
        name="scale_rl",
    )
