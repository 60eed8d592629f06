"""The gated delta rule: chunk by chunk, token by token, beside transformers, and in packed rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent

from jaxgrpo.models import recurrence
from jaxgrpo.models.recurrence import CHUNK, DeltaInputs, DeltaState

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 8, 16, 4
LENGTHS = (150, 2 * CHUNK + 1, CHUNK, 1)
EXACT = {"float32": 1e-5, "float64": 1e-10}


def inputs(batch: int, tokens: int, dtype: str = "float32", seed: int = 0) -> DeltaInputs:
    """Random ones, which forget a little of their state."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), dtype)

    keys, values = (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM)
    return DeltaInputs(
        *(normal(batch, tokens, *sizes) for sizes in (keys, keys, values)),
        log_decay=-0.1 * jnp.abs(normal(batch, tokens, VALUE_HEADS)),
        rate=jax.nn.sigmoid(normal(batch, tokens, VALUE_HEADS)),
        filters=(normal(*keys, WIDTH), normal(*keys, WIDTH), normal(*values, WIDTH)),
    )


def some_state(example: DeltaInputs) -> DeltaState:
    return jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.ndim), leaf.shape, leaf.dtype),
        recurrence.first_state(example),
    )


def furthest(first, second) -> float:
    """The largest difference of two trees, as a share of the largest number of each leaf."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return max(float(jnp.abs(a - b).max() / (jnp.abs(b).max() + 1e-30)) for a, b in pairs)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(form, example: DeltaInputs, real: jax.Array, start: DeltaState):
    def loss(example, start):
        out, state = form(example, real, start)
        out = jnp.where(real[..., None, None], out, 0)
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves((out, state))), (out, state)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(example, start)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "float64"])
def test_chunks_are_tokens_one_by_one_with_their_gradients(dtype):
    with jax.enable_x64(dtype == "float64"):
        example = inputs(len(LENGTHS), max(LENGTHS), dtype)
        real = jnp.arange(max(LENGTHS)) < jnp.asarray(LENGTHS)[:, None]
        arguments = example, real, some_state(example)
        chunks = with_gradients(recurrence.over_sequences, *arguments)
        tokens = with_gradients(recurrent.token_by_token, *arguments)
        assert chunks[1][0].dtype == dtype
        assert furthest(chunks, tokens) < EXACT[dtype]


@pytest.mark.full
def test_gradients_of_rows_of_chunks_are_computed_at_the_size_of_real_heads():
    """XLA's YNN on a CPU ended the process here: arrays of 7 dimensions, the first of size 1."""
    random = np.random.default_rng(0)
    sizes = (2, 64), (2, 64), (4, 64), (4,), (4,)
    leaves = [
        jnp.asarray(random.normal(size=(1, 2, 2 * CHUNK, *size)), "float32") for size in sizes
    ]
    filters: Any = tuple(
        jnp.asarray(random.normal(size=(*size, WIDTH)), "float32") for size in sizes[:3]
    )
    query, key, value, decay, rate = leaves
    example = DeltaInputs(query, key, value, -jnp.abs(decay), jax.nn.sigmoid(rate), filters)
    real, start = jnp.ones((1, 2, 2 * CHUNK), bool), recurrence.first_state(example)
    gradient, (out, _) = with_gradients(recurrence.over_sequences, example, real, start)
    expected, _ = jax.jit(recurrent.token_by_token)(example, real, start)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


full = pytest.mark.full
CUTS = [pytest.param(cut, marks=full) for cut in (CHUNK, CHUNK + 1, 1, CHUNK - 1, 149)]


@pytest.mark.full
@pytest.mark.parametrize("cut", [3, *CUTS])
def test_a_sequence_goes_on_from_the_state_of_its_beginning(cut):
    example = inputs(2, 150)
    full, start = jnp.ones((2, 150), bool), some_state(example)
    expected = recurrence.over_sequences(example, full, start)
    parts = [
        example.with_tokens(leaf[:, piece] for leaf in example[:5])
        for piece in (slice(cut), slice(cut, None))
    ]
    first, state = recurrence.over_sequences(parts[0], full[:, :cut], start)
    second, state = recurrence.over_sequences(parts[1], full[:, cut:], state)
    assert furthest((jnp.concatenate([first, second], 1), state), expected) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2, pytest.param(6, marks=full)])
def test_segments_of_a_row_know_nothing_of_one_another(number):
    """Lengths round the borders of chunks; behind each, and in its chunk, other numbers."""
    lengths = [CHUNK, 1, CHUNK + 1, CHUNK - 1, 2 * CHUNK, 5][:number]
    begins = np.cumsum([0, *(-(-length // CHUNK) for length in lengths)])
    example, starts = inputs(1, int(begins[-1]) * CHUNK), np.zeros((1, begins[-1]), bool)
    starts[0, begins[:-1]] = True
    real = np.zeros((1, begins[-1] * CHUNK), bool)
    for begin, length in zip(begins[:-1] * CHUNK, lengths, strict=True):
        real[0, begin : begin + length] = True
    masks, start = (jnp.asarray(real), jnp.asarray(starts)), some_state(example)
    packed = jax.jit(
        lambda example: recurrence.over_sequences(example, masks[0], start, masks[1])[0]
    )
    out, moved = packed(example), packed(jax.tree.map(lambda x: x, changed(example, lengths)))
    for k, (begin, length) in enumerate(zip(begins[:-1] * CHUNK, lengths, strict=True)):
        piece = slice(begin, begin + length)
        alone = example.with_tokens(leaf[:, piece] for leaf in example[:5])
        expected, _ = recurrent.token_by_token(alone, jnp.ones((1, length), bool), start)
        assert furthest(out[:, piece], expected) < 1e-5
        is_equal = bool((out[:, piece] == moved[:, piece]).all())
        assert is_equal == (k > 0), "only the first segment was changed"


def changed(example: DeltaInputs, lengths: list[int]) -> DeltaInputs:
    """With other numbers in the first segment, and behind it to the end of its chunk."""
    value = example.value.at[:, : -(-lengths[0] // CHUNK) * CHUNK].add(3.0)
    return example._replace(value=value)


@pytest.mark.full
def test_keys_that_repeat_lose_no_digits():
    """Powers of a triangle of ones grow to 1e17, where its inverse has ones alone."""
    triangle = np.tri(CHUNK, k=-1, dtype=np.float32)
    inverse = np.asarray(recurrence.invert(jnp.asarray(triangle)))
    np.testing.assert_array_equal(inverse, np.eye(CHUNK) - np.eye(CHUNK, k=-1))
    example = inputs(1, 4 * CHUNK)
    example = example._replace(
        key=jnp.ones_like(example.key),
        log_decay=jnp.zeros_like(example.log_decay),
        rate=jnp.ones_like(example.rate),
    )
    arguments = example, jnp.ones((1, 4 * CHUNK), bool), recurrence.first_state(example)
    chunks, tokens = recurrence.over_sequences(*arguments), recurrent.token_by_token(*arguments)
    assert furthest(chunks, tokens) < 1e-5


@pytest.mark.slow
def test_the_rule_is_that_of_transformers():
    """Theirs from a state too; their convolution is compared with their models."""
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    example = inputs(2, 150)
    example = example._replace(  # a convolution that takes the token alone, and is silu
        filters=tuple(jnp.zeros_like(x).at[..., -1].set(1) for x in example.filters)
    )
    start = recurrence.first_state(example)
    start = start._replace(matrix=some_state(example).matrix)
    out, state = recurrence.over_sequences(example, jnp.ones((2, 150), bool), start)
    convolved = map(jax.nn.silu, example.mixed)
    arrays = (*convolved, example.log_decay, example.rate)
    tensors = [torch.tensor(np.asarray(array)) for array in arrays]
    for function in (
        theirs.torch_chunk_gated_delta_rule,
        theirs.torch_recurrent_gated_delta_rule,
    ):
        expected, expected_state = function(
            *tensors[:3],
            g=tensors[3],
            beta=tensors[4],
            initial_state=torch.tensor(np.asarray(start.matrix)),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        np.testing.assert_allclose(out, expected.numpy(), atol=2e-5)
        np.testing.assert_allclose(state.matrix, expected_state.numpy(), atol=2e-5)


@full
def test_states_are_float32_where_the_model_computes_in_bfloat16():
    example = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), inputs(1, 70))
    for form in (recurrence.over_sequences, recurrent.token_by_token):
        out, state = form(example, jnp.ones((1, 70), bool), recurrence.first_state(example))
        assert out.dtype == jnp.bfloat16
        assert state.matrix.dtype == jnp.float32
        assert {leaf.dtype for leaf in state.tail} == {jnp.dtype("bfloat16")}
