"""Losses as reduction x surrogate plus penalties: `sum(weight * loss per token)`."""
# ruff: noqa: F401

from jaxgrpo.losses.objective import Objective, policy_loss, token_loss
from jaxgrpo.losses.penalties import (
    Penalty,
    adaptive_entropy,
    entropy_bonus,
    forward_kl_k3,
    full_kl,
    k2,
    reverse_kl_off_policy,
)
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
    like_trl,
)
from jaxgrpo.losses.sequences import gmpo, gspo, gspo_token, segment_mean, segment_sum, vespo
from jaxgrpo.losses.surrogates import (
    Surrogate,
    Tokens,
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

__all__ = sorted(name for name, value in globals().items() if callable(value) and name[0] != "_")  # pyright: ignore[reportUnsupportedDunderAll]
