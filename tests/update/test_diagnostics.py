"""Group shares, live groups, pass@k and degeneracy, against counting by hand and by brute force."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo import advantages
from jaxgrpo.core.metrics import finalise
from jaxgrpo.update.diagnostics import (
    advantage_metrics,
    as_summed,
    completion_metrics,
    flat_share,
    group_metrics,
    jensen_gap,
    pass_at_k,
)

NAN = np.nan


def results(metrics):
    return finalise(jax.device_get(metrics))


def group_results(rewards, weights=None):
    return results(jax.jit(lambda rewards: group_metrics(rewards, weights))(rewards))


def test_groups_are_counted_by_what_their_scored_samples_got():
    reward = jnp.array(
        [
            [0.0, 0.0, 0.0],  # all fail
            [0.1, 0.1, 0.1],  # all pass, though no float32 mean says so
            [1.0, NAN, 1.0],  # all pass of those scored
            [0.0, 1.0, 0.0],  # mixed
            [NAN, 0.0, NAN],  # one scored: flat
            [NAN, NAN, NAN],  # no group
        ]
    )
    metrics = results(jax.jit(group_metrics)({"reward": reward}))
    assert metrics["groups/all_fail"] == pytest.approx(2 / 5)
    assert metrics["groups/all_pass"] == pytest.approx(2 / 5)
    assert metrics["groups/mixed"] == pytest.approx(1 / 5)
    assert metrics["frac_reward_zero_std"] == pytest.approx(4 / 5)
    assert metrics["reward"] == pytest.approx((0.3 + 2 + 1) / 12)
    assert metrics["reward_std"] == pytest.approx(np.std([0, 1, 0], ddof=1) / 5, rel=1e-5)


@pytest.mark.full
def test_several_rewards_are_weighed_and_need_all_to_be_scored():
    rewards = {"a": jnp.array([[0.0, 1.0], [1.0, 1.0]]), "b": jnp.array([[1.0, NAN], [0.0, 2.0]])}
    metrics = group_results(rewards, {"a": 1.0, "b": 0.5})
    assert metrics["reward"] == pytest.approx((0.5 + 1 + 2) / 3)
    assert metrics["frac_reward_zero_std"] == 0.5
    alone = group_results(rewards, {"a": 1.0, "b": 0.0})
    assert alone["reward"] == pytest.approx(0.75)
    assert group_results(rewards)["reward"] == pytest.approx((1 + 1 + 3) / 3)
    with pytest.raises(ValueError, match="at least one reward whose weight is not 0"):
        group_metrics(rewards, {"a": 0.0, "b": 0.0})


@pytest.mark.slow
def test_rewards_of_several_tasks_are_counted_as_the_chain_adds_them_up():
    rewards = {
        "sums": jnp.array([[1.0, 0.0], [NAN, NAN], [NAN, NAN]]),
        "words": jnp.array([[NAN, NAN], [1.0, 1.0], [NAN, NAN]]),
    }
    weights = {"sums": 1.0, "words": 0.5}
    summed = as_summed(rewards, weights, advantages.build("like_trl"))
    metrics = group_results(summed, weights)
    assert metrics["reward"] == pytest.approx((1 + 0 + 0.5 + 0.5) / 4)
    assert metrics["frac_reward_zero_std"] == metrics["groups/mixed"] == 0.5
    assert as_summed(rewards, weights, advantages.build("grpo")) is rewards
    assert np.isnan(group_results(rewards, weights)["reward"])


@pytest.mark.full
@pytest.mark.slow
def test_each_reward_has_its_own_mean_deviation_and_share_of_unscored():
    right = jnp.array([[0.0, 1.0], [1.0, NAN]])
    metrics = results(group_metrics({"right": right, "none": jnp.full((2, 2), NAN)}))
    assert metrics["rewards/right/mean"] == pytest.approx(2 / 3)
    assert metrics["rewards/right/std"] == pytest.approx(np.std([0, 1, 1], ddof=1))
    assert metrics["rewards/right/unscored"] == 0.25
    assert metrics["rewards/none/unscored"] == 1.0
    assert math.isnan(metrics["rewards/none/mean"])
    assert math.isnan(metrics["rewards/none/std"])


LENGTHS = np.array([[3, 1], [4, 4], [2, 2]])


def test_lengths_are_counted_over_all_and_over_those_that_ended():
    mask = jnp.arange(4)[None, None] < LENGTHS[..., None]
    truncated = jnp.array([[False, False], [True, True], [False, False]])
    metrics = results(jax.jit(completion_metrics)(jnp.zeros((3, 2, 4), int), mask, truncated))
    assert metrics["num_tokens"] == 16
    assert metrics["completions/mean_length"] == pytest.approx(16 / 6)
    assert metrics["completions/min_length"] == 1
    assert metrics["completions/max_length"] == 4
    assert metrics["completions/mean_terminated_length"] == 2
    assert metrics["completions/min_terminated_length"] == 1
    assert metrics["completions/max_terminated_length"] == 3
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)


def test_a_group_is_identical_where_all_its_samples_are_the_same_tokens():
    tokens = jnp.array(
        [
            [[5, 6, 9], [5, 6, 7]],  # differ beyond the mask only
            [[5, 6, 7], [5, 6, 0]],  # one is longer
            [[5, 6, 7], [5, 1, 7]],
            [[1, 2, 3], [1, 2, 3]],
        ]
    )
    mask = jnp.array([[[1, 1, 0]] * 2, [[1, 1, 1], [1, 1, 0]], [[1, 1, 1]] * 2, [[1, 1, 1]] * 2])
    truncated = jnp.zeros((4, 2), bool)
    metrics = results(jax.jit(completion_metrics)(tokens, mask.astype(bool), truncated))
    assert metrics["groups/identical"] == 0.5
    alone = results(
        jax.jit(completion_metrics)(tokens[:, :1], mask[:, :1].astype(bool), truncated[:, :1])
    )
    assert "groups/identical" not in alone


def test_pass_at_k_is_the_binomial_formula_and_stays_exact_for_many_samples():
    run = jax.jit(pass_at_k, static_argnums=2)
    cases = [(c, n) for n in (4, 16) for c in range(n + 1)]
    correct, samples = (jnp.array(column, jnp.int32) for column in zip(*cases, strict=True))
    for k in (1, 3, 4):
        expected = [1 - math.comb(n - c, k) / math.comb(n, k) for c, n in cases]
        np.testing.assert_allclose(run(correct, samples, k), expected, atol=1e-6)
    big = run(jnp.array([1, 5000, 10_000]), jnp.array([10_000] * 3), 256)
    np.testing.assert_allclose(big, [256 / 10_000, 1, 1], atol=1e-5)
    assert np.isnan(run(jnp.array([1]), jnp.array([3]), 4)).all()  # 3 samples say nothing of 4
    with pytest.raises(ValueError, match="begin at 1"):
        pass_at_k(jnp.array([1]), jnp.array([3]), 0)


def test_flat_share_is_the_share_of_flat_draws_without_replacement():
    for n, c in [(5, 2), (6, 6), (6, 0), (7, 4)]:
        outcomes = [1] * c + [0] * (n - c)
        draws = [len(set(draw)) == 1 for draw in itertools.combinations(outcomes, 3)]
        value = jax.jit(flat_share, static_argnums=2)(jnp.array([c]), jnp.array([n]), 3)
        np.testing.assert_allclose(value, [np.mean(draws)], atol=1e-6)


def test_flat_share_is_unbiased_where_plugging_in_the_rate_is_not():
    p, n, group_size = 0.3, 8, 4
    counts = jnp.arange(n + 1)
    chance = np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    truth = p**group_size + (1 - p) ** group_size
    unbiased = chance @ np.asarray(flat_share(counts, jnp.full(n + 1, n), group_size))
    rates = np.arange(n + 1) / n
    plugged = chance @ (rates**group_size + (1 - rates) ** group_size)
    assert unbiased == pytest.approx(truth, abs=1e-6)
    assert plugged > truth + 0.05


def binomial(n, p):
    return np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])


def mean_over_outcomes(chances, samples, group_size):
    """E of (measured, iid, gap) over all counts of successes, prompt by prompt independent."""
    outcomes = np.array(list(itertools.product(range(samples + 1), repeat=len(chances))))
    chance = np.prod([row[outcomes[:, j]] for j, row in enumerate(chances)], axis=0)
    with jax.enable_x64(True):
        run = jax.vmap(lambda c: jensen_gap(c, jnp.full_like(c, samples), group_size))
        parts = jax.jit(run)(jnp.asarray(outcomes, jnp.int32))
    return [float(chance @ np.asarray(part)) for part in parts]


@pytest.mark.parametrize(("prompts", "samples", "group_size"), [(3, 2, 2), (4, 5, 3), (5, 4, 4)])
def test_degeneracy_and_its_gap_are_unbiased_over_all_outcomes(prompts, samples, group_size):
    """Prompts drawn from three kinds of different difficulty: the mean is the closed form."""
    random = np.random.default_rng(samples)
    rates, kinds = random.beta(0.4, 0.6, 3), random.dirichlet(np.ones(3))
    drawn = sum(kind * binomial(samples, p) for kind, p in zip(kinds, rates, strict=True))
    measured, iid, gap = mean_over_outcomes([drawn] * prompts, samples, group_size)
    real = kinds @ (rates**group_size + (1 - rates) ** group_size)
    p = kinds @ rates
    alike = p**group_size + (1 - p) ** group_size
    np.testing.assert_allclose([measured, iid, gap], [real, alike, real - alike], atol=1e-12)
    assert gap > 0.01
    if group_size == 2:
        assert gap == pytest.approx(2 * (kinds @ (rates - p) ** 2), abs=1e-12)


def test_for_pairs_the_gap_is_twice_the_sample_variance_of_given_prompts():
    rates = np.array([0.0, 0.3, 0.9, 0.5])
    measured, iid, gap = mean_over_outcomes([binomial(3, p) for p in rates], 3, 2)
    assert gap == pytest.approx(2 * rates.var(ddof=1), abs=1e-12)
    assert measured == pytest.approx(np.mean(rates**2 + (1 - rates) ** 2), abs=1e-12)
    pairs = [p * q + (1 - p) * (1 - q) for p, q in itertools.combinations(rates, 2)]
    assert iid == pytest.approx(np.mean(pairs), abs=1e-12)


@pytest.mark.full
@pytest.mark.slow
def test_prompts_with_too_few_samples_leave_the_gap_and_too_few_prompts_give_none():
    correct, samples = jnp.array([4, 1, 0, 3]), jnp.array([4, 2, 3, 4])
    enough_samples = jensen_gap(correct[jnp.array([0, 2, 3])], samples[jnp.array([0, 2, 3])], 3)
    np.testing.assert_allclose(jensen_gap(correct, samples, 3), enough_samples, rtol=1e-6)
    measured, iid, gap = jensen_gap(correct, samples, 4)  # two prompts, and four are needed
    assert float(measured) == pytest.approx((1 + 0) / 2)
    assert np.isnan([iid, gap]).all()
    assert np.isnan(jensen_gap(correct, samples, 5)).all()
    np.testing.assert_allclose(jensen_gap(correct, samples, 1), [1, 1, 0], atol=1e-6)


@pytest.mark.slow
def test_the_gap_stays_in_range_for_many_prompts_and_large_groups():
    correct = jnp.asarray(np.random.default_rng(0).binomial(64, 0.9, 2000), jnp.int32)
    measured, iid, _ = jax.jit(jensen_gap, static_argnums=2)(correct, jnp.full(2000, 64), 64)
    assert float(iid) == pytest.approx(0.9**64, rel=0.1)  # 0.0012
    assert float(measured) == pytest.approx((np.asarray(correct) == 64).mean())
    assert jensen_gap(jnp.full(50, 8), jnp.full(50, 8), 8)[1] == pytest.approx(1, abs=1e-5)


@pytest.mark.full
@pytest.mark.slow
def test_of_a_step_measured_degeneracy_is_what_difficulty_and_chance_add_up_to():
    reward = np.random.default_rng(1).binomial(1, [[0.1], [0.9], [0.5], [0.1], [1.0]], (5, 4))
    metrics = results(jax.jit(group_metrics)({"reward": jnp.asarray(reward, jnp.float32)}))
    total = metrics["groups/flat_iid"] + metrics["groups/jensen_gap"]
    assert total == pytest.approx(metrics["frac_reward_zero_std"], abs=1e-6)
    rate = reward.mean(1)
    sets = list(itertools.combinations(range(5), 4))
    iid = np.mean([np.prod(rate[[*prompts]]) + np.prod(1 - rate[[*prompts]]) for prompts in sets])
    assert metrics["groups/flat_iid"] == pytest.approx(iid, abs=1e-6)
    few = results(group_metrics({"reward": jnp.zeros((2, 4))}))
    assert math.isnan(few["groups/flat_iid"])
    assert math.isnan(few["groups/jensen_gap"])


def test_pass_at_k_counts_the_draws_that_hold_a_success():
    for n, k in [(8, 3), (12, 5), (20, 2)]:
        for c in (0, 1, n // 2, n):
            draws = [min(draw) < c for draw in itertools.combinations(range(n), k)]
            value = pass_at_k(jnp.array([c]), jnp.array([n]), k)
            np.testing.assert_allclose(value, [np.mean(draws)], atol=1e-6)


REWARD = jnp.array(
    [
        [0.0, 0.0, 1.0, 0.0],  # one success among failures: lucky
        [1.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [NAN, NAN, 1.0, NAN],  # alone: nothing to compare with, and flat
        [1.0, 0.0, NAN, NAN],  # lucky too
    ]
)
ADVANTAGE = jnp.array(
    [
        [-0.5, -0.5, 1.5, -0.5],
        [1.0, -1.0, 1.0, -1.0],
        [-1.0, -1.0, -1.0, -1.0],
        [9.0, 0.0, 2.0, 0.0],  # the 9 is masked
        [0.5, -0.5, 0.0, 0.0],
    ]
)
SCORED = jnp.isfinite(REWARD)


def test_lucky_single_successes_and_flat_groups_own_their_share_of_the_advantage():
    run = jax.jit(advantage_metrics)
    shares = results(run(ADVANTAGE, SCORED, {"reward": REWARD}))
    total = 3 + 4 + 4 + 2 + 1
    assert shares["advantage/lucky_share"] == pytest.approx((1.5 + 0.5) / total)
    assert shares["advantage/flat_share"] == pytest.approx((4 + 2) / total)
    assert shares["advantage/abs_max"] == 2
    nothing = results(run(0 * ADVANTAGE, SCORED, {"reward": REWARD}))
    assert math.isnan(nothing["advantage/lucky_share"])
    assert nothing["advantage/abs_max"] == 0


@pytest.mark.full
@pytest.mark.slow
def test_a_sample_owns_the_mean_over_its_tokens_whatever_its_length():
    tokens = jnp.arange(3) < jnp.array([1, 3, 2, 0])[:, None]
    wide = jnp.where(tokens, ADVANTAGE[..., None], 7.0)
    mask = SCORED[..., None] & tokens
    shares = results(advantage_metrics(wide, mask, {"reward": REWARD}))
    total = (3 - 0.5) + (4 - 1) + (4 - 1) + 2 + 1  # the last sample has no token
    assert shares["advantage/lucky_share"] == pytest.approx(2 / total)
    assert shares["advantage/flat_share"] == pytest.approx((3 + 2) / total)
