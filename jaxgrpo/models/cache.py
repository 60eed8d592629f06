"""What decoding keeps of each layer: keys and values of prompts, and rings of the slots' tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.models.api import ModelConfig

FEWEST_COLUMNS = 32  # of a part
PARTS = 3
"""Parts of what is older in a ring, each read whole or not at all: with more, less is read while
samples are short, but each costs a few operations per layer, and their compilation."""

FP8 = "float8_e4m3fn"

LINES = 64
"""Columns of `Lines` that a kernel reads at a time."""


class Cache(NamedTuple):
    """Keys and values of one layer as decoding reads them: heads first, and keys turned.

    Both products of a decoding step then run along contiguous memory: with positions before heads,
    or keys not turned, XLA transposes and copies the whole cache at every token.
    """

    key: Array  # [*B, kv_heads, head_dim, columns]
    value: Array  # [*B, kv_heads, columns, head_dim]


class Lines(NamedTuple):
    """Keys and values of one layer as a kernel reads them: heads first, token after token.

    Those of a sequence begin at column 0 and are as many as it has tokens.
    """

    key: Array  # [*B, kv_heads, columns, head_dim]
    value: Array  # same shape

    @classmethod
    def columns(cls, tokens: int) -> int:
        """Columns for so many tokens, in whole blocks."""
        return -(-tokens // LINES) * LINES


class Ring(NamedTuple):
    """The slots' own tokens in one layer. All slots write at one column, the step's.

    A block is a few steps. The current one is apart: a column of turned keys touches a line of
    memory per head and component, and in a small array those lines stay near. What is older is cut
    into parts, so that a step reads no part that none of its slots needs.
    """

    recent: Cache  # columns: a block
    older: tuple[Cache, ...]  # parts of equally many columns, block after block, round and round


def cache_dtype(setting: str, config: ModelConfig) -> str:
    """The dtype of a model's keys and values while it decodes, as rollout.kv_cache_dtype asks."""
    return {"auto": config.dtype, "fp8": FP8}.get(setting, setting)


def narrowed(x: Array, dtype: jnp.dtype) -> Array:
    """x in the dtype of a cache or of a kernel. In fp8 what is too large becomes the largest number
    that there is, 448: a conversion alone would make it NaN."""
    largest = jnp.finfo(FP8).max.astype(x.dtype) if dtype == FP8 else None
    return (x if largest is None else jnp.clip(x, -largest, largest)).astype(dtype)


def older_parts(tokens: int, block: int) -> tuple[int, int]:
    """Parts of a ring and columns of each, so that the last `tokens` tokens are always there.

    One block more than the tokens: until the current block is full, its columns hold what they held
    one turn before.
    """
    needed = tokens + block - 1
    columns = max(FEWEST_COLUMNS, -(-needed // PARTS))
    columns = -(-columns // block) * block
    return -(-needed // columns), columns


def written(ring: Ring, clock: Array, key: Array, value: Array) -> Ring:
    """The ring with one more token per slot, in the ring's dtype.

    Shapes: key, value [B, kv_heads, head_dim].
    """
    column = clock % ring.recent.value.shape[-2]

    def write(target: Array, entry: Array, axis: int) -> Array:
        entry = narrowed(jnp.expand_dims(entry, axis), target.dtype)
        return jax.lax.dynamic_update_slice_in_dim(target, entry, column, axis=axis)

    recent = Cache(write(ring.recent.key, key, -1), write(ring.recent.value, value, -2))
    return ring._replace(recent=recent)


def settled(ring: Ring, clock: Array) -> Ring:
    """The ring with its current block among the older ones too, after `clock` steps.

    Of a block that is not full the rest is written as well: no slot reads those columns any more.
    """
    block, columns = ring.recent.value.shape[-2], ring.older[0].value.shape[-2]
    begin = (clock - 1) // block * block % (columns * len(ring.older))

    def over_all(part: int, axis: int, target: Array, recent: Array) -> Array:
        ago = jnp.arange(columns) + part * columns - begin
        in_block = (ago >= 0) & (ago < block)
        repeats = [1] * recent.ndim
        repeats[axis] = columns // block
        in_block = jnp.expand_dims(in_block, tuple(range(axis + 1, 0)))
        return jnp.where(in_block, jnp.tile(recent, repeats), target)

    def over_block(part: int, axis: int, target: Array, recent: Array) -> Array:
        offset = jnp.clip(begin - part * columns, 0, columns - block)
        stored = jax.lax.dynamic_slice_in_dim(target, offset, block, axis)
        recent = jnp.where(begin // columns == part, recent, stored)
        return jax.lax.dynamic_update_slice_in_dim(target, recent, offset, axis)

    def place(target: Array, recent: Array, part: int, axis: int) -> Array:
        block_alone = functools.partial(over_block, part, axis)
        if target.dtype != jnp.bfloat16:
            return block_alone(target, recent)
        # On a CPU XLA writes bfloat16 through float32, and a block of it only into a copy.
        every_column = functools.partial(over_all, part, axis)
        return jax.lax.platform_dependent(target, recent, cpu=every_column, default=block_alone)

    older = [
        Cache(place(key, ring.recent.key, part, -1), place(value, ring.recent.value, part, -2))
        for part, (key, value) in enumerate(ring.older)
    ]
    return ring._replace(older=tuple(older))


def ages(ring: Ring, clock: Array) -> list[Array]:
    """Steps since each column was written, of the recent block and of every older part.

    Negative where the recent block's columns are of steps to come; columns that are to be read no
    more have an age above all tokens that a ring holds.
    """
    block, columns = ring.recent.value.shape[-2], ring.older[0].value.shape[-2]
    offset = clock % block
    last = clock - offset - 1  # the last step before this block
    places = jnp.arange(columns * len(ring.older))
    older = (last - places) % places.size + 1 + offset
    return [offset - jnp.arange(block), *jnp.split(older, len(ring.older))]
