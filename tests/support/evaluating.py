"""Arrays through recipes and chains, for tests: jitted, so that many small programs are one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.advantages import evaluate


def values(recipe: Any, rewards: Any, options: Any = None, **fields: Any) -> np.ndarray:
    """The advantages of one recipe or chain, jitted."""
    return all_values([(recipe, options)], rewards, **fields)[0]


def all_values(recipes: Any, rewards: Any, **fields: Any) -> list[np.ndarray]:
    """The advantages of (recipe or chain, options) each, in one jitted program."""

    @jax.jit
    def run(rewards, fields):
        return [evaluate(recipe, rewards, options=more, **fields)[0] for recipe, more in recipes]

    arrays = jax.tree.map(jnp.asarray, rewards, is_leaf=lambda node: isinstance(node, list))
    advantages = run(arrays, {name: jnp.asarray(field) for name, field in fields.items()})
    return [np.asarray(value) for value in advantages]


def scores(reward: np.ndarray, ddof: int = 0, eps: float = 0.0):
    """((reward - mean) / (std + eps), std) of each group in NumPy, 0 in flat ones."""
    flat = reward.max(1, keepdims=True) == reward.min(1, keepdims=True)
    std = reward.std(1, ddof=ddof, keepdims=True)
    centred = reward - reward.mean(1, keepdims=True)
    return np.where(flat, 0, centred / np.where(flat, 1, std + eps)), np.where(flat, 0, std)
