"""Off-policy corrections that are constant during the update: the sampler was not the trainer.

With x[t] = trainer_logp[t] - behavior_logp[t] at the tokens that the policy chose, the weight of a
token is exp(x[t]), of a sample exp(sum_t x[t]), and its geometric mean exp(mean_t x[t]): trainer
over sampler, so a bound on one side means the same everywhere here (verl's rejections bound the
inverse). Where both agree nothing changes, to the last bit. x is clamped to +- 20 before the
exponential; the share is in the metric log_ratio_clamped.

A sample's ratio is taken over all its chosen tokens, also those that an earlier step has masked.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.stats import clamp, log_ratio
from jaxgrpo.advantages.tokens import at_tokens
from jaxgrpo.core.metrics import (
    Max,
    Mean,
    Metrics,
    Min,
    counted,
    highest,
    lowest,
    mean,
    reduce,
    summed,
)
from jaxgrpo.core.types import Rollouts, Signal

_NEEDS = frozenset({"trainer_logp"})
_LEVELS = ("token", "sequence")
_DENOMINATORS = ("keep", "shrink")


def truncated_importance(cap: Scheduled = 2.0, level: str = "token") -> AdvantageTransform:
    """Weighs by the ratio of trainer to sampler, cut at a cap (TIS).

        a w,  w = min(exp(x), cap)

    The weight is that of a token, exp(x[t]), or of the whole sample, exp(sum_t x[t]). The product
    is the exact correction but for the cap, and varies with the length; the tokens' own ratio
    ignores how the prefix came about.

    Args:
      cap: at least 1; a number or a function of the step.
      level: "token" or "sequence".

    Signal: [P, G, T], mask unchanged; [P, G] is widened to tokens by level "token" and stays [P, G]
    by "sequence".
    Metrics: capped, weight (mean), effective_sample_size (share of the tokens or samples),
    ratio_max, ratio_min, log_ratio_clamped.
    Source: truncated importance sampling as in TRL, verl (cap 2), SkyRL; Ionides 2008.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"trainer_logp": [[[-1.0, -1.0]]], "behavior_logp": [[[-1.0, -9.0]]]}
    >>> fields["token_mask"] = [[[True, True]]]
    >>> evaluate(truncated_importance(cap=2.0), [[1.0]], **fields)[0].tolist()
    [[[1.0, 2.0]]]
    """
    base.check_choice("truncated_importance", _LEVELS, level=level)
    expected = "at least 1: below it on-policy samples are cut too"
    base.check("truncated_importance", expected, lambda cap: cap >= 1, cap=cap)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        ratios = _ratios("truncated_importance", level, signal, rollouts)
        limit = jnp.asarray(base.at_step(cap, rollouts, ratios.log.dtype), ratios.log.dtype)
        weight = _keep_in_memory(jnp.minimum(jnp.exp(ratios.log), limit), ratios.mask)
        metrics = {"capped": mean(ratios.log > jnp.log(limit), ratios.mask)}
        return base.scaled(ratios.signal, weight), metrics | _describe(ratios, weight)

    return base.stateless("truncated_importance", apply, needs=_NEEDS, importance=True)


def masked_importance(
    low: Scheduled = 0.5,
    high: Scheduled = 5.0,
    level: str = "token",
    denominator: str = "keep",
) -> AdvantageTransform:
    """Weighs by the ratio of trainer to sampler, and drops what is outside a band (MIS, IcePop).

        a w if low <= w <= high else 0,  w = exp(x)

    Args:
      low, high: low <= 1 <= high; numbers or functions of the step.
      level: "token" (IcePop) or "sequence", with w = exp(sum_t x[t]); see `sequence_rejection`.
      denominator: "keep" leaves what is dropped in the mask with value 0, so that it counts in the
        denominator of the loss; "shrink" masks it, and the others weigh more.

    Signal: as in `truncated_importance`; mask unchanged, or cut.
    Metrics: those of `truncated_importance` but capped, and dropped_tokens, dropped_samples (of
    sequences), dropped_long and dropped_short (the longer and the shorter half of the samples).
    Source: IcePop (0.5 to 5) as in slime, NeMo-RL, verl "lo_hi"; TRL sequence_mask (at most 3).
    verl shrinks the mask, slime and TRL keep it.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"trainer_logp": [[[-1.0, -1.0]]], "behavior_logp": [[[-1.0, -9.0]]]}
    >>> fields["token_mask"] = [[[True, True]]]
    >>> evaluate(masked_importance(), [[1.0]], **fields)[0].tolist()
    [[[1.0, 0.0]]]
    """
    return _within_band("masked_importance", low, high, denominator, level, weighs=True)


def geometric_rejection(
    low: Scheduled = 0.999, high: Scheduled = 1.001, denominator: str = "keep"
) -> AdvantageTransform:
    """Drops samples whose mean drift per token is outside a band; the others stay as they are.

        a if low <= exp(mean_t x[t]) <= high else 0

    The same band for every length: what a long sample may drift as a whole grows with it.

    Args: as in `masked_importance`; the band is that of the geometric mean.

    Signal: [P, G] or [P, G, T], mask unchanged, or cut. A sample without tokens stays.
    Metrics: dropped_samples, dropped_tokens, dropped_long, dropped_short, ratio_max, ratio_min
    (of the geometric means), log_ratio_clamped.
    Source: verl seq_mean_k1 (0.999 to 1.001, of the inverse ratio), SkyRL, NeMo-RL (which also
    weighs the rest by its token ratios: add `truncated_importance()`).

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"trainer_logp": [[[-1.0], [-1.0]]], "behavior_logp": [[[-1.0], [-1.1]]]}
    >>> fields["token_mask"] = [[[True], [True]]]
    >>> evaluate(geometric_rejection(), [[1.0, 1.0]], **fields)[0].tolist()
    [[1.0, 0.0]]
    """
    return _within_band("geometric_rejection", low, high, denominator, geometric=True)


def sequence_rejection(
    low: Scheduled = 0.5, high: Scheduled = 2.0, denominator: str = "keep"
) -> AdvantageTransform:
    """Drops samples whose whole ratio is outside a band; the others stay as they are.

        a if low <= exp(sum_t x[t]) <= high else 0

    Biased against length: a sample of T tokens stays only if its mean drift per token is below
    log(high) / T, 3.5e-4 at 2,000 tokens. Watch dropped_long against dropped_short, or take
    `geometric_rejection`.

    Args: as in `masked_importance`; the band is that of the product over tokens.

    Signal: [P, G] or [P, G, T], mask unchanged, or cut.  Metrics: as in `geometric_rejection`.
    Source: SkyRL's product rule (0.5 to 2), verl seq_sum_k1 (of the inverse ratio).

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"trainer_logp": [[[-1.0], [-1.0]]], "behavior_logp": [[[-1.0], [-2.0]]]}
    >>> fields["token_mask"] = [[[True], [True]]]
    >>> evaluate(sequence_rejection(), [[1.0, 1.0]], **fields)[0].tolist()
    [[1.0, 0.0]]
    """
    return _within_band("sequence_rejection", low, high, denominator)


def _within_band(
    name: str,
    low: Scheduled,
    high: Scheduled,
    denominator: str,
    level: str = "sequence",
    geometric: bool = False,
    weighs: bool = False,
) -> AdvantageTransform:
    """Drops what has its ratio outside the band; the rest is weighed by it, or stays as it is."""
    dropped = "on-policy samples are dropped"
    base.check_choice(name, _LEVELS, level=level)
    base.check(name, f"0 <= low <= 1: above 1 {dropped}", lambda low: 0 <= low <= 1, low=low)
    base.check(name, f"at least 1: below it {dropped}", lambda high: high >= 1, high=high)
    base.check_choice(name, _DENOMINATORS, denominator=denominator)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        ratios = _ratios(name, level, signal, rollouts, geometric)
        keep = _within(ratios.log, low, high, rollouts)
        weight = _keep_in_memory(jnp.exp(ratios.log), ratios.mask & keep) if weighs else None
        new_signal = _dropped(ratios.signal, keep, denominator)
        metrics = _describe(ratios, weight) | _describe_dropped(ratios, keep)
        return new_signal if weight is None else base.scaled(new_signal, weight), metrics

    return base.stateless(name, apply, needs=_NEEDS, importance=weighs)


class _Ratios(NamedTuple):
    signal: Signal  # at tokens where the ratios are those of tokens
    log: Array  # [P, G, T] or [P, G], within +- LOG_RATIO_LIMIT; 0 where masked
    clamped: Array  # same shape, bool
    mask: Array  # same shape, bool: the tokens or samples that are unmasked
    length: Array  # [P, G] int32, chosen tokens of unmasked samples
    scored: Array  # [P, G] bool, unmasked samples


def _ratios(
    name: str, level: str, signal: Signal, rollouts: Rollouts, geometric: bool = False
) -> _Ratios:
    if level == "token":
        signal = at_tokens(name, signal, rollouts)
    tokens = base.read(name, rollouts, "token_mask").astype(bool)
    trainer = base.read_field(name, "trainer_logp", rollouts, tokens.shape, "[P, G, T]")
    behavior = base.read(name, rollouts, "behavior_logp")
    scored = signal.mask.any(-1) if signal.mask.ndim == 3 else signal.mask
    scored_tokens = tokens & scored[..., None]
    if level == "token":
        mask, length = signal.mask, stats.count_tokens(scored_tokens)
        log = log_ratio(trainer, behavior, mask)
    else:
        mask, drift = scored, log_ratio(trainer, behavior, scored_tokens)
        sums = reduce(summed(drift, scored_tokens), counted(scored_tokens), axis=-1)
        log, length = (total[..., 0] for total in sums)
    if geometric:
        log = log / jnp.maximum(length, 1).astype(log.dtype)
    log, clamped = clamp(log)
    return _Ratios(signal, log, clamped, mask, length, scored)


def _keep_in_memory(weight: Array, mask: Array) -> Array:
    """The weight, 0 where masked, kept in memory: every reader would take the exponential again."""
    return jax.lax.optimization_barrier(jnp.where(mask, weight, 0))


def _within(log: Array, low: Scheduled, high: Scheduled, rollouts: Rollouts) -> Array:
    """Where low <= exp(log) <= high, asked of the logs."""
    lowest, highest = (
        jnp.log(jnp.asarray(base.at_step(bound, rollouts, log.dtype), log.dtype))
        for bound in (low, high)
    )
    return (log >= lowest) & (log <= highest)


def _dropped(signal: Signal, keep: Array, denominator: str) -> Signal:
    keep = keep if keep.ndim == signal.mask.ndim else keep[..., None]
    mask = signal.mask & keep if denominator == "shrink" else signal.mask
    return Signal(value=jnp.where(keep, signal.value, 0), mask=mask)


def _describe(ratios: _Ratios, weight: Array | None = None) -> Metrics:
    """What the ratios, and the weights made of them (0 where masked), are like."""
    log, mask = ratios.log, ratios.mask
    high, low, clamped, number = reduce(
        highest(log, mask),
        lowest(log, mask),
        counted(mask & ratios.clamped),
        counted(mask),
        axis=-1,
    )
    entries = number.sum().astype(log.dtype)
    # The exponential is monotone: taken of the two extremes, not of every token.
    largest = jnp.exp(high.max(initial=-jnp.inf))
    metrics: Metrics = {
        # Of no token it would be 0, and not the -inf of a maximum of nothing.
        "ratio_max": Max(value=jnp.where(entries > 0, largest, -jnp.inf)),
        "ratio_min": Min(value=jnp.exp(low.min(initial=jnp.inf))),
        "log_ratio_clamped": Mean(total=clamped.sum().astype(log.dtype), weight=entries),
    }
    if weight is not None:
        # Sample by sample: one long sum would lose digits in float32.
        total, squares = (term.sum(-1).sum() for term in (weight, jnp.square(weight)))
        effective = jnp.square(total) / jnp.where(squares > 0, squares, 1)
        metrics["weight"] = Mean(total=total, weight=entries)
        metrics["effective_sample_size"] = Mean(total=effective, weight=entries)
    return metrics


def _describe_dropped(ratios: _Ratios, keep: Array) -> Metrics:
    length = ratios.length.astype(ratios.log.dtype)
    middle = jnp.nanmedian(jnp.where(ratios.scored, length, jnp.nan))
    longer = length > middle
    if keep.ndim == 3:
        counts = reduce(counted(ratios.mask & ~keep), counted(ratios.mask), axis=-1)
        dropped, number = (count[..., 0].astype(length.dtype) for count in counts)
        metrics: Metrics = {"dropped_tokens": Mean(total=dropped.sum(), weight=number.sum())}
    else:
        dropped, number = (
            flags.astype(length.dtype) for flags in (ratios.mask & ~keep, ratios.mask)
        )
        metrics = {
            "dropped_samples": Mean(total=dropped.sum(), weight=number.sum()),
            "dropped_tokens": Mean(total=jnp.where(keep, 0, length).sum(), weight=length.sum()),
        }
    for name, half in {"dropped_long": longer, "dropped_short": ~longer}.items():
        total, weight = (jnp.where(half, count, 0).sum() for count in (dropped, number))
        metrics[name] = Mean(total=total, weight=weight)
    return metrics
