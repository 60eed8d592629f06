"""Rewards as labels: a loss that tells the good samples of a group from the bad ones."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics
from jaxgrpo.losses.sequences import last_tokens, mean_log_ratio, segment_sum
from jaxgrpo.losses.surrogates import BatchField, Surrogate, Tokens, ratio_surrogate

_SUM, _COUNT = "label_log_sum", "label_count"
_ABOUT = "of the samples of its sign in its group (give `group`)"


def rewards_as_labels(tau: float = 0.5) -> Surrogate:
    """Two classifiers per group: good samples should have become likelier, bad ones rarer.

        s_i = mean_t (logp - proximal_logp)
        loss of a group = log(1 + sum over A < 0 of exp(s_i / tau))
                        + log(1 + sum over A > 0 of exp(-s_i / tau))

    Only the sign of A counts, of the whole sequence. The pull on s_i is a softmax over the samples
    of its sign and one more of log ratio 0, and never above 1 / tau. Take the recipe `sign`, with
    which flat groups teach too; a sample with A = 0 has no label. Each log is spread evenly over
    the samples of its sign and their tokens: `sequence_sum` makes the mean over groups, over G.

    Args:
      tau: nats per token that make a difference; smaller is sharper.

    Needs: label_log_sum, each log at the tokens of its samples, and label_count, how many they are,
    at the current parameters and without gradient: made by the update, or from `group`.
    Metrics: `ratio_metrics` of exp(s_i).  Raises: InputError unless tau is positive.
    Source: Rewards as Labels (REAL), Zhai et al. 2026, arXiv 2602.05630; tau as in ms-swift.

    Alone in its group a sample of ratio 1 loses log 2, whatever tau and its sign:

    >>> tokens = Tokens.from_ratios([[1.0]], [[3.0]], label_log_sum=math.log(2), label_count=1.0)
    >>> print(rewards_as_labels().compute(tokens)[0].round(2))
    [[0.69]]
    """
    if not 0 < tau < math.inf:
        raise InputError(
            f"rewards_as_labels: tau = {tau}, expected a positive number; 0.5 is usual"
        )

    def rule(tokens: Tokens, weight: Array, log_rho: Array) -> tuple[Array, Metrics]:
        log_sum, number = (
            tokens.without_gradient(tokens.field(name, "rewards_as_labels", _ABOUT))
            for name in (_SUM, _COUNT)
        )
        score = -jnp.sign(weight) * log_rho / tau
        share = jax.lax.stop_gradient(jnp.exp(jnp.minimum(score - log_sum, 0)))
        # The group's loss at its value, with the slope that it has in this sequence's score.
        value = log_sum / jnp.maximum(number, 1) + share * (score - jax.lax.stop_gradient(score))
        length = segment_sum(jnp.ones_like(value), tokens.mask, tokens.segment)
        labelled = tokens.mask & (weight != 0)
        return jnp.where(labelled, value / jnp.maximum(length, 1), 0), {}

    part = ratio_surrogate("rewards_as_labels", rule, mean_log_ratio)
    fields = tuple(
        BatchField(name, functools.partial(_by_label, tau, name), by_group=True)
        for name in (_SUM, _COUNT)
    )
    return part._replace(needs=frozenset({_SUM, _COUNT}), batch_fields=fields)


def _by_label(tau: float, name: str, tokens: Tokens, group: Array, count: int) -> Array:
    """log(1 + sum exp(score)) over the sequences of a token's group and sign, or their number."""
    sign = jnp.sign(tokens.without_gradient(tokens.advantage))
    log_rho, _ = jax.lax.stop_gradient(mean_log_ratio(tokens))
    score, last = -sign * log_rho / tau, last_tokens(tokens) & (sign != 0)
    label = 2 * group + (sign > 0).astype(group.dtype)
    if name == _COUNT:
        return jnp.zeros(2 * count, score.dtype).at[label].add(last.astype(score.dtype))[label]
    highest = jnp.zeros(2 * count, score.dtype).at[label].max(jnp.where(last, score, 0))
    terms = jnp.where(last, jnp.exp(score - highest[label]), 0)
    total = jnp.exp(-highest).at[label].add(terms)
    return (highest + jnp.log(total))[label]
