"""Advantages as chains of small pure transforms. Read recipes/ first."""

from jaxgrpo.advantages.absolute import sign
from jaxgrpo.advantages.base import AdvantageTransform, stateless, transform
from jaxgrpo.advantages.building import build, evaluate
from jaxgrpo.advantages.chains import chain, compute, spec_of, start
from jaxgrpo.advantages.filtered_model import alpha_dpg, f_dpg
from jaxgrpo.advantages.group import divide_by_group_std, subtract_group_mean
from jaxgrpo.advantages.masks import mask_truncated, mask_zero_variance
from jaxgrpo.advantages.reflection import answer_length, reasoning_reflection
from jaxgrpo.advantages.streams import per_reward, stream, sum_rewards
from jaxgrpo.advantages.tilting import beta_of_mu, kappa, mu_of_beta, target_validity
from jaxgrpo.advantages.tokens import to_tokens

__all__ = [
    "AdvantageTransform",
    "alpha_dpg",
    "answer_length",
    "beta_of_mu",
    "build",
    "chain",
    "compute",
    "divide_by_group_std",
    "evaluate",
    "f_dpg",
    "kappa",
    "mask_truncated",
    "mask_zero_variance",
    "mu_of_beta",
    "per_reward",
    "reasoning_reflection",
    "sign",
    "spec_of",
    "start",
    "stateless",
    "stream",
    "subtract_group_mean",
    "sum_rewards",
    "target_validity",
    "to_tokens",
    "transform",
]
