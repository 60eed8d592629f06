"""Several rewards, masks of groups, gates, length, weights of groups, and their recipes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxgrpo import advantages as adv
from jaxgrpo.core.types import Rollouts, Signal
from law_examples.basics import BINARY

BOTH = {"correct": 1.0, "style": 0.5}


def style_where_correct(streams: dict[str, Signal], rollouts: Rollouts) -> Signal:
    """A user's function; it unmasks everything, and divides by what may be 0."""
    correct, style = streams["correct"], streams["style"]
    return Signal(value=style.value / correct.value, mask=jnp.ones_like(correct.mask))


def parts() -> dict[str, list[tuple[Any, ...]]]:
    total, binary, centre = adv.sum_rewards(), adv.sum_rewards(**BINARY), adv.subtract_group_mean()
    return {
        "combine": [(adv.combine(style_where_correct),)],
        "dvao": [(adv.dvao(**BOTH),), (adv.dvao(eps=0.1, correct=_growing, style=0.0),)],
        "mask_low_variance": [
            (total, adv.mask_low_variance(drop=0.4)),
            (
                total,
                adv.mask_low_variance(
                    threshold=0.1, field="answer_logp", positions="answer_mask", reduce="mean"
                ),
            ),
            (
                total,
                adv.mask_low_variance(drop=0.3, field="token_entropy", positions="token_mask"),
            ),
        ],
        "mask_group_difficulty": [
            (binary, adv.mask_group_difficulty(0.3, 0.7)),
            (total, adv.mask_group_difficulty(reward="style", threshold=0.2)),
        ],
        "rubric_gate": [
            (total, adv.rubric_gate(minimum=0.5)),
            (total, adv.rubric_gate(mode="rollout")),
            (total, adv.rubric_gate(mode="floor", margin=0.5), centre),
        ],
        "overlong_penalty": [
            (total, adv.overlong_penalty(buffer=3)),
            (total, adv.overlong_penalty(buffer=2, limit=4, penalty=_growing)),
        ],
        "shrink_rare_success": [
            (binary, centre, adv.shrink_rare_success()),
            (total, adv.shrink_rare_success(3, reward="style", threshold=0.5)),
        ],
        "weight_by_absolute_advantage": [
            (total, centre, adv.weight_by_absolute_advantage(normalise=True))
        ],
        "weight_by_learnability": [
            (total, centre, adv.weight_by_learnability()),
            (total, adv.weight_by_learnability(reward="rubric", normalise=True)),
        ],
    }


def recipes() -> dict[str, list[Any]]:
    return {
        "gdpo": [adv.build("gdpo"), adv.build("gdpo", {"clip": 1.0, "ddof": 0, "weights": BOTH})],
        "dvao": [adv.build("dvao", {"weights": BOTH})],
        "rlcr": [adv.build("rlcr", {"weights": BOTH})],
        "dapo": [adv.build("dapo"), adv.build("dapo", {"buffer": 3, "weights": BINARY})],
        "scale_rl": [adv.build("scale_rl", {"weights": BINARY})],
    }


def _growing(step):
    """A schedule."""
    return 0.1 * step.astype(jnp.float32)
