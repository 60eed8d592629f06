"""Parts and recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from jaxgrpo.advantages import (
    absolute,
    batch,
    filtered_model,
    gates,
    group,
    length,
    masks,
    passk,
    reflection,
    running,
    several,
    streams,
    tokens,
    tracked,
    weights,
)
from jaxgrpo.advantages import recipes as methods
from jaxgrpo.advantages.base import AdvantageTransform

Factory = Callable[..., AdvantageTransform]


def _by_name(*factories: Factory) -> dict[str, Factory]:
    return {factory.__name__: factory for factory in factories}


parts: dict[str, Factory] = _by_name(
    streams.sum_rewards,
    streams.sum_scored,
    streams.per_reward,
    streams.stream,
    group.subtract_group_mean,
    group.subtract_leave_one_out_mean,
    group.subtract_group_median,
    group.subtract_length_weighted_mean,
    group.divide_by_group_std,
    group.divide_by_group_mean,
    batch.divide_by_batch_std,
    batch.whiten_batch,
    masks.mask_zero_variance,
    masks.mask_truncated,
    masks.mask_low_variance,
    masks.mask_group_difficulty,
    absolute.sign,
    absolute.asymmetric,
    absolute.conditional_sign,
    absolute.subtract_constant,
    absolute.clip_advantage,
    passk.max_minus_second,
    passk.leave_one_out_pass_at_k,
    passk.contrastive_pairs,
    several.combine,
    several.dvao,
    gates.rubric_gate,
    length.overlong_penalty,
    weights.shrink_rare_success,
    weights.weight_by_absolute_advantage,
    weights.weight_by_learnability,
    running.ema_baseline,
    running.divide_by_running_scale,
    tracked.subtract_tracked_success,
    tracked.mask_difficulty_band,
    reflection.reasoning_reflection,
    reflection.answer_length,
    filtered_model.alpha_dpg,
    filtered_model.f_dpg,
    tokens.to_tokens,
)
recipes: dict[str, Factory] = _by_name(
    methods.grpo,
    methods.dr_grpo,
    methods.sign,
    methods.asymmetric,
    methods.conditional_sign,
    methods.reinforce,
    methods.rloo,
    methods.maxrl,
    methods.passk,
    methods.lite_ppo,
    methods.reinforce_pp,
    methods.like_trl,
    methods.like_verl,
    methods.gdpo,
    methods.dvao,
    methods.rlcr,
    methods.dapo,
    methods.scale_rl,
    methods.ema,
    methods.spo,
    methods.dro_r3,
    methods.alpha_dpg,
    methods.f_dpg,
)
