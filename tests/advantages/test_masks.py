"""Masks of groups and gates: what goes, what stays, and that masks can be trusted as sets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo.advantages import (
    chain,
    compute,
    evaluate,
    keep_samples,
    mask_group_difficulty,
    mask_low_variance,
    mask_truncated,
    mask_untaught,
    mask_zero_variance,
    rubric_gate,
    subtract_group_mean,
    sum_rewards,
)
from jaxgrpo.core.errors import InputError

NAN = np.nan


def run(*steps, **rollout_fields):
    """(value, mask) of a chain on one reward, jitted; keywords: `rewards` and the fields."""
    return run_chain(chain(sum_rewards(), *steps), **rollout_fields)


def run_chain(transform, **rollout_fields):
    """(value, mask) of a chain, jitted; keywords: `rewards`, one or by name, and the fields."""
    value, mask = jax.jit(lambda inputs: evaluate(transform, inputs.pop("rewards"), **inputs))(
        jax.tree.map(jnp.asarray, rollout_fields, is_leaf=lambda node: isinstance(node, list))
    )
    return np.asarray(value), np.asarray(mask)


def groups_left(steps, sweep, **rollout_fields):
    """Whether each group stays, [len(sweep), P]; steps(number) with a number that is traced."""
    transform = chain(sum_rewards(), steps(lambda step: sweep_of[step]))
    sweep_of = jnp.asarray(sweep)
    rewards = rollout_fields.pop("rewards")

    def left(step):
        return evaluate(transform, rewards, step=step, **rollout_fields)[1].any(1)

    return np.asarray(jax.jit(jax.vmap(left))(jnp.arange(len(sweep))))


def rates(num_groups=9, size=8):
    """Rewards whose success rates are 0, 1/8, ..., 1."""
    return (np.arange(size) < np.arange(num_groups)[:, None]).astype(np.float32)


def spreads(values):
    """Groups of two samples whose population variances are `values`."""
    return np.stack([np.zeros(len(values)), 2 * np.sqrt(values)], 1).astype(np.float32)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_variance_threshold_of_zero_is_the_zero_variance_mask(name):
    with jax.enable_x64(name == "float64"):
        rollouts = laws.make_rollouts(np.dtype(name).type)
        low = chain(sum_rewards(), mask_low_variance(threshold=0.0))
        flat = chain(sum_rewards(), mask_zero_variance())
        (by_variance, _, _), (by_range, _, _) = jax.jit(
            lambda batch: (compute(low, batch), compute(flat, batch))
        )(rollouts)
    assert by_variance.mask.tolist() == by_range.mask.tolist()
    assert not by_variance.mask[2].any()  # seven times 1.1 would not have variance 0 by squares


def test_equal_float32_rewards_have_variance_exactly_zero():
    rewards = np.repeat(np.random.default_rng(0).normal(size=(512, 1)).astype(np.float32), 7, 1)
    assert (rewards.var(axis=1) > 0).any()  # the trap
    assert not run(mask_low_variance(threshold=0.0), rewards=rewards)[1].any()
    assert not run(mask_low_variance(drop=0.0), rewards=rewards)[1].any()


def test_the_variance_of_a_field_is_that_of_its_positions():
    random = np.random.default_rng(0)
    value = random.normal(size=(6, 5, 4)) * random.random((6, 1, 4))
    where = np.arange(4) < random.integers(1, 5, (6, 1))
    each = random.random((6, 5, 4)) < 0.7
    rewards = random.normal(size=(6, 5))
    rewards[0, 1], rewards[3] = NAN, NAN
    scored = np.isfinite(rewards)[..., None]
    value[~(np.broadcast_to(scored, value.shape))] = NAN  # nothing may be read there

    def oracle(counts, reduce):
        out = []
        for group, live in zip(value, counts & scored, strict=True):
            columns = [group[live[:, j], j] for j in range(4)]
            variances = [column.var() for column in columns if len(column) > 1]
            out.append(reduce(variances) if variances else 0.0)
        return np.array(out)

    shared = np.broadcast_to(where[:, None], value.shape)
    places = {"shared": where, "own": each}
    for positions, counts in {"shared": shared, "own": each, None: np.ones_like(each)}.items():
        for name, reduce in {"max": np.max, "mean": np.mean}.items():
            expected = oracle(counts, reduce)
            cut = float(np.median(expected))  # between two of the six
            with jax.enable_x64(True):
                part = mask_low_variance(cut, field="x", positions=positions, reduce=name)
                rollout_fields = {name: places[name] for name in places if name == positions}
                left = run(part, rewards=rewards, x=value, **rollout_fields)[1].any(1)
            assert left.tolist() == (expected > cut).tolist()


def test_a_position_that_one_sample_reaches_is_no_comparison():
    x = [[[0.0, 5.0], [4.0, 0.0]]]  # variance 4 at the first, one sample at the second
    reached = [[[True, True], [True, False]]]
    part = mask_low_variance(3.0, field="x", positions="reached", reduce="mean")
    assert run(part, rewards=[[0.0, 1.0]], x=x, reached=reached)[1].all()


def test_raising_the_threshold_or_the_share_never_adds_a_group():
    rewards = np.random.default_rng(0).normal(size=(40, 4)) ** 3
    rewards[:4] = 0.1
    by_value = groups_left(mask_low_variance, np.linspace(0, 4, 30), rewards=rewards)
    by_rank = groups_left(
        lambda drop: mask_low_variance(drop=drop), np.linspace(0, 0.99, 30), rewards=rewards
    )
    for left in (by_value, by_rank):
        assert (np.diff(left.astype(int), axis=0) <= 0).all()
        assert left[0].sum() == 36
        assert left[-1].sum() < 15
    # floor(drop 40) go; of 40 the four flat ones are the lowest.
    np.testing.assert_array_equal(
        (~by_rank).sum(1), np.maximum(np.floor(np.linspace(0, 0.99, 30) * 40 + 1e-4), 4)
    )


def test_ties_across_the_boundary_stay_and_flat_groups_go():
    rewards = spreads([0.0, 1.0, 1.0, 1.0, 4.0, 9.0, 16.0, 0.0, 25.0, 36.0])
    shares = (0.0, 0.2, 0.3, 0.5, 0.6)
    left = groups_left(lambda drop: mask_low_variance(drop=drop), shares, rewards=rewards)
    live_groups = {
        drop: np.flatnonzero(stay).tolist() for drop, stay in zip(shares, left, strict=True)
    }
    assert live_groups[0.0] == live_groups[0.2] == [1, 2, 3, 4, 5, 6, 8, 9]
    assert live_groups[0.3] == live_groups[0.2]  # the third lowest ties with the fourth and fifth
    assert live_groups[0.5] == [4, 5, 6, 8, 9]
    assert live_groups[0.6] == [5, 6, 8, 9]


def test_a_share_is_of_the_groups_that_have_a_sample_and_rounding_does_not_add_one():
    rewards = spreads(np.arange(1.0, 101.0))
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype is np.float64):
            cast = rewards.astype(dtype)
            assert run(mask_low_variance(drop=0.29), rewards=cast)[1].any(1).sum() == 71
            cast[60:] = NAN
            assert run(mask_low_variance(drop=0.5), rewards=cast)[1].any(1).sum() == 30


def test_low_variance_of_a_reward_judges_without_touching_the_values():
    rewards = {"correct": [[0.0, 1.0], [1.0, 0.0]], "style": [[0.3, 0.3], [0.1, 0.9]]}
    transform = chain(
        sum_rewards(correct=1.0, style=0.0),
        subtract_group_mean(),
        mask_low_variance(0.01, field="style"),
    )
    value, mask = run_chain(transform, rewards=rewards)
    assert value.tolist() == [[0.0, 0.0], [0.5, -0.5]]
    assert mask.tolist() == [[False, False], [True, True]]


def test_the_difficulty_band_holds_both_its_ends():
    _, mask = run(mask_group_difficulty(), rewards=rates())
    assert mask.any(1).tolist() == [False] + [True] * 7 + [False]
    _, mask = run(mask_group_difficulty(0.25, 0.5), rewards=rates())
    assert np.flatnonzero(mask.any(1)).tolist() == [2, 3, 4]
    _, mask = run(mask_group_difficulty(1 / 3, 2 / 3), rewards=rates(4, 3))
    assert mask.any(1).tolist() == [False, True, True, False]


def test_widening_the_band_never_takes_a_group_away_and_all_of_it_masks_nothing():
    random = np.random.default_rng(0)
    rewards = (random.random((60, 5)) < random.random((60, 1))).astype(np.float32)
    rewards[random.random((60, 5)) < 0.2] = NAN
    rewards[0] = NAN
    low = groups_left(
        lambda low: mask_group_difficulty(low, 0.9), np.linspace(0.9, 0, 20), rewards=rewards
    )
    high = groups_left(
        lambda high: mask_group_difficulty(0.1, high), np.linspace(0.1, 1, 20), rewards=rewards
    )
    for left in (low, high):
        assert (np.diff(left.astype(int), axis=0) >= 0).all()
        assert left[0].sum() < left[-1].sum()
    plain = run(subtract_group_mean(), rewards=rewards)
    banded = run(mask_group_difficulty(0.0, 1.0), subtract_group_mean(), rewards=rewards)
    np.testing.assert_array_equal(plain[0], banded[0])
    np.testing.assert_array_equal(plain[1], banded[1])


def test_the_band_may_judge_by_a_reward_behind_the_baseline_and_by_a_threshold():
    correct = [[0.0, 1.0, NAN], [0.0, 0.0, 0.0], [NAN, NAN, NAN]]
    rewards = {"correct": correct, "style": [[0.2, 0.8, 0.5]] * 3}
    behind = chain(
        sum_rewards(correct=0.0, style=1.0),
        subtract_group_mean(),
        mask_group_difficulty(0.5, 0.5, reward="correct"),
    )
    value, mask = run_chain(behind, rewards=rewards)
    np.testing.assert_allclose(value, [[-0.3, 0.3, 0], [0, 0, 0], [0, 0, 0]], atol=1e-7)
    # Not judged by "correct", the third sample counts in no rate, but is not masked.
    assert mask.tolist() == [[True] * 3, [False] * 3, [False] * 3]
    of_all = chain(
        sum_rewards(correct=0.0, style=1.0), mask_group_difficulty(0.0, 1.0, reward="correct")
    )
    # Nothing says how hard the third prompt is.
    assert run_chain(of_all, rewards=rewards)[1].any(1).tolist() == [True, True, False]
    by_grade = mask_group_difficulty(0.6, 0.7, threshold=0.5)
    assert run(by_grade, rewards=rewards["style"])[1].all()


IDEMPOTENT = {
    "zero variance": mask_zero_variance(),
    "truncated": mask_truncated(),
    "variance": mask_low_variance(threshold=0.1),
    "flat by rank": mask_low_variance(drop=0.0),
    "field": mask_low_variance(threshold=1.0, field="answer_logp", positions="answer_mask"),
    "difficulty": mask_group_difficulty(0.2, 0.8, threshold=0.5),
    "gate": rubric_gate(minimum=0.5),
    "gate of samples": rubric_gate(mode="rollout"),
}


def test_a_mask_twice_is_the_mask_once():
    rollouts = laws.make_rollouts()

    @jax.jit
    def once_and_twice(rollouts):
        return {
            name: [
                compute(chain(sum_rewards(), *[step] * times), rollouts)[0].mask for times in (1, 2)
            ]
            for name, step in IDEMPOTENT.items()
        }

    start = np.isfinite(sum(np.asarray(leaf) for leaf in rollouts.rewards.values()))
    for name, (once, twice) in once_and_twice(rollouts).items():
        np.testing.assert_array_equal(once, twice, err_msg=name)
        assert 0 < once.sum() < start.sum(), name


RUBRIC = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, NAN], [1, 1, 1, 1]])
REWARDS = np.array([[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 0, -1], [1, 1, 0, 0]], np.float32)


def test_an_infeasible_group_contributes_exactly_nothing():
    for gate in (rubric_gate(), rubric_gate(mode="rollout"), rubric_gate(mode="floor")):
        value, _ = run(gate, subtract_group_mean(), rewards=REWARDS, rubric=RUBRIC)
        assert (value[0] == 0).all()
        np.testing.assert_allclose(value[3], [0.5, 0.5, -0.5, -0.5])
    before, _ = run(rubric_gate(), subtract_group_mean(), rewards=REWARDS, rubric=RUBRIC)
    after, _ = run(subtract_group_mean(), rubric_gate(), rewards=REWARDS, rubric=RUBRIC)
    assert (after[0] == 0).all()
    np.testing.assert_allclose(before[1], after[1])  # all of it judged: the same on both sides


def test_each_mode_of_the_gate_by_hand():
    def gated(**options):
        return run(rubric_gate(**options), rewards=REWARDS, rubric=RUBRIC)

    _, mask = gated()
    assert mask.tolist() == [[False] * 4, [True] * 4, [True, True, True, False], [True] * 4]
    _, mask = gated(minimum=0.5)  # of the third group two of three judged samples passed
    assert mask.any(1).tolist() == [False, False, True, True]
    _, mask = gated(minimum=0.7)
    assert mask.any(1).tolist() == [False, False, False, True]
    _, mask = gated(mode="rollout")
    assert mask.tolist() == (RUBRIC == 1).tolist()
    value, mask = gated(mode="floor", margin=0.25)
    assert mask.tolist() == np.isfinite(RUBRIC).tolist()
    assert value.tolist() == [
        [-0.25] * 4,
        [0.0, -0.25, -0.25, -0.25],
        [1.0, 0.0, -0.25, 0.0],
        [1.0, 1.0, 0.0, 0.0],
    ]


def test_a_refused_sample_does_not_pay_under_the_floor():
    """The sample that games the reward and fails the rubric is never above one that passes."""
    random = np.random.default_rng(0)
    rewards = random.normal(size=(50, 6)).astype(np.float32)
    rubric = random.integers(0, 2, (50, 6))
    value, _ = run(rubric_gate(mode="floor"), rewards=rewards, rubric=rubric)
    worst = np.where(rubric == 1, value, np.inf).min(1, keepdims=True)
    assert (np.where(rubric == 0, value, -np.inf) <= worst).all()


def test_masked_groups_are_counted_among_those_with_a_sample():
    rollouts = laws.make_rollouts()
    transform = chain(
        sum_rewards(correct=1.0, style=0.0), mask_group_difficulty(0.0, 0.99), rubric_gate()
    )
    metrics = jax.jit(lambda rollouts: compute(transform, rollouts)[2])(rollouts)
    # Of seven groups with a scored sample, prompt 2 passed throughout, and 7 if its only one did.
    rate = np.nanmean(np.asarray(rollouts.rewards["correct"])[[0, 1, 2, 3, 4, 5, 7]], 1)
    masked = metrics["mask_group_difficulty/masked_groups"]
    assert masked.result() == pytest.approx((rate > 0.99).mean())
    assert metrics["mask_group_difficulty/rate"].result() == pytest.approx(rate.mean())


@pytest.mark.parametrize("entries", [(2,), (2, 2, 4)], ids=["logp", "likeliest"])
def test_samples_that_a_teacher_has_no_prompt_for_are_masked(entries):
    score = np.zeros((2, 3, *entries), np.float32)
    score[0, 1] = score[1, :2] = NAN
    score[:, 2, 1] = NAN  # of a token that was not drawn
    drawn = np.ones((2, 3, 2), bool)
    drawn[:, 2, 1] = False
    fields = {"rewards": np.ones((2, 3)), "token_mask": drawn}
    value, mask = run(mask_untaught("top"), top=score, **fields)
    assert mask.tolist() == [[True, False, True], [False, False, True]]
    assert value.tolist() == mask.tolist()
    with pytest.raises(
        InputError, match=r"mask_untaught: top has shape \(3, 2.*\[P, G, T\] = \(2, 3"
    ):
        run(mask_untaught("top"), top=np.swapaxes(score, 0, 1), **fields)


def test_the_first_samples_that_stay_are_those_that_could_be_scored():
    rewards = [[NAN, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, NAN]]
    _, mask = run(keep_samples(2), rewards=rewards)
    assert mask.tolist() == [[False, True, True, False], [True, True, False, False]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mask_low_variance(), "threshold = None, drop = None: give exactly one"),
        (lambda: mask_low_variance(0.1, 0.2), "give exactly one of the two"),
        (lambda: mask_low_variance(-1.0), "threshold = -1.0, expected 0 or more"),
        (lambda: mask_low_variance(drop=1.0), "expected a share from 0 to below 1"),
        (lambda: mask_low_variance(0.1, reduce="sum"), "expected one of max, mean"),
        (lambda: mask_low_variance(0.1, positions="answer_mask"), "belongs to a field"),
        (
            lambda: evaluate(chain(sum_rewards(), mask_low_variance(0.1, field="x")), [[1.0, 0.0]]),
            "mask_low_variance needs the field 'x'",
        ),
        (lambda: mask_group_difficulty(0.9, 0.1), "low = 0.9 is above high = 0.1"),
        (lambda: mask_group_difficulty(-0.1), r"low = -0.1, expected a number in \[0, 1\]"),
        (lambda: mask_group_difficulty(high=1.1), r"high = 1.1, expected a number in \[0, 1\]"),
        (lambda: rubric_gate(mode="soft"), "expected one of group, rollout, floor"),
        (lambda: rubric_gate(mode="floor", minimum=0.5), "belongs to mode 'group'"),
        (lambda: rubric_gate(minimum=0.0), "expected a share above 0"),
        (lambda: rubric_gate(margin=1.0), "belongs to mode 'floor'"),
        (lambda: rubric_gate(mode="floor", margin=-1.0), "margin = -1.0, expected 0 or more"),
        (
            lambda: evaluate(chain(sum_rewards(), rubric_gate()), [[1.0]], rubric=[1.0]),
            r"'rubric' has shape \(1,\), expected that of the signal, \[P, G\] = \(1, 1\)",
        ),
        (
            lambda: evaluate(
                chain(sum_rewards(), mask_low_variance(0.1, field="x", positions="y")),
                [[1.0, 0.0]],
                x=np.zeros((1, 2, 3)),
                y=np.ones((1, 2)),
            ),
            r"positions 'y' has shape \(1, 2\), expected \(1, 3\) or \(1, 2, 3\)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
