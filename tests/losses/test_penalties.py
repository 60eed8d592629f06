"""Uses of the KL divergence and of the entropy: which gradient each has, by enumeration.

A policy over 3 tokens has a distribution of its own at each of the 13 states before 3 tokens, so
that all 27 sequences, and every expectation, are at hand in float64.
"""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise
from jaxgrpo.losses import (
    Objective,
    Penalty,
    Tokens,
    adaptive_entropy,
    build_entropy,
    build_penalty,
    build_reduction,
    clip,
    entropy_bonus,
    full_kl,
    policy_loss,
    token_loss,
)

V, T = 3, 3
SEQUENCES = np.array(list(itertools.product(range(V), repeat=T)))
STATES = np.stack([np.zeros(27, int), 1 + SEQUENCES[:, 0], 4 + SEQUENCES[:, :2] @ [3, 1]], 1)
SAMPLED = ("k2", "forward_kl_k3", "reverse_kl_off_policy")


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Tabular:
    """A policy by its logits [13, 3], in plain NumPy."""

    def __init__(self, seed):
        self.logits = np.random.default_rng(seed).normal(size=(13, V))
        self.table = log_softmax(self.logits)
        self.logp = self.table[STATES, SEQUENCES]  # [27, T]
        self.probability = np.exp(self.logp.sum(1))  # [27]

    def visits(self):
        """Probability of each state, [13]."""
        return np.bincount(STATES.ravel(), np.repeat(self.probability, T), 13)


POLICY, REFERENCE, OLD = Tabular(0), Tabular(1), Tabular(2)


def score(weight):
    """sum_i weight[i] grad log policy(sequence i): [13, 3], by hand."""
    gradient = np.zeros((13, V))
    for i, t in np.ndindex(27, T):
        state = STATES[i, t]
        gradient[state] -= weight[i, t] * np.exp(POLICY.table[state])
        gradient[state, SEQUENCES[i, t]] += weight[i, t]
    return gradient


def kl_of_sequences(left, right):
    return (left.probability * (left.logp - right.logp).sum(1)).sum()


def reverse_gradient():
    """grad KL(policy || reference) of the sequences: the score times the log ratio."""
    ratio = (POLICY.logp - REFERENCE.logp).sum(1)
    return score(np.repeat((POLICY.probability * ratio)[:, None], T, 1))


def forward_gradient():
    """grad KL(reference || policy) of the sequences: minus the mean score under the reference."""
    return -score(np.repeat(REFERENCE.probability[:, None], T, 1))


def per_state(visits, forward=False):
    """sum_s visits(s) grad KL at s, the visits held: the gradient in logits, in closed form."""
    p, q = np.exp(POLICY.table), np.exp(REFERENCE.table)
    ratio = POLICY.table - REFERENCE.table
    mean = (p * ratio).sum(1, keepdims=True)
    return visits[:, None] * ((p - q) if forward else p * (ratio - mean))


PENALTIES = {
    **{(name, "token"): build_penalty(name, {"beta": 1.0}) for name in SAMPLED},
    **{(n, "sequence"): build_penalty(n, {"beta": 1.0, "level": "sequence"}) for n in SAMPLED},
    ("full_kl", "token"): full_kl(1.0),
    ("bonus", "token"): entropy_bonus(0.5),
}


@jax.jit
def expectations(logits, anchor, probability, old):
    """Each penalty -> (its expectation per sequence, the gradient), the samples being held."""

    def loss(logits, penalty):
        table = jax.nn.log_softmax(logits)
        logp = table[STATES, SEQUENCES]
        p = jnp.exp(table)
        fields = {
            "reference_logp": anchor[STATES, SEQUENCES],
            "full_kl": (p * (table - anchor)).sum(1)[STATES],
            "policy_entropy": -(p * table).sum(1)[STATES],
        }
        rows = jnp.ones(logp.shape, jnp.int32)
        tokens = Tokens(
            logp=logp,
            proximal_logp=old,
            advantage=0 * logp,
            mask=rows > 0,
            segment=rows,
            fields=fields,
        )
        value, _ = penalty.compute(tokens)
        return (probability * value.sum(1)).sum()

    return {key: jax.value_and_grad(loss)(logits, part) for key, part in PENALTIES.items()}


@functools.cache
def expected(sampler):
    inputs = (POLICY.logits, REFERENCE.table, sampler.probability, sampler.logp)
    return jax.tree.map(np.asarray, expectations(*map(jnp.asarray, inputs)))


def expectation(name, level="token", sampler=POLICY):
    """(value, gradient) under the sequences of a sampler."""
    value, gradient = expected(sampler)[name, level]
    return float(value), gradient


def cosine(left, right):
    return float((left * right).sum() / np.sqrt((left**2).sum() * (right**2).sum()))


@pytest.fixture(autouse=True)
def wide(request):
    with jax.enable_x64("float32" not in request.node.name):
        yield


def exactly(value):
    return pytest.approx(value, abs=1e-12)


def test_over_the_sequence_k2_has_the_gradient_of_the_reverse_kl_and_k3_that_of_the_forward_one():
    value, gradient = expectation("k2", "sequence")
    np.testing.assert_allclose(gradient, reverse_gradient(), atol=1e-12)
    assert abs(value - kl_of_sequences(POLICY, REFERENCE)) > 0.1  # its value estimates no KL
    value, gradient = expectation("forward_kl_k3", "sequence")
    np.testing.assert_allclose(gradient, forward_gradient(), atol=1e-12)
    assert value == exactly(kl_of_sequences(POLICY, REFERENCE))  # and yet the value is the reverse


def test_per_token_they_have_the_gradients_at_the_visited_states_and_miss_later_states():
    visits = POLICY.visits()
    _, gradient = expectation("k2")
    np.testing.assert_allclose(gradient, per_state(visits), atol=1e-12)
    assert 0.5 < cosine(gradient, reverse_gradient()) < 0.99
    value, gradient = expectation("forward_kl_k3")
    np.testing.assert_allclose(gradient, per_state(visits, forward=True), atol=1e-12)
    assert value == exactly(kl_of_sequences(POLICY, REFERENCE))  # chain rule
    assert cosine(gradient, reverse_gradient()) < 0.95
    assert cosine(gradient, forward_gradient()) < 0.95


@pytest.mark.parametrize("sampler", [OLD, POLICY], ids=["off_policy", "on_policy"])
def test_the_off_policy_form_has_value_and_gradient_of_the_reverse_kl(sampler):
    value, gradient = expectation("reverse_kl_off_policy", "sequence", sampler)
    np.testing.assert_allclose(gradient, reverse_gradient(), atol=1e-12)
    assert value == exactly(kl_of_sequences(POLICY, REFERENCE))
    _, gradient = expectation("reverse_kl_off_policy", "token", sampler)
    np.testing.assert_allclose(gradient, per_state(sampler.visits()), atol=1e-12)
    assert cosine(gradient, reverse_gradient()) < 0.99


def test_without_the_ratio_no_form_is_right_off_policy():
    for name, level in [("k2", "sequence"), ("full_kl", "token"), ("forward_kl_k3", "sequence")]:
        _, gradient = expectation(name, level, OLD)
        assert cosine(gradient, reverse_gradient()) < 0.99


def test_the_full_kl_is_that_of_each_visited_state_with_its_gradient():
    value, gradient = expectation("full_kl")
    assert value == exactly(kl_of_sequences(POLICY, REFERENCE))
    np.testing.assert_allclose(gradient, per_state(POLICY.visits()), atol=1e-12)


def test_the_bonus_raises_the_entropy_of_each_visited_state():
    value, gradient = expectation("bonus")
    entropy = -(POLICY.probability * POLICY.logp.sum(1)).sum()
    assert value == exactly(-0.5 * entropy)  # chain rule
    p, table = np.exp(POLICY.table), POLICY.table
    state_entropy = -(p * table).sum(1, keepdims=True)
    slope = -p * (table + state_entropy)  # of one state's entropy by its logits
    np.testing.assert_allclose(gradient, -0.5 * POLICY.visits()[:, None] * slope, atol=1e-12)


def test_k1_as_a_loss_has_no_gradient_and_off_policy_k1_has_that_of_k3():
    """Why neither is offered: rows of the table in docs/losses.md that are written out."""
    ratio = (POLICY.logp - REFERENCE.logp).sum(1)
    np.testing.assert_allclose(score(np.repeat(POLICY.probability[:, None], T, 1)), 0, atol=1e-12)
    weight = POLICY.probability  # of old, times the ratio to it
    rho_k1 = score(np.repeat((weight * (ratio + 1))[:, None], T, 1))
    np.testing.assert_allclose(rho_k1, reverse_gradient(), atol=1e-12)


@jax.jit
def summed(logp, proximal, reference, mask, segment):
    """Each penalty -> ((the sum over tokens, metrics), the gradient)."""

    def loss(logp, penalty):
        tokens = Tokens(
            logp=logp,
            proximal_logp=proximal,
            advantage=logp,
            mask=mask,
            segment=segment,
            fields={"reference_logp": reference},
        )
        value, metrics = penalty.compute(tokens)
        return value.sum(), metrics

    value_and_gradient = jax.value_and_grad(loss, has_aux=True)
    return {
        key: value_and_gradient(logp, part) for key, part in PENALTIES.items() if key[0] in SAMPLED
    }


def test_gradients_are_those_of_the_formulas_by_finite_differences():
    """Over the sequence too, where the gradient is written out: two sequences in one row."""
    random = np.random.default_rng(3)
    logp, proximal, reference = (0.3 * random.normal(size=(2, 7)) for _ in range(3))
    mask = np.array([[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]], bool)
    segment = np.array([[1, 1, 1, 2, 2, 2, 0], [2, 1, 1, 1, 1, 2, 2]])

    def formula(logp, name, level):
        total = 0.0
        for row, number in [(0, 1), (0, 2), (1, 1), (1, 2)]:
            at = mask[row] & (segment[row] == number)
            ratio, step = (logp - reference)[row][at], (logp - proximal)[row][at]
            if level == "sequence":
                ratio, step = ratio.sum(), step.sum()
            square, third = ratio**2 / 2, np.exp(-ratio) - 1 + ratio
            value = {"k2": square, "forward_kl_k3": third}.get(name, np.exp(step) * third)
            total += np.sum(value)
        return total

    arrays = map(jnp.asarray, (logp, proximal, reference, mask, segment))
    for key, ((value, _), gradient) in summed(*arrays).items():
        assert float(value) == exactly(formula(logp, *key))
        for place in np.ndindex(2, 7):
            nudge = np.zeros_like(logp)
            nudge[place] = 1e-6
            slope = (formula(logp + nudge, *key) - formula(logp - nudge, *key)) / 2e-6
            assert float(gradient[place]) == pytest.approx(slope, abs=1e-8)


EXTREME = {
    "logp": [-1.0, -1.0, -1.0, -101.0, -1.0, -np.inf, np.nan],
    "reference": [-np.inf, -1e9, -101.0, -1.0, -1.0, -np.inf, np.nan],
}


def test_extremes_are_finite_and_counted_in_float32():
    logp, reference = (jnp.asarray([EXTREME[key]], jnp.float32) for key in EXTREME)
    mask = jnp.arange(7)[None] < 6
    logps = (logp, jnp.zeros_like(logp), reference)
    some = summed(*logps, mask, mask.astype(jnp.int32))
    none = summed(*logps, mask & False, mask.astype(jnp.int32))
    for key, ((value, metrics), gradient) in some.items():
        assert np.isfinite(value), key
        assert np.isfinite(gradient).all(), key
        assert gradient[0, 6] == 0
        assert np.isfinite(metrics["kl"].result())
        if key[0] == "k2":
            slopes = [20.0, 20, 20, -20, 0, 0] if key[1] == "token" else [40.0] * 5 + [0]
            np.testing.assert_allclose(gradient[0, :6], slopes)
            assert metrics["kl_clamped"].result() == pytest.approx(4 / 6)
        (value, metrics), gradient = none[key]
        assert value == 0
        assert (np.asarray(gradient) == 0).all()
        assert metrics["kl"].weight == 0


def test_a_policy_that_is_its_reference_feels_no_pull():
    logp = jnp.asarray([[-1.0, -2.0, -0.5]])
    rows = jnp.ones((1, 3), jnp.int32)
    for (value, _), gradient in summed(logp, logp, logp, rows > 0, rows).values():
        assert value == 0
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.full
@pytest.mark.slow
def test_plain_arrays_are_given_their_penalties_with_their_fields():
    unit, mask = jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    arguments = ("clip", "token_mean", unit, unit, jnp.zeros(1), mask)
    penalties = [full_kl(0.5), entropy_bonus(0.25)]
    loss, metrics = policy_loss(*arguments, penalties=penalties, full_kl=unit, policy_entropy=unit)
    assert float(loss) == 0.25
    assert {"kl", "kl_clamped", "entropy"} <= metrics.keys()
    for penalty, missing in [(full_kl(1.0), "full_kl"), (entropy_bonus(1.0), "policy_entropy")]:
        with pytest.raises(InputError, match=rf"{penalty.name} reads fields\['{missing}'\]"):
            policy_loss(*arguments, penalties=[penalty])


@pytest.mark.slow
def test_each_penalty_reports_under_a_name_that_is_free():
    tokens = Tokens.from_ratios([np.exp(2.0)], reference_logp=0.0, full_kl=3.0)
    penalties = [build_penalty("k2", {"beta": 0.1}), full_kl(0.1), build_penalty("k2", {"beta": 2})]
    numbers = finalise(token_loss(clip(), [*penalties, penalties[0]], tokens)[1])
    estimate = pytest.approx(np.exp(-2) + 1)  # by k3 of a log ratio of 2
    assert [numbers[name] for name in ("kl", "k2/kl", "k2_2/kl")] == [estimate] * 3
    assert numbers["full_kl/kl"] == 3


@pytest.mark.slow
def test_a_penalty_with_memory_observes_its_metric_whatever_is_called_alike():
    noisy = Penalty("noisy", lambda tokens: (0 * tokens.logp, {"entropy": 9.0}))
    adaptive = adaptive_entropy(1.0, delta=0.25)
    objective = Objective(clip(), build_reduction("token_mean"), (noisy, adaptive))
    tokens = Tokens.from_ratios([1.0], policy_entropy=0.5)
    _, metrics = token_loss(clip(), objective.penalties, tokens, objective.init())
    state = objective.observe(objective.init(), metrics)["adaptive_entropy"]
    assert {name: float(value) for name, value in state.items()} == {
        "coefficient": 0.25,
        "entropy": 0.5,
    }


def refuses(message):
    return pytest.raises(InputError, match=re.escape(message))


def test_options_that_make_no_sense_are_refused():
    for name in SAMPLED:
        with refuses(f'{name}: level = \'tokens\', expected "token" or "sequence"'):
            build_penalty(name, {"beta": 0.1, "level": "tokens"})
    with refuses("full_kl: beta = -1, expected a number >= 0"):
        full_kl(-1)
    with refuses("entropy_bonus: coefficient = nan, expected a finite number"):
        entropy_bonus(np.nan)
    with refuses(
        "low = 0.0, coefficient = 2, high = 1.0; expected 0 <= low <= coefficient <= high"
    ):
        adaptive_entropy(1.0, 2)
    with refuses("adaptive_entropy: target = 0, expected a positive number"):
        adaptive_entropy(0)
    with refuses("adaptive_entropy: delta = -1, expected a positive number"):
        adaptive_entropy(1.0, delta=-1)
    with refuses("top_k_divergence: alpha = 0.0, k = 0; expected"):
        build_penalty("top_k_divergence", {"beta": 0.1, "k": 0})
    with refuses("unknown entropy 'bonuss': did you mean 'bonus'?"):
        build_entropy("bonuss")
