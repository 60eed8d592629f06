"""Repetition, lengths of rare successes and drift, counted by hand and in Python; and which of
them are left out where no policy drew the samples."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import make_blueprint

from jaxgrpo import losses
from jaxgrpo.core.metrics import Mean, finalise
from jaxgrpo.core.scores import ANSWERED
from jaxgrpo.core.types import REPLAYED
from jaxgrpo.losses.surrogates import RATIO_METRICS
from jaxgrpo.update.diagnostics import (
    advantage_metrics,
    drift_metrics,
    rare_successes,
    repetition,
    rollout_metrics,
    surprise_metrics,
    symptom_metrics,
)
from jaxgrpo.update.packing import abstract_batch
from jaxgrpo.update.step import build_steps

NAN = np.nan
repetition_of = jax.jit(repetition, static_argnums=2)


def results(metrics):
    return finalise(jax.device_get(metrics))


def by_python(tokens, mask, n):
    """1 - distinct / all n-grams of a completion with a set; NaN without any."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1) if mask[i : i + n].all()]
    return 1 - len(set(grams)) / len(grams) if grams else NAN


@pytest.mark.parametrize("n", [1, 2, 4])
def test_repetition_is_what_a_set_of_n_grams_says(n):
    rng = np.random.default_rng(n)
    # Few different tokens, so that many n-grams come again; holes, so that some do not count.
    tokens = rng.integers(0, 3, (6, 5, 30))
    mask = (np.arange(30) < rng.integers(0, 31, (6, 5, 1))) & (rng.random((6, 5, 30)) < 0.97)
    repeated = repetition_of(jnp.asarray(tokens), jnp.asarray(mask), n)
    one_by_one = [
        [by_python(*pair, n) for pair in zip(row, live, strict=True)]
        for row, live in zip(tokens, mask, strict=True)
    ]
    np.testing.assert_allclose(repeated, one_by_one, atol=1e-6)


def test_a_loop_repeats_itself_and_a_count_does_not():
    tokens = jnp.array([[[7] * 12, list(range(12)), [1, 2, 3, 4] * 3]])
    repeated = repetition_of(tokens, jnp.ones((1, 3, 12), bool), 4)
    # Nine 4-grams: one distinct, nine, and the four turns of a cycle.
    np.testing.assert_allclose(repeated, [[8 / 9, 0, 5 / 9]], rtol=1e-6)


def test_completions_shorter_than_an_n_gram_say_nothing():
    tokens, mask = jnp.zeros((1, 2, 3), int), jnp.ones((1, 2, 3), bool)
    assert np.isnan(repetition_of(tokens, mask, 4)).all()
    metrics = results(symptom_metrics(tokens, mask, jnp.ones((1, 2), bool)))
    assert np.isnan(metrics["completions/repetition"])


REWARD = jnp.array(
    [
        [1.0, 0, 0, 0, 0, 0, 0, 0],
        [1.0, 1, 0, 0, 0, 0, 0, 0],
        [1.0, 1, 1, 0, 0, 0, 0, 0],
        [1.0, 0, 0, NAN, NAN, NAN, NAN, NAN],  # a third of what was scored
        [0.0, 0, 0, 0, 0, 0, 0, 0],
    ]
)


def test_successes_are_rare_where_at_most_a_quarter_of_the_group_succeeded():
    rare = np.asarray(jax.jit(rare_successes)({"reward": REWARD}))
    expected = np.zeros((5, 8), bool)
    expected[0, 0] = expected[1, 0] = expected[1, 1] = True
    np.testing.assert_array_equal(rare, expected)
    assert not rare_successes({"reward": jnp.eye(3)}).any()


@pytest.mark.slow
def test_rare_successes_own_their_share_of_the_advantage():
    advantage = jnp.where(jnp.isfinite(REWARD), jnp.where(REWARD > 0, 3.0, -1.0), 0)
    metrics = results(advantage_metrics(advantage, jnp.isfinite(REWARD), {"reward": REWARD}))
    successes, failures = 3 * (1 + 2 + 3 + 1), 7 + 6 + 5 + 2 + 8
    share = 3 * (1 + 2) / (successes + failures)
    assert metrics["advantage/rare_success_mass"] == pytest.approx(share)
    assert metrics["advantage/lucky_share"] < share


@pytest.mark.slow
def test_rare_successes_are_measured_against_the_median_of_their_group():
    length = np.array([[2, 8, 8, 12], [4, 4, 4, 4]])
    mask = jnp.arange(12) < length[..., None]
    # The rare one counts to two and so has no 4-gram; the other group's rare one repeats.
    tokens = jnp.where(jnp.arange(2)[:, None, None] == 0, jnp.arange(12), 5) + jnp.zeros((2, 4, 12))
    rare = jnp.array([[True, False, False, False], [False, True, False, False]])
    metrics = results(jax.jit(symptom_metrics)(tokens.astype(int), mask, rare))
    assert metrics["rare_success/relative_length"] == pytest.approx((2 / 8 + 4 / 4) / 2)
    assert metrics["rare_success/repetition"] == 0  # one 4-gram, once
    none = results(symptom_metrics(tokens.astype(int), mask, jnp.zeros((2, 4), bool)))
    assert np.isnan(none["rare_success/relative_length"])
    assert none["completions/repetition"] == 0


def test_drift_is_the_mean_over_completions_of_their_summed_log_ratio():
    logp = jnp.array([[[-1.0, -2.0, NAN], [-1.0, 5.0, 5.0], [9.0, 9.0, 9.0]]])
    base_logp = jnp.array([[[-1.5, -4.0, 3.0], [-0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    mask = jnp.array([[[True, True, False], [True, False, False], [False] * 3]])
    metrics = results(jax.jit(drift_metrics, static_argnums=3)(logp, base_logp, mask, "base"))
    assert metrics == {"kl_to_base_estimated": pytest.approx((0.5 + 2.0 - 0.5) / 2)}


def test_the_estimate_has_the_kl_of_two_policies_over_sequences_as_its_expectation():
    """Every sequence of two tokens under two tables, weighted by its probability."""
    rng = np.random.default_rng(5)
    tables = rng.dirichlet(np.ones(3), (2, 4))  # of policy and base: the first token's, and after
    total, kl = 0.0, 0.0
    for first in range(3):
        for second in range(3):
            p, q = ([t[0, first], t[1 + first, second]] for t in tables)
            kl += np.prod(p) * np.log(np.prod(p) / np.prod(q))
            pair = (jnp.log(jnp.array([[p]])), jnp.log(jnp.array([[q]])))
            metrics = results(drift_metrics(*pair, jnp.ones((1, 1, 2), bool), "base"))
            total += np.prod(p) * metrics["kl_to_base_estimated"]
    assert total == pytest.approx(kl, rel=1e-5)


def test_the_estimated_entropy_has_the_entropy_of_what_is_drawn_as_its_expectation():
    """Every completion of one or two tokens, 0 ending it, weighted by its probability."""
    rng = np.random.default_rng(6)
    tables = rng.dirichlet(np.ones(3), 3)  # of the first token, and after 1 and 2
    token_entropy = -(tables * np.log(tables)).sum(-1)
    total, entropy = 0.0, token_entropy[0] + tables[0, 1:] @ token_entropy[1:]
    for first in range(3):
        for second in range(3) if first else (0,):
            p = [tables[0, first], tables[first, second]] if first else [tables[0, 0]]
            logp = jnp.array([[np.log([*p, NAN])[:2]]])
            estimate = surprise_metrics(logp, jnp.array([[[True, first > 0]]]))["entropy_estimated"]
            assert isinstance(estimate, Mean)
            assert estimate.weight == len(p)
            total += np.prod(p) * float(estimate.total)
    assert total == pytest.approx(entropy, rel=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def rollout_results(temperature, rollouts):
    mask, rewards = rollouts.token_mask, rollouts.rewards
    live, advantage = mask.any(-1), jnp.where(mask, 1.0, 0.0)
    return rollout_metrics(None, rewards, temperature, rollouts, rollouts, live, advantage, mask)


@pytest.mark.slow
def test_entropy_and_drift_are_of_samples_that_were_drawn_for_the_step():
    reward = np.array([[1, 0, 1], [0, 1, 1]], np.float32)
    replayed = np.zeros(reward.shape, bool)
    replayed[1, 2] = True  # a right sample of an earlier step
    drawn = tiny.rollouts(reward)
    base_logp = 2 * drawn.behavior_logp
    rollouts = dataclasses.replace(drawn, fields={REPLAYED: replayed, "base_logp": base_logp})
    metrics = results(rollout_results(1.0, rollouts))
    logp, mask = np.asarray(drawn.behavior_logp), np.asarray(drawn.token_mask)
    fresh = logp[~replayed]
    assert metrics["entropy_estimated"] == pytest.approx(-fresh[mask[~replayed]].mean(), rel=1e-5)
    assert metrics["kl_to_base_estimated"] == pytest.approx(-fresh.sum(-1).mean(), rel=1e-5)
    names = {"entropy_estimated", "kl_to_base_estimated"}
    assert names - rollout_results(0.0, rollouts).keys() == {"entropy_estimated"}
    assert names - rollout_results(None, rollouts).keys() == names


def test_drift_is_not_of_known_answers_that_no_policy_drew():
    reward = np.array([[1, 0, 1], [0, 1, 1]], np.float32)
    drawn = tiny.rollouts(reward)
    answered = np.asarray(drawn.token_mask) & (np.arange(drawn.token_mask.shape[-1]) >= 2)
    assert answered.any()
    base_logp = 2 * drawn.behavior_logp
    rollouts = dataclasses.replace(drawn, fields={ANSWERED: answered, "base_logp": base_logp})
    metrics = results(rollout_results(1.0, rollouts))
    thoughts = np.where(answered, 0, np.asarray(drawn.behavior_logp)).sum(-1)
    assert metrics["kl_to_base_estimated"] == pytest.approx(-thoughts.mean(), rel=1e-5)


@pytest.mark.slow
def test_ratios_to_what_drew_texts_of_the_data_are_no_metrics():
    def metrics(**changes):
        objective = losses.Objective(losses.build_surrogate("reinforce"), losses.token_mean())
        blueprint = make_blueprint(
            tiny.UNIFORM, (4, 4, 6, 5), 100, **{"objective": objective, **changes}
        )
        batch = abstract_batch(blueprint.geometry, blueprint.objective.needs)
        state = jax.eval_shape(blueprint.optimizer.init, blueprint.model.shapes)
        update = build_steps(blueprint).update_program
        return jax.eval_shape(update, blueprint.model.shapes, state, {}, {}, batch)[-1].keys()

    drawn = metrics()
    assert drawn - metrics(trains_texts=True) == {*RATIO_METRICS}
    by_trainer = losses.Objective(losses.clip(), losses.token_mean(), proximal="trainer")
    assert {*RATIO_METRICS} <= metrics(trains_texts=True, objective=by_trainer)
