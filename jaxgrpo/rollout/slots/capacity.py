"""The sizes of a session of decoding, the memory they take, and how many slots fit into it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgrpo.core import records
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import delta, sharding
from jaxgrpo.models.api import AttentionKind, DeltaKind, LayerKind, Model, ModelConfig
from jaxgrpo.models.attention import choose_decoding
from jaxgrpo.models.cache import FP8, Lines, cache_dtype, older_parts
from jaxgrpo.rollout.engine import SamplingSettings, record_shapes

CHUNK = 64  # prompt tokens of one row that are computed at once
CHUNK_TOKENS = 512  # of all rows of a bin
COLUMNS = 32  # columns of the prompts' cache come in so many: unaligned rows are slow to read
ROWS_PER_SLOT = 3  # rows of the prompts' cache, times the group size, per slot: see `for_prompts`
OWN_ROWS_PER_SLOT = 1.5  # rows where samples have turns: some are filled ahead of free slots
OWN_ROWS = 4  # and so many more, which matter where slots are few
PER_TOKEN = 4 + 4  # bytes of a token and its log-probability in the state
LANES = 128  # a TPU pads an array's last dimension, which is the columns of keys, to these
LOGITS = 3  # copies of a step's logits: as they come, scaled or cut, and their exponentials
COPYING = ("cpu",)
"""Where XLA writes chunks of prompts into bfloat16 through a float32 copy, of all layers."""
PARKING = ("cpu",)
"""Where a sample whose turn has ended moves out of its slot for another that waits: there a step
takes as long as it has slots. Elsewhere a slot that is paused costs little, since a step reads the
weights and what is live, and the bytes of a place aside are better one more slot."""
ADDRESSED = 2**31
"""Numbers of 8 bits of an array that a kernel of Triton finds. Up to 2**32 bytes JAX counts them in
32 bits with a sign (jax/_src/pallas/triton/lowering.py, `_compute_offsets_from_indices`)."""
SLOTS_OF_CPU = 64
"""Slots of a CPU device where none are asked for: enough for its products to be limited by
arithmetic; with more, more of them idle while the last samples of a step end."""


class Sizes(NamedTuple):
    """What is fixed from the first sample under way to the last, per bin."""

    bins: int  # D
    prompts: int  # P, places for groups
    group: int  # G, samples of a place
    slots: int  # N
    rows: int  # A, of the prompts' cache
    width: int  # S, its columns
    readers: int  # of a row, at most
    parked: int = 0  # K, places aside for what slots hold of samples that wait for replies

    @classmethod
    def for_prompts(
        cls,
        slots: int,
        bins: int,
        prompts: int,
        group: int,
        width: int,
        turns: int = 0,
        parks: bool = False,
    ) -> Sizes:
        """Sizes for `prompts` prompts of at most `width` tokens over all bins.

        Fewer rows than prompts are enough where samples wait for slots: the slots read some
        slots / G prompts that are under way, and others whose last samples are long.

        Args:
          slots: over all bins; 0: one for each sample.
          turns: tokens of a sample before its last turn, at most; such samples read a row each from
            the first turn on: a step computes as many readers for all rows.
          parks: samples that wait for a reply may give up their slots.
        """
        per_bin = -(-prompts // bins)
        slots = min(-(-slots // bins) or per_bin * group, per_bin * group)
        parked = min(slots, per_bin * group - slots) if parks else 0
        if turns:
            readers = 1
            rows = min(per_bin * group, math.ceil(OWN_ROWS_PER_SLOT * slots) + OWN_ROWS)
            parked = min(parked, rows - slots)  # a sample has its row wherever it is
        else:
            readers = group
            rows = min(per_bin, max(2, -(-ROWS_PER_SLOT * slots // group)))
        # The last prompt token opens a slot, the others make up the row.
        columns = -(-max(1, width + turns - 1) // COLUMNS) * COLUMNS
        return cls(bins, per_bin, group, slots, rows, columns, readers, parked)

    @property
    def aligned(self) -> bool:
        """Whether each sample has a slot, and each prompt a row, from beginning to end."""
        return self.rows == self.prompts and self.slots == self.prompts * self.group


def parks(settings: SamplingSettings, platform: str) -> bool:
    """Whether samples that wait for a reply give up their slots where others wait for one."""
    return settings.max_turns > 1 and platform in PARKING


def chunk_shape(sizes: Sizes) -> tuple[int, int]:
    """How many rows of a bin are computed at once, and how many tokens of each."""
    width = min(CHUNK, sizes.width)
    return max(1, min(sizes.rows, CHUNK_TOKENS // width)), width


class Capacity(NamedTuple):
    """Bytes on one device."""

    state: int  # keys and values of slots and prompts, tokens and log-probs of all samples
    recurrent: int  # of it, states of slots: all are read and written at each token
    working: int  # logits, or a copy of one layer's cache while slots become fewer, or of prompts'
    in_8_bits: int = 0  # numbers of the largest array that a kernel of decoding reads in 8 bits

    @property
    def total(self) -> int:
        return self.state + self.working


def ring_parts(settings: SamplingSettings, kind: AttentionKind) -> tuple[int, int]:
    """Parts of a layer's ring and columns of each, as `older_parts` gives them.

    What a slot decodes after its turn has ended takes the place of its oldest tokens, and a further
    turn reads a window of those before the end. A token ends a turn in the middle of a block. The
    host sees a stop string once the next segment is under way, a block later.
    """
    longest, block = settings.max_completion_tokens, settings.segment_tokens
    reach = kind.window or longest
    if settings.max_turns > 1 and settings.stop_strings is not None:
        reach += block - 1  # of 2 * block - 1 columns at most `older_parts` has a block
    return older_parts(min(longest, reach), block)


class _Caches(NamedTuple):
    """Bytes of keys and values of one layer on a device."""

    config: ModelConfig
    tensor: int  # devices that heads are divided over
    platform: str
    size: int  # bytes of a number
    has_lines: bool

    def columns(self, kind: AttentionKind, batch: int, columns: int) -> int:
        """Of so many sequences of so many columns."""
        heads, key_size, value_size = self.config.cached(kind)
        key_columns = -(-columns // LANES) * LANES if self.platform == "tpu" else columns
        numbers = key_size * key_columns + value_size * columns
        return batch * max(1, heads // self.tensor) * numbers * self.size

    def ring(self, settings: SamplingSettings, kind: AttentionKind, recent: int, older: int) -> int:
        """Of the own tokens of so many sequences with a current block, and with what is older."""
        if self.has_lines:
            return self.columns(kind, older, Lines.columns(settings.max_completion_tokens))
        parts, columns = ring_parts(settings, kind)
        recent_bytes = self.columns(kind, recent, settings.segment_tokens)
        return recent_bytes + parts * self.columns(kind, older, columns)


def capacity(
    model: Model, settings: SamplingSettings, mesh: Mesh, prompts: int, group: int, width: int
) -> Capacity:
    """What decoding takes beside the parameters.

    Args:
      settings: `slots` as they are asked for; 0: all samples at once.
      prompts: that are drawn at once, over all bins.
      group, width: samples of each, and tokens that each may have.
    """
    config, tensor, bins = model.config, mesh.shape["tensor"], sharding.num_bins(mesh)
    longest, device = settings.max_completion_tokens, mesh.devices.flat[0]
    dtype, platform = cache_dtype(settings.kv_cache_dtype, config), device.platform
    turn_tokens, may_park = settings.turn_tokens, parks(settings, platform)
    sizes = Sizes.for_prompts(settings.slots, bins, prompts, group, width, turn_tokens, may_park)
    has_lines = choose_decoding(device, model, dtype, mesh, settings.attention).has_lines
    size = jnp.dtype(dtype).itemsize
    caches = _Caches(config, tensor, platform, size, has_lines)
    ring = functools.partial(caches.ring, settings)
    rings = [ring(kind, sizes.slots, sizes.slots) for kind in config.attention]
    aside = sum(ring(kind, 0, sizes.parked) for kind in config.attention)
    shared = caches.columns(config.attention[0], sizes.rows, sizes.width) if rings else 0
    computed, largest = cache_dtype("auto", config), max(rings, default=0)
    states, sequences = state_bytes(config.kinds, computed, tensor), sizes.slots + sizes.rows
    samples = sizes.prompts * group * longest * _token_bytes(config.kinds, settings)
    is_copied = platform in COPYING and size < 4
    copied = len(rings) * shared * 4 // size * is_copied
    if is_copied and dtype == FP8:  # a layer's cache is converted while it is read
        copied = max(copied, (largest + shared) * jnp.dtype(computed).itemsize)
    recurrent = (sequences + sizes.parked) * sum(states)
    return Capacity(
        state=len(rings) * shared + sum(rings) + aside + recurrent + samples,
        recurrent=sizes.slots * sum(states),
        working=max(
            LOGITS * (4 * sizes.slots * config.vocab_size // tensor),
            largest + shared,
            sequences * max(states, default=0),
            copied,
        ),
        in_8_bits=max(largest, shared) // len(Lines._fields) if has_lines and size == 1 else 0,
    )


def refuse_unaddressed(slots: int, occupied: Capacity) -> None:
    """Raises: InputError where kernels of decoding would read 8 bits at wrong places."""
    if occupied.in_8_bits > ADDRESSED:
        raise InputError(
            f'rollout.slots = {slots}, rollout.kv_cache_dtype = "fp8": a device would hold '
            f"{occupied.in_8_bits:,} numbers of a layer's keys, and the kernels of decoding find "
            f"{ADDRESSED:,} at the most; take fewer slots, shorter prompts or completions, "
            'kv_cache_dtype = "bfloat16", or model.attention = "xla"'
        )


def _token_bytes(kinds: Sequence[LayerKind], settings: SamplingSettings) -> int:
    """Bytes of a sample for each of its tokens, beside keys and values."""
    recorded = record_shapes(kinds, settings.support, settings.records_experts)
    return PER_TOKEN + 4 * (settings.early_stop is not None) + records.token_bytes(recorded)


def state_bytes(kinds: Sequence[LayerKind], dtype: str, tensor: int) -> list[int]:
    """Bytes of a sequence's state on a device, of each layer that recurs."""

    def layer_bytes(kind: DeltaKind) -> int:
        empty = functools.partial(delta.empty_states, kind, dtype, (1,), lambda x, _: x)
        leaves = jax.tree.leaves(jax.eval_shape(empty))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // tensor

    mixers = (kind.mixer for kind in kinds)
    return [layer_bytes(mixer) for mixer in mixers if isinstance(mixer, DeltaKind)]


def fitting_slots(
    model: Model,
    settings: SamplingSettings,
    mesh: Mesh,
    prompts: int,
    group: int,
    width: int,
    free: int,
    rounds: int = 0,
) -> int:
    """The most slots, over all bins, whose decoding fits into `free` bytes of each device.

    Nor has an array of 8 bits more than `ADDRESSED` numbers. At least one per bin, whether it fits
    or not, and at most `SLOTS_OF_CPU` per bin on a CPU.

    Args:
      prompts, group, width: as in `capacity`.
      rounds: only so many samples per slot are drawn at once, the prompts in batches; 0: all.
    """
    bins = sharding.num_bins(mesh)

    def prompts_at_once(slots: int) -> int:
        if not rounds:
            return prompts
        return min(prompts, -(-max(1, rounds * slots // group) // bins) * bins)

    on_cpu = mesh.devices.flat[0].platform == "cpu"
    most = math.ceil(prompts * group / bins)
    low, high = 1, min(most, SLOTS_OF_CPU) if on_cpu else most
    while low < high:
        middle = (low + high + 1) // 2
        trial = settings._replace(slots=middle * bins)
        batch = prompts_at_once(trial.slots)
        occupied = capacity(model, trial, mesh, batch, group, width)
        fits = occupied.total <= free and occupied.in_8_bits <= ADDRESSED
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * bins
