"""A small state that the tests of checkpoints save."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def small(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(step)
    return {"weight": jnp.asarray(draw.normal(size=500), jnp.float32), "step": np.array(step)}
