"""What a penalty of strength beta and a success rate mu have to do with each other.

max_q E_q v - beta KL(q || a) is reached by a(y) exp(v / beta), normalised: the base, tilted. On one
prompt it is fixed by either number, and KL(filtered model || tilted base) = -log mu. Formulas of
"Binary rewards: fundamental challenges", arXiv 2605.02375; elementwise, in at least float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxgrpo.advantages import stats
from jaxgrpo.core.errors import InputError

_HALVINGS = 64
_TERMS = 9  # of the series of `_deviance`: below 1e-18 of the first where |ratio| < 0.1


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

    >>> found = target_validity(0.9, jnp.array([0.0, 0.2, 0.6]))
    >>> round(float(found.mu[1:].mean()), 5), int(found.left_out)
    (0.9, 1)
    """
    if isinstance(target, float | int) and not 0 < target < 1:
        raise InputError(f"target_validity: target = {target:g}, expected a rate in (0, 1)")
    target, rates = _wide(target, base_rates)
    able = rates > 0
    number = jnp.maximum(able.sum(dtype=jnp.int32), 1).astype(rates.dtype)

    def rate(push: Array) -> Array:
        return jnp.where(able, _tilted(rates, push), 0).sum() / number

    logits, wanted = _logit(rates), _logit(target)
    # Pushed as far, the weakest base that is able succeeds at the target, and the others above it.
    far = jnp.maximum(wanted - jnp.where(able, logits, jnp.inf).min(initial=jnp.inf), 0)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) / 2
        enough = rate(middle) >= target
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    finite = jnp.where(jnp.isfinite(far), far, 0)
    low, high = lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(finite), finite))
    push = low + (high - low) / 2
    untilted = jnp.where(able, rates, 0).sum() / number
    push = jnp.where((untilted >= target) | ~able.any(), 0, push)
    push = jnp.where((target >= 1) & able.any(), jnp.inf, push)
    mu = jnp.where(able, _tilted(rates, push), 0)
    return Validity(1 / push, mu, (~able).sum(dtype=jnp.int32))


def _wide(*values: Any) -> tuple[Array, ...]:
    """Arrays of one dtype: the widest of those given as arrays, at least float32."""
    arrays = [jnp.asarray(value) for value in values]
    given = [value.dtype for value in values if hasattr(value, "dtype")]
    dtype = functools.reduce(jnp.promote_types, given) if given else jnp.result_type(float)
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)
    wide = stats.widen(jnp.zeros((), dtype)).dtype
    return tuple(one.astype(wide) for one in arrays)


def _logit(rate: Array) -> Array:
    return jnp.log(rate) - jnp.log1p(-rate)


def _tilted(rate: Array, push: Array) -> Array:
    """sigmoid(logit(rate) + push), push in [0, inf]; rates 0 and 1 stay."""
    inner = (rate > 0) & (rate < 1)
    logits = _logit(jnp.where(inner, rate, 0.5))
    return jnp.where(inner, jax.nn.sigmoid(logits + push), rate)


def _deviance(x: Array, m: Array, gap: Array) -> Array:
    """x log(x / m) + m - x >= 0, gap = x - m; by a series where they are near (Loader 2000)."""
    both = jnp.where(x + m > 0, x + m, 1)
    ratio = gap / both
    square = ratio * ratio
    series = jnp.zeros_like(ratio)
    for term in range(_TERMS, 0, -1):
        series = square * (1 / (2 * term + 1) + series)
    near = gap * ratio + 2 * x * ratio * series
    safe = jnp.where((x > 0) & (m > 0), x / jnp.where(m > 0, m, 1), 1)
    far = jnp.where((x > 0) & (m <= 0), jnp.inf, x * jnp.log(safe) - gap)
    return jnp.where(jnp.abs(ratio) < 0.1, near, far)
