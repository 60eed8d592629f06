"""Precision of the tests of losses."""

from __future__ import annotations

import jax
import numpy as np
import pytest


@pytest.fixture(params=[np.float64, np.float32], ids=["float64", "float32"])
def dtype(request):
    with jax.enable_x64(request.param is np.float64):
        yield request.param
