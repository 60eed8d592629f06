"""Surrogates that hold back the tokens whose learning lowers the entropy most.

The entropy of a softmax policy falls in a step by the covariance of log-prob and advantage. Few
tokens make most of it: those that are likely and good, or unlikely and bad,

    c = (A - mean A) (logp - mean logp),    means over the unmasked tokens of the update

An update computes c at the parameters before it, from all its micro-batches, and chooses the tokens
from the whole of them: whatever the micro-batches, the same tokens. Of equal ones the first in the
update are chosen, so that the number is exact.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.ranking import top_count
from jaxgrpo.core.scores import TOKEN_DRAW
from jaxgrpo.losses.surrogates import (
    BatchField,
    Surrogate,
    Tokens,
    check_bounds,
    clip_where_it_gains,
    log_ratio,
    ratio_surrogate,
)

_CLIPPED, _PAYING = "clip_cov_tokens", "kl_cov_tokens"


def token_covariance(tokens: Tokens) -> Float[Array, "..."]:
    """c of every token, a constant; 0 where masked.

    >>> tokens = Tokens.from_ratios([math.e**2, 1.0], [3.0, 1.0])
    >>> print(token_covariance(tokens).round(4))  # (3 - 2) (2 - 1), (1 - 2) (0 - 1)
    [1. 1.]
    """
    advantage, logp = map(tokens.without_gradient, (tokens.advantage, tokens.logp))
    number = jnp.maximum(tokens.mask.sum(dtype=jnp.int32), 1).astype(logp.dtype)
    product = (advantage - advantage.sum() / number) * (logp - logp.sum() / number)
    return jnp.where(tokens.mask, product, 0)


def clip_cov(
    low: float = 0.2,
    high: float = 0.2,
    share: float = 2e-4,
    least: float = 1.0,
    most: float = 5.0,
) -> Surrogate:
    """PPO's clip, without some of the tokens of high covariance, chosen at random.

        loss = 0 at max(1, floor(share N)) tokens with least < c < most that are not clipped
               clip's loss at the others;   N unmasked tokens

    Without the tokens that lower the entropy most it falls more slowly.

    Args:
      low, high: as in `clip`.
      share: of the update's tokens that are left out, at most; at least one is, if any qualifies.
      least, most: between which c qualifies.

    Needs: clip_cov_tokens, which the update makes; token_draw, a number in [0, 1) per token: those
    with the highest are chosen.
    Metrics: as in `clip`; clip_ratio/covariance_mean, the share of tokens that are left out.
    Raises: InputError unless 0 < share <= 1 and least < most; on bounds as `clip`.
    Source: Cui et al. 2025, arXiv 2505.22617, section 4.2, with verl's numbers. verl chooses in
    each micro-batch.

    >>> tokens = Tokens.from_ratios([1.0, 2.0], [1.0, 1.0], clip_cov_tokens=jnp.array([1, 0]))
    >>> print(clip_cov(high=0.5).compute(tokens)[0].round(2))
    [ 0.  -1.5]
    """
    check_bounds("clip_cov", low, high)
    _check_share("clip_cov", share)
    if not least < most:
        raise InputError(f"clip_cov: least = {least}, most = {most}: give least < most; 1 and 5")

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        is_chosen = _find_chosen(tokens, _CLIPPED, "clip_cov")
        rho, metrics = clip_where_it_gains(jnp.exp(log_rho), weight, tokens.mask, low, high)
        metrics["clip_ratio/covariance_mean"] = mean(is_chosen, tokens.mask)
        return jnp.where(is_chosen, 0, -rho * weight), metrics

    choose = functools.partial(_choose_to_clip, (low, high), share, (least, most))
    part = ratio_surrogate("clip_cov", rule)
    needs, fields = frozenset({_CLIPPED, TOKEN_DRAW}), (BatchField(_CLIPPED, choose),)
    return part._replace(needs=needs, batch_fields=fields)


def kl_cov(coefficient: float = 1.0, share: float = 2e-4) -> Surrogate:
    """The ratio without a bound, and a price on the drift of the tokens of highest covariance.

        loss = -rho A + coefficient |logp - proximal_logp|   at the max(1, floor(share N)) tokens
                                                             of the highest c
               -rho A                                        at the others;   N unmasked tokens

    At ratio 1 the price has no gradient: it acts from the second update of a step's samples on.
    Elsewhere its slope is the coefficient, however near 1. So take `loss.proximal = "trainer"`, as
    the authors do: the sampler's log-probs differ by rounding at nearly every token.

    Args:
      coefficient: of the price, 0 or more.
      share: of the update's tokens that pay.

    Needs: kl_cov_tokens, which the update makes.
    Metrics: `ratio_metrics`; clip_ratio/covariance_mean, the share of tokens that pay.
    Raises: InputError unless coefficient >= 0 and 0 < share <= 1.
    Source: Cui et al. 2025, arXiv 2505.22617, section 4.3, with the numbers of verl's script (its
    default coefficient is 0.1; SkyRL: share 0.2). verl chooses in each micro-batch.

    >>> tokens = Tokens.from_ratios([0.5, 0.5], [1.0, 1.0], kl_cov_tokens=jnp.array([1, 0]))
    >>> print(kl_cov().compute(tokens)[0].round(2))  # -0.5 + log 2, -0.5
    [ 0.19 -0.5 ]
    """
    _check_share("kl_cov", share)
    if not 0 <= coefficient < math.inf:
        raise InputError(f"kl_cov: coefficient = {coefficient}, expected 0 or more; 1 is usual")

    def choose(tokens: Tokens, group: Array, count: int) -> Array:
        return _largest(token_covariance(tokens), tokens.mask, share, tokens.mask)

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        is_chosen = _find_chosen(tokens, _PAYING, "kl_cov")
        # Not the clamped log ratio: the price would have no slope where the policy went farthest.
        change = tokens.log_ratio_to(tokens.proximal_logp)
        # The slope of jnp.abs at 0 is 1.
        slope = coefficient * jax.lax.stop_gradient(jnp.sign(change))
        price = jnp.where(is_chosen, slope * change, 0)
        shares: Metrics = {"clip_ratio/covariance_mean": mean(is_chosen, tokens.mask)}
        return price - jnp.exp(log_rho) * weight, shares

    part = ratio_surrogate("kl_cov", rule)
    fields = (BatchField(_PAYING, choose),)
    return part._replace(needs=frozenset({_PAYING}), batch_fields=fields)


def _choose_to_clip(
    bounds: tuple[float, float],
    share: float,
    band: tuple[float, float],
    tokens: Tokens,
    group: Array,
    count: int,
) -> Array:
    """1 at tokens of a covariance within the band that are not clipped, drawn at random; else 0."""
    covariance, mask = token_covariance(tokens), tokens.mask
    rho, weight = jnp.exp(log_ratio(tokens)[0]), tokens.without_gradient(tokens.advantage)
    clipped_rho, _ = clip_where_it_gains(rho, weight, mask, *bounds)
    qualifies = mask & (clipped_rho == rho) & (covariance > band[0]) & (covariance < band[1])
    about = "a number in [0, 1) per token, by which it is chosen"
    draw = tokens.unmasked(tokens.field(TOKEN_DRAW, "clip_cov", about))
    return _largest(draw, qualifies, share, mask)


def _largest(value: Array, candidates: Array, share: float, mask: Array) -> Array:
    """1 at so many candidates as `share` of the unmasked tokens are, at least one; else 0."""
    number = mask.sum(dtype=jnp.int32)
    # A share such as 0.29 of 100 tokens is 29 of them, whatever the product rounds to.
    count = jnp.floor(share * (1 + 1e-6) * number.astype(jnp.float32)).astype(jnp.int32)
    axes = tuple(range(value.ndim))
    return top_count(value, candidates, jnp.maximum(count, 1), axes).astype(value.dtype)


def _find_chosen(tokens: Tokens, name: str, reader: str) -> Array:
    field = tokens.field(name, reader, "true at the tokens that the update chose from all of it")
    return tokens.mask & (tokens.unmasked(field) != 0)


def _check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise InputError(f"{name}: share = {share}, expected a share of the tokens above 0, to 1")
