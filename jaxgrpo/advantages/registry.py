"""Parts and recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from jaxgrpo.advantages import (
    absolute,
    filtered_model,
    group,
    masks,
    reflection,
    streams,
    tokens,
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
    reflection.reasoning_reflection,
    reflection.answer_length,
    filtered_model.alpha_dpg,
    filtered_model.f_dpg,
)
recipes: dict[str, Factory] = _by_name(
    methods.grpo,
    methods.dr_grpo,
    methods.sign,
    methods.dro_r3,
    methods.alpha_dpg,
    methods.f_dpg,
)
