"""Samplers in 8 bits: how weights, keys and values are rounded, and what is drawn with them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tiny
from engines import draw_all, make_engine
from jax.sharding import Mesh

from jaxgrpo import advantages, losses
from jaxgrpo.config import off_policy
from jaxgrpo.core.types import Params
from jaxgrpo.models import decoder, lora, low_bit, sharding
from jaxgrpo.models.api import (
    EXPERT_MAPS,
    AttentionKind,
    DeltaKind,
    ExpertsKind,
    Latent,
    LayerKind,
    LoraConfig,
    ModelConfig,
)
from jaxgrpo.models.cache import FP8, narrowed
from jaxgrpo.models.low_bit import DTYPES
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.programs import make_programs
from jaxgrpo.training import memory
from jaxgrpo.update.forward import Blueprint, sampling_layout
from jaxgrpo.update.packing import Geometry

KEY = jax.random.key_data(jax.random.key(3))
ADAPTED = dataclasses.replace(tiny.UNIFORM, lora=LoraConfig(rank=3, alpha=6.0))
FEED = ExpertsKind(6, 2, size=16, bias=True, shared=8, shared_gate=True)
EXPERTS = dataclasses.replace(
    tiny.UNIFORM, pattern=(LayerKind(feed=FEED),), lora=LoraConfig(rank=3, alpha=6.0)
)
LATENT = AttentionKind(latent=Latent(size=8, plain=4, turned=4, value=6, query=10))
LATENTS = dataclasses.replace(tiny.UNIFORM, num_kv_heads=4, pattern=(LayerKind(mixer=LATENT),))
IDS = ("uniform", "a layer left over", "adapted", "states", "experts", "latents")
CONFIGS = (tiny.UNIFORM, tiny.LOCAL_GLOBAL, ADAPTED, tiny.HYBRID, EXPERTS, LATENTS)
INPUTS = {"out": 2}  # dimensions of a kernel that are inputs, where they are not 1
CAP = {"int8": 127.0, "fp8": 448.0}


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(24, 1.0, (tiny.END,), tiny.PAD, 8)._replace(**changes)


def wide_kernel() -> np.ndarray:
    """Columns of very different sizes, one of zeros."""
    random = np.random.default_rng(0)
    kernel = random.normal(size=(6, 50, 7)) * 10.0 ** np.arange(-6, 8, 2)
    return np.where(np.arange(7) == 3, 0, kernel).astype(np.float32)


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_weights_are_rounded_to_the_nearest_of_each_channel(weight_dtype):
    kernel = wide_kernel()
    values, scale = (
        np.asarray(leaf) for leaf in low_bit.quantised(jnp.asarray(kernel), 2, weight_dtype)
    )
    exact = np.abs(kernel.astype(np.float64)).max((0, 1)) / CAP[weight_dtype]
    np.testing.assert_allclose(scale, exact, rtol=1e-6)
    ratio = kernel / np.where(exact > 0, exact, 1)
    rounded = np.rint(ratio) if weight_dtype == "int8" else ratio.astype(ml_dtypes.float8_e4m3fn)
    differs = values.astype(np.float64) != rounded.astype(np.float64)
    assert values.dtype == np.dtype(DTYPES[weight_dtype])
    assert differs.mean() < 1e-3  # float32 may find a tie elsewhere than float64 does
    assert not values[..., 3].any()


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_what_rounding_loses_is_bounded(weight_dtype):
    kernel = wide_kernel()
    values, scale = low_bit.quantised(jnp.asarray(kernel), 2, weight_dtype)
    error = np.abs(np.asarray(values, np.float64) * np.asarray(scale) - kernel)
    half_step = 0.5 if weight_dtype == "int8" else 2.0**-10
    relative = 0.0 if weight_dtype == "int8" else 2.0**-4
    bound = np.maximum(half_step * np.asarray(scale), relative * np.abs(kernel))
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_fp8_cannot_hold_becomes_its_largest_number(dtype):
    numbers = jnp.asarray([1e9, -1e9, 448, 449, 470, -3.25, 2.0**-9, 0], dtype)
    expected = [448, -448, 448, 448, 448, -3.25, 2.0**-9, 0]
    np.testing.assert_array_equal(np.asarray(narrowed(numbers, jnp.dtype(FP8)), float), expected)
    assert np.isnan(np.asarray(narrowed(jnp.float32(np.nan), jnp.dtype(FP8)), float))


def make_params(config: ModelConfig) -> Params:
    if config.lora is not None:
        values = tiny.params(dataclasses.replace(config, lora=None))
        drawn = lora.init(tiny.model(config), jax.random.key(1))
        keys = iter(jax.random.split(jax.random.key(2), 100))
        shift = lambda leaf: leaf + 0.02 * jax.random.normal(next(keys), leaf.shape)  # noqa: E731
        return lora.join(jax.tree.map(shift, drawn), values)
    return tiny.params(config)


def rounded_params(config: ModelConfig, weight_dtype: str) -> Params:
    """The weights that the values and scales stand for, stacked, by NumPy's rounding."""
    params = lora.merge(tiny.model(config), make_params(config))

    def rounded(path, leaf):
        names = [entry.key for entry in path]
        if names[-1] != "kernel":
            return leaf
        if "router" in names:  # chooses experts as before
            return leaf
        begin = (names[0] == "blocks") + ("/".join(names[-3:-1]) in EXPERT_MAPS)
        inputs = tuple(range(begin, begin + INPUTS.get(names[-2], 1)))
        leaf = np.asarray(leaf)
        scale = np.abs(leaf).max(inputs, keepdims=True) / np.float32(CAP[weight_dtype])
        ratio = leaf / scale
        if weight_dtype == "int8":
            return jnp.asarray(np.rint(ratio) * scale)
        ratio = np.clip(ratio, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return jnp.asarray(ratio.astype(np.float32) * scale)

    return jax.tree_util.tree_map_with_path(rounded, params)


def drawn(config: ModelConfig, params: Params, mesh: Mesh | None = None, **changes):
    prompts = tiny.prompts(8)
    engine = make_engine(tiny.model(config), settings(**changes), prompts, mesh)
    return draw_all(engine, params, prompts, KEY, 4)


QUICK = {("uniform", "int8")}
CASES = [
    pytest.param(
        config,
        dtype,
        id=f"{name}-{dtype}",
        marks=() if (name, dtype) in QUICK else pytest.mark.full,
    )
    for name, config in zip(IDS, CONFIGS, strict=True)
    for dtype in DTYPES
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "weight_dtype"), CASES)
def test_what_is_drawn_is_what_the_rounded_weights_draw(config, weight_dtype):
    actual = drawn(config, make_params(config), weight_dtype=weight_dtype)
    plain = lora.base_config(config)
    expected = drawn(plain, rounded_params(config, weight_dtype))
    np.testing.assert_array_equal(actual.completion_tokens, expected.completion_tokens)
    np.testing.assert_allclose(actual.behavior_logp, expected.behavior_logp, rtol=0, atol=3e-5)
    unrounded = drawn(plain, lora.merge(tiny.model(config), make_params(config)))
    assert (unrounded.behavior_logp != expected.behavior_logp).any()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(
    ("config", "divided"),
    [(tiny.UNIFORM, None), (EXPERTS, None), (EXPERTS, "tensor")],
    ids=["uniform", "experts", "divided"],
)
def test_on_a_mesh_the_same_is_drawn(config, divided, weight_dtype, monkeypatch):
    """With experts divided over an axis, as on a TPU, too."""
    mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    rules = {**sharding.SAMPLING, "experts": divided}
    monkeypatch.setattr(sharding, "sampling_rules", lambda mesh, kinds: rules)
    params = make_params(config)
    placed = jax.device_put(params, sampling_layout(tiny.model(config), mesh))
    actual = drawn(config, placed, mesh, weight_dtype=weight_dtype)
    expected = drawn(config, params, weight_dtype=weight_dtype)
    np.testing.assert_array_equal(actual.completion_tokens, expected.completion_tokens)
    np.testing.assert_allclose(actual.behavior_logp, expected.behavior_logp, rtol=0, atol=3e-5)


def test_the_copy_is_the_samplers_own_and_has_no_leaf_of_the_parameters():
    model, params = tiny.model(), tiny.params()
    copy = low_bit.make_copy_per_layer(model, "int8")(params)
    places = [{leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(t)} for t in (params, copy)]
    assert not places[0] & places[1]
    kinds = {leaf.dtype for leaf in jax.tree.leaves(copy["layers"])}
    assert kinds == {np.dtype(np.int8), np.dtype(np.float32)}
    again = low_bit.make_copy_per_layer(model, "int8")(
        make_programs(model, settings(), None).split(params)
    )
    jax.tree.map(np.testing.assert_array_equal, copy, again)


@pytest.mark.full
@pytest.mark.slow
def test_keys_and_values_in_fp8_move_log_probs_by_what_they_are_rounded():
    narrow, wide = (drawn(tiny.UNIFORM, tiny.params(), kv_cache_dtype=d) for d in ("fp8", "auto"))
    for sampled in (narrow, wide):
        logp = tiny.whole_logps(tiny.UNIFORM, tiny.params(), jax.tree.map(jnp.asarray, sampled))
        mean = np.abs(logp - sampled.behavior_logp)[sampled.token_mask].mean()
        assert 1e-3 < mean < 0.1 if sampled is narrow else mean < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_stay_float32_beside_keys_and_values_in_fp8(dtype):
    model = decoder.build(dataclasses.replace(tiny.HYBRID, dtype=dtype))
    programs = make_programs(model, settings(kv_cache_dtype="fp8"), None)
    sizes = Sizes.for_prompts(4, 1, 2, 4, 6)
    state = jax.eval_shape(functools.partial(programs.begin, sizes))
    for entry, kind in zip(state.memory, model.config.kinds, strict=True):
        if isinstance(kind.mixer, DeltaKind):
            assert {part.matrix.dtype for part in entry} == {np.dtype("float32")}
            assert {leaf.dtype for part in entry for leaf in part.tail} == {np.dtype(dtype)}
        else:
            assert {leaf.dtype for leaf in jax.tree.leaves(entry)} == {np.dtype(FP8)}


@functools.cache
def blueprint(kv_cache_dtype: str, weight_dtype: str) -> Blueprint:
    config = dataclasses.replace(tiny.UNIFORM, num_layers=8, vocab_size=256, intermediate_size=256)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    geometry = Geometry(8, 8, 32, 192, 2, 1568)
    changes = {"kv_cache_dtype": kv_cache_dtype, "weight_dtype": weight_dtype}
    return Blueprint(
        model=decoder.build(config, constrain=sharding.constrain(mesh)),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.adamw(1e-3),
        geometry=geometry,
        sampling=settings(max_completion_tokens=192, **changes),
        mesh=mesh,
    )


@pytest.mark.full
def test_their_bytes_are_foretold():
    wide = memory.count(blueprint("auto", "auto"), ())
    tokens = 64 * 192 * (4 + 4)  # tokens and log-probs
    quarter = memory.count(blueprint("fp8", "auto"), ()).decode - tokens
    assert 4 * quarter == wide.decode - tokens
    run = blueprint("auto", "int8")
    programs = make_programs(run.model, run.sampling, run.mesh)
    copy = jax.eval_shape(programs.split, run.model.shapes)
    copy_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(copy))
    count = functools.partial(memory.weights_to_sample, run.model, run.mesh, run.mesh)
    blocks = sum(leaf.size * 4 for leaf in jax.tree.leaves(run.model.shapes["blocks"]))
    assert count("int8") == copy_bytes + blocks  # a CPU converts them all before a segment
    assert count("int8") < count("auto") + 0.3 * blocks


REINFORCE = losses.Objective(losses.reinforce(), losses.token_mean())
CLIPPED = losses.Objective(losses.clip(), losses.token_mean())
MIXED = losses.Objective(losses.by_sample("new", "clip", "reinforce"), losses.token_mean())


@pytest.mark.parametrize(
    ("objective", "chain", "line"),
    [
        (CLIPPED, advantages.build("grpo"), ""),
        (
            REINFORCE,
            advantages.extend(advantages.build("grpo"), advantages.truncated_importance()),
            "",
        ),
        (
            REINFORCE,
            advantages.build("grpo"),
            'rollout.kv_cache_dtype = "fp8" and rollout.weight_dtype = "int8": reinforce with '
            'loss.proximal = "behavior" takes samples of the rounded policy for the trainer\'s '
            'own; set loss.mismatch = { use = "truncated_importance" }',
        ),
        (
            MIXED,
            advantages.build("grpo"),
            'rollout.kv_cache_dtype = "fp8" and rollout.weight_dtype = "int8": reinforce in '
            'by_sample with loss.proximal = "behavior" takes samples of the rounded policy for the '
            'trainer\'s own; set loss.mismatch = { use = "truncated_importance" } with '
            'loss.proximal = "trainer"',
        ),
    ],
)
def test_samples_that_nothing_corrects_are_named_in_a_line(objective, chain, line):
    low = settings(kv_cache_dtype="fp8", weight_dtype="int8")
    assert off_policy.low_bit_line(chain, objective, low) == line
    assert off_policy.low_bit_line(chain, objective, settings(kv_cache_dtype="bfloat16")) == ""
