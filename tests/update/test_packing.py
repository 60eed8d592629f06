"""The plan of the update batch, and the gather that follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.update import packing
from jaxgrpo.update.packing import (
    ELSEWHERE,
    TOKENS,
    Geometry,
    Lengths,
    check_geometry,
    deal,
    default_tokens,
    gather,
    measure_lengths,
    plan,
    scatter,
    work,
)

RAGGED = (16, 8, 256, 256)
"""P, G, S, T of workload C."""


def make_geometry(sizes, bins: int, tokens: int) -> Geometry:
    prompts, samples, width, steps = sizes
    return Geometry(prompts, samples, width, steps, bins, tokens)


def ragged(seed: int, sizes=RAGGED) -> Lengths:
    """Lengths as those of workload C: samples end with 1 to 2% a token."""
    prompts, samples, width, steps = sizes
    rng = np.random.default_rng(seed)
    chance = rng.uniform(0.008, 0.02, (prompts, samples))
    completion = np.minimum(rng.geometric(chance), steps).astype(np.int32)
    return Lengths(rng.integers(width // 8, width, prompts).astype(np.int32), completion)


def measured(rollouts) -> Lengths:
    return jax.tree.map(np.asarray, measure_lengths(rollouts))


CASES = {
    "whole groups": (RAGGED, 1, 2048),
    "pieces": ((4, 16, 64, 256), 2, 640),
    "one sample at a time": ((5, 3, 16, 16), 2, 31),
    "few rows": ((6, 2, 8, 64), 4, 200),
    "more than a step": ((4, 4, 8, 8), 1, 4096),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_every_live_token_has_one_place_beside_its_own_prompt(case, share):
    sizes, bins, tokens = CASES[case]
    geometry = make_geometry(sizes, bins, tokens)
    check_geometry(geometry)
    for seed in range(5):
        lengths = ragged(seed, sizes)
        live = np.random.default_rng(seed).random(sizes[:2]) < share
        placement = plan(lengths, live, geometry)
        np.testing.assert_array_equal(placement.row >= 0, live)
        filled = np.zeros((placement.row_prompt.size, sizes[3]), int)
        computed = np.zeros(placement.row_prompt.shape[:2], int)
        for p, g in zip(*np.nonzero(live), strict=True):
            row, start = placement.row[p, g], placement.start[p, g]
            length = lengths.completion[p, g]
            filled[row, start : start + length] += 1
            assert start + length <= sizes[3]
            k, d, r = np.unravel_index(row, placement.row_prompt.shape)
            assert placement.prompt[k, d, placement.row_prompt[k, d, r]] == p
            assert k < placement.num_live
            computed[k, d] += length
        assert filled.max(initial=0) <= 1
        assert filled.sum() == lengths.completion[live].sum()
        for k, d, a in zip(*np.nonzero(placement.prompt >= 0), strict=True):
            computed[k, d] += lengths.prompt[placement.prompt[k, d, a]]
        assert computed.max(initial=0) <= tokens
        # No bin has two micro-batches while another has none.
        busy = (computed > 0).sum(0)
        assert busy.max() - busy.min() <= 1


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_prompts_are_dealt_so_that_minibatches_have_as_many_and_balanced_live_tokens(minibatches):
    for seed in range(5):
        lengths = ragged(seed)
        live = np.random.default_rng(seed).random(RAGGED[:2]) < 0.5
        live[: seed * 3] = False  # groups without a live sample are dealt too
        geometry = Geometry(*RAGGED, 1, 1280, minibatches)
        dealt = deal(lengths, live, geometry)
        assert sorted(np.concatenate(dealt).tolist()) == list(range(16))
        assert {len(minibatch) for minibatch in dealt} == {16 // minibatches}
        assert all((np.diff(minibatch) > 0).all() for minibatch in dealt)
        tokens = (lengths.completion * live).sum(1)
        sums = [tokens[minibatch].sum() for minibatch in dealt]
        assert max(sums) - min(sums) <= tokens.max()
        for prompts in dealt:  # the longest samples of as many prompts fit
            member = np.isin(np.arange(16), prompts)[:, None]
            longest = Lengths(np.full(16, 255), np.full(RAGGED[:2], 256))
            placement = plan(longest, np.ones_like(live) & member, geometry)
            np.testing.assert_array_equal(placement.row >= 0, np.broadcast_to(member, live.shape))


def test_a_minibatch_needs_a_part_of_the_micro_batches_of_a_step():
    undivided, four = (Geometry(*RAGGED, 1, 1280, minibatches) for minibatches in (1, 4))
    assert four.micro_batches == -(-undivided.micro_batches // 4)


def test_samples_of_a_row_are_numbered_from_one():
    geometry = make_geometry(RAGGED, 1, 2048)
    placement = plan(ragged(0), np.ones((16, 8), bool), geometry)
    for row in range(placement.row_prompt.size):
        inside = placement.row == row
        order = np.argsort(placement.start[inside])
        np.testing.assert_array_equal(placement.segment[inside][order], np.arange(inside.sum()) + 1)


def test_micro_batches_follow_the_live_tokens():
    geometry = Geometry(8, 4, 6, 5, 2, 25)
    rollouts = tiny.rollouts(np.ones((8, 4)))
    live = np.zeros((8, 4), bool)
    lengths = measured(rollouts)
    assert plan(lengths, live, geometry).num_live == 0
    live[[1, 5, 6]] = True
    few = plan(lengths, live, geometry).num_live
    everyone = plan(lengths, np.ones_like(live), geometry).num_live
    assert 1 <= few < everyone <= geometry.micro_batches


def test_ragged_work_is_computed_nearly_without_padding():
    tokens = default_tokens(RAGGED, 1, TOKENS["cpu"])
    geometry = make_geometry(RAGGED, 1, tokens)
    assert tokens == 1280
    dense, count = [], []
    for seed in range(20):
        lengths = ragged(seed)
        placement = plan(lengths, np.ones((16, 8), bool), geometry)
        dense.append(float(work(placement, lengths, geometry)["update/density"].result()))
        count.append(int(placement.num_live))
    assert np.mean(dense) > 0.9
    # A step in which all have the greatest length is 32 micro-batches.
    assert np.mean(count) < 12


@pytest.mark.parametrize(
    ("sizes", "bins", "room", "want"),
    [
        ((8, 8, 64, 128), 1, TOKENS["cpu"], 1088),  # a whole group: 63 + 8 * 128
        ((4, 16, 256, 64), 1, TOKENS["cpu"], 1280),  # 255 + 16 * 64
        (RAGGED, 1, TOKENS["cpu"], 1280),  # four of eight: 255 + 4 * 256
        ((64, 8, 512, 1024), 1, ELSEWHERE, 8704),  # a whole group: 511 + 8 * 1024
        ((64, 8, 64, 128), 1, ELSEWHERE, 16320),  # fifteen whole groups
        ((4, 4, 8, 8), 1, TOKENS["cpu"], 64),  # one of four groups
        ((4, 4, 4096, 4096), 1, TOKENS["cpu"], 8192),  # one completion and its prompt
        ((64, 8, 512, 1024), 1, 5000, 4608),  # four of eight completions: 511 + 4 * 1024
        ((64, 8, 512, 1024), 1, 0, 1536),
    ],
)
def test_a_micro_batch_holds_whole_groups_where_they_fit(sizes, bins, room, want):
    assert default_tokens(sizes, bins, room) == want
    check_geometry(make_geometry(sizes, bins, want))


def test_models_with_experts_take_twice_as_many_tokens_at_a_time_on_a_cpu():
    mesh, sizes = sharding.make_mesh(data=4), (32, 8, 64, 128)
    for room, expected in ((None, [1088, 2176]), (1280, [1088, 1088])):
        tokens = [
            packing.make_geometry(sizes, mesh, None, room=room, has_experts=has_experts).tokens
            for has_experts in (False, True)
        ]
        assert tokens == expected


def test_a_micro_batch_too_small_for_one_sample_is_refused():
    message = r"tokens_per_micro_batch = 9: .* max_completion_tokens = 5 .* takes 10"
    with pytest.raises(InputError, match=message.replace(" .* ", ".*")):
        check_geometry(Geometry(4, 4, 6, 5, 1, 9))


def test_a_step_of_more_tokens_than_int32_tells_apart_is_refused():
    check_geometry(make_geometry((512, 64, 1024, 32_768), 64, 65_536))
    with pytest.raises(InputError, match=r"prompts_per_step = 1024: .* 2147483648 places"):
        check_geometry(make_geometry((1024, 64, 1024, 32_768), 64, 65_536))


SIZES = [(4, 4, 1, 100), (4, 4, 2, 50), (4, 4, 2, 25), (4, 4, 2, 10), (6, 4, 2, 50), (4, 3, 4, 12)]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [SIZES[-1], *(pytest.param(size, marks=pytest.mark.full) for size in SIZES[:-1])]
)
def test_gather_then_scatter_gives_back_every_token(size):
    groups, samples, bins, tokens = size
    rollouts = tiny.rollouts(np.random.default_rng(1).random(size[:2]))
    shape = Geometry(groups, samples, 6, 5, bins, tokens)
    everyone = plan(measured(rollouts), np.ones(size[:2], bool), shape)
    mask = rollouts.token_mask
    value = jnp.asarray(np.random.default_rng(2).normal(size=(*size[:2], 5)), jnp.float32)
    fields = {"token": value, "sample": value[..., 0], "group": value[:, 0, 0]}
    batch = gather(rollouts, everyone, value, jnp.float32(2), mask, fields)
    for name, want in {**fields, "weight": jnp.full(groups, 2.0)}.items():
        back = scatter({**batch.fields, "weight": batch.weight}[name], everyone, mask)
        wide = np.expand_dims(want, [*range(want.ndim, 3)])
        np.testing.assert_array_equal(back, wide * mask)
    targets = scatter(batch.targets, everyone, mask)
    np.testing.assert_array_equal(targets, rollouts.completion_tokens * mask)


@pytest.mark.full
@pytest.mark.slow
def test_a_sample_opens_with_the_last_prompt_token_and_predicts_its_own_targets():
    rollouts = tiny.rollouts(np.ones((2, 2)))
    lengths = measured(rollouts)
    shape = Geometry(2, 2, 6, 5, 1, 50)
    zero = jnp.zeros(rollouts.token_mask.shape)
    where = plan(lengths, np.ones((2, 2), bool), shape)
    batch = gather(rollouts, where, zero, zero, zero > 0, {})
    length, count = int(lengths.prompt[1]) + 1, int(lengths.completion[1, 0])
    row, start = int(where.row[1, 0]), int(where.start[1, 0])
    sample = jax.tree.map(
        lambda leaf: np.asarray(leaf[0, 0, row, start : start + count]),
        (batch.tokens, batch.position, batch.segment),
    )
    tokens, position, segment = sample
    assert tokens[0] == rollouts.prompt_tokens[1, length - 1]
    np.testing.assert_array_equal(tokens[1:], rollouts.completion_tokens[1, 0, : count - 1])
    np.testing.assert_array_equal(position, length - 1 + np.arange(count))
    assert set(segment) == {where.segment[1, 0]}
    assert batch.prompt_length[0, 0, batch.row_prompt[0, 0, row]] == length - 1


@pytest.mark.full
@pytest.mark.slow
def test_forced_text_between_sampled_tokens_stays_in_the_row():
    mask = jnp.array([[[True, False, True, False, False]]])
    rollouts = tiny.rollouts(np.ones((1, 1)), token_mask=mask)
    zero = jnp.zeros(mask.shape)
    where = plan(measured(rollouts), np.ones((1, 1), bool), Geometry(1, 1, 6, 5, 1, 10))
    batch = gather(rollouts, where, zero, zero, mask, {})
    np.testing.assert_array_equal(batch.segment[0, 0, 0], [1, 1, 1, 0, 0])
