"""Order statistics of masked values without sorting: exact, and a fixed number of reads.

The floats are mapped to unsigned integers in the same order. The wanted one is built from its
highest bits down, two at a time: a pass counts the entries that reach each of three candidates. So
float32 is read 16 times (float64 32 times), nothing is moved, and a row may be split over devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxgrpo.advantages import stats

_UNSIGNED = {4: jnp.uint32, 8: jnp.uint64}
_ROUNDING = 1e-6  # 0.2 * 5 is 1.0000000149 in float32, and not to be rounded up to 2


def quantile(
    value: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    share: Any,
    axis: int | Sequence[int] = -1,
) -> Array:
    """The smallest unmasked entry that at least `share` of them do not exceed; 0 without any.

    One of the entries (NumPy's method "inverted_cdf"), exact; nothing is interpolated.

    Args:
      share: in [0, 1], a number or an array []; counts are rounded up, up to a relative 1e-6.
      axis: what is reduced, kept with size 1.

    >>> quantile(jnp.array([[3.0, 1.0, 2.0, 9.0]]), jnp.array([[True, True, True, False]]), 0.5)
    Array([[2.]], dtype=float32)
    """
    axes = _axes(value, axis)
    number = mask.sum(axes, keepdims=True, dtype=jnp.int32)
    below = jnp.maximum(_part(share, number), 1)
    wide, keys = stats.widen(value), _ordered(value, mask)
    key = _largest(keys, number - below + 1, axes)
    found = _float(key, wide.dtype).astype(value.dtype)
    return jnp.where(number > 0, found, 0)


def top_share(
    value: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    share: Any,
    axis: int | Sequence[int] = -1,
) -> Bool[Array, "*shape"]:
    """True at the largest `share` of the unmasked entries, counted upwards; equal ones all enter.

    Args:
      share: in [0, 1], a number or an array []; 0 takes none.
      axis: what the share is taken of.

    >>> value, mask = jnp.array([[3.0, 1.0, 2.0, 9.0]]), jnp.array([[True, True, True, False]])
    >>> top_share(value, mask, 0.5).tolist()
    [[True, False, True, False]]
    """
    axes = _axes(value, axis)
    keys = _ordered(value, mask)
    number = _part(share, mask.sum(axes, keepdims=True, dtype=jnp.int32))
    return mask & (number > 0) & (keys >= _largest(keys, number, axes))


def _axes(value: Array, axis: int | Sequence[int]) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    return tuple(sorted(one % value.ndim for one in axes))


def _part(share: Any, number: Array) -> Array:
    """ceil(share * number), and at most number."""
    exact = jnp.asarray(share, jnp.float32) * (1 - _ROUNDING) * number.astype(jnp.float32)
    return jnp.minimum(jnp.ceil(exact).astype(jnp.int32), number)


def _ordered(value: Array, mask: Array) -> Array:
    """Unsigned integers in the order of the values; masked entries come first, as 0."""
    wide = lax.stop_gradient(stats.widen(value))
    wide = jnp.where(wide == 0, 0, wide)  # -0.0 is 0.0
    dtype = _UNSIGNED[wide.dtype.itemsize]
    bits = lax.bitcast_convert_type(wide, dtype)
    top = jnp.asarray(1 << (8 * wide.dtype.itemsize - 1), dtype)
    return jnp.where(mask, jnp.where(bits >= top, ~bits, bits | top), 0)


def _float(key: Array, dtype: Any) -> Array:
    """The value that `_ordered` made the key of."""
    top = jnp.asarray(1 << (8 * key.dtype.itemsize - 1), key.dtype)
    return lax.bitcast_convert_type(jnp.where(key >= top, key ^ top, ~key), dtype)


def _largest(keys: Array, number: Array, axes: tuple[int, ...]) -> Array:
    """The number-th largest key along the axes, which are kept with size 1."""
    dtype, width = keys.dtype, 8 * keys.dtype.itemsize

    def two_bits(index: Array, found: Array) -> Array:
        shift = jnp.asarray(width - 2, dtype) - index.astype(dtype) * jnp.asarray(2, dtype)
        candidates = [found + (jnp.asarray(digit, dtype) << shift) for digit in (1, 2, 3)]
        reached = tuple((keys >= candidate).astype(jnp.int32) for candidate in candidates)
        for candidate, count in zip(candidates, _sums(reached, axes), strict=True):
            found = jnp.where(count >= number, candidate, found)
        return found

    return lax.fori_loop(0, width // 2, two_bits, jnp.zeros(number.shape, dtype))


def _sums(values: tuple[Array, ...], axes: tuple[int, ...]) -> list[Array]:
    """The sum of each along the axes, which are kept with size 1.

    The last axis goes first, in one reduction of all of them, so that what they are made of is read
    once. Not so axis 0: prompts lie on many devices, and that reduction would bring them together.
    """
    last = axes[-1]
    if last > 0:
        zeros = (jnp.int32(0),) * len(values)
        values = tuple(
            jnp.expand_dims(one, last) for one in lax.reduce(values, zeros, _add, (last,))
        )
        axes = axes[:-1]
    return [one.sum(axes, keepdims=True, dtype=jnp.int32) for one in values]


def _add(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(one + other for one, other in zip(left, right, strict=True))
