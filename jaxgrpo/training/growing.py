"""What else makes the samples of a run: trees, and right samples of earlier steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxgrpo.config.keys import ExperienceKeys, RolloutKeys, TreeKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import routing
from jaxgrpo.rollout import dialogue, trees
from jaxgrpo.rollout.drift import DRIFT
from jaxgrpo.rollout.experience import REPLAYED
from jaxgrpo.rollout.prefixes import PREFIX
from jaxgrpo.rollout.trees import Trees

EXCLUDES = {
    "tree.branch": {
        "refill": "groups that are left over have no room for the fields of trees",
        "staleness": "samples that wait have no room for the fields of trees",
        "goals": "a branch would begin with the goal of another sample",
        "interrupt": "a branch may leave another sample within the text",
    },
    "experience.share": {
        "refill": "a group is judged by what replaces it",
        "staleness": "what is right now is known too late",
        "goals": "a kept sample would begin with another text",
        "prefixes": "a kept sample would follow another prompt",
        "early_stop": "a sample that was stopped is none of the policy's",
    },
    "replay": {
        "refill": "no flat group can be replaced",
        "staleness": "each step trains on its own file",
        "goals": "samples begin as they were drawn",
        "interrupt": "no sample is interrupted",
        "prefixes": "prompts begin as they were sampled",
    },
}
"""What else makes samples -> keys of `rollout` that do not go with it, and why."""


def refuse_excluded(
    name: str, rollout: RolloutKeys, remedy: str = "leave one of the two out"
) -> None:
    """Raises: InputError for a key of `rollout` that does not go with a name of EXCLUDES."""
    for key, reason in EXCLUDES[name].items():
        if getattr(rollout, key):
            raise InputError(f"{name}: with rollout.{key} {reason}; {remedy}")


def refuse_unread(keys: TreeKeys | ExperienceKeys, switch: str, example: str) -> None:
    """Raises: InputError for a key of a table that acts on nothing without another, `switch`."""
    defaults = vars(type(keys)())
    for name, value in vars(keys).items():
        if value != defaults[name]:
            raise InputError(
                f"{switch.partition('.')[0]}.{name} = {value!r}: nothing reads it without "
                f"{switch}; set that, as {example}, or leave it out"
            )


def make_trees(keys: TreeKeys, rollout: RolloutKeys, experience: ExperienceKeys) -> Trees | None:
    """How the samples of a run grow; None: each by itself.

    Raises: InputError where they would not be as many as a group has, and for keys that act on no
      tree or do not go with trees.
    """
    if keys.branch is None:
        return refuse_unread(keys, "tree.branch", '"uniform"')
    refuse_excluded("tree.branch", rollout)
    if "percentile" in (rollout.early_stop or {}):
        raise InputError(
            "tree.branch: chains are the first samples of a prompt, so that "
            "rollout.early_stop.percentile can choose none; set rollout.early_stop.confidence"
        )
    if experience.share:
        raise InputError("tree.branch: a sample of experience is no leaf; leave one of the two out")
    longest = rollout.max_completion_tokens
    grown = Trees(**vars(keys), group_size=rollout.group_size, longest=longest)
    trees.check(grown)
    return grown


def brought_fields(
    grown: Trees | None,
    rollout: RolloutKeys,
    share: float,
    has_turns: bool,
    needs: Collection[str] = (),
    forks: bool = False,
    recorded: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Name -> shape of the fields that drawing and collecting add.

    Args:
      share: `experience.share`.
      has_turns: whether samples are answered.
      needs: what the method reads that is no column of the data.
      forks: whether conversations may be rewritten.
      recorded: `models.routing.recorded` of the model.
    """
    samples = rollout.prompts_per_step, rollout.group_size
    fields: dict[str, Any] = {}
    if recorded is not None:
        tokens = (*samples, rollout.max_completion_tokens, *recorded)
        fields[routing.EXPERTS] = jax.ShapeDtypeStruct(tokens, routing.DTYPE)
    if share:
        fields[REPLAYED] = jax.ShapeDtypeStruct(samples, np.bool_)
    if DRIFT in needs:
        fields[DRIFT] = jax.ShapeDtypeStruct(samples[:1], np.float32)
    if rollout.prefixes is not None:
        fields[PREFIX] = jax.ShapeDtypeStruct(samples[:1], np.int32)
    if has_turns:
        turns = (*samples, rollout.max_turns)
        tokens = (*samples, rollout.max_completion_tokens)
        fields[dialogue.TURN] = jax.ShapeDtypeStruct(tokens, np.int32)
        fields[dialogue.VERSION] = jax.ShapeDtypeStruct(tokens, np.int32)
        fields[dialogue.REWARD] = jax.ShapeDtypeStruct(turns, np.float32)
        fields[dialogue.STATE] = jax.ShapeDtypeStruct(turns, np.int32)
        if forks:
            fields[dialogue.FORK] = jax.ShapeDtypeStruct(tokens, np.int32)
        fields[dialogue.CUT] = jax.ShapeDtypeStruct(turns, np.bool_)
    if grown is not None:
        fields[trees.TREE] = jax.ShapeDtypeStruct(samples, np.int32)
        fields[trees.ANCESTORS] = jax.ShapeDtypeStruct((*samples, grown.depths), np.int32)
        steps = rollout.max_completion_tokens
        fields[trees.DEPTH] = jax.ShapeDtypeStruct((*samples, steps), np.int32)
    return fields
