"""The prompt stream, its default policy, and the arrays of one step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxgrpo.core.types import Stream
from jaxgrpo.rollout.judging import make_selector
from jaxgrpo.rollout.selection import pad_prompts, row_of, sequential


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own():
    rows = row_of(np.arange(3 * 50), num_rows=50, seed=7).reshape(3, 50)
    np.testing.assert_array_equal(np.sort(rows, axis=1), np.tile(np.arange(50), (3, 1)))
    assert not (rows[0] == rows[1]).all()
    assert not (rows[1] == rows[2]).all()
    assert not (rows[0] == np.arange(50)).all()


def test_the_order_is_the_argsort_of_the_philox_words_of_seed_and_epoch():
    words = np.random.Philox(key=np.array([3, 2], np.uint64)).random_raw(10)
    np.testing.assert_array_equal(row_of(np.arange(20, 30), 10, seed=3), np.argsort(words))


def test_the_order_of_a_seed_never_changes():
    """Written down once: a resumed run goes on in the order it began with, on any machine."""
    assert row_of(np.arange(8), num_rows=8, seed=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_seeds_give_different_orders_and_any_integer_is_a_seed():
    orders = [tuple(row_of(np.arange(40), 40, seed).tolist()) for seed in (0, 1, -1, 2**63)]
    assert len(set(orders)) == 4
    assert tuple(row_of(np.arange(40), 40, 2**64 + 1).tolist()) == orders[1]


def test_an_ordinal_alone_gives_the_row_that_a_whole_batch_gives():
    ordinals = np.array([99, 3, 12, 3, 57])
    together = row_of(ordinals, num_rows=13, seed=1)
    assert together.tolist() == [int(row_of(int(i), 13, 1)) for i in ordinals]
    assert together.dtype == np.int32


def test_a_stream_from_nowhere_is_refused():
    with pytest.raises(ValueError, match="at least one row and no negative ordinal"):
        row_of(-1, num_rows=4, seed=0)
    with pytest.raises(ValueError, match="num_rows = 0"):
        row_of(0, num_rows=0, seed=0)


def test_the_default_policy_takes_the_next_ordinals_and_remembers_nothing():
    policy = sequential()
    state = policy.init(10, 0)
    ordinals = policy.select(state, 7, 4)
    assert ordinals.tolist() == [7, 8, 9, 10]
    assert ordinals.dtype == np.int32
    assert policy.select(state, 7, 4).tolist() == ordinals.tolist()
    assert state == {}


def padded_prompts(ordinals, tokens, *, seed, step, width):
    rows = row_of(ordinals, len(tokens), seed)
    return pad_prompts([tokens[row] for row in rows], width, ordinals, rows, step)


def test_prompts_are_padded_on_the_right_and_say_where_they_come_from():
    tokens = [np.array([5, 6, 7], np.int32), np.array([8], np.int32)]
    ordinals = np.array([4, 5, 6], np.int32)
    prompts = padded_prompts(ordinals, tokens, seed=2, step=9, width=4)
    rows = row_of(ordinals, 2, 2)
    padded = {0: [5, 6, 7, 0], 1: [8, 0, 0, 0]}
    masks = {0: [True, True, True, False], 1: [True, False, False, False]}
    np.testing.assert_array_equal(prompts.prompt_tokens, [padded[int(row)] for row in rows])
    np.testing.assert_array_equal(prompts.prompt_mask, [masks[int(row)] for row in rows])
    np.testing.assert_array_equal(prompts.ordinal, ordinals)
    np.testing.assert_array_equal(prompts.row, rows)
    assert int(prompts.step) == 9
    kinds = [prompts.prompt_tokens, prompts.ordinal, prompts.row, prompts.step]
    assert all(isinstance(array, np.ndarray) and array.dtype == np.int32 for array in kinds)


def test_a_row_drawn_twice_in_one_step_has_two_ordinals():
    tokens = [np.array([1], np.int32), np.array([2], np.int32)]
    prompts = padded_prompts(np.arange(4, dtype=np.int32), tokens, seed=0, step=0, width=1)
    assert sorted(np.asarray(prompts.row).tolist()) == [0, 0, 1, 1]
    assert np.asarray(prompts.ordinal).tolist() == [0, 1, 2, 3]


def test_the_cursor_does_not_go_back_with_a_policy_that_takes_earlier_places():
    again = np.array([0, 1], np.int32)
    policy = sequential()._replace(name="again", select=lambda state, cursor, n: again)
    select = make_selector(policy, [np.array([5], np.int32)] * 4, 2, 4, seed=0)
    state = {"cursor": np.asarray(10, np.int32), "key": np.zeros(2, np.uint32)}
    stream, prompts = select(Stream(**state, prompt_policy_state={}), 0)
    assert (int(stream.cursor), prompts.ordinal.tolist()) == (10, [0, 1])


def test_a_prompt_that_does_not_fit_is_never_cut():
    with pytest.raises(ValueError, match="has 3 tokens, more than the 2"):
        padded_prompts(np.array([0]), [np.array([1, 2, 3], np.int32)], seed=0, step=0, width=2)
