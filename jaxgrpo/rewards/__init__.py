"""Rewards: judgements of texts, on the host, in TRL's protocol."""

from jaxgrpo.rewards.protocol import RewardError, RewardFunction, bind, call_rewards, check
from jaxgrpo.rewards.registry import build, rewards

__all__ = ["RewardError", "RewardFunction", "bind", "build", "call_rewards", "check", "rewards"]
