"""Policy losses per token, before masks and normalisers are applied by the reduction's weights.

A surrogate is `compute(logp, proximal_logp, advantage, mask, segment, fields) -> (loss, metrics)`,
all arrays of one shape, any rank. The loss is minimised and exactly 0 where masked; what masked
entries of the inputs hold, NaN too, reaches neither value nor gradient. Sequences are reached
through `segment` ids, never through an axis (`jaxgrpo.losses.sequences`).

Of the inputs only `logp` carries gradient. Metrics are shares of unmasked tokens, under the same
names everywhere: see `ratio_metrics` and `cut_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, Metrics, accumulate_dtype, maximum, mean

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this before the exponential; see `log_ratio`."""


class Surrogate(NamedTuple):
    """What depends on the parameters being optimised."""

    name: str
    compute: Callable[..., tuple[Array, Metrics]]
    """(logp, proximal_logp, advantage, mask, segment, fields) -> (loss per token, metrics)"""
    needs: frozenset[str] = frozenset()  # fields that must be produced for it
    weighs: bool = True  # the gradient, by the ratio of the policy to the proximal one


def log_ratio(
    logp: Float[Array, "*shape"],
    proximal_logp: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> tuple[Array, Bool[Array, "*shape"]]:
    """(log ratio, where it was clamped), in at least float32; 0 where masked.

        clip(logp - proximal_logp, -20, 20)

    The clamp keeps the exponential finite: exp(20) is 4.9e8. Tokens beyond it have a constant
    ratio and hence no gradient through it, as if they were clipped; they are counted in the
    metric clip_ratio/log_ratio_clamped. Only `logp` carries gradient.
    """
    return hold(difference(logp, proximal_logp, mask), mask)


def difference(
    logp: Float[Array, "*shape"],
    proximal_logp: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """logp - proximal_logp in at least float32, 0 where masked; only `logp` carries gradient."""
    return unmasked(logp, mask, logp) - fixed(proximal_logp, mask, logp)


def hold(
    log_rho: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> tuple[Array, Bool[Array, "*shape"]]:
    """(log ratio within +-20, where it was beyond)."""
    clamped = mask & (jnp.abs(log_rho) > LOG_RATIO_LIMIT)
    return jnp.clip(log_rho, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), clamped


def unmasked(value: Array, mask: Array, like: Array) -> Array:
    """`value` in the dtype that losses of `like` are summed in, 0 where masked."""
    # Masked inputs are replaced before any arithmetic: NaN times a zero cotangent is NaN.
    return jnp.where(mask, value, 0).astype(accumulate_dtype(like.dtype))


def fixed(value: Array, mask: Array, like: Array) -> Array:
    """`unmasked`, without gradient."""
    return unmasked(jax.lax.stop_gradient(value), mask, like)


def clip(low: float = 0.2, high: float = 0.2, delta: float | None = None) -> Surrogate:
    """PPO's clipped ratio, with two bounds, and a third for negative advantages.

        rho = exp(logp - proximal_logp)
        loss = -min(rho A, clip(rho, 1 - low, 1 + high) A)
        with delta, where A < 0: loss = -A min(rho, delta) if rho > 1 + high

    A token whose ratio left the bounds in the direction that its advantage wants gets no gradient;
    the others get exactly -rho A grad logp, at the bounds too. Without delta the loss of a token
    with A < 0 grows without bound in its ratio.

    Args:
      low, high: how far the ratio may fall and rise; high = 0.28 is DAPO's clip-higher.
      delta: the largest ratio that counts where A < 0; above 1 + high. None: no limit.

    Shapes: any, all alike.  Metrics: `ratio_metrics`, clip_ratio/low_mean, high_mean and
    region_mean; with delta clip_ratio/delta_mean.
    Raises: InputError unless 0 <= low <= 1, high >= 0 and delta > 1 + high.
    Source: Schulman et al. 2017, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476; delta:
    INTELLECT-2, arXiv 2505.07291. The same function as dual clip, see `dual_clip`.
    """
    check_bounds("clip", low, high)
    if delta is not None and not (1 + high < delta < math.inf):
        raise InputError(
            f"clip: delta = {delta}, expected a ratio above 1 + high = {1 + high}: below, it would"
            " undo the clipping; 3 or 4 is usual"
        )

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_rho, clamped = log_ratio(logp, proximal_logp, mask)
        weight = fixed(advantage, mask, logp)
        rho, metrics = bounded(jnp.exp(log_rho), weight, mask, low, high, delta)
        return -rho * weight, ratio_metrics(log_rho, clamped, mask) | metrics

    return Surrogate("clip", compute)


def dual_clip(low: float = 0.2, high: float = 0.2, floor: float = 3.0) -> Surrogate:
    """PPO's clip whose loss for A < 0 is bounded: `clip` with delta = floor.

        loss = min(clip's loss, -floor A) where A < 0

    Both bound the ratio that counts where A < 0, so the two methods are one function.

    Args:
      low, high: as for `clip`.
      floor: the largest ratio that counts where A < 0; above 1 + high.

    Source: Ye et al. 2020, arXiv 1912.09729, equation 5.
    """
    return clip(low, high, floor)._replace(name="dual_clip")


def cispo(low: float | None = None, high: float = 5.0) -> Surrogate:
    """REINFORCE weighted by the clipped ratio, which carries no gradient: no token is left out.

        loss = -stop_gradient(clip(rho, low, high)) A logp

    Args:
      low, high: bounds of the ratio itself, not of its distance from 1. TRL has (None, 5.0); verl
        writes them as distances, its 0.2 and 0.2 are low = 0.8, high = 1.2 here.

    Metrics: `ratio_metrics`; clip_ratio/low_mean, high_mean, region_mean: ratios that were cut.
    Raises: InputError unless 0 <= low < high.
    Source: MiniMax-M1, arXiv 2506.13585, equation 4; without a lower bound as it was trained there.
    """
    floor = 0.0 if low is None else low
    if not (0 <= floor < high < math.inf):
        raise InputError(
            f"cispo: low = {low}, high = {high}; expected 0 <= low < high, bounds of the ratio"
        )

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_rho, clamped = log_ratio(logp, proximal_logp, mask)
        rho = jax.lax.stop_gradient(jnp.exp(log_rho))
        weight = jnp.clip(rho, floor, high) * fixed(advantage, mask, logp)
        metrics = ratio_metrics(log_rho, clamped, mask)
        metrics |= cut_metrics(mask & (rho < floor), mask & (rho > high), mask)
        return -weight * unmasked(logp, mask, logp), metrics

    return Surrogate("cispo", compute)


def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Surrogate:
    """A soft gate in the place of the clip: the gradient fades as the ratio leaves 1.

        loss = -4 / tau sigmoid(tau (rho - 1)) A,   tau = tau_positive if A > 0 else tau_negative

    At ratio 1 the gradient is that of `clip`, while the value is 2 A / tau: values are not
    comparable with those of other surrogates.

    Args:
      tau_positive, tau_negative: the larger, the narrower the gate.

    Metrics: `ratio_metrics`.  Raises: InputError unless both are positive.
    Source: Gao et al. 2025, arXiv 2511.20347.
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not (0 < tau < math.inf):
            raise InputError(f"sapo: {name} = {tau}, expected a positive number; 1 is usual")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_rho, clamped = log_ratio(logp, proximal_logp, mask)
        weight = fixed(advantage, mask, logp)
        tau = jnp.where(weight > 0, tau_positive, tau_negative).astype(weight.dtype)
        gate = jax.nn.sigmoid(tau * jnp.expm1(log_rho)) * (4 / tau)
        return -gate * weight, ratio_metrics(log_rho, clamped, mask)

    return Surrogate("sapo", compute)


def dppo_tv(low: float = 0.2, high: float = 0.2, cap: float = 20.0) -> Surrogate:
    """REINFORCE weighted by the ratio, without the tokens whose probability moved too far.

        kept = p - p' <= high if A > 0 else p - p' >= -low,   p = exp(logp), p' of the proximal
        loss = -stop_gradient(kept min(rho, cap)) A logp

    A rare token may double its probability, a frequent one may not: the bounds are on the total
    variation of "this token or another".

    Args:
      low, high: how far a token's probability may fall and rise.
      cap: the largest ratio.

    Metrics: `ratio_metrics`; clip_ratio/low_mean, high_mean, region_mean: tokens left out.
    Raises: InputError unless 0 <= low <= 1, high >= 0 and cap > 0.
    Source: arXiv 2602.04879; verl's form with its default cap.
    """
    check_bounds("dppo_tv", low, high)
    if not (0 < cap < math.inf):
        raise InputError(f"dppo_tv: cap = {cap}, expected a positive ratio; 20 is usual")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_rho, clamped = log_ratio(logp, proximal_logp, mask)
        weight = fixed(advantage, mask, logp)
        moved = jnp.exp(fixed(logp, mask, logp)) - jnp.exp(fixed(proximal_logp, mask, logp))
        above = mask & (weight > 0) & (moved > high)
        below = mask & (weight <= 0) & (moved < -low)
        rho = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_rho), cap))
        rho = jnp.where(above | below, 0, rho)
        metrics = ratio_metrics(log_rho, clamped, mask) | cut_metrics(below, above, mask)
        return -rho * weight * unmasked(logp, mask, logp), metrics

    return Surrogate("dppo_tv", compute)


def reinforce() -> Surrogate:
    """The score function, without a ratio: proximal_logp is only reported on.

        loss = -A logp

    Metrics: `ratio_metrics`.  Source: Williams 1992, doi 10.1007/BF00992696.
    """

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        metrics = ratio_metrics(*log_ratio(logp, proximal_logp, mask), mask)
        return -fixed(advantage, mask, logp) * unmasked(logp, mask, logp), metrics

    return Surrogate("reinforce", compute, weighs=False)


def on_policy() -> Surrogate:
    """The ratio forced to 1: REINFORCE's gradient, with the value of `clip` at ratio 1.

        loss = -exp(logp - stop_gradient(logp)) A

    Metrics: `ratio_metrics`, of the true ratio.
    Source: the on-policy switch of NeMo-RL's loss; TRL does so where a batch is used once.
    """

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        metrics = ratio_metrics(*log_ratio(logp, proximal_logp, mask), mask)
        return -jnp.exp(difference(logp, logp, mask)) * fixed(advantage, mask, logp), metrics

    return Surrogate("on_policy", compute, weighs=False)


def shaped_ratio(offset: float = 0.1) -> Surrogate:
    """The ratio through a saturating function, without clipping: for replayed samples.

        loss = -f(rho) A,   f(w) = w / (w + offset)

    f has slope offset / (w + offset)^2: tokens that the policy has become unlikely to choose get
    the largest gradient. f(1) = 1 / (1 + offset), and the slope there is 0.083 for offset 0.1.
    ExGRPO uses it on replayed samples and the plain ratio on fresh ones, which is
    `by_sample("replayed", "shaped_ratio", "on_policy")`, with the past policy's log-probs as
    proximal_logp of the replayed.

    Args:
      offset: where f reaches one half.

    Metrics: `ratio_metrics`.  Raises: InputError unless offset is positive.
    Source: LUFFY, arXiv 2504.14945; ExGRPO, arXiv 2510.02245, with 0.1 in both.
    """
    if not (0 < offset < math.inf):
        raise InputError(f"shaped_ratio: offset = {offset}, expected a positive number")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_rho, clamped = log_ratio(logp, proximal_logp, mask)
        rho = jnp.exp(log_rho)
        loss = -rho / (rho + offset) * fixed(advantage, mask, logp)
        return loss, ratio_metrics(log_rho, clamped, mask)

    return Surrogate("shaped_ratio", compute)


def bounded(
    rho: Array, weight: Array, mask: Array, low: float, high: float, delta: float | None = None
) -> tuple[Array, Metrics]:
    """(the ratio that counts, metrics): constant where it left the bounds as `weight` wants."""
    above = mask & (weight > 0) & (rho > 1 + high)
    below = mask & (weight < 0) & (rho < 1 - low)
    kept = jnp.where(above, 1 + high, jnp.where(below, 1 - low, rho))
    metrics = cut_metrics(below, above, mask)
    if delta is not None:
        beyond = mask & (weight < 0) & (rho > delta)
        kept = jnp.where(beyond, delta, kept)
        metrics["clip_ratio/delta_mean"] = mean(beyond, mask)
    return kept, metrics


def check_bounds(name: str, low: float, high: float) -> None:
    if not (0 <= low <= 1 and 0 <= high < math.inf):
        raise InputError(
            f"{name}: low = {low}, high = {high}; expected 0 <= low <= 1 and high >= 0"
        )


def cut_metrics(below: Array, above: Array, mask: Array) -> Metrics:
    """Shares of unmasked tokens beyond the lower bound, beyond the upper, and beyond any.

    No token is in both of `below` and `above`.
    """
    low, high = mean(below, mask), mean(above, mask)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        # Added, not counted: every further pass over the tokens costs as much as the loss.
        "clip_ratio/region_mean": Mean(total=low.total + high.total, weight=low.weight),
    }


def ratio_metrics(log_rho: Array, clamped: Array, mask: Array) -> Metrics:
    """How far the current policy is from the proximal one, over unmasked tokens.

    policy_kl: KL(proximal || current) by k3, unbiased for tokens sampled from the proximal policy;
    ratio_max; clip_ratio/log_ratio_clamped: the share beyond +-20. Surrogates of whole sequences
    give their sequence's ratio at each of its tokens.
    """
    log_rho = jax.lax.stop_gradient(log_rho)
    return {
        "policy_kl": mean(jnp.expm1(log_rho) - log_rho, mask),
        "ratio_max": maximum(jnp.exp(log_rho), mask),
        "clip_ratio/log_ratio_clamped": mean(clamped, mask),
    }
