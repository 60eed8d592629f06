"""Surrogates whose bounds are not those of PPO's clip: what lies beyond keeps a gradient, or the
bounds follow the probability of the token.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics
from jaxgrpo.losses.surrogates import (
    Surrogate,
    Tokens,
    check_bounds,
    clip_where_it_gains,
    cut_metrics,
    ratio_surrogate,
)

_LEAST = 1e-30
"""Probabilities below it count as this: the bounds of a token of probability 0 are those at 0."""


def ce_gppo(
    low: float = 0.2, high: float = 0.2, beta_low: float = 0.75, beta_high: float = 1.0
) -> Surrogate:
    """PPO's clip whose tokens beyond the bounds keep a gradient, as large as at the bound.

        s = beta_low (1 - low) / stop_gradient(rho)     where A < 0 and rho < 1 - low
            beta_high (1 + high) / stop_gradient(rho)   where A > 0 and rho > 1 + high
            1                                           elsewhere
        loss = -s rho A

    Beyond a bound the gradient is -beta (1 - low) A grad logp, or with 1 + high: it no longer grows
    or falls with the ratio. A larger beta_high lets unlikely tokens of good samples rise, which
    keeps entropy up; a larger beta_low pushes unlikely tokens of bad samples down, which lowers it.
    With both 0 it has the gradient of `clip`.

    Args:
      low, high: how far the ratio may fall and rise.
      beta_low, beta_high: shares of the gradient at the bound that tokens beyond it keep.

    Metrics: `ratio_metrics`; clip_ratio/low_mean, high_mean, region_mean: tokens beyond the bounds.
    Raises: InputError unless 0 <= low <= 1, high >= 0 and neither beta is negative.
    Source: CE-GPPO, Su et al. 2025, arXiv 2509.20712, with the betas of its 7B run; 0.5 and 1 for
    1.5B. The authors' code also cuts the loss where A < 0 and the ratio is above 3, as `dual_clip`.

    >>> tokens = Tokens.from_ratios([0.25, 4.0, 0.25, 4.0], [-1, 1, 1, -1])
    >>> print(ce_gppo(0.5, 0.5, 0.5).compute(tokens)[0].round(2))  # 0.5 x 0.5, 1.5, as they are
    [ 0.25 -1.5  -0.25  4.  ]
    """
    check_bounds("ce_gppo", low, high)
    for name, beta in (("beta_low", beta_low), ("beta_high", beta_high)):
        if not 0 <= beta < math.inf:
            raise InputError(f"ce_gppo: {name} = {beta}, expected a share of 0 or more; 1 is whole")

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        rho, mask = jnp.exp(log_rho), tokens.mask
        below = mask & (weight < 0) & (rho < 1 - low)
        above = mask & (weight > 0) & (rho > 1 + high)
        scale = jnp.where(below, beta_low * (1 - low), beta_high * (1 + high))
        scale = jnp.where(below | above, scale / jax.lax.stop_gradient(rho), 1)
        return -scale * rho * weight, cut_metrics(below, above, mask)

    return ratio_surrogate("ce_gppo", rule)


def dynamic_clip(low: float = 0.16, high: float = 0.2, cap: float = 10.0) -> Surrogate:
    """PPO's clip with bounds that widen where the proximal policy thought a token unlikely.

        floor   = 1/2 + 1/2 sqrt(max(1 - 4 low / q, 0)),   q = exp(proximal_logp)
        ceiling = min(1/2 + 1/2 sqrt(1 + 4 high / q), cap)
        loss = -min(rho A, clip(rho, floor, ceiling) A);  where A < 0: at most -cap A

    Inside them |rho - 1| times the token's probability rho q is at most low, or high. At q = 1 the
    ratio may rise by about `high`; a token of probability 0.01 may become 5 times as likely.

    Args:
      low, high: how far the ratio may fall and rise, times the token's probability.
      cap: the largest ratio that counts; above 1 + high.

    Metrics: as in `clip` with delta.
    Raises: InputError unless 0 <= low <= 1, high >= 0 and cap > 1 + high.
    Source: Dynamic Clipping Policy Optimization (DCPO), Yang et al. 2025, arXiv 2509.02333, with
    its numbers. Its advantages are the recipe `dcpo_smooth`; its loss is a sum over sequences of
    the mean over their tokens, `sequence_mean` times a constant.

    For q = 1, that of `from_ratios`, ratios from 3/4 to 3/2 count here:

    >>> wide = dynamic_clip(0.1875, 0.75)
    >>> print(wide.compute(Tokens.from_ratios([0.5, 9.0], [-1, 1]))[0].round(2))
    [ 0.75 -1.5 ]
    """
    check_bounds("dynamic_clip", low, high)
    if not 1 + high < cap < math.inf:
        raise InputError(
            f"dynamic_clip: cap = {cap}, expected a ratio above 1 + high = {1 + high}; 10 is usual"
        )

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        q = jnp.exp(tokens.without_gradient(tokens.proximal_logp))
        share = 1 / jnp.maximum(q, _LEAST)
        floor = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1 - 4 * low * share, 0))
        ceiling = jnp.minimum(0.5 + 0.5 * jnp.sqrt(1 + 4 * high * share), cap)
        rho, metrics = clip_where_it_gains(
            jnp.exp(log_rho), weight, tokens.mask, 1 - floor, ceiling - 1, cap
        )
        return -rho * weight, metrics

    return ratio_surrogate("dynamic_clip", rule)
