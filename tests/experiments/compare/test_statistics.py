"""Statistics of a comparison against brute force, tables written by hand, and chance itself."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxgrpo.evaluation.intervals import student_interval
from jaxgrpo.experiments.compare import exchanges, results


def best(values):
    return max(sum(row) / len(row) for row in values)


def brute_force(arm, control):
    """The share of exchanges whose difference of best means is at least the observed one."""
    observed = abs(best(arm) - best(control))
    met = 0
    for swapped in itertools.product([False, True], repeat=len(arm[0])):
        pairs = [
            [(c, a) if swap else (a, c) for a, c, swap in zip(*rows, swapped, strict=True)]
            for rows in zip(arm, control, strict=True)
        ]
        arm_values = [[a for a, _ in row] for row in pairs]
        control_values = [[c for _, c in row] for row in pairs]
        met += abs(best(arm_values) - best(control_values)) >= observed - 1e-12
    return met / 2 ** len(arm[0])


@pytest.mark.parametrize("rates", [1, 3])
def test_the_exchange_test_counts_every_exchange(rates):
    random = np.random.default_rng(rates)
    for shift in (0.0, 0.5, 3.0):
        arm, control = random.normal(size=(2, rates, 6))
        arm = arm + shift
        expected = brute_force(arm.tolist(), control.tolist())
        assert exchanges.exchange_test(arm, control) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [0.01, 1e6])
def test_exchanges_that_tie_with_the_observed_one_count_whatever_the_size_of_values(scale):
    """Such as tokens of a run: means of thirds are rounded, the more the larger they are."""
    random = np.random.default_rng(0)
    for _ in range(10):
        thirds = random.integers(300, 316, (2, 2, 6))
        expected = brute_force(*thirds.tolist())
        assert exchanges.exchange_test(*(thirds * scale / 3)) == pytest.approx(expected)


def test_equal_arms_have_p_1_and_what_all_seeds_agree_on_the_smallest():
    same = np.array([[0.3, 0.5, 0.2]])
    assert exchanges.exchange_test(same, same) == 1
    assert exchanges.sign_flip_test(np.zeros(7)) == 1
    # By hand: only all + and all - are as far from 0, 2 of 2^7.
    assert exchanges.sign_flip_test(np.array([1, 2, 3, 4, 5, 6, 7])) == 2 / 128
    assert exchanges.sign_flip_test(-np.array([1, 2, 3, 4, 5, 6, 7])) == 2 / 128
    assert exchanges.smallest_p(7) == 2 / 128
    # Signs of (3, -1): sums 2, 4, -4, -2; all four are at least 2 away from 0.
    assert exchanges.sign_flip_test(np.array([3, -1])) == 1


def test_many_seeds_are_judged_by_drawn_exchanges():
    random = np.random.default_rng(0)
    difference = random.normal(0.5, 1.0, 14)
    signs = np.array(list(itertools.product([1, -1], repeat=14)))
    exact = (abs(signs @ difference) >= abs(difference.sum()) - 1e-9).mean()
    estimate = exchanges.sign_flip_test(difference)
    error = math.sqrt(exact * (1 - exact) / exchanges.DRAWN)
    assert estimate == pytest.approx(exact, abs=5 * error)
    assert estimate == exchanges.sign_flip_test(difference)
    assert exchanges.sign_flip_test(np.ones(40)) == exchanges.smallest_p(40) > 0
    # Of 13 seeds 2 of 2^13 exchanges reach it, and as many as happen to be of those drawn.
    for seeds in (12, 13, 14, 15):
        smallest = exchanges.smallest_p(seeds)
        assert exchanges.sign_flip_test(np.linspace(0.5, 1.5, seeds)) == smallest
        assert 1 / 20_001 <= smallest <= 3 * 2 / 2**seeds


def test_holm_of_a_table_worked_by_hand():
    # Sorted .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 .04, then never falling.
    p = {"b": 0.02, "d": 0.04, "a": 0.01, "c": 0.03}
    corrected = exchanges.holm(p)
    assert list(corrected) == list(p)
    assert corrected == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.06})
    assert exchanges.holm({"a": 0.7, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert exchanges.holm({}) == {}


def test_seven_seeds_cannot_show_five_differences_and_nine_can():
    assert 5 * exchanges.smallest_p(7) > 0.05 >= 5 * exchanges.smallest_p(9)
    assert exchanges.seeds_needed(5, 0.05) == 8  # 5 * 2 / 256 = .039
    assert exchanges.seeds_needed(1, 0.05) == 6


def test_no_seeds_are_advised_with_which_the_level_is_not_reached():
    for comparisons, level in ((1, 1e-4), (5, 1e-3), (1, 6e-5)):
        seeds = exchanges.seeds_needed(comparisons, level) or 0
        assert seeds > exchanges.EXACT
        agreeing = np.linspace(0.5, 1.5, seeds)
        assert comparisons * exchanges.sign_flip_test(agreeing) <= level
    # The observed one of 20,001 exchanges always counts.
    assert exchanges.seeds_needed(1, 4e-5) is None
    assert exchanges.sign_flip_test(np.ones(200)) > 4e-5


def test_the_interval_is_students():
    values = np.array([0.1, 0.4, 0.2, 0.9, 0.5])
    reach = 2.776 * math.sqrt(((values - 0.42) ** 2).sum() / 4 / 5)  # t of 4 degrees, .975
    interval = (0.42, 0.42 - reach, 0.42 + reach)
    assert results.estimate(values, "reward") == pytest.approx(interval, abs=1e-4)
    assert results.estimate(np.full(4, 0.5), "reward") == (0.5, 0.5, 0.5)
    assert np.isnan(results.estimate(np.array([0.5]), "reward")[1:]).all()


def test_the_best_rate_is_the_first_of_the_highest_means():
    assert results.choose(np.array([[0.1, 0.2], [0.3, 0.4], [0.4, 0.3]])) == 1


def test_the_crossing_is_the_first_k_at_which_seeds_show_less_than_the_base():
    noise = np.random.default_rng(0).normal(0, 0.002, (7, 4))
    base, trained = np.array([0.2, 0.4, 0.6, 0.7]), np.array([0.5, 0.55, 0.59, 0.6])
    base, trained = base + noise, np.tile(trained, (7, 1))
    assert results.crossing(base, trained) == 3
    assert results.crossing(trained, base) == 1
    assert results.crossing(base, base) is None
    assert results.crossing(base[:1], trained[:1]) is None, "one seed shows nothing"
    # Below in the mean at k = 3, by less than the seeds differ; k = 4 is beyond that.
    wide = base + np.array([-3, -2, -1, 0, 1, 2, 3])[:, None] * [0, 0, 0.02, 0.02]
    assert trained.mean(0)[2] < wide.mean(0)[2]
    assert results.crossing(wide, trained) == 4


def test_differences_that_are_noise_seldom_cross():
    """A model against itself: 7 seeds, 100 prompts of 8 samples each, base and trained drawn again.

    By means alone there is a k at which it is below itself in half of the cases or more.
    """
    random, samples, rounds = np.random.default_rng(0), 8, 200
    table = np.array(
        [
            [1 - math.comb(samples - c, k) / math.comb(samples, k) for k in range(1, samples + 1)]
            for c in range(samples + 1)
        ]
    )
    chance = random.beta(0.5, 0.5, 100)
    by_means = shown = 0
    for _ in range(rounds):
        base, trained = table[random.binomial(samples, chance, (2, 7, 100))].mean(2)
        by_means += bool((trained.mean(0) < base.mean(0)).any())
        shown += results.crossing(base, trained) is not None
    assert by_means / rounds > 0.5
    # One side of a two-sided level of 5% for all k together.
    assert shown / rounds <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / rounds)


def test_sign_flips_of_one_number_are_the_sign_flip_test_and_of_several_brute_force():
    random = np.random.default_rng(2)
    differences = random.normal(0.4, 1.0, (6, 3))
    single = exchanges.sign_flip_tests(differences[:, :1])
    assert single[0] == pytest.approx(exchanges.sign_flip_test(differences[:, 0]))
    size = [math.sqrt(sum(d * d for d in column) / 6) for column in differences.T]
    expected = np.zeros(3)
    for signs in itertools.product([1, -1], repeat=6):
        flipped = [
            abs(sum(s * d for s, d in zip(signs, column, strict=True))) / 6 / scale
            for column, scale in zip(differences.T, size, strict=True)
        ]
        observed = [
            abs(column.mean()) / scale for column, scale in zip(differences.T, size, strict=True)
        ]
        expected += [max(flipped) >= value - 1e-9 for value in observed]
    np.testing.assert_allclose(exchanges.sign_flip_tests(differences), expected / 2**6)
    many = random.normal(1.0, 1.0, (14, 1))
    assert exchanges.sign_flip_tests(many)[0] == pytest.approx(
        exchanges.sign_flip_test(many[:, 0]), abs=0.01
    )
    assert exchanges.sign_flip_tests(np.zeros((7, 2))).tolist() == [1, 1]


def test_a_band_is_the_interval_at_each_place():
    values = np.random.default_rng(1).normal(size=(6, 3))
    expected = np.array([results.estimate(column, "reward")[1:] for column in values.T]).T
    np.testing.assert_allclose(student_interval(values), expected, atol=1e-12)


def rejected(noise, seeds, tuning, rounds, rates=3):
    """How often arms of equal means, one of them noisier, have p <= .05."""
    random = np.random.default_rng(noise)
    false = 0
    for _ in range(rounds):
        arm = noise * random.normal(size=(rates, seeds + tuning))
        control = random.normal(size=(rates, seeds + tuning))
        if tuning:
            judged = (of[results.choose(of[:, seeds:]), :seeds] for of in (arm, control))
            false += exchanges.sign_flip_test(np.subtract(*judged)) <= 0.05
        else:
            false += exchanges.exchange_test(arm, control) <= 0.05
    return false / rounds


def test_a_noisier_arm_is_called_different_too_often_unless_tuning_seeds_choose_its_rate():
    """What the report says of p: with equal means and 5 times the noise .11 instead of .05."""
    assert rejected(noise=5, seeds=6, tuning=0, rounds=400) > 0.07
    assert rejected(noise=1, seeds=6, tuning=0, rounds=400) <= 0.05 + 3 * math.sqrt(0.05 / 400)
    assert rejected(noise=5, seeds=6, tuning=3, rounds=400) <= 0.05 + 3 * math.sqrt(0.05 / 400)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("rates", [1, 3])
def test_ten_arms_that_are_the_same_are_found_to_differ_no_oftener_than_the_level(rates):
    """Seeds differ, the noise is skewed, the best of the rates is taken: all by chance."""
    random = np.random.default_rng(rates)
    level, seeds, rounds = 0.05, 9, 250
    assert 9 * exchanges.smallest_p(seeds) < level, "else nothing could be found at all"
    false = 0
    for _ in range(rounds):
        of_seed = random.normal(size=seeds)
        arms = of_seed + random.exponential(size=(10, rates, seeds))
        p = {str(i): exchanges.exchange_test(arms[i], arms[0]) for i in range(1, 10)}
        false += min(exchanges.holm(p).values()) <= level
    assert false / rounds <= level + 3 * math.sqrt(level * (1 - level) / rounds)
    better = {"1": exchanges.exchange_test(arms[1] + 5, arms[0])}
    assert exchanges.holm(better)["1"] <= level, "and a real difference is found"
