"""Advantages as chains of small pure transforms. Read recipes/ first."""

from jaxgrpo.advantages.absolute import sign
from jaxgrpo.advantages.base import AdvantageTransform, stateless, transform
from jaxgrpo.advantages.building import build, evaluate
from jaxgrpo.advantages.chains import chain, compute, spec_of, start
from jaxgrpo.advantages.group import divide_by_group_std, subtract_group_mean
from jaxgrpo.advantages.masks import mask_truncated, mask_zero_variance
from jaxgrpo.advantages.running import divide_by_running_scale, ema_baseline
from jaxgrpo.advantages.streams import per_reward, stream, sum_rewards
from jaxgrpo.advantages.tokens import to_tokens
from jaxgrpo.advantages.tracked import mask_difficulty_band, subtract_tracked_success

__all__ = [
    "AdvantageTransform",
    "build",
    "chain",
    "compute",
    "divide_by_group_std",
    "divide_by_running_scale",
    "ema_baseline",
    "evaluate",
    "mask_difficulty_band",
    "mask_truncated",
    "mask_zero_variance",
    "per_reward",
    "sign",
    "spec_of",
    "start",
    "stateless",
    "stream",
    "subtract_group_mean",
    "subtract_tracked_success",
    "sum_rewards",
    "to_tokens",
    "transform",
]
