"""A float32 head on a bfloat16 body: sampler and trainer agree better, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import sampler_gap

from jaxgrpo.models.api import Caller
from jaxgrpo.models.attention import causal

NARROW = dataclasses.replace(tiny.UNIFORM, dtype="bfloat16")
WIDE = dataclasses.replace(NARROW, float32_head=True)


@pytest.mark.full
@pytest.mark.slow
def test_the_gap_between_sampler_and_trainer_shrinks():
    narrow, wide = (sampler_gap(config, 12) for config in (NARROW, WIDE))
    assert len(narrow) > 500
    assert wide.mean() < 0.9 * narrow.mean(), (narrow.mean(), wide.mean())


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_head_is_held_and_computed_in_float32(tied):
    config = dataclasses.replace(WIDE, tie_embeddings=tied)
    model = tiny.model(config)
    wide = {
        jax.tree_util.keystr(path)
        for path, spec in jax.tree_util.tree_leaves_with_path(model.shapes)
        if spec.dtype == jnp.float32
    }
    assert wide == {"['embed']['table']" if tied else "['head']['table']"}
    tokens = jnp.zeros((1, 3), jnp.int32)

    def run(values):
        hidden, _ = model.apply(values, tokens, tokens, Caller(causal(tokens, tokens == 0)), None)
        return hidden, model.unembed(values, hidden)

    hidden, logits = jax.eval_shape(run, model.shapes)
    assert hidden.dtype == logits.dtype == jnp.float32
    assert "HIGHEST" in str(jax.make_jaxpr(run)(model.shapes))


@pytest.mark.slow
def test_in_a_float32_model_it_changes_nothing_on_a_cpu():
    wide = dataclasses.replace(tiny.UNIFORM, float32_head=True)
    rollouts = tiny.rollouts(np.zeros((2, 2)))
    with_it, without = (
        tiny.whole_logps(config, tiny.params(), rollouts) for config in (wide, tiny.UNIFORM)
    )
    np.testing.assert_array_equal(with_it, without)
