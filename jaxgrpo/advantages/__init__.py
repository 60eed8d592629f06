"""Advantages as chains of small pure transforms. Read recipes/ first."""

from jaxgrpo.advantages.absolute import (
    asymmetric,
    clip_advantage,
    conditional_sign,
    overlong_penalty,
    sign,
    subtract_constant,
)
from jaxgrpo.advantages.base import AdvantageTransform, stateless, transform
from jaxgrpo.advantages.batch import divide_by_batch_std, whiten_batch
from jaxgrpo.advantages.chains import chain, compute, extend, spec_of, start
from jaxgrpo.advantages.filtered_model import (
    alpha_dpg,
    beta_of_mu,
    f_dpg,
    kappa,
    mu_of_beta,
    target_validity,
)
from jaxgrpo.advantages.group import (
    contrastive_pairs,
    divide_by_group_mean,
    divide_by_group_std,
    leave_one_out_pass_at_k,
    max_minus_second,
    normalise_with_virtual_rewards,
    subtract_group_mean,
    subtract_group_median,
    subtract_leave_one_out_mean,
    subtract_length_weighted_mean,
)
from jaxgrpo.advantages.kl_return import add_kl_return, add_kl_return_for_validity
from jaxgrpo.advantages.masks import (
    keep_samples,
    mask_group_difficulty,
    mask_low_variance,
    mask_truncated,
    mask_zero_variance,
)
from jaxgrpo.advantages.mismatch import (
    geometric_rejection,
    masked_importance,
    sequence_rejection,
    truncated_importance,
)
from jaxgrpo.advantages.reflection import (
    add_information_gain,
    answer_length,
    reasoning_reflection,
)
from jaxgrpo.advantages.registry import build, evaluate
from jaxgrpo.advantages.scored import distill, score_mean, shape_by_effective_rank
from jaxgrpo.advantages.streams import (
    combine,
    dvao,
    per_reward,
    rubric_gate,
    stream,
    sum_rewards,
    sum_scored,
)
from jaxgrpo.advantages.tokens import gae, hicra, kl_in_reward, reward_to_go, to_tokens
from jaxgrpo.advantages.tracked import (
    divide_by_running_scale,
    ema_baseline,
    mask_difficulty_band,
    subtract_tracked_success,
)
from jaxgrpo.advantages.trees import (
    token_share_weights,
    tree_normalise,
    tree_process,
    tree_subgroup,
)
from jaxgrpo.advantages.turns import (
    keep_turns,
    mask_truncated_turns,
    turn_normalise,
    turn_returns,
)
from jaxgrpo.advantages.weights import (
    darling,
    shrink_rare_success,
    unlikeliness,
    weight_by_absolute_advantage,
    weight_by_learnability,
)

__all__ = [
    "AdvantageTransform",
    "add_information_gain",
    "add_kl_return",
    "add_kl_return_for_validity",
    "alpha_dpg",
    "answer_length",
    "asymmetric",
    "beta_of_mu",
    "build",
    "chain",
    "clip_advantage",
    "combine",
    "compute",
    "conditional_sign",
    "contrastive_pairs",
    "darling",
    "distill",
    "divide_by_batch_std",
    "divide_by_group_mean",
    "divide_by_group_std",
    "divide_by_running_scale",
    "dvao",
    "ema_baseline",
    "evaluate",
    "extend",
    "f_dpg",
    "gae",
    "geometric_rejection",
    "hicra",
    "kappa",
    "keep_samples",
    "keep_turns",
    "kl_in_reward",
    "leave_one_out_pass_at_k",
    "mask_difficulty_band",
    "mask_group_difficulty",
    "mask_low_variance",
    "mask_truncated",
    "mask_truncated_turns",
    "mask_zero_variance",
    "masked_importance",
    "max_minus_second",
    "mu_of_beta",
    "normalise_with_virtual_rewards",
    "overlong_penalty",
    "per_reward",
    "reasoning_reflection",
    "reward_to_go",
    "rubric_gate",
    "score_mean",
    "sequence_rejection",
    "shape_by_effective_rank",
    "shrink_rare_success",
    "sign",
    "spec_of",
    "start",
    "stateless",
    "stream",
    "subtract_constant",
    "subtract_group_mean",
    "subtract_group_median",
    "subtract_leave_one_out_mean",
    "subtract_length_weighted_mean",
    "subtract_tracked_success",
    "sum_rewards",
    "sum_scored",
    "target_validity",
    "to_tokens",
    "token_share_weights",
    "transform",
    "tree_normalise",
    "tree_process",
    "tree_subgroup",
    "truncated_importance",
    "turn_normalise",
    "turn_returns",
    "unlikeliness",
    "weight_by_absolute_advantage",
    "weight_by_learnability",
    "whiten_batch",
]
