"""A small state that the tests of checkpoints save, and a folder of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.types import Learner, Stream
from jaxgrpo.training.checkpoints import Checkpoints


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


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with the steps 1, 2 and 3 of `small`."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small(step), {"step": step})
    return tmp_path
