"""Updates without a live sample: what the optimizer does, against torch's AdamW."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch

from jaxgrpo import advantages, losses
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import Blueprint, param_layout
from jaxgrpo.update.optimizer import decay_mask, make_optimizer
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.usefixtures("float64")

MIXED = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
FLAT = np.ones((4, 4), np.float32)
REWARDS = (FLAT, MIXED, FLAT, FLAT, MIXED, FLAT)
WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
RATE, DECAY = 0.01, 0.3


def trained(
    schedule: str, on_no_live_sample: str = "step", **options: Any
) -> Iterator[tuple[Any, Any]]:
    """(parameters, optimizer's state, metrics) after each update, the first before any."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    model = decoder.build(WIDE, constrain=sharding.constrain(mesh))
    blueprint = Blueprint(
        model=model,
        chain=advantages.build("dr_grpo"),
        objective=losses.Objective(losses.build_surrogate("reinforce"), losses.constant(5)),
        optimizer=make_optimizer(
            model.axes,
            use="adamw",
            learning_rate=RATE,
            updates=len(REWARDS),
            schedule=schedule,
            options={"weight_decay": DECAY},
            **options,
        ),
        geometry=Geometry(4, 4, 6, 5, 1, 100, 1),
        sampling=SamplingSettings(5, 1.0, (tiny.END,), tiny.PAD),
        mesh=mesh,
        on_no_live_sample=on_no_live_sample,
    )
    steps = build_steps(blueprint)
    params = jax.device_put(tiny.params(WIDE), param_layout(blueprint.model, blueprint.mesh))
    learner = first_learner(blueprint, params, 8, ("reward",))
    yield jax.tree.map(np.asarray, (learner.trainable, learner.opt_state)), None
    for rewards in REWARDS:
        learner, prepared = steps.prepare(learner, tiny.rollouts(rewards))
        learner, metrics = steps.update(learner, prepared.batches)
        yield jax.tree.map(np.asarray, (learner.trainable, learner.opt_state)), metrics


def gradients():
    """parameters -> gradient of the mean over samples of - advantage log-prob, by autodiff."""
    advantage = MIXED - MIXED.mean(1, keepdims=True)
    rollouts = tiny.rollouts(MIXED)

    def loss(params):
        logp = tiny.whole_logps(WIDE, params, rollouts, 1.0)
        per_token = jnp.where(rollouts.token_mask, -logp * advantage[..., None], 0)
        return per_token.sum() / (5 * MIXED.size)

    return jax.jit(jax.grad(loss))


def cosine(at):
    """Of the rate, as transformers' schedule without warm-up."""
    return (1 + math.cos(math.pi * at / len(REWARDS))) / 2


@pytest.mark.full
def test_flat_and_mixed_updates_are_those_of_torch():
    leaves, tree = jax.tree.flatten(tiny.params(WIDE))
    decays = jax.tree.leaves(decay_mask(tiny.model(WIDE).axes))
    values = [torch.nn.Parameter(torch.tensor(np.asarray(leaf))) for leaf in leaves]
    groups = [
        {"params": [value], "weight_decay": DECAY * decay}
        for value, decay in zip(values, decays, strict=True)
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    rates = torch.optim.lr_scheduler.LambdaLR(adamw, cosine)
    gradient, updates = gradients(), list(trained("cosine"))[1:]
    for rewards, ((params, state), metrics) in zip(REWARDS, updates, strict=True):
        at = tree.unflatten([jnp.asarray(value.detach().numpy()) for value in values])
        scale = float(rewards is MIXED)
        for value, leaf in zip(values, jax.tree.leaves(gradient(at)), strict=True):
            value.grad = torch.tensor(scale * np.asarray(leaf))
        rate = adamw.param_groups[0]["lr"]
        adamw.step()
        rates.step()
        assert float(state.hyperparams["learning_rate"]) == pytest.approx(rate, rel=1e-6)
        assert metrics["skipped_updates/no_live_sample"].total == (rewards is FLAT)
        for leaf, value in zip(jax.tree.leaves(params), values, strict=True):
            # The rate is float32: 1e-7 of it, which each value moves by in an update.
            np.testing.assert_allclose(leaf, value.detach().numpy(), rtol=0, atol=1e-8)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "state_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)]
)
def test_a_skipped_update_keeps_parameters_and_moments_and_advances_the_schedule(state_dtype):
    states = list(trained("linear", "skip", state_dtype=state_dtype, clip_norm=1.0))
    for number, rewards in enumerate(REWARDS):
        ((before, old), _), ((after, new), _) = states[number : number + 2]
        moments = [
            [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1] for state in (old, new)
        ]
        for pair in ((before, after), moments):
            leaves = map(jax.tree.leaves, pair)
            same = all(np.array_equal(*old_and_new) for old_and_new in zip(*leaves, strict=True))
            assert same == (rewards is FLAT)
        (injected,) = [
            node
            for node in jax.tree.leaves(new, is_leaf=lambda node: hasattr(node, "hyperparams"))
            if hasattr(node, "hyperparams")
        ]
        rate = float(injected.hyperparams["learning_rate"])
        assert rate == pytest.approx(RATE * (1 - number / len(REWARDS)), rel=1e-6)
