"""Log-probs among a stored set of tokens: values and gradients against a masked softmax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.models.logprobs import Head, is_named, loss_of_tokens, token_logprobs

BINS, LENGTH, WIDTH, VOCAB, K = 2, 11, 6, 23, 5
TEMPERATURE = 0.7


def make():
    """Tokens drawn among 1 to K others each, but for a few that were drawn among all."""
    rng = np.random.default_rng(0)
    support = np.argsort(rng.random((BINS, LENGTH, VOCAB)), -1)[..., :K]
    size = rng.integers(1, K + 1, (BINS, LENGTH, 1))
    place = np.minimum(rng.integers(0, K, size.shape), size - 1)
    targets = np.take_along_axis(support, place, -1)[..., 0]
    support = np.where(np.arange(K) < size, support, -1)
    support[:, ::4] = -1
    return {
        "hidden": rng.normal(size=(BINS, LENGTH, WIDTH)),
        "head": rng.normal(size=(WIDTH, VOCAB)) * 2,
        "targets": targets.astype(np.int32),
        "support": support.astype(np.int32),
        "for_logp": rng.normal(size=(BINS, LENGTH)),
        "for_entropy": rng.normal(size=(BINS, LENGTH)),
    }


def members(support):
    """[D, N, V] bool, token by token."""
    support = np.asarray(support)
    is_in = np.zeros((*support.shape[:-1], VOCAB), bool)
    for place in np.ndindex(support.shape[:-1]):
        named = [token for token in support[place] if token >= 0]
        is_in[place][named or slice(None)] = True
    return is_in


def by_masked_softmax(floats, case):
    """The sum of weighted log-probs and entropies, and both, without chunks."""
    z = floats["hidden"] @ floats["head"] / TEMPERATURE
    log_p = jax.nn.log_softmax(jnp.where(members(case["support"]), z, -jnp.inf), -1)
    logp = jnp.take_along_axis(log_p, case["targets"][..., None], -1)[..., 0]
    full_log_p = jax.nn.log_softmax(z, -1)
    entropy = -(jnp.exp(full_log_p) * full_log_p).sum(-1)
    return (logp * case["for_logp"] + entropy * case["for_entropy"]).sum(), (logp, entropy)


def in_two_passes(floats, case, chunk):
    logp, entropy = token_logprobs(
        lambda hidden: hidden @ floats["head"],
        floats["hidden"],
        case["targets"],
        temperature=TEMPERATURE,
        entropy="gradient",
        logits_per_chunk=chunk * VOCAB,
        support=case["support"],
    )
    return (logp * case["for_logp"] + entropy * case["for_entropy"]).sum(), (logp, entropy)


def in_one_pass(floats, case, chunk):
    loss, logp, entropy, _ = loss_of_tokens(
        Head(floats["head"], lambda weights, hidden: hidden @ weights),
        floats["hidden"],
        case["targets"],
        lambda logp, entropy, args, _: logp * args[0] + entropy * args[1],
        (case["for_logp"], case["for_entropy"]),
        None,
        temperature=TEMPERATURE,
        entropy="gradient",
        logits_per_chunk=chunk * VOCAB,
        support=case["support"],
    )
    return loss, (logp, entropy)


@pytest.mark.full
@pytest.mark.parametrize("values", [in_two_passes, in_one_pass])
@pytest.mark.parametrize("chunk", [LENGTH, 4])
def test_values_and_gradients_equal_those_of_a_masked_softmax_in_float64(values, chunk):
    with jax.enable_x64(True):
        case = {name: jnp.asarray(value) for name, value in make().items()}
        floats = {name: case[name] for name in ("hidden", "head")}
        results = []
        for function in (by_masked_softmax, functools.partial(values, chunk=chunk)):
            run = jax.jit(jax.value_and_grad(functools.partial(function, case=case), has_aux=True))
            results.append(run(floats))
    expected, ours = results
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), ours, expected
    )


def test_values_equal_numpy_token_by_token():
    case = make()
    z = case["hidden"] @ case["head"] / TEMPERATURE
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(value) for name, value in case.items()}
        _, (logp, _) = jax.jit(functools.partial(in_two_passes, case=arrays, chunk=4))(arrays)
    for place in np.ndindex(BINS, LENGTH):
        named = [token for token in case["support"][place] if token >= 0] or [*range(VOCAB)]
        expected = z[place][case["targets"][place]] - np.log(np.exp(z[place][named]).sum())
        assert logp[place] == pytest.approx(expected, abs=1e-12)


def test_without_entries_a_support_is_the_vocabulary():
    ids = jnp.asarray([[3, 0, -1], [-1, -1, -1], [2, -1, -1]])
    expected = [[True, False, False, True], [True] * 4, [False, False, True, False]]
    np.testing.assert_array_equal(is_named(ids, 4), expected)


def test_the_gradient_of_a_single_token_is_zero():
    """Its probability is 1, whatever its logit."""
    case = make()
    case["support"] = np.where(np.arange(K) < 1, case["targets"][..., None], -1)
    case["for_entropy"] = np.zeros_like(case["for_entropy"])
    case = {name: jnp.asarray(value) for name, value in case.items()}
    floats = {name: case[name] for name in ("hidden", "head")}
    run = jax.value_and_grad(functools.partial(in_two_passes, case=case, chunk=4), has_aux=True)
    (_, (logp, _)), gradient = jax.jit(run)(floats)
    np.testing.assert_allclose(logp, 0, atol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, desired=0, atol=1e-6), gradient)
