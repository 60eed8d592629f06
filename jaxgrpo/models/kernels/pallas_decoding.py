"""Attention of a decoding step on a GPU by two kernels, which read live tokens only.

The first, of JAX, attends to the prompts, each read once for all the samples of its group. The
second begins with what that gives, goes on over the slot's own tokens as far as it has come, and
writes the new one. So no part of a cache is read in vain, nothing is joined afterwards, and keys
are never copied. `refusals` lists what they cannot compute.

Source: the first, jax.experimental.pallas.ops.gpu.decode_attention. The second sums as it does:
FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import CompilerParams, dot, load, store

from jaxgrpo.models.api import Model
from jaxgrpo.models.cache import FP8, LINES, Lines
from jaxgrpo.models.kernels import compute_capability, not_of_nvidia
from jaxgrpo.models.kernels.plain import Partial, lacking

with warnings.catch_warnings():  # JAX 0.11 says that it will leave it out
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.decode_attention import attn_forward_kernel

QUERIES = 16  # the fewest rows of a product on a GPU
PROGRAMS = 512
"""Blocks of threads that a call over prompts should have; an H100 runs some 400 at once. Where it
has fewer, the tokens of each prompt are split among several."""
WARPS, STAGES = 4, 3  # of a block of threads; blocks of LINES tokens that are loaded ahead
NARROWEST_HEAD, WIDEST_HEAD = 16, 256
LEAST, LEAST_FOR_FP8 = 8.0, 8.9  # compute capability of an NVIDIA GPU


def refusals(device: Any, model: Model, dtype: str) -> list[str]:
    """What the kernels cannot compute of a model's decoding; empty if nothing.

    Args:
      device: a GPU.
      dtype: of keys and values.
    """
    problems, config = not_of_nvidia(device), model.config
    size, shared = config.head_dim, config.num_heads // config.num_kv_heads
    capability = compute_capability(device) or LEAST_FOR_FP8
    if capability < LEAST:
        problems.append(f"compute capability {capability}: it takes {LEAST} and above")
    if config.dtype != "bfloat16":
        problems.append(f"model.dtype = {config.dtype}: it takes bfloat16")
    if config.float32_attention:
        problems.append("model.float32_attention: it takes queries of 16 bits")
    if dtype not in (config.dtype, FP8):
        problems.append(f"keys and values in {dtype}: it takes the model's dtype, or fp8")
    if dtype == FP8 and capability < LEAST_FOR_FP8:
        problems.append(f"compute capability {capability}: fp8 takes {LEAST_FOR_FP8} and above")
    if size & (size - 1) or not NARROWEST_HEAD <= size <= WIDEST_HEAD:
        sizes = f"{NARROWEST_HEAD} to {WIDEST_HEAD}"
        problems.append(f"head_dim = {size}: it takes powers of two from {sizes}")
    if shared > QUERIES:
        problems.append(f"{shared} heads for one of keys: it takes at most {QUERIES}")
    if any(kind.window is not None for kind in config.attention):
        problems.append("windows: the samples of a group would see their prompt from other tokens")
    return problems + lacking(config.attention, "soft_cap")


class _Widened(NamedTuple):
    """A reference whose numbers are read in another dtype; it is read by blocks."""

    ref: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    def __getitem__(self, index: Any) -> Array:
        return self.ref[index].astype(self.dtype)


def over_prompts(query: Array, prompts: Lines, length: Array, interpret: bool = False) -> Partial:
    """Attention to the first `length` tokens of each prompt, in float32; the query comes scaled.

    It is in parts, the tokens of a prompt split among them. A part without tokens has the lowest
    finite number as `highest`, and a total of 0.

    Args:
      interpret: computes the kernel without a GPU, slowly, as a test does.

    Shapes: query [A, kv_heads, readers, shared, head_dim]; prompts [A, kv_heads, columns,
    head_dim]; length [A]. Parts [A, kv_heads, parts, readers, shared, ...].
    """
    rows, kv_heads, readers, shared, size = query.shape
    pairs, columns, width = rows * kv_heads, prompts.value.shape[-2], readers * shared
    block = LINES if columns % LINES == 0 else columns & -columns
    blocks, parts = -(-width // QUERIES), 1
    while pairs * blocks * parts < PROGRAMS and columns % (2 * parts * block) == 0:
        parts *= 2

    attend: Any = attn_forward_kernel
    attend = functools.partial(
        attend, sm_scale=1.0, block_k=block, block_h=QUERIES, num_heads=width
    )

    def kernel(query_ref: Any, key_ref: Any, value_ref: Any, length_ref: Any, *out_refs: Any):
        keys, values = (_Widened(ref, query.dtype) for ref in (key_ref, value_ref))
        attend(query_ref, keys, values, None, length_ref, *out_refs)

    lines_spec = pl.BlockSpec((None, columns // parts, size), lambda i, part: (part, 0, 0))
    query_spec = pl.BlockSpec((QUERIES, size), lambda i, part: (i, 0))
    value_spec = pl.BlockSpec((None, QUERIES, size), lambda i, part: (part, i, 0))
    sums_spec = pl.BlockSpec((None, QUERIES), lambda i, part: (part, i))
    sums = jax.ShapeDtypeStruct((parts, width), jnp.float32)
    over_prompt = pl.pallas_call(
        kernel,
        grid=(blocks, parts),
        in_specs=[query_spec, lines_spec, lines_spec, pl.BlockSpec((), lambda i, part: ())],
        out_specs=[value_spec, sums_spec, sums_spec],
        out_shape=[jax.ShapeDtypeStruct((parts, width, size), jnp.float32), sums, sums],
        compiler_params=CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="decode_prompts",
    )
    value, total, highest = jax.vmap(over_prompt)(
        query.reshape(pairs, width, size),
        *(leaf.reshape(pairs, parts, columns // parts, size) for leaf in prompts),
        jnp.repeat(length, kv_heads),
    )
    shape = rows, kv_heads, parts, readers, shared
    return Partial(value.reshape(*shape, size), highest.reshape(shape), total.reshape(shape))


def over_slots(
    query: Array,
    token: Array,
    slots: Lines,
    index: Array,
    place: Array,
    prompt_parts: Partial,
    interpret: bool = False,
) -> tuple[Array, Lines]:
    """Attention of slots to their prompts and own tokens, the new one too, which is written.

    Args:
      query, prompt_parts: of `over_prompts`, the same rows for each of D bins.
      token: key and value of the new token.
      index: tokens of each slot before it.
      place: of each slot in its bin: the reader and row that it is, row * readers + reader.
      interpret: as in `over_prompts`.

    Shapes: slots [D * N, kv_heads, columns, head_dim]; token [D * N, kv_heads, 2, head_dim]; index,
    place [D, N]. Returns the output [D * N, kv_heads, shared, head_dim], and the slots' keys and
    values with the new token.
    """
    batch, kv_heads, columns, size = slots.value.shape
    rows, shared = query.shape[0] // len(index), query.shape[3]

    def per_slot(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda slot, head: (slot, head, 0, 0))

    def everything(leaf: Array) -> pl.BlockSpec:
        return pl.BlockSpec(leaf.shape, lambda slot, head: (0,) * leaf.ndim)

    number = pl.BlockSpec((None,), lambda slot, head: (slot,))
    lines_spec = per_slot(columns, size)
    place_specs = [everything(leaf) for leaf in (query, *prompt_parts)]
    out, key, value = pl.pallas_call(
        functools.partial(_over_slot, rows, index.shape[1]),
        grid=(batch, kv_heads),
        in_specs=[number, number, *place_specs, per_slot(2, size), lines_spec, lines_spec],
        out_specs=[per_slot(QUERIES, size), lines_spec, lines_spec],
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, shared, size), query.dtype),
            *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in slots),
        ],
        input_output_aliases={7: 1, 8: 2},
        compiler_params=CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="decode_slots",
    )(index.reshape(-1), place.reshape(-1), query, *prompt_parts, token, *slots)
    return out, Lines(key, value)


def _over_slot(rows: int, slots: int, index_ref: Any, place_ref: Any, *refs: Any) -> None:
    """The heads of one slot that share a head of keys.

    Args:
      rows, slots: of a bin.
    """
    query_ref, *part_refs, token_ref, key_ref, value_ref, out_ref, key_out, value_out = refs
    index, place, head = index_ref[()], place_ref[()], pl.program_id(1)
    _, _, parts, readers, shared = part_refs[1].shape
    heads, row = jnp.arange(QUERIES), pl.program_id(0) // slots * rows + place // readers
    # What is computed beyond the last head is that head again, and not stored.
    reader = place % readers, jnp.minimum(heads, shared - 1)
    query = query_ref[(row, head, *reader, slice(None))]

    def over_block(block: Array, before: Partial) -> Partial:
        columns = pl.ds(block * LINES, LINES)
        is_live = block * LINES + jnp.arange(LINES) < index
        key, value = (
            load(ref.at[columns, :], mask=is_live[:, None], other=0.0).astype(query.dtype)
            for ref in (key_ref, value_ref)
        )
        score = dot(query, key.T)
        score = jnp.where(is_live[None, :], score, jnp.finfo(score.dtype).min)
        highest = score.max(-1)
        weight = jnp.exp(score - highest[:, None])
        summed = dot(weight.astype(value.dtype), value)
        return _join(before, Partial(summed, highest, weight.sum(-1)))

    parts_at = [(row, head, part, *reader) for part in range(parts)]
    prompt = [
        Partial(part_refs[0][(*at, slice(None))], *(ref[at] for ref in part_refs[1:]))
        for at in parts_at
    ]
    before = jax.lax.fori_loop(
        0, pl.cdiv(index, LINES), over_block, functools.reduce(_join, prompt)
    )
    key, value = token_ref[0, :], token_ref[1, :]
    score = (query.astype(jnp.float32) * key.astype(jnp.float32)[None, :]).sum(-1)
    new_value = jnp.broadcast_to(value.astype(jnp.float32)[None, :], query.shape)
    out = _join(before, Partial(new_value, score, jnp.ones_like(score)))
    out = (out.value / out.total[:, None]).astype(out_ref.dtype)
    store(out_ref, out, mask=(heads < shared)[:, None])
    key_out[index, :], value_out[index, :] = key, value


def _join(left: Partial, right: Partial) -> Partial:
    """The sums over the keys of two parts."""
    highest = jnp.maximum(left.highest, right.highest)
    scales = [jnp.exp(part.highest - highest) for part in (left, right)]
    value = left.value * scales[0][:, None] + right.value * scales[1][:, None]
    return Partial(value, highest, left.total * scales[0] + right.total * scales[1])
