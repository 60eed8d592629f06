"""The KL from an anchor as part of the return, with a given beta or one found for a success rate.

A loss with k2 or k3 has, per sample, another gradient than that of KL(policy || anchor); the return
has exactly it. Put both parts behind the normalisation: divided by the standard deviation of a
group, beta would be another one in every group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.absolute import successes
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.filtered_model import base_rates, log_odds_of_base, target_validity
from jaxgrpo.advantages.stats import clamp, log_ratio
from jaxgrpo.advantages.tokens import at_tokens, sum_behind
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

_NAME = "add_kl_return_for_validity"


def add_kl_return(beta: Scheduled, reference: str = "reference") -> AdvantageTransform:
    """Adds to every token the KL that is still to be paid from it on, as a negative return.

        d[s] = trainer_logp[s] - reference_logp[s]                                      (k1)
        R[p, g, t] = -beta sum_(s >= t) d[p, g, s]
        a[p, g, t] + R[p, g, t] - mean of R[p, h, t] over the other samples h with a token at t

    The expected gradient is exactly that of E[return] - beta KL(policy || reference), with every
    effect of a token on later ones. The mean over the others is only a baseline: they know nothing
    of this sample. Where the signal is leave-one-out too, nothing is left to push, sample by
    sample, once the policy is reference exp(r / beta), normalised.

    Behind a baseline that holds the sample itself (`subtract_group_mean`, so Dr. GRPO; `dvao` and
    those of trees and turns too) only 1 - 1/n of the reward's gradient is left (`base.share_left`,
    where it is derived), and the whole of the KL's would come to rest at the tilt of
    beta n / (n - 1). So a chain scales R by 1 - 1/n there:
    (1 - 1/n) (grad E[r] - beta grad KL) is 0 at the same policy. For samples of one token it is
    (1 - 1/n) (r + R - mean of r + R over the others), and nothing is left to push there either.
    n counts the samples of the group that reach this step. Of R a single one pays 0; all behind
    `singleton="raw"` and `turn_normalise`, K / (K + 1) behind `normalise_with_virtual_rewards`.

    Put it behind the normalisation. Without the baseline it is, on a signal [P, G], `to_tokens(
    place="last"), kl_in_reward(beta), reward_to_go()`; token-level values get R on top.

    Args:
      beta: at least 0, in units of advantage per nat; a number or a function of the step.
      reference: whose log-probs are read, from the field `{reference}_logp`.

    Signal: [P, G] or [P, G, T] -> [P, G, T], mask that of the samples at their tokens.
    Metrics: kl, KL(policy || reference) per token by k3; log_ratio_clamped, the share of tokens
    with |d| above 20, which counts as 20.
    Source: KL-shaped rewards, Ziegler et al. 2019, arXiv 1909.08593. The baseline is ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"trainer_logp": [[[-1.0, -1.0]]], "reference_logp": [[[-2.0, -2.0]]]}
    >>> fields["token_mask"] = [[[True, True]]]
    >>> evaluate(add_kl_return(0.5), [[1.0]], **fields)[0].tolist()
    [[[0.0, 0.5]]]
    """
    base.check_at_least("add_kl_return", 0, beta=beta)
    needs = base.needed_fields("trainer_logp", f"{reference}_logp")

    def build(alone: float | None) -> AdvantageTransform:
        def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
            charge = base.at_step(beta, rollouts, jnp.result_type(float))
            return _charged("add_kl_return", charge, reference, signal, rollouts, alone)

        return base.stateless("add_kl_return", apply, needs=needs)

    return base.with_shrunk_form(build)


def add_kl_return_for_validity(
    target_validity: Scheduled,
    reward: str | None = None,
    threshold: Scheduled | None = None,
    base_rate: str | None = None,
    max_beta: float = 10.0,
) -> AdvantageTransform:
    """As `add_kl_return` from the base, with the beta that leads to a success rate.

        beta: mean over rows with A > 0 of sigmoid(logit(A) + 1 / beta) = target_validity
        A, the base's success rate on a row: the mean of v a(y) / policy(y) over all its samples

    That mean is A in expectation whatever the policy has become, and costs no sample; a group's is
    cut to 1. It is kept for every row of the data, and each step finds its own beta over all
    rows met so far, these samples included. Rows on which the base was never seen to succeed are
    left out, a share of rows_left_out: no beta moves them, but they pay for their distance. With
    rewards in {0, 1} behind a leave-one-out or mean baseline, undivided, the fixed point is the
    base tilted to that rate, behind the mean as in `add_kl_return`; a division by the deviation
    makes it another beta in every group. Refused with `rollout.refill`, which discards flat groups.

    Args:
      target_validity: in (0, 1), a number or a function of the step.
      reward: name of the reward that says what is valid; None: the only one.
      threshold: the lowest value that is a success; None: values must be 0 or 1.
      base_rate: a field [P] that holds A, measured before, in place of `reward`; NaN = not met.
      max_beta: the highest beta, where the base reaches the target by itself or nothing succeeded.

    Fields: base_logp and trainer_logp [P, G, T]; base_logp against behavior_logp for A.
    Signal: [P, G] or [P, G, T] -> [P, G, T].  What earlier steps masked counts for A.
    State: total, count [rows].  Raises: InputError on a stream; `reward` must choose from several.
    Metrics: `add_kl_return`'s; beta; base_rate, mean of A over rows met; rows_left_out; `sign`'s.
    Source: beta(mu) of arXiv 2605.02375; E[a v / policy] = A as in alpha-DPG, arXiv 2512.05962.

    >>> from jaxgrpo.advantages import evaluate
    >>> logp = {name: [[[-1.0], [-1.0]]] for name in ("trainer_logp", "base_logp", "behavior_logp")}
    >>> part = add_kl_return_for_validity(0.9)
    >>> evaluate(part, [[1.0, 0.0]], token_mask=[[[True], [True]]], **logp)[0].tolist()
    [[[1.0], [0.0]]]
    """
    _check_target(target_validity, max_beta)
    from_samples = partial(_rates_from_samples, reward, threshold)
    rates = partial(_rates_from_field, base_rate) if base_rate else from_samples
    needs = base.needed_fields("trainer_logp", "base_logp", reward, base_rate)

    def build(alone: float | None) -> AdvantageTransform:
        update = partial(_update, rates, target_validity, max_beta, alone)
        part = AdvantageTransform(_NAME, partial(_init, reward or base_rate), update, needs)
        return part._replace(counts_flat=True)

    return base.with_shrunk_form(build)


def _check_target(target_validity: Scheduled, max_beta: float) -> None:
    between, above = "a success rate in (0, 1)", "a finite number above 0"
    base.check(_NAME, between, lambda rate: 0 < rate < 1, target_validity=target_validity)
    base.check(_NAME, above, lambda beta: 0 < beta < inf, max_beta=max_beta)


def _init(says_valid: str | None, spec: RolloutSpec) -> dict[str, Array]:
    """Args: says_valid: the reward, or the field of rates that stands in for one."""
    if says_valid is None and len(spec.rewards) != 1:
        raise InputError(
            f"{_NAME}: there are {len(spec.rewards)} rewards ({', '.join(spec.rewards)}):"
            " name the one that says what is valid, reward=..."
        )
    alternative = "train on a data set of known size, or take add_kl_return(beta)"
    return base.row_state(_NAME, alternative, "total", "count")(spec)


def _update(
    rates: Callable[[Rollouts], tuple[dict[str, Array], Metrics]],
    target: Scheduled,
    max_beta: float,
    alone: float | None,
    signal: Signal,
    state: dict[str, Array],
    rollouts: Rollouts,
) -> tuple[Signal, dict[str, Array], Metrics]:
    """Args: rates: what these samples add to the state, [P] each, and metrics."""
    increments, refused = rates(rollouts)
    state = base.add_at_rows(state, base.read(_NAME, rollouts, "row"), **increments)
    met = state["count"] > 0
    rate = jnp.where(met, state["total"] / jnp.where(met, state["count"], 1), 0)
    validity = target_validity(base.at_step(target, rollouts, rate.dtype), rate)
    beta = jnp.minimum(validity.beta, max_beta)
    new_signal, metrics = _charged(_NAME, beta, "base", signal, rollouts, alone)
    metrics |= {
        "beta": mean(beta),
        "base_rate": mean(rate, met),
        "rows_left_out": mean(rate == 0, met),
        **refused,
    }
    return new_signal, state, metrics


def _rates_from_field(field: str, rollouts: Rollouts) -> tuple[dict[str, Array], Metrics]:
    like = jnp.zeros(base.read(_NAME, rollouts, "row").shape, jnp.result_type(float))
    rate = base_rates(_NAME, field, rollouts, like)[:, 0]
    has_rate = jnp.isfinite(rate)
    return {"total": jnp.where(has_rate, rate, 0), "count": has_rate.astype(rate.dtype)}, {}


def _rates_from_samples(
    reward: str | None, threshold: Scheduled | None, rollouts: Rollouts
) -> tuple[dict[str, Array], Metrics]:
    """Sum and number of v a(y) / policy(y) of each group."""
    log_odds, has_odds = log_odds_of_base(_NAME, rollouts)
    name = reward or next(iter(rollouts.rewards))
    value = base.read_field(_NAME, name, rollouts, log_odds.shape, "[P, G]")
    verdict = base.finite(base.floating(value))
    verdict, success, refused = successes(_NAME, verdict, threshold, rollouts)
    mask = base.fresh_mask(verdict.mask & has_odds, rollouts)
    # Cut before the exponential: a group's mean is at most 1, so one weight at most its size.
    highest = jnp.log(jnp.asarray(mask.shape[1], log_odds.dtype))
    weight = jnp.exp(jnp.minimum(jnp.where(mask & success, log_odds, -jnp.inf), highest))
    number = stats.count(mask)[:, 0].astype(weight.dtype)
    return {"total": jnp.minimum(weight.sum(1), number), "count": number}, refused


def _charged(
    name: str,
    beta: float | Array,
    reference: str,
    signal: Signal,
    rollouts: Rollouts,
    alone: float | None,
) -> tuple[Signal, Metrics]:
    """The signal at its tokens with the KL's return added.

    Args:
      alone: what a baseline before it, which shrinks the gradient and the return with it, leaves
        to a single sample; None: no such baseline.
    """
    samples = signal.mask
    signal = at_tokens(name, signal, rollouts)
    shape = signal.mask.shape, "[P, G, T]"
    policy = base.read_field(name, "trainer_logp", rollouts, *shape)
    anchor = base.read_field(name, f"{reference}_logp", rollouts, *shape)
    distance, clamped = clamp(log_ratio(policy, anchor, signal.mask))
    charge = jnp.asarray(beta, distance.dtype)
    if alone is not None:
        charge = charge * base.share_left(samples, distance.dtype, alone)[..., None]
    paid = jnp.where(signal.mask, sum_behind(-charge * distance), 0)
    other_count = stats.count(signal.mask) - signal.mask.astype(jnp.int32)
    baseline = (paid.sum(1, keepdims=True) - paid) / jnp.maximum(other_count, 1).astype(paid.dtype)
    value = stats.widen(signal.value)
    value = value + jnp.where(other_count > 0, paid - baseline, paid).astype(value.dtype)
    metrics: Metrics = {
        "kl": mean(jnp.expm1(-distance) + distance, signal.mask),
        "log_ratio_clamped": mean(clamped, signal.mask),
    }
    return base.with_value(signal, jnp.where(signal.mask, value, 0)), metrics
