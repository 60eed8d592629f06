"""Recipes on the weighted sum of the rewards: each lists the steps after that sum.

First those that compare the samples of one prompt, then those that judge a sample by itself (flat
groups keep their signal), scale by the whole batch, or count the best of several samples; last the
advantages of two recipes of large runs, in which groups without a difference are masked.
"""

from __future__ import annotations

from jaxgrpo.advantages import absolute
from jaxgrpo.advantages.absolute import overlong_penalty
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.batch import divide_by_batch_std, whiten_batch
from jaxgrpo.advantages.group import (
    divide_by_group_mean,
    divide_by_group_std,
    leave_one_out_pass_at_k,
    max_minus_second,
    normalise_with_virtual_rewards,
    subtract_group_mean,
    subtract_leave_one_out_mean,
)
from jaxgrpo.advantages.masks import keep_samples, mask_zero_variance
from jaxgrpo.advantages.scored import shape_by_effective_rank
from jaxgrpo.advantages.streams import Weights, sum_then
from jaxgrpo.advantages.tokens import to_tokens
from jaxgrpo.advantages.tracked import smooth_standardise
from jaxgrpo.core.errors import InputError

_BASELINES = ("none", "group")


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

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("grpo", [[3.0, 1.0]], options={"eps": 0.0, "ddof": 0})[0].tolist()
    [[1.0, -1.0]]
    """
    return sum_then("grpo", weights, subtract_group_mean(), divide_by_group_std(eps, ddof))


def avspo(
    count: int = 4,
    top: float = 1.0,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then GRPO's normalisation; flat groups as if virtual rewards were in them.

        a[p, g] = (r[p, g] - m) / (s + eps)

    m and s are of the group, and in a flat one of the group and `count` virtual rewards between 0
    and `top`. These act on m and s alone.

    Use it when most groups are flat and their samples should teach, but less than a mixed group's.

    Args: as in the part `normalise_with_virtual_rewards`.

    Source: AVSPO, arXiv 2605.21125, by a secondary note; count is ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> options = {"count": 1, "eps": 0.0, "ddof": 0}
    >>> evaluate("avspo", [[1.0, 0.0], [1.0, None]], options=options)[0].tolist()
    [[1.0, -1.0], [1.0, 0.0]]
    """
    return sum_then("avspo", weights, normalise_with_virtual_rewards(count, top, eps, ddof))


def rank_learning(
    kappa: float = 2.0,
    scale: Scheduled = 1.0,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then GRPO; a bonus where a sample's hidden states spread more, or faster, than of late.

        a[p, g] + min(max(aux, 0), |a[p, g]| / kappa),   aux from the effective rank along a sample

    Use it when a policy's samples become alike in form before they become right. The stride of the
    ranks, 40 tokens, is set by [[scores]] with name and quantity "effective_rank"; a sample needs
    three strides for all that is measured.

    Args:
      kappa, scale: as in the part `shape_by_effective_rank`.
      eps, ddof: as in `grpo`.

    Source: VERL (Velocity-Exploiting Rank-Learning), arXiv 2509.23808.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"effective_rank": [[[1.0], [1.0]]], "token_mask": [[[1], [1]]]}
    >>> options = {"eps": 0.0, "ddof": 0}
    >>> evaluate("rank_learning", [[1.0, 0.0]], options=options, **fields)[0].tolist()
    [[1.0, -1.0]]
    """
    return sum_then(
        "rank_learning",
        weights,
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        shape_by_effective_rank(kappa, scale),
    )


def ttrl(
    count: int | None = None,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then GRPO on the first samples of each group; the others only vote.

    Use it when there are no gold answers, with the reward `consensus`, and the base is right more
    often than not. The majority may be wrong: evaluate on other data that have them.

    Args:
      count: samples of a group that are trained on; rollout.group_size is how many vote. None:
        half of them.
      eps, ddof: as in `grpo`.

    Source: TTRL, Zuo et al. 2025, arXiv 2504.16084: 64 votes, 32 samples trained on.

    >>> from jaxgrpo.advantages import evaluate
    >>> rewards, options = [[3.0, 1.0, 9.0]], {"count": 2, "eps": 0.0, "ddof": 0}
    >>> evaluate("ttrl", rewards, options=options)[0].tolist()
    [[1.0, -1.0, 0.0]]
    """
    return sum_then(
        "ttrl", weights, keep_samples(count), subtract_group_mean(), divide_by_group_std(eps, ddof)
    )


def dr_grpo(weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then subtract the group mean: no division, so hard prompts are not blown up.

        a[p, g] = r[p, g] - mean_g r

    Use it when few samples of a hard prompt succeed: their advantage stays below 1.

    Source: Liu et al. 2025, arXiv 2503.20783. Its loss divides by a constant: reduction
    `constant(length)`.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("dr_grpo", [[1.0, 0.0, 0.0, 1.0]])[0].tolist()
    [[0.5, -0.5, -0.5, 0.5]]
    """
    return sum_then("dr_grpo", weights, subtract_group_mean())


def rloo(weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then subtract the mean of the others: Dr. GRPO times n / (n - 1).

        a[p, g] = r[p, g] - sum_{j != g} r[p, j] / (n - 1), exactly 0 in flat groups

    Use it when the group baseline should be unbiased: the mean of GRPO contains the sample
    itself, which shrinks the gradient by 1 - 1/G.

    Source: Ahmadian et al. 2024, arXiv 2402.14740. A group of one sample gives 0; verl's loop
    keeps its raw reward.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("rloo", [[1.0, 0.0, 0.5]])[0].tolist()
    [[0.75, -0.75, 0.0]]
    """
    return sum_then("rloo", weights, subtract_leave_one_out_mean())


def maxrl(eps: Scheduled = 0.0, weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then what is above the group mean in units of that mean: the rarer, the heavier.

        a[p, g] = (r[p, g] - mean_g r) / (mean_g r + eps), 0 where the mean is not above 0

    With rewards in {0, 1} the expected gradient is that of sum_{k < G} pass@k / k: the
    log-likelihood of success cut after G - 1 terms. Rewards should not be negative.

    Use it when hard prompts should weigh most: it climbs the log of the success rate.

    Args:
      eps: added to the mean, in units of reward; SkyRL takes 1e-6.

    Source: MaxRL, arXiv 2602.02710. SkyRL keeps the raw reward of a single sample; 0 here.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("maxrl", [[1.0, 0.0, 0.0, 0.0]])[0].tolist()
    [[3.0, -1.0, -1.0, -1.0]]
    """
    return sum_then("maxrl", weights, divide_by_group_mean(eps), subtract_group_mean())


def sign(threshold: Scheduled | None = None, weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then +1 for a success and -1 for a failure; flat groups keep their signal.

    Use it when most groups are flat (`frac_reward_zero_std`): with few samples per prompt, or with
    prompts that nearly always fail.

    Args:
      threshold: the lowest sum that is a success; None: sums must be 0 or 1.

    Source: Gradient starvation, arXiv 2605.07689.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("sign", [[1.0, 0.0], [0.0, 0.0]])[0].tolist()
    [[1.0, -1.0], [-1.0, -1.0]]
    """
    return sum_then("sign", weights, absolute.sign(threshold))


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

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("asymmetric", [[1.0, 0.0]], options={"cost": 0.5})[0].tolist()
    [[1.0, -0.5]]
    """
    return sum_then("asymmetric", weights, absolute.asymmetric(cost, threshold))


def conditional_sign(
    threshold: Scheduled | None = None, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, then less the group mean in mixed groups, and +1 or -1 in flat ones.

    Use it when mixed groups should be judged by their mean and flat ones not be lost.

    Args:
      threshold: the lowest sum that is a success; None: sums must be 0 or 1.

    Source: ours, of the two advantages of Gradient starvation, arXiv 2605.07689.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("conditional_sign", [[1.0, 0.0], [0.0, 0.0]])[0].tolist()
    [[0.5, -0.5], [-1.0, -1.0]]
    """
    return sum_then("conditional_sign", weights, absolute.conditional_sign(threshold))


def reinforce(baseline: Scheduled = 0.0, weights: Weights | None = None) -> AdvantageTransform:
    """The sum itself, less a constant; flat groups keep their signal.

        a[p, g] = r[p, g] - baseline

    Use it when rewards are centred already, or as the plain method that others are to beat;
    flat groups keep their signal.

    Args:
      baseline: in units of reward; it changes the variance of the gradient, not its expectation.

    Source: Williams 1992; as one of the formulations of Gradient starvation, arXiv 2605.07689.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("reinforce", [[1.0, 0.0]], options={"baseline": 0.5})[0].tolist()
    [[0.5, -0.5]]
    """
    return sum_then("reinforce", weights, absolute.subtract_constant(baseline))


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

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("lite_ppo", [[3.0, 1.0]], options={"eps": 0.0, "ddof": 0})[0].tolist()
    [[1.0, -1.0]]
    """
    return sum_then("lite_ppo", weights, divide_by_batch_std(eps, ddof), subtract_group_mean())


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

    >>> from jaxgrpo.advantages import evaluate
    >>> options = {"eps": 0.0, "ddof": 0}
    >>> evaluate("reinforce_pp", [[3.0, 1.0]], token_mask=[[[1], [1]]], options=options)[0].tolist()
    [[[1.0], [-1.0]]]
    """
    if baseline not in _BASELINES:
        raise InputError(
            f"reinforce_pp: baseline = {baseline!r}, expected one of {', '.join(_BASELINES)}"
        )
    if baseline == "none":
        baseline_steps, keep = (), "nothing"
    else:
        baseline_steps, keep = (subtract_group_mean(),), "zero_groups"
    return sum_then(
        "reinforce_pp", weights, *baseline_steps, to_tokens(), whiten_batch(eps, ddof, keep=keep)
    )


def dcpo_smooth(eps: Scheduled = 1e-6, weights: Weights | None = None) -> AdvantageTransform:
    """Sum, normalised by the group and by all that the row has seen; what is nearer to 0 counts.

    Use it when rows return many times and groups are so small that their deviation is luck.

    Needs data whose rows return. Only the advantages of Dynamic Clipping Policy Optimization: its
    bounds are loss.surrogate `dynamic_clip`, its loss loss.reduction `sequence_mean`.

    Args:
      eps: added to both deviations, in units of reward.

    Source: DCPO, Yang et al. 2025, arXiv 2509.02333; see the part `smooth_standardise`.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("dcpo_smooth", [[1.0, 0.0, 0.5]], options={"eps": 0.0})[0].tolist()
    [[1.0, -1.0, 0.0]]
    """
    return sum_then("dcpo_smooth", weights, smooth_standardise(eps))


def passk(
    k: int | None = None,
    threshold: Scheduled | None = None,
    std: bool = False,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then what each sample adds to pass@k; exactly 0 in flat groups.

        k = None:  a = (max_g r - second) / (std_g r + eps) for the best sample, 0 for the others
        k:         a = n (U - U without the sample), U = 1 - C(n - c, k) / C(n, k)
        k, std:    a (n - k) / (n k sqrt(U (1 - U)))

    Without k the whole group is one draw, of any rewards, scaled as verl's `grpo_passk` is. With k
    rewards are successes or failures, and the expected gradient is exactly that of pass@k.

    Use it when what counts is the best of several samples, as with a verifier behind the model.

    Args:
      k: samples of which one has to succeed, below group_size; None: the group.
      threshold: with k, the lowest sum that is a success; None: sums must be 0 or 1.
      std: with k, whether it is divided by the deviation of pass@k over subsets.
      eps: without k, added to the standard deviation, in units of reward.
      ddof: without k, 1 divides the variance by n - 1, 0 by n.

    Source: arXiv 2503.19595 without k; with k, the estimator of arXiv 2107.03374 less itself
    without the sample; with std, arXiv 2508.10751.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("passk", [[1.0, 0.0, 0.0]], options={"k": 1})[0].tolist()
    [[1.0, -0.5, -0.5]]
    """
    if k is None and (std or threshold is not None):
        raise InputError("passk: std and threshold are of the advantage of k samples: give k too")
    if k is not None and (eps, ddof) != (1e-6, 1):
        raise InputError("passk: k divides by no deviation of the group: leave eps and ddof out")
    if k is None:
        steps = (divide_by_group_std(eps, ddof), max_minus_second())
    else:
        steps = (leave_one_out_pass_at_k(k, threshold, std),)
    return sum_then("passk", weights, *steps)


def dapo(
    buffer: int | None = None,
    limit: int | None = None,
    penalty: Scheduled = 1.0,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Groups without a difference leave, long completions may pay, then GRPO's normalisation.

    Groups are judged by the rewards alone, before the penalty: else the lengths of a group of
    failures would keep it. Only the advantages of DAPO, and without `buffer` no
    penalty on lengths: its clip range and mean over tokens are loss.surrogate `clip` with low 0.2,
    high 0.28 and loss.reduction `token_mean`, sampling until the batch is full is
    `rollout.refill`, and its overlong filter is the step `mask_truncated`.

    Use it when many groups are flat or many samples cut: they leave the denominator instead of
    diluting it.

    Args:
      buffer: tokens before the limit in which the penalty grows; None: no penalty.
      limit: in tokens; None: the T of the rollouts.
      penalty: the largest deduction, in units of reward.
      eps: added to the standard deviation, in units of reward.
      ddof: 1 divides the variance by n - 1 (verl), 0 by n.

    Source: Yu et al. 2025, arXiv 2503.14476, with buffer 4096 and limit 20480.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("dapo", [[1.0, 0.0], [1.0, 1.0]])[1].tolist()
    [[True, True], [False, False]]
    """
    if buffer is None and (limit is not None or penalty != 1.0):
        raise InputError("dapo: limit and penalty are those of the length penalty: give buffer too")
    lengths = () if buffer is None else (overlong_penalty(buffer, limit, penalty),)
    return sum_then(
        "dapo",
        weights,
        mask_zero_variance(),
        *lengths,
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
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

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("scale_rl", [[3.0, 1.0]], options={"eps": 0.0, "ddof": 0})[0].tolist()
    [[1.0, -1.0]]
    """
    return sum_then(
        "scale_rl",
        weights,
        mask_zero_variance(),
        subtract_group_mean(),
        divide_by_batch_std(eps, ddof),
    )
