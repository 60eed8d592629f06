"""What the laws run over: rollouts with every edge case, and every part and recipe as a chain."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import registry
from jaxgrpo.types import Rollouts, Signal

P, G, T, S = 8, 5, 6, 3
MISSING = {(1, 2), (3, 0), (5, 4), *((6, sample) for sample in range(G))}
"""(prompt, sample) that no reward could score; prompt 6 has no scored sample at all."""


def make_rollouts(dtype: Any = np.float32, seed: int = 0) -> Rollouts:
    """Rollouts with flat groups, unscored samples, truncated and empty completions.

    Rewards: correct in {0, 1}, style any number. Prompt 0 is all-fail and 2 all-pass (style 0.1
    throughout), 6 has no scored sample, 7 a single one.
    """
    random = np.random.default_rng(seed)
    correct = random.integers(0, 2, (P, G)).astype(dtype)
    style = random.normal(size=(P, G)).astype(dtype)
    correct[0], correct[2] = 0, 1
    style[0], style[2] = 0.1, 0.1
    correct[4, 0], correct[7, 1:] = np.nan, np.nan  # scored by one reward, not by the other
    for place in MISSING:
        correct[place], style[place] = np.nan, np.nan
    length = random.integers(1, T + 1, (P, G))
    length[1, 1] = 0
    tokens = np.arange(T) < length[..., None]
    tokens[3, 1, 1] = False  # a token that the policy did not choose
    logp = np.where(tokens, -random.exponential(size=(P, G, T)), 0).astype(dtype)
    return Rollouts(
        prompt_tokens=jnp.asarray(random.integers(0, 9, (P, S)), jnp.int32),
        prompt_mask=jnp.ones((P, S), bool),
        completion_tokens=jnp.asarray(random.integers(0, 9, (P, G, T)), jnp.int32),
        token_mask=jnp.asarray(tokens),
        behavior_logp=jnp.asarray(logp),
        rewards={"correct": jnp.asarray(correct), "style": jnp.asarray(style)},
        truncated=jnp.asarray(random.random((P, G)) < 0.3),
        ordinal=jnp.arange(P, dtype=jnp.int32),
        row=jnp.arange(P, dtype=jnp.int32) % 5,
        policy_version=jnp.zeros((P, G), jnp.int32),
        step=jnp.int32(3),
        fields={
            "reference_logp": jnp.asarray(logp * dtype(0.9)),
            "token_entropy": jnp.asarray(np.abs(logp)),
            "difficulty": jnp.asarray(random.random(P).astype(dtype)),
        },
    )


def garble(rollouts: Rollouts) -> Rollouts:
    """Other contents wherever nothing may be read: unscored samples, and padding."""
    missing = np.zeros((P, G), bool)
    for place in MISSING:
        missing[place] = True
    outside = jnp.asarray(missing[..., None] | ~np.asarray(rollouts.token_mask))

    def spoil(leaf: jax.Array) -> jax.Array:
        return jnp.where(outside, jnp.nan, leaf) if leaf.shape == (P, G, T) else leaf

    return dataclasses.replace(
        rollouts,
        completion_tokens=jnp.where(outside, 777, rollouts.completion_tokens),
        behavior_logp=spoil(rollouts.behavior_logp),
        token_mask=rollouts.token_mask ^ jnp.asarray(missing)[..., None],
        truncated=rollouts.truncated ^ jnp.asarray(missing),
        fields={name: spoil(leaf) for name, leaf in rollouts.fields.items()},
    )


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


def chains() -> dict[str, adv.AdvantageTransform]:
    """Every part and recipe, with their options, as chains over both rewards."""
    binary = {"correct": 1.0, "style": 0.0}
    normalise = adv.chain(adv.subtract_group_mean(), adv.divide_by_group_std(), name="normalise")
    parts = {
        "sum_rewards": [(adv.sum_rewards(correct=1.0, style=0.2),), (adv.sum_rewards(),)],
        "per_reward": [(adv.per_reward(normalise), adv.sum_rewards())],
        "stream": [(adv.stream("length", _length), adv.sum_rewards())],
        "subtract_group_mean": [(adv.sum_rewards(), adv.subtract_group_mean())],
        "divide_by_group_std": [
            (adv.sum_rewards(), adv.divide_by_group_std()),
            (adv.sum_rewards(), adv.divide_by_group_std(eps=_growing, ddof=0)),
        ],
        "mask_zero_variance": [(adv.sum_rewards(), adv.mask_zero_variance())],
        "mask_truncated": [
            (adv.sum_rewards(), adv.mask_truncated()),
            (adv.sum_rewards(), adv.to_tokens(), adv.mask_truncated()),
        ],
        "sign": [
            (adv.sum_rewards(**binary), adv.sign()),
            (adv.sum_rewards(), adv.sign(threshold=0.5)),
        ],
        "to_tokens": [
            (adv.sum_rewards(), adv.to_tokens()),
            (adv.sum_rewards(), adv.to_tokens(place="last")),
        ],
    }
    recipes = {
        "grpo": [adv.build("grpo"), adv.build("grpo", {"eps": 1e-4, "ddof": 0})],
        "dr_grpo": [adv.build("dr_grpo", {"weights": {"correct": 1.0, "style": 0.2}})],
        "sign": [adv.build("sign", {"weights": binary})],
    }
    own = (adv.sum_rewards(), running_mean(), soften)
    _check_complete("part", parts, registry.parts)
    _check_complete("recipe", recipes, registry.recipes)
    made = {name: [adv.chain(*steps) for steps in list_] for name, list_ in parts.items()}
    return _label(made) | _label(recipes, "recipe ") | _label({"own": [adv.chain(*own)]})


def run(whole: adv.AdvantageTransform, rollouts: Rollouts, state: Any = None):
    """(signal, state, metrics) of one chain."""
    return adv.compute(whole, rollouts, state)


def run_all(rollouts: Rollouts) -> dict[str, Any]:
    """What every chain makes of the rollouts: label -> (signal, state, metrics)."""
    return {label: run(whole, rollouts) for label, whole in chains().items()}


def _growing(step: jax.Array) -> jax.Array:
    """A schedule."""
    return 0.1 * step.astype(jnp.float32)


def _length(rollouts: Rollouts) -> jax.Array:
    value = next(iter(rollouts.rewards.values()))
    return rollouts.token_mask.sum(-1).astype(value.dtype)


def _check_complete(what: str, examples: dict[str, Any], known: dict[str, Any]) -> None:
    """A part without an example here would escape the laws."""
    assert set(examples) == set(known), f"laws.py lacks {what}s: {set(examples) ^ set(known)}"


def _label(table: dict[str, list[adv.AdvantageTransform]], prefix: str = ""):
    return {
        f"{prefix}{name} {index}": whole
        for name, wholes in table.items()
        for index, whole in enumerate(wholes)
    }
