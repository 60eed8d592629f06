"""Entropy of the policy's token distributions, as a penalty: exact, over the whole vocabulary.

Both parts read fields["policy_entropy"], differentiated, which the update's own pass makes. As
`k2` they leave out what a token does to the entropy of later states.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, Metrics, mean
from jaxgrpo.losses.penalties import Penalty, from_pass

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
    _check(target, coefficient, delta, low, high)

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


def _check(target: float, coefficient: float, delta: float, low: float, high: float) -> None:
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
