"""Advantages and masks composed as optax composes updates, on arrays and without a trainer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxgrpo as jg

REWARDS = {"right": [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], "brief": np.eye(2, 4)}


def soft_clip(limit: float) -> jg.AdvantageTransform:
    def clip(signal: jg.Signal, rollouts: jg.Rollouts) -> jg.Signal:
        return dataclasses.replace(signal, value=limit * jnp.tanh(signal.value / limit))

    return jg.transform(clip, name="soft_clip")


def by_length(rollouts: jg.Rollouts) -> jax.Array:
    return rollouts.token_mask.sum(-1)


def halved(signal: jg.Signal, rollouts: jg.Rollouts) -> jg.Signal:
    return dataclasses.replace(signal, value=signal.value / 2)


normalised = jg.per_reward(jg.chain(jg.subtract_group_mean(), jg.divide_by_group_std(eps=1e-4)))
method = jg.chain(
    jg.stream("length", by_length),
    normalised,
    jg.sum_rewards(right=1.0, brief=0.2, length=-0.01),
    jg.mask_zero_variance(),
    jg.mask_truncated(),
    soft_clip(3.0),
    halved,
    jg.to_tokens(),
    name="mine",
)
recipes = [jg.advantages.build(name) for name in ("grpo", "dr_grpo", "rloo")]


def main() -> dict[str, list[float]]:
    truncated, token_mask = np.zeros((2, 4), bool), np.ones((2, 4, 5), bool)
    advantage, mask = jg.advantages.evaluate(
        method, REWARDS, truncated=truncated, token_mask=token_mask
    )
    results = {method.name: advantage[mask].tolist()}
    for recipe in recipes:
        value, _ = jg.advantages.evaluate(recipe, REWARDS["right"])
        results[recipe.name] = value.mean(axis=1).tolist()
    summed = jg.chain(jg.sum_rewards(), jg.sign())
    steps: list[str] = [name for name, _ in summed.steps]
    print(steps, sorted(summed.needs))
    return results
