"""The device's part of sampling: the state of decoding, and the functions that change it.

Bins are shards of the batch, D of them. Each has N slots, which decode side by side, a cache with a
row for each of A prompts, and a queue of samples: sample s belongs to the bin's prompt s // G.
A slot opens with the last prompt token, so that every forward pass, the first one too, is the same
program and yields one new token; when its sample ends it takes the next one of the queue.

What looks things up in tables does so per bin (`jax.vmap` over D), so that nothing moves between
devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.types import Params
from jaxgrpo.models.api import Constrain, Model
from jaxgrpo.models.attention import Sharing, chunk, decode
from jaxgrpo.models.cache import Cache, Ring, cache_dtype, older_parts, settled
from jaxgrpo.models.logprobs import confidence_from_logits
from jaxgrpo.rollout.drawing import Distribution, draw, softmax_logp
from jaxgrpo.rollout.state import DecodeState, Queue, Samples, SamplingSettings
from jaxgrpo.rollout.stopping import EarlyStop


class Counters(NamedTuple):
    """What the host reads after a segment; the same in every process."""

    live: Array  # [] int32, slots in use, of the bin that has most
    drained: Array  # [] bool, no sample waits for a slot in any bin
    ended: Array  # [D, P] bool, prompts all of whose samples have ended


class Engine(NamedTuple):
    """What the functions of decoding are built from."""

    model: Model
    settings: SamplingSettings
    constrain: Constrain
    vocab_shards: int = 1  # devices that the vocabulary is divided over


def first_state(
    engine: Engine, samples: Samples, queue: Queue, rows: int, width: int, slots: int
) -> DecodeState:
    """Empty slots and caches. Args: rows, width: A and S of the prompts' cache; slots: N."""
    bins = queue.next.shape[0]
    config = engine.model.config
    dtype = cache_dtype(engine.settings.kv_cache_dtype, config)
    empty = jnp.zeros((bins, slots), jnp.int32)

    def cache(batch: tuple[int, ...], columns: int) -> Cache:
        heads = (*batch, config.num_kv_heads)
        key = jnp.zeros((*heads, config.head_dim, columns), dtype)
        value = jnp.zeros((*heads, columns, config.head_dim), dtype)
        axes = ("bins", *[None] * (len(batch) - 1), "kv_heads", None, None)
        return Cache(engine.constrain(key, axes), engine.constrain(value, axes))

    longest, block = engine.settings.max_completion_tokens, engine.settings.segment_tokens

    def ring(window: int | None) -> Ring:
        parts, columns = older_parts(min(longest, window or longest), block)
        older = tuple(cache((bins * slots,), columns) for _ in range(parts))
        return Ring(cache((bins * slots,), block), older)

    state = DecodeState(
        sample=empty,
        live=empty.astype(bool),
        index=empty,
        token=empty,
        samples=samples,
        queue=queue,
        row_length=jnp.zeros((bins, rows), jnp.int32),
        memory=tuple((cache((bins, rows), width), ring(kind.window)) for kind in config.kinds),
        clock=jnp.int32(0),
        slot_steps=jnp.int32(0),
    )
    return _laid_out(engine, state)


def prefill(
    engine: Engine, params: Params, state: DecodeState, tokens: Array, row: Array, start: Array
) -> DecodeState:
    """Writes chunks of prompts into their rows of the cache.

    Shapes: tokens [D, R, W], -1 behind the last one; row, start [D, R]. A chunk without tokens
    writes nothing.
    """
    length = (tokens >= 0).sum(-1, dtype=jnp.int32)
    position = start[..., None] + jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    shared, rings = zip(*state.memory, strict=True)
    attend = chunk(row, start, length)
    _, shared = engine.model.apply(params, jnp.maximum(tokens, 0), position, attend, shared)
    return dataclasses.replace(state, memory=tuple(zip(shared, rings, strict=True)))


def admit(
    settings: SamplingSettings, state: DecodeState, row: Array, row_length: Array, ready: Array
) -> DecodeState:
    """Lets the samples of prompts whose rows have been filled begin."""
    queue = dataclasses.replace(state.queue, row=row, ready=ready)
    return _refilled(settings, dataclasses.replace(state, queue=queue, row_length=row_length))


def segment(
    engine: Engine, aligned: bool, params: Params, state: DecodeState, enough: Array
) -> tuple[DecodeState, Counters]:
    """Decodes up to the end of a block of `segment_tokens` steps, or less if nothing is to be done.

    Args:
      aligned: slot n reads row n // (N / A) of the prompts' cache, always, and no sample waits.
      params: with each layer's parameters apart (`params_per_layer`).
      enough: [] int32; it ends when no sample waits and no bin has more live slots than that.
    """
    settings = engine.settings
    total = state.samples.length.shape[1]

    def waiting(state: DecodeState) -> Array:
        return state.queue.next < state.queue.ready * settings.group_size

    def running(carry: tuple[Array, DecodeState]) -> Array:
        step, state = carry
        drained = (state.queue.next >= total).all()
        most_live = state.live.sum(-1).max()
        busy = (most_live > 0) | waiting(state).any()
        in_block = (step == 0) | (state.clock % settings.segment_tokens != 0)
        return in_block & busy & ~(drained & (most_live <= enough))

    def one_token(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        if not aligned:
            state = _refilled(settings, state)
        return step + 1, _one_token(engine, aligned, params, state)

    _, state = jax.lax.while_loop(running, one_token, (jnp.int32(0), state))
    memory = tuple((prompts, settled(ring, state.clock)) for prompts, ring in state.memory)
    state = dataclasses.replace(state, memory=memory)
    bins, prompts = state.queue.row.shape
    ended = state.samples.ended.reshape(bins, prompts, -1)
    counters = Counters(
        live=state.live.sum(-1).max(),
        drained=(state.queue.next >= total).all(),
        ended=engine.constrain(ended.all(-1), (None, None)),
    )
    return state, counters


def staying(
    settings: SamplingSettings, state: DecodeState, slots: int, aligned: bool
) -> tuple[Array, Array]:
    """The slots that stay when they become fewer, live ones first, and the rows that they read.

    Shapes: [D, slots] each.
    """
    order = jnp.argsort(~state.live, axis=-1, stable=True)[:, :slots]
    return order, take(_slot_rows(settings, state, aligned), order)


def cut(settings: SamplingSettings, state: DecodeState, length: Array) -> DecodeState:
    """Ends samples after `length` [D, M] tokens, and frees their slots; -1: not this one."""
    samples, is_cut = state.samples, length >= 0
    over = is_cut[..., None] & (jnp.arange(samples.tokens.shape[-1]) >= length[..., None])

    def without(array: Array | None) -> Array | None:
        return None if array is None else jnp.where(over, jnp.zeros((), array.dtype), array)

    samples = dataclasses.replace(
        samples,
        tokens=jnp.where(over, settings.pad_token, samples.tokens),
        logp=without(samples.logp),
        untempered=without(samples.untempered),
        length=jnp.where(is_cut, length, samples.length),
        stopped=samples.stopped | is_cut,
        ended=samples.ended | is_cut,
    )
    live = state.live & ~take(is_cut, state.sample)
    return dataclasses.replace(state, samples=samples, live=live)


def take(tree: Any, places: Array) -> Any:
    """Entries [D, n, ...] of leaves [D, N, ...] at [D, n], bin by bin."""
    return jax.tree.map(lambda leaf: jax.vmap(lambda row, index: row[index])(leaf, places), tree)


def take_slots(tree: Any, order: Array) -> Any:
    """`take` of leaves [D * N, ...]."""
    bins = len(order)

    def take_per_bin(leaf: Array) -> Array:
        slots = take(leaf.reshape(bins, -1, *leaf.shape[1:]), order)
        return slots.reshape(-1, *leaf.shape[1:])

    return jax.tree.map(take_per_bin, tree)


def _slot_rows(settings: SamplingSettings, state: DecodeState, aligned: bool) -> Array:
    """[D, N]: the row of the prompts' cache that each slot reads."""
    if aligned:
        rows, slots = state.row_length.shape[1], state.sample.shape[1]
        return jnp.broadcast_to(jnp.arange(slots) // (slots // rows), state.sample.shape)
    return take(state.queue.row, state.sample // settings.group_size)


def _refilled(settings: SamplingSettings, state: DecodeState) -> DecodeState:
    """Free slots take the next samples of their bin's queue, in order."""
    queue, group = state.queue, settings.group_size
    free = ~state.live
    next_sample = queue.next[:, None] + jnp.cumsum(free, axis=-1, dtype=jnp.int32) - 1
    fits = free & (next_sample < queue.ready[:, None] * group)
    prompt = jnp.where(fits, next_sample // group, 0)
    return dataclasses.replace(
        state,
        sample=jnp.where(fits, next_sample, state.sample),
        live=state.live | fits,
        index=jnp.where(fits, 0, state.index),
        token=jnp.where(fits, take(queue.last, prompt), state.token),
        queue=dataclasses.replace(queue, next=queue.next + fits.sum(-1, dtype=jnp.int32)),
    )


def _one_token(engine: Engine, aligned: bool, params: Params, state: DecodeState) -> DecodeState:
    model, settings = engine.model, engine.settings
    row = _slot_rows(settings, state, aligned)
    position = (take(state.row_length, row) + state.index)[..., None]
    sharing = Sharing(None, None) if aligned else _sharing(settings, state, row)
    # A slot without a sample reads nothing but its own last token.
    index = jnp.where(state.live, state.index, 0)
    attend = decode(state.clock, index, state.row_length, sharing)
    hidden, memory = model.apply(params, state.token[..., None], position, attend, state.memory)
    logits = model.unembed(params, hidden[..., 0, :])  # [D, N, V]
    token, logp = _drawn(engine, state, logits)
    samples, token, ended = _written(engine, state, logits, token, logp)
    return dataclasses.replace(
        state,
        live=state.live & ~ended,
        index=state.index + 1,
        token=token,
        samples=samples,
        memory=memory,
        clock=state.clock + 1,
        slot_steps=state.slot_steps + token.size,
    )


def _sharing(settings: SamplingSettings, state: DecodeState, row: Array) -> Sharing:
    """Sample g of the prompt in row a reads it at place a * G + g."""
    place = row * settings.group_size + state.sample % settings.group_size
    places, slots = state.row_length.shape[1] * settings.group_size, place.shape[1]

    def invert(place: Array, live: Array) -> Array:
        target = jnp.where(live, place, places)
        return jnp.full(places, slots).at[target].set(jnp.arange(slots), mode="drop")

    return Sharing(jax.vmap(invert)(place, state.live), place)


def _drawn(engine: Engine, state: DecodeState, logits: Array) -> tuple[Array, Array]:
    settings = engine.settings
    keys = jax.random.wrap_key_data(take(state.samples.keys, state.sample))
    keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, state.index)
    if settings.min_completion_tokens > 0 and settings.stop_tokens:
        stops = jnp.zeros(logits.shape[-1], bool).at[jnp.asarray(settings.stop_tokens)].set(True)
        early = state.index < settings.min_completion_tokens
        logits = jnp.where(early[..., None] & stops, -jnp.inf, logits)
    token, logp = draw(keys, logits, settings.distribution, engine.vocab_shards)
    if not settings.greedy:
        return token, logp
    likeliest, its_logp = draw(keys, logits, Distribution(0.0))
    is_greedy = _is_greedy(settings, state)
    return jnp.where(is_greedy, likeliest, token), jnp.where(is_greedy, its_logp, logp)


def _is_greedy(settings: SamplingSettings, state: DecodeState) -> Array:
    """[D, N]: the slots whose samples take the likeliest token."""
    return state.sample % settings.group_size >= settings.group_size - settings.greedy


def _written(
    engine: Engine, state: DecodeState, logits: Array, token: Array, logp: Array
) -> tuple[Samples, Array, Array]:
    """The samples with one more token each, drawn or forced; this token, and who ends with it."""
    settings, samples, total = engine.settings, state.samples, state.samples.length.shape[1]
    forced = _forced(state)
    drawn = forced < 0
    next_token = jnp.where(drawn, token, forced).astype(jnp.int32)
    stops = jnp.asarray(settings.stop_tokens, jnp.int32)
    stopped = drawn & (next_token[..., None] == stops).any(-1)
    sample = jnp.where(state.live, state.sample, total)  # the samples of dead slots stay
    ended = stopped | (state.index + 1 >= settings.max_completion_tokens)

    def write(array: Array, value: Array, *index: Array) -> Array:
        write_bin = lambda array, value, *index: array.at[index].set(value, mode="drop")  # noqa: E731
        return jax.vmap(write_bin)(array, value.astype(array.dtype), sample, *index)

    if samples.untempered is not None:
        raw = jnp.where(drawn, softmax_logp(logits, token), 0)
        raw = write(samples.untempered, raw, state.index)
        samples = dataclasses.replace(samples, untempered=raw)
    if settings.early_stop is not None and samples.confidence is not None:
        temperature = settings.temperature or 1.0
        temperature = jnp.where(_is_greedy(settings, state), 1.0, temperature)[..., None]
        scaled = logits.astype(jnp.float32) / temperature
        number = min(settings.early_stop.tokens, engine.model.config.num_drawable)
        confidence = jnp.where(drawn, confidence_from_logits(scaled, number), 0)
        confidence_sum, unsure = _sum_confidence(
            settings.early_stop, state, samples.confidence, confidence
        )
        confidence_sum = write(samples.confidence, confidence_sum, state.index)
        samples = dataclasses.replace(samples, confidence=confidence_sum)
        ended = ended | (drawn & unsure)
    samples = dataclasses.replace(
        samples,
        tokens=write(samples.tokens, next_token, state.index),
        logp=write(samples.logp, jnp.where(drawn, logp, 0), state.index),
        length=write(samples.length, state.index + 1),
        stopped=write(samples.stopped, stopped),
        ended=write(samples.ended, ended),
    )
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
    if state.samples.forced is not None:
        number -= (take(state.samples.forced, state.sample) >= 0).sum(-1)
    mean = (confidence_sum - confidence_up_to(state.index - stop.window)) / stop.window
    return confidence_sum, (number >= stop.window) & (mean < stop.confidence)


def _forced(state: DecodeState) -> Array:
    """[D, N]: the token that each slot has to take next, -1 where it draws one."""
    if state.samples.forced is None:
        return jnp.full_like(state.token, -1)
    read = lambda values, *index: values.at[index].get(mode="fill", fill_value=-1)  # noqa: E731
    return jax.vmap(read)(state.samples.forced, state.sample, state.index)


def _laid_out(engine: Engine, state: DecodeState) -> DecodeState:
    """Everything but the memory on the mesh: bins over their devices."""

    def place(leaf: Array) -> Array:
        return engine.constrain(leaf, ("bins", *[None] * (leaf.ndim - 1))) if leaf.ndim else leaf

    return dataclasses.replace(
        jax.tree.map(place, dataclasses.replace(state, memory=())), memory=state.memory
    )
