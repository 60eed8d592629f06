"""A small state that the tests of checkpoints save, and a folder of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.training.checkpoints import Checkpoints


def small(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(step)
    return {"weight": jnp.asarray(draw.normal(size=500), jnp.float32), "step": np.array(step)}


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with the steps 1, 2 and 3 of `small`."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small(step), {"step": step})
    return tmp_path
