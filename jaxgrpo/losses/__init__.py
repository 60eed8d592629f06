"""Losses as reduction x surrogate, with penalties beside: `sum(weight * loss per token)`."""

from jaxgrpo.losses.objective import policy_loss, token_loss
from jaxgrpo.losses.penalties import Penalty, forward_kl_k3, k2
from jaxgrpo.losses.reductions import Reduction, constant, sequence_mean, token_mean
from jaxgrpo.losses.registry import build_penalty, build_reduction, build_surrogate
from jaxgrpo.losses.surrogates import Surrogate, clip, log_ratio

__all__ = [
    "Penalty",
    "Reduction",
    "Surrogate",
    "build_penalty",
    "build_reduction",
    "build_surrogate",
    "clip",
    "constant",
    "forward_kl_k3",
    "k2",
    "log_ratio",
    "policy_loss",
    "sequence_mean",
    "token_loss",
    "token_mean",
]
