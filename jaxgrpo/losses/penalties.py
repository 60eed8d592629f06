"""Penalties per token, added to the surrogate: distance to the reference, lack of entropy.

Each is named for the gradient it has; docs/losses.md has the table, computed by enumeration. With
l = logp - reference_logp at tokens sampled from the current policy: `k2` has, per state, the
gradient of the reverse KL(policy || reference), over whole sequences that of the sequences' KL;
`forward_kl_k3`, GRPO's usual estimator, that of the forward KL(reference || policy), though its
value estimates the reverse one. `reverse_kl_off_policy` has value and gradient of the reverse KL
from tokens of an older policy. `full_kl` is no estimate: it sums over the vocabulary.

`entropy_bonus` and `adaptive_entropy` read the exact entropy over the whole vocabulary,
fields["policy_entropy"], which the update's own pass makes, with its gradient. As `k2` they leave
out what a token does to the entropy of later states.

Arguments, shapes and treatment of masked entries are those of a surrogate. Log ratios of tokens are
clamped to +-20 and counted (metric kl_clamped): a reference that gives a token no probability
costs no more than that, and its pull stays finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, Metrics, accumulate_dtype, mean
from jaxgrpo.core.scores import policy_field
from jaxgrpo.losses.sequences import check_level, segment_sum
from jaxgrpo.losses.surrogates import LOG_RATIO_LIMIT, Tokens, clamp_log_ratio

FLOOR = -1e30
"""Log-probs below it, -inf too, count as this: a difference of two infinities would be NaN."""

ENTROPY = frozenset({"policy_entropy"})


class Penalty(NamedTuple):
    """A term added to the surrogate, which shares its token weights."""

    name: str
    compute: Callable[..., tuple[Array, Mapping[str, Any]]]
    """(tokens: Tokens) -> (penalty per token, metrics); with `init` (tokens, state)"""
    needs: frozenset[str] = frozenset()  # fields that must be produced for it
    init: Callable[[], Any] | None = None
    """() -> state, a tree of arrays, if it remembers something"""
    observe: Callable[[Any, Metrics], Any] | None = None
    """(state, metrics of a whole update) -> the state of the next; given exactly with `init`"""
    per_token: bool = False  # whether a token's penalty depends on no other token
    counts: tuple[tuple[str, int], ...] = ()
    """scores of likeliest tokens that it reads, and k of each. The update's pass then gives the
    field `core.scores.policy_field` [..., k + 1] beside it."""
    at_student_tokens: frozenset[str] = frozenset()
    """of `counts` those at the k likeliest tokens of the policy before the update, not the
    scorer's"""


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
    them whose log ratio was clamped: their pull stays at beta 20.
    Raises: InputError on a negative beta, another level, and if fields lack reference_logp.
    Source: Schulman, Approximating KL divergence, 2020 (joschu.net/blog/kl-approx.html).

    >>> tokens = Tokens.from_ratios([math.exp(2)], reference_logp=0.0)  # l = 2
    >>> value, _ = k2(0.1).compute(tokens)
    >>> round(float(value[0]), 3)  # 0.1 * 2 * 2 / 2
    0.2
    """

    def rule(tokens: Tokens, ratio: _Ratio) -> tuple[Array, Array, Array]:
        return ratio.share * 0.5 * jnp.square(ratio.log), ratio.log, ratio.clamped

    return _kl_penalty("k2", beta, level, rule)


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
    Raises: InputError on a negative beta, another level, and if fields lack reference_logp.
    Source: Shao et al. 2024, arXiv 2402.03300, equation 4, per token, without a clamp.

    >>> tokens = Tokens.from_ratios([math.exp(2)], reference_logp=0.0)  # l = 2
    >>> value, _ = forward_kl_k3(1.0).compute(tokens)
    >>> round(float(value[0]), 3)  # exp(-2) - 1 + 2
    1.135
    """

    def rule(tokens: Tokens, ratio: _Ratio) -> tuple[Array, Array, Array]:
        low = ratio.log < -LOG_RATIO_LIMIT
        slope = jnp.where(low, 0, -jnp.expm1(-jnp.maximum(ratio.log, -LOG_RATIO_LIMIT)))
        return ratio.share * _k3(ratio.log), slope, ratio.clamped | (tokens.mask & low)

    return _kl_penalty("forward_kl_k3", beta, level, rule)


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

    Log ratios to the proximal policy (of the sequence: their sum) are clamped to +-20, as weights:
    what lies beyond keeps its pull. Counted in kl_clamped too.
    Metrics: kl, the k3 value per token without beta and ratio; kl_clamped, as above.
    Raises: InputError on a negative beta, another level, and if fields lack reference_logp.
    Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1, per token.

    >>> tokens = Tokens.from_ratios([0.5], reference_logp=0.0)  # rho = 0.5, l = -log 2
    >>> value, _ = reverse_kl_off_policy(1.0).compute(tokens)
    >>> round(float(value[0]), 3)  # 0.5 (2 - 1 - log 2)
    0.153
    """

    def rule(tokens: Tokens, ratio: _Ratio) -> tuple[Array, Array, Array]:
        step = _finite_log_ratio(tokens, tokens.proximal_logp)
        if level == "sequence":
            step = segment_sum(step, tokens.mask, tokens.segment)
        step, far = clamp_log_ratio(step, tokens.mask)
        weight = jnp.exp(step)
        value = ratio.share * weight * _k3(ratio.log)
        return value, weight * ratio.log, ratio.clamped | far

    return _kl_penalty("reverse_kl_off_policy", beta, level, rule)


def full_kl(beta: float) -> Penalty:
    """The reverse KL at each visited state, summed over the vocabulary, not estimated.

        beta sum_v policy(v) (log policy(v) - log reference(v))

    Value and gradient without the noise of the token that was sampled. As `k2` it leaves out what
    a token does to later states. It costs the reference's forward pass inside the update and both
    heads over the vocabulary once more.

    Args:
      beta: weight against the surrogate; not negative.

    Reads fields["full_kl"], differentiated, which the update's own pass makes
    (`jaxgrpo.models.distributions.full_kl`).
    Metrics: kl, the value without beta, over unmasked tokens; kl_clamped, the policy's probability
    of tokens whose log ratio was clamped at 20.
    Raises: InputError on a negative beta, and if fields lack full_kl.
    Source: the definition.

    >>> value, _ = full_kl(0.25).compute(Tokens.from_ratios([1.0], full_kl=2.0))
    >>> value.tolist()
    [0.5]
    """
    _check("full_kl", beta, "token")

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        value = _from_pass("full_kl", "full_kl", tokens)
        clamped = jax.lax.stop_gradient(tokens.fields.get("full_kl_clamped", jnp.zeros_like(value)))
        metrics: Metrics = {"kl": mean(jax.lax.stop_gradient(value), tokens.mask)}
        return beta * value, metrics | {"kl_clamped": mean(clamped, tokens.mask)}

    return Penalty("full_kl", compute, frozenset({"full_kl"}))


def top_k_divergence(
    beta: float, alpha: float = 0.0, score: str = "teacher_top", k: int = 20, top: str = "teacher"
) -> Penalty:
    """The divergence from another model at each token, of distributions shortened to k likeliest
    tokens and one entry for all others together.

        p the policy, q the other model; l_v = log q_v - log p_v, v over k tokens and the tail
        alpha 0:        beta sum_v q_v l_v                            forward, KL(q || p)
        alpha 1:        beta sum_v -p_v l_v                           reverse, KL(p || q)
        between:        beta sum_v ((1 - alpha) p_v log(p_v / m_v) + alpha q_v log(q_v / m_v)),
                        m = (1 - alpha) p + alpha q                   JSD(alpha)

    At most the divergence of the whole distributions, and equal to it for k = V - 1. The forward KL
    weighs tokens by q, the reverse one by p: the same end of k tokens loses least. Value and
    gradient are exactly 0 where p = q. As `full_kl` it leaves out what a token does to later
    states. It acts at any tokens: the policy's samples, or texts of the data (`data.completion`).
    Where the other model has no prompt for a sample (NaN in the field) there is none, and the
    reduction counts its tokens, unless the chain has `mask_untaught`.

    Args:
      beta: weight against the surrogate; not negative.
      alpha: in [0, 1].
      score: an entry of `[[scores]]` with quantity = "likeliest", by q.
      k: tokens that are compared one by one; below V. They take 8 (k + 1) bytes at each token.
      top: whose k tokens: "teacher", q's likeliest, or "student", p's before the step, which takes
        one more pass of the policy; all updates of the step compare the same ones.

    Reads a field of the score's name, of the shape `[..., 2, k + 1]`, and one of "policy:" and that
    name, `[..., k + 1]`, differentiated, which the update's own pass makes
    (`jaxgrpo.models.distributions.shortened`).
    Metrics: kl, the value without beta, over unmasked tokens that the other model scores;
    kl_clamped, their share with a |l_v| above 20, which counts as 20.
    Raises: InputError on a value that is not allowed, and without the fields.
    Source: SDPO, arXiv 2601.20802, with k = 100, alpha = 0.5 and top = "student", whose tokens are
    of the parameters of the moment; GKD, arXiv 2306.13649, whose beta is our alpha.

    >>> import dataclasses
    >>> log_q = jnp.array([[[7, -1], [math.log(0.75), math.log(0.25)]]])  # token 7, and all others
    >>> fields = {"teacher_top": log_q, "policy:teacher_top": jnp.log(jnp.array([[0.5, 0.5]]))}
    >>> tokens = dataclasses.replace(Tokens.from_ratios([1.0]), fields=fields)
    >>> value, _ = top_k_divergence(1.0, k=1).compute(tokens)
    >>> round(float(value[0]), 3)  # 0.75 log 1.5 + 0.25 log 0.5
    0.131
    """
    _check("top_k_divergence", beta, "token")
    _check_top_k(alpha, k, top)
    compute, needs = functools.partial(_compare, beta, alpha, score), frozenset({score})
    penalty = Penalty("top_k_divergence", compute, needs, counts=((score, k),))
    return penalty if top == "teacher" else penalty._replace(at_student_tokens=needs)


def _check_top_k(alpha: float, k: int, top: str) -> None:
    if not (0 <= alpha <= 1 and isinstance(k, Integral) and k >= 1):
        raise InputError(
            f"top_k_divergence: alpha = {alpha}, k = {k}; expected 0 (forward) <= alpha <= 1 "
            "(reverse), and one token or more, a whole number"
        )
    if top not in ("teacher", "student"):
        raise InputError(f'top_k_divergence: top = {top!r}; expected "teacher" or "student"')


def _compare(beta: float, alpha: float, score: str, tokens: Tokens) -> tuple[Array, Metrics]:
    """`top_k_divergence` of tokens."""
    about = "log-probs of the likeliest tokens and of the others, of a score likeliest"
    target = tokens.field(score, "top_k_divergence", about)[..., 1, :]
    policy = tokens.field(policy_field(score), "top_k_divergence", about)
    mask, dtype = tokens.mask & jnp.isfinite(target[..., 0]), accumulate_dtype(policy.dtype)
    log_p, log_q = (jnp.where(mask[..., None], x, 0).astype(dtype) for x in (policy, target))
    value, slope, far = _divergence(alpha, *jax.lax.stop_gradient((log_p, log_q)))
    value = jnp.where(mask, value, 0)
    pull = (slope * (log_p - jax.lax.stop_gradient(log_p))).sum(-1)
    metrics: Metrics = {"kl": mean(value, mask), "kl_clamped": mean(far.astype(dtype), mask)}
    return beta * (value + pull), metrics


def _divergence(alpha: float, log_p: Array, log_q: Array) -> tuple[Array, Array, Array]:
    """(divergence, its derivative by each log p less what sums to 0, whether a ratio is clamped).

    d p_v sums to 0 over v, so that any constant may be taken from the derivative by p_v.
    """
    log_p, log_q = jnp.maximum(log_p, FLOOR), jnp.maximum(log_q, FLOOR)
    p, q, far = jnp.exp(log_p), jnp.exp(log_q), jnp.abs(log_q - log_p) > LOG_RATIO_LIMIT
    ratio = jnp.clip(log_q - log_p, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if alpha == 0:
        value, slope = q * ratio, p - q
    elif alpha == 1:
        value, slope = -p * ratio, -p * ratio
    else:
        mixed = jnp.log1p(alpha * jnp.expm1(ratio))  # log(m / p)
        slope = -(1 - alpha) * p * mixed
        value = slope + alpha * q * (ratio - mixed)
    return value.sum(-1), slope, far.any(-1)


def entropy_bonus(coefficient: float) -> Penalty:
    """Subtracts the entropy at each visited state.

        -coefficient H_t,   H_t = -sum_v policy(v) log policy(v)

    Args:
      coefficient: weight against the surrogate; below 0 it lowers the entropy.

    Metrics: entropy, in nats, over unmasked tokens.
    Raises: InputError unless the coefficient is finite, and if fields lack policy_entropy.
    Source: Williams and Peng 1991, Function optimization using connectionist reinforcement
    learning algorithms.

    >>> value, _ = entropy_bonus(0.25).compute(Tokens.from_ratios([1.0], policy_entropy=2.0))
    >>> value.tolist()
    [-0.5]
    """
    if not math.isfinite(coefficient):
        raise InputError(f"entropy_bonus: coefficient = {coefficient}, expected a finite number")

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        entropy = _from_pass("entropy_bonus", "policy_entropy", tokens)
        return -coefficient * entropy, _entropy_metric(entropy, tokens.mask)

    return Penalty("entropy_bonus", compute, ENTROPY, per_token=True)


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
      delta: how far it moves in each update.
      low, high: its bounds.

    State: coefficient [] and entropy [], float32.
    Metrics: entropy, over unmasked tokens; entropy_coefficient, the one applied (0 above target).
    Raises: InputError unless 0 <= low <= coefficient <= high, and target and delta are positive.
    Source: Skywork-OR1, arXiv 2505.22312, where e_k is measured in update k itself.

    >>> penalty = adaptive_entropy(1.0, delta=0.25)
    >>> tokens = Tokens.from_ratios([1.0], policy_entropy=0.5)
    >>> state = penalty.observe(penalty.init(), penalty.compute(tokens, penalty.init())[1])
    >>> float(state["coefficient"]), penalty.compute(tokens, state)[0].tolist()
    (0.25, [-0.125])
    """
    _check_adaptive(target, coefficient, delta, low, high)

    def compute(tokens: Tokens, state: Any) -> tuple[Array, Metrics]:
        entropy = _from_pass("adaptive_entropy", "policy_entropy", tokens)
        strength = jnp.where(state["entropy"] <= target, state["coefficient"], 0)
        strength = jax.lax.stop_gradient(strength).astype(entropy.dtype)
        coefficient_metric = {"entropy_coefficient": mean(strength, tokens.mask)}
        return -strength * entropy, _entropy_metric(entropy, tokens.mask) | coefficient_metric

    def observe(state: Any, metrics: Metrics) -> dict[str, Array]:
        entropy, has_tokens = _mean_entropy(metrics)
        moved = state["coefficient"] + delta * jnp.sign(target - entropy)
        new_state = {"coefficient": jnp.clip(moved, low, high), "entropy": entropy}
        return {name: jnp.where(has_tokens, new_state[name], state[name]) for name in new_state}

    init = functools.partial(_unmeasured, coefficient)
    return Penalty("adaptive_entropy", compute, ENTROPY, init, observe, True)


class _Ratio(NamedTuple):
    """Log ratios to the reference, without gradient, 0 where masked."""

    log: Array  # of the token, or at each token that of its sequence
    share: Array  # of its sequence's value that a token carries; 1 for values of tokens
    token: Array  # of the token
    clamped: Array  # bool, where a log ratio was beyond +-20


def _kl_penalty(
    name: str,
    beta: float,
    level: str,
    rule: Callable[[Tokens, _Ratio], tuple[Array, Array, Array]],
) -> Penalty:
    """A penalty made of log ratios to the reference.

    Args:
      rule: (tokens, ratio) -> (value, its derivative with respect to logp, tokens to count in
        kl_clamped), value and derivative without beta.
    """
    _check(name, beta, level)

    def compute(tokens: Tokens) -> tuple[Array, Metrics]:
        ratio = _to_reference(name, level, tokens)
        value, slope, clamped = rule(tokens, ratio)
        metrics: Metrics = {
            "kl": mean(_k3(ratio.token), tokens.mask),
            "kl_clamped": mean(clamped.astype(ratio.token.dtype), tokens.mask),
        }
        return beta * _with_slope(value, slope, tokens), metrics

    needs = frozenset({"reference_logp"})
    return Penalty(name, compute, needs, per_token=level == "token")


def _to_reference(name: str, level: str, tokens: Tokens) -> _Ratio:
    about = "the reference policy's log-probs in the shape of logp"
    reference = tokens.field("reference_logp", name, about)
    token, clamped = clamp_log_ratio(_finite_log_ratio(tokens, reference), tokens.mask)
    unit = jnp.ones_like(token)
    if level == "token":
        return _Ratio(token, unit, token, clamped)
    number = segment_sum(unit, tokens.mask, tokens.segment)
    sequence = segment_sum(token, tokens.mask, tokens.segment)
    return _Ratio(sequence, 1 / jnp.maximum(number, 1), token, clamped)


def _finite_log_ratio(tokens: Tokens, other_logp: Array) -> Array:
    """logp - other_logp in at least float32, without gradient, finite, 0 where masked."""
    current_logp, frozen_logp = map(tokens.without_gradient, (tokens.logp, other_logp))
    return jnp.maximum(current_logp, FLOOR) - jnp.maximum(frozen_logp, FLOOR)


def _with_slope(value: Array, slope: Array, tokens: Tokens) -> Array:
    """`value`, whose derivative with respect to logp is `slope`; 0 where masked.

    Written out, since over the sequence every token has the whole sequence's slope.
    """
    value, slope = jax.lax.stop_gradient((value, slope))
    # A logp of -inf would make a NaN of its own difference.
    finite = tokens.mask & jnp.isfinite(tokens.logp)
    carrier = jnp.where(finite, tokens.logp, 0).astype(value.dtype)
    slope_term = slope * (carrier - jax.lax.stop_gradient(carrier))
    return jnp.where(tokens.mask, value + slope_term, 0)


def _from_pass(name: str, quantity: str, tokens: Tokens) -> Array:
    """A quantity of the update's own pass, with its gradient, in at least float32; 0 where masked.

    Raises: InputError if the fields lack it.
    """
    about = "which the pass over the current policy makes, with its gradient"
    value = tokens.field(quantity, name, about)
    return jnp.where(tokens.mask, value, 0).astype(accumulate_dtype(value.dtype))


def _k3(log_ratio: Array) -> Array:
    log_ratio = jnp.maximum(log_ratio, -LOG_RATIO_LIMIT)
    return jnp.expm1(-log_ratio) + log_ratio


def _check(name: str, beta: float, level: str) -> None:
    if not (beta >= 0 and math.isfinite(beta)):
        raise InputError(f"{name}: beta = {beta}, expected a number >= 0; 0.001 to 0.05 is usual")
    check_level(name, level)


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


def _unmeasured(coefficient: float) -> dict[str, Array]:
    """The state before the first update; the entropy is above any target."""
    return {"coefficient": jnp.float32(coefficient), "entropy": jnp.float32(jnp.inf)}


def _mean_entropy(metrics: Metrics) -> tuple[Array, Array]:
    """([] float32 over all tokens of an update, [] bool whether there were any)."""
    measured = metrics["entropy"]
    assert isinstance(measured, Mean)
    entropy = measured.total / jnp.maximum(measured.weight, 1)
    return entropy.astype(jnp.float32), measured.weight > 0


def _entropy_metric(entropy: Array, mask: Array) -> Metrics:
    return {"entropy": mean(jax.lax.stop_gradient(entropy), mask)}
