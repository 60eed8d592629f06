"""What a completion's length costs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import (
    AdvantageTransform,
    Scheduled,
    at_step,
    check_at_least,
    read,
    stateless,
)
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal


def overlong_penalty(
    buffer: int, limit: int | None = None, penalty: Scheduled = 1.0
) -> AdvantageTransform:
    """Lowers the reward of completions that come near the length limit.

        r[p, g] = r[p, g] - penalty clip((L[p, g] - (limit - buffer)) / buffer, 0, 1)

    L counts the tokens that the policy chose. Nothing up to limit - buffer tokens, then a straight
    line down to the whole penalty at limit and beyond: continuous at both ends. Stand before the
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
    """
    _check_tokens(buffer, limit)
    check_at_least("overlong_penalty", 0, penalty=penalty)

    def init(spec: RolloutSpec) -> tuple[()]:
        if limit is None and spec.max_completion_tokens:
            _check_tokens(buffer, spec.max_completion_tokens)
        return ()

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        tokens = read("overlong_penalty", rollouts, "token_mask").astype(bool)
        last = tokens.shape[-1] if limit is None else limit
        value = stats.widen(signal.value)
        excess = _excess(tokens.sum(-1, dtype=jnp.int32), last, buffer).astype(value.dtype)
        cost = at_step(penalty, rollouts, value.dtype) * (excess / buffer)
        metrics: Metrics = {
            "penalised": mean(excess > 0, signal.mask),
            "penalty": mean(cost, signal.mask),
        }
        lowered = (value - cost).astype(signal.value.dtype)
        return dataclasses.replace(signal, value=lowered), metrics

    return stateless("overlong_penalty", apply, levels=(2,))._replace(init=init)


def _excess(length: Array, limit: int, buffer: int) -> Array:
    """Tokens of the buffer that are used up, 0 to buffer."""
    return jnp.clip(length - (limit - buffer), 0, buffer)


def _check_tokens(buffer: int, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"overlong_penalty: limit = {limit}, expected at least 1 token")
    if buffer < 1 or (limit is not None and buffer > limit):
        raise InputError(
            f"overlong_penalty: buffer = {buffer}, expected from 1 to"
            f" {'limit' if limit is None else f'limit = {limit}'} tokens"
        )
