"""The parts that everything else is built on, and a user's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrpo import advantages as adv
from jaxgrpo.core.types import Rollouts, Signal

BINARY = {"correct": 1.0, "style": 0.0}
"""Weights that leave the one reward in {0, 1}."""


def running_mean() -> adv.AdvantageTransform:
    """A user's transform with memory: subtracts the mean of all batches before."""

    def init(spec):
        return {"total": jnp.zeros(()), "count": jnp.zeros(())}

    def update(signal: Signal, state, rollouts: Rollouts):
        baseline = state["total"] / jnp.maximum(state["count"], 1)
        after = dataclasses.replace(
            signal, value=signal.value - baseline.astype(signal.value.dtype)
        )
        total = signal.value.sum().astype(state["total"].dtype)
        count = signal.mask.sum(dtype=state["count"].dtype)
        new = {"total": state["total"] + total, "count": state["count"] + count}
        return after, new, {}

    return adv.AdvantageTransform("running_mean", init, update, levels=(2,))


@adv.transform
def soften(signal: Signal, rollouts: Rollouts) -> Signal:
    """A user's function; it leaves tanh(0) = 0 and more in masked entries."""
    return dataclasses.replace(signal, value=jnp.tanh(signal.value) + 1)


def parts() -> dict[str, list[tuple[Any, ...]]]:
    normalise = adv.chain(adv.subtract_group_mean(), adv.divide_by_group_std(), name="normalise")
    return {
        "sum_rewards": [(adv.sum_rewards(correct=1.0, style=0.2),), (adv.sum_rewards(),)],
        "per_reward": [(adv.per_reward(normalise), adv.sum_rewards())],
        "stream": [(adv.stream("length", _length), adv.sum_rewards())],
        "score_mean": [(adv.score_mean("token_confidence", name="sure"), adv.sum_rewards())],
        "distill": [
            (adv.sum_rewards(), adv.distill()),
            (adv.sum_rewards(), adv.to_tokens(), adv.distill(_growing, 0.5, teacher="base")),
        ],
        "subtract_group_mean": [(adv.sum_rewards(), adv.subtract_group_mean())],
        "divide_by_group_std": [
            (adv.sum_rewards(), adv.divide_by_group_std()),
            (adv.sum_rewards(), adv.divide_by_group_std(eps=_growing, ddof=0)),
        ],
        "keep_samples": [(adv.sum_rewards(), adv.keep_samples(3), adv.subtract_group_mean())],
        "mask_zero_variance": [(adv.sum_rewards(), adv.mask_zero_variance())],
        "mask_untaught": [
            (adv.sum_rewards(), adv.mask_untaught("teacher_logp")),
            (adv.sum_rewards(), adv.to_tokens(), adv.mask_untaught("teacher_logp")),
        ],
        "mask_truncated": [
            (adv.sum_rewards(), adv.mask_truncated()),
            (adv.sum_rewards(), adv.to_tokens(), adv.mask_truncated()),
        ],
        "sign": [
            (adv.sum_rewards(**BINARY), adv.sign()),
            (adv.sum_rewards(), adv.sign(threshold=0.5)),
        ],
        "to_tokens": [
            (adv.sum_rewards(), adv.to_tokens()),
            (adv.sum_rewards(), adv.to_tokens(place="last")),
        ],
    }


def recipes() -> dict[str, list[Any]]:
    return {
        "grpo": [adv.build("grpo"), adv.build("grpo", {"eps": 1e-4, "ddof": 0})],
        "dr_grpo": [adv.build("dr_grpo", {"weights": {"correct": 1.0, "style": 0.2}})],
        "sign": [adv.build("sign", {"weights": BINARY})],
        "opd": [adv.build("opd"), adv.build("opd", {"share": 0.5, "gamma": 1.0})],
        "sdpo": [adv.build("sdpo", {"share": 0.5, "teacher": "reference"})],
    }


def _growing(step: jax.Array) -> jax.Array:
    """A schedule."""
    return 0.1 * step.astype(jnp.float32)


def _length(rollouts: Rollouts) -> jax.Array:
    value = next(iter(rollouts.rewards.values()))
    return rollouts.token_mask.sum(-1).astype(value.dtype)
