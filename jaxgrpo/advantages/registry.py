"""Parts and recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from jaxgrpo.advantages import (
    absolute,
    batch,
    gates,
    group,
    length,
    masks,
    several,
    streams,
    tokens,
    weights,
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
    several.combine,
    several.dvao,
    group.subtract_group_mean,
    group.divide_by_group_std,
    masks.mask_zero_variance,
    masks.mask_truncated,
    masks.mask_low_variance,
    masks.mask_group_difficulty,
    gates.rubric_gate,
    length.overlong_penalty,
    weights.shrink_rare_success,
    weights.weight_by_absolute_advantage,
    weights.weight_by_learnability,
    batch.divide_by_batch_std,
    batch.whiten_batch,
    absolute.sign,
    absolute.clip_advantage,
    tokens.to_tokens,
)
recipes: dict[str, Factory] = _by_name(
    methods.grpo,
    methods.dr_grpo,
    methods.sign,
    methods.gdpo,
    methods.dvao,
    methods.rlcr,
    methods.dapo,
    methods.scale_rl,
)
