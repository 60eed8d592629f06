"""Sums over sequences that share rows.

A sequence is what bears one `segment` id within a row, the last axis; 0 is padding. Sums over
sequences need neither their order nor that their tokens stand together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


def segment_sum(
    value: Float[Array, "*rows Q"],
    mask: Bool[Array, "*rows Q"],
    segment: Int[Array, "*rows Q"],
) -> Float[Array, "*rows Q"]:
    """At each position the sum over the unmasked entries of its segment.

    Ids are 0 .. Q within each row. Work and memory grow with Q: sums by id, then looked up.
    """
    shape = value.shape
    ids = segment.reshape(-1, shape[-1])
    kept = jnp.where(mask, value, 0).reshape(ids.shape)

    def row(kept: Array, ids: Array) -> Array:
        return jnp.zeros(shape[-1] + 1, kept.dtype).at[ids].add(kept)[ids]

    return jax.vmap(row)(kept, ids).reshape(shape)
