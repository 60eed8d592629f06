"""What the laws run over: rollouts with every edge case, and every part and recipe as a chain."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import law_examples
import numpy as np
from law_examples.basics import running_mean, soften

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import registry
from jaxgrpo.core.types import Rollouts

P, G, T, S, J, D, K = 8, 5, 6, 3, 4, 3, 3
ROWS = 5
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
        row=jnp.arange(P, dtype=jnp.int32) % ROWS,
        policy_version=jnp.zeros((P, G), jnp.int32),
        step=jnp.int32(3),
        fields=make_fields(random, logp),
    )


def make_fields(random: np.random.Generator, logp: np.ndarray) -> dict[str, jax.Array]:
    """Everything that a method may bring, under the names that parts ask for by default."""
    dtype = logp.dtype.type
    parents = random.integers(0, 2, (P, G))
    answer = -random.exponential(size=(P, G, J)).astype(dtype)
    answer[5] = answer[5, :1]  # all samples judge the answer alike
    values = {
        "reference_logp": logp * dtype(0.9),
        "base_logp": logp * dtype(1.1),
        "trainer_logp": logp * dtype(0.95),
        "teacher_logp": logp * dtype(0.8),
        "token_entropy": np.abs(logp),
        "token_confidence": 2 * np.abs(logp),
        "self_certainty": 3 * np.abs(logp),
        "token_collision": np.exp(-np.abs(logp)),
        "effective_rank": (1 + np.abs(logp)) * (np.arange(T) % 2),
        "token_value": random.normal(size=(P, G, T)).astype(dtype),
        "planning": random.random((P, G, T)) < 0.4,
        "answer_logp": answer,
        "answer_mask": np.arange(J) < random.integers(1, J + 1, (P, 1)),
        "answered": np.arange(T) >= T - 2 + np.zeros((P, G, 1)),
        "cut_answer_logp": -random.exponential(size=(P, G, 4)).astype(dtype),
        "thought_tokens": random.integers(0, T + 1, (P, G)).astype(np.int32),
        "answer_reached": np.arange(P * G).reshape(P, G) % 5 > 0,
        "masked_answer_logp": -random.exponential(size=(P, J)).astype(dtype),
        "rubric": random.integers(0, 2, (P, G)).astype(dtype),
        "classes": random.integers(0, 3, (P, G)).astype(np.int32),
        "tree": parents.astype(np.int32),
        "ancestors": np.stack(
            [np.zeros((P, G)), 1 + parents, 3 + np.arange(G) + 0 * parents], -1
        ).astype(np.int32),
        "token_depth": np.minimum(np.arange(T) // 2 + 0 * parents[..., None], D - 1).astype(
            np.int32
        ),
        "difficulty": random.random(P).astype(dtype),
        "turn": np.minimum(np.arange(T) // 2 + 0 * parents[..., None], K - 1).astype(np.int32),
        "turn_reward": random.normal(size=(P, G, K)).astype(dtype),
        "state_hash": random.integers(0, 3, (P, G, K)).astype(np.int32),
        "turn_truncated": np.arange(K) % 2 + 0 * parents[..., None] > 0,
    }
    return {name: jnp.asarray(value) for name, value in values.items()}


def garble(rollouts: Rollouts) -> Rollouts:
    """Other contents wherever nothing may be read: unscored samples, and padding."""
    missing = np.zeros((P, G), bool)
    for place in MISSING:
        missing[place] = True
    outside = jnp.asarray(missing[..., None] | ~np.asarray(rollouts.token_mask))

    def spoil(leaf: jax.Array) -> jax.Array:
        if leaf.shape[:2] != (P, G):
            return leaf
        tail = (1,) * (leaf.ndim - 2)
        where = outside if leaf.shape == (P, G, T) else jnp.asarray(missing.reshape(P, G, *tail))
        garbage = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 1
        return jnp.where(where, jnp.asarray(garbage, leaf.dtype), leaf)

    return dataclasses.replace(
        rollouts,
        completion_tokens=jnp.where(outside, 777, rollouts.completion_tokens),
        behavior_logp=spoil(rollouts.behavior_logp),
        token_mask=rollouts.token_mask ^ jnp.asarray(missing)[..., None],
        truncated=rollouts.truncated ^ jnp.asarray(missing),
        fields={name: spoil(leaf) for name, leaf in rollouts.fields.items()},
    )


def chains() -> dict[str, adv.AdvantageTransform]:
    """Every part and recipe, with their options, as chains over both rewards."""
    parts, recipes = law_examples.parts(), law_examples.recipes()
    _check_complete("part", parts, registry.parts)
    _check_complete("recipe", recipes, registry.recipes)
    part_chains = {name: [adv.chain(*steps) for steps in list_] for name, list_ in parts.items()}
    custom = adv.chain(adv.sum_rewards(), running_mean(), soften)
    return _label(part_chains) | _label(recipes, "recipe ") | _label({"own": [custom]})


def behind_a_baseline() -> dict[str, adv.AdvantageTransform]:
    """Every part that takes one signal [P, G], behind the sum and the group's mean."""
    return _label(
        {
            f"behind a baseline: {name}": [
                adv.chain(adv.sum_rewards(), adv.subtract_group_mean(), steps[-1])
                for steps in list_
                if steps[-1].kind == "signal->signal" and 2 in steps[-1].levels
            ]
            for name, list_ in law_examples.parts().items()
        }
    )


def first_state(chain: adv.AdvantageTransform, rollouts: Rollouts) -> Any:
    """The state of a chain before the first rollouts, of a data set of `ROWS` rows."""
    return chain.init(adv.spec_of(rollouts, num_rows=ROWS))


def run(chain: adv.AdvantageTransform, rollouts: Rollouts, state: Any = None):
    """(signal, state, metrics) of one chain."""
    state = first_state(chain, rollouts) if state is None else state
    return adv.compute(chain, rollouts, state)


def run_all(rollouts: Rollouts) -> dict[str, Any]:
    """What every chain makes of the rollouts: label -> (signal, state, metrics)."""
    return {label: run(chain, rollouts) for label, chain in chains().items()}


def run_recipes(rollouts: Rollouts) -> dict[str, Any]:
    """What the recipes alone make of them: the spot check of another dtype."""
    labelled = chains().items()
    return {label: run(chain, rollouts) for label, chain in labelled if label.startswith("recipe ")}


def _check_complete(what: str, examples: dict[str, Any], registered: dict[str, Any]) -> None:
    """A part without an example here would escape the laws."""
    assert set(examples) == set(registered), (
        f"laws.py lacks {what}s: {set(examples) ^ set(registered)}"
    )


def _label(table: dict[str, list[adv.AdvantageTransform]], prefix: str = ""):
    return {
        f"{prefix}{name} {index}": transform
        for name, transforms in table.items()
        for index, transform in enumerate(transforms)
    }
