"""Losses as reduction x surrogate, with penalties beside: `sum(weight * loss per token)`."""

from jaxgrpo.losses.entropy import adaptive_entropy, entropy_bonus
from jaxgrpo.losses.objective import policy_loss, token_loss
from jaxgrpo.losses.penalties import Penalty, forward_kl_k3, full_kl, k2, reverse_kl_off_policy
from jaxgrpo.losses.presets import like_trl
from jaxgrpo.losses.reductions import (
    Reduction,
    constant,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from jaxgrpo.losses.registry import (
    build_entropy,
    build_penalty,
    build_reduction,
    build_surrogate,
    by_sample,
)
from jaxgrpo.losses.sequences import gmpo, gspo, gspo_token, segment_mean, segment_sum, vespo
from jaxgrpo.losses.surrogates import (
    Surrogate,
    cispo,
    clip,
    dppo_tv,
    dual_clip,
    log_ratio,
    on_policy,
    reinforce,
    sapo,
    shaped_ratio,
)

__all__ = [
    "Penalty",
    "Reduction",
    "Surrogate",
    "adaptive_entropy",
    "build_entropy",
    "build_penalty",
    "build_reduction",
    "build_surrogate",
    "by_sample",
    "cispo",
    "clip",
    "constant",
    "dppo_tv",
    "dual_clip",
    "entropy_bonus",
    "forward_kl_k3",
    "full_kl",
    "gmpo",
    "gspo",
    "gspo_token",
    "k2",
    "like_trl",
    "log_ratio",
    "on_policy",
    "policy_loss",
    "prompt_mean",
    "reinforce",
    "reverse_kl_off_policy",
    "sapo",
    "segment_mean",
    "segment_sum",
    "sequence_mean",
    "sequence_sum",
    "shaped_ratio",
    "token_loss",
    "token_mean",
    "vespo",
]
