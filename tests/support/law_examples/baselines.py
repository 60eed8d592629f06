"""Baselines, scales, absolute advantages, pass@k, and the peers' recipes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgrpo import advantages as adv
from law_examples.basics import BINARY

SUM = adv.sum_rewards()
WEIGHTS = {"correct": 1.0, "style": 0.2}


def parts() -> dict[str, list[tuple[Any, ...]]]:
    return {
        "sum_scored": [(adv.sum_scored(correct=_growing, style=0.2),)],
        "subtract_leave_one_out_mean": [(SUM, adv.subtract_leave_one_out_mean())],
        "subtract_group_median": [(SUM, adv.subtract_group_median())],
        "subtract_length_weighted_mean": [(SUM, adv.subtract_length_weighted_mean())],
        "divide_by_group_mean": [(SUM, adv.divide_by_group_mean(eps=_growing))],
        "divide_by_batch_std": [
            (SUM, adv.subtract_group_mean(), adv.divide_by_batch_std(include_flat=False))
        ],
        "whiten_batch": [
            (SUM, adv.subtract_group_mean(), adv.whiten_batch(eps=_growing, eps_in="std")),
            (SUM, adv.to_tokens(), adv.whiten_batch(keep="nothing", include_flat=False)),
        ],
        "asymmetric": [(adv.sum_rewards(**BINARY), adv.asymmetric(cost=_growing))],
        "conditional_sign": [(SUM, adv.conditional_sign(threshold=0.5))],
        "subtract_constant": [(SUM, adv.subtract_constant(_growing))],
        "clip_advantage": [
            (SUM, adv.clip_advantage(limit=_growing)),
            (SUM, adv.to_tokens(), adv.clip_advantage(high=0.5)),
        ],
        "max_minus_second": [(SUM, adv.max_minus_second())],
        "normalise_with_virtual_rewards": [
            (SUM, adv.normalise_with_virtual_rewards(count=3, top=2.0, eps=_growing))
        ],
        "leave_one_out_pass_at_k": [
            (SUM, adv.leave_one_out_pass_at_k(2, threshold=0.5)),
            (SUM, adv.leave_one_out_pass_at_k(2, threshold=0.5, std=True)),
        ],
        "contrastive_pairs": [(SUM, adv.contrastive_pairs())],
    }


def recipes() -> dict[str, list[Any]]:
    return {
        "asymmetric": [adv.build("asymmetric", {"cost": 0.5, "weights": BINARY})],
        "conditional_sign": [adv.build("conditional_sign", {"weights": BINARY})],
        "reinforce": [adv.build("reinforce", {"baseline": 0.5})],
        "rloo": [adv.build("rloo", {"weights": WEIGHTS})],
        "maxrl": [adv.build("maxrl")],
        "ttrl": [adv.build("ttrl", {"weights": WEIGHTS})],
        "avspo": [adv.build("avspo", {"weights": WEIGHTS})],
        "passk": [adv.build("passk"), adv.build("passk", {"k": 3, "weights": BINARY})],
        "lite_ppo": [adv.build("lite_ppo", {"weights": WEIGHTS})],
        "reinforce_pp": [
            adv.build("reinforce_pp"),
            adv.build("reinforce_pp", {"baseline": "group"}),
        ],
        "like_trl": [
            adv.build("like_trl", {"weights": WEIGHTS}),
            adv.build("like_trl", {"scale_rewards": "batch"}),
            adv.build("like_trl", {"multi_objective_aggregation": "normalize_then_sum"}),
        ],
        "like_verl": [
            adv.build("like_verl", {"adv_estimator": name}) for name in ("grpo", "opo", "gdpo")
        ],
    }


def _growing(step: jax.Array) -> jax.Array:
    """A schedule."""
    return 0.1 * step.astype(jnp.float32)
