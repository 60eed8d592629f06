"""Parts and recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from jaxgrpo.advantages import (
    absolute,
    diversity,
    group,
    masks,
    mismatch,
    streams,
    tokens,
    trees,
)
from jaxgrpo.advantages import recipes as methods
from jaxgrpo.advantages.base import AdvantageTransform

Factory = Callable[..., AdvantageTransform]


def _by_name(*factories: Factory) -> dict[str, Factory]:
    return {factory.__name__: factory for factory in factories}


parts: dict[str, Factory] = _by_name(
    streams.sum_rewards,
    streams.per_reward,
    streams.stream,
    group.subtract_group_mean,
    group.divide_by_group_std,
    masks.mask_zero_variance,
    masks.mask_truncated,
    absolute.sign,
    tokens.to_tokens,
    tokens.hicra,
    tokens.kl_in_reward,
    tokens.reward_to_go,
    tokens.gae,
    mismatch.truncated_importance,
    mismatch.masked_importance,
    mismatch.geometric_rejection,
    mismatch.sequence_rejection,
    trees.tree_normalise,
    trees.tree_process,
    trees.tree_subgroup,
    trees.token_share_weights,
    diversity.darling,
    diversity.unlikeliness,
)
recipes: dict[str, Factory] = _by_name(
    methods.grpo,
    methods.dr_grpo,
    methods.sign,
    methods.hicra,
    methods.darling,
    methods.tree_grpo,
    methods.tree_rl,
    methods.tree_po,
)
