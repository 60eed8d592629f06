"""The KL of two policies over the vocabulary: exact, in chunks as in one piece, never whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.models.distributions import full_kl as exact_kl
from jaxgrpo.models.logprobs import TOKENS_PER_CHUNK


@pytest.fixture(autouse=True)
def wide(request):
    with jax.enable_x64("float32" not in request.node.name):
        yield


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.fixture
def heads():
    random = np.random.default_rng(4)
    hidden, anchor = (jnp.asarray(random.normal(size=(2, 7, 4))) for _ in range(2))
    return hidden, jnp.asarray(random.normal(size=(4, 11))), anchor, random.normal(size=(4, 11))


def kl_by_numpy(arrays, temperature):
    hidden, head, anchor, anchor_head = arrays
    p, q = (
        log_softmax(np.asarray(x) @ np.asarray(w) / temperature)
        for x, w in ((hidden, head), (anchor, anchor_head))
    )
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.parametrize("tokens", [7, 3, 1])
def test_the_pass_over_the_vocabulary_gives_the_kl_in_any_chunks(heads, tokens):
    hidden, head, anchor, anchor_head = heads

    def run(hidden, head):
        return exact_kl(
            lambda x: x @ head, hidden, lambda x: x @ anchor_head, anchor,
            temperature=0.7, logits_per_chunk=2 * 11 * tokens,
        )  # fmt: skip

    kl, clamped = jax.jit(run)(hidden, head)
    np.testing.assert_allclose(kl, kl_by_numpy(heads, 0.7), atol=1e-12)
    assert (np.asarray(clamped) == 0).all()
    weight = jnp.arange(1.0, 15).reshape(2, 7)
    gradients = jax.jit(jax.grad(lambda *x: (weight * run(*x)[0]).sum(), argnums=(0, 1)))
    for which, gradient in enumerate(gradients(hidden, head)):
        for place in [(0, 0, 0), (1, 4, 3), (1, 6, 1)] if which == 0 else [(0, 0), (3, 10)]:
            sides = []
            for sign in (1e-6, -1e-6):
                moved = [np.array(x) for x in heads]
                moved[which][place] += sign
                sides.append((np.asarray(weight) * kl_by_numpy(moved, 0.7)).sum())
            assert float(gradient[place]) == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)


def test_a_reference_without_probability_costs_20_nats_and_is_counted_in_float32():
    logits = jnp.asarray([[[0.0, 0.0, -jnp.inf]]], jnp.float32)
    for without in (-jnp.inf, -1e9):
        anchor = jnp.asarray([[[without, 0.0, without]]], jnp.float32)
        run = lambda x: exact_kl(lambda x: x, x, lambda x: x, anchor)  # noqa: B023, E731
        kl, clamped = run(logits)
        assert float(kl[0, 0]) == pytest.approx(0.5 * 20 + 0.5 * np.log(0.5))
        assert clamped[0, 0] == 0.5
        gradient = np.asarray(jax.grad(lambda x: run(x)[0].sum())(logits))[0, 0]  # noqa: B023
        assert np.isfinite(gradient).all()
        assert gradient[0] > 0 > gradient[1]  # down with what the reference does not know


def test_no_buffer_of_its_gradient_holds_all_logits_in_float32():
    length, vocab = 512, 4096
    hidden = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    head = jax.ShapeDtypeStruct((16, vocab), jnp.float32)

    def temporary(tokens):
        def loss(hidden, head, anchor, anchor_head):
            heads = (lambda x: x @ head), hidden, (lambda x: x @ anchor_head), anchor
            return exact_kl(*heads, logits_per_chunk=2 * tokens * vocab)[0].sum()

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        memory = gradient.lower(hidden, head, hidden, head).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    all_logits = length * vocab * 4
    assert temporary(length) >= all_logits
    assert temporary(8) < all_logits / 4


def test_a_large_vocabulary_is_not_taken_token_by_token():
    length, vocab = 300, 65536
    hidden = jax.ShapeDtypeStruct((1, length, 2), jnp.float64)
    head = jax.ShapeDtypeStruct((2, vocab), jnp.float64)
    run = lambda x, w, y, v: exact_kl(lambda x: x @ w, x, lambda y: y @ v, y)  # noqa: E731
    text = str(jax.make_jaxpr(run)(hidden, head, hidden, head))
    assert f"[1,{TOKENS_PER_CHUNK},{vocab}]" in text


def test_gradients_of_a_narrow_head_are_added_up_in_float32():
    length = 600
    random = np.random.default_rng(0)
    hidden, anchor = (
        jnp.asarray(1 + random.normal(size=(1, length, 4)), jnp.bfloat16) for _ in range(2)
    )
    head, other_head = (jnp.asarray(random.normal(size=(4, 7)), jnp.bfloat16) for _ in range(2))

    def gradient(tokens, dtype=jnp.bfloat16):
        wide = [array.astype(dtype) for array in (hidden, other_head, anchor)]

        def loss(head):
            heads = (lambda x: x @ head), wide[0], (lambda x: x @ wide[1]), wide[2]
            return exact_kl(*heads, logits_per_chunk=2 * 7 * tokens)[0].sum()

        return np.asarray(jax.jit(jax.grad(loss))(head.astype(dtype)), np.float64)

    # Not that of the whole in bfloat16: XLA of JAX 0.11 adds up such a product in bfloat16 on CPUs.
    unchunked = gradient(length, jnp.float32)
    # Each chunk's own gradient is rounded to 8 bits, with errors that cancel; the sum is not.
    np.testing.assert_allclose(gradient(1), unchunked, atol=0.01 * np.abs(unchunked).max())
