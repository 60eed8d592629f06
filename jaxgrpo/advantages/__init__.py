"""Advantages as chains of small pure transforms. Read recipes/ first."""

from jaxgrpo.advantages.absolute import sign
from jaxgrpo.advantages.base import AdvantageTransform, stateless, transform
from jaxgrpo.advantages.building import build, evaluate
from jaxgrpo.advantages.chains import chain, compute, spec_of, start
from jaxgrpo.advantages.diversity import darling, unlikeliness
from jaxgrpo.advantages.group import divide_by_group_std, subtract_group_mean
from jaxgrpo.advantages.masks import mask_truncated, mask_zero_variance
from jaxgrpo.advantages.mismatch import (
    geometric_rejection,
    masked_importance,
    sequence_rejection,
    truncated_importance,
)
from jaxgrpo.advantages.streams import per_reward, stream, sum_rewards
from jaxgrpo.advantages.tokens import gae, hicra, kl_in_reward, reward_to_go, to_tokens
from jaxgrpo.advantages.trees import (
    token_share_weights,
    tree_normalise,
    tree_process,
    tree_subgroup,
)

__all__ = [
    "AdvantageTransform",
    "build",
    "chain",
    "compute",
    "darling",
    "divide_by_group_std",
    "evaluate",
    "gae",
    "geometric_rejection",
    "hicra",
    "kl_in_reward",
    "mask_truncated",
    "mask_zero_variance",
    "masked_importance",
    "per_reward",
    "reward_to_go",
    "sequence_rejection",
    "sign",
    "spec_of",
    "start",
    "stateless",
    "stream",
    "subtract_group_mean",
    "sum_rewards",
    "to_tokens",
    "token_share_weights",
    "transform",
    "tree_normalise",
    "tree_process",
    "tree_subgroup",
    "truncated_importance",
    "unlikeliness",
]
