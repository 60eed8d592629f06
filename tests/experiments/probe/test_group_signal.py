"""Groups of each size against the enumeration of every draw from a prompt's samples."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.experiments.probe.measure import gap_influence, group_shares, live_tokens, lucky_share
from jaxgrpo.update.diagnostics import jensen_gap

pytestmark = pytest.mark.slow

CASES = [(0, 6), (1, 6), (2, 6), (4, 6), (6, 6), (3, 5), (1, 2)]
CORRECT, SAMPLES = (np.array(column, np.int32) for column in zip(*CASES, strict=True))
SIZES = (1, 2, 3, 5)


def draws(correct, samples, size):
    """Successes of every group of `size` samples."""
    outcomes = np.arange(samples) < correct
    return [outcomes[[*draw]].sum() for draw in itertools.combinations(range(samples), size)]


@jax.jit
def shares(correct, samples):
    return {size: group_shares(correct, samples, size) for size in SIZES}


def test_shares_of_kinds_of_groups_are_those_of_all_draws():
    kinds_by_size = shares(jnp.asarray(CORRECT), jnp.asarray(SAMPLES))
    for size, (place, (c, n)) in itertools.product(SIZES, enumerate(CASES)):
        estimates = [float(kind[place]) for kind in kinds_by_size[size]]
        if n < size:
            assert np.isnan(estimates).all()
            continue
        wins = np.array(draws(c, n, size))
        mixed = (wins > 0) & (wins < size)
        expected = [(wins == 0).mean(), (wins == size).mean(), mixed.mean(), (wins == 1).mean()]
        np.testing.assert_allclose(estimates, expected, atol=1e-6)


def test_tokens_of_mixed_groups_are_those_of_all_draws():
    random = np.random.default_rng(0)
    lengths = [random.integers(1, 20, n) for n in SAMPLES]
    right = np.array([length[:c].sum() for length, c in zip(lengths, CORRECT, strict=True)])
    wrong = np.array([length[c:].sum() for length, c in zip(lengths, CORRECT, strict=True)])
    arrays = [jnp.asarray(CORRECT), jnp.asarray(SAMPLES)]
    arrays += [jnp.asarray(tokens, jnp.float32) for tokens in (right, wrong)]
    for size in (2, 3):
        estimates = jax.jit(live_tokens, static_argnums=4)(*arrays, size)
        for place, (c, n) in enumerate(CASES):
            if n < size:
                assert np.isnan(estimates[place])
                continue
            tokens = []
            for draw in itertools.combinations(range(n), size):
                wins = sum(sample < c for sample in draw)
                tokens.append(lengths[place][[*draw]].sum() * (0 < wins < size))
            assert float(estimates[place]) == pytest.approx(np.mean(tokens), abs=1e-4)


@pytest.mark.full
def test_lucky_are_single_successes_of_prompts_that_seldom_succeed():
    correct, samples = jnp.array([1, 2, 16, 0, 8]), jnp.full(5, 16)
    share = float(lucky_share(correct, samples, 4))
    mixed = [np.mean([0 < win < 4 for win in draws(c, 16, 4)]) for c in (1, 2, 16, 0, 8)]
    assert share == pytest.approx(mixed[0] / sum(mixed), abs=1e-6)  # 2 / 16 is not below 1 / 8
    # With 8 samples one success is a rate of 1 / 8: nobody can be found to be hard.
    assert np.isnan(lucky_share(jnp.array([1, 4]), jnp.array([8, 8]), 4))
    assert np.isnan(lucky_share(jnp.array([0, 16]), jnp.array([16, 16]), 4))


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_prompts_influence_is_what_leaving_it_out_changes(size):
    """The jackknife, prompt by prompt, of which the influence is the limit of many prompts."""
    random = np.random.default_rng(size)
    number, n = 200, 16
    with jax.enable_x64(True):
        correct = jnp.asarray(random.binomial(n, random.beta(0.5, 0.8, number)), jnp.int32)
        samples = jnp.full(number, n, jnp.int32).at[:3].set(size - 1)
        correct = jnp.minimum(correct, samples)
        influence = np.asarray(gap_influence(correct, samples, size))
        gap = jax.jit(jensen_gap, static_argnums=2)
        full_gap = float(gap(correct, samples, size)[2])
        without = jax.jit(jax.vmap(lambda out: gap(correct, jnp.where(out, 0, samples), size)[2]))(
            jnp.eye(number, dtype=bool)
        )
    used = number - 3
    pseudo = (used - 1) * (full_gap - np.asarray(without)[3:])
    np.testing.assert_array_equal(influence[:3], 0)
    assert influence.sum() == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(influence[3:], pseudo, atol=30 * size / used * influence.std() / 4)
    assert np.corrcoef(influence[3:], pseudo)[0, 1] > 0.999


def test_for_pairs_the_influence_is_that_of_twice_the_variance():
    rate = np.array([0.0, 0.25, 0.5, 1.0])
    many = 4000  # so many samples that c (c - 1) / n (n - 1) is the square of the rate
    correct = jnp.asarray(rate * many, jnp.int32)
    influence = gap_influence(correct, jnp.full(4, many), 2)
    centred = (rate - rate.mean()) ** 2
    np.testing.assert_allclose(influence, 2 * (centred - centred.mean()), atol=1e-3)
