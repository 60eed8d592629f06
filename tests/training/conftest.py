"""A folder of checkpoints, for the tests of how they are read and of what damages them."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointed import small

from jaxgrpo.training.checkpoints import Checkpoints


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with the steps 1, 2 and 3 of `small`."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small(step), {"step": step})
    return tmp_path
