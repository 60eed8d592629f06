"""Several updates per step: minibatches and iterations against SGD written out by hand.

In float64, so that equal means equal up to the float32 of advantages and weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import CLIPPED, make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.metrics import finalise
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import packing
from jaxgrpo.update.forward import param_layout
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float64")]

MIXED = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
ONE_LIVE = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], np.float32)
WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
TEMPERATURE = 0.8
RATE = 0.3  # so large that the second iteration is beyond the bounds of the ratio

_programs: dict = {}


def built(minibatches=2, num_iterations=1, **changes):
    """The functions of a step; one update program for all that differ in iterations only."""
    blueprint = make_blueprint(
        WIDE,
        (4, 4, 6, 5),
        100,
        rate=RATE,
        temperature=TEMPERATURE,
        geometry_options={"minibatches": minibatches},
        num_iterations=num_iterations,
        **{"chain": advantages.build("dr_grpo"), **changes},
    )

    def share(name, make):
        key = (name, minibatches, blueprint.objective) if name == "update" else object()
        return _programs.setdefault(key, make())

    return blueprint, build_steps(blueprint, share)


@functools.cache
def on_policy(rewards="mixed"):
    """Rollouts whose behaviour log-probs are the trainer's, by one causal pass per sample."""
    rollouts = tiny.rollouts({"mixed": MIXED, "one": ONE_LIVE}[rewards])
    logp = tiny.whole_logps(WIDE, tiny.params(WIDE), rollouts, TEMPERATURE)
    return dataclasses.replace(rollouts, behavior_logp=logp)


def stepped(rewards="mixed", number=None, **options):
    """(prepared, parameters afterwards, metrics, steps) of one step, or its first updates."""
    blueprint, steps = built(**options)
    params = jax.device_put(tiny.params(WIDE), param_layout(blueprint.model, blueprint.mesh))
    learner = first_learner(blueprint, params, 8, ("reward",))
    learner, prepared = steps.prepare(learner, on_policy(rewards))
    after, metrics = steps.update(learner, prepared.batches[:number])
    assert int(after.step) == 1
    return prepared, jax.tree.map(np.asarray, after.trainable), metrics, steps


def dealt(rewards):
    """Which prompts the two minibatches have."""
    lengths = jax.tree.map(np.asarray, packing.measure_lengths(on_policy()))
    live = np.broadcast_to((np.ptp(rewards, axis=1) > 0)[:, None], rewards.shape)
    return packing.deal(lengths, live, Geometry(4, 4, 6, 5, 1, 100, 2))


def by_hand(rewards, updates):
    """Parameters after SGD on the clipped loss of some prompts at a time, and their ratios' ends.

    Ratios are measured from the log-probs before the first update; each loss is the mean over the
    tokens of its own prompts.
    """
    rollouts = on_policy()
    mask, centred = np.asarray(rollouts.token_mask), rewards - rewards.mean(1, keepdims=True)

    def loss(params, member):
        logp = tiny.whole_logps(WIDE, params, rollouts, TEMPERATURE)
        ratio = jnp.exp(logp - rollouts.behavior_logp)
        signal = jnp.asarray(centred, jnp.float64)[..., None]
        clipped = jnp.minimum(ratio * signal, jnp.clip(ratio, 0.8, 1.2) * signal)
        trained = mask & member[:, None, None]
        return jnp.where(trained, -clipped, 0).sum() / trained.sum()

    gradient, params = jax.jit(jax.grad(loss)), tiny.params(WIDE)
    for prompts in updates:
        step = gradient(params, jnp.asarray(np.isin(np.arange(4), prompts)))
        params = jax.tree.map(lambda leaf, down: leaf - RATE * down, params, step)
    return jax.tree.map(np.asarray, params)


def assert_same_step(after, want):
    before = jax.tree.map(np.asarray, tiny.params(WIDE))
    for old, new, expected in zip(*map(jax.tree.leaves, (before, after, want)), strict=True):
        assert np.linalg.norm(new - expected) <= 1e-5 * np.linalg.norm(expected - old)


@pytest.mark.full
def test_minibatches_are_updates_on_their_prompts_one_after_the_other():
    parts = dealt(MIXED)
    assert [sorted(part.tolist()) for part in parts] != [[0, 1], [2, 3]]  # dealt, not cut
    assert all({0, 3} & set(part.tolist()) for part in parts)  # each has one of the live prompts
    after = stepped()[1]
    assert_same_step(after, by_hand(MIXED, parts))


def test_iterations_train_again_on_the_same_minibatches_with_frozen_proximal_log_probs():
    prepared, after, metrics, _ = stepped(num_iterations=2)
    assert len(prepared.batches) == 4
    assert_same_step(after, by_hand(MIXED, [*dealt(MIXED)] * 2))
    first = finalise(stepped(num_iterations=2, number=1)[2])
    np.testing.assert_allclose(first["ratio_max"], 1, atol=1e-6)
    assert first["clip_ratio/region_mean"] == 0
    results = finalise(metrics)
    assert results["ratio_max"] > 1.2
    assert results["clip_ratio/region_mean"] > 0


def test_only_the_first_update_measures_how_well_sampler_and_trainer_agree():
    prepared, _, metrics, _ = stepped(num_iterations=2)
    difference: Any = metrics["sampling/sampling_logp_difference/mean"]
    assert float(difference.weight) == prepared.batches[0].mask.sum() > 0
    assert metrics["sampling/sampling_logp_difference/max"].result() < 1e-6


def test_a_minibatch_without_a_live_sample_moves_nothing_by_sgd():
    (live, _) = dealt(ONE_LIVE)
    assert 0 in live
    _, after, metrics, _ = stepped(rewards="one")
    assert finalise(metrics)["skipped_updates/no_live_sample"] == 0.5
    assert_same_step(after, by_hand(ONE_LIVE, [live]))


def test_all_updates_of_a_step_run_one_program_that_is_compiled_once():
    for rewards, num_iterations in (("mixed", 2), ("mixed", 1), ("one", 1)):
        *_, steps = stepped(rewards, num_iterations=num_iterations)
    assert steps.update_program._cache_size() == 1


def test_the_norm_of_the_weights_is_that_after_the_last_update_and_growth_the_largest():
    _, after, metrics, _ = stepped(num_iterations=2)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(after)))
    np.testing.assert_allclose(finalise(metrics)["weights/norm"], norm, rtol=1e-6)
    alone = finalise(stepped(num_iterations=2, number=1)[2])["weights/growth"]
    assert finalise(metrics)["weights/growth"] >= alone


def test_weights_are_normalised_over_the_prompts_of_an_update_empty_samples_too():
    _, steps = built(objective=CLIPPED._replace(reduction=losses.sequence_mean(count_empty=True)))
    mask = np.asarray(on_policy().token_mask).copy()
    mask[1, 2] = False  # a sample without a token: one of 8 sequences of its update, not of 16
    prompts = np.array([1, 3], np.int32)
    weight = np.asarray(steps.prepare.__self__.weigh(mask, mask, prompts))
    want = np.where(mask, 1 / (8 * np.maximum(mask.sum(-1, keepdims=True), 1)), 0)
    np.testing.assert_allclose(weight[prompts], want[prompts], rtol=1e-6)
    assert not weight[[0, 2]].any()


@pytest.mark.full
def test_what_chain_and_loss_need_is_scored_on_all_samples_of_all_minibatches():
    chain = advantages.build("dr_grpo")
    chain = chain._replace(needs=chain.needs | {"trainer_logp"})
    objective = CLIPPED._replace(penalties=(losses.k2(0.1),))
    blueprint, steps = built(chain=chain, objective=objective)
    rollouts = on_policy()
    learner = first_learner(blueprint, tiny.params(WIDE), 8, ("reward",))
    learner = dataclasses.replace(learner, frozen={"reference": tiny.params(WIDE, seed=3)})
    preparer = steps.prepare.__self__
    fields = preparer.with_fields(learner, rollouts, chain.needs)[0].fields
    np.testing.assert_allclose(fields["trainer_logp"], rollouts.behavior_logp, atol=1e-9)
    _, prepared = steps.prepare(learner, rollouts)
    reference_logp = tiny.whole_logps(WIDE, tiny.params(WIDE, seed=3), rollouts, TEMPERATURE)
    drift = np.asarray(rollouts.behavior_logp - reference_logp).sum(-1).mean()
    measured = prepared.metrics["kl_to_reference_estimated"].result()
    np.testing.assert_allclose(measured, drift, rtol=1e-5)
