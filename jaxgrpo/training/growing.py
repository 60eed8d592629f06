"""What else makes the samples of a run: trees, and right samples of earlier steps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxgrpo.config.keys import ExperienceKeys, RolloutKeys, TreeKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.rollout import trees
from jaxgrpo.rollout.experience import REPLAYED
from jaxgrpo.rollout.trees import Trees

EXCLUDES = {
    "refill": "groups that are left over have no room for the fields of trees",
    "staleness": "samples that wait have no room for the fields of trees",
    "goals": "a branch would begin with the goal of another sample",
    "interrupt": "a branch may leave another sample within the text",
}
"""Keys of `rollout` that trees do not go with, and why."""


def make_trees(keys: TreeKeys, rollout: RolloutKeys, experience: ExperienceKeys) -> Trees | None:
    """How the samples of a run grow; None: each by itself.

    Raises: InputError where they would not be as many as a group has, and for keys that act on no
      tree or do not go with trees.
    """
    if keys.branch is None:
        default = vars(TreeKeys())
        if unread := [name for name, value in vars(keys).items() if value != default[name]]:
            raise InputError(
                f"tree.{unread[0]} = {getattr(keys, unread[0])}: nothing reads it without "
                'tree.branch; set that, as "uniform", or leave it out'
            )
        return None
    where = f'tree.branch = "{keys.branch}"'
    for name, reason in EXCLUDES.items():
        if getattr(rollout, name):
            raise InputError(f"{where}: with rollout.{name} {reason}; leave one of the two out")
    if "percentile" in (rollout.early_stop or {}):
        raise InputError(
            f"{where}: chains are the first samples of a prompt, so rollout.early_stop.percentile "
            "can choose none; set rollout.early_stop.confidence"
        )
    if experience.share:
        raise InputError(f"{where}: a sample of experience is no leaf; leave one of the two out")
    longest = rollout.max_completion_tokens
    grown = Trees(**vars(keys), group_size=rollout.group_size, longest=longest)
    trees.check(grown)
    return grown


def brought_fields(grown: Trees | None, rollout: RolloutKeys, share: float) -> dict[str, Any]:
    """Name -> shape of the fields that drawing and collecting add.

    Args:
      share: `experience.share`.
    """
    samples = rollout.prompts_per_step, rollout.group_size
    fields: dict[str, Any] = {}
    if share:
        fields[REPLAYED] = jax.ShapeDtypeStruct(samples, np.bool_)
    if grown is not None:
        fields[trees.TREE] = jax.ShapeDtypeStruct(samples, np.int32)
        fields[trees.ANCESTORS] = jax.ShapeDtypeStruct((*samples, grown.depths), np.int32)
        steps = rollout.max_completion_tokens
        fields[trees.DEPTH] = jax.ShapeDtypeStruct((*samples, steps), np.int32)
    return fields
