"""The `attend` functions: causal, rows with a shared prefix, chunks of prompts, decoding steps.

Every mask is a function of (segment, position) and the layer's window; nothing else is trusted.
Softmax is taken in at least float32; masked scores are the lowest finite number, so that a query
without any key gives finite garbage that the loss masks, never NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxgrpo.models.api import Attend, KeyValue, LayerKind
from jaxgrpo.models.cache import Cache, Ring, ages, written

SAVED = "attention"
"""The name under which a policy for recomputation finds what attention's backward pass reads."""


def causal(position: Array, valid: Array) -> Attend:
    """Attention within each sequence: a query reads the valid keys at or before its position.

    Shapes: position, valid [*B, Q]. The memory it returns is KeyValue of this layer.
    """

    def attend(query, key, value, memory, kind: LayerKind):
        del memory
        mask = _visible(position, position, kind) & valid[..., None, :]
        return attention(query, key, value, mask), KeyValue(key, value)

    return attend


def rows_with_prefix(
    segment: Array, position: Array, row_prompt: Array, prompt_length: Array
) -> Attend:
    """Attention of packed rows to their own segment and to the prompt that their group shares.

    The memory given is the prompts' KeyValue [D, A, S, kv_heads, head_dim]; none is returned.
    Shapes: segment, position [D, R, Q]; row_prompt [D, R]; prompt_length [D, A].
    """
    length = jnp.take_along_axis(prompt_length, row_prompt, axis=1)  # [D, R]

    def attend(query, key, value, memory: KeyValue, kind: LayerKind):
        prefix = KeyValue(*(_take(leaf, row_prompt) for leaf in memory))
        prefix_position = jnp.arange(prefix.key.shape[2])
        real = prefix_position < length[..., None]  # [D, R, S]
        in_prefix = _visible(position, prefix_position, kind) & real[..., None, :]
        same = segment[..., :, None] == segment[..., None, :]
        in_row = _visible(position, position, kind) & same
        keys, values = (
            jnp.concatenate(pair, axis=-3)
            for pair in zip(prefix, KeyValue(key, value), strict=True)
        )
        mask = jnp.concatenate([in_prefix, in_row], axis=-1)
        return attention(query, keys, values, mask), None

    return attend


@jax.custom_vjp
def attention(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """softmax(query key^T) value over the keys that `mask` shows; the query comes scaled.

    The backward pass computes the weights again from their log-sum-exp, so that no array of the
    size of the scores is kept: with p = softmax(s), o = p v and its cotangent g,

        d s = p (g v^T - sum(g o))

    A query that sees no key gets finite garbage, and no gradient if its cotangent is 0.

    Shapes: query [*B, Q, heads, head_dim]; key, value [*B, N, kv_heads, head_dim]; mask
    [*B, Q, N]. Products and softmax in at least float32. Only reverse mode, once.
    Source: the backward pass of FlashAttention, arXiv 2205.14135, algorithm 4.
    """
    return _attention(query, key, value, mask)[0]


def _attention(query: Array, key: Array, value: Array, mask: Array):
    cache = _heads_first(key, value)
    part = _partial(_grouped(query, cache), cache, mask[..., None, None, :, :])
    out = checkpoint_name(_ungrouped(part.value / part.total[..., None], query), SAVED)
    total = checkpoint_name(part.highest + jnp.log(part.total), SAVED)
    return out, (query, key, value, mask, out, total)


def _attention_backward(saved: tuple[Array, ...], cotangent: Array):
    query, key, value, mask, out, total = saved
    cache = _heads_first(key, value)
    asked, slope = _grouped(query, cache), _grouped(cotangent, cache)
    dtype = total.dtype
    einsum = functools.partial(jnp.einsum, preferred_element_type=dtype)
    # One product for all the queries that share a key's head.
    flat, flat_slope = (
        leaf.reshape(*leaf.shape[:-3], -1, leaf.shape[-1]) for leaf in (asked, slope)
    )
    scores = _scores(asked, cache, mask[..., None, None, :, :])
    weight = jnp.exp(scores - total[..., None])
    rest = (slope.astype(dtype) * _grouped(out, cache).astype(dtype)).sum(-1)
    change = einsum("...ch,...nh->...cn", flat_slope, cache.value).reshape(weight.shape)
    change = (weight * (change - rest[..., None])).astype(query.dtype).reshape(*flat.shape[:-1], -1)
    weight = weight.astype(value.dtype).reshape(change.shape)
    d_query = einsum("...cn,...hn->...ch", change, cache.key).reshape(asked.shape)
    d_key = einsum("...cn,...ch->...nh", change, flat)
    d_value = einsum("...cn,...ch->...nh", weight, flat_slope)
    back = (jnp.moveaxis(leaf, -3, -2).astype(key.dtype) for leaf in (d_key, d_value))
    return _ungrouped(d_query, query), *back, None


attention.defvjp(_attention, _attention_backward)


class Sharing(NamedTuple):
    """Which slots read which row of the prompts' cache. A row is read by up to `width` slots."""

    # [D, rows * width], the slot that reads at each place, N if none; None: slot n at place n
    slot: Array | None
    place: Array | None  # [D, N], the place of each slot; None: as above


def chunk(row: Array, start: Array, length: Array) -> Attend:
    """A chunk of each of some prompts: reads what their rows hold before it, and itself.

    Memory per layer: the prompts' Cache [D, A, ...], into which the chunk is written.
    Shapes: row, start, length [D, R]: the row in the cache, the chunk's first position, and how
    many of its tokens are real (0: nothing is written).
    """

    def attend(query, key, value, memory: Cache, kind: LayerKind):
        width = query.shape[2]
        offset = jnp.arange(width)
        real = offset < length[..., None]  # [D, R, W]
        column = jnp.where(real, start[..., None] + offset, memory.value.shape[-2])

        def write(cache: Cache, row: Array, column: Array, key: Array, value: Array) -> Cache:
            keys = cache.key.at[row[:, None], :, :, column].set(key, mode="drop")
            return Cache(keys, cache.value.at[row[:, None], :, column].set(value, mode="drop"))

        cache = jax.vmap(write)(memory, row, column, key, value)
        rows = Cache(*(_take(leaf, row) for leaf in cache))
        position = start[..., None] + offset
        mask = _visible(position, jnp.arange(rows.value.shape[-2]), kind)  # [D, R, W, S]
        out = _partial(_grouped(query, rows), rows, mask[:, :, None, None])
        return _ungrouped(out.value / out.total[..., None], query), cache

    return attend


def decode(clock: Array, index: Array, length: Array, sharing: Sharing) -> Attend:
    """One decoding step of every slot: reads its prompt's row and the slot's own tokens.

    Memory per layer: (prompts' Cache [D, A, ...], own Ring [D * N, ...]). All slots write at one
    column, and a slot reads the last `index` + 1 that were written. Were each to write at a column
    of its own, a TPU would copy the cache into another layout and back at every token. Bins and
    slots are one dimension there: with two, of which one may have size 1, XLA writes the cache in
    both shapes, and copies it for that.

    Args:
      clock: [], decoding steps before this one.
      index: [D, N], tokens fed to the slot before. Own position i comes i tokens after the prompt.
      length: [D, A], real tokens of each prompt's row.
    """
    longest = index.max()

    def attend(query, key, value, memory: tuple[Cache, Ring], kind: LayerKind):
        prefix, own = memory
        of_slots = (-1, *key.shape[3:])
        own = written(own, clock, key.reshape(of_slots), value.reshape(of_slots))
        grouped = _grouped(query, prefix)  # [D, N, kv_heads, heads per kv head, 1, head_dim]
        flat = grouped.reshape(-1, *grouped.shape[2:])
        reach = index.reshape(-1, 1)
        furthest = longest if kind.window is None else jnp.minimum(longest, kind.window - 1)

        def part(cache: Cache, ago: Array) -> _Partial:
            seen = (ago >= 0) & (ago <= reach)
            if kind.window is not None:
                seen &= ago < kind.window
            return _partial(flat, cache, seen[:, None, None, None])

        def unread(cache: Cache, ago: Array) -> _Partial:
            del ago
            return _nothing(flat, cache)

        recent, *older = ages(own, clock)
        parts = [part(own.recent, recent)]
        for cache, ago in zip(own.older, older, strict=True):
            parts.append(jax.lax.cond(ago.min() <= furthest, part, unread, cache, ago))
        parts = [
            _Partial(*(leaf.reshape(*index.shape, *leaf.shape[1:]) for leaf in of_part))
            for of_part in parts
        ]
        parts.append(_of_prompts(grouped, prefix, index, length, sharing, kind))
        return _ungrouped(_joined(parts), query), (prefix, own)

    return attend


class _Partial(NamedTuple):
    """Attention over some of the keys, to be joined with that over others."""

    value: Array  # [..., Q, head_dim], sum of exp(score - highest) * value
    highest: Array  # [..., Q]
    total: Array  # [..., Q], sum of exp(score - highest)


def _of_prompts(
    query: Array, prefix: Cache, index: Array, length: Array, sharing: Sharing, kind: LayerKind
) -> _Partial:
    """The slots' attention to their prompts, one product for all the readers of a row.

    Keys of a prompt are never copied per slot; queries move to the row that they read instead.
    """
    bins, rows = length.shape
    heads = query.shape[2:]
    distance = index
    if sharing.slot is not None:
        take = jax.vmap(lambda values, place: values.at[place].get(mode="fill", fill_value=0))
        query, distance = take(query, sharing.slot), take(index, sharing.slot)
    query = query.reshape(bins, rows, -1, *heads)  # [D, A, C, kv_heads, heads per kv head, 1, h]
    query = jnp.moveaxis(query[..., 0, :], 2, -2)  # [D, A, kv_heads, heads per kv head, C, h]
    column = jnp.arange(prefix.value.shape[-2])
    mask = (column < length[..., None])[:, :, None]  # [D, A, 1, S]
    if kind.window is not None:
        position = length[..., None] + distance.reshape(bins, rows, -1)
        mask = mask & _visible(position, column, kind)  # [D, A, C, S]
    out = _partial(query, prefix, mask[:, :, None, None])

    def back(leaf: Array) -> Array:
        leaf = jnp.moveaxis(leaf, 4, 2)  # [D, A, C, kv_heads, heads per kv head, ...]
        leaf = leaf.reshape(bins, -1, *leaf.shape[3:])
        if sharing.place is not None:
            leaf = _take(leaf, sharing.place)
        return jnp.expand_dims(leaf, 4)

    return _Partial(*map(back, out))


def _heads_first(key: Array, value: Array) -> Cache:
    """Keys and values [*B, N, kv_heads, head_dim] in the layout of a cache."""
    return Cache(jnp.moveaxis(key, -3, -1), jnp.moveaxis(value, -3, -2))


def _grouped(query: Array, cache: Cache) -> Array:
    """[*B, Q, heads, head_dim] as [*B, kv_heads, heads per kv head, Q, head_dim]."""
    *batch, width, heads, head_dim = query.shape
    kv_heads = cache.value.shape[-3]
    apart = query.reshape(*batch, width, kv_heads, heads // kv_heads, head_dim)
    return jnp.moveaxis(apart, -4, -2)


def _ungrouped(out: Array, like: Array) -> Array:
    """The inverse of `_grouped`, in the shape and dtype of the query."""
    return jnp.moveaxis(out, -2, -4).reshape(like.shape).astype(like.dtype)


def _partial(query: Array, cache: Cache, mask: Array) -> _Partial:
    """Attention of queries [*B, kv_heads, shared, Q, head_dim] over the columns of a cache.

    Where a query sees no column, `highest` is the lowest finite number, so that joined with another
    part it weighs nothing.
    """
    *batch, shared, width, head_dim = query.shape
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    scores = _scores(query, cache, mask)
    highest = scores.max(-1)
    weight = jnp.exp(scores - highest[..., None])
    flat = weight.reshape(*batch, shared * width, -1).astype(cache.value.dtype)
    value = jnp.einsum("...cn,...nh->...ch", flat, cache.value, preferred_element_type=dtype)
    return _Partial(value.reshape(*batch, shared, width, head_dim), highest, weight.sum(-1))


def _scores(query: Array, cache: Cache, mask: Array) -> Array:
    """Masked scores [*B, kv_heads, shared, Q, columns] in at least float32: one product for all the
    queries that share a key's head."""
    *batch, shared, width, head_dim = query.shape
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    flat = query.reshape(*batch, shared * width, head_dim)
    scores = jnp.einsum("...ch,...hn->...cn", flat, cache.key, preferred_element_type=dtype)
    scores = scores.reshape(*batch, shared, width, -1)
    return jnp.where(mask, scores, jnp.finfo(dtype).min)


def _nothing(query: Array, cache: Cache) -> _Partial:
    """`_partial` where no query sees any column."""
    shape = jax.eval_shape(_partial, query, cache, jnp.zeros((), bool))
    value, highest, total = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in shape)
    return _Partial(value, highest + jnp.finfo(highest.dtype).min, total)


def _joined(parts: Sequence[_Partial]) -> Array:
    """Attention over the keys of all parts."""
    highest = functools.reduce(jnp.maximum, (part.highest for part in parts))
    scale = [jnp.exp(part.highest - highest) for part in parts]
    pairs = list(zip(parts, scale, strict=True))
    value = functools.reduce(jnp.add, (part.value * by[..., None] for part, by in pairs))
    total = functools.reduce(jnp.add, (part.total * by for part, by in pairs))
    return value / total[..., None]


def _take(values: Array, at: Array) -> Array:
    """Entries [D, n, ...] of values [D, N, ...] at [D, n], bin by bin."""
    return jax.vmap(lambda values, at: values[at])(values, at)


def _visible(query_position: Array, key_position: Array, kind: LayerKind) -> Array:
    """[..., Q, N]: at or before the query, and inside the layer's window."""
    distance = query_position[..., :, None] - key_position[..., None, :]
    mask = distance >= 0
    return mask if kind.window is None else mask & (distance < kind.window)
