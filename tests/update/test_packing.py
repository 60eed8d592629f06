"""The plan of the update batch, and the gather that follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrpo.core.errors import InputError
from jaxgrpo.update.packing import Geometry, check_geometry, gather, plan, scatter


def shape_of(value) -> tuple[int, int, int]:
    return value.shape


def geometry(groups, samples, bins, rows):
    return Geometry(groups, samples, 6, 5, bins, rows)


SIZES = [(4, 4, 1, 16), (4, 4, 2, 8), (4, 4, 2, 4), (4, 4, 2, 2), (6, 4, 2, 8), (4, 3, 4, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_every_live_sample_has_one_row_beside_its_own_prompt(size):
    shape = geometry(*size)
    check_geometry(shape)
    rng = np.random.default_rng(0)
    for share in [0.0, 0.1, 0.5, 0.9, 1.0]:
        live = rng.random(size[:2]) < share
        made = plan(live, shape)
        rows = made.sample[: int(made.num_live)]
        placed = rows[rows >= 0]
        assert sorted(placed) == list(np.flatnonzero(live))
        assert (made.sample[int(made.num_live) :] == -1).all()
        k, d, r = np.nonzero(made.sample >= 0)
        prompt = made.prompt[k, d, made.row_prompt[k, d, r]]
        np.testing.assert_array_equal(prompt, made.sample[k, d, r] // size[1])


def test_micro_batches_shrink_with_the_live_groups():
    shape = geometry(8, 4, 2, 4)
    live = np.zeros((8, 4), bool)
    assert plan(live, shape).num_live == 0
    live[[1, 5, 6]] = True
    assert plan(live, shape).num_live == 2
    assert plan(np.ones_like(live), shape).num_live == 4 == shape.micro_batches


def test_rows_that_cut_groups_unevenly_are_refused():
    with pytest.raises(InputError, match=r"rows_per_micro_batch = 6.*group_size = 4"):
        check_geometry(geometry(4, 4, 1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_gather_then_scatter_gives_back_every_token(size):
    shape = geometry(*size)
    rollouts = tiny.rollouts(np.random.default_rng(1).random(size[:2]))
    everyone = plan(np.ones(size[:2], bool), shape)
    value = jnp.asarray(np.random.default_rng(2).normal(size=(*size[:2], 5)), jnp.float32)
    batch = gather(rollouts, everyone, value, value, rollouts.token_mask, {"own": value})
    back = scatter(batch.fields["own"], everyone, shape_of(value))
    np.testing.assert_array_equal(back, value)
    targets = scatter(batch.targets, everyone, shape_of(value))
    np.testing.assert_array_equal(targets, rollouts.completion_tokens * rollouts.token_mask)


@pytest.mark.slow
def test_a_row_opens_with_the_last_prompt_token_and_predicts_its_own_targets():
    rollouts = tiny.rollouts(np.ones((2, 2)))
    shape = geometry(2, 2, 1, 4)
    zero = jnp.zeros(rollouts.token_mask.shape)
    batch = gather(rollouts, plan(np.ones((2, 2), bool), shape), zero, zero, zero > 0, {})
    length = int(rollouts.prompt_mask[1].sum())
    row = jax.tree.map(lambda leaf: leaf[0, 0, 2], (batch.tokens, batch.position, batch.segment))
    tokens, position, segment = map(np.asarray, row)
    count = int(rollouts.token_mask[1, 0].sum())
    assert tokens[0] == rollouts.prompt_tokens[1, length - 1]
    np.testing.assert_array_equal(tokens[1:count], rollouts.completion_tokens[1, 0, : count - 1])
    assert position[0] == length - 1
    np.testing.assert_array_equal(segment, np.arange(5) < count)
    assert batch.prompt_length[0, 0, 1] == length - 1


@pytest.mark.slow
def test_forced_text_between_sampled_tokens_stays_in_the_row():
    mask = jnp.array([[[True, False, True, False, False]]])
    rollouts = tiny.rollouts(np.ones((1, 1)), token_mask=mask)
    zero = jnp.zeros(mask.shape)
    one = geometry(1, 1, 1, 1)
    batch = gather(rollouts, plan(np.ones((1, 1), bool), one), zero, zero, mask, {})
    np.testing.assert_array_equal(batch.segment[0, 0, 0], [1, 1, 1, 0, 0])
