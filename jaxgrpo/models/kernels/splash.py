"""Attention on a TPU by the splash kernel of JAX, which keeps no scores in memory.

One call computes a row over its prompt and itself. The kernel masks by a function of one number
per query and of the column of a key, and by ids that must be equal. So a prompt is laid out to end
where its row begins: the distance between a query and a key then follows from their places alone.
The number of a query holds its place in the row and that where its sample begins. This honours
several samples per row, windows and soft caps; `refusals` lists what it does not.

Source: the kernel, jax.experimental.pallas.ops.tpu.splash_attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import Mesh

from jaxgrpo.models import sharding
from jaxgrpo.models.api import Attend, AttentionKind, KeyValue, ModelConfig
from jaxgrpo.models.kernels.plain import SAVED, check_kind, lacking, padded, take_per_bin

BLOCKS = (512, 256, 128)  # queries or keys that the kernel computes at a time
LONGEST = 2**16  # tokens of a row: two places share an int32


def refusals(config: ModelConfig, row: int, mesh: Mesh | None = None) -> list[str]:
    """What splash cannot compute of a model on rows of this many tokens; empty if nothing."""
    problems = []
    if config.dtype not in ("float32", "bfloat16"):
        problems.append(f"model.dtype = {config.dtype}: it takes bfloat16 or float32")
    if row > LONGEST:
        problems.append(f"rows of {row} tokens: it takes at most {LONGEST}")
    problems += lacking(config.attention)
    if mesh is not None and mesh.shape["context"] > 1:
        problems.append(f"mesh.context = {mesh.shape['context']}: a device must have whole rows")
    return problems


def causal(
    position: Array, valid: Array, *, mesh: Mesh | None = None, interpret: bool = False
) -> Attend:
    """`attention.causal` by the kernel. Positions must count from 0 along the sequence.

    Sequences where they do not give NaN: the mask cannot be expressed. What a query that is not
    valid gets differs from `attention.causal`.

    Args:
      mesh: that the leading dimension and the heads are laid out on; there XLA cannot divide the
        kernel by itself.
      interpret: computes the kernel without a TPU, slowly, as a test does.
    """

    def attend(query, key, value, memory, kind: AttentionKind, sinks=None):
        del memory
        width = query.shape[-3]
        expected = (position == jnp.arange(width)) | ~valid
        fits = expected.all(-1, keepdims=True)
        start = jnp.zeros(position.shape, jnp.int32)
        ids = valid.astype(jnp.int32)
        check_kind("splash", kind)
        run = functools.partial(_over_batch, kind=kind, prefix=0, interpret=interpret)
        out = _on_mesh(mesh, run)(query, key, value, start, ids, ids)
        return _where(fits, out), KeyValue(key, value)

    return attend


def rows_with_prefix(
    segment: Array,
    position: Array,
    row_prompt: Array,
    prompt_length: Array,
    alone: Array | None = None,
    *,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> Attend:
    """`attention.rows_with_prefix` by the kernel. Samples must lie one after another in a row.

    Each in one piece, with positions that count from its prompt's length, or from 0 where it is
    alone, and segments that rise, as in the batches of `update.packing`. Rows in which they do not
    give NaN.

    Args:
      mesh, interpret: see `causal`.
    """
    length = jnp.take_along_axis(prompt_length, row_prompt, axis=1)  # [D, R]

    def attend(query, key, value, memory: KeyValue, kind: AttentionKind, sinks=None):
        start = starts(segment)
        first = length[..., None] if alone is None else jnp.where(alone, 0, length[..., None])
        fits = in_order(segment, position, start, first)
        size = _in_blocks(memory.key.shape[2])
        keys, values = (
            jnp.concatenate(
                [_right_aligned(take_per_bin(prompt, row_prompt), length, size), row], axis=-3
            )
            for prompt, row in zip(memory, (key, value), strict=True)
        )
        hidden = jnp.arange(keys.shape[-3]) < size - length[..., None]
        # Every query is for all keys that are real: samples are told apart by their start.
        query_ids, key_ids = jnp.ones_like(segment), 1 - hidden.astype(jnp.int32)
        if alone is not None:  # but those that are alone are for one another
            query_ids += alone
            key_ids = key_ids.at[..., size:].set(query_ids)
        check_kind("splash", kind)
        run = functools.partial(_over_batch, kind=kind, prefix=size, interpret=interpret)
        out = _on_mesh(mesh, run)(query, keys, values, start, query_ids, key_ids)
        return _where(fits, out), None

    return attend


def starts(segment: Array) -> Array:
    """[..., Q]: the place where the segment of each place begins."""
    previous = jnp.pad(segment[..., :-1], [(0, 0)] * (segment.ndim - 1) + [(1, 0)])
    place = jnp.arange(segment.shape[-1], dtype=jnp.int32)
    first = (segment != previous) | (place == 0)
    return jax.lax.cummax(jnp.where(first, place, 0), axis=segment.ndim - 1)


def in_order(segment: Array, position: Array, start: Array, first: Array) -> Array:
    """[..., 1]: whether segments rise along a row, and the positions of each count from `first`."""
    real = segment > 0
    place = jnp.arange(segment.shape[-1])
    counted = position == first + place - start
    highest = jax.lax.cummax(segment, axis=segment.ndim - 1)
    return (counted & (segment == highest) | ~real).all(-1, keepdims=True)


class Sees(NamedTuple):
    """The mask in the kernel: whether a query sees the key of a column.

    Columns before `prefix` hold the prompt, which ends there. A NamedTuple, since equal masks must
    be equal to share a compiled kernel.
    """

    prefix: int
    window: int | None

    def __call__(self, query: Array, column: Array) -> Array:
        start, place = (query >> 16) + LONGEST // 2, query & 0xFFFF
        offset = column - self.prefix  # below 0 in the prompt, counted from its end
        visible = (offset <= place) & (jnp.where(offset < 0, start, offset) >= start)
        if self.window is not None:
            visible = visible & (place - offset - jnp.where(offset < 0, start, 0) < self.window)
        return visible


class Reach(splash_attention.Mask):
    """Blocks that hold a key which a query may see, wherever its sample begins; no others are
    computed.

    A block is all true or all false here. Inside it the kernel masks by `mask_function`, always,
    from the numbers of the queries, which are given when it runs.
    """

    def __init__(self, shape: tuple[int, int], sees: Sees):
        self.sizes: tuple[int, int] = shape
        self.mask_function: Sees = sees
        self.q_sequence: np.ndarray = np.zeros(shape[0], np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        (first, last), (begins, ends) = (
            span.indices(size)[:2] for span, size in zip(block, self.sizes, strict=True)
        )
        sees, shape = self.mask_function, (last - first, ends - begins)
        begins, ends = begins - sees.prefix, ends - 1 - sees.prefix  # as places in the row
        reached = begins < last
        if sees.window is not None and (begins >= 0 or ends < 0):
            # A prompt is nearest to the query that begins a sample, at any place.
            nearest = (first if begins >= 0 else 0) - ends
            reached = reached and nearest < sees.window
        return np.broadcast_to(reached, shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reach) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple[Any, ...]:
        return self.sizes, self.mask_function


def _on_mesh(mesh: Mesh | None, run: Callable[..., Array]) -> Callable[..., Array]:
    """`_over_batch` on each device's bins and heads."""
    if mesh is None or mesh.size == 1:
        return run
    heads, ids = ("bins", "rows", None, "heads", None), ("bins", "rows", None)

    def on_devices(*arrays: Array) -> Array:
        specs = (
            sharding.in_part(mesh, sharding.spec(axes), leaf.shape)
            for axes, leaf in zip((heads,) * 3 + (ids,) * 3, arrays, strict=True)
        )
        query_spec, *other_specs = specs
        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(query_spec, *other_specs),
            out_specs=query_spec,
            check_vma=False,
        )(*arrays)

    return on_devices


def _over_batch(
    query: Array,
    key: Array,
    value: Array,
    start: Array,
    query_ids: Array,
    key_ids: Array,
    *,
    kind: AttentionKind,
    prefix: int,
    interpret: bool,
) -> Array:
    """Queries [*B, Q, heads, head_dim] over keys [*B, N, kv_heads, head_dim], as Q.

    Args:
      start: [*B, Q], the place where the sample of each query begins.
      query_ids, key_ids: [*B, Q] and [*B, N], ids of queries and keys that must be equal.
      prefix: columns of the prompt among the N.
    """
    *batch, width, heads, _ = query.shape
    size, columns = _in_blocks(width), _in_blocks(key.shape[-3])
    place = jnp.arange(size, dtype=jnp.int32)
    kernel_kind = kind._replace(rope=None)  # layers that differ in it alone share a kernel
    kernel = _kernel(size, columns, heads, prefix, kernel_kind, interpret)
    # Places after the last query see themselves.
    number = (padded(start, size, -1) - LONGEST // 2 << 16) | place
    ids = splash_attention.SegmentIds(
        *(padded(leaf, length, -1) for leaf, length in ((query_ids, size), (key_ids, columns)))
    )
    inputs = [
        jnp.moveaxis(padded(leaf, length, -3), -3, -2)
        for leaf, length in ((query, size), (key, columns), (value, columns))
    ]

    def attend(number: Array, ids: splash_attention.SegmentIds, *inputs: Array) -> Any:
        return _with_numbers(kernel, number)(*inputs, ids)

    for _ in batch:
        attend = jax.vmap(attend)
    return jnp.moveaxis(attend(number, ids, *inputs), -3, -2)[..., :width, :, :]


@functools.lru_cache(maxsize=64)
def _kernel(
    size: int, columns: int, heads: int, prefix: int, kind: AttentionKind, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    """The kernel without the numbers of its queries."""
    query_block, key_block = (
        next(block for block in BLOCKS if length % block == 0) for length in (size, columns)
    )
    blocks = splash_attention.BlockSizes(
        block_q=query_block,
        block_kv=key_block,
        block_q_dkv=query_block,
        block_kv_dkv=key_block,
        block_q_dq=query_block,
        block_kv_dq=key_block,
    )
    mask = Reach((size, columns), Sees(prefix, kind.window))
    # Its tables are made of NumPy arrays: here, and not as a part of what is being traced.
    with jax.ensure_compile_time_eval():
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([mask] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=kind.soft_cap,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _with_numbers(
    kernel: splash_attention_kernel.SplashAttentionKernel, number: Array
) -> splash_attention_kernel.SplashAttentionKernel:
    tables: Any = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return type(kernel)(*(table._replace(q_sequence=number) for table in tables), **kernel.kwargs)


def _right_aligned(prompt: Array, length: Array, size: int) -> Array:
    """Prompts [D, R, S, ...] in `size` places, so that what is real of them is at the end."""

    def shift(prompt: Array, length: Array) -> Array:
        wide = jnp.pad(prompt, [(size, 0), (0, 0), (0, 0)])
        return jax.lax.dynamic_slice_in_dim(wide, length, size)

    return jax.vmap(jax.vmap(shift))(prompt, length)


def _in_blocks(size: int) -> int:
    """As many tokens as blocks hold."""
    return -(-size // BLOCKS[-1]) * BLOCKS[-1]


def _where(fits: Array, out: Array) -> Array:
    """NaN in the rows that are not as the kernel needs them."""
    return jnp.where(fits[..., None, None], out, jnp.nan)
