"""A key-value cache in a dtype of its own: what is kept, and how far log-probs move."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import draw_all, make_engine

from benchmarks.programs import decode_program
from benchmarks.workloads import Workload
from jaxgrpo.models.api import Caller, KeyValue
from jaxgrpo.models.attention import causal
from jaxgrpo.models.kernels import plain
from jaxgrpo.rollout.engine import SamplingSettings

KEY = jax.random.key_data(jax.random.key(3))
NARROW = dataclasses.replace(tiny.UNIFORM, dtype="bfloat16")
WIDE = dataclasses.replace(tiny.UNIFORM, num_layers=4, head_dim=64, vocab_size=64)
WORK = Workload(prompts=8, samples=4, shortest=96, longest=96, completion=96)
TIE = 3e-6  # relative error of a key or value of float32, in these models
ROUNDED = 2.0**-8  # the largest relative error of a number rounded to bfloat16


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(24, 1.0, (tiny.END,), tiny.PAD, 8)._replace(**changes)


@functools.cache
def run(config=tiny.UNIFORM, **changes):
    prompts = tiny.prompts(8)
    engine = make_engine(tiny.model(config), settings(**changes), prompts)
    return draw_all(engine, tiny.cast_params(config), prompts, KEY, 4)


def rows(rollouts):
    """Each sample as a row padded behind: its tokens, where its log-probs begin, and they."""
    for place in np.ndindex(rollouts.completion_tokens.shape[:2]):
        prompt = rollouts.prompt_tokens[place[0]][rollouts.prompt_mask[place[0]]]
        missing = rollouts.prompt_tokens.shape[1] - len(prompt)
        row = np.concatenate([prompt, rollouts.completion_tokens[place]])
        logp = rollouts.behavior_logp[place][rollouts.token_mask[place]]
        yield np.pad(row, (0, missing)), len(prompt) - 1, logp


def row_pass(tokens, rounded, memory):
    """log p of every token but the first in a plain pass that attends to rounded(keys or values),
    and how far apart the numbers are to which each key and value may be rounded."""
    model, position = tiny.model(), jnp.arange(len(tokens))[None]
    inner = causal(position, position >= 0)

    def attend(query, key, value, memory, kind, sinks=None):
        del sinks
        read = rounded(key, memory.key), rounded(value, memory.value)
        return inner(query, read[0], read[1], None, kind)[0], KeyValue(tie(key), tie(value))

    hidden, distances = model.apply(tiny.params(), tokens[None], position, Caller(attend), memory)
    logp = jax.nn.log_softmax(model.unembed(tiny.params(), hidden)[0])
    return logp[jnp.arange(len(tokens) - 1), tokens[1:]], distances


def in_bfloat16(leaf):
    return jax.lax.reduce_precision(leaf, 8, 7)


def tie(leaf):
    return jnp.abs(in_bfloat16(leaf * (1 + TIE)) - in_bfloat16(leaf * (1 - TIE)))


def zero_memory(tokens):
    """For every layer 0 in the place of each key and value."""
    shape = (1, len(tokens), tiny.UNIFORM.num_kv_heads, tiny.UNIFORM.head_dim)
    return (KeyValue(jnp.zeros(shape), jnp.zeros(shape)),) * tiny.UNIFORM.num_layers


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("config", "dtype"), [(tiny.UNIFORM, "float32"), (NARROW, "bfloat16")])
def test_a_cache_in_the_models_dtype_is_the_one_of_before_bit_for_bit(config, dtype):
    rollouts, want = run(config, kv_cache_dtype=dtype), run(config)
    np.testing.assert_array_equal(rollouts.completion_tokens, want.completion_tokens)
    np.testing.assert_array_equal(rollouts.behavior_logp, want.behavior_logp)


@pytest.mark.full
def test_log_probs_are_those_of_rounded_keys_and_values():
    """Two programs differ in the last bits of a key or value. Where it is so near the middle of two
    bfloat16 numbers that these decide, either may be kept; to first order that moves log p by at
    most sum_x |distance of the two| |d log p / d x|, which is 0 for many samples."""

    @jax.jit
    def plain_and_bound(tokens):
        rounded_pass = functools.partial(
            row_pass, tokens, lambda leaf, add: in_bfloat16(leaf) + add
        )
        slopes, distances = jax.jacrev(rounded_pass, has_aux=True)(zero_memory(tokens))
        moved = jax.tree.map(lambda slope, by: jnp.abs(slope * by), slopes, distances)
        bound = sum(leaf.sum((1, 2, 3, 4)) for leaf in jax.tree.leaves(moved))
        return rounded_pass(zero_memory(tokens))[0], bound

    exact = 0
    for tokens, begin, logp in rows(run(kv_cache_dtype="bfloat16")):
        want, bound = (part[begin : begin + len(logp)] for part in plain_and_bound(tokens))
        assert (np.abs(logp - want) <= 3e-5 + bound).all()
        exact += not bound.any()
    assert exact > 8  # of 32 samples


@pytest.mark.full
@pytest.mark.slow
def test_log_probs_differ_from_the_trainers_by_less_than_rounding_can_move_them():
    """Each key and value x is kept as x (1 + e) with |e| <= 2^-8, so that to first order

    |change of log p| <= 2^-8 sum_x |d log p / d e_x|
    """

    @jax.jit
    def plain_and_bound(tokens):
        rounded_pass = functools.partial(row_pass, tokens, lambda leaf, error: leaf * (1 + error))
        slopes = jax.tree.leaves(jax.jacrev(rounded_pass, has_aux=True)(zero_memory(tokens))[0])
        return rounded_pass(zero_memory(tokens))[0], sum(
            ROUNDED * jnp.abs(slope).sum((1, 2, 3, 4)) for slope in slopes
        )

    differences, bounds = [], []
    for tokens, begin, logp in rows(run(kv_cache_dtype="bfloat16")):
        arrays = plain_and_bound(tokens)
        plain_logp, bound = (np.asarray(leaf)[begin : begin + len(logp)] for leaf in arrays)
        differences.append(np.abs(logp - plain_logp))
        bounds.append(bound)
    difference, bound = np.concatenate(differences), np.concatenate(bounds)
    assert difference.size > 100
    assert (difference <= bound + 3e-5).all()
    assert difference.mean() > 1e-4  # not the float32 ones, which are below 3e-5
    assert np.median(bound) < 0.5


@pytest.mark.parametrize("axes", ["...ch,...hn->...cn", "...cn,...nh->...ch"])
def test_a_product_with_a_narrow_cache_is_exact_to_float32(axes):
    random = np.random.default_rng(0)
    rows = random.normal(size=(3, 5, 16)).astype(np.float32) * 10.0 ** random.integers(-3, 3, 16)
    cached = jnp.asarray(random.normal(size=(3, 16, 7)), jnp.bfloat16)
    product = jax.jit(plain.times_cache, static_argnums=0)(axes, rows.astype(np.float32), cached)
    want = rows.astype(np.float64) @ np.asarray(cached, np.float64)
    scale = np.abs(rows) @ np.abs(np.asarray(cached, np.float64))
    assert product.dtype == jnp.float32
    assert (np.abs(product - want) <= 16 * 2.0**-23 * scale).all()


def program(dtype):
    sizes = {"max_completion_tokens": WORK.completion}
    sampling = settings(**sizes, kv_cache_dtype=dtype)
    return decode_program(WIDE, WORK, sampling, jax.devices()[0]).compiled


@pytest.mark.full
@pytest.mark.slow
def test_the_bytes_of_the_cache_halve_and_no_second_one_is_made():
    wide, narrow = program("auto"), program("bfloat16")
    (_, state, _), _ = narrow.in_avals
    cache_leaves = jax.tree.leaves(state.memory)
    assert {leaf.dtype for leaf in cache_leaves} == {jnp.dtype(jnp.bfloat16)}
    cache = sum(leaf.size for leaf in cache_leaves)
    plans = [compiled.memory_analysis() for compiled in (wide, narrow)]
    argument_bytes = [plan.argument_size_in_bytes for plan in plans]
    assert argument_bytes[0] - argument_bytes[1] == 2 * cache
    # One layer's cache as float32 would be a quarter of all.
    assert all(plan.temp_size_in_bytes < cache * 4 / WIDE.num_layers / 2 for plan in plans)
