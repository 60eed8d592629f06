"""Penalties that keep the policy near the reference, per token, beside the surrogate.

Each is named for the gradient it has; docs/losses.md has the table, computed by enumeration. With
l = logp - reference_logp at tokens sampled from the current policy: `k2` has, per state, the
gradient of the reverse KL(policy || reference), over whole sequences that of the sequences' KL;
`forward_kl_k3`, GRPO's usual estimator, that of the forward KL(reference || policy), though its
value estimates the reverse one. `reverse_kl_off_policy` has value and gradient of the reverse KL
from tokens of an older policy. `full_kl` is no estimate: it sums over the vocabulary.

Arguments, shapes and treatment of masked entries are those of a surrogate. Log ratios of tokens are
held within +-20 and counted (metric kl_clamped): a reference that gives a token no probability
costs no more than that, and its pull stays finite.

Entropy of the policy's token distributions, as a penalty: exact, over the whole vocabulary.

Both parts read fields["policy_entropy"], differentiated, which the update's own pass makes. As
`k2` they leave out what a token does to the entropy of later states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, Metrics, accumulate_dtype, mean
from jaxgrpo.losses.sequences import segment_sum
from jaxgrpo.losses.surrogates import LOG_RATIO_LIMIT

FLOOR = -1e30
"""Log-probs below it, -inf too, count as this: a difference of two infinities would be NaN."""


class Penalty(NamedTuple):
    """A term added to the surrogate, which shares its token weights."""

    name: str
    compute: Callable[..., tuple[Array, Metrics]]
    """(logp, proximal_logp, advantage, mask, segment, fields) -> (penalty per token, metrics);
    with `init`, the state comes as a seventh argument"""
    needs: frozenset[str] = frozenset()  # fields that must be produced for it
    init: Callable[[], Any] | None = None
    """() -> state, a tree of arrays, where it remembers something"""
    observe: Callable[[Any, Metrics], Any] | None = None
    """(state, metrics of a whole update) -> the state of the next; given exactly with `init`"""


def k2(beta: float, level: str = "token") -> Penalty:
    """The squared log ratio: the gradient of the reverse KL.

        token:     beta l_t^2 / 2
        sequence:  beta L^2 / 2 in all, spread over the tokens;  L = sum_t l_t

    Per token it has the gradient at each visited state and leaves out what a token does to later
    states. Over the sequence it has that too (as k1 in the reward), with a variance that grows with
    the length; exact under reductions that weigh all tokens alike, up to their constant.
    The value estimates no KL; the metric kl does.

    Args:
      beta: weight against the surrogate; not negative.
      level: "token" or "sequence".

    Metrics: kl, the k3 value per token without beta, over unmasked tokens; kl_clamped, the share of
    them whose log ratio was held: their pull stays at beta 20.
    Raises: InputError on a negative beta, another level, and where fields lack reference_logp.
    Source: Schulman, Approximating KL divergence, 2020 (joschu.net/blog/kl-approx.html).
    """
    _check("k2", beta, level)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        ratio = _to_reference("k2", level, logp, mask, segment, fields)
        value = ratio.share * 0.5 * jnp.square(ratio.log)
        return beta * _sloped(value, ratio.log, logp, mask), _kl_metrics(ratio, mask)

    return Penalty("k2", compute, frozenset({"reference_logp"}))


def forward_kl_k3(beta: float, level: str = "token") -> Penalty:
    """GRPO's k3 estimator, under the name of the gradient it has.

        token:     beta (exp(-l_t) - 1 + l_t)
        sequence:  beta (exp(-L) - 1 + L) in all, spread over the tokens;  L = sum_t l_t

    As a loss its expected gradient is that of the forward KL(reference || policy): per token at
    each state that the policy visits, which is no gradient of one function; over the sequence that
    of the sequences' KL, under reductions that weigh all tokens alike. Where l < -20 it has no
    gradient.

    Args:
      beta: weight against the surrogate; not negative.
      level: "token" or "sequence".

    Metrics: kl, the value per token without beta, over unmasked tokens; kl_clamped, the share of
    tokens with a log ratio beyond +-20 (of the sequence: below -20 too).
    Raises: InputError on a negative beta, another level, and where fields lack reference_logp.
    Source: Shao et al. 2024, arXiv 2402.03300, equation 4, per token, without a clamp.
    """
    _check("forward_kl_k3", beta, level)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        ratio = _to_reference("forward_kl_k3", level, logp, mask, segment, fields)
        low = ratio.log < -LOG_RATIO_LIMIT
        slope = jnp.where(low, 0, -jnp.expm1(-jnp.maximum(ratio.log, -LOG_RATIO_LIMIT)))
        value = ratio.share * _k3(ratio.log)
        ratio = ratio._replace(clamped=ratio.clamped | (mask & low))
        return beta * _sloped(value, slope, logp, mask), _kl_metrics(ratio, mask)

    return Penalty("forward_kl_k3", compute, frozenset({"reference_logp"}))


def reverse_kl_off_policy(beta: float, level: str = "token") -> Penalty:
    """k3 times the differentiated ratio to the policy sampled from: the reverse KL, off policy.

        token:     beta rho_t (exp(-l_t) - 1 + l_t),   gradient  beta rho_t l_t grad logp_t
        sequence:  beta R (exp(-L) - 1 + L) in all,    gradient  beta R L sum_t grad logp_t
        rho_t = exp(logp_t - proximal_logp_t),  R = prod_t rho_t,  L = sum_t l_t

    Over the sequence, value and gradient are those of KL(policy || reference), whatever the
    proximal policy, under reductions that weigh all tokens alike; R is as noisy as sequences are
    long. Per token the gradient is that of the reverse KL at each state that the *proximal* policy
    visits. At ratio 1 it is `k2` with the value of k3 (verl's "k3+").

    Args:
      beta: weight against the surrogate; not negative.
      level: "token" or "sequence".

    Log ratios to the proximal policy (of the sequence: their sum) are held within +-20, as weights:
    what lies beyond keeps its pull. Counted in kl_clamped too.
    Metrics: kl, the k3 value per token without beta and ratio; kl_clamped, as above.
    Raises: InputError on a negative beta, another level, and where fields lack reference_logp.
    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1, per token.
    """
    name = "reverse_kl_off_policy"
    _check(name, beta, level)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        ratio = _to_reference(name, level, logp, mask, segment, fields)
        step = _difference(logp, proximal_logp, mask)
        if level == "sequence":
            step = segment_sum(step, mask, segment)
        far = mask & (jnp.abs(step) > LOG_RATIO_LIMIT)
        weight = jnp.exp(jnp.clip(step, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        value = ratio.share * weight * _k3(ratio.log)
        ratio = ratio._replace(clamped=ratio.clamped | far)
        return beta * _sloped(value, weight * ratio.log, logp, mask), _kl_metrics(ratio, mask)

    return Penalty(name, compute, frozenset({"reference_logp"}))


def full_kl(beta: float) -> Penalty:
    """The reverse KL at each visited state, summed over the vocabulary, not estimated.

        beta sum_v policy(v) (log policy(v) - log reference(v))

    Value and gradient without the noise of the token that was sampled. As `k2` it leaves out what
    a token does to later states. It costs the reference's forward pass inside the update and both
    heads over the vocabulary once more.

    Args:
      beta: weight against the surrogate; not negative.

    Reads fields["full_kl"], differentiated, which the update's own pass makes
    (`jaxgrpo.models.exact_kl.full_kl`).
    Metrics: kl, the value without beta, over unmasked tokens; kl_clamped, the policy's probability
    of tokens whose log ratio was held at 20.
    Raises: InputError on a negative beta, and where fields lack full_kl.
    Source: the definition.
    """
    _check("full_kl", beta, "token")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        value = from_pass("full_kl", "full_kl", mask, fields)
        held = jax.lax.stop_gradient(fields.get("full_kl_clamped", jnp.zeros_like(value)))
        metrics: Metrics = {"kl": mean(jax.lax.stop_gradient(value), mask)}
        return beta * value, metrics | {"kl_clamped": mean(held, mask)}

    return Penalty("full_kl", compute, frozenset({"full_kl"}))


class _Ratio(NamedTuple):
    """Log ratios to the reference, without gradient, 0 where masked."""

    log: Array  # of the token, or at each token that of its sequence
    share: Array  # of the value that each token bears
    token: Array  # of the token
    clamped: Array  # bool, where a log ratio was held


def _to_reference(
    name: str, level: str, logp: Array, mask: Array, segment: Array, fields: Mapping[str, Array]
) -> _Ratio:
    if "reference_logp" not in fields:
        raise InputError(
            f"{name} reads fields['reference_logp'], the reference policy's log-probs in the shape"
            f" of logp; given: {', '.join(sorted(fields)) or 'no fields'}"
        )
    raw = _difference(logp, fields["reference_logp"], mask)
    token = jnp.clip(raw, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    clamped = mask & (jnp.abs(raw) > LOG_RATIO_LIMIT)
    one = jnp.ones_like(token)
    if level == "token":
        return _Ratio(token, one, token, clamped)
    number = segment_sum(one, mask, segment)
    return _Ratio(segment_sum(token, mask, segment), 1 / jnp.maximum(number, 1), token, clamped)


def _difference(logp: Array, other: Array, mask: Array) -> Array:
    """logp - other in at least float32, without gradient, finite, 0 where masked."""
    dtype = accumulate_dtype(logp.dtype)
    # Masked inputs are replaced before any arithmetic: NaN times a zero cotangent is NaN.
    here, there = (
        jnp.maximum(jnp.where(mask, jax.lax.stop_gradient(each), 0).astype(dtype), FLOOR)
        for each in (logp, other)
    )
    return here - there


def _sloped(value: Array, slope: Array, logp: Array, mask: Array) -> Array:
    """`value`, whose derivative with respect to logp is `slope`; 0 where masked.

    Written out, since over the sequence every token has the whole sequence's slope.
    """
    value, slope = jax.lax.stop_gradient((value, slope))
    # A logp of -inf would make a NaN of its own difference.
    carrier = jnp.where(mask & jnp.isfinite(logp), logp, 0).astype(value.dtype)
    moved = slope * (carrier - jax.lax.stop_gradient(carrier))
    return jnp.where(mask, value + moved, 0)


def from_pass(name: str, quantity: str, mask: Array, fields: Mapping[str, Array]) -> Array:
    """A quantity of the update's own pass, with its gradient, in at least float32; 0 where masked.

    Raises: InputError where fields lack it.
    """
    if quantity not in fields:
        raise InputError(
            f"{name} reads fields[{quantity!r}], which the pass over the current policy makes, with"
            f" its gradient; given: {', '.join(sorted(fields)) or 'no fields'}"
        )
    value = fields[quantity]
    return jnp.where(mask, value, 0).astype(accumulate_dtype(value.dtype))


def _k3(log_ratio: Array) -> Array:
    held = jnp.maximum(log_ratio, -LOG_RATIO_LIMIT)
    return jnp.expm1(-held) + held


def _kl_metrics(ratio: _Ratio, mask: Array) -> Metrics:
    clamped = ratio.clamped.astype(ratio.token.dtype)
    return {"kl": mean(_k3(ratio.token), mask), "kl_clamped": mean(clamped, mask)}


def _check(name: str, beta: float, level: str) -> None:
    if not (beta >= 0 and math.isfinite(beta)):
        raise InputError(f"{name}: beta = {beta}, expected a number >= 0; 0.001 to 0.05 is usual")
    if level not in ("token", "sequence"):
        raise InputError(f'{name}: level = {level!r}, expected "token" or "sequence"')


NEEDS = frozenset({"policy_entropy"})


def entropy_bonus(coefficient: float) -> Penalty:
    """Subtracts the entropy at each visited state.

        -coefficient H_t,   H_t = -sum_v policy(v) log policy(v)

    Args:
      coefficient: weight against the surrogate; below 0 it lowers the entropy.

    Metrics: entropy, in nats, over unmasked tokens.
    Raises: InputError unless the coefficient is finite, and where fields lack policy_entropy.
    Source: Williams and Peng 1991, Function optimization using connectionist reinforcement
    learning algorithms.
    """
    if not math.isfinite(coefficient):
        raise InputError(f"entropy_bonus: coefficient = {coefficient}, expected a finite number")

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        entropy = from_pass("entropy_bonus", "policy_entropy", mask, fields)
        return -coefficient * entropy, _measured(entropy, mask)

    return Penalty("entropy_bonus", compute, NEEDS)


def adaptive_entropy(
    target: float,
    coefficient: float = 0.0,
    delta: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
) -> Penalty:
    """An entropy bonus whose coefficient moves towards a target entropy.

        loss = -c_k 1[e_k <= target] H_t
        c_(k+1) = clip(c_k + delta sign(target - e), low, high)

    e_k is the entropy of the update before, as is e of this one for the next: known before the
    first micro-batch, so that the loss adds up exactly under any split. No bonus acts in the first
    update; an update that is skipped moves nothing.

    Args:
      target: in nats per token.
      coefficient: c_0.
      delta: by which it moves in each update.
      low, high: what it is kept within.

    State: coefficient [] and entropy [], float32.
    Metrics: entropy, over unmasked tokens; entropy_coefficient, the one applied, 0 while the
    entropy is above the target.
    Raises: InputError unless 0 <= low <= coefficient <= high, and target and delta are positive.
    Source: Skywork-OR1, arXiv 2505.22312, where e_k is measured in update k itself.
    """
    _check_adaptive(target, coefficient, delta, low, high)

    def init() -> dict[str, Array]:
        # Above any target: nothing has been measured.
        return {"coefficient": jnp.float32(coefficient), "entropy": jnp.float32(jnp.inf)}

    def compute(
        logp, proximal_logp, advantage, mask, segment, fields, state
    ) -> tuple[Array, Metrics]:
        entropy = from_pass("adaptive_entropy", "policy_entropy", mask, fields)
        applied = jnp.where(state["entropy"] <= target, state["coefficient"], 0)
        applied = jax.lax.stop_gradient(applied).astype(entropy.dtype)
        metrics = _measured(entropy, mask) | {"entropy_coefficient": mean(applied, mask)}
        return -applied * entropy, metrics

    def observe(state: Any, metrics: Metrics) -> dict[str, Array]:
        entropy, some = _mean_entropy(metrics)
        moved = jnp.clip(state["coefficient"] + delta * jnp.sign(target - entropy), low, high)
        new = {"coefficient": moved, "entropy": entropy}
        return {name: jnp.where(some, new[name], state[name]) for name in new}

    return Penalty("adaptive_entropy", compute, NEEDS, init, observe)


def _check_adaptive(
    target: float, coefficient: float, delta: float, low: float, high: float
) -> None:
    if not (0 <= low <= coefficient <= high < math.inf):
        raise InputError(
            f"adaptive_entropy: low = {low}, coefficient = {coefficient}, high = {high}; expected "
            "0 <= low <= coefficient <= high"
        )
    for name, value in {"target": target, "delta": delta}.items():
        if not 0 < value < math.inf:
            raise InputError(f"adaptive_entropy: {name} = {value}, expected a positive number")


def _mean_entropy(metrics: Metrics) -> tuple[Array, Array]:
    """([] float32 over all tokens of an update, [] bool whether there were any)."""
    measured = metrics["entropy"]
    assert isinstance(measured, Mean)
    entropy = measured.total / jnp.maximum(measured.weight, 1)
    return entropy.astype(jnp.float32), measured.weight > 0


def _measured(entropy: Array, mask: Array) -> Metrics:
    return {"entropy": mean(jax.lax.stop_gradient(entropy), mask)}
