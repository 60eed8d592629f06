"""How two judgements agree: against scipy, and groups that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from jaxgrpo.evaluation.agreement import compare, ranks, sides, spearman


@pytest.mark.parametrize("seed", range(5))
def test_ranks_and_their_correlation_are_scipys(seed):
    random = np.random.default_rng(seed)
    first, second = random.integers(0, 6, (2, 40)).astype(float)
    np.testing.assert_array_equal(ranks(first), scipy.stats.rankdata(first))
    expected = scipy.stats.spearmanr(first, second)[0]
    assert spearman(first, second) == pytest.approx(expected, abs=1e-12)
    assert spearman(first, -first) == pytest.approx(-1)


def test_what_changes_in_groups_is_counted():
    nan = math.nan
    old = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, nan, nan]], float)
    new = np.array([[0, 1, 0, 3], [0, 0, 0, 1], [2, 2, 2, 2], [1, 0, 1, nan]], float)
    result = compare(old.ravel(), new.ravel(), np.repeat(np.arange(4), 4))
    assert (result.samples, result.unscored) == (14, 1)
    # Group 0: the mean is 1, so that the second is at it and no longer above. Group 1: all four
    # leave the mean. Group 2: all four come to it. Group 3: none.
    assert result.sign_changed == pytest.approx((1 + 4 + 4) / 14)
    # Group 0: 3.5 and 3.5 become 3 and 4. Group 1: 2.5 becomes 2, 2, 2 and 4. Group 2: 1 and three
    # times 3 become 2.5.
    assert result.rank_changed == pytest.approx((2 + 4 + 4) / 14)
    assert (result.now_flat, result.now_informative) == (1, 1)
    assert result.old_mean == pytest.approx(6 / 14)
    assert result.new_mean == pytest.approx((4 + 1 + 8 + 2) / 15)


def test_a_judgement_agrees_with_itself_whatever_its_scale():
    values, group = np.random.default_rng(0).normal(size=24), np.repeat(np.arange(4), 6)
    result = compare(values, 3 * values, group)
    assert result.spearman == pytest.approx(1)
    assert result[5:] == (0, 0, 0, 0)


def test_equal_values_are_at_their_mean_in_spite_of_rounding():
    values = np.full(7, np.float32(0.1)).astype(float)
    assert values.mean() != values[0] or sides(values).tolist() == [0] * 7
    assert sides(values).tolist() == [0] * 7
    assert sides(np.zeros(3)).tolist() == [0] * 3


def test_what_cannot_be_compared_is_not_a_number():
    nothing = compare(np.full(4, np.nan), np.ones(4), np.zeros(4, int))
    assert nothing.samples == 0
    assert all(map(math.isnan, (nothing.old_mean, nothing.spearman, nothing.sign_changed)))
    assert math.isnan(spearman(np.ones(3), np.arange(3.0)))


def test_sums_of_the_same_amount_are_equal_however_they_were_rounded():
    """.1 + .6 and .7, as float32 numbers: a group of them teaches nothing, as in training."""
    tenths = {number: float(np.float32(number / 10)) for number in (1, 6, 7)}
    sums = np.array([tenths[1] + tenths[6], tenths[7], tenths[1] + tenths[6], 0.2 * 3, 0.3 * 2])
    assert len(np.unique(sums)) == 4
    group = np.array([0, 0, 0, 1, 1])
    apart = compare(sums, np.array([1.0, 0, 0, 1, 0]), group)
    assert (apart.now_flat, apart.now_informative) == (0, 2)
    assert apart.sign_changed == apart.rank_changed == 1
    same = compare(sums, np.array([0.7, 0.7, 0.7, 0.6, 0.6]), group)
    assert (same.sign_changed, same.rank_changed, same.now_flat) == (0, 0, 0)
    assert ranks(sums).tolist() == [4, 4, 4, 1.5, 1.5]
    assert ranks(np.zeros(0)).tolist() == []
