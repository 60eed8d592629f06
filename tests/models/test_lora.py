"""Adapters: merged is applied, nothing else moves, and they are laid out as their weights are."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.models import decoder, lora, sharding
from jaxgrpo.models.api import (
    LINEAR,
    Caller,
    ExpertsKind,
    LayerKind,
    LoraConfig,
    Model,
    ModelConfig,
    params_per_layer,
)
from jaxgrpo.models.attention import causal

ALL = LoraConfig(rank=3, alpha=7.0)
CONFIGS = {
    "uniform": tiny.UNIFORM,
    "local and global": tiny.LOCAL_GLOBAL,  # a period of three layers, and one left over
    "fused": dataclasses.replace(
        tiny.UNIFORM,
        fused=(
            ("attention/query", "attention/key", "attention/value"),
            ("feed_forward/gate", "feed_forward/up"),
        ),
    ),
    "biases": dataclasses.replace(
        tiny.UNIFORM, attention_bias=True, attention_out_bias=True, feed_forward_bias=True
    ),
    "experts": dataclasses.replace(
        tiny.UNIFORM,
        pattern=(LayerKind(feed=ExpertsKind(4, 2, size=12, shared=8, shared_gate=True)),),
    ),
}
QUICK_CONFIGS = pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            config, id=name, marks=() if name in ("uniform", "experts") else pytest.mark.full
        )
        for name, config in CONFIGS.items()
    ],
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(2, tiny.VOCAB, (2, 6)))


def adapted(config: ModelConfig, settings: LoraConfig = ALL, **changes: Any) -> Model:
    return decoder.build(dataclasses.replace(config, lora=settings, **changes))


def logits(model: Model, params: Params) -> jax.Array:
    return jax.jit(functools.partial(_logits, model))(params)


def _logits(model: Model, params: Params) -> jax.Array:
    position = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    attend = causal(position, position >= 0)
    hidden, _ = model.apply(params, TOKENS, position, Caller(attend), None)
    return model.unembed(params, hidden)


@pytest.mark.slow
@QUICK_CONFIGS
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(ALL, id="all"),
        pytest.param(
            LoraConfig(rank=4, alpha=3.0, targets="attention/.*", use_rslora=True),
            id="some, rsLoRA",
            marks=pytest.mark.full,
        ),
    ],
)
def test_merged_weights_compute_what_adapters_do(config, settings):
    with jax.enable_x64(True):
        model = adapted(config, settings, dtype="float64")
        plain = decoder.build(lora.base_config(model.config))
        params = tiny.large_params(model)
        by_adapters = logits(model, params)
        merged = logits(plain, lora.merge(model, params))
        base = logits(plain, lora.split(params)[1])
    np.testing.assert_allclose(by_adapters, merged, atol=1e-9, rtol=0)
    assert np.abs(by_adapters - base).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("is_stacked", [True, False], ids=["stacked", "layers apart"])
@QUICK_CONFIGS
def test_merged_layer_by_layer_they_are_the_same_weights(config, is_stacked):
    model = adapted(config)
    params = tiny.large_params(model)
    merge_per_layer = lora.make_merge_per_layer(model)
    actual = merge_per_layer(params if is_stacked else params_per_layer(model.config, params))
    expected = params_per_layer(model.config, lora.merge(model, params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), actual, expected)


@pytest.mark.slow
def test_one_map_is_the_formula():
    model = adapted(tiny.UNIFORM)
    params = tiny.large_params(model)
    before, after = (
        tree["blocks"]["0"]["attention"]["out"]["kernel"][1]
        for tree in (params, lora.merge(model, params))
    )
    weights = params["blocks"]["0"]["attention"]["out"]
    low, high = (np.asarray(weights[name][1], np.float64) for name in lora.NAMES)
    change = 7.0 / 3 * np.einsum("hdr,re->hde", low, high)
    np.testing.assert_allclose(after, np.asarray(before) + change, atol=1e-6)


def test_scale_is_alpha_over_rank_or_over_its_root():
    assert LoraConfig(rank=16, alpha=32.0).rank_and_scale() == (16, 2.0)
    assert LoraConfig(rank=16, alpha=32.0, use_rslora=True).rank_and_scale() == (16, 8.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            config, id=name, marks=() if name in ("uniform", "fused") else pytest.mark.full
        )
        for name, config in CONFIGS.items()
    ],
)
def test_fresh_adapters_change_nothing_and_weights_are_those_of_the_base(config):
    model, plain = adapted(config), decoder.build(config)
    key = jax.random.key(3)
    params, base = jax.jit(model.init)(key), jax.jit(plain.init)(key)
    adapter, weights = lora.split(params)
    jax.tree.map(np.testing.assert_array_equal, weights, base)
    np.testing.assert_array_equal(logits(model, params), logits(plain, base))
    jax.tree.map(np.testing.assert_array_equal, adapter, jax.jit(lambda: lora.init(model, key))())
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapter):
        if path[-1].key == "lora_b":
            assert not leaf.any()
            continue
        axes = model.axes
        for key in path:
            axes = axes[key.key]
        inputs = [
            size
            for axis, size in zip(axes, leaf.shape, strict=True)
            if axis not in ("layers", "experts", "rank")
        ]
        bound = math.prod(inputs) ** -0.5
        assert 0.8 * bound < np.abs(leaf).max() <= bound
        assert abs(leaf.mean()) < 0.2 * bound


def test_targets_choose_the_maps():
    model = adapted(tiny.LOCAL_GLOBAL, LoraConfig(rank=2, alpha=1.0, targets=r".*/(key|down)"))
    adapter, base = lora.split(model.shapes)
    layers = [*adapter["blocks"].values(), *adapter["rest"].values()]
    assert len(layers) == 4
    leaves = {"lora_a", "lora_b"}
    for layer in layers:
        leaves_by_map = {
            f"{part}/{name}": set(layer[part][name]) for part in layer for name in layer[part]
        }
        assert leaves_by_map == {"attention/key": leaves, "feed_forward/down": leaves}
    assert base == decoder.build(tiny.LOCAL_GLOBAL).shapes
    assert lora.join(adapter, base) == model.shapes
    every = LoraConfig(rank=2, alpha=1.0)
    assert every.modules == LINEAR


@pytest.mark.full
def test_gradients_of_adapters_need_none_of_the_weights():
    model = adapted(tiny.LOCAL_GLOBAL)
    adapter, base = lora.split(tiny.large_params(model))

    def loss(trainable, base):
        return jax.nn.log_softmax(logits(model, lora.join(trainable, base)))[..., 3].mean()

    grad_of_adapter, grad_of_all = jax.jit(jax.grad(loss)), jax.jit(jax.grad(loss, argnums=(0, 1)))
    gradient = grad_of_adapter(adapter, base)
    assert jax.tree.structure(gradient) == jax.tree.structure(adapter)
    full_gradient, _ = grad_of_all(adapter, base)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, full_gradient)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    # Of forward, through and onto the weights, three equal parts, the third is left out.
    plans = [
        program.lower(adapter, base).compile().cost_analysis()
        for program in (grad_of_adapter, grad_of_all)
    ]
    flops = [(plan or {})["flops"] for plan in plans]
    assert flops[0] < 0.85 * flops[1]


@pytest.mark.full
def test_adapters_are_laid_out_as_their_weights_and_compute_the_same():
    model = adapted(tiny.UNIFORM)
    params = tiny.large_params(model)
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
    layout = sharding.param_shardings(mesh, model.axes, model.shapes)
    layer = layout["blocks"]["0"]
    specs = {
        f"{module}/{name}": tuple(layer[part][module][name].spec)
        for part, module in (("attention", "key"), ("attention", "out"), ("feed_forward", "down"))
        for name in lora.NAMES
    }
    assert specs == {
        "key/lora_a": (None, "fsdp", None),
        "key/lora_b": (None, None, "tensor", None),
        "out/lora_a": (None, "tensor", None, None),
        "out/lora_b": (None, None, "fsdp"),
        "down/lora_a": (None, "tensor", None),
        "down/lora_b": (None, None, "fsdp"),
    }
    placed = jax.device_put(params, layout)
    compute = jax.jit(functools.partial(logits, model))
    np.testing.assert_allclose(compute(placed), compute(params), atol=1e-4, rtol=1e-4)
    merged = jax.jit(lambda params: lora.merge(model, params))(placed)
    expected = lora.merge(model, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), merged, expected)


@pytest.mark.slow
def test_merging_rounds_once_to_the_dtype_of_the_weights():
    model = adapted(tiny.UNIFORM, dtype="bfloat16")
    adapter, base = lora.split(tiny.large_params(model))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), adapter)
    merged = lora.merge(model, lora.join(wide, base))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(merged)} == {"bfloat16"}
    wide_params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), lora.join(adapter, base))
    exact = lora.merge(model, wide_params)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), merged, exact
    )


@pytest.mark.parametrize(
    ("config", "targets", "message"),
    [
        ("fused", "attention/value", "has attention/value only, .*: adapt attention/query, "),
        ("fused", "attention/(query|key)", "has attention/query, attention/key only, "),
        ("fused", ".*up", "has feed_forward/up only, .*: adapt feed_forward/gate, feed_forward/up"),
        ("experts", "experts/gate", "has experts/gate only, .*: adapt experts/gate, experts/up"),
    ],
)
def test_maps_that_share_an_a_are_adapted_all_or_none(config, targets, message):
    settings = LoraConfig(rank=1, alpha=1.0, targets=targets)
    with pytest.raises(InputError, match=message):
        adapted(CONFIGS[config], settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LoraConfig(rank=0, alpha=1.0), "lora.rank = 0: must be at least 1"),
        (LoraConfig(rank=1, alpha=0.0), "lora.alpha = 0.0: must be above 0"),
        (LoraConfig(rank=1, alpha=1.0, targets="("), "no regular expression"),
        (LoraConfig(rank=1, alpha=1.0, targets="q_proj"), "matches none of attention/query, "),
    ],
)
def test_settings_that_adapt_nothing_are_refused(settings, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        adapted(tiny.UNIFORM, settings)
