"""Attention is the plain formula, with windows and soft caps, in one block of queries or many."""

from __future__ import annotations

import functools

import attended
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attended import HEAD_DIM, HEADS, KINDS, KV_HEADS, SEVERAL

from jaxgrpo.models.api import AttentionKind, KeyValue
from jaxgrpo.models.attention import Sharing, causal, chunk, decode, rows_with_prefix
from jaxgrpo.models.cache import Cache, Ring, settled
from jaxgrpo.models.kernels import plain

BLOCKS = {"one block": plain.BLOCK_BYTES, "blocks of 3": 3 * 3 * HEADS * 17 * 8, "of 1": 0}
"""Bytes of scores at a time -> blocks of twelve queries in three rows, with 17 keys of 8 bytes."""


@pytest.fixture(params=BLOCKS)
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(plain, "BLOCK_BYTES", BLOCKS[request.param])
    return request.param


def rows(kind: AttentionKind, query, key, value, prefix_key, prefix_value):
    attend = rows_with_prefix(*SEVERAL.placed)
    return attend(query, key, value, KeyValue(prefix_key, prefix_value), kind)[0]


def with_gradients(attend, cotangent, *inputs):
    """Output where it counts, and the gradients of sum(cotangent * output)."""
    out, back = jax.vjp(attend, *inputs)
    return jnp.where(cotangent != 0, out, 0), back(cotangent)


def assert_same(actual, expected, atol=1e-9):
    flat, tree = jax.tree.flatten(actual)
    expected_leaves, same = jax.tree.flatten(expected)
    assert tree == same
    for leaf, expected_leaf in zip(flat, expected_leaves, strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=0, atol=atol)


@pytest.mark.slow
def test_rows_are_the_plain_formula_with_its_gradients(block_bytes):
    with jax.enable_x64(True):
        *inputs, cotangent = map(jnp.asarray, attended.draws(SEVERAL))

        def all_kinds(attend):
            return [
                with_gradients(functools.partial(attend, kind), cotangent, *inputs)
                for kind in KINDS
            ]

        actual = jax.jit(lambda: all_kinds(rows))()
        expected = all_kinds(functools.partial(attended.formula_of_rows, SEVERAL))
        assert_same(actual, expected)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(actual))
        outputs = [np.asarray(out) for out, _ in actual]
    for i, output in enumerate(outputs):  # or the kinds would not be told apart
        assert all(np.abs(output - earlier).max() > 1e-2 for earlier in outputs[:i])


@pytest.mark.full
@pytest.mark.slow
def test_prompts_are_the_plain_formula_with_its_gradients(block_bytes):
    with jax.enable_x64(True):
        query, key, value, _, _, cotangent = map(jnp.asarray, attended.draws(SEVERAL))
        position = jnp.broadcast_to(jnp.arange(12), (1, 3, 12))
        valid = position < jnp.asarray([12, 7, 1])[:, None]
        cotangent = cotangent * valid[..., None, None]

        def attend(kind, query, key, value):
            return causal(position, valid)(query, key, value, None, kind)[0]

        def expected(kind, query, key, value):
            mask = plain.visible(position, position, kind) & valid[..., None, :]
            return attended.formula(query, key, value, mask, kind.soft_cap)

        def all_kinds(attend):
            inputs = (cotangent, query, key, value)
            return [with_gradients(functools.partial(attend, kind), *inputs) for kind in KINDS]

        assert_same(jax.jit(lambda: all_kinds(attend))(), all_kinds(expected))


@pytest.mark.full
@pytest.mark.slow
def test_a_chunk_of_a_prompt_is_the_plain_formula(block_bytes):
    with jax.enable_x64(True):
        query, key, value, *_ = (jnp.asarray(leaf)[:, :2] for leaf in attended.draws(SEVERAL))
        row_cache = [leaf[:, :1] for leaf in attended.draws(SEVERAL, seed=1)[1:3]]  # 12 columns
        slot_cache = [np.concatenate([leaf, leaf], 1) for leaf in row_cache]  # of two rows
        cache = Cache(
            jnp.moveaxis(jnp.asarray(slot_cache[0]), 2, 4),
            jnp.asarray(slot_cache[1]).swapaxes(2, 3),
        )
        start, length = np.asarray([[5, 0]]), np.asarray([[4, 3]])
        attend = chunk(*map(jnp.asarray, ([[1, 0]], start, length)))
        for row, at, count in ((0, 5, 4), (1, 0, 3)):
            for leaf, new in zip(slot_cache, (key, value), strict=True):
                leaf[0, 1 - row, at : at + count] = new[0, row, :count]
        for kind in KINDS:
            out, _ = attend(query[:, :, :4], key[:, :, :4], value[:, :, :4], cache, kind)
            for row, at, count in ((0, 5, 4), (1, 0, 3)):
                place = at + jnp.arange(count)
                mask = plain.visible(place, jnp.arange(12), kind)
                chunk_queries, row_cache = (
                    query[0, row, :count],
                    [jnp.asarray(leaf[0, 1 - row]) for leaf in slot_cache],
                )
                expected = attended.formula(
                    chunk_queries, row_cache[0], row_cache[1], mask, kind.soft_cap
                )
                assert_same(out[0, row, :count], expected)


@pytest.mark.slow
def test_decoding_is_the_plain_formula():
    steps, lengths = 7, np.asarray([[2, 5]])
    rng = np.random.default_rng(0)
    prefix = rng.normal(size=(2, 2, 5, KV_HEADS, HEAD_DIM))  # keys and values of two prompts
    sampled = rng.normal(size=(2, 4, steps, KV_HEADS, HEAD_DIM))  # of four slots
    query = rng.normal(size=(4, steps, HEADS, HEAD_DIM))
    with jax.enable_x64(True):
        turned = jnp.asarray(prefix[0]).transpose(0, 2, 3, 1)[None]
        prompts = Cache(turned, jnp.asarray(prefix[1]).swapaxes(1, 2)[None])

        def zeros(columns):
            empty = jnp.zeros((4, KV_HEADS, HEAD_DIM, columns))
            return Cache(empty, empty.mT)

        def step(kind, memory, index):
            step_query, key, value = (
                jnp.asarray(leaf)[None, :, index, None] for leaf in (query, *sampled)
            )
            slots = jnp.full((1, 4), index)
            attend = decode(index, slots, jnp.asarray(lengths), Sharing(None, None))
            out, (prompts, ring) = attend(step_query, key, value, memory, kind)
            return (prompts, settled(ring, index + 1)), out[0, :, 0]

        for kind in KINDS:
            memory = (prompts, Ring(zeros(2), (zeros(4), zeros(4))))
            body = functools.partial(step, kind)
            _, out = jax.lax.scan(body, memory, jnp.arange(steps))
            for slot in range(4):
                length = lengths[0, slot // 2]
                keys, values = (
                    jnp.asarray(np.concatenate([shared[slot // 2, :length], sampled_leaf[slot]]))
                    for shared, sampled_leaf in zip(prefix, sampled, strict=True)
                )
                mask = plain.visible(length + jnp.arange(steps), jnp.arange(len(keys)), kind)
                slot_query = jnp.asarray(query[slot])
                expected = attended.formula(slot_query, keys, values, mask, kind.soft_cap)
                assert_same(out[:, slot], expected)


def test_a_token_of_one_sample_does_not_move_a_bit_of_another(block_bytes):
    *inputs, _ = map(jnp.asarray, attended.draws(SEVERAL, np.float32))
    changed = [leaf.at[0, 0, 2].add(1.0) for leaf in inputs[:3]]  # of the first sample of row 0
    kind = AttentionKind(window=4, soft_cap=1.5)
    attend = jax.jit(functools.partial(rows, kind))
    out, moved = attend(*inputs), attend(*changed, *inputs[3:])
    unchanged = (SEVERAL.segment > 0) & ~((SEVERAL.segment == 1) & (np.arange(3) == 0)[:, None])
    np.testing.assert_array_equal(np.asarray(out)[unchanged], np.asarray(moved)[unchanged])
    assert not np.array_equal(out[0, 0, 2:5], moved[0, 0, 2:5])


def test_queries_are_cut_until_their_scores_fit():
    query = jax.ShapeDtypeStruct((8, 2, 4096, 4, 64), jnp.bfloat16)  # a bin of 2 rows, on 8 devices
    query_bytes = 2 * 4 * 8192 * 4  # rows, heads, keys, bytes
    assert plain.BLOCK_BYTES // query_bytes == 1024
    assert plain.block_size(query, 8192) == 1024
    assert plain.block_size(query, 8192 + 64) == 512
    assert plain.block_size(query, 2048) == 4096


def test_small_rows_are_one_block_without_a_loop(monkeypatch):
    *inputs, _ = map(jnp.asarray, attended.draws(SEVERAL, np.float32))

    def gradient(*operands):
        return jax.grad(lambda query: rows(KINDS[0], query, *operands[1:]).sum())(operands[0])

    assert "while" not in jax.jit(gradient).lower(*inputs).as_text()
    monkeypatch.setattr(plain, "BLOCK_BYTES", 0)
    assert "while" in jax.jit(lambda *operands: gradient(*operands)).lower(*inputs).as_text()
