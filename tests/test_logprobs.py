"""Token log-probs: exact, in chunks as in one piece, and never whole in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.logprobs import token_logprobs

BINS, LENGTH, WIDTH, VOCAB = 2, 23, 8, 50


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(BINS, LENGTH, WIDTH)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (BINS, LENGTH)), jnp.int32)
    return hidden, head, targets


def run(hidden, head, targets, **options):
    return token_logprobs(lambda x: x @ head, hidden, targets, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_equal_numpy_in_float64(case, temperature):
    hidden, head, targets = case
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / temperature
    prob = np.exp(logits - logits.max(-1, keepdims=True))
    prob /= prob.sum(-1, keepdims=True)
    want = np.log(np.take_along_axis(prob, np.asarray(targets)[..., None], -1)[..., 0])
    logp, entropy = run(*case, temperature=temperature, logits_per_chunk=4 * VOCAB)
    np.testing.assert_allclose(logp, want, atol=2e-5)
    np.testing.assert_allclose(entropy, -(prob * np.log(prob)).sum(-1), atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 4, 7, LENGTH])
def test_chunks_change_neither_values_nor_gradients(case, tokens):
    def objective(hidden, head, targets, limit):
        logp, entropy = run(hidden, head, targets, logits_per_chunk=limit)
        return (logp * jnp.arange(LENGTH, dtype=jnp.float32)[None]).sum() + entropy.sum()

    gradient = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)), static_argnums=3)
    whole = gradient(*case, 10**9)
    pieces = gradient(*case, tokens * VOCAB)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4)


def test_no_buffer_of_the_compiled_gradient_holds_all_logits():
    length, vocab = 512, 4096
    hidden = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    head = jax.ShapeDtypeStruct((16, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def objective(hidden, head, targets, limit):
        return run(hidden, head, targets, logits_per_chunk=limit)[0].sum()

    def temporary(limit):
        gradient = jax.jit(jax.grad(objective, argnums=(0, 1)), static_argnums=3)
        memory = gradient.lower(hidden, head, targets, limit).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    whole = length * vocab * 4
    assert temporary(10**9) >= whole
    assert temporary(16 * vocab) < whole / 4
