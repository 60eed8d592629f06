"""Turns that rules in JAX answer within the step of decoding that ends them.

The tokens of a reply are written behind the turn and then fed one by one, as those that a sample
begins with are, so a sample keeps its slot and the host has no part in it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.environments.rules import Answering
from jaxgrpo.rollout.slots.state import DecodeState, Entries, Plays, Samples, put, take


class Ending(NamedTuple):
    """Which slots [D, N] end with the token that was just written, before anything answers them."""

    stopped: Array  # bool, by a token that ends turns
    ended: Array  # bool, by that or by the limit of the sample


def enter(answering: Answering, plays: Plays | None, entries: Entries) -> Plays:
    """The plays with samples that come to their places."""
    is_new = jnp.asarray(entries.is_new)
    shape = *is_new.shape, answering.turns
    if plays is None:
        count = jnp.zeros(is_new.shape, jnp.int32)
        turns = jnp.zeros(shape, jnp.int32)
        plays = Plays(
            state=jax.tree.map(jnp.asarray, entries.state),
            count=count,
            begins=turns,
            ends=turns,
            rewards=turns.astype(jnp.float32),
            is_done=count.astype(bool),
        )
    first = jnp.full(shape, -1, jnp.int32).at[..., 0].set(0)
    fresh = Plays(
        state=entries.state,
        count=jnp.zeros_like(plays.count),
        begins=first,
        ends=jnp.zeros_like(plays.ends),
        rewards=jnp.zeros_like(plays.rewards),
        is_done=jnp.zeros_like(plays.is_done),
    )

    def at_new(new: Array, old: Array) -> Array:
        return jnp.where(is_new.reshape(*is_new.shape, *[1] * (old.ndim - 2)), new, old)

    return jax.tree.map(at_new, fresh, plays)


def answer(
    answering: Answering, state: DecodeState, samples: Samples, ending: Ending
) -> tuple[Samples, Array]:
    """Lets the rules answer the turns that have just ended.

    Args:
      samples: with the last token of each slot.

    Returns: the samples, with replies behind turns, and which slots [D, N] end now.
    """
    assert samples.offset is not None
    longest = samples.tokens.shape[-1]
    length = state.index + 1 - take(samples.offset, state.sample)
    is_cut = (length >= answering.tokens) & (state.index + 1 < longest)
    asks = state.live & (length > 0) & (ending.stopped | is_cut)

    def nothing(samples: Samples) -> tuple[Samples, Array]:
        return samples, ending.ended

    def step(samples: Samples) -> tuple[Samples, Array]:
        return _step(answering, state, samples, ending, asks)

    return jax.lax.cond(asks.any(), step, nothing, samples)


def _step(
    answering: Answering, state: DecodeState, samples: Samples, ending: Ending, asks: Array
) -> tuple[Samples, Array]:
    plays, longest = samples.plays, samples.tokens.shape[-1]
    assert plays is not None
    assert samples.offset is not None
    begin, end = take(samples.offset, state.sample), state.index + 1
    length = end - begin - ending.stopped
    words = _window(samples.tokens, state.sample, begin, length, answering.tokens)
    before = take(plays.state, state.sample)
    after, reply, size, reward, is_done = jax.vmap(jax.vmap(answering.step))(before, words, length)
    written, size = _framed(answering, reply, size.astype(jnp.int32), ending.stopped)
    number, is_done = take(plays.count, state.sample), is_done.astype(bool)
    has_room = end + size < longest
    goes_on = asks & ~is_done & (number + 1 < answering.turns) & has_room
    at_asking = _Writer(state.sample, asks, plays.count.shape[1])
    at_going = _Writer(state.sample, goes_on, plays.count.shape[1])
    place = end[..., None] + jnp.arange(written.shape[-1])
    is_word = jnp.arange(written.shape[-1]) < size[..., None]
    plays = Plays(
        state=jax.tree.map(at_asking.write, plays.state, after),
        count=at_asking.write(plays.count, number + 1),
        begins=at_going.write(plays.begins, end + size, number + 1),
        ends=at_asking.write(plays.ends, end, number),
        rewards=at_asking.write(plays.rewards, reward, number),
        is_done=at_asking.write(plays.is_done, is_done),
    )
    samples = dataclasses.replace(
        samples,
        tokens=at_going.write_words(samples.tokens, written, place, is_word),
        offset=at_going.write(samples.offset, end + size),
        stopped=at_going.write(samples.stopped, jnp.zeros_like(goes_on)),
        ended=at_asking.write(samples.ended, ~goes_on),
        plays=plays,
    )
    return samples, jnp.where(asks, ~goes_on, ending.ended)


class _Writer(NamedTuple):
    """Writes values of slots [D, N] to their places, where a mask says so."""

    sample: Array
    mask: Array
    places: int

    def write(self, array: Array, value: Array, *index: Array) -> Array:
        place = jnp.where(self.mask, self.sample, self.places)
        value = jnp.broadcast_to(value, (*place.shape, *array.shape[2 + len(index) :]))
        return put(array, value, place, *index)

    def write_words(self, tokens: Array, words: Array, place: Array, is_word: Array) -> Array:
        sample = jnp.broadcast_to(self.sample[..., None], words.shape)
        sample = jnp.where(self.mask[..., None] & is_word, sample, self.places)
        return put(tokens, words, sample, place)


def _window(tokens: Array, sample: Array, begin: Array, length: Array, width: int) -> Array:
    """[D, N, W]: the tokens of a turn, -1 behind them."""
    offset = jnp.arange(width)
    read = jax.vmap(lambda values, sample, at: values.at[sample[:, None], at].get(mode="clip"))
    words = read(tokens, sample, begin[..., None] + offset)
    return jnp.where(offset < length[..., None], words, -1)


def _framed(answering: Answering, reply: Array, size: Array, stopped: Array) -> tuple[Array, Array]:
    """Replies [D, N, R] within what the chat template writes around them, and how many tokens."""
    closing, before, after = (jnp.asarray(part, jnp.int32) for part in answering.frame)
    opening = jnp.concatenate([closing, before])
    size = jnp.clip(size, 0, reply.shape[-1])
    skipped = jnp.where(stopped, len(closing), 0)
    lead = len(opening) - skipped  # [D, N], tokens before the reply
    place = jnp.arange(len(opening) + reply.shape[-1] + len(after))
    behind = place - lead[..., None]  # from the reply's first token on
    parts = [
        (behind < 0, opening, place + skipped[..., None]),
        (behind < size[..., None], reply, behind),
        (behind >= size[..., None], after, behind - size[..., None]),
    ]
    words = jnp.zeros(behind.shape, jnp.int32)
    for mask, source, index in reversed(parts):
        if source.shape[-1]:
            source = jnp.broadcast_to(source, (*behind.shape[:-1], source.shape[-1]))
            index = jnp.clip(index, 0, source.shape[-1] - 1)
            words = jnp.where(mask, jnp.take_along_axis(source, index, axis=-1), words)
    return words, lead + size + len(after)
