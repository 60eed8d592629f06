"""Losses as reduction x surrogate, with penalties beside: `sum(weight * loss per token)`."""

from jaxgrpo.losses.entropy import adaptive_entropy, entropy_bonus
from jaxgrpo.losses.objective import policy_loss, token_loss
from jaxgrpo.losses.penalties import (
    Penalty,
    forward_kl_k3,
    full_kl,
    k2,
    reverse_kl_off_policy,
)
from jaxgrpo.losses.reductions import Reduction, constant, sequence_mean, token_mean
from jaxgrpo.losses.registry import (
    build_entropy,
    build_penalty,
    build_reduction,
    build_surrogate,
)
from jaxgrpo.losses.surrogates import Surrogate, clip, log_ratio

__all__ = [
    "Penalty",
    "Reduction",
    "Surrogate",
    "adaptive_entropy",
    "build_entropy",
    "build_penalty",
    "build_reduction",
    "build_surrogate",
    "clip",
    "constant",
    "entropy_bonus",
    "forward_kl_k3",
    "full_kl",
    "k2",
    "log_ratio",
    "policy_loss",
    "reverse_kl_off_policy",
    "sequence_mean",
    "token_loss",
    "token_mean",
]
