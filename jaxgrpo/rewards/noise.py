"""Rewards that are wrong now and then, on purpose: how much noise a method bears."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from jaxgrpo.rewards.calling import RewardLog
from jaxgrpo.rewards.protocol import RewardError


def flipped(
    scores: Mapping[str, np.ndarray],
    log: RewardLog,
    noise: Mapping[str, float],
    seed: int,
    step: int,
    ordinal: np.ndarray,
) -> tuple[dict[str, np.ndarray], RewardLog]:
    """The scores with a share of the 0/1 rewards turned over, and their log, which tells of it.

        r -> 1 - r    where draw(seed, reward, step, ordinal, sample) < flip

    A draw depends on nothing else: two methods that are given the same prompts under one seed meet
    the same noise. What is unscored stays so. The log gets rewards/NAME/flipped, the share of the
    scored samples that were turned over.

    Args:
      scores: name -> [P, G], NaN = not scored.
      noise: name -> flip, the probability, for the rewards that have one.
      ordinal: [P], places in the prompt stream.

    Raises: RewardError where such a reward gives anything but 0 and 1.
    """
    turned, metrics = dict(scores), dict(log.metrics)
    for name, flip in noise.items():
        value = scores[name]
        scored = np.isfinite(value)
        odd = value[scored & (value != 0) & (value != 1)]
        if len(odd):
            raise RewardError(
                f"rewards.{name} gave {odd[0]:g}, and flip = {flip:g} turns over rewards that are "
                "0 or 1: take flip out, or a reward of 0 and 1"
            )
        chosen = scored & (_draws(seed, name, step, ordinal, value.shape[1]) < flip)
        turned[name] = np.where(chosen, 1 - value, value).astype(value.dtype)
        metrics[f"rewards/{name}/flipped"] = (float(chosen.sum()), max(1, int(scored.sum())))
    return turned, log._replace(metrics=metrics)


def _draws(seed: int, name: str, step: int, ordinal: np.ndarray, samples: int) -> np.ndarray:
    """Uniform numbers [P, G]; those of a prompt begin alike whatever the size of its group."""
    source = zlib.crc32(name.encode())
    of_prompt = ([seed, source, step, int(place)] for place in ordinal)
    return np.stack([np.random.default_rng(entropy).random(samples) for entropy in of_prompt])
