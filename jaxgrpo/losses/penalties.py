"""Penalties that keep the policy near the reference, per token, beside the surrogate.

Each is named for the gradient it has. With l = logp - reference_logp at tokens sampled from the
current policy: `k2` has, per state, the gradient of the reverse KL(policy || reference);
`forward_kl_k3`, GRPO's usual estimator, that of the forward KL(reference || policy), though its
value estimates the reverse one. Arguments, shapes and treatment of masked entries are those of a
surrogate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.errors import InputError
from jaxgrpo.metrics import Metrics, accumulate_dtype, mean

KL_LIMIT = 20.0
"""k3 holds log ratios below minus this constant, where exp(-l) would overflow."""


class Penalty(NamedTuple):
    """A term added to the surrogate, which shares its token weights."""

    name: str
    compute: Callable[..., tuple[Array, Metrics]]
    """(logp, proximal_logp, advantage, mask, segment, fields) -> (penalty per token, metrics)"""
    needs: frozenset[str] = frozenset()  # fields that must be produced for it


def k2(beta: float) -> Penalty:
    """The squared log ratio: the gradient of the reverse KL at each visited state.

        beta * (logp - reference_logp)^2 / 2

    It leaves out what a token does to later states (k1 in the reward has that too).

    Args:
      beta: weight against the surrogate; not negative.

    Metrics: kl, the k3 value without beta, over unmasked tokens; kl_clamped, see `forward_kl_k3`.
    Raises: InputError on a negative beta, and where fields lack reference_logp.
    Source: Schulman, Approximating KL divergence, 2020 (joschu.net/blog/kl-approx.html).
    """
    _check_beta("k2", beta)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_ratio = _to_reference("k2", logp, mask, fields)
        return beta * 0.5 * jnp.square(log_ratio), _kl_metrics(log_ratio, mask)

    return Penalty("k2", compute, frozenset({"reference_logp"}))


def forward_kl_k3(beta: float) -> Penalty:
    """GRPO's k3 estimator, under the name of the gradient it has.

        beta * (exp(-l) - 1 + l),   l = max(logp - reference_logp, -20)

    As a loss its expected gradient is that of the forward KL(reference || policy). Beyond the
    clamp it has no gradient; such tokens are counted in the metric kl_clamped.

    Args:
      beta: weight against the surrogate; not negative.

    Metrics: kl, the value without beta, over unmasked tokens; kl_clamped, the share of them.
    Raises: InputError on a negative beta, and where fields lack reference_logp.
    Source: Shao et al. 2024, arXiv 2402.03300, equation 4, which has no clamp.
    """
    _check_beta("forward_kl_k3", beta)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        log_ratio = _to_reference("forward_kl_k3", logp, mask, fields)
        return beta * _k3(log_ratio), _kl_metrics(log_ratio, mask)

    return Penalty("forward_kl_k3", compute, frozenset({"reference_logp"}))


def _k3(log_ratio: Array) -> Array:
    held = jnp.maximum(log_ratio, -KL_LIMIT)
    return jnp.expm1(-held) + held


def _to_reference(name: str, logp: Array, mask: Array, fields: Mapping[str, Array]) -> Array:
    """logp - reference_logp in at least float32, 0 where masked."""
    if "reference_logp" not in fields:
        raise InputError(
            f"{name} reads fields['reference_logp'], the reference policy's log-probs in the shape"
            f" of logp; given: {', '.join(sorted(fields)) or 'no fields'}"
        )
    dtype = accumulate_dtype(logp.dtype)
    reference = jax.lax.stop_gradient(fields["reference_logp"])
    # Masked inputs are replaced before any arithmetic: NaN times a zero cotangent is NaN.
    current = jnp.where(mask, logp, 0).astype(dtype)
    return current - jnp.where(mask, reference, 0).astype(dtype)


def _kl_metrics(log_ratio: Array, mask: Array) -> Metrics:
    log_ratio = jax.lax.stop_gradient(log_ratio)
    return {
        "kl": mean(_k3(log_ratio), mask),
        "kl_clamped": mean(log_ratio < -KL_LIMIT, mask),
    }


def _check_beta(name: str, beta: float) -> None:
    if not (beta >= 0 and math.isfinite(beta)):
        raise InputError(f"{name}: beta = {beta}, expected a number >= 0; 0.001 to 0.05 is usual")
