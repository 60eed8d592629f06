"""Log ratios of two policies at the sampled tokens, as constants of the update."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.advantages.stats import widen

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this; exp(20) is 4.9e8. Parts report the share that was clamped."""


def log_ratio(
    top: Float[Array, "*shape"], bottom: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """top - bottom, in at least float32; 0 where masked, whatever stands there. Not clamped."""
    dtype = jnp.promote_types(widen(top).dtype, widen(bottom).dtype)
    top, bottom = (jnp.where(mask, logp.astype(dtype), 0) for logp in (top, bottom))
    return top - bottom


def clamp(ratio: Float[Array, "*shape"]) -> tuple[Array, Array]:
    """(the log ratio within +- LOG_RATIO_LIMIT, where it was not)."""
    return (
        jnp.clip(ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
        jnp.abs(ratio) > LOG_RATIO_LIMIT,
    )
