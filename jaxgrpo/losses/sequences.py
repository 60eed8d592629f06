"""Surrogates with one ratio per sequence, exact whatever else is packed into the same row.

A sequence is what bears one `segment` id within a row, the last axis; 0 is padding. Sums over
sequences need neither their order nor that their tokens stand together.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics
from jaxgrpo.losses.surrogates import (
    LOG_RATIO_LIMIT,
    Surrogate,
    bounded,
    check_bounds,
    cut_metrics,
    difference,
    fixed,
    hold,
    ratio_metrics,
    unmasked,
)


def segment_sum(
    value: Float[Array, "*rows Q"],
    mask: Bool[Array, "*rows Q"],
    segment: Int[Array, "*rows Q"],
) -> Float[Array, "*rows Q"]:
    """At each position the sum over the unmasked entries of its segment.

    Ids are 0 .. Q within each row. Work and memory grow with Q: sums by id, then looked up.
    Exact under any packing and sharding of rows; on GPUs the order of the additions, and with it
    the last bit, is fixed only under --xla_gpu_deterministic_ops, as for an embedding's gradient.
    """
    shape = value.shape
    ids = segment.reshape(-1, shape[-1])
    kept = jnp.where(mask, value, 0).reshape(ids.shape)

    def row(kept: Array, ids: Array) -> Array:
        return jnp.zeros(shape[-1] + 1, kept.dtype).at[ids].add(kept)[ids]

    return jax.vmap(row)(kept, ids).reshape(shape)


def segment_mean(
    value: Float[Array, "*rows Q"],
    mask: Bool[Array, "*rows Q"],
    segment: Int[Array, "*rows Q"],
) -> Float[Array, "*rows Q"]:
    """At each position the mean over the unmasked entries of its segment; 0 where there are none.

    As `segment_sum`.
    """
    number = segment_sum(jnp.ones_like(value), mask, segment)
    return segment_sum(value, mask, segment) / jnp.maximum(number, 1)


def gspo(low: float = 3e-4, high: float = 4e-4) -> Surrogate:
    """PPO's clip on one ratio per sequence, the geometric mean of its tokens' ratios.

        s_i = exp(mean_t (logp - proximal_logp))
        loss = -min(s_i A, clip(s_i, 1 - low, 1 + high) A), at every token

    A token's gradient is that of the mean over its sequence, so that with advantages that differ
    within a sequence it gets their mean; `gspo_token` gives each its own. The bounds are a
    thousandth of the usual ones since the ratio is a mean. `sequence_mean` makes it the paper's
    loss; with `sequence_sum` it is LUSPO (each sequence times its length).

    Args:
      low, high: how far the sequence's ratio may fall and rise.

    Metrics: `ratio_metrics` of s_i; clip_ratio/low_mean, high_mean, region_mean, shares of tokens.
    Raises: InputError unless 0 <= low <= 1 and high >= 0.
    Source: Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7; bounds of its section 5.1.
    """
    check_bounds("gspo", low, high)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        change = difference(logp, proximal_logp, mask)
        log_rho, clamped = hold(segment_mean(change, mask, segment), mask)
        weight = fixed(advantage, mask, logp)
        rho, metrics = bounded(jnp.exp(log_rho), weight, mask, low, high)
        return -rho * weight, ratio_metrics(log_rho, clamped, mask) | metrics

    return Surrogate("gspo", compute)


def gspo_token(low: float = 3e-4, high: float = 4e-4) -> Surrogate:
    """GSPO whose gradient goes to each token with its own advantage.

        s_it = stop_gradient(s_i) exp(logp - stop_gradient(logp))
        loss = -min(s_it A, clip(s_it, 1 - low, 1 + high) A)

    Values are those of `gspo`. Gradients are too, where advantage and weight are the same at all
    tokens of a sequence.

    Args:
      low, high: as for `gspo`.

    Metrics: as `gspo`.  Raises: InputError unless 0 <= low <= 1 and high >= 0.
    Source: Zheng et al. 2025, arXiv 2507.18071, equation 14. verl clamps log s_it at 10 from
    above, here +-20.
    """
    check_bounds("gspo_token", low, high)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        change = jax.lax.stop_gradient(difference(logp, proximal_logp, mask))
        log_rho, clamped = hold(segment_mean(change, mask, segment), mask)
        weight = fixed(advantage, mask, logp)
        # Clamped sequences are constant, as in the other surrogates.
        own = jnp.where(clamped, 0, difference(logp, logp, mask))
        rho, metrics = bounded(jnp.exp(log_rho + own), weight, mask, low, high)
        return -rho * weight, ratio_metrics(log_rho, clamped, mask) | metrics

    return Surrogate("gspo_token", compute)


def gmpo(low: float = 0.4, high: float = 0.4) -> Surrogate:
    """The geometric mean of ratios that were clipped one by one.

        u = logp - proximal_logp, at most high where A > 0, at least -low where A < 0
        loss = -exp(mean_t u) A, at every token

    Clipped tokens get no gradient; the others share their sequence's.

    Args:
      low, high: bounds of the log ratio, not of the ratio.

    Metrics: `ratio_metrics` of the sequence's ratio; clip_ratio/low_mean, high_mean and
    region_mean of its tokens'.  Raises: InputError unless both are finite and not negative.
    Source: Zhao et al. 2025, arXiv 2507.20673. Meant for `sequence_mean`.
    """
    if not (0 <= low < math.inf and 0 <= high < math.inf):
        raise InputError(f"gmpo: low = {low}, high = {high}; expected finite numbers >= 0")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        change = difference(logp, proximal_logp, mask)
        weight = fixed(advantage, mask, logp)
        above = mask & (weight > 0) & (change > high)
        below = mask & (weight < 0) & (change < -low)
        change = jnp.where(above, high, jnp.where(below, -low, change))
        log_rho, clamped = hold(segment_mean(change, mask, segment), mask)
        metrics = ratio_metrics(log_rho, clamped, mask) | cut_metrics(below, above, mask)
        return -jnp.exp(log_rho) * weight, metrics

    return Surrogate("gmpo", compute)


def vespo(
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Surrogate:
    """REINFORCE weighted by a smooth function of the whole sequence's ratio, a product.

        W_i = exp(clip(sum_t (logp - proximal_logp), log 1e-8, 20))
        loss = -stop_gradient(exp(lambda) W^k exp(-lambda W)) A logp

    The weight is 1 at W = 1 and falls on both sides of k / lambda.

    Args:
      k_positive, lambda_positive: where A >= 0.
      k_negative, lambda_negative: where A < 0.

    Metrics: `ratio_metrics` of W, clamped at its two bounds.
    Raises: InputError unless all are positive.
    Source: VESPO, arXiv 2602.10693; numbers and bounds as in TRL. Its token-wise clamp at +-20
    comes before the sum, as there.
    """
    options = (k_positive, lambda_positive, k_negative, lambda_negative)
    if not all(0 < option < math.inf for option in options):
        raise InputError(f"vespo: k and lambda = {options}, expected positive numbers")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        change = jax.lax.stop_gradient(difference(logp, proximal_logp, mask))
        held, token_clamped = hold(change, mask)
        total = segment_sum(held, mask, segment)
        floor = math.log(1e-8)
        log_rho = jnp.clip(total, floor, LOG_RATIO_LIMIT)
        clamped = token_clamped | (mask & (total != log_rho))
        weight = fixed(advantage, mask, logp)
        kind = weight.dtype
        k = jnp.where(weight >= 0, k_positive, k_negative).astype(kind)
        slope = jnp.where(weight >= 0, lambda_positive, lambda_negative).astype(kind)
        phi = jnp.exp(k * log_rho - slope * jnp.expm1(log_rho))
        metrics = ratio_metrics(log_rho, clamped, mask)
        return -phi * weight * unmasked(logp, mask, logp), metrics

    return Surrogate("vespo", compute)
