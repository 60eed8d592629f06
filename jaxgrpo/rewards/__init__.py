"""Rewards: judgements of texts, on the host, in TRL's protocol."""

from jaxgrpo.rewards.calling import RewardLog, call_rewards
from jaxgrpo.rewards.confidence import stated_confidence
from jaxgrpo.rewards.forms import has_format, overlong_penalty
from jaxgrpo.rewards.gsm8k import gsm8k_answer
from jaxgrpo.rewards.mathematics import math_answer
from jaxgrpo.rewards.noise import flipped
from jaxgrpo.rewards.preview import Preview, preview
from jaxgrpo.rewards.protocol import RewardError, RewardFunction, TrainerState, bind, check, name_of
from jaxgrpo.rewards.registry import answers, build, rewards, with_lengths
from jaxgrpo.rewards.texts import text_of

__all__ = [
    "Preview",
    "RewardError",
    "RewardFunction",
    "RewardLog",
    "TrainerState",
    "answers",
    "bind",
    "build",
    "call_rewards",
    "check",
    "flipped",
    "gsm8k_answer",
    "has_format",
    "math_answer",
    "name_of",
    "overlong_penalty",
    "preview",
    "rewards",
    "stated_confidence",
    "text_of",
    "with_lengths",
]
