"""beta, mu and kappa of the tilted base against enumeration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.advantages import beta_of_mu, kappa, mu_of_beta, target_validity
from jaxgrpo.core.errors import InputError

pytestmark = pytest.mark.usefixtures("float64")

BETAS = np.array([0.02, 0.1, 0.5, 1.0, 4.0, 100.0])


def tilted(base, valid, beta):
    weight = base * np.exp(valid / beta)
    return weight / weight.sum()


@pytest.mark.slow
def test_formulas_are_those_of_the_enumerated_tilted_base():
    random = np.random.default_rng(0)
    base, valid = random.dirichlet(np.ones(12)), random.random(12) < 0.4
    rate = base[valid].sum()
    filtered = base * valid / rate
    mu = np.asarray(mu_of_beta(BETAS, rate))
    spent = np.asarray(kappa(mu, rate))
    for beta, success, price in zip(BETAS, mu, spent, strict=True):
        best = tilted(base, valid, beta)
        np.testing.assert_allclose(success, best[valid].sum(), 1e-12)
        np.testing.assert_allclose(price, (best * np.log(best / base)).sum(), 1e-8)
        divergence = (filtered[valid] * np.log(filtered[valid] / best[valid])).sum()
        np.testing.assert_allclose(divergence, -np.log(success), 1e-8, 1e-12)
        value = beta * np.log(1 - rate + rate * np.exp(1 / beta))
        np.testing.assert_allclose(success - beta * price, value, 1e-12)


def test_beta_and_mu_are_each_others_inverse():
    rates = np.array([1e-6, 0.01, 0.3, 0.9])
    for beta in BETAS[2:]:
        mu = mu_of_beta(float(beta), rates)
        np.testing.assert_allclose(beta_of_mu(mu, rates), np.full(4, beta), 1e-9)


def test_limits_are_defined():
    mu = mu_of_beta(jnp.array([0.0, jnp.inf, 0.0, 1.0]), jnp.array([0.2, 0.2, 0.0, 1.0]))
    np.testing.assert_allclose(mu, [1, 0.2, 0, 1], 1e-12)
    beta = beta_of_mu(jnp.array([0.2, 1.0, 0.1, 0.5]), jnp.array([0.2, 0.2, 0.2, 0.0]))
    np.testing.assert_array_equal(beta, [np.inf, 0, np.nan, np.nan])
    price = kappa(jnp.array([0.0, 1.0, 0.5, 0.0, 1.0]), jnp.array([0.2, 0.2, 0.0, 0.0, 1.0]))
    np.testing.assert_allclose(price, [-np.log(0.8), -np.log(0.2), np.inf, 0, 0], 1e-12)


def test_kappa_keeps_its_digits_where_its_terms_cancel():
    rate = np.float32(0.3)
    for step in (1e-4, 1e-2, 0.1, 0.5):
        mu = np.float32(rate + step)
        target, base = np.float64(mu), np.float64(rate)
        exact = target * np.log(target / base) + (1 - target) * np.log((1 - target) / (1 - base))
        np.testing.assert_allclose(kappa(jnp.asarray(mu), jnp.asarray(rate)), exact, 1e-5)
        assert kappa(jnp.asarray(mu), jnp.asarray(rate)).dtype == jnp.float32


@pytest.mark.slow
def test_one_penalty_brings_the_mean_over_prompts_to_the_target():
    rates = np.array([0.0, 1e-8, 0.02, 0.5, 0.97, 1.0, 0.0])
    find = jax.jit(target_validity)
    for target in (0.5, 0.6, 0.9, 0.999):
        beta, mu, left_out = find(target, rates)
        assert left_out == 2
        np.testing.assert_allclose(mu[1:6].mean(), target, 1e-10)
        np.testing.assert_allclose(mu, mu_of_beta(beta, rates), 1e-10)
        assert mu[0] == mu[6] == 0
    np.testing.assert_allclose(find(0.7, np.array([0.2])).beta, beta_of_mu(0.7, 0.2))
    single = find(jnp.float32(0.7), jnp.asarray([0.2, 0.4], jnp.float32))
    assert single.mu.dtype == jnp.float32
    np.testing.assert_allclose(single.mu.mean(), 0.7, 1e-5)


@pytest.mark.slow
def test_targets_that_need_no_tilt_or_cannot_be_reached_are_defined():
    rates = np.array([0.4, 0.8, 0.0])
    for target in (0.3, 0.6):
        beta, mu, _ = target_validity(target, rates)
        assert beta == np.inf
        np.testing.assert_allclose(mu, rates, 1e-12)
    beta, mu, left_out = target_validity(0.5, np.zeros(3))
    assert (float(beta), mu.tolist(), int(left_out)) == (np.inf, [0, 0, 0], 3)
    for target in (1.0, 0.0, -1):
        with pytest.raises(InputError, match=r"expected a rate in \(0, 1\)"):
            target_validity(target, rates)
    beta, mu, _ = jax.jit(target_validity)(1.0, rates)  # nothing can be raised here
    assert (float(beta), mu.tolist()) == (0, [1, 1, 0])
