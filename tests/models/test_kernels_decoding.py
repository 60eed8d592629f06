"""Decoding by the kernels for GPUs, in interpret mode: the plain formula, and the plain engine.

Their arithmetic is checked here; tests/rollout/test_gpu_decoding.py compiles them for a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import draw_all, make_engine

from jaxgrpo.core.errors import InputError
from jaxgrpo.models import attention, sharding
from jaxgrpo.models.api import AttentionKind, LayerKind
from jaxgrpo.models.attention import Decoding, Sharing
from jaxgrpo.models.cache import FP8, Lines, narrowed
from jaxgrpo.planning.topologies import stand_ins
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots import decoding
from jaxgrpo.rollout.slots.capacity import ADDRESSED, Sizes, capacity, fitting_slots
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.slots.programs import make_programs

BINS, SLOTS, ROWS, SIZE = 2, 6, 2, 16
PROMPT, COLUMNS = 96, 128
INDEX = np.asarray([[0, 1, 63, 64, 65, 127], [5, 127, 126, 0, 31, 90]], np.int32)
LENGTH = np.asarray([[0, 96], [33, 1]], np.int32)
IN_ORDER = np.broadcast_to(np.arange(SLOTS), (BINS, SLOTS))
READERS = 4  # of a row, where slots are in any order
PLACE = np.asarray([[7, 0, 3, 1, 6, 5], [2, 4, 0, 1, 7, 6]], np.int32)
INTERPRETED = Decoding("pallas", interpret=True)
KERNEL_SIZED = dataclasses.replace(tiny.UNIFORM, head_dim=16)
KEY = jax.random.key_data(jax.random.key(3))
GROUP = 3


def draw_inputs(kv_heads: int, shared: int) -> Any:
    rng = np.random.default_rng(0)
    draw: Any = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    query = draw(BINS, SLOTS, 1, kv_heads * shared, SIZE) / 4
    token = [draw(BINS, SLOTS, 1, kv_heads, SIZE) for _ in range(2)]
    prompts = Lines(*(draw(BINS, ROWS, kv_heads, PROMPT, SIZE) for _ in range(2)))
    slots = Lines(*(draw(BINS * SLOTS, kv_heads, COLUMNS, SIZE) for _ in range(2)))
    return query, *token, (prompts, slots)


def formula(query: Any, key: Any, value: Any, memory: Any, row: np.ndarray) -> Any:
    """The output, and the slots' keys and values, in float64, one query after the other."""
    prompts, slots = memory
    keys, values = (leaf.copy() for leaf in slots)
    out, shared = np.zeros(query.shape), query.shape[3] // key.shape[3]
    for bin_, slot in np.ndindex(BINS, SLOTS):
        place, index = bin_ * SLOTS + slot, INDEX[bin_, slot]
        keys[place, :, index], values[place, :, index] = key[bin_, slot, 0], value[bin_, slot, 0]
        prompt = (bin_, row[bin_, slot], slice(None), slice(LENGTH[bin_, row[bin_, slot]]))
        for head in range(query.shape[3]):
            group = head // shared
            visible = [
                np.concatenate([shared_part[prompt][group], slot_part[place, group, : index + 1]])
                for shared_part, slot_part in zip(prompts, (keys, values), strict=True)
            ]
            score = visible[0].astype(float) @ query[bin_, slot, 0, head]
            weight = np.exp(score - score.max())
            out[bin_, slot, 0, head] = weight @ visible[1] / weight.sum()
    return out, Lines(keys, values)


def make_sharing(place: np.ndarray) -> Sharing:
    slot = np.full((BINS, ROWS * READERS), SLOTS)
    for bin_ in range(BINS):
        slot[bin_, place[bin_]] = np.arange(SLOTS)
    return Sharing(jnp.asarray(slot), jnp.asarray(place))


@pytest.mark.full
def test_numbers_of_16_bits_are_summed_in_32():
    inputs: Any = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), draw_inputs(3, 2))
    sharing = Sharing(None, None)
    attend: Any = attention.decode_lines(
        jnp.asarray(INDEX), jnp.asarray(LENGTH), sharing, INTERPRETED
    )
    out, _ = attend(*inputs, AttentionKind())
    wide: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), inputs)
    expected, _ = formula(*wide, row=IN_ORDER // (SLOTS // ROWS))
    error = np.abs(np.asarray(out, float) - expected)
    assert error.max() < 2**-7 * np.abs(expected).max()  # weights and the output have 8 bits


@pytest.mark.parametrize(("kv_heads", "shared"), [(3, 2), (2, 1), (1, 7)])
@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "in any order"])
def test_a_step_is_the_plain_formula_and_writes_one_token_of_each_slot(kv_heads, shared, in_order):
    inputs = draw_inputs(kv_heads, shared)
    sharing = Sharing(None, None) if in_order else make_sharing(PLACE)
    row = IN_ORDER // (SLOTS // ROWS) if in_order else PLACE // READERS

    @jax.jit
    def step(*inputs):
        attend: Any = attention.decode_lines(
            jnp.asarray(INDEX), jnp.asarray(LENGTH), sharing, INTERPRETED
        )
        return attend(*inputs, AttentionKind())

    out, (prompts, slots) = step(*inputs)
    expected, expected_slots = formula(*inputs, row=row)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    for actual, oracle in zip((*prompts, *slots), (*inputs[-1][0], *expected_slots), strict=True):
        np.testing.assert_array_equal(actual, oracle)


@pytest.mark.full
def test_lines_in_fp8_are_widened_as_they_are_read():
    *inputs, memory = draw_inputs(2, 2)
    fp8 = functools.partial(narrowed, dtype=jnp.dtype(FP8))
    attend: Any = attention.decode_lines(
        jnp.asarray(INDEX), jnp.asarray(LENGTH), Sharing(None, None), INTERPRETED
    )
    stored: Any = jax.tree.map(lambda leaf: fp8(jnp.asarray(leaf)), (*inputs[1:], memory))
    out, (_, slots) = attend(*inputs, stored[-1], AttentionKind())
    wide: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), stored)
    expected, expected_slots = formula(inputs[0], *wide, row=IN_ORDER // (SLOTS // ROWS))
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    for actual, oracle in zip(slots, expected_slots, strict=True):
        np.testing.assert_array_equal(np.asarray(actual, np.float32), oracle)


@pytest.mark.slow
def test_tokens_behind_the_last_are_not_read():
    query, key, value, (prompts, slots) = draw_inputs(2, 2)
    dirty = Lines(*(leaf.copy() for leaf in slots))
    for place, index in enumerate(INDEX.reshape(-1)):
        for leaf in dirty:
            leaf[place, :, index:] = np.nan
    step: Any = attention.decode_lines(
        jnp.asarray(INDEX), jnp.asarray(LENGTH), Sharing(None, None), INTERPRETED
    )
    clean_out, _ = step(query, key, value, (prompts, slots), AttentionKind())
    out, _ = step(query, key, value, (prompts, dirty), AttentionKind())
    np.testing.assert_array_equal(out, clean_out)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"capability": "7.5"}, "bfloat16", "compute capability 7.5: it takes 8.0 and above"),
        ({"capability": "gfx942"}, "bfloat16", "gfx942: it is for NVIDIA's GPUs"),
        ({"dtype": "float32"}, "float32", "model.dtype = float32: it takes bfloat16"),
        ({}, "float16", "keys and values in float16"),
        ({"float32_attention": True}, FP8, "model.float32_attention: it takes queries of 16 bits"),
        ({"float32_attention": True}, "bfloat16", "model.float32_attention"),
        ({"capability": "8.6"}, FP8, "compute capability 8.6: fp8 takes 8.9 and above"),
        ({"head_dim": 96}, "bfloat16", "head_dim = 96: it takes powers of two from 16 to 256"),
        ({"head_dim": 8}, "bfloat16", "head_dim = 8"),
        ({"num_heads": 34, "num_kv_heads": 2}, "bfloat16", "17 heads for one of keys"),
        ({"pattern": (LayerKind(AttentionKind(window=9)), LayerKind())}, "bfloat16", "windows"),
        ({"pattern": (LayerKind(AttentionKind(soft_cap=30.0)),)}, "bfloat16", "soft-capped scores"),
    ],
)
def test_what_they_cannot_compute_is_named_and_left_to_xla(changes, dtype, reason):
    fields = {**changes}
    capability = fields.pop("capability", "9.0")
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    config = dataclasses.replace(KERNEL_SIZED, **{"dtype": "bfloat16", **fields})
    kernel = attention.choose_decoding(device, tiny.model(config), dtype)
    assert kernel.name == "xla"
    assert not kernel.has_lines
    assert reason in kernel.why


@pytest.mark.parametrize("module", ["triton", "ops.gpu.decode_attention"])
def test_where_jax_has_left_them_out_decoding_is_by_xla_and_says_so(monkeypatch, module):
    monkeypatch.delitem(sys.modules, "jaxgrpo.models.kernels.pallas_decoding", raising=False)
    monkeypatch.setitem(sys.modules, f"jax.experimental.pallas.{module}", None)
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    config = dataclasses.replace(KERNEL_SIZED, dtype="bfloat16")
    kernel = attention.choose_decoding(device, tiny.model(config), "bfloat16")
    assert kernel.name == "xla"
    assert not kernel.has_lines
    assert kernel.why.startswith(f"pallas cannot: JAX {jax.__version__} lacks what it is made of (")


def test_they_are_for_gpus_alone():
    config = dataclasses.replace(KERNEL_SIZED, dtype="bfloat16")
    names = {
        platform: attention.choose_decoding(
            SimpleNamespace(platform=platform), tiny.model(config), "bfloat16"
        ).name
        for platform in ("cpu", "gpu", "tpu")
    }
    assert names == {"cpu": "xla", "gpu": "pallas", "tpu": "xla"}
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    off = attention.choose_decoding(gpu, tiny.model(config), "bfloat16", setting="xla")
    assert off == attention.RINGS


@functools.cache
def run(kernel: Decoding | None, devices: int = 1, **changes):
    settings = SamplingSettings(24, 1.0, (tiny.END,), tiny.PAD, 8)._replace(**changes)
    mesh = None if devices == 1 else sharding.make_mesh(fsdp=2, tensor=2)
    prompts, model = tiny.prompts(4), tiny.model(KERNEL_SIZED)
    engine = make_engine(model, settings, prompts, mesh)
    if kernel is not None:
        kernel = kernel._replace(mesh=mesh)
        engine.programs = make_programs(model, settings, mesh, attention=kernel)
    return draw_all(engine, tiny.params(KERNEL_SIZED), prompts, KEY, GROUP)


@pytest.mark.full
@pytest.mark.parametrize(
    "slots",
    [0, 8],
    ids=["a slot for each", "slots of the next sample"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_draws_what_it_draws_without_them(slots, temperature):
    options = {"slots": slots, "temperature": temperature}
    assert_same(run(INTERPRETED, **options), run(None, **options))


@pytest.mark.full
def test_on_a_mesh_each_device_attends_to_what_it_holds():
    assert_same(run(INTERPRETED, devices=4, temperature=0.0), run(None, temperature=0.0))


def assert_same(actual, expected):
    np.testing.assert_array_equal(actual.completion_tokens, expected.completion_tokens)
    np.testing.assert_allclose(actual.behavior_logp, expected.behavior_logp, rtol=0, atol=3e-5)
    assert np.abs(expected.behavior_logp).max() > 0.1


def gpu_mesh():
    devices = np.asarray(stand_ins("h100:1x1", 1)).reshape(1, 1, 1, 1)
    return jax.sharding.Mesh(devices, sharding.AXES)


def test_the_bytes_of_their_caches_are_foretold():
    config = dataclasses.replace(KERNEL_SIZED, dtype="bfloat16", num_layers=3)
    model = tiny.model(config)
    settings = SamplingSettings(100, 1.0, (tiny.END,), tiny.PAD, 8)
    mesh = gpu_mesh()
    sizes = Sizes.for_prompts(0, 1, 4, GROUP, 40)
    kernel = attention.choose_decoding(mesh.devices.flat[0], model, "bfloat16")
    parts = decoding.Parts(model, settings, lambda value, axes: value, 1, kernel)
    state = jax.eval_shape(lambda: decoding.first_state(parts, sizes))
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.memory))
    samples = 4 * GROUP * 100 * (4 + 4)  # tokens and log-probs
    assert capacity(model, settings, mesh, 4, GROUP, 40).state == caches + samples
    assert state.memory[0][1].key.shape == (4 * GROUP, 2, 128, 16)


def test_of_keys_in_fp8_a_device_holds_no_more_than_the_kernels_find():
    """1,024 tokens at 2 heads of 16 are 2**15 numbers: 2**16 slots of them can be addressed."""
    model, mesh = tiny.model(dataclasses.replace(KERNEL_SIZED, dtype="bfloat16")), gpu_mesh()
    settings = SamplingSettings(1024, 1.0, (tiny.END,), tiny.PAD, 8)
    slots = functools.partial(fitting_slots, model, mesh=mesh, prompts=2**14, group=8, width=40)
    fp8 = settings._replace(kv_cache_dtype="fp8")
    assert slots(fp8, free=2**60) == ADDRESSED // 2**15 == 2**16
    assert slots(settings, free=2**60) == slots(fp8._replace(attention="xla"), free=2**60) == 2**17

    def ask(number: int, width: int = 40, **changes: str) -> int:
        with_slots = fp8._replace(slots=number, **changes)
        return SlotEngine(model, with_slots, mesh, width=width, free=2**30).slots_for(2**14, 8)

    assert ask(2**16) == 2**16
    assert ask(2**17, kv_cache_dtype="auto") == ask(2**17, attention="xla") == 2**17
    with pytest.raises(InputError, match=r"rollout.slots = 65537, .* take fewer slots"):
        ask(2**16 + 1)
    with pytest.raises(InputError, match=r"shorter prompts"):
        ask(2**15, width=2**13)  # 2**15 * 3 / 8 rows of 2**13 columns
