"""Towards the filtered model: the base, restricted to right answers; and the base under a penalty.

Samples of another policy q, that of behavior_logp, are weighed with `off_policy`:

    w[p, g] = pi(y) / q(y),  a[p, g] = w (R - mean of w R over the other samples)

With R of alpha 0 and Z known w R is p(y) / q(y) - pi(y) / q(y): GDC++, whose second term is a
baseline of expectation 0. pi is read from trainer_logp, and log w is clamped to +-20. All-fail
groups are then 0 in expectation alone. The loss should have no ratio of its own.

v in {0, 1} is success, a the base, pi the policy sampled from, Z = P_a(v = 1) the base's success
rate on a prompt. The filtered model is p(y) = a(y) v(y) / Z, the target of `alpha_dpg` and `f_dpg`.

Its counterpart under a penalty of strength beta is the tilted base a(y) exp(v / beta), normalised,
which reaches max_q E_q v - beta KL(q || a). On one prompt it is fixed by beta or by its success
rate mu, and KL(filtered model || tilted base) = -log mu. `mu_of_beta`, `beta_of_mu`, `kappa` and
`target_validity` are the formulas of "Binary rewards: fundamental challenges", arXiv 2605.02375;
elementwise, in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.absolute import successes
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.errors import find
from jaxgrpo.core.metrics import Metrics, accumulate_dtype, mean, reduce, summed
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

DIVERGENCES: dict[str, Callable[[Array], Array]] = {
    "forward_kl": jnp.exp,
    "js": lambda log_odds: jax.nn.softplus(log_odds) - jnp.log(2).astype(log_odds.dtype),
    "tv": lambda log_odds: jnp.sign(log_odds) / 2,
    "chi2": lambda log_odds: jnp.expm1(2 * log_odds),
}
"""Name -> pseudo-reward -f'(pi / p) as a function of log(p / pi), -inf on failures.

D_f(pi || p) = sum p f(pi / p): KL(p || pi), 2 JS, TV and chi2(p || pi). KL(pi || p) and
chi2(pi || p) are missing: on a failure they are infinite.
"""
_ESTIMATES = ("group", "running")
_HALVINGS = 64
_TERMS = 9  # of the series of `_deviance`: below 1e-18 of the first where |ratio| < 0.1


def alpha_dpg(
    alpha: Scheduled = 0.5,
    cap: float = 10.0,
    z: str = "group",
    base_rate: str | None = None,
    floor: float = 1e-4,
    threshold: Scheduled | None = None,
    off_policy: bool = False,
) -> AdvantageTransform:
    """alpha-DPG: towards the filtered model, from covering it to just succeeding.

        R[p, g] = min((p(y) / pi(y))^(1 - alpha) - 1, cap)
        a[p, g] = R[p, g] - mean of R over the other samples

    R is -1 on failures. All-fail groups give exactly 0; all-pass groups do not: each sample is
    pushed to its odds under the base. A single sample keeps its R. Its expected gradient is
    -(1 - alpha) times that of the alpha-divergence of pi from p, up to the bias of cap and Z; alpha
    0 is -grad KL(p || pi), 1 leave-one-out REINFORCE on v. What the base cannot say is a failure.

    Args:
      alpha: in [0, 1), a number; or a function of the step, which may reach 1: R = v - 1.
      cap: the highest R. It bites where the policy has left what the base finds likely.
      z: how log Z is estimated from a v / pi, at most 0: "group", the mean over this group;
        "running", over all of the row's samples so far, these too; not with `rollout.refill`.
      base_rate: a field [P] that holds Z instead, as measured before; NaN masks the prompt.
      floor: Z where the estimate is 0, in a group without success.
      threshold: the lowest value that is a success; None: values must be 0 or 1.
      off_policy: whether samples of another policy are weighed, as the module says.

    Fields: base_logp [P, G, T] against behavior_logp; trainer_logp if off_policy.
    Signal: [P, G] -> [P, G]; a value that is neither 0 nor 1 is an InputError, under jit masked and
    counted ("refused"); a sample whose sums are NaN is masked.
    Metrics: z, refused, capped, unsupported (successes of base probability 0), weight (mean w).
    Source: arXiv 2512.05962; cap 10 and floor 1e-4 are its code's. Off policy: GDC++, arXiv
    2206.00761. Z from a field is ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> logp = {name: [[[-1.0], [-1.0]]] for name in ("base_logp", "behavior_logp")}
    >>> evaluate(alpha_dpg(0.0), [[1.0, 0.0]], token_mask=[[[True], [True]]], **logp)[0].tolist()
    [[2.0, -2.0]]
    """
    base.check("alpha_dpg", "a number in [0, 1)", lambda alpha: 0 <= alpha < 1, alpha=alpha)

    def pseudo_reward(log_odds: Array, rollouts: Rollouts) -> Array:
        # A schedule may arrive at 1: R is 0 on successes then and, 0 times -inf being NaN, -1 else.
        possible = log_odds > -jnp.inf
        power = 1 - base.at_step(alpha, rollouts, log_odds.dtype)
        return jnp.where(possible, jnp.expm1(power * jnp.where(possible, log_odds, 0)), -1)

    return _towards("alpha_dpg", pseudo_reward, cap, z, base_rate, floor, threshold, off_policy)


def f_dpg(
    divergence: str = "js",
    cap: float = 10.0,
    z: str = "group",
    base_rate: str | None = None,
    floor: float = 1e-4,
    threshold: Scheduled | None = None,
    off_policy: bool = False,
) -> AdvantageTransform:
    """f-DPG: towards the filtered model, down the gradient of an f-divergence.

        R[p, g] = min(-f'(pi(y) / p(y)), cap),  a[p, g] = R[p, g] - mean of R over the other samples

        forward_kl  p / pi                    0 on failures
        js          log((1 + p / pi) / 2)     -log 2
        tv          sign(log p / pi) / 2      -1/2; jumps where the policy agrees with p
        chi2        (p / pi)^2 - 1            -1

    Otherwise as `alpha_dpg`, whose alpha 0 is forward_kl less 1.

    Args:
      divergence: one of `DIVERGENCES`.
      cap, z, base_rate, floor, threshold, off_policy: as in `alpha_dpg`.

    Source: Go et al. 2023, arXiv 2302.08215, which takes estimates of Z over all batches and has
    no cap. Here js is the gradient of 2 JS, as in the authors' code.

    >>> from jaxgrpo.advantages import evaluate
    >>> logp = {name: [[[-1.0], [-1.0]]] for name in ("base_logp", "behavior_logp")}
    >>> evaluate(f_dpg("tv"), [[1.0, 0.0]], token_mask=[[[True], [True]]], **logp)[0].tolist()
    [[1.0, -1.0]]
    """
    find("f_dpg divergence (infinite ones left out)", divergence, DIVERGENCES)
    pseudo_reward = lambda log_odds, rollouts: DIVERGENCES[divergence](log_odds)  # noqa: E731
    return _towards("f_dpg", pseudo_reward, cap, z, base_rate, floor, threshold, off_policy)


def base_rates(name: str, field: str, rollouts: Rollouts, like: Array) -> Array:
    """The field of base success rates, [P, 1], in [0, 1]; NaN where it was not measured."""
    rate = base.read_field(
        name, field, rollouts, like.shape[:1], "one base success rate per prompt, [P]"
    )
    clipped = jnp.clip(rate.astype(like.dtype), 0, 1)
    return jnp.where(jnp.isfinite(rate), clipped, jnp.nan)[:, None]


def log_odds_of_base(name: str, rollouts: Rollouts) -> tuple[Array, Array]:
    """(log(a / q) of each whole completion, where it is known), [P, G]; an empty one has 0.

    q is the policy that sampled. -inf where the base cannot say it. Not known: what is NaN, and a
    log q that is not finite.
    """
    return _log_odds(name, "base_logp", rollouts)


def _log_odds(name: str, field: str, rollouts: Rollouts) -> tuple[Array, Array]:
    """As `log_odds_of_base`, of the policy that a field is of."""
    tokens = base.read(name, rollouts, "token_mask").astype(bool)
    policy_logp = base.read_field(name, field, rollouts, tokens.shape, "[P, G, T]")
    policy_logp = stats.widen(policy_logp)
    sampler_logp = stats.widen(base.read(name, rollouts, "behavior_logp"))
    dtype = jnp.promote_types(policy_logp.dtype, sampler_logp.dtype)
    totals = reduce(
        *(summed(logp.astype(dtype), tokens) for logp in (policy_logp, sampler_logp)), axis=-1
    )
    policy_logp, sampler_logp = (total[..., 0] for total in totals)
    return policy_logp - sampler_logp, ~jnp.isnan(policy_logp) & jnp.isfinite(sampler_logp)


def mu_of_beta(beta: Any, base_rate: Any) -> Array:
    """The success rate of the tilted base: sigmoid(logit(base_rate) + 1 / beta).

    1 at beta = 0 and base_rate at beta = inf; a base that always fails, or never does, stays.

    >>> round(float(mu_of_beta(0.5, 0.1)), 4)
    0.4509
    """
    beta, base_rate = _wide(beta, base_rate)
    push = jnp.where(beta > 0, 1 / jnp.where(beta > 0, beta, 1), jnp.inf)
    return _tilted(base_rate, push)


def beta_of_mu(mu: Any, base_rate: Any) -> Array:
    """The penalty under which the tilted base succeeds at rate mu: its inverse.

        beta = 1 / (logit(mu) - logit(base_rate)),  mu in [base_rate, 1]

    inf at mu = base_rate and 0 at mu = 1; NaN outside, where no penalty leads. It belongs to one
    prompt: for many see `target_validity`.

    >>> round(float(beta_of_mu(0.4509, 0.1)), 3)
    0.5
    """
    mu, base_rate = _wide(mu, base_rate)
    push = _logit(mu) - _logit(base_rate)
    inside = (mu > base_rate) & (mu <= 1) & (base_rate > 0)
    beta = 1 / jnp.where(inside, push, 1)
    return jnp.where(mu == base_rate, jnp.inf, jnp.where(inside, beta, jnp.nan))


def kappa(mu: Any, base_rate: Any) -> Array:
    """KL(tilted base || base) in nats: that of two coins.

        kappa = mu log(mu / base_rate) + (1 - mu) log((1 - mu) / (1 - base_rate))

    Keeps its digits where mu is near base_rate and both terms cancel. inf where mu says what
    base_rate cannot.

    >>> round(float(kappa(0.5, 0.1)), 4)
    0.5108
    """
    mu, base_rate = _wide(mu, base_rate)
    gap = mu - base_rate
    return _deviance(mu, base_rate, gap) + _deviance(1 - mu, 1 - base_rate, -gap)


class Validity(NamedTuple):
    """What `target_validity` found."""

    beta: Array  # [], the one penalty for all prompts
    mu: Array  # [P], the success rate of each prompt's tilted base; 0 where left out
    left_out: Array  # [] int32, prompts whose base never succeeds: no penalty moves them


def target_validity(target: Any, base_rates: Any) -> Validity:
    """One penalty under which the tilted bases succeed at rate `target`, averaged over prompts.

        mean over prompts with base_rate > 0 of mu_of_beta(beta, base_rate) = target

    By bisection on 1 / beta; the mean only grows with it. A target that the bases reach without
    any tilt gives beta = inf and mu = base_rates; so do bases that all fail.

    Args:
      target: in (0, 1); traced, a target of 1 or more gives beta = 0, and mu = 1 throughout.
      base_rates: [P], in [0, 1]; zeros are left out and counted.

    Raises: InputError on a number outside (0, 1).

    >>> validity = target_validity(0.9, jnp.array([0.0, 0.2, 0.6]))
    >>> round(float(validity.mu[1:].mean()), 5), int(validity.left_out)
    (0.9, 1)
    """
    if isinstance(target, float | int):
        base.check("target_validity", "a rate in (0, 1)", lambda rate: 0 < rate < 1, target=target)
    target, rates = _wide(target, base_rates)
    able = rates > 0
    number = jnp.maximum(able.sum(dtype=jnp.int32), 1).astype(rates.dtype)

    def rate(push: Array) -> Array:
        return jnp.where(able, _tilted(rates, push), 0).sum() / number

    logits, target_logit = _logit(rates), _logit(target)
    # Pushed as far, the weakest base that is able succeeds at the target, and the others above it.
    far = jnp.maximum(target_logit - jnp.where(able, logits, jnp.inf).min(initial=jnp.inf), 0)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) / 2
        enough = rate(middle) >= target
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    farthest = jnp.where(jnp.isfinite(far), far, 0)
    low, high = lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(farthest), farthest))
    push = low + (high - low) / 2
    untilted = jnp.where(able, rates, 0).sum() / number
    push = jnp.where((untilted >= target) | ~able.any(), 0, push)
    push = jnp.where((target >= 1) & able.any(), jnp.inf, push)
    mu = jnp.where(able, _tilted(rates, push), 0)
    return Validity(1 / push, mu, (~able).sum(dtype=jnp.int32))


def _towards(
    name: str,
    pseudo_reward: Callable[[Array, Rollouts], Array],
    cap: float,
    z: str,
    base_rate: str | None,
    floor: float,
    threshold: Scheduled | None,
    off_policy: bool,
) -> AdvantageTransform:
    """The transform of a pseudo-reward of log(p / pi)."""
    base.check(name, "a finite number above 0", lambda cap: 0 < cap < float("inf"), cap=cap)
    init, estimate = _estimator(name, z, base_rate, floor)

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        signal, success, refused = successes(name, signal, threshold, rollouts)
        log_odds, has_odds = log_odds_of_base(name, rollouts)
        mask = signal.mask & has_odds
        if base_rate:
            mask = mask & jnp.isfinite(base_rates(name, base_rate, rollouts, log_odds))
        supported = success & (log_odds > -jnp.inf)
        log_weight = jnp.where(supported & mask, log_odds, -jnp.inf)
        drawn = base.fresh_mask(mask, rollouts)
        drawn_weight = jnp.where(drawn, log_weight, -jnp.inf)
        log_z, state = estimate(drawn_weight, drawn, state, rollouts)
        log_ratio, weight, weights = jnp.zeros_like(log_odds), None, {}
        if off_policy:
            log_ratio, weight = _ratio(name, rollouts)
            mask = mask & jnp.isfinite(weight)
            weights = {"weight": mean(weight, mask)}
        raw = pseudo_reward(log_weight - log_ratio - log_z, rollouts)
        reward = jnp.where(mask, jnp.minimum(raw, cap), 0)
        value = _less_others(reward, weight, mask)
        metrics = {
            "z": mean(jnp.exp(log_z), stats.count(mask) > 0),
            **refused,
            "capped": mean(raw > cap, mask),
            "unsupported": mean(success & ~supported, mask),
            **weights,
        }
        signal = Signal(value=value.astype(signal.value.dtype), mask=mask)
        return signal, state, metrics

    needs = base.needed_fields("base_logp", base_rate, "trainer_logp" if off_policy else None)
    part = AdvantageTransform(name, init, update, needs, levels=(2,))
    counts_flat = z == "running" and not base_rate
    return part._replace(importance=off_policy, counts_flat=counts_flat)


def _ratio(name: str, rollouts: Rollouts) -> tuple[Array, Array]:
    """(log w, w) of each sample, w = pi / q of the trained policy; NaN where it is not known."""
    log_ratio, has_ratio = _log_odds(name, "trainer_logp", rollouts)
    clamped = jnp.clip(log_ratio, -stats.LOG_RATIO_LIMIT, stats.LOG_RATIO_LIMIT)
    return jnp.where(has_ratio, clamped, 0), jnp.where(has_ratio, jnp.exp(clamped), jnp.nan)


def _less_others(reward: Array, weight: Array | None, mask: Array) -> Array:
    """w (R - mean of w R over the other samples), or w R of a single one; 0 where masked.

    Args:
      reward: 0 where masked.
      weight: None: 1, and flat groups are exactly 0.
    """
    number = stats.count(mask)
    weight = None if weight is None else jnp.where(mask, weight, 0)
    weighed = reward if weight is None else weight * reward
    other_count = (number - 1).astype(reward.dtype)
    leave_one_out_mean = (weighed.sum(1, keepdims=True) - weighed) / jnp.maximum(other_count, 1)
    value = jnp.where(number > 1, reward - leave_one_out_mean, reward)
    if weight is not None:
        return weight * value
    return jnp.where(stats.is_flat(reward, mask) & (number > 1), 0, value)


State = dict[str, Array]
Estimate = Callable[[Array, Array, State, Rollouts], tuple[Array, State]]
"""(log of a v / pi [P, G], mask, state, rollouts) -> (log Z [P, 1], state after these samples)"""


def _estimator(
    name: str, z: str, base_rate: str | None, floor: float
) -> tuple[Callable[[RolloutSpec], State], Estimate]:
    """The first state and the estimate of log Z, at most 0."""
    find(f"{name} z", z, dict.fromkeys(_ESTIMATES))
    base.check(name, "a success rate in (0, 1]", lambda floor: 0 < floor <= 1, floor=floor)
    running = z == "running" and not base_rate
    alternative = "take z = 'group', or a data set"
    rows = base.row_state(f"{name}: z = 'running'", alternative, "total", "count")

    def estimate(
        log_weight: Array, mask: Array, state: State, rollouts: Rollouts
    ) -> tuple[Array, State]:
        dtype = log_weight.dtype
        number = stats.count(mask).astype(dtype)
        if base_rate:
            log_z = jnp.log(base_rates(name, base_rate, rollouts, log_weight))
        else:
            total = jax.nn.logsumexp(log_weight, axis=1, keepdims=True)
            log_z = jnp.minimum(total - jnp.log(jnp.maximum(number, 1)), 0)
        if running:
            row, successes = base.read(name, rollouts, "row"), jnp.exp(log_z) * number
            state = base.add_at_rows(state, row, total=successes[:, 0], count=number[:, 0])
            rate = state["total"] / jnp.maximum(state["count"], 1)
            log_z = jnp.log(rate[row].astype(dtype))[:, None]
        return jnp.where(log_z > -jnp.inf, log_z, jnp.log(jnp.asarray(floor, dtype))), state

    return rows if running else lambda spec: {}, estimate


def _wide(*values: Any) -> tuple[Array, ...]:
    """Arrays of one dtype: the widest of those given as arrays, at least float32."""
    dtypes = [value.dtype for value in values if hasattr(value, "dtype")]
    dtype = accumulate_dtype(jnp.result_type(float, *dtypes))
    return tuple(jnp.asarray(value).astype(dtype) for value in values)


def _logit(rate: Array) -> Array:
    return jnp.log(rate) - jnp.log1p(-rate)


def _tilted(rate: Array, push: Array) -> Array:
    """sigmoid(logit(rate) + push), push in [0, inf]; rates 0 and 1 stay."""
    inner = (rate > 0) & (rate < 1)
    logits = _logit(jnp.where(inner, rate, 0.5))
    return jnp.where(inner, jax.nn.sigmoid(logits + push), rate)


def _deviance(x: Array, m: Array, gap: Array) -> Array:
    """x log(x / m) + m - x >= 0, gap = x - m; by a series where they are near (Loader 2000)."""
    total = jnp.where(x + m > 0, x + m, 1)
    ratio = gap / total
    square = ratio * ratio
    series = jnp.zeros_like(ratio)
    for term in range(_TERMS, 0, -1):
        series = square * (1 / (2 * term + 1) + series)
    near = gap * ratio + 2 * x * ratio * series
    safe = jnp.where((x > 0) & (m > 0), x / jnp.where(m > 0, m, 1), 1)
    far = jnp.where((x > 0) & (m <= 0), jnp.inf, x * jnp.log(safe) - gap)
    return jnp.where(jnp.abs(ratio) < 0.1, near, far)
