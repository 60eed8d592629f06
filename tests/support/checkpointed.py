"""A small state that the tests of checkpoints save."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.types import Learner, Stream


def small(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(step)
    return {"weight": jnp.asarray(draw.normal(size=500), jnp.float32), "step": np.array(step)}


def small_run_state(step: int) -> tuple[Learner, Stream]:
    """Of a run after a step: its arrays are larger than 100 kB, and do not compress."""
    draw = np.random.default_rng(step)
    learner = Learner(
        step=jnp.int32(step),
        trainable={"weight": jnp.asarray(draw.normal(size=50_000), jnp.float32)},
        frozen={},
        opt_state=(),
        advantage_state={},
    )
    key = np.asarray(jax.random.key_data(jax.random.key(7)))
    return learner, Stream(prompt_policy_state={}, cursor=np.asarray(4, np.int32), key=key)
