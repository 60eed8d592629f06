"""What `sync` returns stays valid when the learner that it is of is donated to an update."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tiny
from quick import full_but

from jaxgrpo import advantages, losses
from jaxgrpo.core.types import Learner
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import LoraConfig
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import Blueprint, held_dtype, param_layout
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

ADAPTERS = {"lora": LoraConfig(rank=2, alpha=4.0)}
CASES = {
    "float32": ({}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {}),
    "a layer beside the pattern": (vars(tiny.LOCAL_GLOBAL), {}),
    "adapters": (ADAPTERS, {}),
    "adapters in bfloat16": ({**ADAPTERS, "dtype": "bfloat16"}, {}),
    "fsdp 2": ({}, {"fsdp": 2}),
    "sampled on tensor 2": ({}, {"fsdp": 2, "sampling_tensor": 2}),
}


def synced(changes: dict[str, Any], fsdp: int = 1, sampling_tensor: int = 0) -> tuple[Learner, Any]:
    """A learner, and its parameters as the sampler reads them."""
    mesh = sharding.make_mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    config = dataclasses.replace(tiny.UNIFORM, **changes)
    model = decoder.build(config, constrain=sharding.constrain(mesh))
    blueprint = Blueprint(
        model=model,
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.sgd(0.1),
        geometry=Geometry(4, 4, 6, 5, sharding.num_bins(mesh), 100),
        sampling=SamplingSettings(5, 1.0, (tiny.END,), tiny.PAD),
        mesh=mesh,
        sampling_mesh=sharding.sampling_mesh(mesh, sampling_tensor),
    )
    dtype = held_dtype(model)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), jax.jit(model.init)(jax.random.key(0)))
    params = jax.device_put(params, param_layout(blueprint.model, blueprint.mesh))
    learner = first_learner(blueprint, params, 8, ("reward",))
    return learner, build_steps(blueprint).sync(learner)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    full_but(("float32", "adapters", "fsdp 2"), CASES),
)
def test_parameters_outlive_their_learner(case):
    changes, axes = CASES[case]
    learner, params = synced(changes, **axes)
    before = jax.tree.map(np.array, params)
    spoil = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    spoiled = jax.block_until_ready(spoil(learner.trainable))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(learner.trainable))
    jax.tree.map(np.testing.assert_array_equal, before, params)
    del spoiled


def test_weights_under_adapters_are_not_copied():
    learner, params = synced(ADAPTERS)
    assert params["embed"]["table"] is learner.frozen["weights"]["embed"]["table"]
