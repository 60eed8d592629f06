"""Each module against NumPy written from its formula."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgrpo.models import decoder
from jaxgrpo.models.api import Caller, LoraConfig, ModelConfig, Rope
from jaxgrpo.models.attention import causal
from jaxgrpo.models.experts import clamped
from jaxgrpo.models.layers import (
    Dense,
    Embedding,
    FeedForward,
    RMSNorm,
    rotary_angles,
    rotate,
    rounded_gradients,
    scaled_by,
)


def config(**changes) -> ModelConfig:
    sizes = {"vocab_size": 7, "hidden_size": 6, "intermediate_size": 10, "num_layers": 1}
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    return ModelConfig(**{**sizes, **heads, **changes})


def rngs() -> nnx.Rngs:
    return nnx.Rngs(params=jax.random.key(0), lora=jax.random.key(1))


def test_rms_norm_divides_by_the_root_mean_square_and_adds_its_offset():
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    for offset in (0.0, 1.0):
        norm = RMSNorm({"norm": 6}, config(norm_offset=offset, rms_norm_eps=0.1))
        norm.scale[...] = jnp.arange(6.0)
        expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * (offset + np.arange(6))
        np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5)


def test_a_new_norm_is_the_identity_up_to_scale_whatever_its_offset():
    x = jnp.asarray([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])
    for offset in (0.0, 1.0):
        norm = RMSNorm({"norm": 6}, config(norm_offset=offset))
        np.testing.assert_allclose(norm(x), x, rtol=1e-5)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64,)), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    expected = jnp.asarray(wide / np.sqrt((wide**2).mean() + 1e-6)).astype(jnp.bfloat16)
    normed = RMSNorm({"norm": 64}, config(dtype="bfloat16"))(x)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(normed, expected)


def with_adapters(x):
    """What adapters of scale 5 / 3 add to nothing: the first column of x times it."""
    settings = LoraConfig(rank=3, alpha=5.0)
    options = config(dtype="bfloat16", lora=settings)
    dense = Dense("attention/query", {"embed": 1}, {"mlp": 1}, options, rngs())
    assert dense.lora_a is not None
    assert dense.lora_b is not None
    dense.kernel[...] = jnp.zeros((1, 1), jnp.bfloat16)
    dense.lora_a[...] = jnp.asarray([[1.0, 0.0, 0.0]], jnp.bfloat16)
    dense.lora_b[...] = jnp.asarray([[1.0], [0.0], [0.0]], jnp.bfloat16)
    return dense(x[:, None])[:, 0]


@pytest.mark.parametrize(
    ("scaled", "exact"),
    [
        (lambda x: scaled_by(x, 0.22), lambda x: 0.22 * x),
        (lambda x: clamped(1.7, 7.0, -x, 0 * x), lambda x: -x / (1 + np.exp(1.7 * x))),
        (with_adapters, lambda x: 5 / 3 * x),
    ],
)
def test_numbers_that_bfloat16_multiplies_by_are_not_rounded_to_it(scaled, exact):
    x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, 40_000), jnp.bfloat16)
    actual = scaled(x)
    assert actual.dtype == jnp.bfloat16
    ratio = np.asarray(actual, np.float64) / exact(np.asarray(x, np.float64))
    assert abs(ratio.mean() - 1) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(("is_exact", "scale"), [(True, 5.6), (False, 5.59375)])
def test_the_scale_of_embeddings_is_rounded_where_transformers_casts_it(is_exact, scale):
    """With norms that divide by 10^4, beside which layers add nothing."""
    sizes = {"vocab_size": 500, "hidden_size": 64, "dtype": "bfloat16", "rms_norm_eps": 1e8}
    options = config(**sizes, embedding_scale=5.6, exact_embedding_scale=is_exact)
    model, position = decoder.build(options), jnp.arange(500)[None]
    params = model.init(jax.random.key(0))
    caller = Caller(causal(position, position >= 0))
    hidden, _ = jax.jit(model.apply, static_argnums=3)(params, position, position, caller, None)
    vectors = np.asarray(params["embed"]["table"], np.float64)
    ratio = np.asarray(hidden[0], np.float64) / (vectors * scale / 1e4)
    # Products of so few bits with one number are not rounded up and down alike.
    assert abs(ratio[np.abs(vectors) > 0.01].mean() - 1) < 4e-4


def test_rotation_turns_each_half_pair_by_position_times_frequency():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 4)).astype(np.float32)
    position = np.array([[0, 5, 1000]])
    expected = np.zeros_like(x)
    for q, at in enumerate(position[0]):
        for i, frequency in enumerate((1.0, 100.0**-0.5)):
            pair = x[0, q, :, i] + 1j * x[0, q, :, i + 2]
            pair = pair * np.exp(1j * at * frequency) * 0.5
            expected[0, q, :, i], expected[0, q, :, i + 2] = pair.real, pair.imag
    angles = rotary_angles(jnp.asarray(position), Rope(100.0), 4)
    np.testing.assert_allclose(rotate(jnp.asarray(x), angles, 0.5), expected, atol=1e-4)


def test_scores_of_rotated_vectors_depend_on_distance_only():
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(at: int, key_position: int) -> float:
        turned = [
            rotate(jnp.asarray(x), rotary_angles(jnp.asarray([[p]]), Rope(), 8))
            for x, p in ((query, at), (key, key_position))
        ]
        return float(jnp.vdot(*turned))

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_dense_contracts_several_dimensions_and_adds_its_bias():
    sizes = {"heads": 2, "head_dim": 4}, {"embed": 6}
    dense = Dense("attention/out", *sizes, config(), rngs(), bias=True)
    assert dense.bias is not None
    dense.bias[...] = jnp.arange(6.0)
    x = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    expected = x.reshape(3, 8) @ np.asarray(dense.kernel[...]).reshape(8, 6) + np.arange(6)
    np.testing.assert_allclose(dense(jnp.asarray(x)), expected, rtol=1e-5)
    assert dense.kernel.get_metadata("axes") == ("heads", "head_dim", "embed")


def test_feed_forward_gates_with_silu_or_with_the_tanh_form_of_gelu():
    def silu(x):
        return x / (1 + np.exp(-x))

    def gelu_tanh(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = 30 * np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    for name, activation in (("silu", silu), ("gelu_tanh", gelu_tanh)):
        module: Any = FeedForward(config(activation=name), None, rngs())
        gate, up, down = (
            np.asarray(part.kernel[...]) for part in (module.gate, module.up, module.down)
        )
        expected = (activation(x @ gate) * (x @ up)) @ down
        np.testing.assert_allclose(module(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


def test_a_gpu_rounds_the_gradient_of_bfloat16_logits_and_nothing_else():
    """The products of the rounded gradient, beside those of the whole one in float64."""
    rng = np.random.default_rng(0)
    hidden, table = (
        jnp.asarray(rng.normal(size=(size, 64)) * scale, jnp.bfloat16)
        for size, scale in ((128, 1.0), (2048, 0.4))
    )
    logits = hidden.astype(jnp.float32) @ table.astype(jnp.float32).T
    picks = jax.nn.one_hot(rng.integers(0, 2048, 128), 2048)
    cotangent = (picks - jax.nn.softmax(logits)) * rng.normal(size=(128, 1))
    wide = [np.asarray(leaf, np.float64) for leaf in (cotangent, hidden, table)]
    expected = wide[0] @ wide[2], wide[0].T @ wide[1]
    rounding = 2.0**-9  # of a number in bfloat16, at the most; the mean square is .0017
    for actual, exact in zip(rounded_gradients(cotangent, hidden, table), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact)
        assert error < 2**0.5 * rounding  # of the logits' gradient, and of the result


def test_only_on_a_gpu_are_both_products_of_the_head_s_gradient_in_bfloat16():
    graph, state = nnx.split(Embedding(config(vocab_size=512, dtype="bfloat16"), rngs()))

    def loss(state, hidden):
        return jnp.sin(nnx.merge(graph, state).decode(hidden)).sum()

    def products(platform: str) -> list[tuple[str, str]]:
        hidden = jax.ShapeDtypeStruct((16, 6), jnp.bfloat16)
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(state, hidden)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return re.findall(r"dot_general .*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>", text)

    assert products("cuda") == [("bf16", "bf16")] * 3
    assert products("cpu").count(("bf16", "bf16")) == 1
