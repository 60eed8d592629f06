"""What decoding keeps of each layer: keys and values of prompts, and rings of the slots' tokens."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
    """The dtype of a model's keys and values while it decodes, as rollout.kv_cache_dtype asks.

    "auto": that of queries, keys and values as they are computed, in sampling and training.
    """
    wide = str(jnp.promote_types(config.dtype, jnp.float32))
    computed = wide if config.float32_attention else config.dtype
    return {"auto": computed, "fp8": FP8}.get(setting, setting)


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


def settled(ring: Ring, clock: Array, is_kept: Array | None = None) -> Ring:
    """The ring with its current block among the older ones too, after `clock` steps.

    Of a block that is not full the rest is written as well: no slot reads those columns any more.

    Args:
      is_kept: [B] bool, slots that have written nothing, and keep what they have; None: none.
    """
    block, columns = ring.recent.value.shape[-2], ring.older[0].value.shape[-2]
    begin = (clock - 1) // block * block % (columns * len(ring.older))
    is_new = jnp.bool_(True) if is_kept is None else ~is_kept[:, None, None, None]

    def over_all(part: int, axis: int, target: Array, recent: Array) -> Array:
        ago = jnp.arange(columns) + part * columns - begin
        in_block = (ago >= 0) & (ago < block)
        repeats = [1] * recent.ndim
        repeats[axis] = columns // block
        in_block = jnp.expand_dims(in_block, tuple(range(axis + 1, 0)))
        return jnp.where(in_block & is_new, jnp.tile(recent, repeats), target)

    def over_block(part: int, axis: int, target: Array, recent: Array) -> Array:
        offset = jnp.clip(begin - part * columns, 0, columns - block)
        stored = jax.lax.dynamic_slice_in_dim(target, offset, block, axis)
        recent = jnp.where((begin // columns == part) & is_new, recent, stored)
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


def moved_up(ring: Ring, slot: Array, by: Array) -> Ring:
    """The ring with the older columns of some slots so many columns later.

    Shapes: [D] each, of one slot of each bin.
    """
    bins, number = len(slot), len(ring.older)

    def move(slot: Array, by: Array, parts: list[Array], axis: int) -> list[Array]:
        """Of one bin, [N, ...] each."""
        old = [jax.lax.dynamic_index_in_dim(part, slot, keepdims=False) for part in parts]
        moved = jnp.roll(jnp.concatenate(old, axis), by, axis)
        new = zip(parts, jnp.split(moved, number, axis), strict=True)
        return [jax.lax.dynamic_update_index_in_dim(part, leaf, slot, 0) for part, leaf in new]

    def move_in_bins(leaves: list[Array], axis: int) -> list[Array]:
        parts = [leaf.reshape(bins, -1, *leaf.shape[1:]) for leaf in leaves]
        if bins == 1:  # a slice, and no gather
            moved = move(slot[0], by[0], [part[0] for part in parts], axis)
        else:
            along = functools.partial(move, axis=axis)
            moved = jax.vmap(along)(slot, by, parts)
        return [leaf.reshape(old.shape) for leaf, old in zip(moved, leaves, strict=True)]

    keys = move_in_bins([part.key for part in ring.older], -1)
    values = move_in_bins([part.value for part in ring.older], -2)
    return ring._replace(older=tuple(map(Cache, keys, values)))


def slot_cache(slots: Ring | Lines, slot: Array) -> Cache:
    """What some slots hold, all columns; beyond the last slot, what the last one does.

    Shapes: slot [D, R] -> [D, R, kv_heads, ...].
    """

    def take(leaf: Array) -> Array:
        per_bin = leaf.reshape(len(slot), -1, *leaf.shape[1:])
        return jax.vmap(lambda values, slot: values.at[slot].get(mode="clip"))(per_bin, slot)

    if isinstance(slots, Lines):
        return turned(Lines(*map(take, slots)))
    keys, values = ([take(leaf) for leaf in leaves] for leaves in zip(*slots.older, strict=True))
    return Cache(jnp.concatenate(keys, -1), jnp.concatenate(values, -2))


def turned(lines: Lines) -> Cache:
    return Cache(jnp.swapaxes(lines.key, -1, -2), lines.value)


def with_chunk(slots: Ring | Lines, slot: Array, chunk: Cache, begin: Array, size: Array) -> Any:
    """What the slots hold, with chunks of tokens in columns from `begin` on, and round in a ring.

    Args:
      chunk: [D, R, kv_heads, ...], W columns, of which the first `size` [D, R] are real.
      slot, begin: [D, R]; beyond the last slot nothing is written.
    """
    bins, width = len(slot), chunk.value.shape[-2]

    def put(leaf: Array, new: Array) -> Array:
        per_bin = leaf.reshape(bins, -1, *leaf.shape[1:])
        put_bin = lambda values, slot, new: values.at[slot].set(new, mode="drop")  # noqa: E731
        return jax.vmap(put_bin)(per_bin, slot, narrowed(new, leaf.dtype)).reshape(leaf.shape)

    before = slot_cache(slots, slot)
    columns = before.value.shape[-2]
    if isinstance(slots, Lines):
        number = jnp.arange(columns) - begin[..., None]
        is_new = (number >= 0) & (number < size[..., None])
    else:  # of tokens that share a column the last one stays
        number = (jnp.arange(columns) - begin[..., None]) % columns
        is_new = number < size[..., None]
        number += jnp.maximum(size[..., None] - 1 - number, 0) // columns * columns
    number = jnp.clip(number, 0, width - 1)[:, :, None]  # [D, R, 1, columns]
    key = jnp.take_along_axis(chunk.key, number[..., None, :], axis=-1)
    value = jnp.take_along_axis(chunk.value, number[..., None], axis=-2)
    key = jnp.where(is_new[:, :, None, None], key, before.key)
    value = jnp.where(is_new[:, :, None, :, None], value, before.value)
    if isinstance(slots, Lines):
        return Lines(put(slots.key, jnp.swapaxes(key, -1, -2)), put(slots.value, value))
    parts = len(slots.older)
    pairs = zip(jnp.split(key, parts, -1), jnp.split(value, parts, -2), slots.older, strict=True)
    older = tuple(Cache(put(old.key, k), put(old.value, v)) for k, v, old in pairs)
    return slots._replace(older=older)


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
