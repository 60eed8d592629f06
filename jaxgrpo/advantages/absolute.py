"""Advantages that judge a sample by itself, so that no group is flat; and a penalty on length."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal


def sign(threshold: Scheduled | None = None) -> AdvantageTransform:
    """+1 for a success, -1 for a failure, whatever the others of the group did.

        a[p, g] = 2 r[p, g] - 1                    rewards in {0, 1}
        a[p, g] = +1 if r[p, g] >= threshold else -1

    Flat groups stay alive: all-fail groups push away from what was tried, all-pass groups confirm.

    Args:
      threshold: the lowest reward that is a success; a number or a function of the step. None:
        rewards must be 0 or 1.

    Signal: [P, G] -> [P, G].  Without a threshold another reward is an InputError where values
    are known, and masked and counted ("refused") under jit, where nothing can be raised.
    Source: Gradient starvation, arXiv 2605.07689 (A = 2r - 1). The threshold is ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(sign(), [[1.0, 0.0, 0.0]])[0].tolist()
    [[1.0, -1.0, -1.0]]
    """
    return _asymmetric("sign", 1.0, threshold)


def asymmetric(cost: Scheduled = 1.0, threshold: Scheduled | None = None) -> AdvantageTransform:
    """+1 for a success, -cost for a failure, whatever the others of the group did.

        a[p, g] = r[p, g] - cost (1 - r[p, g])                  rewards in {0, 1}

    cost 1 is `sign`, cost 0 REINFORCE without a baseline. In expectation each cost gives the same
    direction, (1 + cost) times the gradient of the success rate; all-fail groups alone give
    cost / G times that of pass@G.

    Args:
      cost: of a failure; a number, not below 0, or a function of the step.
      threshold: the lowest reward that is a success; None: rewards must be 0 or 1.

    Signal: [P, G] -> [P, G].  Other rewards as with `sign`; so is the metric "refused".
    Source: equation 8 of Gradient starvation, arXiv 2605.07689.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(asymmetric(cost=0.5), [[1.0, 0.0, 0.0]])[0].tolist()
    [[1.0, -0.5, -0.5]]
    """
    base.check_at_least("asymmetric", 0, cost=cost)  # below 0 failures would be praised
    return _asymmetric("asymmetric", cost, threshold)


def _asymmetric(name: str, cost: Scheduled, threshold: Scheduled | None) -> AdvantageTransform:
    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal, success, metrics = successes(name, signal, threshold, rollouts)
        value = stats.widen(signal.value)
        failed = -jnp.asarray(base.at_step(cost, rollouts, value.dtype), value.dtype)
        return base.with_value(signal, jnp.where(success, 1, failed)), metrics

    return base.stateless(name, apply, levels=(2,))


def conditional_sign(threshold: Scheduled | None = None) -> AdvantageTransform:
    """Less the group mean where a group has both, sign where all succeed or all fail.

        a[p, g] = s[p, g] - mean_g s[p, g]   mixed group         s = 1 for a success, else 0
        a[p, g] = 2 s[p, g] - 1              flat group

    A single unmasked sample is a flat group.

    Args:
      threshold: the lowest reward that is a success; None: rewards must be 0 or 1.

    Signal: [P, G] -> [P, G].  Other rewards as with `sign`; so is the metric "refused".
    Source: our mixture of the two advantages of Gradient starvation, arXiv 2605.07689.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(conditional_sign(), [[1.0, 0.0], [0.0, 0.0]])[0].tolist()
    [[0.5, -0.5], [-1.0, -1.0]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        signal, success, metrics = successes("conditional_sign", signal, threshold, rollouts)
        reward = success.astype(stats.widen(signal.value).dtype)
        rate = stats.mean(reward, signal.mask)
        mixed = (rate > 0) & (rate < 1)
        return base.with_value(signal, jnp.where(mixed, reward - rate, 2 * reward - 1)), metrics

    return base.stateless("conditional_sign", apply, levels=(2,))


def subtract_constant(baseline: Scheduled) -> AdvantageTransform:
    """Subtracts one number from every sample.

        a[p, g] = r[p, g] - baseline

    A constant changes the variance of the gradient, not its expectation.

    Args:
      baseline: in units of reward; a number or a function of the step.

    Signal: [P, G] -> [P, G], mask unchanged.
    Source: Williams 1992, REINFORCE with a baseline.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(subtract_constant(0.5), [[1.0, 0.0]])[0].tolist()
    [[0.5, -0.5]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        return base.with_value(signal, value - base.at_step(baseline, rollouts, value.dtype)), {}

    return base.stateless("subtract_constant", apply, levels=(2,))


def clip_advantage(
    limit: Scheduled | None = None, low: Scheduled | None = None, high: Scheduled | None = None
) -> AdvantageTransform:
    """Cuts values to a range round 0.

        a = min(max(a, low), high)        low <= 0 <= high, so no sign is ever flipped

    Args:
      limit: both at once: -limit and limit. A number or a function of the step, as are the others.
      low: the lowest value, not above 0; None: no bound.
      high: the highest value, not below 0; None: no bound.

    Signal: [P, G] or [P, G, T], mask unchanged.  Metrics: clipped, the share of unmasked entries.
    Raises: InputError on bounds on the wrong side of 0; a schedule's are cut to 0 instead.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(clip_advantage(low=-1.0), [[3.0, -3.0]])[0].tolist()
    [[3.0, -1.0]]
    """
    if (limit is None) == (low is None and high is None):
        raise InputError("clip_advantage: give limit, or low, high or both of them")
    base.check("clip_advantage", "0 or more", lambda limit: limit >= 0, limit=limit)
    flips = "0: it would flip signs"
    base.check("clip_advantage", f"a number not above {flips}", lambda low: low <= 0, low=low)
    base.check("clip_advantage", f"a number not below {flips}", lambda high: high >= 0, high=high)
    if limit is not None:
        low, high = (lambda step: -limit(step)) if callable(limit) else -limit, limit

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        cut = value
        if high is not None:
            cut = jnp.minimum(cut, jnp.maximum(base.at_step(high, rollouts, value.dtype), 0))
        if low is not None:
            cut = jnp.maximum(cut, jnp.minimum(base.at_step(low, rollouts, value.dtype), 0))
        return base.with_value(signal, cut), {"clipped": mean(cut != value, signal.mask)}

    return base.stateless("clip_advantage", apply)


def successes(
    name: str, signal: Signal, threshold: Scheduled | None, rollouts: Rollouts
) -> tuple[Signal, Array, Metrics]:
    """(signal, which samples succeeded, metrics) of a part that takes rewards in {0, 1}.

    Without a threshold another reward is an InputError where values are known, and masked and
    counted ("refused") under jit.
    """
    value, mask = signal.value, signal.mask
    if threshold is not None:
        return signal, value >= base.at_step(threshold, rollouts, value.dtype), {}
    binary = (value == 0) | (value == 1)
    wrong = mask & ~binary
    if not isinstance(wrong, Tracer) and bool(wrong.any()):
        raise InputError(
            f"{name} takes rewards in {{0, 1}} but got {float(value[wrong][0]):g}: give"
            " threshold=..., the lowest reward that is a success, or put"
            f" {name} on a reward that is 0 or 1"
        )
    metrics: Metrics = {"refused": mean(~binary, mask)}
    return dataclasses.replace(signal, mask=mask & binary), value == 1, metrics


def overlong_penalty(
    buffer: int, limit: int | None = None, penalty: Scheduled = 1.0
) -> AdvantageTransform:
    """Lowers the reward of completions that come near the length limit.

        r[p, g] = r[p, g] - penalty clip((L[p, g] - (limit - buffer)) / buffer, 0, 1)

    L counts the tokens that the policy chose. Nothing up to limit - buffer tokens, then a straight
    line down to the whole penalty at limit and beyond: continuous at both ends. Put it before the
    baseline. Rewards in {0, 1} are no longer that: put steps that ask for them, and
    `mask_zero_variance` where groups are judged by their correctness, before this one; else a group
    of failures is alive by its lengths alone.

    Args:
      buffer: tokens before the limit in which the penalty grows.
      limit: in tokens; None: the T of the rollouts, the longest completion that can be sampled.
        Arrays cut to the longest completion of a batch have another T: give the limit there.
      penalty: the largest deduction, in units of reward, not negative; a number or a function of
        the step.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T],
    on a buffer that is not from 1 to limit, and on a negative penalty, which would be a prize.
    Metrics: penalised, the share of samples; penalty, its mean.
    Source: DAPO, arXiv 2503.14476, section 3.4 (soft overlong punishment), with limit 20480,
    buffer 4096 and rewards of 1 and -1: against rewards of 1 and 0 the same penalty weighs double.

    >>> from jaxgrpo.advantages import evaluate
    >>> lengths = [[[True] * 2 + [False] * 2, [True] * 4]]
    >>> evaluate(overlong_penalty(buffer=2), [[1.0, 1.0]], token_mask=lengths)[0].tolist()
    [[1.0, 0.0]]
    """
    _check_tokens(buffer, limit)
    base.check_at_least("overlong_penalty", 0, penalty=penalty)

    def accepts(spec: RolloutSpec) -> None:
        if limit is None and spec.max_completion_tokens:
            _check_tokens(buffer, spec.max_completion_tokens)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        tokens = base.read("overlong_penalty", rollouts, "token_mask").astype(bool)
        last = tokens.shape[-1] if limit is None else limit
        value = stats.widen(signal.value)
        length = tokens.sum(-1, dtype=jnp.int32)
        excess = jnp.clip(length - (last - buffer), 0, buffer).astype(value.dtype)
        cost = base.at_step(penalty, rollouts, value.dtype) * (excess / buffer)
        lowered, mask = base.with_value(signal, value - cost), signal.mask
        return lowered, {"penalised": mean(excess > 0, mask), "penalty": mean(cost, mask)}

    return base.stateless("overlong_penalty", apply, levels=(2,), accepts=accepts)


def _check_tokens(buffer: int, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"overlong_penalty: limit = {limit}, expected at least 1 token")
    if buffer < 1 or (limit is not None and buffer > limit):
        raise InputError(
            f"overlong_penalty: buffer = {buffer}, expected from 1 to"
            f" {'limit' if limit is None else f'limit = {limit}'} tokens"
        )
