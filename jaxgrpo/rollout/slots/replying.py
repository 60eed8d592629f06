"""Turns of samples that ended: cut where a text says so, answered in their slots, or let go.

A sample that may go on keeps its slot, which is then paused: what it writes while others decode is
kept nowhere, and its keys and values stay. The tokens of a reply are written behind its turn. Those
of a long one are computed in chunks, others fed one by one, as those that a sample begins with.
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
    Pauses,
    Replies,
    Samples,
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


def reply(parts: Parts, state: DecodeState, replies: Replies) -> DecodeState:
    """Frees slots, and lets samples go on in theirs with the tokens that are given."""
    samples, longest = state.samples, state.samples.tokens.shape[-1]
    assert state.pauses is not None
    pauses, limit = state.pauses, longest if samples.limit is None else samples.limit
    goes_on, words = jnp.asarray(replies.goes_on), jnp.asarray(replies.tokens)
    place = jnp.asarray(replies.start)[..., None] + jnp.arange(words.shape[-1])
    place = jnp.where(goes_on[..., None] & (words >= 0), place, longest)
    offset = replies.start + (words >= 0).sum(-1)
    put_row = lambda row, *at_value: row.at[at_value[0]].set(at_value[1], mode="drop")  # noqa: E731
    samples = dataclasses.replace(
        samples,
        tokens=jax.vmap(jax.vmap(put_row))(samples.tokens, place, words),
        offset=jnp.where(goes_on, offset, 0 if samples.offset is None else samples.offset),
        limit=jnp.where(goes_on, replies.limit, limit),
        stopped=samples.stopped & ~goes_on,
        ended=samples.ended & ~goes_on,
    )
    is_on = pauses.mask & take(goes_on, state.sample)
    is_free = pauses.mask & take(jnp.asarray(replies.leaves), state.sample)
    memory = state.memory
    if not parts.attention.has_lines:
        chunked = take(jnp.asarray(replies.chunked), state.sample)  # room for these between
        memory = _moved_up(memory, is_on, state.clock - pauses.clock - chunked)
    state = dataclasses.replace(
        state,
        samples=samples,
        live=state.live | is_on,
        pauses=dataclasses.replace(pauses, mask=pauses.mask & ~is_on & ~is_free),
        memory=memory,
    )
    return laid_out(parts, state)


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
