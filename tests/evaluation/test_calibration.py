"""Brier, ECE and AUROC against their definitions in float64, pair by pair and bin by bin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.evaluation.voting import auroc, brier, ece
from jaxgrpo.rewards import stated_confidence

NAN = np.nan


@jax.jit
def all_three(confidence, correct, mask):
    return (
        brier(confidence, correct, mask),
        ece(confidence, correct, mask),
        auroc(confidence, correct, mask),
    )


def numbers(confidence, correct, mask=None):
    confidence = jnp.asarray(confidence, jnp.float32)
    mask = jnp.ones(confidence.shape, bool) if mask is None else jnp.asarray(mask)
    results = all_three(confidence, jnp.asarray(correct, bool), mask)
    return np.array([float(result) for result in results])


def expected(confidence, correct):
    """(brier, ece, auroc) in float64 by loops over bins and pairs."""
    q, c = np.asarray(confidence, float), np.asarray(correct, float)
    gaps = 0.0
    for place in range(10):
        low, high = place / 10, (place + 1) / 10
        inside = [i for i in range(len(q)) if low <= q[i] < high or (place == 9 and q[i] == 1)]
        gaps += abs(sum(q[i] - c[i] for i in inside))
    pairs = [(a > b) + (a == b) / 2 for a in q[c == 1] for b in q[c == 0]]
    return np.array([np.mean((q - c) ** 2), gaps / len(q), np.mean(pairs)])


def test_the_three_agree_with_loops_over_bins_and_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        # Whole tenths and ties among them: every bin edge, 0 and 1 included, is met.
        q = rng.integers(0, 11, 64) / 10
        c = rng.random(64) < q**2 / 2 + 0.25
        np.testing.assert_allclose(numbers(q, c), expected(q, c), rtol=2e-6, atol=1e-7)


def test_a_small_case_by_hand():
    scores = numbers([0.9, 0.9, 0.2, 1.0], [True, False, False, True])
    np.testing.assert_allclose(scores[0], (0.01 + 0.81 + 0.04 + 0) / 4, rtol=1e-6)
    # The last bin holds 0.9, 0.9 and 1.0, whose excess is 2.8 - 2; the other 0.2.
    np.testing.assert_allclose(scores[1], (0.8 + 0.2) / 4, rtol=1e-6)
    # Four pairs: 0.9 against 0.9 is half, all others are in order.
    np.testing.assert_allclose(scores[2], 3.5 / 4, rtol=1e-6)


def test_a_confidence_of_one_is_counted():
    np.testing.assert_allclose(numbers([1.0] * 4, [True, False, False, False])[:2], 0.75)


def test_masked_samples_have_no_influence_whatever_they_hold():
    rng = np.random.default_rng(1)
    q, c = rng.random(50), rng.random(50) < 0.5
    padded = np.concatenate([q, [NAN, np.inf, 0.3, -7]])
    flags = np.concatenate([c, [True, False, True, False]])
    scores = numbers(padded, flags, np.arange(54) < 50)
    np.testing.assert_allclose(scores, expected(q, c), rtol=2e-6)


def test_uniform_calibrated_confidences_have_no_calibration_error_and_brier_one_sixth():
    rng = np.random.default_rng(2)
    q = rng.random(200_000)
    score, error, area = numbers(q, rng.random(200_000) < q)
    assert error < 0.01
    assert score == pytest.approx(1 / 6, abs=0.003)
    # P(q > q') where densities are 2q and 2(1 - q'): 5/6.
    assert area == pytest.approx(5 / 6, abs=0.003)


def test_auroc_does_not_change_under_an_increasing_map_and_turns_under_a_decreasing_one():
    rng = np.random.default_rng(3)
    q = rng.integers(1, 30, 200) / 32
    c = rng.random(200) < q
    area = numbers(q, c)[2]
    assert numbers(q**3 * 500 - 9, c)[2] == pytest.approx(area, abs=1e-6)
    assert numbers(-q, c)[2] == pytest.approx(1 - area, abs=1e-6)


def test_what_is_not_defined_is_nan():
    assert np.isnan(numbers([0.5, 0.5], [True, True])[2])
    assert np.isnan(numbers([0.5, 0.5], [False, False])[2])
    assert np.isnan(numbers([0.5], [True], [False])).all()


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("<confidence>0.25</confidence>", 0.25),
        ("<confidence>\n 1 \n</confidence> done", 1.0),
        ("<confidence>0.1</confidence><confidence>0.9</confidence>", 0.9),
        ([{"role": "assistant", "content": "<confidence>0</confidence>"}], 0.0),
    ],
)
def test_the_last_stated_confidence_is_read(text, confidence):
    assert stated_confidence(text) == confidence


@pytest.mark.parametrize(
    "text",
    [
        "0.5",
        "<confidence>0.5",
        "<confidence></confidence>",
        "<confidence>80%</confidence>",
        "<confidence>1.01</confidence>",
        "<confidence>-0.1</confidence>",
        "<confidence>nan</confidence>",
        "<confidence>0.5</confidence> or <confidence>high</confidence>",
    ],
)
def test_a_confidence_that_cannot_be_read_is_none_and_not_zero(text):
    assert stated_confidence(text) is None
