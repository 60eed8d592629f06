"""What a loss reads of each token (`Tokens`), and policy losses on the ratio of each token.

A surrogate is `compute(tokens) -> (loss per token, metrics)`, before the reduction's weights. The
loss is minimised and exactly 0 where masked; what masked entries of the inputs hold, NaN too,
reaches neither value nor gradient. A surrogate finds the tokens of a sequence by their `segment`
ids, never along an axis (`jaxgrpo.losses.sequences`).

Metrics are shares of unmasked tokens, under the same names everywhere: see `ratio_metrics` and
`cut_metrics`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, Metrics, accumulate_dtype, maximum, mean
from jaxgrpo.core.types import register

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this before the exponential; see `log_ratio`."""


@register
@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a loss reads of each token. All arrays have one shape, of any rank.

    Only `logp` carries gradient, and those fields that the update's own pass makes.
    """

    logp: Array  # [...] of the policy that is trained
    proximal_logp: Array  # [...] of the policy that ratios are measured from
    advantage: Array  # [...]
    mask: Array  # [...] bool, True at tokens that count
    segment: Array  # [..., Q] int32, ids of sequences 1 .. Q within a row; 0 = padding
    fields: Mapping[str, Array]  # name -> [...], what a surrogate or penalty needs beside these

    @classmethod
    def from_ratios(cls, ratio: Any, advantage: Any = 1.0, **fields: Any) -> Tokens:
        """Unmasked tokens with these ratios to the proximal policy, for examples and tests.

        Shapes: ratio [..., Q], the others broadcast to it; each row is one sequence.
        """
        ratio = jnp.asarray(ratio)
        wide = {name: jnp.broadcast_to(value, ratio.shape) for name, value in fields.items()}
        return cls(
            logp=jnp.log(ratio),
            proximal_logp=jnp.zeros_like(ratio),
            advantage=jnp.broadcast_to(jnp.asarray(advantage, ratio.dtype), ratio.shape),
            mask=jnp.ones(ratio.shape, bool),
            segment=jnp.ones(ratio.shape, jnp.int32),
            fields=wide,
        )

    def unmasked(self, value: Array) -> Array:
        """`value` in the dtype that losses are summed in, at least float32; 0 where masked."""
        # Masked inputs are replaced before any arithmetic: NaN times a zero cotangent is NaN.
        return jnp.where(self.mask, value, 0).astype(accumulate_dtype(self.logp.dtype))

    def without_gradient(self, value: Array) -> Array:
        """`unmasked`, as a constant of the loss."""
        return self.unmasked(jax.lax.stop_gradient(value))

    def log_ratio_to(self, other_logp: Array) -> Array:
        """logp - other_logp in at least float32, 0 where masked; only `logp` carries gradient."""
        return self.unmasked(self.logp) - self.without_gradient(other_logp)

    def field(self, name: str, reader: str, about: str) -> Array:
        """A field. Raises: InputError if it is missing, saying who reads it and what it is."""
        if name not in self.fields:
            field_names = ", ".join(sorted(self.fields)) or "no fields"
            raise InputError(f"{reader} reads fields[{name!r}], {about}; given: {field_names}")
        return self.fields[name]


class BatchField(NamedTuple):
    """A field that an update computes from all its micro-batches before it takes the gradient."""

    name: str
    compute: Callable[[Tokens, Array, int], Array]
    """(tokens of a whole update at the parameters before it, group ids 0 .. n - 1, n) -> its value
    at each token, which is a constant of the loss"""
    by_group: bool = False  # whether it reads the group ids


class Surrogate(NamedTuple):
    """What depends on the parameters being optimised."""

    name: str
    compute: Callable[[Tokens], tuple[Array, Mapping[str, Any]]]
    """tokens -> (loss per token, metrics; plain numbers too)"""
    needs: frozenset[str] = frozenset()  # fields that must be produced for it
    weighs: bool = True  # the gradient, by the ratio of the policy to the proximal one
    per_token: bool = False
    """Whether a token's loss depends on no other token. An update then takes the gradient of the
    log-probs in the pass that computes them."""
    acts_on_all: bool = False
    """Whether samples without an advantage have a gradient too, and stay in the update."""
    batch_fields: tuple[BatchField, ...] = ()
    """Of `needs` those that it makes itself. All unmasked samples stay in the update."""
    sides: tuple[tuple[str, bool, Surrogate], ...] = ()
    """Where it is another surrogate at some tokens: the field that says so, whether that is true
    there, and which. It `weighs` if one of them does."""

    def without_ratio(self, at: str | None = None) -> list[str]:
        """The surrogates that weigh nothing by a ratio, of those that act at some token.

        Args:
          at: a field; then of those that act where it is true.
        """
        if not self.sides:
            return [] if self.weighs else [self.name]
        parts = [part for field, is_true, part in self.sides if is_true or field != at]
        return [name for part in parts for name in part.without_ratio(at)]


def log_ratio(tokens: Tokens) -> tuple[Array, Array]:
    """(log ratio, where it was clamped), the ratio in at least float32; 0 where masked.

        clip(logp - proximal_logp, -20, 20)

    The clamp keeps the exponential finite: exp(20) is 4.9e8. Tokens beyond it have a constant
    ratio and hence no gradient through it, as if they were clipped; they are counted in the
    metric clip_ratio/log_ratio_clamped. Only `logp` carries gradient.

    >>> ratio, clamped = log_ratio(Tokens.from_ratios([1.0, 1e10]))
    >>> ratio.tolist(), clamped.tolist()
    ([0.0, 20.0], [False, True])
    """
    return clamp_log_ratio(tokens.log_ratio_to(tokens.proximal_logp), tokens.mask)


def clamp_log_ratio(log_rho: Array, mask: Array) -> tuple[Array, Array]:
    """(log ratio within +-20, where it was beyond)."""
    clamped = mask & (jnp.abs(log_rho) > LOG_RATIO_LIMIT)
    return jnp.clip(log_rho, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), clamped


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

    >>> loss, _ = clip(0.25, 0.25).compute(Tokens.from_ratios([0.5, 1.5, 0.5, 1.5], [1, 1, -1, -1]))
    >>> print(loss.round(2))
    [-0.5  -1.25  0.75  1.5 ]
    """
    check_bounds("clip", low, high)
    if delta is not None:
        _check_limit("clip: delta", delta, high)

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        rho, metrics = clip_where_it_gains(jnp.exp(log_rho), weight, tokens.mask, low, high, delta)
        return -rho * weight, metrics

    return ratio_surrogate("clip", rule)


def dual_clip(low: float = 0.2, high: float = 0.2, floor: float = 3.0) -> Surrogate:
    """PPO's clip whose loss for A < 0 is bounded: `clip` with delta = floor.

        loss = min(clip's loss, -floor A) where A < 0

    Both bound the ratio that counts where A < 0, so the two methods are one function.

    Args:
      low, high: as for `clip`.
      floor: the largest ratio that counts where A < 0; above 1 + high.

    Raises: InputError unless 0 <= low <= 1, high >= 0 and floor > 1 + high.
    Source: Ye et al. 2020, arXiv 1912.09729, equation 5.

    >>> loss, _ = dual_clip(high=0.5).compute(Tokens.from_ratios([2.0, 4.0, 4.0], [-1, -1, 1]))
    >>> print(loss.round(2))
    [ 2.   3.  -1.5]
    """
    check_bounds("dual_clip", low, high)
    _check_limit("dual_clip: floor", floor, high)
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

    The loss of ratio e is -1 A log e; cut at 2, of ratio e it is -2 A:

    >>> loss, _ = cispo(high=2.0).compute(Tokens.from_ratios([1.0, math.e], [1, 3]))
    >>> print(loss.round(2))
    [-0. -6.]
    """
    floor = 0.0 if low is None else low
    if not (0 <= floor < high < math.inf):
        raise InputError(
            f"cispo: low = {low}, high = {high}; expected 0 <= low < high, bounds of the ratio"
        )

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        rho, mask = jax.lax.stop_gradient(jnp.exp(log_rho)), tokens.mask
        metrics = cut_metrics(mask & (rho < floor), mask & (rho > high), mask)
        return -(jnp.clip(rho, floor, high) * weight) * tokens.unmasked(tokens.logp), metrics

    return ratio_surrogate("cispo", rule)


def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Surrogate:
    """A soft gate instead of the clip: the gradient fades as the ratio leaves 1.

        loss = -4 / tau sigmoid(tau (rho - 1)) A,   tau = tau_positive if A > 0 else tau_negative

    At ratio 1 the gradient is that of `clip`, while the value is 2 A / tau: values are not
    comparable with those of other surrogates.

    Args:
      tau_positive, tau_negative: the larger, the narrower the gate.

    Metrics: `ratio_metrics`.  Raises: InputError unless both are positive.
    Source: Gao et al. 2025, arXiv 2511.20347.

    >>> loss, _ = sapo().compute(Tokens.from_ratios([1.0, 1e8], [1, 1]))  # -2 A and -4 A
    >>> print(loss.round(2))
    [-2. -4.]
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not (0 < tau < math.inf):
            raise InputError(f"sapo: {name} = {tau}, expected a positive number; 1 is usual")

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        tau = jnp.where(weight > 0, tau_positive, tau_negative).astype(weight.dtype)
        gate = jax.nn.sigmoid(tau * jnp.expm1(log_rho)) * (4 / tau)
        return -gate * weight, {}

    return ratio_surrogate("sapo", rule)


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

    With p' = 1 the ratio is p itself. Of two tokens with A = -1 the first moved too far:

    >>> loss, _ = dppo_tv().compute(Tokens.from_ratios([0.5, 0.9], -1))  # 0 and 0.9 log 0.9
    >>> print(loss.round(2))
    [-0.   -0.09]
    """
    check_bounds("dppo_tv", low, high)
    if not (0 < cap < math.inf):
        raise InputError(f"dppo_tv: cap = {cap}, expected a positive ratio; 20 is usual")

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        logp, proximal_logp = map(tokens.without_gradient, (tokens.logp, tokens.proximal_logp))
        change = jnp.exp(logp) - jnp.exp(proximal_logp)
        above = tokens.mask & (weight > 0) & (change > high)
        below = tokens.mask & (weight <= 0) & (change < -low)
        rho = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_rho), cap))
        rho = jnp.where(above | below, 0, rho)
        loss = -rho * weight * tokens.unmasked(tokens.logp)
        return loss, cut_metrics(below, above, tokens.mask)

    return ratio_surrogate("dppo_tv", rule)


def reinforce() -> Surrogate:
    """The score function, without a ratio: proximal_logp is only reported on.

        loss = -A logp

    Metrics: `ratio_metrics`.  Source: Williams 1992, doi 10.1007/BF00992696.

    >>> loss, _ = reinforce().compute(Tokens.from_ratios([math.exp(-2), 1.0], [3, 1]))
    >>> print(loss.round(2))
    [ 6. -0.]
    """

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        return -weight * tokens.unmasked(tokens.logp), {}

    return ratio_surrogate("reinforce", rule, weighs=False)


def on_policy() -> Surrogate:
    """The ratio forced to 1: REINFORCE's gradient, with the value of `clip` at ratio 1.

        loss = -exp(logp - stop_gradient(logp)) A

    Metrics: `ratio_metrics`, of the true ratio.
    Source: the on-policy switch of NeMo-RL's loss; TRL does so if a batch is used once.

    >>> loss, _ = on_policy().compute(Tokens.from_ratios([0.5, 6.0], [3, 1]))
    >>> print(loss.round(2))
    [-3. -1.]
    """

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        return -jnp.exp(tokens.log_ratio_to(tokens.logp)) * weight, {}

    return ratio_surrogate("on_policy", rule, weighs=False)


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

    >>> loss, _ = shaped_ratio(0.5).compute(Tokens.from_ratios([0.5, 1.5], [1, 2]))
    >>> print(loss.round(2))
    [-0.5 -1.5]
    """
    if not (0 < offset < math.inf):
        raise InputError(f"shaped_ratio: offset = {offset}, expected a positive number")

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        rho = jnp.exp(log_rho)
        return -rho / (rho + offset) * weight, {}

    return ratio_surrogate("shaped_ratio", rule)


def ratio_surrogate(
    name: str,
    rule: Callable[[Tokens, Array, Array], tuple[Array, Metrics]],
    measure: Callable[[Tokens], tuple[Array, Array]] = log_ratio,
    weighs: bool = True,
) -> Surrogate:
    """A surrogate that reports `ratio_metrics` of the ratio it is made of.

    Args:
      rule: (tokens, advantage, log ratio) -> (loss, further metrics); advantage and log ratio are 0
        where masked, and the advantage carries no gradient.
      measure: tokens -> (log ratio, where it was clamped).
    """

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        log_rho, clamped = measure(tokens)
        loss, metrics = rule(tokens, tokens.without_gradient(tokens.advantage), log_rho)
        return loss, ratio_metrics(log_rho, clamped, tokens.mask) | metrics

    return Surrogate(name, compute, weighs=weighs, per_token=measure is log_ratio)


def clip_where_it_gains(
    rho: Array,
    weight: Array,
    mask: Array,
    low: float | Array,
    high: float | Array,
    delta: float | None = None,
) -> tuple[Array, Metrics]:
    """(the ratio, held at the bound that it passed in the direction of `weight`; metrics)."""
    above = mask & (weight > 0) & (rho > 1 + high)
    below = mask & (weight < 0) & (rho < 1 - low)
    clipped_rho = jnp.where(above, 1 + high, jnp.where(below, 1 - low, rho))
    metrics = cut_metrics(below, above, mask)
    if delta is not None:
        beyond = mask & (weight < 0) & (rho > delta)
        clipped_rho = jnp.where(beyond, delta, clipped_rho)
        metrics["clip_ratio/delta_mean"] = mean(beyond, mask)
    return clipped_rho, metrics


def check_bounds(name: str, low: float, high: float) -> None:
    if not (0 <= low <= 1 and 0 <= high < math.inf):
        raise InputError(
            f"{name}: low = {low}, high = {high}; expected 0 <= low <= 1 and high >= 0"
        )


def _check_limit(where: str, limit: float, high: float) -> None:
    if not 1 + high < limit < math.inf:
        raise InputError(
            f"{where} = {limit}, expected a ratio above 1 + high = {1 + high}: below, it would undo"
            " the clipping; 3 or 4 is usual"
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


RATIO_METRICS = ("policy_kl", "ratio_max", "clip_ratio/log_ratio_clamped")


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
