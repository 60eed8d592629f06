"""Policy losses per token, before masks and normalisers are applied by the reduction's weights.

A surrogate is `compute(logp, proximal_logp, advantage, mask, segment, fields) -> (loss, metrics)`,
all arrays of one shape, any rank. The loss is minimised and exactly 0 where masked; what masked
entries of the inputs hold, NaN too, reaches neither value nor gradient. Sequences are reached
through `segment` ids, never through an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.errors import InputError
from jaxgrpo.metrics import Metrics, accumulate_dtype, maximum, mean

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this before the exponential; see `log_ratio`."""


class Surrogate(NamedTuple):
    """What depends on the parameters being optimised."""

    name: str
    compute: Callable[..., tuple[Array, Metrics]]
    """(logp, proximal_logp, advantage, mask, segment, fields) -> (loss per token, metrics)"""
    needs: frozenset[str] = frozenset()  # fields that must be produced for it


def log_ratio(
    logp: Float[Array, "*shape"],
    proximal_logp: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> tuple[Array, Bool[Array, "*shape"]]:
    """(log ratio, where it was clamped), in at least float32; 0 where masked.

        clip(logp - proximal_logp, -20, 20)

    The clamp keeps the exponential finite: exp(20) is 4.9e8. Tokens beyond it have a constant
    ratio and hence no gradient, as if they were clipped; they are counted in the metric
    clip_ratio/log_ratio_clamped. Only `logp` carries gradient.
    """
    dtype = accumulate_dtype(logp.dtype)
    # Masked inputs are replaced before any arithmetic: NaN times a zero cotangent is NaN.
    current = jnp.where(mask, logp, 0).astype(dtype)
    proximal = jnp.where(mask, jax.lax.stop_gradient(proximal_logp), 0).astype(dtype)
    difference = current - proximal
    clamped = mask & (jnp.abs(difference) > LOG_RATIO_LIMIT)
    return jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), clamped


def clip(low: float = 0.2, high: float = 0.2) -> Surrogate:
    """PPO's clipped ratio, with two bounds.

        rho = exp(logp - proximal_logp)
        loss = -min(rho A, clip(rho, 1 - low, 1 + high) A)

    A token whose ratio left the bounds in the direction that its advantage wants gets no gradient;
    the others get exactly -rho A grad logp, at the bounds too.

    Args:
      low, high: how far the ratio may fall and rise; high = 0.28 is DAPO's clip-higher.

    Shapes: any, all alike.  Metrics, over unmasked tokens: clip_ratio/low_mean, high_mean,
    region_mean and log_ratio_clamped (shares), policy_kl (KL(proximal || current) by k3, which
    is unbiased for tokens sampled from the proximal policy), ratio_max.
    Raises: InputError unless 0 <= low <= 1 and high >= 0.
    Source: Schulman et al. 2017, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476.
    """
    if not (0 <= low <= 1 and high >= 0 and math.isfinite(high)):
        raise InputError(f"clip: low = {low}, high = {high}; expected 0 <= low <= 1 and high >= 0")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_rho, clamped = log_ratio(logp, proximal_logp, mask)
        weight = jnp.where(mask, jax.lax.stop_gradient(advantage), 0).astype(log_rho.dtype)
        rho = jnp.exp(log_rho)
        above = mask & (weight > 0) & (rho > 1 + high)
        below = mask & (weight < 0) & (rho < 1 - low)
        bounded = jnp.where(above, 1 + high, jnp.where(below, 1 - low, rho))
        metrics = ratio_metrics(log_rho, clamped, mask) | {
            "clip_ratio/low_mean": mean(below, mask),
            "clip_ratio/high_mean": mean(above, mask),
            "clip_ratio/region_mean": mean(above | below, mask),
        }
        return -bounded * weight, metrics

    return Surrogate("clip", compute)


def ratio_metrics(log_rho: Array, clamped: Array, mask: Array) -> Metrics:
    """How far the current policy is from the proximal one, over unmasked tokens."""
    log_rho = jax.lax.stop_gradient(log_rho)
    return {
        "policy_kl": mean(jnp.expm1(log_rho) - log_rho, mask),
        "ratio_max": maximum(jnp.exp(log_rho), mask),
        "clip_ratio/log_ratio_clamped": mean(clamped, mask),
    }
