"""Rewards: judgements of texts, on the host, in TRL's protocol."""

from jaxgrpo.rewards.builtin import (
    completion_text,
    gsm8k_answer,
    has_format,
    overlong_penalty,
    stated_confidence,
)
from jaxgrpo.rewards.calling import RewardLog, call_rewards, flipped
from jaxgrpo.rewards.mathematics import math_answer
from jaxgrpo.rewards.protocol import (
    Reward,
    RewardError,
    RewardFunction,
    Rewards,
    Scores,
    TrainerState,
    bind,
    callable_name,
    check,
)
from jaxgrpo.rewards.python import python_answer
from jaxgrpo.rewards.registry import (
    Preview,
    answers,
    build,
    check_rows,
    preview,
    rewards,
    with_lengths,
)

__all__ = [
    "Preview",
    "Reward",
    "RewardError",
    "RewardFunction",
    "RewardLog",
    "Rewards",
    "Scores",
    "TrainerState",
    "answers",
    "bind",
    "build",
    "call_rewards",
    "callable_name",
    "check",
    "check_rows",
    "completion_text",
    "flipped",
    "gsm8k_answer",
    "has_format",
    "math_answer",
    "overlong_penalty",
    "preview",
    "python_answer",
    "rewards",
    "stated_confidence",
    "with_lengths",
]
