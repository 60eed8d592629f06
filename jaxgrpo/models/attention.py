"""The `attend` functions: causal, rows with a shared prefix, chunks of prompts, decoding steps.

Every mask is a function of (segment, position) and the layer's window; nothing else is trusted.
Softmax is taken in at least float32; masked scores are the lowest finite number, so that a query
without any key gives finite garbage that the loss masks, never NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.errors import find, refuse_all
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Attend, AttentionKind, KeyValue, Model, ModelConfig
from jaxgrpo.models.cache import (
    Cache,
    Lines,
    Ring,
    ages,
    narrowed,
    slot_cache,
    turned,
    with_chunk,
    written,
)
from jaxgrpo.models.kernels import load
from jaxgrpo.models.kernels.plain import SAVED as SAVED
from jaxgrpo.models.kernels.plain import (
    Keys,
    Partial,
    Sight,
    attended,
    empty_partial,
    grouped,
    joined,
    over_cache,
    partial_over,
    take_per_bin,
    ungrouped,
    visible,
    with_sinks,
)
from jaxgrpo.models.kernels.plain import attention as attention


def causal(position: Array, valid: Array) -> Attend:
    """Attention within each sequence: a query reads the valid keys at or before its position.

    Shapes: position, valid [*B, Q]. The memory it returns is KeyValue of this layer.
    """

    def attend(query, key, value, memory, kind: AttentionKind, sinks=None):
        del memory
        sight = Sight(position, None, (Keys(position, valid),))
        return attended(query, key, value, sight, kind, sinks), KeyValue(key, value)

    return attend


def rows_with_prefix(
    segment: Array,
    position: Array,
    row_prompt: Array,
    prompt_length: Array,
    alone: Array | None = None,
) -> Attend:
    """Attention of packed rows to their own segment and to the prompt that their group shares.

    The memory given is the prompts' KeyValue [D, A, S, kv_heads, head_dim]; none is returned.

    Args:
      alone: bool, the segments that see no prompt; None: each sees it.

    Shapes: segment, position, alone [D, R, Q]; row_prompt [D, R]; prompt_length [D, A].
    """
    length = jnp.take_along_axis(prompt_length, row_prompt, axis=1)  # [D, R]
    if alone is not None:  # before the prompt: only distances within a segment count
        position = jnp.where(alone, position - BEFORE, position)

    def attend(query, key, value, memory: KeyValue, kind: AttentionKind, sinks=None):
        prefix = KeyValue(*(take_per_bin(leaf, row_prompt) for leaf in memory))
        prefix_position = jnp.arange(prefix.key.shape[2])
        real = prefix_position < length[..., None]  # [D, R, S]
        keys, values = (
            jnp.concatenate(pair, axis=-3)
            for pair in zip(prefix, KeyValue(key, value), strict=True)
        )
        key_sets = (Keys(prefix_position, real), Keys(position, segment=segment))
        sight = Sight(position, segment, key_sets)
        return attended(query, keys, values, sight, kind, sinks), None

    return attend


BEFORE = 2**30
"""Further than any sequence is long."""


class Kernel(NamedTuple):
    """How whole rows and prompts are attended, in passes that a gradient may be taken of.

    Its two functions take what those of this module take, and give the same.
    """

    name: str
    causal: Callable[[Array, Array], Attend]
    rows_with_prefix: Callable[..., Attend]
    why: str = ""  # "auto" took it and not the platform's, which cannot compute this
    choose_again: Callable[..., Kernel] | None = None  # for other rows; None: it computes any

    def for_rows(self, row: int, samples_per_row: int | None) -> Kernel:
        """The kernel for the rows of a pass that has others, as `choose_kernel` takes them.

        Raises: InputError where the kernel that was asked for cannot compute them.
        """
        if self.choose_again is None:
            return self
        return self.choose_again(row=row, samples_per_row=samples_per_row)


XLA = Kernel("xla", causal, rows_with_prefix)
PLATFORM_KERNELS = {"tpu": "splash", "gpu": "cudnn"}
"""Platform, as JAX names that of a device -> the kernel made for it."""
KERNELS = ("auto", "xla", *PLATFORM_KERNELS.values())


def choose_kernel(
    setting: str,
    platform: str,
    config: ModelConfig,
    *,
    row: int,
    samples_per_row: int | None = None,
    mesh: Mesh | None = None,
) -> Kernel:
    """The kernel for a run: what it asks for, if that computes exactly its attention.

    Decoding and prefill have their own attends and need no kernel.

    Args:
      setting: one of KERNELS. "auto" is the platform's kernel where it refuses nothing, else
        "xla": the results differ by rounding alone.
      row: tokens of the longest row or prompt.
      samples_per_row: the most that a row may hold; None: any number, or some see no prompt.
      mesh: the run's; None on one device.

    Raises: InputError with everything that the kernel asked for cannot compute; also where this
    release of JAX has not what it is made of.
    """
    find("model.attention", setting, dict.fromkeys(KERNELS))
    name = PLATFORM_KERNELS.get(platform, "xla") if setting == "auto" else setting
    if name == "xla":
        return XLA
    limit = {"splash": row, "cudnn": samples_per_row}[name]
    module, problems = load(name)  # not above: it takes a tenth of a second
    problems = problems or module.refusals(config, limit, mesh)
    if PLATFORM_KERNELS.get(platform) != name:
        problems.append(f"platform {platform}: it runs on another")
    if problems and setting == "auto":
        return XLA._replace(why=f"{name} cannot: {'; '.join(problems)}")
    title = f'model.attention = "{name}" cannot compute this run; set it to "xla":'
    refuse_all(title, problems)
    causal_rows, rows, most = module.causal, module.rows_with_prefix, samples_per_row or 1
    if name == "splash":
        causal_rows, rows = (functools.partial(attend, mesh=mesh) for attend in (causal_rows, rows))
    elif most > 1:  # it is known, or it was refused
        rows = functools.partial(load("cudnn_packed")[0].rows_with_prefix, most=most)
    again = functools.partial(choose_kernel, setting, platform, config, mesh=mesh)
    return Kernel(name, causal_rows, rows, choose_again=again)


class Decoding(NamedTuple):
    """How slots attend to their prompts and to their own tokens."""

    name: str = "xla"
    mesh: Mesh | None = None  # whose devices attend to what they hold; None: one device
    interpret: bool = False  # computes the kernels without a GPU, as a test does
    why: str = ""  # the platform's kernels cannot compute this

    @property
    def has_lines(self) -> bool:
        """Whether keys and values are Lines; otherwise they are Cache and Ring."""
        return self.name == "pallas"


RINGS = Decoding()


def choose_decoding(
    device: Any, model: Model, dtype: str, mesh: Mesh | None = None, setting: str = "auto"
) -> Decoding:
    """The attention of decoding: on a GPU by kernels that read live tokens only.

    Args:
      device: of those that are decoded on; a `jax.Device`.
      dtype: of keys and values.
      mesh: that is decoded on; None: one device.
      setting: `model.attention`; with "xla" no kernels.
    """
    if device.platform != "gpu" or setting == "xla":
        return RINGS
    module, problems = load("pallas_decoding")  # not above: it takes half a second
    if problems := problems or module.refusals(device, model, dtype):
        return Decoding(why=f"pallas cannot: {'; '.join(problems)}")
    return Decoding("pallas", None if mesh is None or mesh.size == 1 else mesh)


class Sharing(NamedTuple):
    """Which slots read which row of the prompts' cache. A row is read by up to `width` slots."""

    # [D, rows * width], the slot that reads at each place, N if none; None: slot n at place n
    slot: Array | None
    place: Array | None  # [D, N], the place of each slot; None: as above


def chunk(row: Array, start: Array, length: Array) -> Attend:
    """A chunk of each of some prompts: reads what their rows hold before it, and itself.

    Memory per layer: the prompts' Cache or Lines [D, A, ...], into which the chunk is written.
    Shapes: row, start, length [D, R]: the row in the cache, the chunk's first position, and how
    many of its tokens are real (0: nothing is written).
    """

    def attend(query, key, value, memory: Cache | Lines, kind: AttentionKind, sinks=None):
        width = query.shape[2]
        offset = jnp.arange(width)
        real = offset < length[..., None]  # [D, R, W]
        column = jnp.where(real, start[..., None] + offset, memory.value.shape[-2])

        def write(cache: Any, row: Array, column: Array, key: Array, value: Array) -> Any:
            if isinstance(cache, Cache):
                keys = cache.key.at[row[:, None], :, :, column]
            else:
                keys = cache.key.at[row[:, None], :, column]
            keys = keys.set(key, mode="drop")
            return type(cache)(
                keys, cache.value.at[row[:, None], :, column].set(value, mode="drop")
            )

        key, value = (narrowed(leaf, memory.value.dtype) for leaf in (key, value))
        cache = jax.vmap(write)(memory, row, column, key, value)
        rows = _rows(cache, row)
        position = start[..., None] + offset
        sight = Sight(position, None, (Keys(jnp.arange(rows.value.shape[-2])),))
        return over_cache(query, rows, sight, kind, sinks), cache

    return attend


def _rows(cache: Cache | Lines, row: Array) -> Cache:
    rows = type(cache)(*(take_per_bin(leaf, row) for leaf in cache))
    return turned(rows) if isinstance(rows, Lines) else rows


class Pieces(NamedTuple):
    """Chunks of tokens that slots are given at once, W of each at the most. Shapes [D, R]."""

    slot: Array  # of its bin; N: none
    row: Array  # of the prompts' cache, that the slot reads
    start: Array  # tokens of the slot before
    size: Array  # tokens of the chunk
    left: Array  # tokens that are given in chunks, from this one on


def slot_chunk(pieces: Pieces, length: Array, clock: Array) -> Attend:
    """A chunk of each of some slots' own tokens: reads prompt, what the slot holds, and itself.

    Memory per layer as in `decode` or `decode_lines`, into which the chunk is written. In rings the
    tokens before it end `left` columns before the clock's, and its own follow them.

    Args:
      length: [D, A], real tokens of each prompt's row.
      clock: [], decoding steps so far.
    """
    behind_prompt = take_per_bin(length, pieces.row)[..., None]  # [D, R, 1]
    before = pieces.start[..., None]

    def attend(query, key, value, memory: tuple[Any, Any], kind: AttentionKind, sinks=None):
        prompts, slots = memory
        offset = jnp.arange(query.shape[2])
        dtype = slots.value.dtype if isinstance(slots, Lines) else slots.recent.value.dtype
        chunk_cache = Cache(
            narrowed(jnp.moveaxis(key, 2, -1), dtype), narrowed(jnp.moveaxis(value, 2, -2), dtype)
        )
        caches = _rows(prompts, pieces.row), slot_cache(slots, pieces.slot), chunk_cache
        keys, values = zip(*caches, strict=True)
        joined_cache = Cache(jnp.concatenate(keys, -1), jnp.concatenate(values, -2))
        prompt_column, column = (jnp.arange(cache.value.shape[-2]) for cache in caches[:2])
        number, begin = column, pieces.start
        if isinstance(slots, Ring):
            begin = clock - pieces.left
            number = before - 1 - (begin[..., None] - 1 - column) % column.size
        position = behind_prompt + before + offset
        key_sets = (
            Keys(prompt_column, prompt_column < behind_prompt),
            Keys(behind_prompt + number, (number >= 0) & (number < before)),
            Keys(position, offset < pieces.size[..., None]),
        )
        out = over_cache(query, joined_cache, Sight(position, None, key_sets), kind, sinks)
        return out, (prompts, with_chunk(slots, pieces.slot, chunk_cache, begin, pieces.size))

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

    def attend(query, key, value, memory: tuple[Cache, Ring], kind: AttentionKind, sinks=None):
        prefix, ring = memory
        tokens = (leaf.reshape(-1, *leaf.shape[3:]) for leaf in (key, value))
        ring = written(ring, clock, *tokens)
        grouped_query = grouped(query, prefix)  # [D, N, kv_heads, heads per kv head, 1, head_dim]
        flat = grouped_query.reshape(-1, *grouped_query.shape[2:])
        reach = index.reshape(-1, 1)
        furthest = longest if kind.window is None else jnp.minimum(longest, kind.window - 1)

        def attend_part(cache: Cache, ago: Array) -> Partial:
            mask = (ago >= 0) & (ago <= reach)
            if kind.window is not None:
                mask &= ago < kind.window
            return partial_over(flat, cache, mask[:, None, None, None], kind.soft_cap)

        def skip_part(cache: Cache, ago: Array) -> Partial:
            del ago
            return empty_partial(flat, cache)

        recent, *older = ages(ring, clock)
        parts = [attend_part(ring.recent, recent)]
        for cache, ago in zip(ring.older, older, strict=True):
            parts.append(jax.lax.cond(ago.min() <= furthest, attend_part, skip_part, cache, ago))
        parts = [
            Partial(*(leaf.reshape(*index.shape, *leaf.shape[1:]) for leaf in part))
            for part in parts
        ]
        of_prompts = _attend_to_prompts(grouped_query, prefix, index, length, sharing, kind)
        parts.append(with_sinks(of_prompts, sinks))
        return ungrouped(joined(parts), query), (prefix, ring)

    return attend


def decode_lines(index: Array, length: Array, sharing: Sharing, kernel: Decoding) -> Attend:
    """`decode` by kernels, over (prompts' Lines [D, A, ...], own Lines [D * N, ...]).

    A slot writes each token at a column of its own, the number of those before it.

    Args: as in `decode`.
    """
    from jaxgrpo.models.kernels import pallas_decoding

    mesh, interpret = kernel.mesh, kernel.interpret
    in_order = jnp.broadcast_to(jnp.arange(index.shape[1], dtype=jnp.int32), index.shape)
    place = in_order if sharing.place is None else sharing.place

    def attend_bins(query, key, value, memory: tuple[Lines, Lines], index, length, place, slot):
        (bins, rows), (kv_heads, size) = length.shape, key.shape[3:]
        by_place = query.reshape(*index.shape, kv_heads, -1, size)
        if slot is not None:
            take = jax.vmap(lambda values, slot: values.at[slot].get(mode="fill", fill_value=0))
            by_place = take(by_place, slot)
        by_place = by_place.reshape(bins * rows, -1, *by_place.shape[2:])
        by_place = jnp.swapaxes(by_place, 1, 2)  # [D * A, kv_heads, readers, shared, head_dim]
        prompts = Lines(*(leaf.reshape(-1, *leaf.shape[2:]) for leaf in memory[0]))
        parts = pallas_decoding.over_prompts(by_place, prompts, length.reshape(-1), interpret)
        token = jnp.stack([leaf.reshape(-1, kv_heads, size) for leaf in (key, value)], axis=2)
        token = narrowed(token, memory[1].value.dtype)
        out, slots = pallas_decoding.over_slots(
            by_place, token, memory[1], index, place, parts, interpret
        )
        return out.reshape(query.shape), (memory[0], slots)

    def attend(query, key, value, memory: tuple[Lines, Lines], kind: AttentionKind, sinks=None):
        del kind, sinks
        arguments = query, key, value, memory, index, length, place, sharing.slot
        if mesh is None:
            return attend_bins(*arguments)
        heads = sharding.spec(("bins", None, None, "heads", None))
        prompts, slots = (sharding.spec(("bins", *none, "kv_heads")) for none in ((None,), ()))
        bins = sharding.spec(("bins",))
        return jax.shard_map(
            attend_bins,
            mesh=mesh,
            in_specs=(heads, heads, heads, (prompts, slots), bins, bins, bins, bins),
            out_specs=(heads, (prompts, slots)),
            check_vma=False,
        )(*arguments)

    return attend


def _attend_to_prompts(
    query: Array, prefix: Cache, index: Array, length: Array, sharing: Sharing, kind: AttentionKind
) -> Partial:
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
        mask = mask & visible(position, column, kind)  # [D, A, C, S]
    out = partial_over(query, prefix, mask[:, :, None, None], kind.soft_cap)

    def to_slots(leaf: Array) -> Array:
        leaf = jnp.moveaxis(leaf, 4, 2)  # [D, A, C, kv_heads, heads per kv head, ...]
        leaf = leaf.reshape(bins, -1, *leaf.shape[3:])
        if sharing.place is not None:
            leaf = take_per_bin(leaf, sharing.place)
        return jnp.expand_dims(leaf, 4)

    return Partial(*map(to_slots, out))
