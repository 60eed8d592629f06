"""How the rewards of a recipe are weighed."""

from __future__ import annotations

from collections.abc import Mapping

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.streams import sum_rewards

Weights = Mapping[str, Scheduled]
"""Name of a reward = its weight; None counts every reward with weight 1."""


def weighted_sum(weights: Weights | None) -> AdvantageTransform:
    """`sum_rewards` of a recipe's `weights`."""
    return sum_rewards(**(weights or {}))
