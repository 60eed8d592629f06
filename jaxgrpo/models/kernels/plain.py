"""Attention in operations that XLA compiles for any platform, in one block of queries or several.

A mask is never given as an array [Q, N]: it is made from `Sight`, for as many queries as are
computed at a time. So memory grows with the context, not with its square.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxgrpo.models.api import AttentionKind
from jaxgrpo.models.cache import FP8, Cache
from jaxgrpo.models.layers import soft_capped
from jaxgrpo.models.products import custom_vjp, pieces

SAVED = "attention"
"""The name under which a policy for recomputation finds what attention's backward pass reads."""

BLOCK_BYTES = 256 * 2**20
"""The scores computed at a time stay below this, for each entry of the leading dimension.

That dimension is spread over devices. Where all scores fit, there is one block. The backward pass
holds about four arrays of a block's size.
"""


class Keys(NamedTuple):
    """Some keys, as a mask sees them. Those with a segment are for its queries, others for all."""

    position: Array  # [..., N]
    real: Array | None = None  # [..., N]; None: every key is
    segment: Array | None = None  # [..., N]


class Sight(NamedTuple):
    """What makes a mask: a query sees the keys at or before its position that are for it."""

    position: Array  # [*B, Q] of the queries
    segment: Array | None  # [*B, Q] of the queries; None where no keys have one
    keys: tuple[Keys, ...]  # side by side


@runtime_checkable
class Shaped(Protocol):
    """An array, or its shape alone (`jax.ShapeDtypeStruct`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


ABSENT = {
    "soft_cap": "soft-capped scores",
    "window": "windows",
    "sinks": "sinks",
    "latent": "latents, whose values have another size than keys",
}
"""Fields of an AttentionKind that kernels of chips may not know, in the words of a refusal."""


def lacking(kinds: Sequence[AttentionKind], *fields: str) -> list[str]:
    """What layers ask for of ABSENT, if a kernel lacks these fields. None has sinks or latents."""
    fields += ("sinks", "latent")
    names = [name for name in fields if any(getattr(kind, name) for kind in kinds)]
    return [f"{ABSENT[name]}: it has none" for name in names]


def check_kind(kernel: str, kind: AttentionKind, *fields: str) -> None:
    """Raises: NotImplementedError for `lacking`."""
    if problems := lacking([kind], *fields):
        raise NotImplementedError(
            f"{kernel}, {'; '.join(problems)}: choose the kernel by "
            "models.attention.choose_kernel, which refuses it"
        )


def make_mask(sight: Sight, kind: AttentionKind) -> Array:
    """[*B, Q, N]: which keys each query sees in a layer of this kind."""
    masks = []
    for keys in sight.keys:
        mask = visible(sight.position, keys.position, kind)
        if keys.real is not None:
            mask = mask & keys.real[..., None, :]
        if keys.segment is not None and sight.segment is not None:
            mask = mask & (sight.segment[..., :, None] == keys.segment[..., None, :])
        masks.append(mask)
    return jnp.concatenate(masks, axis=-1) if len(masks) > 1 else masks[0]


def visible(query_position: Array, key_position: Array, kind: AttentionKind) -> Array:
    """[..., Q, N]: at or before the query, and inside the layer's window."""
    distance = query_position[..., :, None] - key_position[..., None, :]
    mask = distance >= 0
    return mask if kind.window is None else mask & (distance < kind.window)


def attended(
    query: Array,
    key: Array,
    value: Array,
    sight: Sight,
    kind: AttentionKind,
    sinks: Array | None = None,
) -> Array:
    """softmax(scores) value over the keys that each query sees; the query comes scaled.

    Shapes: query [*B, Q, heads, head_dim]; key, value [*B, N, kv_heads, head_dim], which of values
    may be another; sinks [heads].
    """
    size = block_size(query, key.shape[-3])
    if size == query.shape[-3]:
        return attention(query, key, value, make_mask(sight, kind), kind.soft_cap, sinks)
    return attention_in_blocks(query, key, value, sight, kind, size, sinks)


def block_size(query: Shaped, columns: int) -> int:
    """Queries computed at a time, so that their scores stay below BLOCK_BYTES; all where they do.

    Halved until they fit, so that blocks of a power of two are whole.
    """
    *batch, width, heads, _ = query.shape
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    bytes_per_query = math.prod(batch[1:]) * heads * columns * dtype.itemsize
    size = width
    while size > 1 and size * bytes_per_query > BLOCK_BYTES:
        size = -(-size // 2)
    return size


@custom_vjp(4)
def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """softmax(scores) value over the keys that `mask` shows; the query comes scaled.

        scores = query key^T, or c tanh(query key^T / c) with a soft cap c

    The backward pass computes the weights again from their log-sum-exp, so that no array of the
    size of the scores is kept: with p = softmax(s), o = p v and its cotangent g,

        d s = p (g v^T - sum(g o)),    times 1 - (s / c)^2 with a soft cap

    Sinks are a score more for each head, of a key whose value is 0: softmax is over it too, and

        d sink = -exp(sink - log-sum-exp) sum(g o), summed over queries

    A query that sees no key gets finite garbage, and no gradient if its cotangent is 0.

    Shapes: query [*B, Q, heads, head_dim]; key, value [*B, N, kv_heads, head_dim]; mask
    [*B, Q, N]. Products and softmax in at least float32. Only reverse mode, once.
    Source: the backward pass of FlashAttention, arXiv 2205.14135, algorithm 4.
    """
    return _attention(query, key, value, mask, soft_cap, sinks)[0]


def _attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    soft_cap: float | None,
    sinks: Array | None,
):
    part = _forward(query, heads_first(key, value), mask, soft_cap, sinks)
    return _with_saved(part, query, key, value, mask, sinks)


def _attention_backward(soft_cap: float | None, saved: tuple, cotangent: Array):
    query, key, value, mask, out, total, sinks = saved
    cache = heads_first(key, value)
    d_query, d_cache, d_sinks = _backward(
        query, cache, mask, out, total, cotangent, soft_cap, sinks
    )
    d_cache = (_from_heads_first(leaf, key.dtype) for leaf in d_cache)
    return d_query, *d_cache, None, _narrow(d_sinks, sinks)


attention.defvjp(_attention, _attention_backward)


@custom_vjp(4, 5)
def attention_in_blocks(
    query: Array,
    key: Array,
    value: Array,
    sight: Sight,
    kind: AttentionKind,
    size: int,
    sinks: Array | None = None,
) -> Array:
    """`attention` of `size` queries at a time: no array [Q, N] is ever whole.

    The gradients of keys and values are summed over the blocks in at least float32. Shapes and
    all else as in `attention` and `Sight`.
    """
    return _in_blocks(query, key, value, sight, kind, size, sinks)[0]


def _in_blocks(
    query: Array,
    key: Array,
    value: Array,
    sight: Sight,
    kind: AttentionKind,
    size: int,
    sinks: Array | None,
):
    part = _forward_in_blocks(query, heads_first(key, value), sight, kind, size, sinks)
    return _with_saved(part, query, key, value, sight, sinks)


def _with_saved(part: tuple[Array, Array], query, key, value, sight: Array | Sight, sinks):
    """An output and its log-sum-exps as the output and what the backward pass reads."""
    out, total = (checkpoint_name(leaf, SAVED) for leaf in part)
    return out, (query, key, value, sight, out, total, sinks)


def _in_blocks_backward(kind: AttentionKind, size: int, saved: tuple, cotangent: Array):
    query, key, value, sight, out, total, sinks = saved
    cache = heads_first(key, value)

    def add(sums: Any, block: tuple):
        query, out, cotangent, asking, total = block
        query, mask = _with_mask(query, asking, sight, kind)
        d_query, *gradients = _backward(
            query, cache, mask, out, total, cotangent, kind.soft_cap, sinks
        )
        return jax.tree.map(jnp.add, sums, gradients), d_query

    # Keys not turned.
    zeros = [
        jnp.zeros((*cache.value.shape[:-1], leaf.shape[-1]), total.dtype) for leaf in (key, value)
    ]
    no_sinks = None if sinks is None else jnp.zeros(sinks.shape, total.dtype)
    blocks = (*(_blocks(leaf, size, -3) for leaf in (query, out, cotangent)), _asking(sight, size))
    first = [(*zeros,), no_sinks]
    (d_cache, d_sinks), d_query = jax.lax.scan(add, first, (*blocks, total))
    d_cache = (_from_heads_first(leaf, key.dtype) for leaf in d_cache)
    return _unblocked(d_query, query), *d_cache, None, _narrow(d_sinks, sinks)


def _narrow(gradient: Array | None, sinks: Array | None) -> Array | None:
    return None if gradient is None or sinks is None else gradient.astype(sinks.dtype)


attention_in_blocks.defvjp(_in_blocks, _in_blocks_backward)


def over_cache(
    query: Array, cache: Cache, sight: Sight, kind: AttentionKind, sinks: Array | None = None
) -> Array:
    """`attended` over the columns of a cache. Shapes: query [*B, Q, heads, head_dim]. No gradient
    is meant to be taken."""
    size = block_size(query, cache.value.shape[-2])
    if size == query.shape[-3]:
        return _forward(query, cache, make_mask(sight, kind), kind.soft_cap, sinks)[0]
    return _forward_in_blocks(query, cache, sight, kind, size, sinks)[0]


def _forward_in_blocks(
    query: Array,
    cache: Cache,
    sight: Sight,
    kind: AttentionKind,
    size: int,
    sinks: Array | None,
):
    """Output, as the query, and the blocks' log-sum-exps [blocks, ..., size]."""

    def attend_block(block: tuple):
        query, mask = _with_mask(block[0], block[1], sight, kind)
        return _forward(query, cache, mask, kind.soft_cap, sinks)

    out, total = jax.lax.map(attend_block, (_blocks(query, size, -3), _asking(sight, size)))
    return _unblocked(out, query), total


def _with_mask(query: Array, asking: tuple[Array, Array | None], sight: Sight, kind: AttentionKind):
    """A block's queries and their mask, which is computed after them.

    Without the barrier JAX finds that masks depend on no parameter, and computes those of all
    blocks before a scan of layers that recomputes: an array [Q, N] for every head.
    """
    query, (position, segment) = jax.lax.optimization_barrier((query, asking))
    return query, make_mask(sight._replace(position=position, segment=segment), kind)


def _asking(sight: Sight, size: int) -> tuple[Array, Array | None]:
    """Positions and segments of the queries, block by block."""
    segment = None if sight.segment is None else _blocks(sight.segment, size, -1)
    return _blocks(sight.position, size, -1), segment


def _blocks(leaf: Array, size: int, axis: int) -> Array:
    """The queries along an axis as blocks [blocks, ..., size, ...], zeros after the last."""
    axis += leaf.ndim
    leaf = padded(leaf, -(-leaf.shape[axis] // size) * size, axis)
    leaf = leaf.reshape(*leaf.shape[:axis], -1, size, *leaf.shape[axis + 1 :])
    return jnp.moveaxis(leaf, axis, 0)


def padded(leaf: Array, size: int, axis: int) -> Array:
    """`size` entries along an axis: zeros, or False, after its own."""
    axis %= leaf.ndim
    missing = size - leaf.shape[axis]
    return jnp.pad(
        leaf, [(0, missing if dimension == axis else 0) for dimension in range(leaf.ndim)]
    )


def _unblocked(blocks: Array, like: Array) -> Array:
    """The inverse of `_blocks` along the queries of `like`."""
    leaf = jnp.moveaxis(blocks, 0, -4)
    leaf = leaf.reshape(*leaf.shape[:-4], -1, *leaf.shape[-2:])
    return leaf[..., : like.shape[-3], :, :]


def _forward(query: Array, cache: Cache, mask: Array, soft_cap: float | None, sinks: Array | None):
    """Output, as the query, and log-sum-exp [*B, kv_heads, shared, Q]."""
    part = partial_over(grouped(query, cache), cache, mask[..., None, None, :, :], soft_cap)
    part = with_sinks(part, sinks)
    out = ungrouped(part.value / part.total[..., None], query)
    return out, part.highest + jnp.log(part.total)


def _backward(
    query: Array,
    cache: Cache,
    mask: Array,
    out: Array,
    total: Array,
    cotangent: Array,
    soft_cap: float | None,
    sinks: Array | None,
) -> tuple[Array, tuple[Array, Array], Array | None]:
    """Gradients: of the queries, [*B, kv_heads, N, head_dim] of keys and values, of sinks; the
    last ones unrounded."""
    grouped_query, slope = grouped(query, cache), grouped(cotangent, cache)
    dtype = total.dtype
    einsum = functools.partial(jnp.einsum, preferred_element_type=dtype)
    # One product for all the queries that share a key's head.
    flat, flat_slope = (
        leaf.reshape(*leaf.shape[:-3], -1, leaf.shape[-1]) for leaf in (grouped_query, slope)
    )
    scores = _scores(grouped_query, cache, soft_cap)
    weight = jnp.exp(_masked(scores, mask[..., None, None, :, :]) - total[..., None])
    delta = (slope.astype(dtype) * grouped(out, cache).astype(dtype)).sum(-1)
    change = einsum("...ch,...nh->...cn", flat_slope, cache.value).reshape(weight.shape)
    change = weight * (change - delta[..., None])
    if soft_cap is not None:
        change = change * (1.0 - (scores / soft_cap) ** 2)
    change = change.astype(query.dtype).reshape(*flat.shape[:-1], -1)
    weight = weight.astype(cache.value.dtype).reshape(change.shape)
    d_query = einsum("...cn,...hn->...ch", change, cache.key).reshape(grouped_query.shape)
    d_key = einsum("...cn,...ch->...nh", change, flat)
    d_value = einsum("...cn,...ch->...nh", weight, flat_slope)
    d_sinks = None
    if sinks is not None:
        sink_weight = jnp.exp(sinks.astype(dtype).reshape(*total.shape[-3:-1], 1) - total)
        d_sinks = -(sink_weight * delta).sum((*range(total.ndim - 3), -1)).reshape(-1)
    return ungrouped(d_query, query), (d_key, d_value), d_sinks


def _from_heads_first(gradient: Array, dtype: jnp.dtype) -> Array:
    """[*B, kv_heads, N, head_dim] as the keys and values that were given."""
    return jnp.moveaxis(gradient, -3, -2).astype(dtype)


class Partial(NamedTuple):
    """Attention over some of the keys, to be joined with that over others."""

    value: Array  # [..., Q, head_dim], sum of exp(score - highest) * value
    highest: Array  # [..., Q]
    total: Array  # [..., Q], sum of exp(score - highest)


def partial_over(query: Array, cache: Cache, mask: Array, soft_cap: float | None = None) -> Partial:
    """Attention of queries [*B, kv_heads, shared, Q, head_dim] over the columns of a cache.

    Where a query sees no column, `highest` is the lowest finite number, so that joined with another
    part it weighs nothing.
    """
    *batch, shared, width, _ = query.shape
    scores = _masked(_scores(query, cache, soft_cap), mask)
    highest = scores.max(-1)
    weight = jnp.exp(scores - highest[..., None])
    flat = weight.reshape(*batch, shared * width, -1).astype(query.dtype)
    value = times_cache("...cn,...nh->...ch", flat, cache.value)
    return Partial(value.reshape(*batch, shared, width, -1), highest, weight.sum(-1))


def _scores(query: Array, cache: Cache, soft_cap: float | None) -> Array:
    """Scores [*B, kv_heads, shared, Q, columns] in at least float32, of all columns: one product
    for all the queries that share a key's head."""
    *batch, shared, width, head_dim = query.shape
    flat = query.reshape(*batch, shared * width, head_dim)
    scores = times_cache("...ch,...hn->...cn", flat, cache.key)
    return soft_capped(scores.reshape(*batch, shared, width, -1), soft_cap)


def times_cache(axes: str, rows: Array, cached: Array) -> Array:
    """The product of rows [..., c, k] with a cache's keys or values, in at least float32.

    A cache in bfloat16 is never converted: XLA on a CPU would convert what a loop only reads before
    the loop, so that a second cache, and a wider one, lay beside the first. The rows are cut into
    pieces of the cache's dtype instead, whose sum they are, and the pieces multiplied. One in fp8,
    of whose 4 bits it would take 6 pieces, is converted: on GPUs and TPUs inside the product.
    """
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, axes, preferred_element_type=dtype)
    if cached.dtype == FP8:
        cached = cached.astype(rows.dtype)
    if rows.dtype == cached.dtype:
        return product(rows, cached)
    out = product(jnp.concatenate(pieces(rows, cached.dtype), axis=-2), cached)
    return functools.reduce(jnp.add, jnp.split(out, out.shape[-2] // rows.shape[-2], axis=-2))


def _masked(scores: Array, mask: Array) -> Array:
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)


def empty_partial(query: Array, cache: Cache) -> Partial:
    """`partial_over` where no query sees any column."""
    shape = jax.eval_shape(partial_over, query, cache, jnp.zeros((), bool))
    value, highest, total = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in shape)
    return Partial(value, highest + jnp.finfo(highest.dtype).min, total)


def joined(parts: Sequence[Partial]) -> Array:
    """Attention over the keys of all parts."""
    highest = functools.reduce(jnp.maximum, (part.highest for part in parts))
    scale = [jnp.exp(part.highest - highest) for part in parts]
    pairs = list(zip(parts, scale, strict=True))
    value = functools.reduce(jnp.add, (part.value * factor[..., None] for part, factor in pairs))
    total = functools.reduce(jnp.add, (part.total * factor for part, factor in pairs))
    return value / total[..., None]


def with_sinks(part: Partial, sinks: Array | None) -> Partial:
    """A part with a score more for each head, of a key whose value is 0. Shape: sinks [heads]."""
    if sinks is None:
        return part
    score = sinks.astype(part.highest.dtype).reshape(*part.highest.shape[-3:-1], 1)
    highest = jnp.maximum(part.highest, score)
    factor = jnp.exp(part.highest - highest)
    total = part.total * factor + jnp.exp(score - highest)
    return Partial(part.value * factor[..., None], highest, total)


def heads_first(key: Array, value: Array) -> Cache:
    """Keys and values [*B, N, kv_heads, head_dim] in the layout of a cache."""
    return Cache(jnp.moveaxis(key, -3, -1), jnp.moveaxis(value, -3, -2))


def grouped(query: Array, cache: Cache) -> Array:
    """[*B, Q, heads, head_dim] as [*B, kv_heads, heads per kv head, Q, head_dim]."""
    *batch, width, heads, head_dim = query.shape
    kv_heads = cache.value.shape[-3]
    by_group = query.reshape(*batch, width, kv_heads, heads // kv_heads, head_dim)
    return jnp.moveaxis(by_group, -4, -2)


def ungrouped(out: Array, like: Array) -> Array:
    """The inverse of `grouped`, in the dtype of the query and, but for head_dim, its shape."""
    return jnp.moveaxis(out, -2, -4).reshape(*like.shape[:-1], -1).astype(like.dtype)


def take_per_bin(values: Array, index: Array) -> Array:
    """Entries [D, n, ...] of values [D, N, ...] at [D, n], bin by bin."""
    return jax.vmap(lambda values, index: values[index])(values, index)
