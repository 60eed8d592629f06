"""Rewards: judgements of texts, on the host, in TRL's protocol."""
# ruff: noqa: F401

from jaxgrpo.rewards.builtin import (
    gsm8k_answer,
    has_format,
    overlong_penalty,
    stated_confidence,
    text_of,
)
from jaxgrpo.rewards.calling import RewardLog, call_rewards, flipped
from jaxgrpo.rewards.mathematics import math_answer
from jaxgrpo.rewards.protocol import RewardError, RewardFunction, TrainerState, bind, check, name_of
from jaxgrpo.rewards.registry import Preview, answers, build, preview, rewards, with_lengths

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, value in globals().items()
    if name[0] != "_" and (callable(value) or isinstance(value, dict))
)
