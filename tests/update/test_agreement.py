"""Sampler and trainer about the same tokens: how close they are, and what is said if they are not.

Everything goes the way of a run: sample, prepare, update.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from engines import draw_all, make_engine

from jaxgrpo import advantages, losses
from jaxgrpo.core.metrics import finalise
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.training.records import alarms
from jaxgrpo.update.forward import Blueprint
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import ROUNDING, build_steps, expected_rounding

KEY = np.zeros(2, np.uint32)
full = pytest.mark.full
MAX = "sampling/sampling_logp_difference/max"
MEAN = "sampling/sampling_logp_difference/mean"
REWARDS = np.array([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0]], np.float32)


def blueprint(config=tiny.UNIFORM, **sampling):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return Blueprint(
        model=decoder.build(config),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.sgd(0.0),
        geometry=Geometry(4, 4, 6, 24, 1, 200).for_models([decoder.build(config)]),
        sampling=SamplingSettings(24, 0.8, (tiny.END,), tiny.PAD, **sampling),
        mesh=mesh,
    )


@functools.cache
def sampled(config=tiny.UNIFORM, scale=15.0):
    """(steps, first learner, rollouts that its sampler drew)"""
    step_blueprint = blueprint(config)
    steps = build_steps(step_blueprint)
    params = tiny.params(config, scale=scale)
    learner = first_learner(step_blueprint, params, 8, ("reward",))
    prompts = tiny.prompts()
    engine = make_engine(step_blueprint.model, step_blueprint.sampling, prompts)
    rollouts = draw_all(engine, steps.sync(learner), prompts, KEY, 4)
    rollouts = dataclasses.replace(rollouts, rewards={"reward": REWARDS})
    return steps, learner, jax.tree.map(jnp.asarray, rollouts)


def updated(steps, learner, rollouts):
    """The metrics of one update; the learner is left as it is."""
    _, prepared = steps.prepare(learner, rollouts)
    donated = dataclasses.replace(learner, trainable=jax.tree.map(jnp.copy, learner.trainable))
    return finalise(steps.update(donated, prepared.batches)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [tiny.UNIFORM, *(pytest.param(c, marks=full) for c in (tiny.LOCAL_GLOBAL, tiny.HYBRID))],
    ids=["uniform", "local", "states"],
)
def test_sampler_and_trainer_agree_to_rounding(config):
    metrics = updated(*sampled(config))
    assert 0 < metrics[MAX] <= 1e-5
    assert metrics["sampling/disagreement"] == pytest.approx(metrics[MAX] / 1e-3)
    assert metrics["sampling/mean_disagreement"] == pytest.approx(metrics[MEAN] / 1e-4)
    assert metrics["sampling/mean_disagreement"] < 0.1


@pytest.mark.slow
def test_a_sampler_that_is_wrong_by_a_hundredth_raises_the_alarm():
    steps, learner, rollouts = sampled()
    honest = updated(steps, learner, rollouts)
    # One token of one sample.
    wrong = rollouts.behavior_logp.at[1, 2, 0].add(0.01)
    lying = updated(steps, learner, dataclasses.replace(rollouts, behavior_logp=wrong))
    assert lying[MAX] == pytest.approx(0.01, rel=1e-3)

    (text,) = warned(lying, "disagreement")
    assert text.startswith("at some token sampler and trainer disagree by 10 times what rounding")
    assert warned(honest, "disagreement") == []


def warned(metrics, name):
    lines = [{"step": step, **metrics} for step in (1, 2, 3)]
    return [alarm.text for alarm in alarms.replay(lines)[1] if alarm.name == name]


@pytest.mark.slow
def test_a_sampler_that_is_wrong_by_little_at_every_token_raises_an_alarm_of_its_own():
    """Below what is odd at one token of float32, and far below what is odd in bfloat16."""
    steps, learner, rollouts = sampled()
    wrong = dataclasses.replace(rollouts, behavior_logp=rollouts.behavior_logp + 5e-4)
    metrics = updated(steps, learner, wrong)
    assert metrics["sampling/disagreement"] < 1
    assert metrics["sampling/mean_disagreement"] == pytest.approx(5, rel=0.02)
    (text,) = warned(metrics, "mean disagreement")
    assert "5 times what rounding explains in the mean over tokens" in text
    assert warned(updated(steps, learner, rollouts), "mean disagreement") == []


@pytest.mark.slow
def test_the_drift_of_samples_of_an_older_policy_is_no_disagreement():
    steps, learner, rollouts = sampled()
    learner = dataclasses.replace(learner, step=jnp.int32(3))
    version = jnp.full((4, 4), 3).at[2].set(1)  # the third group was kept from step 1
    drifted = rollouts.behavior_logp.at[2].add(-0.5)
    rollouts = dataclasses.replace(rollouts, behavior_logp=drifted)
    counted = updated(steps, learner, rollouts)
    assert counted["sampling/disagreement"] == -np.inf  # at step 3 all versions are 0: none is new
    mixed = dataclasses.replace(rollouts, policy_version=version)
    metrics = updated(steps, learner, mixed)
    assert 0 < metrics[MAX] <= 1e-5
    assert metrics["sampling/sampling_logp_difference/mean"] <= 1e-5
    assert metrics["ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-4)
    new = dataclasses.replace(rollouts, policy_version=jnp.full((4, 4), 3))
    assert updated(steps, learner, new)[MAX] == pytest.approx(0.5, rel=1e-3)
    # What is not finite is no drift: the update is skipped, whoever sampled it.
    broken = dataclasses.replace(mixed, behavior_logp=drifted.at[2, 3, 0].set(jnp.nan))
    assert updated(steps, learner, broken)["skipped_updates/not_finite"] == 1


@full
def test_what_rounding_explains_in_bfloat16_holds_with_states():
    """Measured: 0.0074 nats in the mean and 0.038 at most, of limits of 0.1 and 1."""
    metrics = updated(*sampled(dataclasses.replace(tiny.HYBRID, dtype="bfloat16")))
    assert 0.01 < metrics["sampling/mean_disagreement"] < 0.3
    assert metrics["sampling/disagreement"] < 0.3


@full
def test_with_activations_in_float32_states_are_nearer_too():
    """Measured: 0.0036 nats in the mean."""
    narrow = dataclasses.replace(tiny.HYBRID, dtype="bfloat16")
    metrics = updated(*sampled(dataclasses.replace(narrow, float32_activations=True)))
    assert 0 < metrics[MEAN] < 0.6 * updated(*sampled(narrow))[MEAN]
    assert metrics["grad_norm"] == pytest.approx(
        updated(*sampled(tiny.HYBRID))["grad_norm"], rel=0.1
    )


@full
def test_a_state_that_is_not_a_number_skips_the_update_and_is_told_in_one_line():
    """One head of one layer that recurs forgets by NaN, so that its states become NaN."""
    steps, learner, _ = sampled(tiny.HYBRID)
    layer = learner.trainable["blocks"]["1"]["delta"]
    broken = {**layer, "bias": layer["bias"].at[0, 2].set(jnp.nan)}
    trainable = jax.tree.map(lambda leaf: leaf, learner.trainable)
    trainable["blocks"]["1"]["delta"] = broken
    learner = dataclasses.replace(learner, trainable=trainable)
    prompts, step_blueprint = tiny.prompts(), blueprint(tiny.HYBRID)
    engine = make_engine(step_blueprint.model, step_blueprint.sampling, prompts)
    rollouts = draw_all(engine, steps.sync(learner), prompts, KEY, 4)
    assert np.isnan(rollouts.behavior_logp[np.asarray(rollouts.token_mask)]).all()
    rollouts = dataclasses.replace(rollouts, rewards={"reward": REWARDS})
    metrics = updated(steps, learner, jax.tree.map(jnp.asarray, rollouts))
    assert metrics["skipped_updates/not_finite"] == 1
    (alarm,) = alarms.replay([{"step": 7, **metrics}])[1]
    assert (alarm.name, alarm.step) == ("not finite", 7)
    assert "\n" not in alarm.text


def explained(blueprint):
    config, sampling = blueprint.model.config, blueprint.sampling
    dtypes = config.dtype, cache_dtype(sampling.kv_cache_dtype, config)
    return expected_rounding(sampling.is_cut, dtypes, "cpu")


def test_what_rounding_explains_depends_on_the_precision_and_on_the_cut():
    narrow = dataclasses.replace(tiny.UNIFORM, dtype="bfloat16")
    assert explained(blueprint()) == ROUNDING["float32"]
    assert explained(blueprint(narrow)) == ROUNDING["bfloat16"]
    assert explained(blueprint(kv_cache_dtype="bfloat16")) == ROUNDING["bfloat16"]
    assert explained(blueprint(kv_cache_dtype="fp8")) == ROUNDING["8 bits"]
    assert explained(blueprint(top_k=3)) is None
    assert explained(blueprint(top_p=0.9)) is None
