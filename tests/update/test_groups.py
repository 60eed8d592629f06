"""Updates whose loss sees groups: SGD on gvpo written out, however the batch is laid out.

In float64, so that equal means equal up to the float32 of advantages and weights. The loss by hand
is differentiated through the mean of a group too, which the update holds.
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
from engines import make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.metrics import finalise
from jaxgrpo.models import lora
from jaxgrpo.models.api import LoraConfig
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import packing
from jaxgrpo.update.forward import param_layout, params_of
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float64")]

REWARDS = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
TRUNCATED = np.zeros((4, 4), bool)
TRUNCATED[0, 1] = TRUNCATED[1, 2] = TRUNCATED[3, 1:] = True  # of the last group one is left
WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
ADAPTED = dataclasses.replace(WIDE, lora=LoraConfig(rank=2, alpha=4.0))
TEMPERATURE, RATE, BETA = 0.8, 0.1, 0.3
CHAIN = [{"use": "sum_rewards"}, {"use": "mask_truncated"}, {"use": "subtract_group_mean"}]
GVPO = losses.Objective(losses.gvpo(BETA), losses.sequence_sum())


@functools.cache
def rollouts():
    """Rollouts of a policy that is not quite the trainer's."""
    sampled = tiny.rollouts(REWARDS, truncated=TRUNCATED)
    logp = tiny.whole_logps(WIDE, tiny.params(WIDE), sampled, TEMPERATURE)
    noise = np.random.default_rng(5).normal(0, 0.5, logp.shape)
    return dataclasses.replace(
        sampled, behavior_logp=jnp.where(sampled.token_mask, logp + noise, 0)
    )


@functools.cache
def built(mesh=(1, 1, 1, 1), tokens=100, minibatches=1, num_iterations=1, **changes):
    blueprint = make_blueprint(
        changes.pop("config", WIDE),
        (4, 4, 6, 5),
        tokens,
        mesh=mesh,
        rate=RATE,
        temperature=TEMPERATURE,
        geometry_options={"minibatches": minibatches},
        num_iterations=num_iterations,
        **{"chain": advantages.build(CHAIN), "objective": GVPO, **changes},
    )
    return blueprint, build_steps(blueprint)


@functools.cache
def stepped(steps_before=0, **options):
    """(prepared, all parameters before and after the last of some steps, metrics)."""
    blueprint, steps = built(**options)
    values = tiny.params(options.get("config", WIDE))
    values = jax.device_put(values, param_layout(blueprint.model, blueprint.mesh))
    learner = first_learner(blueprint, values, 8, ("reward",))
    for _ in range(steps_before):
        learner, prepared = steps.prepare(learner, rollouts())
        learner, _ = steps.update(learner, prepared.batches)
    before = jax.tree.map(np.asarray, params_of(learner))
    learner, prepared = steps.prepare(learner, rollouts())
    learner, metrics = steps.update(learner, prepared.batches)
    after = jax.tree.map(np.asarray, params_of(learner))
    return prepared, before, after, finalise(metrics)


def loss_by_hand(config, params, member, proximal_logp):
    """The mean over sequences of their squared distance; `member` are an update's prompts."""
    sampled = rollouts()
    logp = tiny.whole_logps(config, params, sampled, TEMPERATURE)
    log_ratio = jnp.where(sampled.token_mask, logp - proximal_logp, 0).sum(-1)
    count = np.maximum((~TRUNCATED).sum(1, keepdims=True), 1)

    def centred(value):
        unmasked = jnp.where(TRUNCATED, 0, value)
        return jnp.where(TRUNCATED, 0, value - unmasked.sum(1, keepdims=True) / count)

    squares = (BETA * centred(log_ratio) - centred(jnp.asarray(REWARDS, jnp.float64))) ** 2
    counted = ~TRUNCATED & member[:, None]
    return jnp.where(counted, squares, 0).sum() / (2 * BETA) / counted.sum()


@functools.cache
def slope_by_hand(config):
    return jax.jit(jax.value_and_grad(functools.partial(loss_by_hand, config)))


def by_hand(config, params, updates=(range(4),), proximal_logp=None):
    """(parameters after SGD on the loss of some prompts at a time, the losses)."""
    values, old = [], rollouts().behavior_logp if proximal_logp is None else proximal_logp
    for prompts in updates:
        member = jnp.asarray(np.isin(np.arange(4), prompts))
        value, down = slope_by_hand(config)(params, member, old)
        params = jax.tree.map(lambda leaf, slope: leaf - RATE * slope, params, down)
        values.append(value)
    return jax.tree.map(np.asarray, params), values


def assert_same_step(before, after, want, tolerance=1e-6):
    for old, new, expected in zip(*map(jax.tree.leaves, (before, after, want)), strict=True):
        assert np.linalg.norm(new - expected) <= tolerance * np.linalg.norm(expected - old)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({"tokens": 10, "mesh": (2, 2, 1, 1)}, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ({"tokens": 25}, False),
                ({"tokens": 100}, False),
                ({"tokens": 100, "compact": False}, False),
                ({"tokens": 10}, True),
                ({"tokens": 12, "mesh": (1, 2, 2, 1)}, True),
            )
        ),
    ],
    ids=str,
)
def test_the_update_is_a_step_down_the_published_loss_however_groups_are_split(options, splits):
    prepared, before, after, metrics = stepped(**options)
    want, (value,) = by_hand(WIDE, tiny.params(WIDE))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    assert_same_step(before, after, want)
    batch = prepared.batches[0]
    assert (batch.num_live > 1) == (options["tokens"] < 100)
    pieces = [(np.asarray(batch.prompt) == prompt).sum() for prompt in range(4)]
    assert (max(pieces) > 1) == splits


@pytest.mark.full
def test_no_unmasked_sample_is_dead_though_its_advantage_is_0():
    prepared = stepped()[0]
    np.testing.assert_array_equal(prepared.live, ~TRUNCATED)
    assert not prepared.advantage[1:].any()  # flat groups, and a group of one sample
    _, steps = built()
    learner = first_learner(built()[0], tiny.params(WIDE), 8, ("reward",))
    flat = dataclasses.replace(rollouts(), rewards={"reward": jnp.ones((4, 4), jnp.float32)})
    learner, prepared = steps.prepare(learner, flat)
    learner, metrics = steps.update(learner, prepared.batches)
    assert finalise(metrics)["grad_norm"] > 0.1  # the KL's pull alone
    clipped = built(objective=losses.Objective(losses.clip(), losses.sequence_sum()))
    learner = first_learner(clipped[0], tiny.params(WIDE), 8, ("reward",))
    assert not clipped[1].prepare(learner, flat)[1].live.any()


@pytest.mark.full
def test_means_are_of_the_parameters_of_each_update_and_of_its_prompts():
    prepared, before, after, metrics = stepped(minibatches=2, num_iterations=2, tokens=10)
    lengths = jax.tree.map(np.asarray, packing.measure_lengths(rollouts()))
    parts = packing.deal(lengths, ~TRUNCATED, Geometry(4, 4, 6, 5, 1, 10, 2))
    assert len(prepared.batches) == 4
    want, values = by_hand(WIDE, tiny.params(WIDE), [*parts] * 2)
    np.testing.assert_allclose(metrics["loss"], np.mean(values), rtol=1e-6)
    assert_same_step(before, after, want, 1e-5)


@pytest.mark.full
def test_where_the_trainer_is_the_proximal_policy_means_are_0_in_the_first_update_alone():
    objective = GVPO._replace(proximal="trainer")
    _, before, after, metrics = stepped(objective=objective, tokens=10)
    np.testing.assert_allclose(metrics["ratio_max"], 1, rtol=1e-9)
    reinforce = losses.Objective(losses.reinforce(), losses.sequence_sum())
    assert_same_step(before, after, stepped(objective=reinforce)[2])
    trainer_logp = tiny.whole_logps(WIDE, before, rollouts(), TEMPERATURE)
    want, _ = by_hand(WIDE, before, [range(4)] * 2, trainer_logp)
    for tokens in (10, 100):
        _, _, after, metrics = stepped(objective=objective, num_iterations=2, tokens=tokens)
        assert metrics["ratio_max"] > 1.1
        assert_same_step(before, after, want)


@pytest.mark.full
def test_adapters_make_the_step_of_the_published_loss():
    options = {"config": ADAPTED, "steps_before": 1}  # before it B is 0, and A has no gradient
    for layout in ({"tokens": 10}, {"tokens": 10, "mesh": (2, 2, 1, 1)}):
        _, before, after, _ = stepped(**options, **layout)
        want, _ = by_hand(ADAPTED, before)
        start, end, expected = (lora.split(params)[0] for params in (before, after, want))
        assert len(jax.tree.leaves(start)) > 0
        assert_same_step(start, end, expected, 1e-5)


def draws():
    """What chooses tokens at random: a key folded by step and by each prompt's ordinal."""
    sampled = rollouts()
    key = jax.random.fold_in(jax.random.key(0), int(sampled.step))
    keys = [jax.random.fold_in(key, int(ordinal)) for ordinal in sampled.ordinal]
    return np.stack([jax.random.uniform(key, sampled.token_mask.shape[1:]) for key in keys])


def step_on_plain_arrays(config, params, surrogate):
    """Parameters after SGD on `policy_loss` of all samples, each a row."""
    sampled = rollouts()
    scored = jnp.where(TRUNCATED, np.nan, REWARDS).astype(jnp.float64)
    advantage, _ = advantages.evaluate("dr_grpo", scored)
    rows = lambda leaf: jnp.asarray(leaf).reshape(16, -1)  # noqa: E731
    mask = rows(sampled.token_mask & ~TRUNCATED[..., None])
    old, group = rows(sampled.behavior_logp), jnp.arange(16) // 4
    draw = "token_draw" in surrogate.needs
    fields: dict[str, Any] = {"token_draw": rows(draws())} if draw else {}

    def loss(params):
        logp = rows(tiny.whole_logps(config, params, sampled, TEMPERATURE))
        arrays = logp, old, advantage.reshape(-1), mask
        return losses.policy_loss(surrogate, "token_mean", *arrays, group=group, **fields)[0]

    down = jax.jit(jax.grad(loss))(params)
    return jax.tree.map(lambda leaf, slope: np.asarray(leaf - RATE * slope), params, down)


SEEING_THE_BATCH = {
    "rewards_as_labels": losses.rewards_as_labels(),
    "clip_cov": losses.clip_cov(share=0.1, least=-0.1, most=9.0),
    "kl_cov": losses.kl_cov(share=0.2),
}


ON_FOUR = {"tokens": 10, "mesh": (2, 2, 1, 1)}
ADAPTERS = {"tokens": 10, "config": ADAPTED, "steps_before": 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("rewards_as_labels", ON_FOUR, id="labels on four devices"),
        pytest.param("rewards_as_labels", ADAPTERS, id="labels by adapters"),
        pytest.param("clip_cov", ON_FOUR, id="clip on four devices"),
        pytest.param("clip_cov", {"tokens": 100}, id="clip in one micro-batch"),
        pytest.param(
            "kl_cov", {"tokens": 10, "mesh": (1, 2, 2, 1)}, id="kl on parts of a sequence"
        ),
        pytest.param("kl_cov", {"tokens": 25}, id="kl in micro-batches"),
        pytest.param("kl_cov", ADAPTERS, id="kl by adapters"),
    ],
)
def test_what_is_computed_of_the_whole_update_is_the_same_however_it_is_laid_out(name, layout):
    surrogate = SEEING_THE_BATCH[name]
    objective = losses.Objective(surrogate, losses.token_mean())
    prepared, before, after, metrics = stepped(objective=objective, **layout)
    np.testing.assert_array_equal(prepared.live, ~TRUNCATED)
    config = layout.get("config", WIDE)
    want = step_on_plain_arrays(config, before, surrogate)
    if config.lora is not None:
        before, after, want = (lora.split(params)[0] for params in (before, after, want))
    assert_same_step(before, after, want, 1e-5)
    if name != "rewards_as_labels":
        assert metrics["clip_ratio/covariance_mean"] > 0
