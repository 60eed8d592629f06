"""Rollouts that an engine of slots draws, in one call."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxgrpo.core.types import Params, Prompts
from jaxgrpo.models.api import Model
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine


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
