"""Activations in float32 beside weights in bfloat16: sampler and trainer agree better, and both are
nearer to float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import sampler_gap

from jaxgrpo.models.api import AttentionKind, Caller, ExpertsKind, LayerKind, LoraConfig, Rope
from jaxgrpo.models.attention import causal
from jaxgrpo.models.products import as_sampled, pieces, product, product_in_pieces, rounded

EXPERTS = dataclasses.replace(
    tiny.UNIFORM, pattern=(LayerKind(feed=ExpertsKind(6, 2, size=16, shared=8)),)
)
ALL = {"float32_activations": True, "float32_attention": True, "float32_head": True}
KINDS = {"dense": tiny.UNIFORM, "windows": tiny.LOCAL_GLOBAL, "states": tiny.HYBRID}


def in_bfloat16(config, **changes):
    return dataclasses.replace(config, dtype="bfloat16", **changes)


def in_shapes(config):
    return tiny.model(config).shapes


def wide(values):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values)


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_pieces_add_up():
    x = random((64, 33)) * 10.0 ** random((64, 1), 1)
    first, second, third = pieces(x, jnp.bfloat16)
    np.testing.assert_array_equal(first, x.astype(jnp.bfloat16))
    total = sum(np.asarray(piece, np.float64) for piece in (first, second, third))
    np.testing.assert_array_equal(total, np.asarray(x, np.float64))
    two = sum(np.asarray(piece, np.float64) for piece in pieces(x, jnp.bfloat16, most=2))
    assert np.abs(two / np.asarray(x, np.float64) - 1).max() <= 2.0**-16
    (same,) = pieces(first, jnp.bfloat16, most=2)
    assert same is first
    assert rounded(x, jnp.float32) is as_sampled(x, "float32") is x
    np.testing.assert_array_equal(as_sampled(x, "bfloat16"), first.astype(jnp.float32))


@pytest.mark.parametrize("contracted", [1, 2])
def test_a_product_in_pieces_is_that_of_float64(contracted):
    """Beside weights rounded once, to 2^-15 of the sum of absolute terms; one piece has 2^-8."""
    kernel = random((4, 24, 3, 5)[2 - contracted :], 1)
    x = random((7, 2, 4, 24) if contracted == 2 else (7, 2, 24), 2)
    out = product_in_pieces(x, kernel, contracted, "bfloat16")
    assert out.dtype == jnp.float32
    exact = [np.asarray(leaf, np.float64) for leaf in (x, kernel.astype(jnp.bfloat16))]
    expected = np.tensordot(*exact, axes=contracted)
    bound = np.tensordot(*map(np.abs, exact), axes=contracted)
    assert (np.abs(out - expected) / bound).max() < 2.0**-15
    coarse = product_in_pieces(x.astype(jnp.bfloat16), kernel, contracted, "bfloat16")
    assert coarse.dtype == jnp.float32
    assert (np.abs(coarse - expected) / bound).max() > 2.0**-12


def test_gradients_of_a_product_in_pieces_are_those_of_a_product():
    x, kernel, slope = random((7, 2, 24)), random((24, 3, 5), 1), random((7, 2, 3, 5), 2)

    def gradients(multiply, x):
        return jax.vjp(lambda x, kernel: multiply(x, kernel), x, kernel)[1]

    d_x, d_kernel = gradients(lambda x, k: product_in_pieces(x, k, 1, "bfloat16"), x)(slope)
    narrow = x.astype(jnp.bfloat16)
    plain = gradients(lambda x, k: product(x, k, 1), narrow)(slope.astype(jnp.bfloat16))
    assert (d_x.dtype, d_kernel.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_array_equal(d_x, plain[0].astype(jnp.float32))
    np.testing.assert_array_equal(d_kernel, plain[1])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_gap_between_sampler_and_trainer_shrinks(kind):
    """Of four layers at most: .0042, .0138 and .0081 nats to .0019, .0050 and .0035."""
    config = in_bfloat16(KINDS[kind])
    narrow, better = (
        sampler_gap(config),
        sampler_gap(dataclasses.replace(config, float32_activations=True)),
    )
    assert len(narrow) > 500
    assert better.mean() < 0.6 * narrow.mean(), (narrow.mean(), better.mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [kind if kind == "dense" else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS],
)
def test_without_any_rounding_of_activations_the_gap_is_that_of_float32(kind):
    config = in_bfloat16(KINDS[kind], **ALL)
    assert tiny.model(config).shapes["blocks"] == in_shapes(in_bfloat16(KINDS[kind]))["blocks"]
    assert 0 < sampler_gap(config).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        tiny.UNIFORM,
        *(
            pytest.param(config, marks=pytest.mark.full)
            for config in (
                tiny.LOCAL_GLOBAL,
                EXPERTS,
                dataclasses.replace(tiny.UNIFORM, lora=LoraConfig(rank=4, alpha=8.0)),
            )
        ),
    ],
    ids=["dense", "windows", "experts", "lora"],
)
def test_log_probs_and_gradients_are_nearer_to_those_in_float32(config):
    """The same weights, which have 8 bits in all three."""
    narrow = in_bfloat16(config)
    better = dataclasses.replace(narrow, float32_activations=True)
    rollouts, values = tiny.rollouts(np.zeros((4, 4)), steps=12), tiny.cast_params(narrow)

    def computed(config, values):
        def total(values):
            logps = tiny.whole_logps(config, values, rollouts)
            return (logps * jnp.sin(jnp.arange(logps.size).reshape(logps.shape))).sum(), logps

        gradient, logps = jax.grad(total, has_aux=True)(values)
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(wide(gradient))])
        return np.asarray(logps), flat

    exact = computed(dataclasses.replace(config, dtype="float32"), wide(values))
    ours, plain = computed(better, values), computed(narrow, values)
    # Backward passes round as before: gradients have that error still.
    for share, value, with_it, without in zip((0.6, 0.9), exact, ours, plain, strict=True):
        error, worse = (np.linalg.norm(near - value) for near in (with_it, without))
        assert 0 < error < share * worse


BIASES = {"attention_bias": True, "attention_out_bias": True, "feed_forward_bias": True}
SINKS = (LayerKind(AttentionKind(rope=Rope(10_000.0), sinks=True)),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(tiny.UNIFORM, pattern=SINKS, **BIASES),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in (tiny.HYBRID, EXPERTS)),
    ],
    ids=["dense", "states", "experts"],
)
def test_a_trainer_reads_its_float32_weights_as_the_sampler_does_in_bfloat16(config):
    """Scales of norms, biases, sinks, routers, convolutions; other programs, so not bit for bit."""
    config = in_bfloat16(config, **ALL)
    rng = np.random.default_rng(0)
    values = tiny.large_params(tiny.model(dataclasses.replace(config, dtype="float32")))
    trained = jax.tree.map(lambda leaf: leaf + 0.01 * rng.normal(size=leaf.shape), values)
    trained = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), trained)
    copied = jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype), trained, in_shapes(config))
    rollouts = tiny.rollouts(np.zeros((16, 8)), steps=24)
    logps = [np.asarray(tiny.whole_logps(config, values, rollouts)) for values in (trained, copied)]
    assert np.abs(logps[0]).max() > 1
    np.testing.assert_allclose(
        *logps, rtol=0, atol=2e-3 if config.pattern is EXPERTS.pattern else 2e-4
    )


def test_keys_values_and_the_last_hidden_states_stay_in_the_dtype_of_the_model():
    tokens = jnp.zeros((1, 3), jnp.int32)

    def run(config):
        apply = tiny.model(config).apply
        caller = Caller(causal(tokens, tokens == 0))
        memory = jax.eval_shape(lambda v: apply(v, tokens, tokens, caller, None), in_shapes(config))
        return memory[0].dtype, {leaf.dtype for leaf in jax.tree.leaves(memory[1])}

    config = in_bfloat16(tiny.UNIFORM, float32_activations=True)
    assert run(config) == (jnp.bfloat16, {jnp.dtype(jnp.bfloat16)})
    with_head = dataclasses.replace(config, float32_head=True)
    assert run(with_head) == (jnp.float32, {jnp.dtype(jnp.bfloat16)})
    assert run(dataclasses.replace(config, **ALL)) == (jnp.float32, {jnp.dtype(jnp.float32)})
    assert in_shapes(config) == in_shapes(in_bfloat16(tiny.UNIFORM))


@pytest.mark.slow
def test_in_a_float32_model_it_changes_nothing():
    config = dataclasses.replace(tiny.UNIFORM, float32_activations=True, float32_attention=True)
    rollouts = tiny.rollouts(np.zeros((2, 2)))
    with_it, without = (
        tiny.whole_logps(config, tiny.params(), rollouts) for config in (config, tiny.UNIFORM)
    )
    np.testing.assert_array_equal(with_it, without)
