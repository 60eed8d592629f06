"""Normalisers as token weights: `loss = sum(weight * loss per token)`, no other division.

Weights are computed once, on the mask [P, G, T] of the whole batch. Whatever is done afterwards,
leaving out the dead, splitting into micro-batches, packing, devices, the sum stays the same.
A row without any unmasked token (empty completion, masked sample) is no sequence: it is counted
in no denominator. TRL counts such rows; verl does not. Weights of an empty mask are all 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.errors import InputError


class Reduction(NamedTuple):
    """A denominator."""

    name: str
    weights: Callable[[Array], Array]
    """mask [P, G, T] -> weights [P, G, T], 0 where masked; float32, or float64 under x64"""


def token_mean() -> Reduction:
    """Every token of the batch weighs the same.

        weight = mask / sum(mask)

    Source: DAPO, arXiv 2503.14476, section 3.3.
    """

    def weights(mask: Bool[Array, "P G T"]) -> Float[Array, "P G T"]:
        return _share(mask, mask.sum(keepdims=True, dtype=jnp.int32))

    return Reduction("token_mean", weights)


def sequence_mean() -> Reduction:
    """The mean over sequences of the mean over their tokens: long answers' tokens weigh less.

        weight[i, t] = mask[i, t] / (number of sequences * sum_t mask[i, t])

    Source: Shao et al. 2024, arXiv 2402.03300, equation 3.
    """

    def weights(mask: Bool[Array, "P G T"]) -> Float[Array, "P G T"]:
        per_sequence = _share(mask, mask.sum(-1, keepdims=True, dtype=jnp.int32))
        return per_sequence / _at_least_one(_sequences(mask))

    return Reduction("sequence_mean", weights)


def constant(length: float) -> Reduction:
    """Sums over tokens, divided by a constant length: no token's weight depends on its sequence.

        weight[i, t] = mask[i, t] / (number of sequences * length)

    Args:
      length: in tokens; usually max_completion_tokens.

    Raises: InputError unless length is positive.
    Source: Dr. GRPO, Liu et al. 2025, arXiv 2503.20783.
    """
    if not (length > 0 and math.isfinite(length)):
        raise InputError(
            f"constant: length = {length}, expected a positive number of tokens, usually"
            " rollout.max_completion_tokens"
        )

    def weights(mask: Bool[Array, "P G T"]) -> Float[Array, "P G T"]:
        return _share(mask, _sequences(mask)) / length

    return Reduction("constant", weights)


def _sequences(mask: Array) -> Array:
    """[1, 1, 1] int32: rows with at least one token."""
    return mask.any(-1, keepdims=True).sum(keepdims=True, dtype=jnp.int32)


def _at_least_one(number: Array) -> Array:
    # Counted in int32: a float32 sum of ones is inexact beyond 2**24 tokens.
    return jnp.maximum(number, 1).astype(jnp.result_type(float))


def _share(mask: Array, number: Array) -> Array:
    return mask.astype(jnp.result_type(float)) / _at_least_one(number)
