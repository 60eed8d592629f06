"""Masked statistics: the one place where means, variances and flat groups are defined.

All of them reduce one axis and keep it with size 1 (axis 1, the samples of a group, by default),
read unmasked entries only, whatever the others hold, and accumulate in at least float32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.metrics import accumulate_dtype


def widen(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The value in the dtype that statistics are accumulated in: float32, or float64 if it is."""
    return value.astype(accumulate_dtype(value.dtype))


def count(mask: Bool[Array, "..."], axis: int = 1) -> Int[Array, "..."]:
    """How many entries are unmasked, as int32."""
    return mask.sum(axis, keepdims=True, dtype=jnp.int32)


def mean(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1) -> Array:
    """sum(value) / n over unmasked entries; 0 where there is none.

    >>> mean(jnp.array([[1.0, 0.0, jnp.nan]]), jnp.array([[True, True, False]])).tolist()
    [[0.5]]
    """
    value = jnp.where(mask, widen(value), 0)
    number = jnp.maximum(count(mask, axis), 1).astype(value.dtype)
    return value.sum(axis, keepdims=True) / number


def variance(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1, ddof: int = 0
) -> Array:
    """sum((value - mean)^2) / (n - ddof) over unmasked entries; 0 where n <= ddof.

    Two passes: the mean of squares less the squared mean cancels in float32.
    """
    value = jnp.where(mask, widen(value), 0)
    residual = jnp.where(mask, value - mean(value, mask, axis), 0)
    number = jnp.maximum(count(mask, axis) - ddof, 1).astype(value.dtype)
    enough = count(mask, axis) > ddof
    return jnp.where(enough, jnp.square(residual).sum(axis, keepdims=True) / number, 0)


def std(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1, ddof: int = 0
) -> Array:
    """The square root of `variance`."""
    return jnp.sqrt(variance(value, mask, axis, ddof))


def extremes(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1
) -> tuple[Array, Array]:
    """(lowest, highest) unmasked entry, in the dtype of the value; (inf, -inf) without any."""
    low = jnp.where(mask, value, jnp.inf).min(axis, keepdims=True)
    high = jnp.where(mask, value, -jnp.inf).max(axis, keepdims=True)
    return low, high


def is_flat(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1
) -> Bool[Array, "..."]:
    """True where all unmasked entries are equal (max == min), or fewer than two are unmasked.

    Exact, never by a standard deviation: seven equal float32 rewards of 0.1 have std 7e-9.

    >>> value = jnp.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    >>> is_flat(value, jnp.ones((2, 3), bool)).tolist()
    [[True], [False]]
    """
    low, high = extremes(value, mask, axis)
    return (low == high) | (count(mask, axis) < 2)


def cross_rollout_variance(
    value: Float[Array, "P G *rest"], mask: Bool[Array, "P G *rest"]
) -> Float[Array, "P 1 *rest"]:
    """How much the samples of a prompt differ at each position: population variance over samples.

        v[p, j] = mean_g (x[p, g, j] - mean_g x[p, g, j])^2

    Exactly 0 where all unmasked entries are equal and where fewer than two are: what varies can be
    told from what does not. Both the token weights and the query filter of R3 are made of it.

    Source: DRO, arXiv 2506.13351 (its sigma_j is the square root).

    >>> value = jnp.array([[[0.1, -1.0], [0.1, -3.0], [0.1, 5.0]]])
    >>> mask = jnp.array([[[True, True], [True, True], [True, False]]])
    >>> cross_rollout_variance(value, mask).tolist()
    [[[0.0, 1.0]]]
    """
    value = jnp.where(mask, widen(value), 0)
    # Measured from one of the entries, equal values are exactly 0, whatever their digits.
    _, high = extremes(value, mask)
    return variance(value - jnp.where(mask.any(1, keepdims=True), high, 0), mask)
