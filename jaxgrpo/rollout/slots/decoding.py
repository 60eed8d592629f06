"""The device's part of sampling: the state of decoding, and the functions that change it.

Bins are shards of the batch, D of them. Each has N slots, which decode side by side, a cache with A
rows of prompts, and a queue of samples. A slot opens with the last prompt token, so that every
forward pass, the first one too, is the same program and yields one new token; when its sample ends
it takes the next one of the queue.

What looks things up in tables does so per bin (`jax.vmap` over D), so that nothing moves between
devices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.records import NONE
from jaxgrpo.core.types import GENERATOR, Params
from jaxgrpo.models import delta, routing
from jaxgrpo.models.api import AttentionKind, Caller, Constrain, DeltaKind, Model
from jaxgrpo.models.attention import RINGS, Decoding, Sharing, chunk, decode, decode_lines
from jaxgrpo.models.cache import Cache, Lines, Ring, cache_dtype, settled
from jaxgrpo.models.decoder import tokens_with_text
from jaxgrpo.models.logprobs import confidence_from_logits
from jaxgrpo.models.recurrence import DeltaState
from jaxgrpo.rollout.engine import SamplingSettings, record_shapes
from jaxgrpo.rollout.slots import answering
from jaxgrpo.rollout.slots.capacity import Sizes, ring_parts
from jaxgrpo.rollout.slots.drawing import Distribution, draw, named_support
from jaxgrpo.rollout.slots.state import (
    READ,
    Counters,
    DecodeState,
    Entries,
    Finals,
    Pauses,
    Queue,
    Samples,
    no_samples,
    prefix_token,
    put,
    record_experts,
    record_support,
    take,
    temperature,
)
from jaxgrpo.rollout.stopping import EarlyStop


class Parts(NamedTuple):
    """What the functions of decoding are built from."""

    model: Model
    settings: SamplingSettings
    constrain: Constrain
    vocab_shards: int = 1  # devices that the vocabulary is divided over
    attention: Decoding = RINGS


def first_state(parts: Parts, sizes: Sizes) -> DecodeState:
    """Empty places, slots and caches."""
    bins, prompts, group, slots, rows, width, readers, _ = sizes
    config, settings, places = parts.model.config, parts.settings, prompts * group
    longest, block = settings.max_completion_tokens, settings.segment_tokens
    dtype = cache_dtype(settings.kv_cache_dtype, config)
    empty = jnp.zeros((bins, slots), jnp.int32)

    def cache(kind: AttentionKind, batch: tuple[int, ...], columns: int) -> Cache:
        heads, key_size, value_size = config.cached(kind)
        key = jnp.zeros((*batch, heads, key_size, columns), dtype)
        value = jnp.zeros((*batch, heads, columns, value_size), dtype)
        axes = ("bins", *[None] * (len(batch) - 1), "kv_heads", None, None)
        return Cache(parts.constrain(key, axes), parts.constrain(value, axes))

    def lines(batch: tuple[int, ...], columns: int) -> Lines:
        axes = ("bins", *[None] * (len(batch) - 1), "kv_heads", None, None)
        zeros = jnp.zeros((*batch, config.num_kv_heads, columns, config.head_dim), dtype)
        return Lines(*(parts.constrain(zeros, axes) for _ in Lines._fields))

    def ring(kind: AttentionKind) -> Ring:
        older_rings, columns = ring_parts(settings, kind)
        older = tuple(cache(kind, (bins * slots,), columns) for _ in range(older_rings))
        return Ring(cache(kind, (bins * slots,), block), older)

    def memory(mixer: AttentionKind | DeltaKind) -> tuple[Any, Any]:
        if isinstance(mixer, DeltaKind):
            states = functools.partial(delta.empty_states, mixer, cache_dtype("auto", config))
            return states((bins, rows), parts.constrain), states((bins * slots,), parts.constrain)
        if not parts.attention.has_lines:
            return cache(mixer, (bins, rows), width), ring(mixer)
        return lines((bins, rows), width), lines((bins * slots,), Lines.columns(longest))

    recorded = record_shapes(config.kinds, settings.support, settings.records_experts)
    by_place, none = jnp.zeros((bins, places), jnp.int32), jnp.zeros(bins, jnp.int32)
    state = DecodeState(
        sample=empty,
        live=empty.astype(bool),
        pauses=Pauses(mask=empty.astype(bool), clock=empty) if settings.max_turns > 1 else None,
        index=empty,
        token=empty,
        samples=no_samples(settings, bins, places, recorded),
        queue=Queue(place=by_place, row=by_place, reader=by_place, ready=none, next=none),
        row_length=jnp.zeros((bins, rows), jnp.int32),
        memory=tuple(memory(kind.mixer) for kind in config.kinds),
        clock=jnp.int32(0),
        slot_steps=jnp.int32(0),
        readers=readers,
    )
    return laid_out(parts, state)


def enter(parts: Parts, state: DecodeState, entries: Entries) -> DecodeState:
    """Puts samples at their places. They begin once `admit` lets them."""
    samples, is_new = state.samples, jnp.asarray(entries.is_new)
    longest, pad = samples.tokens.shape[-1], parts.settings.pad_token

    def at_new(value: Any, old: Array) -> Array:
        mask = is_new.reshape(*is_new.shape, *[1] * (old.ndim - 2))
        return jnp.where(mask, jnp.asarray(value, old.dtype), old)

    def refreshed(value: Any, old: Array | None) -> Array | None:
        return None if old is None else at_new(value, old)

    def optional(value: Any, old: Array | None, default: Any) -> Array | None:
        """None as long as all have the default."""
        if value is None and old is None:
            return None
        old = jnp.full(is_new.shape, default) if old is None else old
        return at_new(default if value is None else value, old)

    tokens, offset = pad, None
    if entries.prefix is not None:
        behind = ((0, 0), (0, 0), (0, longest - entries.prefix.shape[-1]))
        prefix = jnp.pad(jnp.asarray(entries.prefix), behind, constant_values=-1)
        tokens, offset = jnp.where(prefix < 0, pad, prefix), (prefix >= 0).sum(-1)
    samples = Samples(
        keys=at_new(entries.keys, samples.keys),
        opening=at_new(entries.opening, samples.opening),
        start=optional(entries.start, samples.start, jnp.int32(0)),
        offset=optional(offset, samples.offset, jnp.int32(0)),
        limit=optional(entries.limit, samples.limit, jnp.int32(longest)),
        greedy=optional(entries.greedy, samples.greedy, False),
        threshold=refreshed(entries.threshold, samples.threshold),
        tokens=at_new(tokens, samples.tokens),
        logp=at_new(0, samples.logp),
        confidence=refreshed(0, samples.confidence),
        experts=refreshed(NONE, samples.experts),
        support=refreshed(NONE, samples.support),
        length=at_new(0, samples.length),
        stopped=at_new(False, samples.stopped),
        unsure=at_new(False, samples.unsure),
        ended=at_new(False, samples.ended),
        plays=samples.plays,
    )
    if (rules := parts.settings.answering) is not None:
        samples = dataclasses.replace(
            samples,
            offset=jnp.zeros_like(samples.length) if samples.offset is None else samples.offset,
            plays=answering.enter(rules, samples.plays, entries),
        )
    return laid_out(parts, dataclasses.replace(state, samples=samples))


def prefill(
    parts: Parts, params: Params, state: DecodeState, tokens: Array, row: Array, start: Array
) -> DecodeState:
    """Writes chunks of prompts into their rows of the cache.

    Shapes: tokens [D, R, W], -1 behind the last one; row, start [D, R]. A chunk without tokens
    writes nothing.
    """
    length = (tokens >= 0).sum(-1, dtype=jnp.int32)
    position = start[..., None] + jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    shared, rings = zip(*state.memory, strict=True)
    config = parts.model.config
    placed = row, start, length
    caller = Caller(chunk(*placed), recur=delta.chunk(*placed), keeps_latents=True)
    shared = routing.with_records(config.kinds, shared)
    _, shared = parts.model.apply(params, jnp.maximum(tokens, 0), position, caller, shared)
    shared, _ = routing.without_records(config.kinds, shared)
    return dataclasses.replace(state, memory=tuple(zip(shared, rings, strict=True)))


def admit(
    state: DecodeState, place: Array, row: Array, reader: Array, row_length: Array, ready: Array
) -> DecodeState:
    """Lets samples whose rows have been filled begin.

    Args: place, row, reader, ready: as in `Queue`.
    """
    queue = dataclasses.replace(state.queue, place=place, row=row, reader=reader, ready=ready)
    return _refilled(dataclasses.replace(state, queue=queue, row_length=row_length))


def segment(
    parts: Parts, aligned: bool, params: Params, state: DecodeState, enough: Array
) -> tuple[DecodeState, Counters]:
    """Decodes up to the end of a block of `segment_tokens` steps, or less if nothing is to be done.

    Args:
      aligned: slot n reads row n // (N / A) of the prompts' cache, always, and no sample waits.
      params: with each layer's parameters apart (`params_per_layer`).
      enough: [] int32; it ends when no sample waits and no bin has more live slots than that.
    """
    settings = parts.settings

    def is_drained(state: DecodeState) -> Array:
        return (state.queue.next >= state.queue.ready).all()

    def running(carry: tuple[Array, DecodeState]) -> Array:
        step, state = carry
        drained = is_drained(state)
        most_live = state.live.sum(-1).max()
        busy = (most_live > 0) | ~drained
        in_block = (step == 0) | (state.clock % settings.segment_tokens != 0)
        return in_block & busy & ~(drained & (most_live <= enough))

    def one_token(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        if not aligned:
            state = _refilled(state)
        return step + 1, _one_token(parts, aligned, params, state)

    pauses = state.pauses
    _, state = jax.lax.while_loop(running, one_token, (jnp.int32(0), state))
    if not parts.attention.has_lines:
        is_kept = None if pauses is None else pauses.mask.reshape(-1)
        memory = tuple(
            (prompts, settled(slots, state.clock, is_kept) if isinstance(slots, Ring) else slots)
            for prompts, slots in state.memory
        )
        state = dataclasses.replace(state, memory=memory)
    if pauses is not None:  # what is in the current block alone would not outlast the pause
        block = settings.segment_tokens
        state = dataclasses.replace(state, clock=-(-state.clock // block) * block)
    counters = Counters(
        live=state.live.sum(-1).max(),
        drained=is_drained(state),
        ended=parts.constrain(jnp.packbits(state.samples.ended, axis=-1), (None, None)),
        finals=_finals_of_turns(parts, state, pauses),
    )
    return state, counters


def _finals_of_turns(parts: Parts, state: DecodeState, before: Pauses | None) -> Finals | None:
    """As `Counters.finals`. Args: before: the segment."""
    if before is None or state.pauses is None or parts.settings.stop_strings is not None:
        return None
    bins, places = state.samples.length.shape
    place = state.sample + places * jnp.arange(bins)[:, None]
    place = jnp.where(state.pauses.mask & ~before.mask, place, bins * places)
    place = jnp.sort(parts.constrain(place, (None, None)).reshape(-1))
    return finals(parts, state.samples, jnp.minimum(place[:READ], bins * places - 1))


def staying(state: DecodeState, slots: int, aligned: bool) -> tuple[Array, Array]:
    """The slots that stay when they become fewer, live ones first, and the rows that they read.

    Shapes: [D, slots] each.
    """
    is_free = ~(state.live if state.pauses is None else state.live | state.pauses.mask)
    order = jnp.argsort(is_free, axis=-1, stable=True)[:, :slots]
    return order, take(_slot_rows(state, aligned), order)


def take_slots(tree: Any, order: Array) -> Any:
    """`take` of leaves [D * N, ...]."""
    bins = len(order)

    def take_per_bin(leaf: Array) -> Array:
        slots = take(leaf.reshape(bins, -1, *leaf.shape[1:]), order)
        return slots.reshape(-1, *leaf.shape[1:])

    return jax.tree.map(take_per_bin, tree)


def _slot_rows(state: DecodeState, aligned: bool) -> Array:
    """[D, N]: the row of the prompts' cache that each slot reads."""
    if aligned:
        rows, slots = state.row_length.shape[1], state.sample.shape[1]
        return jnp.broadcast_to(jnp.arange(slots) // (slots // rows), state.sample.shape)
    return take(state.queue.row, state.sample)


def _refilled(state: DecodeState) -> DecodeState:
    """Free slots take the next samples of their bin's queue, in order, and the states that layers
    which recur have of their prompts."""
    queue, free = state.queue, ~state.live
    if state.pauses is not None:
        free &= ~state.pauses.mask
    number = queue.next[:, None] + jnp.cumsum(free, axis=-1, dtype=jnp.int32) - 1
    fits = free & (number < queue.ready[:, None])
    sample = take(queue.place, jnp.where(fits, number % queue.place.shape[1], 0))
    sample = jnp.where(fits, sample, state.sample)
    memory = state.memory
    if any(isinstance(slots, DeltaState) for _, slots in memory):
        row = take(queue.row, sample)
        memory = delta.begin_slots(memory, fits, row, take(state.row_length, row) == 0)
    return dataclasses.replace(
        state,
        sample=sample,
        memory=memory,
        live=state.live | fits,
        index=jnp.where(fits, 0, state.index),
        token=jnp.where(fits, take(state.samples.opening, sample), state.token),
        queue=dataclasses.replace(queue, next=queue.next + fits.sum(-1, dtype=jnp.int32)),
    )


def _one_token(parts: Parts, aligned: bool, params: Params, state: DecodeState) -> DecodeState:
    model, longest = parts.model, parts.settings.max_completion_tokens
    row = _slot_rows(state, aligned)
    position = (take(state.row_length, row) + state.index)[..., None]
    sharing = Sharing(None, None) if aligned else _sharing(state, row)
    # A slot without a sample reads nothing but its own last token.
    index = jnp.where(state.live, state.index, 0)
    if parts.attention.has_lines:
        if state.pauses is not None:  # and what one that is paused writes comes behind its tokens
            index = jnp.where(state.pauses.mask, jnp.minimum(state.index, longest - 1), index)
        attend = decode_lines(index, state.row_length, sharing, parts.attention)
    else:
        attend = decode(state.clock, index, state.row_length, sharing)
    recur = delta.decode(None if state.pauses is None else state.pauses.mask)
    memory = routing.with_records(model.config.kinds, state.memory)
    caller = Caller(attend, recur=recur, keeps_latents=True)
    hidden, memory = model.apply(params, state.token[..., None], position, caller, memory)
    memory, records = routing.without_records(model.config.kinds, memory)
    state = record_experts(state, records)
    logits = model.unembed(params, hidden[..., 0, :])  # [D, N, V]
    token, logp, support = _drawn(parts, state, logits)
    state = record_support(state, support)
    samples, token, ended = _written(parts, state, logits, token, logp)
    index, pauses = state.index + 1, state.pauses
    if pauses is not None:
        pairs = zip((state.index, state.token), (index, token), strict=True)
        index, token = (jnp.where(pauses.mask, *pair) for pair in pairs)
        pauses = Pauses(
            mask=pauses.mask | (state.live & ended),
            clock=jnp.where(state.live, state.clock + 1, pauses.clock),
        )
    return dataclasses.replace(
        state,
        live=state.live & ~ended,
        pauses=pauses,
        index=index,
        token=token,
        samples=samples,
        memory=memory,
        clock=state.clock + 1,
        slot_steps=state.slot_steps + token.size,
    )


def _sharing(state: DecodeState, row: Array) -> Sharing:
    """Reader g of row a is at place a * G + g."""
    place = row * state.readers + take(state.queue.reader, state.sample)
    places, slots = state.row_length.shape[1] * state.readers, place.shape[1]

    def invert(place: Array, live: Array) -> Array:
        target = jnp.where(live, place, places)
        return jnp.full(places, slots).at[target].set(jnp.arange(slots), mode="drop")

    return Sharing(jax.vmap(invert)(place, state.live), place)


def _drawn(parts: Parts, state: DecodeState, logits: Array) -> tuple[Array, Array, Array | None]:
    """(token, log-prob, what it is drawn among if that is recorded) [D, N, ...] of each slot."""
    settings = parts.settings
    distribution = Distribution(
        settings.temperature, settings.top_k, settings.top_p, settings.min_p
    )
    keys = jax.random.wrap_key_data(take(state.samples.keys, state.sample), impl=GENERATOR)
    number = state.index
    if state.samples.start is not None:
        number += take(state.samples.start, state.sample)
    keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, number)
    if settings.min_completion_tokens > 0 and settings.stop_tokens:
        stops = jnp.zeros(logits.shape[-1], bool).at[jnp.asarray(settings.stop_tokens)].set(True)
        early = number < settings.min_completion_tokens
        logits = jnp.where(early[..., None] & stops, -jnp.inf, logits)
    remaining, support = logits, None
    if settings.support and settings.temperature > 0:  # the likeliest token is that among all
        remaining, support = named_support(
            logits, distribution, settings.support, parts.vocab_shards
        )
        distribution = Distribution()
    token, logp = draw(keys, remaining, distribution, parts.vocab_shards)
    if state.samples.greedy is None:
        return token, logp, support
    likeliest, its_logp = draw(keys, logits, Distribution(0.0))
    is_greedy = take(state.samples.greedy, state.sample)
    if support is not None:  # the likeliest token's log-prob is that among all
        support = jnp.where(is_greedy[..., None], NONE, support)
    token, logp = jnp.where(is_greedy, likeliest, token), jnp.where(is_greedy, its_logp, logp)
    return token, logp, support


def _written(
    parts: Parts, state: DecodeState, logits: Array, token: Array, logp: Array
) -> tuple[Samples, Array, Array]:
    """The samples with one more token each, drawn or given; this token, and who ends with it."""
    settings, samples, total = parts.settings, state.samples, state.samples.length.shape[1]
    drawn, next_token = jnp.ones_like(state.live), token.astype(jnp.int32)
    if samples.offset is not None:
        drawn = state.index >= take(samples.offset, state.sample)
        next_token = jnp.where(drawn, next_token, prefix_token(state))
    stops = jnp.asarray(settings.stop_tokens, jnp.int32)
    stopped = drawn & (next_token[..., None] == stops).any(-1)
    sample = jnp.where(state.live, state.sample, total)  # the samples of dead slots stay
    limit = settings.max_completion_tokens
    if samples.limit is not None:
        limit = take(samples.limit, state.sample)
    ended = stopped | (state.index + 1 >= limit)

    def write(array: Array, value: Array, *index: Array) -> Array:
        return put(array, value, sample, *index)

    if (stop := settings.early_stop) is not None and samples.confidence is not None:
        scaled = logits.astype(jnp.float32) / temperature(settings, state)
        config, tokens = parts.model.config, stop.tokens
        has_text = tokens_with_text(config.vocab_size, config.without_text)
        confidence = confidence_from_logits(scaled, tokens, has_text, parts.vocab_shards)
        confidence = jnp.where(drawn, confidence, 0)
        confidence_sum, unsure = _sum_confidence(stop, state, samples.confidence, confidence)
        ended |= drawn & unsure
        samples = dataclasses.replace(
            samples,
            confidence=write(samples.confidence, confidence_sum, state.index),
            unsure=write(samples.unsure, drawn & unsure),
        )
    samples = dataclasses.replace(
        samples,
        tokens=write(samples.tokens, next_token, state.index),
        logp=write(samples.logp, jnp.where(drawn, logp, 0), state.index),
        length=write(samples.length, state.index + 1),
        stopped=write(samples.stopped, stopped),
        ended=write(samples.ended, ended),
    )
    if settings.answering is not None:
        ending = answering.Ending(stopped, ended)
        samples, ended = answering.answer(settings.answering, state, samples, ending)
    return samples, next_token, ended


def _sum_confidence(
    stop: EarlyStop, state: DecodeState, confidence_sums: Array, confidence: Array
) -> tuple[Array, Array]:
    """[D, N]: the confidence up to this token, and whether the last window has too little.

    Shapes: confidence_sums [D, M, T], up to each token before; confidence [D, N], of this one.
    """

    def confidence_up_to(index: Array) -> Array:
        read = jax.vmap(lambda values, sample, index: values[sample, index])
        return jnp.where(index < 0, 0, read(confidence_sums, state.sample, index))

    confidence_sum = confidence_up_to(state.index - 1) + confidence
    number = state.index + 1
    if state.samples.offset is not None:
        number -= take(state.samples.offset, state.sample)
    mean = (confidence_sum - confidence_up_to(state.index - stop.window)) / stop.window
    threshold = take(state.samples.threshold, state.sample)
    return confidence_sum, (number >= stop.window) & (mean < threshold)


def finals(parts: Parts, samples: Samples, places: Array) -> Finals:
    """Some samples as they are, in every process.

    Args:
      places: [n] int32, counted over all bins.
    """

    def take_places(array: Array) -> Array:
        values = array.reshape(-1, *array.shape[2:])[places]
        return parts.constrain(values, (None,) * values.ndim)

    plays = samples.plays
    values = Finals(
        *(samples.tokens, samples.logp, samples.confidence),
        *(samples.experts, samples.support, samples.length, samples.stopped, samples.unsure),
        None if plays is None else dataclasses.replace(plays, state=None),
    )
    return jax.tree.map(take_places, values)


def laid_out(parts: Parts, state: DecodeState) -> DecodeState:
    """Everything but the memory on the mesh: bins over their devices."""

    def place(leaf: Array) -> Array:
        return parts.constrain(leaf, ("bins", *[None] * (leaf.ndim - 1))) if leaf.ndim else leaf

    return dataclasses.replace(
        jax.tree.map(place, dataclasses.replace(state, memory=())), memory=state.memory
    )
