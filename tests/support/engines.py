"""Rollouts that an engine of slots draws, and a step on them, in one call each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.types import Params, Prompts, Rollouts
from jaxgrpo.models.api import Model
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import Blueprint
from jaxgrpo.update.step import Steps


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
