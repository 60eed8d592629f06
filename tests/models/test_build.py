"""What `build` makes: parameters, their axes, the errors; plain dicts throughout."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.models.api import (
    AttentionKind,
    Caller,
    LayerKind,
    ModelConfig,
    memory_per_layer,
    params_per_layer,
    stacked_params,
)
from jaxgrpo.models.attention import causal
from jaxgrpo.models.counts import count_weights
from jaxgrpo.models.decoder import build
from jaxgrpo.models.hf import families, mapping

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
PAIR = (LayerKind(AttentionKind(window=4)), LayerKind())
AXES = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "norm", "layers"}


def init(**changes):
    return jax.jit(build(dataclasses.replace(CONFIG, **changes)).init)(jax.random.key(3))


@pytest.fixture(scope="module")
def uniform():
    return init()


@pytest.fixture(scope="module")
def paired():
    return init(pattern=PAIR, attention_bias=True)


def run(model, params, tokens):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    return model.apply(params, tokens, position, Caller(causal(position, position >= 0)), None)


@pytest.mark.slow
def test_parameters_are_plain_dicts_of_arrays_with_one_axis_name_per_dimension(paired):
    model = build(dataclasses.replace(CONFIG, pattern=PAIR, attention_bias=True))

    def walk(values, shapes, axes):
        assert (type(values), type(axes)) == (dict, dict)
        assert set(values) == set(shapes) == set(axes)
        for name, value in values.items():
            if isinstance(value, dict):
                walk(value, shapes[name], axes[name])
            else:
                assert isinstance(value, jax.Array)
                assert (value.shape, value.dtype) == (shapes[name].shape, shapes[name].dtype)
                assert len(axes[name]) == value.ndim
                assert set(axes[name]) <= AXES

    walk(paired, model.shapes, model.axes)
    query = model.axes["blocks"]["1"]["attention"]["query"]
    assert query["kernel"] == ("layers", "embed", "heads", "head_dim")
    assert query["bias"] == ("layers", "heads", "head_dim")
    assert model.shapes["blocks"]["1"]["attention"]["query"]["kernel"].shape == (2, 16, 4, 8)
    assert model.axes["rest"]["0"]["feed_forward"]["down"]["kernel"] == ("mlp", "embed")


@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_parameters_is_that_of_the_formula(tied):
    model = build(dataclasses.replace(CONFIG, tie_embeddings=tied))
    attention = 16 * 8 * (4 + 2 + 2) + 4 * 8 * 16 + 2 * 8
    layer = attention + 3 * 16 * 24 + 2 * 16
    expected = 5 * layer + 16 + 50 * 16 * (1 if tied else 2)
    assert sum(leaf.size for leaf in jax.tree.leaves(model.shapes)) == expected


@pytest.mark.slow
def test_layers_are_drawn_from_their_number_wherever_the_pattern_puts_them(uniform, paired):
    drawn = {"attention": "query", "feed_forward": "down"}
    for layer in range(5):
        place = ("blocks", str(layer % 2), layer // 2) if layer < 4 else ("rest", "0", ...)
        for part, name in drawn.items():
            paired_kernel = paired[place[0]][place[1]][part][name]["kernel"][place[2]]
            uniform_kernel = uniform["blocks"]["0"][part][name]["kernel"][layer]
            np.testing.assert_array_equal(uniform_kernel, paired_kernel)
    kernel = uniform["blocks"]["0"]["attention"]["query"]["kernel"]
    assert not np.array_equal(kernel[0], kernel[1])


def test_initial_weights_have_the_standard_deviation_of_these_families(uniform):
    for path, leaf in jax.tree_util.tree_leaves_with_path(uniform):
        if path[-1].key == "scale":
            np.testing.assert_array_equal(leaf, np.ones_like(leaf))
        else:
            np.testing.assert_allclose(np.std(leaf), 0.02, rtol=0.1)
            assert abs(np.mean(leaf)) < 0.002


@pytest.mark.full
def test_the_same_key_gives_bfloat16_weights_that_are_the_float32_ones_rounded(uniform):
    wide = build(CONFIG)
    narrow = build(dataclasses.replace(CONFIG, dtype="bfloat16"))
    params, rounded = uniform, init(dtype="bfloat16")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), params, rounded
    )
    tokens = jnp.arange(6)[None]
    hidden, memory = jax.jit(lambda params: run(narrow, params, tokens))(rounded)
    assert hidden.dtype == memory["blocks"]["0"].key.dtype == jnp.bfloat16
    logits = narrow.unembed(rounded, hidden)
    assert logits.dtype == jnp.float32
    expected = jax.jit(lambda p: wide.unembed(p, run(wide, p, tokens)[0]))(params)
    np.testing.assert_allclose(logits, expected, atol=0.02 * float(jnp.abs(expected).max()))


def test_a_model_shallower_than_its_pattern_has_only_layers_left_over():
    config = dataclasses.replace(CONFIG, num_layers=2, pattern=(*PAIR, LayerKind()))
    model = build(config)
    assert model.axes["blocks"] == model.shapes["blocks"] == {}
    hidden, memory = jax.eval_shape(
        lambda params: run(model, params, jnp.arange(6)[None]), model.shapes
    )
    assert hidden.shape == (1, 6, 16)
    assert set(memory["rest"]) == {"0", "1"}


@pytest.mark.full
def test_layers_before_the_pattern_are_those_of_a_longer_pattern():
    local, everywhere = PAIR
    led = dataclasses.replace(CONFIG, lead=(local,), pattern=(everywhere,), num_layers=4)
    plain = dataclasses.replace(led, lead=(), pattern=(local, *[everywhere] * 3))
    assert led.kinds == plain.kinds
    models = [build(config, remat="full") for config in (led, plain)]
    params = [jax.jit(model.init)(jax.random.key(3)) for model in models]
    assert set(params[0]) == {"embed", "lead", "blocks", "rest", "final_norm", "head"}
    apart = [params_per_layer(m.config, p)["layers"] for m, p in zip(models, params, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, *apart)
    again = stacked_params(led, params_per_layer(led, params[0]))
    jax.tree.map(np.testing.assert_array_equal, again, params[0])
    tokens = jnp.arange(12).reshape(2, 6)
    ran = [
        jax.jit(functools.partial(run, model))(values, tokens)
        for model, values in zip(models, params, strict=True)
    ]
    np.testing.assert_allclose(ran[0][0], ran[1][0], rtol=1e-5, atol=1e-6)
    memory = [memory_per_layer(m.config, r[1]) for m, r in zip(models, ran, strict=True)]
    assert len(memory[0]) == 4
    names = [
        entry.name
        for leaf in mapping.entries(models[0], families.FAMILIES["qwen3"])
        for entry in leaf
    ]
    assert sorted(n.split(".")[2] for n in names if "q_proj" in n) == ["0", "1", "2", "3"]
    assert count_weights(models[0]) == count_weights(models[1])


def test_hidden_states_are_laid_out_after_the_embedding_and_after_each_block():
    """Tokens [D, N], those of an update, and what they look up, as the table is divided too."""
    layouts = []

    def constrain(x, axes):
        layouts.append((x.shape, axes))
        return x

    model = build(dataclasses.replace(CONFIG, num_layers=1), constrain=constrain)
    for shape in ((2, 6), (2, 3, 6), (6,)):
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        jax.eval_shape(lambda params, tokens: run(model, params, tokens), model.shapes, tokens)
    assert layouts == [
        ((2, 6), ("parts", "sequence")),
        ((2, 6, 16), ("parts", "sequence", "embed")),
        *[((2, 6, 16), ("bins", "sequence", None))] * 2,
        *[((2, 3, 6, 16), ("bins", "rows", "sequence", None))] * 2,
    ]


def test_a_config_that_cannot_be_built_is_refused_with_every_problem_in_one_message():
    config = dataclasses.replace(
        CONFIG,
        num_kv_heads=3,
        head_dim=7,
        activation="tanh",
        dtype="int8",
        num_layers=0,
        pattern=(),
    )
    with pytest.raises(InputError) as caught:
        build(config)
    for part in (
        "num_layers = 0",
        "num_kv_heads = 3: must divide num_heads = 4",
        "head_dim = 7",
        'activation = "tanh": known are silu, gelu, gelu_tanh, relu',
        'dtype = "int8"',
        "pattern = ()",
    ):
        assert part in str(caught.value)


def test_memory_per_layer_must_have_one_entry_per_layer():
    model = build(CONFIG)
    position = jnp.arange(4)[None]
    attend = causal(position, position >= 0)
    with pytest.raises(ValueError, match="memory has 4 entries, but the model has 5 layers"):
        jax.eval_shape(
            lambda params: model.apply(params, position, position, Caller(attend), (None,) * 4),
            model.shapes,
        )
