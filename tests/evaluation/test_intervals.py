"""Intervals cover as often as they say, and say so where nothing is known."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.cli.inference import metrics_table
from jaxgrpo.config import files
from jaxgrpo.evaluation.intervals import (
    bootstrap,
    mean_of_shares,
    ratio_interval,
    student_interval,
    studentised,
)
from jaxgrpo.experiments.probe.measure import gap_influence
from jaxgrpo.training.export import model_card
from jaxgrpo.update.diagnostics import jensen_gap

PROMPTS, SAMPLES, SIZE, TIMES = 200, 16, 4, 150


def equal(random):
    return np.full((TIMES, PROMPTS), 0.4)


def bimodal(random):
    return random.choice([0.0, 1.0, 0.5], p=[0.4, 0.2, 0.4], size=(TIMES, PROMPTS))


def flat(p):
    return p**SIZE + (1 - p) ** SIZE


@jax.jit
def measured(correct):
    def gap_and_influence(correct):
        samples = jnp.full_like(correct, SAMPLES)
        gap = jensen_gap(correct, samples, SIZE)[2]
        return gap, gap_influence(correct, samples, SIZE)

    return jax.vmap(gap_and_influence)(correct)


@pytest.mark.parametrize(
    ("draw", "truth"),
    [(equal, 0.0), (bimodal, 0.4 + 0.2 + 0.4 * flat(0.5) - flat(0.4))],
)
def test_the_interval_of_the_gap_covers_it(draw, truth):
    """99%: of 150 probes 1.5 miss on average where it is exact; 8 or more once in 5000 times."""
    random = np.random.default_rng(7)
    correct = random.binomial(SAMPLES, draw(random))
    gaps, influences = map(np.asarray, measured(jnp.asarray(correct, jnp.int32)))
    ends = np.array([studentised(float(gap), a) for gap, a in zip(gaps, influences, strict=True)])
    missed = (ends[:, 0] > truth) | (ends[:, 1] < truth)
    assert missed.sum() < 8
    # An interval that were wider than need be would cover as well: it is that of the spread seen.
    assert np.median(ends[:, 1] - ends[:, 0]) == pytest.approx(2 * 2.576 * gaps.std(), rel=0.25)
    # Rates put into p^G + (1 - p)^G promise .0475 more on equal prompts: the interval refuses it.
    rates = correct / SAMPLES
    excess = flat(rates).mean(1) - flat(rates.mean(1)) - gaps
    assert excess.mean() > 0.01
    if truth == 0:
        assert excess.mean() == pytest.approx(0.0475, abs=0.001)
        assert (ends[:, 1] < gaps + excess).mean() > 0.99


def test_a_level_that_is_lower_gives_an_interval_inside():
    values = np.random.default_rng(0).exponential(size=40)
    spread = values - values.mean()
    wide, narrow = (studentised(1.0, spread, level, (-9, 9)) for level in (0.99, 0.8))
    assert wide[0] < narrow[0] < 1.0 < narrow[1] < wide[1]
    assert studentised(1.0, spread, 0.99, (-9, 9)) == wide  # the same for the same values
    # Skewed to the right: the mean may well be far above, and hardly far below.
    assert wide[1] - 1 > 1 - wide[0]


def test_bounds_are_kept_and_nothing_known_is_told():
    one_success = np.eye(1, 50)[0]
    low, high = studentised(0.02, one_success - 0.02, bounds=(0.0, 1.0))
    assert (0 <= low <= 0.02, high) == (True, 1.0)
    assert np.isnan(studentised(0.0, np.zeros(50))).all()
    assert np.isnan(studentised(0.3, np.array([1e-8, -1e-8]))).all()
    assert np.isnan(studentised(np.nan, np.arange(5.0))).all()
    assert np.isnan(studentised(0.5, np.array([0.1]))).all()


def test_a_format_that_is_called_low_is_shown_and_ends_of_intervals_are_not():
    ends = {"accuracy": 0.5, "accuracy/low": 0.4, "accuracy/high": 0.6}
    formats = {"format/low": 0.3, "format/low/accuracy": 0.2, "format/high": 0.7}
    column, *_ = metrics_table({**ends, **formats}, "title").columns
    assert [str(cell) for cell in column.cells] == ["accuracy", *formats]
    card = model_card(files.load("quickstart"), 3, {**ends, **formats})
    assert all(f"| {name} | " in card for name in ("accuracy", *formats))
    assert "accuracy/low |" not in card


@pytest.mark.parametrize(
    ("draw", "mean", "missed"),
    [("normal", 0.0, 0.05), ("uniform", 0.5, 0.058), ("exponential", 1.0, 0.109)],
)
def test_the_interval_of_seven_seeds_covers_their_mean_as_often_as_is_said(draw, mean, missed):
    random = np.random.default_rng(1)
    values = getattr(random, draw)(size=(7, 20_000))
    low, high = student_interval(values)
    share = ((low > mean) | (high < mean)).mean()
    assert share == pytest.approx(missed, abs=0.006)
    ends = np.transpose([bootstrap(column) for column in values.T[:1000]])
    bootstrap_share = ((ends[0] > mean) | (ends[1] < mean)).mean()
    assert bootstrap_share > share + 0.03
    assert np.isnan(student_interval(values[:1])).all()


@pytest.mark.parametrize("count", [3, 5, 7])
def test_the_interval_of_a_ratio_covers_it_as_often_as_is_said(count):
    """5%; a bootstrap of as few pairs misses more than twice as often."""
    random = np.random.default_rng(3)
    missed = {"ratio": 0, "bootstrap": 0}
    for _ in range(1500):
        above, below = random.normal((0.4, 0.5), 0.05, (count, 2)).T
        low, high = ratio_interval(above, below)
        missed["ratio"] += not low < 0.8 < high
        draws = random.integers(0, count, (200, count))
        low, high = np.percentile(above[draws].mean(1) / below[draws].mean(1), [2.5, 97.5])
        missed["bootstrap"] += not low < 0.8 < high
    assert missed["ratio"] / 1500 == pytest.approx(0.05, abs=0.02)
    assert missed["bootstrap"] / 1500 > 0.1


def test_at_the_ends_of_a_ratio_students_interval_of_the_difference_ends_at_nothing():
    random = np.random.default_rng(4)
    above, below = random.normal(1.0, 0.1, (2, 6))
    low, high = ratio_interval(above, below)
    assert student_interval(above - low * below)[0] == pytest.approx(0, abs=1e-12)
    assert student_interval(above - high * below)[1] == pytest.approx(0, abs=1e-12)
    # Both of a pair move together: their ratio is known.
    assert ratio_interval(0.5 * below, below) == pytest.approx((0.5, 0.5))
    # Nothing bounds a ratio to what may be nothing.
    assert ratio_interval(above[:3], np.array([0.0, 0.0, 1.0])) == (-np.inf, np.inf)
    assert np.isnan(ratio_interval(above[:1], below[:1])).all()


def chance(count, p):
    """Of 0 to `count` successes."""
    return np.array([math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)])


def solved(count, k):
    return (np.arange(count) < k).astype(float)


def test_few_successes_bound_the_mean_from_above():
    """5 of 200: the interval holds the exact one of Clopper and Pearson and is not much longer."""
    low, high = mean_of_shares(solved(200, 5))
    assert studentised(0.025, solved(200, 5) - 0.025, bounds=(0, 1))[1] == 1  # what it is cut from
    for p in (low, high):  # outside the exact interval: as few or as many are rarer than 0.5%
        tail = chance(200, p)[5:].sum() if p == low else chance(200, p)[:6].sum()
        assert 0.0005 < tail < 0.005
    mirrored = mean_of_shares(1 - solved(200, 5))
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-3)  # other draws


@pytest.mark.parametrize("count", [1, 5, 200])
def test_where_no_prompt_or_every_one_is_solved_the_mean_is_bounded_all_the_same(count):
    reach = 1 - 0.005 ** (1 / count)  # (1 - m)^P = .005
    assert mean_of_shares(np.zeros(count)) == pytest.approx((0, reach))
    assert mean_of_shares(np.ones(count)) == pytest.approx((1 - reach, 1))
    assert np.isnan(mean_of_shares(np.zeros(0))).all()


def test_shares_that_spread_little_have_the_short_interval_of_the_bootstrap():
    rates = np.random.default_rng(0).binomial(16, 0.4, 200) / 16
    ends = mean_of_shares(rates)
    assert ends == studentised(rates.mean(), rates - rates.mean(), bounds=(0, 1))
    assert ends[1] - ends[0] < 0.06  # of 200 that are 0 or 1 it would be 0.18


@pytest.mark.parametrize("count", [20, 100])
def test_the_interval_of_a_share_covers_it_whatever_it_is(count):
    """Exactly, over all numbers of solved prompts; each of the two intervals may miss 1%."""
    ends = np.array([mean_of_shares(solved(count, k)) for k in range(count + 1)])
    for p in (0.002, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.95, 0.999):
        covers = (ends[:, 0] <= p) & (p <= ends[:, 1])
        assert chance(count, p)[covers].sum() > 0.98, p
