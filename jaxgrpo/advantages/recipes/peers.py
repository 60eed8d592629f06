"""The advantages of other trainers, to their last digit, for people who come from them."""

from __future__ import annotations

from jaxgrpo.advantages.base import AdvantageTransform
from jaxgrpo.advantages.batch import divide_by_batch_std, whiten_batch
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import (
    divide_by_group_std,
    max_minus_second,
    subtract_group_mean,
    subtract_leave_one_out_mean,
    subtract_length_weighted_mean,
)
from jaxgrpo.advantages.streams import Weights, per_reward, sum_rewards, sum_scored
from jaxgrpo.advantages.tokens import to_tokens
from jaxgrpo.core.errors import find

Steps = tuple[AdvantageTransform, ...]

_TRL_EPS = 1e-4
_VERL_EPS = 1e-6


def like_trl(
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
    weights: Weights | None = None,
) -> AdvantageTransform:
    """The advantages of TRL's GRPOTrainer, under the names of its options.

        group:  a = (r - mean_g r) / (std_g r + 1e-4)
        batch:  a = (r - mean_g r) / (std_{p, g} r + 1e-4)
        none:   a = r - mean_g r
        normalize_then_sum:  s = sum_k weight[k] (r_k - mean_g r_k) / (std_g r_k + 1e-4)
                             a = (s - mean_{p, g} s) / (std_{p, g} s + 1e-4)

    Deviations divide by n - 1. A reward that several could not score counts 0 in the sum
    (`sum_scored`), a sample that none could score is left out; scale_rewards does not matter to
    normalize_then_sum.

    Differs from TRL: flat groups are exactly 0, where rounding leaves TRL up to 2e-3 of noise in
    float32; with normalize_then_sum, groups flat in every reward too.

    Use it when you come from TRL and want its numbers first.

    Args:
      scale_rewards: "group", "batch" or "none".
      multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".

    Source: TRL 1.16, GRPOTrainer. Its normalize_then_sum is GDPO: the recipe `gdpo` has the paper.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("like_trl", [[1.0, 0.0]], options={"scale_rewards": "none"})[0].tolist()
    [[0.5, -0.5]]
    """
    centre = subtract_group_mean()
    scalings: dict[str, Steps] = {
        "group": (centre, divide_by_group_std(_TRL_EPS)),
        "batch": (divide_by_batch_std(_TRL_EPS), centre),
        "none": (centre,),
    }
    scaling = find("like_trl option scale_rewards", scale_rewards, scalings)
    summed = sum_scored(**(weights or {}))
    normalise = chain(*scalings["group"], name="normalise")
    white = whiten_batch(_TRL_EPS, eps_in="std", keep="zero_groups")
    orders: dict[str, Steps] = {
        "sum_then_normalize": (summed, *scaling),
        "normalize_then_sum": (per_reward(normalise), summed, white),
    }
    option = "like_trl option multi_objective_aggregation"
    steps = find(option, multi_objective_aggregation, orders)
    return chain(*steps, name="like_trl")


def like_verl(
    adv_estimator: str = "grpo",
    norm_adv_by_std_in_grpo: bool = True,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """The advantages of verl, under the names of its options.

        grpo, grpo_vectorized:  (r - mean_g r) / (std_g r + 1e-6)
        grpo_passk:             (max_g r - second) / (std_g r + 1e-6) for the best, else 0
        rloo, rloo_vectorized:  r - mean of the others
        opo:                    r - sum_g L r / sum_g L, L = tokens of the sample
        reinforce_plus_plus:    r, whitened over tokens
        reinforce_plus_plus_baseline:  r - mean_g r, whitened over tokens
        gdpo:                   sum_k weight[k] grpo(r_k), whitened over tokens

    Deviations divide by n - 1; whitening adds 1e-8 to the variance. A group of one scored sample
    keeps its raw reward, as in verl; `rloo_vectorized` and `grpo_passk` give it 0.

    Differs from verl: flat groups are exactly 0 (up to 0.15 of noise there in float32, and with
    whitening the whole batch mean), but for `reinforce_plus_plus`, which has no groups;
    `grpo_passk` takes single samples; discounting (gamma) and KL in the reward are steps of their
    own. gae, remax, gpg and the token baselines are not here.

    Use it when you come from verl and want its numbers first.

    Args:
      adv_estimator: one of the above.
      norm_adv_by_std_in_grpo: False leaves out the division in grpo, grpo_passk and gdpo.

    The last four read token_mask.  Source: verl 0.9.1, core_algos.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("like_verl", [[1.0, 0.0, 0.5]], options={"adv_estimator": "rloo"})[0].tolist()
    [[0.75, -0.75, 0.0]]
    """
    scale = (divide_by_group_std(_VERL_EPS, singleton="raw"),) if norm_adv_by_std_in_grpo else ()
    centre = subtract_group_mean(singleton="raw")
    white, summed = whiten_batch(1e-8, keep="zero_groups"), sum_rewards(**(weights or {}))
    estimators: dict[str, Steps] = {
        **dict.fromkeys(("grpo", "grpo_vectorized"), (summed, centre, *scale)),
        "grpo_passk": (summed, *scale, max_minus_second()),
        "rloo": (summed, subtract_leave_one_out_mean(singleton="raw")),
        "rloo_vectorized": (summed, subtract_leave_one_out_mean()),
        "opo": (summed, subtract_length_weighted_mean(singleton="raw")),
        "reinforce_plus_plus": (summed, to_tokens(), whiten_batch(1e-8, keep="nothing")),
        "reinforce_plus_plus_baseline": (summed, centre, to_tokens(), white),
        "gdpo": (per_reward(chain(centre, *scale, name="normalise")), summed, to_tokens(), white),
    }
    option = "like_verl option adv_estimator"
    return chain(*find(option, adv_estimator, estimators), name="like_verl")
