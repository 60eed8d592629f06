"""The largest entries of an array, without sorting.

Sorting is slow on CPUs and gathers what lies on several devices. The lowest entry that enters is
built from its highest bit down, by counting what reaches a candidate.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxgrpo.core.metrics import accumulate_dtype


def top_share(
    value: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    share: Any,
    axis: int | tuple[int, ...] = -1,
) -> Bool[Array, "*shape"]:
    """True at the largest `share` of the unmasked entries, counted upwards; equal ones all enter.

    Args:
      share: in [0, 1], a number or an array []; 0 takes none.
      axis: what the share is taken of.

    >>> value, mask = jnp.array([[3.0, 1.0, 2.0, 9.0]]), jnp.array([[True, True, True, False]])
    >>> top_share(value, mask, 0.5).tolist()
    [[True, False, True, False]]
    """
    number = mask.sum(axis, keepdims=True, dtype=jnp.int32)
    # Rounded up, up to a relative 1e-6: 0.2 * 5 is 1.0000000149 in float32.
    exact = jnp.asarray(share, jnp.float32) * (1 - 1e-6) * number.astype(jnp.float32)
    count = jnp.minimum(jnp.ceil(exact).astype(jnp.int32), number)
    keys = _ordered(value, mask)
    return mask & (count > 0) & (keys >= _lowest(keys, count, axis))


def top_count(
    value: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    count: Any,
    axis: int | tuple[int, ...] = -1,
) -> Bool[Array, "*shape"]:
    """True at the `count` largest of the unmasked entries, or all if they are fewer; of equal ones
    the first enter.

    Args:
      count: of the shape of `value` with size 1 along the axes, or one that broadcasts to it.

    >>> value, mask = jnp.array([[1.0, 2.0, 1.0, 9.0]]), jnp.array([[True, True, True, False]])
    >>> top_count(value, mask, 2).tolist()
    [[True, True, False, False]]
    """
    number = mask.sum(axis, keepdims=True, dtype=jnp.int32)
    top = jnp.minimum(jnp.asarray(count, jnp.int32), number)
    keys = _ordered(value, mask)
    lowest = _lowest(keys, top, axis)
    above, ties = mask & (keys > lowest), mask & (keys == lowest)
    rest = top - above.sum(axis, keepdims=True, dtype=jnp.int32)
    places = jnp.arange(value.size, 0, -1, dtype=jnp.uint32).reshape(value.shape)
    places = jnp.where(ties, places, 0)
    return above | ties & (rest > 0) & (places >= _lowest(places, rest, axis))


def _lowest(keys: Array, count: Array, axis: int | tuple[int, ...]) -> Array:
    """The `count`-th largest of unsigned integers along the axis."""
    width = 8 * keys.dtype.itemsize

    def next_bit(index: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.ones((), keys.dtype) << (width - 1 - index).astype(keys.dtype))
        reached = (keys >= candidate).sum(axis, keepdims=True, dtype=jnp.int32)
        return jnp.where(reached >= count, candidate, threshold)

    return lax.fori_loop(0, width, next_bit, jnp.zeros(count.shape, keys.dtype))


def _ordered(value: Array, mask: Array) -> Array:
    """Unsigned integers in the order of the values; masked entries come first, as 0."""
    wide = lax.stop_gradient(value.astype(accumulate_dtype(value.dtype)))
    wide = jnp.where(wide == 0, 0, wide)  # -0.0 is 0.0
    dtype = {4: jnp.uint32, 8: jnp.uint64}[wide.dtype.itemsize]
    bits = lax.bitcast_convert_type(wide, dtype)
    top = jnp.asarray(1 << (8 * wide.dtype.itemsize - 1), dtype)
    return jnp.where(mask, jnp.where(bits >= top, ~bits, bits | top), 0)
