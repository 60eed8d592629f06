"""Samples that wait for replies beside their slots: who moves, when, and what it takes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrpo.models import sharding
from jaxgrpo.models.cache import Ring
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots import capacity
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.parking import Parking
from jaxgrpo.rollout.slots.programs import make_programs
from jaxgrpo.rollout.slots.state import Moves, Pauses, Replies, SlotContents

NONE = 6  # places of a bin
SETTINGS = SamplingSettings(24, 1.0, (tiny.END,), tiny.PAD, 4, max_turns=3)


def parking(slots=2, bins=1):
    """Of six samples of each bin, which have begun or wait for a slot."""
    record = Parking(Sizes.for_prompts(slots * bins, bins, 3 * bins, 2, 8, parks=True))
    for bin_ in range(bins):
        record.queue(bin_, NONE)
    record.begin()
    return record


def moved(record, paused):
    moves, back = record.move(paused)
    return moves.out.tolist(), moves.back.tolist(), back


def test_who_has_waited_least_leaves_its_slot_to_a_sample_that_waits():
    record = parking()
    assert moved(record, [(0, 1)]) == ([[1, NONE]], [[NONE] * 2], [])
    assert record.is_aside((0, 1))
    record.begin()  # the third sample has the slot
    assert moved(record, [(0, 0), (0, 2)]) == ([[NONE, 2]], [[NONE] * 2], [])
    record.begin()
    assert moved(record, [(0, 0), (0, 3)]) == ([[NONE] * 2] * 1, [[NONE] * 2], [])  # no place left


def test_an_answered_sample_goes_on_once_a_slot_is_free():
    record = parking()
    record.move([(0, 1)])
    record.begin()
    record.answer((0, 1))
    assert moved(record, []) == ([[NONE] * 2], [[NONE] * 2], [])
    record.leave((0, 0))
    assert moved(record, []) == ([[NONE] * 2], [[1, NONE]], [(0, 1)])  # before those of the queue
    assert not record.is_aside((0, 1))
    record.begin()
    record.leave((0, 2))
    record.begin()  # the fourth sample begins
    assert moved(record, [(0, 3)]) == ([[NONE, 3]], [[NONE] * 2], [])


def test_nothing_moves_where_nobody_waits():
    record = Parking(Sizes.for_prompts(2, 1, 3, 2, 8, parks=True))
    record.queue(0, 2)
    record.begin()
    moves, back = record.move([(0, 0), (0, 1)])
    assert not record.moves_any(moves)
    assert not back


def test_a_sample_that_is_aside_and_ends_makes_room_there():
    record = parking()
    record.move([(0, 0), (0, 1)])
    record.begin()
    record.leave((0, 1))
    assert moved(record, [(0, 3)])[0] == [[3, NONE]]  # where that sample was


def test_bins_have_slots_and_places_of_their_own():
    record = parking(bins=2)
    moves, _ = record.move([(1, 0)])
    assert moves.out.tolist() == [[NONE] * 2, [0, NONE]]
    assert not record.is_aside((0, 0))


@pytest.mark.parametrize(
    ("slots", "expected"), [(0, 0), (2, 2), (4, 2), (6, 0)], ids=["all", "2", "4", "6"]
)
def test_places_aside_are_as_many_as_samples_without_slots_and_no_more_than_slots(slots, expected):
    assert Sizes.for_prompts(slots, 1, 3, 2, 8, parks=True).parked == expected
    assert Sizes.for_prompts(slots, 1, 3, 2, 8).parked == 0


def test_samples_with_rows_of_their_own_wait_aside_as_far_as_there_are_rows():
    sizes = Sizes.for_prompts(16, 1, 16, 4, 8, turns=24, parks=True)
    assert (sizes.rows, sizes.parked) == (28, 12)


@pytest.mark.parametrize("config", [tiny.UNIFORM, tiny.HYBRID], ids=["full", "states"])
def test_what_is_aside_counts_as_memory(monkeypatch, config):
    settings = SETTINGS._replace(slots=16)
    mesh, model = sharding.make_mesh(data=4), tiny.model(config)
    counted = capacity.capacity(model, settings, mesh, 12, 4, 8).state
    monkeypatch.setattr(capacity, "PARKING", ())
    alone = capacity.capacity(model, settings, mesh, 12, 4, 8).state
    sizes = Sizes.for_prompts(4, 1, 3, 4, 8, parks=True)  # of a device
    programs = make_programs(model, settings, None)
    aside = jax.eval_shape(lambda: programs.aside(programs.begin(sizes), sizes.parked))
    memory = jax.tree.leaves(aside.memory)
    assert counted - alone == sum(leaf.size * leaf.dtype.itemsize for leaf in memory)
    assert sizes.parked == 4


def numbered(tree, seed=0):
    """Arrays of the same shapes, and no two numbers in one alike."""
    count = lambda leaf: np.arange(leaf.size).reshape(leaf.shape) + seed  # noqa: E731
    return jax.tree.map(lambda leaf: jnp.asarray(count(leaf), leaf.dtype), tree)


@pytest.mark.slow
@pytest.mark.parametrize("bins", [1, 2])
@pytest.mark.parametrize("config", [tiny.UNIFORM, tiny.HYBRID], ids=["full", "states"])
def test_what_slots_hold_moves_out_and_back_as_it_is(config, bins):
    """In each bin: the sample in slot 1 to place 2, and that of place 0 to slot 1, which is free
    then; in the last bin that of slot 3 to place 1 too, and of place 3 to slot 3."""
    sizes = Sizes.for_prompts(4 * bins, bins, 4 * bins, 2, 8, parks=True)
    programs = make_programs(tiny.model(config), SETTINGS, None)
    begun = programs.begin(sizes)
    aside = numbered(programs.aside(begun, sizes.parked), 10**6)
    mask = np.array([[False, True, False, True]] * bins)
    slots = numbered([slots for _, slots in begun.memory])
    memory = tuple((old, new) for (old, _), new in zip(begun.memory, slots, strict=True))
    state = dataclasses.replace(
        begun,
        sample=jnp.array([[5, 6, 7, 0]] * bins),
        live=~mask,
        pauses=Pauses(mask=jnp.asarray(mask), clock=numbered(begun.index, 50)),
        index=numbered(begun.index, 70),
        token=numbered(begun.token, 90),
        memory=memory,
    )
    before, waiting = jax.tree.map(np.asarray, (contents(state), aside))
    out, back = (np.full((bins, 4), 8, np.int32) for _ in range(2))
    out[:, 2], back[:, 0], out[-1, 1], back[-1, 3] = 6, 4, 0, 3
    places = state.samples.length.shape
    nobody, zeros = np.zeros(places, bool), np.zeros(places, np.int32)
    words = np.full((*places, 16), -1, np.int32)
    replies = Replies(nobody, nobody, zeros, words, zeros, zeros, Moves(out, back))
    state, aside = programs.reply(state, aside, replies)
    last = bins - 1
    sample = np.array([[5, 4, 7, 0]] * bins)
    sample[last, 3] = 3
    np.testing.assert_array_equal(state.sample, sample)
    assert state.pauses is not None
    np.testing.assert_array_equal(state.pauses.mask, mask)
    moves = [(bin_, 1, 2, 0) for bin_ in range(bins)] + [(last, 3, 1, 3)]
    after, expected = contents(state), jax.tree.map(np.copy, before)
    in_places = jax.tree.map(np.copy, waiting)

    def move(slot_leaf, place_leaf, old_slots, old_places):
        for bin_, slot, to, from_ in moves:
            place_leaf[4 * bin_ + to] = old_slots[4 * bin_ + slot]
            slot_leaf[4 * bin_ + slot] = old_places[4 * bin_ + from_]

    jax.tree.map(move, expected, in_places, before, waiting)
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    jax.tree.map(np.testing.assert_array_equal, aside, in_places)


def contents(state):
    """What slots hold, as arrays of what they do not share."""
    older = [slots.older if isinstance(slots, Ring) else slots for _, slots in state.memory]
    index, token, clock = (x.reshape(-1) for x in (state.index, state.token, state.pauses.clock))
    return SlotContents(index, token, clock, older)
