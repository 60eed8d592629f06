"""Turns of samples that ended: cut where a text says so, answered, or let go.

A slot whose sample may go on is paused: what it writes while others decode is kept nowhere, and the
sample's keys and values stay, or move to a place aside, so that another sample decodes there, and
back into a slot that is free. The tokens of a reply are written behind its turn. Those of a long
one are computed in chunks, others fed one by one, as those that a sample begins with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.types import Params
from jaxgrpo.models import delta, routing
from jaxgrpo.models.api import Caller
from jaxgrpo.models.attention import Pieces, slot_chunk
from jaxgrpo.models.cache import Ring, moved_up
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.capacity import CHUNK
from jaxgrpo.rollout.slots.decoding import Parts, laid_out
from jaxgrpo.rollout.slots.state import (
    DecodeState,
    Drawn,
    Moves,
    Pauses,
    Replies,
    Samples,
    SlotContents,
    put,
    take,
)


def drawn(parts: Parts, samples: Samples) -> Drawn:
    """The tokens that were drawn, of which the last segment's come along."""
    begin = jnp.zeros_like(samples.length) if samples.offset is None else samples.offset
    place = samples.length[..., None] + jnp.arange(-parts.settings.segment_tokens, 0)
    newest = jnp.take_along_axis(samples.tokens, jnp.maximum(place, 0), axis=-1)
    newest = jnp.where(place >= begin[..., None], newest, -1)
    number = jnp.maximum(samples.length - begin, 0)
    return Drawn(parts.constrain(number, (None, None)), parts.constrain(newest, (None,) * 3))


def cut(settings: SamplingSettings, state: DecodeState, length: Array) -> DecodeState:
    """Ends samples after `length` [D, M] tokens, and frees their slots; -1: not this one."""
    samples, is_cut, before = state.samples, length >= 0, state.live
    over = is_cut[..., None] & (jnp.arange(samples.tokens.shape[-1]) >= length[..., None])

    def without(array: Array | None) -> Array | None:
        return None if array is None else jnp.where(over, jnp.zeros((), array.dtype), array)

    samples = dataclasses.replace(
        samples,
        tokens=jnp.where(over, settings.pad_token, samples.tokens),
        logp=without(samples.logp),
        length=jnp.where(is_cut, length, samples.length),
        stopped=samples.stopped | is_cut,
        ended=samples.ended | is_cut,
    )
    is_cut = take(is_cut, state.sample)
    state = dataclasses.replace(state, samples=samples, live=state.live & ~is_cut)
    if state.pauses is None:
        return state
    return _paused_where_cut(state, state.pauses, before, is_cut)


def _paused_where_cut(
    state: DecodeState, pauses: Pauses, before: Array, is_cut: Array
) -> DecodeState:
    """Slots whose samples were cut hold them without what was drawn too much.

    Args:
      before: which slots decoded; a sample that was cut may have ended by itself since.
    """
    is_cut &= before | pauses.mask
    index = jnp.where(is_cut, take(state.samples.length, state.sample), state.index)
    clock = jnp.where(before, state.clock, pauses.clock) - (state.index - index)
    read = jax.vmap(lambda values, *at: values[at])
    last = read(state.samples.tokens, state.sample, jnp.maximum(index - 1, 0))
    return dataclasses.replace(
        state,
        pauses=Pauses(mask=pauses.mask | is_cut, clock=jnp.where(is_cut, clock, pauses.clock)),
        index=index,
        token=jnp.where(is_cut, last, state.token),
    )


def reply(
    parts: Parts, state: DecodeState, aside: SlotContents | None, replies: Replies
) -> tuple[DecodeState, SlotContents | None]:
    """Frees slots, moves samples out of theirs and back, and lets some go on with the tokens that
    are given.

    Args:
      aside: what slots held of samples that have moved out; None: none ever does.
    """
    samples, longest = state.samples, state.samples.tokens.shape[-1]
    assert state.pauses is not None
    is_free = state.pauses.mask & take(jnp.asarray(replies.leaves), state.sample)
    pauses = dataclasses.replace(state.pauses, mask=state.pauses.mask & ~is_free)
    state = dataclasses.replace(state, pauses=pauses)
    if aside is not None:
        state, aside = _moved(state, pauses, aside, replies.moves)
    pauses, limit = state.pauses, longest if samples.limit is None else samples.limit
    assert pauses is not None
    assert samples.offset is not None
    goes_on, words = jnp.asarray(replies.goes_on), jnp.asarray(replies.tokens)
    place = jnp.asarray(replies.start)[..., None] + jnp.arange(words.shape[-1])
    place = jnp.where(goes_on[..., None] & (words >= 0), place, longest)
    offset = replies.start + (words >= 0).sum(-1)
    put_row = lambda row, *at_value: row.at[at_value[0]].set(at_value[1], mode="drop")  # noqa: E731
    samples = dataclasses.replace(
        samples,
        tokens=jax.vmap(jax.vmap(put_row))(samples.tokens, place, words),
        offset=jnp.where(goes_on, offset, samples.offset),
        limit=jnp.where(goes_on, replies.limit, limit),
        stopped=samples.stopped & ~goes_on,
        ended=samples.ended & ~goes_on,
    )
    is_on = pauses.mask & take(goes_on, state.sample)
    memory = state.memory
    if not parts.attention.has_lines:
        chunked = take(jnp.asarray(replies.chunked), state.sample)  # room for these between
        memory = _moved_up(memory, is_on, state.clock - pauses.clock - chunked)
    state = dataclasses.replace(
        state,
        samples=samples,
        live=state.live | is_on,
        pauses=dataclasses.replace(pauses, mask=pauses.mask & ~is_on),
        memory=memory,
    )
    return laid_out(parts, state), aside


def empty_places(state: DecodeState, number: int) -> SlotContents:
    """So many places of each bin for what a slot holds."""
    bins = state.sample.shape[0]
    assert state.pauses is not None
    empty = lambda leaf: jnp.zeros((bins * number, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
    return jax.tree.map(empty, _contents(state, state.pauses))


def _contents(state: DecodeState, pauses: Pauses) -> SlotContents:
    """What the slots hold. A ring's current block is among what is older when a segment ends."""
    memory = [slots.older if isinstance(slots, Ring) else slots for _, slots in state.memory]
    index, token, clock = (x.reshape(-1) for x in (state.index, state.token, pauses.clock))
    return SlotContents(index, token, clock, memory)


def _moved(
    state: DecodeState, pauses: Pauses, aside: SlotContents, moves: Moves
) -> tuple[DecodeState, SlotContents]:
    """Paused samples out of their slots, and others back into slots that are free then."""
    bins, slots = state.sample.shape
    total = state.samples.length.shape[1]
    contents, out, back = _contents(state, pauses), jnp.asarray(moves.out), jnp.asarray(moves.back)
    at_slots = pauses.mask[:, None] & (state.sample[:, None] == out[..., None])  # [D, K, N]
    slot = at_slots.argmax(-1)
    aside = _copied(contents, slot, aside, jnp.arange(slot.shape[1]), out < total)
    mask = pauses.mask & ~at_slots.any(1)

    is_back = back < total
    free = jnp.argsort(state.live | mask, axis=-1, stable=True)  # [D, N], free slots first
    number = jnp.cumsum(is_back, axis=-1) - 1
    slot = take(free, jnp.clip(number, 0, slots - 1))
    contents = _copied(aside, jnp.arange(slot.shape[1]), contents, slot, is_back)
    slot = jnp.where(is_back, slot, slots)
    per_bin = lambda array: array.reshape(bins, slots)  # noqa: E731
    memory = tuple(
        (prompts, old._replace(older=new) if isinstance(old, Ring) else new)
        for (prompts, old), new in zip(state.memory, contents.memory, strict=True)
    )
    state = dataclasses.replace(
        state,
        sample=put(state.sample, back, slot),
        index=per_bin(contents.index),
        token=per_bin(contents.token),
        pauses=Pauses(mask=put(mask, is_back, slot), clock=per_bin(contents.clock)),
        memory=memory,
    )
    return state, aside


def _copied(
    source: SlotContents, from_: Array, target: SlotContents, to: Array, is_real: Array
) -> SlotContents:
    """`target` with what `source` holds at some places.

    Shapes: is_real [D, K], what is copied at all; from_ and to [D, K], or [K] for all bins.
    """
    bins = is_real.shape[0]
    from_, to = (jnp.broadcast_to(places, is_real.shape) for places in (from_, to))
    order = jnp.argsort(~is_real, axis=-1, stable=True)
    from_, to, is_real = (jnp.take_along_axis(x, order, 1) for x in (from_, to, is_real))

    def copy(source: Array, at: Array, target: Array, to: Array, is_real: Array) -> Array:
        new = jax.lax.dynamic_index_in_dim(source, at, keepdims=False)
        old = jax.lax.dynamic_index_in_dim(target, to, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(target, jnp.where(is_real, new, old), to, 0)

    def copy_in_bins(step: Array, source: Array, target: Array) -> Array:
        at = from_[:, step], to[:, step], is_real[:, step]
        per_bin = [leaf.reshape(bins, -1, *leaf.shape[1:]) for leaf in (source, target)]
        if bins == 1:  # a slice, and no gather
            return copy(source, at[0][0], target, at[1][0], at[2][0])
        return jax.vmap(copy)(per_bin[0], at[0], per_bin[1], *at[1:]).reshape(target.shape)

    def step(number: Array, target: SlotContents) -> SlotContents:
        along = lambda source, target: copy_in_bins(number, source, target)  # noqa: E731
        return jax.tree.map(along, source, target)

    return jax.lax.fori_loop(0, is_real.sum(-1).max(), step, target)


def _moved_up(memory: Any, is_on: Array, columns: Array) -> Any:
    """The memory with what some slots hold so many columns later."""
    order = jnp.argsort(~is_on, axis=-1, stable=True)
    number = is_on.sum(-1)

    def move(at: Array, memory: Any) -> Any:
        slot = order[:, at]
        by = jnp.where(at < number, jnp.take_along_axis(columns, slot[:, None], 1)[:, 0], 0)
        return tuple(
            (prompts, moved_up(slots, slot, by) if isinstance(slots, Ring) else slots)
            for prompts, slots in memory
        )

    return jax.lax.fori_loop(0, number.max(), move, memory)


def give(
    parts: Parts, params: Params, state: DecodeState, place: Array, size: Array, left: Array
) -> DecodeState:
    """Computes a chunk of the tokens that are given to each of some samples, which go on behind it.

    Shapes: place [D, R], the samples' places, M: none; size and left [D, R], as in `Pieces`.
    """
    samples, total = state.samples, state.samples.length.shape[1]
    at_slots = state.live[:, None] & (state.sample[:, None] == place[..., None])  # [D, R, N]
    slot = jnp.where(at_slots.any(-1), at_slots.argmax(-1), state.sample.shape[1])
    near = jnp.minimum(slot, state.sample.shape[1] - 1)
    start, token = take(state.index, near), take(state.token, near)
    row = take(take(state.queue.row, state.sample), near)
    offset = jnp.arange(CHUNK)
    number = start[..., None] + offset
    read = jax.vmap(lambda values, place, at: values.at[place[:, None], at].get(mode="clip"))
    words = read(samples.tokens, jnp.minimum(place, total - 1), number)
    tokens = jnp.concatenate([token[..., None], words[..., :-1]], -1)
    pieces = Pieces(slot, row, start, size, left)
    position = take(state.row_length, row)[..., None] + number
    attend, config = slot_chunk(pieces, state.row_length, state.clock), parts.model.config
    caller = Caller(attend, recur=delta.slot_chunk(slot, size), keeps_latents=True)
    memory = routing.with_records(config.kinds, state.memory)
    _, memory = parts.model.apply(params, tokens, position, caller, memory)
    memory, _ = routing.without_records(config.kinds, memory)
    last = jnp.take_along_axis(words, jnp.maximum(size - 1, 0)[..., None], -1)[..., 0]
    state = dataclasses.replace(
        state,
        index=put(state.index, start + size, slot),
        token=put(state.token, last, slot),
        samples=dataclasses.replace(samples, length=put(samples.length, start + size, place)),
        memory=memory,
    )
    return laid_out(parts, state)
