"""Queries, keys and the plain formula of attention, with a mask written out in NumPy."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.models.api import AttentionKind, KeyValue

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
KINDS = [AttentionKind(window=window, soft_cap=cap) for window in (None, 4) for cap in (None, 1.5)]


def name(kind: AttentionKind) -> str:
    return f"window {kind.window}, cap {kind.soft_cap}"


class Packed(NamedTuple):
    """Rows of completions behind prompts, as `rows_with_prefix` takes them."""

    segment: np.ndarray  # [1, R, Q]
    position: np.ndarray  # [1, R, Q]
    row_prompt: np.ndarray  # [1, R]
    prompt_length: np.ndarray  # [1, A]
    width: int  # S

    @property
    def placed(self) -> Any:
        """The arguments of `rows_with_prefix`."""
        return tuple(map(jnp.asarray, self[:4]))


def packed(
    rows: list[list[int]],
    row_prompt: list[int],
    lengths: list[int],
    width: int,
    size: int,
    align: int = 1,
):
    """Rows of completions of these lengths in `size` places each, side by side but for those that
    would not begin at a multiple of `align`."""
    segment, position = np.zeros((2, 1, len(rows), size), np.int32)
    for row, completions in enumerate(rows):
        start = 0
        for number, length in enumerate(completions, 1):
            start = -(-start // align) * align
            span = slice(start, start + length)
            segment[0, row, span] = number
            position[0, row, span] = lengths[row_prompt[row]] + np.arange(length)
            start += length
    prompt_index, real = (np.asarray([numbers], np.int32) for numbers in (row_prompt, lengths))
    return Packed(segment, position, prompt_index, real, width)


SEVERAL = packed([[5, 6], [12], [3, 3, 3]], [1, 0, 1], [3, 5], width=5, size=12)
APART = packed([[5, 4], [12], [3, 3, 2]], [1, 0, 1], [3, 5], width=5, size=12, align=4)
"""As where layers recur: each sample begins with a chunk."""
ALONE = packed([[9], [12], [1]], [1, 0, 1], [3, 5], width=5, size=12)
"""The same with one sample in each row."""


def draws(packed: Packed, dtype: Any = np.float64, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(query, key, value) of the rows, keys and values of their prompts, output's cotangent."""
    rng = np.random.default_rng(seed)
    rows = packed.segment.shape
    prompts = (*packed.prompt_length.shape, packed.width)
    shapes = [(*rows, HEADS, HEAD_DIM), *[(*rows, KV_HEADS, HEAD_DIM)] * 2]
    shapes += [(*prompts, KV_HEADS, HEAD_DIM)] * 2
    drawn = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    cotangent = rng.normal(size=shapes[0]) * (packed.segment > 0)[..., None, None]
    return (*drawn, cotangent.astype(dtype))


def mask_of_rows(packed: Packed, kind: AttentionKind) -> np.ndarray:
    """[1, R, Q, S + Q]: a query sees the real prompt and its own sample, up to itself."""
    _, rows, size = packed.segment.shape
    mask = np.zeros((1, rows, size, packed.width + size), bool)
    for row in range(rows):
        length = packed.prompt_length[0, packed.row_prompt[0, row]]
        for query in range(size):
            segment, at = packed.segment[0, row, query], packed.position[0, row, query]
            for key in range(packed.width + size):
                in_row = key - packed.width
                where = key if in_row < 0 else packed.position[0, row, in_row]
                real = key < length if in_row < 0 else packed.segment[0, row, in_row] == segment
                near = kind.window is None or at - where < kind.window
                mask[0, row, query, key] = real and where <= at and near
    return mask


def formula(
    query: Array, key: Array, value: Array, mask, soft_cap: float | None, sinks=None
) -> Array:
    """softmax(scores) value as it is written in a book. Shapes: see `models.attention`."""
    shared = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(leaf, shared, axis=-2) for leaf in (key, value))
    scores = jnp.einsum("...qhd,...nhd->...hqn", query, key, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[..., None, :, :], scores, -1e30)
    if sinks is not None:  # one more key, whose value is 0
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weight = jax.nn.softmax(scores, axis=-1)[..., : key.shape[-3]]
    return jnp.einsum("...hqn,...nhd->...qhd", weight, value, precision="highest")


def formula_of_rows(
    packed: Packed, kind: AttentionKind, query, key, value, prefix_key, prefix_value
):
    """What `rows_with_prefix` computes."""
    keys, values = (
        jnp.concatenate([prefix[:, packed.row_prompt[0]], rows], axis=-3)
        for prefix, rows in ((prefix_key, key), (prefix_value, value))
    )
    return formula(query, keys, values, mask_of_rows(packed, kind), kind.soft_cap)


def rows(implementation, packed, kind: AttentionKind, query, key, value, prefix_key, prefix_value):
    """What an implementation of `attention.rows_with_prefix` gives for packed rows."""
    attend = implementation(*packed.placed)
    return attend(query, key, value, KeyValue(prefix_key, prefix_value), kind)[0]


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(attend, cotangent, *inputs):
    """The output where a token is, and the gradients of the inputs."""
    out, back = jax.vjp(attend, *inputs)
    return jnp.where(cotangent != 0, out, 0), back(cotangent)


def assert_same(actual, expected, atol=2e-5):
    for actual_leaf, expected_leaf in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(actual_leaf, expected_leaf, rtol=0, atol=atol)
        assert np.abs(expected_leaf).max() > 100 * atol  # or nothing would be compared
