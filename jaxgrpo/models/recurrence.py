"""The gated delta rule and the short convolution before it, on arrays.

A head keeps a matrix S [key_dim, value_dim]. Each token forgets a part of it, and then writes its
value where its key points, in place of what is read there:

    S <- exp(log_decay) S;    S <- S + key (rate (value - key S))^T;    out = query S

with keys and queries of length 1, queries divided by sqrt(key_dim). A key head serves several
value heads, one after another. Queries, keys and values come out of a causal convolution over the
last few tokens, channel by channel, and silu.

Source: Yang et al. 2024, arXiv 2412.06464. Everything is computed in at least float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.models.products import custom_vjp

CHUNK = 64
"""Tokens whose part in the rule is computed by matrix products; states go from chunk to chunk."""

SQUARE = 8
"""Rows of a triangle that is inverted by powers, which are small numbers up to this size."""

_product = functools.partial(jnp.matmul, precision="highest")


class DeltaState(NamedTuple):
    """What a layer remembers of the tokens so far; all 0 before the first."""

    matrix: Array  # [*B, value_heads, key_dim, value_dim], at least float32
    tail: tuple[Array, Array, Array]
    """The convolution's last inputs: [*B, width - 1, heads, size] of query, key and value"""


class DeltaInputs(NamedTuple):
    """What a layer asks of each token; queries, keys and values before the convolution."""

    query: Array  # [*B, Q, key_heads, key_dim]
    key: Array  # same shape
    value: Array  # [*B, Q, value_heads, value_dim]
    log_decay: Array  # [*B, Q, value_heads], at most 0
    rate: Array  # [*B, Q, value_heads], from 0 to 1, or 2
    filters: tuple[Array, Array, Array]  # [heads, size, width], of query, key and value

    def with_tokens(self, leaves: Iterable[Array]) -> DeltaInputs:
        """The same filters over other tokens: all but the filters, in order."""
        query, key, value, log_decay, rate = leaves
        return DeltaInputs(query, key, value, log_decay, rate, self.filters)

    @property
    def mixed(self) -> tuple[Array, Array, Array]:
        """What is convolved."""
        return self.query, self.key, self.value


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of states and of all arithmetic here."""
    return jnp.promote_types(dtype, jnp.float32)


def first_state(inputs: DeltaInputs) -> DeltaState:
    """The state before the first token of each sequence."""
    batch = inputs.query.shape[:-3]
    width = inputs.filters[0].shape[-1] - 1
    sizes = inputs.value.shape[-2], inputs.key.shape[-1], inputs.value.shape[-1]
    return DeltaState(
        jnp.zeros((*batch, *sizes), wide(inputs.value.dtype)),
        _triple(jnp.zeros((*batch, width, *x.shape[-2:]), x.dtype) for x in inputs.mixed),
    )


def chunk_size(tokens: int) -> int:
    """The tokens of a chunk of sequences of so many: fewer than CHUNK where all are short."""
    return min(CHUNK, 1 << max(0, tokens - 1).bit_length())


def over_sequences(
    inputs: DeltaInputs, real: Array, start: DeltaState, begins: Array | None = None
) -> tuple[Array, DeltaState]:
    """Whole sequences, chunk by chunk.

    A token that is not real changes no state. The backward pass computes chunks and their states
    again: kept, they would be more numbers than all else that a layer keeps.

    Args:
      real: [*B, Q] bool.
      start: the state before each sequence.
      begins: [*B, Q / chunk_size(Q), rounded up] bool, chunks with which a segment begins, which
        starts from `start` and not from what is before it. None: one segment each.

    Returns: (outputs [*B, Q, value_heads, value_dim]; the state behind the last real token, if
    those that are not real are the last ones, and there is one segment).
    """
    batch, tokens = real.shape[:-1], real.shape[-1]
    size = chunk_size(tokens)
    number = -(-tokens // size)

    def merged(x: Array) -> Array:
        """[*B, ...] as [N, ...]."""
        return x.reshape(-1, *x.shape[len(batch) :])

    def in_chunks(x: Array) -> Array:
        """[*B, Q, ...] as [N, chunks, tokens of a chunk, ...]; 0 where nothing is real."""
        x = merged(jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - real.ndim)), x, 0))
        x = jnp.pad(x, [(0, 0), (0, number * size - tokens), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(-1, number, size, *x.shape[2:])

    @jax.checkpoint
    def compute(inputs: DeltaInputs, start: DeltaState) -> tuple[Array, Array]:
        start, first = jax.tree.map(merged, (start, begins))
        mixed = [
            _convolved(in_chunks(x), kernel, tail, first)
            for x, kernel, tail in zip(inputs.mixed, inputs.filters, start.tail, strict=True)
        ]
        log_decay, rate = in_chunks(inputs.log_decay), in_chunks(inputs.rate)
        out, matrix = _over_chunks(*_normed(*mixed), log_decay, rate, start.matrix, first)
        out = out.reshape(*batch, number * size, *out.shape[-2:])[..., :tokens, :, :]
        return out, matrix.reshape(*batch, *matrix.shape[1:])

    out, matrix = compute(inputs, start)
    count = real.sum(-1, dtype=jnp.int32)
    tail = _triple(map(functools.partial(_tail, count), start.tail, inputs.mixed))
    return out.astype(inputs.value.dtype), DeltaState(matrix, tail)


def step(token: DeltaInputs, state: DeltaState) -> tuple[Array, DeltaState]:
    """One token of each sequence: (output [*B, value_heads, value_dim], the state behind it).

    Args:
      token: without its dimension Q.
    """
    windows = [
        jnp.concatenate([tail, x[..., None, :, :].astype(tail.dtype)], axis=-3)
        for tail, x in zip(state.tail, token.mixed, strict=True)
    ]
    query, key, value = _normed(*map(_convolved_last, windows, token.filters))
    shared = value.shape[-2] // key.shape[-2]
    query, key = (jnp.repeat(x, shared, axis=-2) for x in (query, key))
    decay = jnp.exp(token.log_decay.astype(query.dtype))[..., None]
    # Both products in one pass over the state; the query's then gets what is written.
    products = jnp.stack([key, query], axis=-2)[..., None] * state.matrix[..., None, :, :]
    from_key, from_query = jnp.moveaxis(products.sum(-2), -2, 0) * decay
    change = (value - from_key) * token.rate.astype(query.dtype)[..., None]
    out = from_query + (query * key).sum(-1, keepdims=True) * change
    matrix = state.matrix * decay[..., None] + key[..., None] * change[..., None, :]
    tail = _triple(window[..., 1:, :, :] for window in windows)
    return out.astype(token.value.dtype), DeltaState(matrix, tail)


def _convolved(x: Array, kernel: Array, tail: Array, begins: Array | None) -> Array:
    """silu of the causal convolution of [*B, chunks, C, heads, size], channel by channel."""
    width, size = kernel.shape[-1], x.shape[-3]
    before = tail[..., None, :, :, :].astype(x.dtype)
    if x.shape[-4] > 1:
        before = jnp.concatenate([before, x[..., :-1, 1 - width :, :, :]], -4)
    if begins is not None:
        mask = begins[..., None, None, None]
        before = jnp.where(mask, tail[..., None, :, :, :], before)
    x, kernel = _widened(jnp.concatenate([before, x], -3), kernel)
    parts = [x[..., k : k + size, :, :] * kernel[..., k] for k in range(width)]
    return _activated(functools.reduce(jnp.add, parts), tail.dtype)


def _convolved_last(window: Array, kernel: Array) -> Array:
    """The same of the last token of [*B, width, heads, size]."""
    x, kernel = _widened(window, kernel)
    return _activated((x * jnp.moveaxis(kernel, -1, 0)).sum(-3), window.dtype)


def _widened(x: Array, kernel: Array) -> tuple[Array, Array]:
    return x.astype(wide(x.dtype)), kernel.astype(wide(x.dtype))


def _activated(x: Array, dtype: jnp.dtype) -> Array:
    """silu, rounded as an activation of the model is."""
    return jax.nn.silu(x).astype(dtype)


def _normed(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """All of them wide; queries and keys of length 1, queries divided by sqrt(key_dim)."""

    def normed(x: Array) -> Array:
        x = x.astype(wide(x.dtype))
        return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    return normed(query) * key.shape[-1] ** -0.5, normed(key), value.astype(wide(value.dtype))


def _over_chunks(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    rate: Array,
    start: Array,
    begins: Array | None,
) -> tuple[Array, Array]:
    """The rule on [N, chunks, C, heads, ...]; -> (outputs, the state behind the last chunk).

    In a chunk that begins with S, where D_ij = exp(sum of log_decay from j + 1 to i), j <= i:

        A = rate_i D_ij (key_i . key_j), j < i;    T = (1 + A)^-1
        new = T rate value - (T rate D_i key) S                    D_i: from the chunk's beginning
        out = D_i query S + (D_ij query_i . key_j) new
        S <- D_C S + (D_Ci key)^T new
    """
    dtype, key_heads, places = key.dtype, key.shape[-2], key.shape[:2]
    shared = value.shape[-2] // key_heads

    def by_heads(x: Array) -> Array:
        """[N, chunks, C, value_heads, ...] as [M, key_heads, value heads of each, C, ...], M both:
        with more dimensions gradients end the process in XLA's YNN of JAX 0.10 on a CPU."""
        x = x.astype(dtype).reshape(-1, x.shape[2], key_heads, shared, *x.shape[4:])
        return jnp.moveaxis(x, 1, 3)

    query, key = (
        jnp.swapaxes(x.reshape(-1, *x.shape[2:]), -3, -2)[:, :, None] for x in (query, key)
    )
    parts = _chunk_parts(
        query, key, by_heads(value), by_heads(rate)[..., None], by_heads(log_decay)
    )
    parts = [x.reshape(*places, *x.shape[1:]) for x in parts]
    first = jnp.zeros(places, bool) if begins is None else begins
    xs = [jnp.moveaxis(x, 1, 0) for x in (*parts, first[..., None, None, None, None])]
    start = start.reshape(-1, key_heads, shared, *start.shape[-2:])

    def body(state: Array, xs: list[Array]) -> tuple[Array, Array]:
        written, read, scores, query, left, kept_share, is_first = xs
        state = jnp.where(is_first, start, state)
        new = written - _product(read, state)
        out = _product(query, state) + _product(scores, new)
        return kept_share * state + _product(jnp.swapaxes(left, -1, -2), new), out

    state, out = jax.lax.scan(body, start, xs)
    out = jnp.transpose(out, (1, 0, 4, 2, 3, 5))
    out = out.reshape(*out.shape[:3], key_heads * shared, out.shape[-1])
    return out, state.reshape(-1, key_heads * shared, *state.shape[-2:])


def _chunk_parts(
    query: Array, key: Array, value: Array, rate: Array, log_decay: Array
) -> tuple[Array, ...]:
    """What each chunk adds to `_over_chunks` whatever its state, heads first: T rate value,
    T rate D_i key, D_ij query_i . key_j, D_i query, D_Ci key and D_C."""
    size, total = key.shape[-2], jnp.cumsum(log_decay, axis=-1)
    lower = np.tri(size, dtype=bool)
    between = jnp.exp(jnp.where(lower, total[..., None] - total[..., None, :], -jnp.inf))
    transposed = jnp.swapaxes(key, -1, -2)
    strictly_lower = np.tri(size, k=-1, dtype=bool)
    inverse = invert(jnp.where(strictly_lower, rate * between * _product(key, transposed), 0))
    begun = jnp.exp(total)[..., None]
    written = _product(inverse, rate * value)
    read = _product(inverse, rate * begun * key)
    scores = between * _product(query, transposed)
    left = jnp.exp(total[..., -1:] - total)[..., None] * key
    return written, read, scores, begun * query, left, begun[..., -1:, :]


@custom_vjp()
def invert(lower: Array) -> Array:
    """(1 + lower)^-1 of strictly lower triangles [..., C, C], C a power of two.

    By halves: powers of a large triangle cancel one another, and lose all digits where keys repeat.
    """
    size = lower.shape[-1]
    if size <= SQUARE:  # (1 - L)(1 + L^2)(1 + L^4)
        unit = jnp.eye(size, dtype=lower.dtype)
        inverse, power = unit - lower, lower
        for _ in range(size.bit_length() - 2):
            power = _product(power, power)
            inverse = inverse + _product(inverse, power)
        return inverse
    half = size // 2
    corners = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = invert(corners)
    across = -_product(_product(second, lower[..., half:, :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([top, jnp.concatenate([across, second], -1)], -2)


def _invert_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-_product(_product(transposed, cotangent), transposed),)


def _invert_forward(lower: Array) -> tuple[Array, Array]:
    inverse = invert(lower)
    return inverse, inverse


invert.defvjp(_invert_forward, _invert_backward)


def _tail(count: Array, before: Array, x: Array) -> Array:
    """The last inputs of the convolution, where `count` [*B] of [*B, Q, heads, size] are real."""
    line = jnp.concatenate([before.astype(x.dtype), x], -3)
    place = count[..., None] + jnp.arange(before.shape[-3])
    return jnp.take_along_axis(line, place[..., None, None], axis=-3)


def _triple(parts) -> tuple[Array, Array, Array]:
    query, key, value = parts
    return query, key, value
