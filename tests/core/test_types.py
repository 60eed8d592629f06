"""The specification of rollouts: what is said of their arrays, and what is made by it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core import types
from jaxgrpo.core.types import ARRAYS, Prompts, Rollouts, only_tokens, rollout_arrays

SIZES = 2, 3, 5, 4  # P, G, S, T


def test_the_axes_and_dtypes_are_those_beside_the_fields():
    source = inspect.getsource(Prompts) + inspect.getsource(Rollouts)
    beside = re.findall(r"^    (\w+): Array  # \[([A-Z, ]*)\] (\w+)", source, re.MULTILINE)
    forms = {name: (axes.replace(", ", ""), np.dtype(dtype)) for name, axes, dtype in beside}
    assert forms == {name: (axes, np.dtype(dtype)) for name, (axes, dtype) in ARRAYS.items()}
    varying = {"rewards", "fields", "forced_prefix"}
    assert ARRAYS.keys() | varying == Rollouts.__dataclass_fields__.keys()


def test_arrays_of_prompts_samples_and_tokens_are_all_but_the_step():
    assert set(types.TOKEN_ARRAYS) < set(types.SAMPLE_ARRAYS)
    assert {*types.PROMPT_ARRAYS, *types.SAMPLE_ARRAYS} == ARRAYS.keys() - {"step"}


@pytest.mark.parametrize("numpy", [np, jnp])
def test_samples_that_are_only_tokens_have_all_arrays(numpy: Any):
    arrays = rollout_arrays(numpy.zeros, *SIZES)
    names = ARRAYS.keys() & Prompts.__dataclass_fields__
    prompts = Prompts(**{name: arrays[name] for name in names})
    rollouts = only_tokens(prompts, arrays["completion_tokens"], arrays["token_mask"])
    for name, array in arrays.items():
        value = getattr(rollouts, name)
        assert (type(value), value.dtype, value.shape) == (type(array), array.dtype, array.shape)
    assert (rollouts.policy_version == -1).all()
    assert (rollouts.rewards, rollouts.fields, rollouts.forced_prefix) == ({}, {}, None)
    assert jax.tree.all(jax.tree.map(lambda leaf: not leaf.any(), (prompts, rollouts.truncated)))
