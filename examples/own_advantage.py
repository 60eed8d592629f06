"""An advantage is a chain of (signal, rollouts) -> signal; yours are parts like the built-in ones.

advantage = [
  { use = "sum_rewards" },
  { use = "examples/own_advantage.py:subtract_group_median" },
  { use = "examples/own_advantage.py:soft_clip", limit = 3.0 },
]
"""

import dataclasses

import jax.numpy as jnp


def subtract_group_median(signal, rollouts):
    """Half of the group is above the baseline, whatever the outliers. Ignores masked samples."""
    median = jnp.nanmedian(jnp.where(signal.mask, signal.value, jnp.nan), axis=1, keepdims=True)
    return dataclasses.replace(signal, value=signal.value - jnp.nan_to_num(median))


def soft_clip(limit):
    """Bounds advantages smoothly: limit * tanh(a / limit)."""
    return lambda signal, rollouts: dataclasses.replace(
        signal, value=limit * jnp.tanh(signal.value / limit)
    )
