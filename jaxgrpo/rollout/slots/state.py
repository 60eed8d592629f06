"""What decoding changes on the devices: samples, their queue, slots, caches.

D bins, shards of the batch, have N slots each, places for M samples of at most T tokens, and a
cache with A rows, each of which up to G samples read: a prompt, or one sample's tokens so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.core import records
from jaxgrpo.core.records import EXPERTS, SUPPORT
from jaxgrpo.core.types import register
from jaxgrpo.rollout.engine import SamplingSettings


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples at all places: what they begin with, and what they are so far.

    Tokens are counted from the end of the row that a sample reads.
    """

    keys: Array  # [D, M, 2] uint32
    opening: Array  # [D, M] int32, the token that opens its slot, behind its row
    start: Array | None  # [D, M] int32, tokens of the sample that its row holds; None: 0
    offset: Array | None  # [D, M] int32, tokens that are given and not drawn; None: 0
    limit: Array | None  # [D, M] int32, tokens at most, with those that are given; None: T
    greedy: Array | None  # [D, M] bool: takes the likeliest tokens; None: none does
    threshold: Array | None  # [D, M] float32, nats; less confidence ends it; None: no `early_stop`
    tokens: Array  # [D, M, T] int32; from the beginning on those that are given
    logp: Array  # [D, M, T] float32
    confidence: Array | None  # [D, M, T] float32, of all drawn tokens up to this one, summed
    experts: Array | None  # [D, M, T, layers, k], of what each is drawn from; None: no experts
    support: Array | None  # [D, M, T, K], what each is drawn among; None: not recorded
    length: Array  # [D, M] int32, tokens so far
    stopped: Array  # [D, M] bool, by a stop token or string
    unsure: Array  # [D, M] bool, by too little confidence
    ended: Array  # [D, M] bool, by anything
    plays: Plays | None = None  # None: no `answering`


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plays:
    """The turns of the samples at all places that rules answer, K at most."""

    state: Any  # of its rules, leaves [D, M, ...]
    count: Array  # [D, M] int32, turns that were answered
    begins: Array  # [D, M, K] int32, where each turn begins, in tokens; -1: there is none yet
    ends: Array  # [D, M, K] int32, where those that were answered end
    rewards: Array  # [D, M, K] float32
    is_done: Array  # [D, M] bool, the rules have ended it


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """The samples of each bin in the order in which they begin."""

    place: Array  # [D, M] int32, of the n-th sample to begin, n modulo M
    row: Array  # [D, M] int32, of the cache, by place
    reader: Array  # [D, M] int32, which of the row's G readers each place is
    ready: Array  # [D] int32, samples so far whose rows were filled
    next: Array  # [D] int32, samples so far that have begun


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pauses:
    """Slots that keep a sample whose turn has ended, and which may go on."""

    mask: Array  # [D, N] bool
    clock: Array  # [D, N] int32, behind the last token of the slot


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """All that decoding changes; donated from one segment to the next."""

    sample: Array  # [D, N] int32, the sample in each slot
    live: Array  # [D, N] bool
    pauses: Pauses | None  # None: samples have one turn
    index: Array  # [D, N] int32, tokens of the sample so far
    token: Array  # [D, N] int32, the token fed next
    samples: Samples
    queue: Queue
    row_length: Array  # [D, A] int32, tokens in each row of the prompts' cache
    memory: Any  # per layer: (prompts', slots'), Cache and Ring of models.cache, or Lines
    clock: Array  # [] int32, decoding steps so far
    slot_steps: Array  # [] int32, decoding steps times slots
    readers: int = dataclasses.field(metadata={"static": True})  # G, of a row at most


def no_samples(
    settings: SamplingSettings, bins: int, number: int, recorded: records.Shapes
) -> Samples:
    """Empty places for so many samples per bin. Args: recorded: `engine.record_shapes`."""
    count, shapes = jnp.zeros((bins, number), jnp.int32), dict(recorded)

    def no_record(name: str) -> Array | None:
        return (
            jnp.asarray(records.no_record(name, *zeros.shape, *shapes.get(name, ())))
            if name in shapes
            else None
        )

    zeros = jnp.zeros((bins, number, settings.max_completion_tokens), jnp.float32)
    return Samples(
        keys=jnp.zeros((bins, number, 2), jnp.uint32),
        opening=count,
        start=None,
        offset=count if settings.max_turns > 1 else None,
        limit=None,
        greedy=None,
        threshold=zeros[..., 0] if settings.early_stop else None,
        tokens=jnp.full_like(zeros, settings.pad_token, jnp.int32),
        logp=zeros,
        confidence=zeros if settings.early_stop else None,
        experts=no_record(EXPERTS),
        support=no_record(SUPPORT),
        length=count,
        stopped=count.astype(bool),
        unsure=count.astype(bool),
        ended=count.astype(bool),
    )


class Entries(NamedTuple):
    """Samples that come to places, as host arrays; where `is_new` is False nothing is read."""

    is_new: np.ndarray  # [D, M] bool
    keys: np.ndarray  # [D, M, 2] uint32
    opening: np.ndarray  # [D, M] int32, as in `Samples`
    threshold: np.ndarray  # [D, M] float32, as in `Samples`, which may have none
    start: np.ndarray | None  # [D, M] int32, as in `Samples`
    limit: np.ndarray | None  # [D, M] int32, as in `Samples`
    greedy: np.ndarray | None  # [D, M] bool, as in `Samples`
    prefix: np.ndarray | None
    """[D, M, F] int32, the tokens that are given, -1 behind the last; None: none is"""
    state: Any = None  # leaves [D, M, ...], as in `Plays`


class SlotContents(NamedTuple):
    """What slots hold of their samples, B of them."""

    index: Array  # [B] int32, as in `DecodeState`
    token: Array  # [B] int32
    clock: Array  # [B] int32, as in `Pauses`
    memory: Any  # per layer, leaves [B, ...]


class Moves(NamedTuple):
    """Samples that move between slots and the K places aside of each bin, as host arrays [D, K]
    int32: the places of those that come to each from their slots, and of those that go from each
    into free slots afterwards; M: none does."""

    out: np.ndarray
    back: np.ndarray


class Replies(NamedTuple):
    """What changes for samples whose turns have ended, as host arrays."""

    leaves: np.ndarray  # [D, M] bool, will not go on: its slot is free
    goes_on: np.ndarray  # [D, M] bool
    start: np.ndarray  # [D, M] int32, tokens of the sample so far
    tokens: np.ndarray  # [D, M, F] int32, of the reply, -1 behind the last
    chunked: np.ndarray  # [D, M] int32, tokens of the reply that will be computed in chunks
    limit: np.ndarray  # [D, M] int32, as in `Samples`, where it goes on
    moves: Moves


class Counters(NamedTuple):
    """What the host reads after a segment; the same in every process."""

    live: Array  # [] int32, slots in use, of the bin that has most
    drained: Array  # [] bool, no sample of a filled row waits for a slot in any bin
    ended: Array  # [D, M / 8] uint8, bits of places whose samples have ended
    finals: Finals | None
    """of the first READ samples, in the order of places over all bins, whose turns ended in the
    segment, and then of any; None: samples have one turn, or strings end them"""


class Drawn(NamedTuple):
    """What was drawn of the turns at all places; the same in every process."""

    number: Array  # [D, M] int32, tokens
    newest: Array  # [D, M, W] int32, the last of them, as many as a segment draws; -1: none


READ = 64
"""Samples that are read from the devices at once."""


class Finals(NamedTuple):
    """Some samples as they ended, n of them, in the order that was asked for."""

    tokens: Array  # [n, T]
    logp: Array  # [n, T]
    confidence: Array | None  # [n, T], summed as in `Samples`
    experts: Array | None  # [n, T, layers, k]
    support: Array | None  # [n, T, K]
    length: Array  # [n], tokens, those that were given among them
    stopped: Array  # [n]
    unsure: Array  # [n]
    plays: Any  # `Plays` without its state; None: no `answering`


def put(array: Array, value: Array, *places: Array) -> Array:
    """An array [D, M, ...] with values [D, n, ...] at [D, n, ...], bin by bin; places beyond the
    array are left out."""
    put_bin = lambda array, value, *places: array.at[places].set(value, mode="drop")  # noqa: E731
    return jax.vmap(put_bin)(array, value.astype(array.dtype), *places)


def take(tree: Any, places: Array) -> Any:
    """Entries [D, n, ...] of leaves [D, N, ...] at [D, n], bin by bin."""
    return jax.tree.map(lambda leaf: jax.vmap(lambda row, index: row[index])(leaf, places), tree)


def prefix_token(state: DecodeState) -> Array:
    """[D, N]: the token at each slot's next place: a given one where one is given."""
    read = jax.vmap(lambda values, *index: values.at[index].get(mode="clip"))
    return read(state.samples.tokens, state.sample, state.index)


def temperature(settings: SamplingSettings, state: DecodeState) -> Array | float:
    """[D, N, 1] or one for all: of the distribution whose confidence is measured."""
    sampled, greedy = settings.temperature or 1.0, state.samples.greedy
    if greedy is None:
        return sampled
    return jnp.where(take(greedy, state.sample), 1.0, sampled)[..., None]


def record_experts(state: DecodeState, per_layer: Sequence[Array]) -> DecodeState:
    """The state with the experts [D, N, 1, k] of each layer of the tokens that were fed."""
    if state.samples.experts is None:
        return state
    return _with_record(state, "experts", jnp.stack(per_layer, -2)[:, :, 0])


def record_support(state: DecodeState, support: Array | None) -> DecodeState:
    """The state with what the next tokens are drawn among, [D, N, K], where they are not given."""
    if support is None:
        return state
    if state.samples.offset is not None:
        is_drawn = state.index >= take(state.samples.offset, state.sample)
        support = jnp.where(is_drawn[..., None], support, records.NONE)
    return _with_record(state, "support", support)


def _with_record(state: DecodeState, name: str, entry: Array) -> DecodeState:
    samples, total = state.samples, state.samples.length.shape[1]
    sample = jnp.where(state.live, state.sample, total)  # the samples of dead slots stay
    record = put(getattr(samples, name), entry, sample, state.index)
    return dataclasses.replace(state, samples=dataclasses.replace(samples, **{name: record}))
