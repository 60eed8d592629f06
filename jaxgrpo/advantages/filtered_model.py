"""Towards the filtered model: the base, restricted to right answers.

v in {0, 1} is success, a the base, pi the policy sampled from, Z = P_a(v = 1) the base's success
rate on a prompt. The filtered model is p(y) = a(y) v(y) / Z. Its counterpart under a penalty is
a(y) exp(v / beta), normalised; tilting.py ties beta to the success rate mu that it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.absolute import successes
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, read, read_field
from jaxgrpo.core import onepass
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.names import find
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


def alpha_dpg(
    alpha: Scheduled = 0.5,
    cap: float = 10.0,
    z: str = "group",
    base_rate: str | None = None,
    floor: float = 1e-4,
    threshold: Scheduled | None = None,
) -> AdvantageTransform:
    """alpha-DPG: towards the filtered model, from covering it to just succeeding.

        R[p, g] = min((p(y) / pi(y))^(1 - alpha) - 1, cap)
        a[p, g] = R[p, g] - mean of R over the other samples

    R is -1 on failures. All-fail groups give exactly 0; all-pass groups do not: each sample is
    pushed to its odds under the base. A single sample keeps its R. Its expected gradient is
    -(1 - alpha) times that of the alpha-divergence of pi from p, with cap and an estimated Z
    up to their bias; alpha 0 is -grad KL(p || pi), alpha -> 1 leave-one-out REINFORCE on v. What
    the base cannot say (log-prob -inf) counts as a failure.

    Args:
      alpha: in [0, 1), a number; or a function of the step, which may reach 1: R = v - 1.
      cap: the highest R. It bites where the policy has left what the base finds likely.
      z: how log Z is estimated from a v / pi, at most 0: "group", the mean over this group;
        "running", over all of the row's samples so far, these included.
      base_rate: name of a field [P] that holds Z instead, as measured before training. NaN, not
        measured, masks the prompt: it has no target.
      floor: Z where the estimate is 0, in a group without success.
      threshold: the lowest value that is a success; None: values must be 0 or 1.

    Fields: base_logp [P, G, T], summed over token_mask, against behavior_logp.
    Signal: [P, G] -> [P, G]; a value that is neither 0 nor 1 is an InputError, under jit masked and
    counted ("refused"); a sample whose sums are NaN is masked.
    Metrics: z, refused, capped, unsupported (successes of base probability 0), shares of samples.
    Source: arXiv 2512.05962; cap 10 and floor 1e-4 are its code's. Z from a field is ours.
    """
    if not callable(alpha) and not 0 <= alpha < 1:
        raise InputError(f"alpha_dpg: alpha = {alpha:g}, expected a number in [0, 1)")
    options = _Options("alpha_dpg", cap, z, base_rate, floor, threshold)

    def pseudo_reward(log_odds: Array, rollouts: Rollouts) -> Array:
        # A schedule may arrive at 1: R is 0 on successes then and, 0 times -inf being NaN, -1 else.
        possible = log_odds > -jnp.inf
        power = 1 - at_step(alpha, rollouts, log_odds.dtype)
        return jnp.where(possible, jnp.expm1(power * jnp.where(possible, log_odds, 0)), -1)

    return _towards(options, pseudo_reward)


def f_dpg(
    divergence: str = "js",
    cap: float = 10.0,
    z: str = "group",
    base_rate: str | None = None,
    floor: float = 1e-4,
    threshold: Scheduled | None = None,
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
      cap, z, base_rate, floor, threshold: as in `alpha_dpg`.

    Source: Go et al. 2023, arXiv 2302.08215, which takes estimates of Z over all batches and has
    no cap. Here js is the gradient of 2 JS, as in the authors' code.
    """
    find("f_dpg divergence (infinite ones left out)", divergence, DIVERGENCES)
    options = _Options("f_dpg", cap, z, base_rate, floor, threshold)
    return _towards(options, lambda log_odds, rollouts: DIVERGENCES[divergence](log_odds))


class _Options(NamedTuple):
    name: str
    cap: float
    z: str
    base_rate: str | None
    floor: float
    threshold: Scheduled | None


def _towards(
    options: _Options, pseudo_reward: Callable[[Array, Rollouts], Array]
) -> AdvantageTransform:
    """The transform of a pseudo-reward of log(p / pi)."""
    name, cap, z, base_rate, floor, _ = options
    find(f"{name} z", z, dict.fromkeys(_ESTIMATES))
    if not 0 < cap < float("inf"):
        raise InputError(f"{name}: cap = {cap:g}, expected a finite number above 0")
    if not 0 < floor <= 1:
        raise InputError(f"{name}: floor = {floor:g}, expected a success rate in (0, 1]")
    return AdvantageTransform(
        name,
        partial(_init, options),
        partial(_update, options, pseudo_reward),
        needs=frozenset({"base_logp"} | ({base_rate} if base_rate else set())),
        levels=(2,),
    )


def _init(options: _Options, spec: RolloutSpec) -> dict[str, Array]:
    if options.z != "running" or options.base_rate:
        return {}
    if spec.num_rows is None:
        raise InputError(
            f"{options.name}: z = 'running' remembers each row of the data, but a stream returns"
            " none: take z = 'group', or a data set"
        )
    zeros = jnp.zeros(spec.num_rows, jnp.result_type(float))
    return {"total": zeros, "count": zeros}


def _update(
    options: _Options,
    pseudo_reward: Callable[[Array, Rollouts], Array],
    signal: Signal,
    state: dict[str, Array],
    rollouts: Rollouts,
) -> tuple[Signal, Any, Metrics]:
    signal, success, refused = successes(options.name, signal, options.threshold, rollouts)
    base, policy = sequences(options.name, rollouts)
    mask = signal.mask & ~jnp.isnan(base) & jnp.isfinite(policy)
    if options.base_rate:
        mask = mask & jnp.isfinite(_rate(options, rollouts, base))
    supported = success & (base > -jnp.inf)
    log_weight = jnp.where(supported & mask, base - policy, -jnp.inf)
    log_z, state = _log_z(options, log_weight, mask, state, rollouts)
    raw = pseudo_reward(log_weight - log_z, rollouts)
    reward = jnp.where(mask, jnp.minimum(raw, options.cap), 0)
    number = stats.count(mask)
    others = (number - 1).astype(reward.dtype)
    left_out = (reward.sum(1, keepdims=True) - reward) / jnp.maximum(others, 1)
    value = jnp.where(number > 1, reward - left_out, reward)
    value = jnp.where(stats.is_flat(reward, mask) & (number > 1), 0, value)
    value = jnp.where(mask, value, 0).astype(signal.value.dtype)
    metrics = {
        "z": mean(jnp.exp(log_z), number > 0),
        **refused,
        "capped": mean(raw > options.cap, mask),
        "unsupported": mean(success & ~supported, mask),
    }
    return dataclasses.replace(signal, value=value, mask=mask), state, metrics


def _log_z(
    options: _Options, log_weight: Array, mask: Array, state: dict[str, Array], rollouts: Rollouts
) -> tuple[Array, dict[str, Array]]:
    """log Z [P, 1], at most 0, and the state after these samples."""
    floor = jnp.log(jnp.asarray(options.floor, log_weight.dtype))
    number = stats.count(mask).astype(log_weight.dtype)
    if options.base_rate:
        rate = _rate(options, rollouts, log_weight)
        return jnp.where(rate > 0, jnp.log(jnp.where(rate > 0, rate, 1)), floor), state
    log_z = jax.nn.logsumexp(log_weight, axis=1, keepdims=True) - jnp.log(jnp.maximum(number, 1))
    log_z = jnp.minimum(log_z, 0)
    if options.z == "running":
        row = read(options.name, rollouts, "row")
        add = {"total": jnp.exp(log_z) * number, "count": number}
        state = {
            name: old.at[row].add(add[name][:, 0].astype(old.dtype)) for name, old in state.items()
        }
        rate = state["total"] / jnp.maximum(state["count"], 1)
        log_z = jnp.log(rate[row].astype(log_weight.dtype))[:, None]
    return jnp.where(log_z > -jnp.inf, log_z, floor), state


def _rate(options: _Options, rollouts: Rollouts, like: Array) -> Array:
    """The field of base success rates, [P, 1]; NaN where it was not measured."""
    rate = read_field(options.name, str(options.base_rate), rollouts)
    if rate.shape != like.shape[:1]:
        raise InputError(
            f"{options.name}: {options.base_rate} has shape {rate.shape}, expected one base"
            f" success rate per prompt, [P] = {like.shape[:1]}"
        )
    known = jnp.isfinite(rate)
    return jnp.where(known, jnp.clip(rate.astype(like.dtype), 0, 1), jnp.nan)[:, None]


def sequences(name: str, rollouts: Rollouts) -> tuple[Array, Array]:
    """log a and log pi of each whole completion, [P, G]; an empty one has 0."""
    tokens = read(name, rollouts, "token_mask").astype(bool)
    base = stats.widen(read_field(name, "base_logp", rollouts))
    policy = stats.widen(read(name, rollouts, "behavior_logp"))
    dtype = jnp.promote_types(base.dtype, policy.dtype)
    totals = onepass.reduce(
        *(onepass.total(logp.astype(dtype), tokens) for logp in (base, policy)), axis=-1
    )
    return totals[0][..., 0], totals[1][..., 0]
