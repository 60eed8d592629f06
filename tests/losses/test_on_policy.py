"""Expected gradients of every surrogate on policy, by enumerating all sequences of a small policy.

A tabular autoregressive policy over 3 tokens and at most 3 positions, token 2 being the end: one
row of logits per prefix, and 15 sequences of 1 to 3 tokens.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_pairs import FIELDS, NO_SCORE, OPTIONS

from jaxgrpo.losses import Tokens, build_surrogate, registry, sequence_sum, token_loss

V, T, END = 3, 3, 2
SLOPE_AT_1 = {"shaped_ratio": 0.1 / 1.1**2, "by_sample": 1.0}
"""Multiples of the gradient of the expected reward; 1 for those not named."""


def sequences():
    """[N, T] tokens, padded by -1: every sequence ends at the end token or at T."""
    rows = []
    for length in range(1, T + 1):
        for head in itertools.product(range(V - 1), repeat=length - 1):
            last = range(V) if length == T else [END]
            rows += [[*head, token, *[-1] * (T - length)] for token in last]
    return np.array(rows)


TOKENS = sequences()
MASK = TOKENS >= 0
PREFIXES = sorted({tuple(row[:t]) for row in TOKENS for t in range(T) if row[t] >= 0})
STATE = np.array(
    [[PREFIXES.index(tuple(row[:t])) if row[t] >= 0 else 0 for t in range(T)] for row in TOKENS]
)


def token_logp(logits):
    """[N, T] log-probs of every sequence's tokens, 0 behind its end."""
    logp = jax.nn.log_softmax(logits)[STATE, np.maximum(TOKENS, 0)]
    return jnp.where(MASK, logp, 0)


@pytest.fixture(scope="module")
def table():
    """(logits, reward of each sequence, gradient of the expected reward), float64."""
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        logits = jnp.asarray(random.normal(size=(len(PREFIXES), V)))
        reward = jnp.asarray(random.normal(size=len(TOKENS)))
        probability = jnp.exp(token_logp(logits).sum(1))
        np.testing.assert_allclose(probability.sum(), 1, rtol=1e-12)  # they are all sequences

        def expected(logits):
            return (jnp.exp(token_logp(logits).sum(1)) * reward).sum()

        yield logits, reward, jax.grad(expected)(logits)


@pytest.fixture(scope="module")
def slopes(table):
    """surrogate -> expected gradient: each sequence's loss, its probability held."""
    logits, reward, _ = table
    fields: dict[str, jax.Array] = {name: jnp.zeros(MASK.shape) for name in FIELDS}
    mask, segment = jnp.asarray(MASK), jnp.ones(MASK.shape, jnp.int32)

    @jax.jit
    def every(logits):
        sequence_logp = token_logp(logits)
        probability = jnp.exp(sequence_logp.sum(1))
        # Weights of the mean over sequences, each as often as the policy draws it.
        weight = sequence_sum().weights(mask[:, None])[:, 0] * len(TOKENS) * probability[:, None]
        # A baseline leaves the expectation as it is.
        advantage = jnp.broadcast_to((reward - 0.3)[:, None], MASK.shape)

        def loss(logits, surrogate):
            tokens = Tokens(
                logp=token_logp(logits),
                proximal_logp=sequence_logp,
                advantage=advantage,
                mask=mask,
                segment=segment,
                fields=fields,
            )
            return (jax.lax.stop_gradient(weight) * token_loss(surrogate, [], tokens)[0]).sum()

        return {name: jax.grad(loss)(logits, surrogate) for name, surrogate in surrogates.items()}

    fields["behavior_logp"] = token_logp(logits)
    surrogates = {
        name: build_surrogate(name, OPTIONS.get(name))
        for name in registry.surrogates.keys() - NO_SCORE
    }
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        return every(logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(registry.surrogates.keys() - NO_SCORE))
def test_the_expected_gradient_is_that_of_the_expected_reward(table, slopes, name):
    expected = -SLOPE_AT_1.get(name, 1.0) * np.asarray(table[2])
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(slopes[name], expected, rtol=1e-9, atol=1e-12)
