"""Small steps for tests: what computes them, rollouts that an engine draws, and an update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxgrpo import advantages, losses
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.types import Params, Prompts, Rollouts
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import Blueprint
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import Steps

CLIPPED = losses.Objective(losses.clip(), losses.token_mean())


def cpu_mesh(*sizes: int) -> Mesh:
    """A mesh of the first CPU devices, by the sizes of the first of its axes."""
    return sharding.make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])


def make_blueprint(
    config: ModelConfig,
    sizes: tuple[int, int, int, int],
    tokens: int,
    *,
    mesh: Sequence[int] = (),
    rate: float = 1.0,
    temperature: float = 1.0,
    geometry_options: Mapping[str, Any] = {},
    **changes: Any,
) -> Blueprint:
    """A blueprint of grpo by SGD, on clipped ratios.

    Args:
      sizes: prompts, samples of each, and the most tokens of a prompt and of a sample.
      tokens: of a micro-batch.
      mesh: as `cpu_mesh` takes it.
      geometry_options, changes: further fields of the geometry, other ones of the blueprint.
    """
    grid = cpu_mesh(*mesh)
    fields: dict[str, Any] = {
        "model": decoder.build(config, constrain=sharding.constrain(grid)),
        "chain": advantages.build("grpo"),
        "objective": CLIPPED,
        "optimizer": optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
        "geometry": Geometry(*sizes, sharding.num_bins(grid), tokens)._replace(**geometry_options),
        "sampling": SamplingSettings(sizes[-1], temperature, (tiny.END,), tiny.PAD),
        "mesh": grid,
    }
    return Blueprint(**{**fields, **changes})


def make_engine(
    model: Model, settings: SamplingSettings, prompts: Prompts, mesh: Mesh | None = None
) -> SlotEngine:
    """An engine for prompts as wide as these."""
    return SlotEngine(model, settings, mesh, width=prompts.prompt_tokens.shape[1])


def draw_all(
    engine: SlotEngine, params: Params, prompts: Prompts, key: ArrayLike, group: int, **options: Any
) -> Any:
    """Rollouts of host arrays, `group` samples of each prompt; options as of `draw`."""
    return draw(engine, params, prompts, key, group, **options).finish()


def take_step(steps: Steps, blueprint: Blueprint, params: Params, rollouts: Rollouts) -> Any:
    """(metrics, what each parameter moved by) of one update of parameters on rollouts."""
    learner = first_learner(blueprint, params, len(rollouts.row), ("reward",))
    before = jax.tree.map(np.asarray, learner.trainable)
    learner, prepared = steps.prepare(learner, jax.tree.map(jnp.asarray, rollouts))
    learner, metrics = steps.update(learner, prepared.batches)
    after = jax.tree.map(np.asarray, learner.trainable)
    return finalise({**prepared.metrics, **metrics}), jax.tree.map(np.subtract, before, after)


def sampler_gap(config: ModelConfig, steps: int = 24) -> np.ndarray:
    """|sampler's - trainer's log-prob| at the tokens of many samples of `tiny.cast_params`."""
    settings = SamplingSettings(steps, 1.0, (tiny.END,), tiny.PAD, steps)
    values, prompts = tiny.cast_params(config), tiny.prompts(16)
    key = jax.random.key_data(jax.random.key(3))
    rollouts = draw_all(make_engine(tiny.model(config), settings, prompts), values, prompts, key, 8)
    expected = tiny.whole_logps(config, values, rollouts)
    return np.abs(rollouts.behavior_logp - expected)[np.asarray(rollouts.token_mask)]
