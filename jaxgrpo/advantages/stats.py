"""Masked statistics: the one place where means, variances and flat groups are defined.

All of them reduce one axis and keep it with size 1 (axis 1, the samples of a group, by default),
read unmasked entries only, whatever the others hold, and accumulate in at least float32.

Order statistics of masked values without sorting: exact, and a fixed number of reads.

The floats are mapped to unsigned integers in the same order. The wanted one is built from its
highest bits down, two at a time: a pass counts the entries that reach each of three candidates. So
float32 is read 16 times (float64 32 times), nothing is moved, and a row may be split over devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxgrpo.core import onepass
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import accumulate_dtype
from jaxgrpo.core.types import Signal


def widen(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The value in the dtype that statistics are accumulated in: float32, or float64 if it is."""
    return value.astype(accumulate_dtype(value.dtype))


def count(mask: Bool[Array, "..."], axis: int = 1) -> Int[Array, "..."]:
    """How many entries are unmasked, as int32."""
    return mask.sum(axis, keepdims=True, dtype=jnp.int32)


def count_tokens(mask: Bool[Array, "P G T"]) -> Int[Array, "P G"]:
    """How many tokens of each sample are unmasked, as int32."""
    # Bytes are summed fast, int32 made of booleans slowly: pieces that a byte can count.
    length = mask.shape[-1]
    piece = max(size for size in range(1, 128) if length % size == 0) if length else 1
    pieces = mask.reshape(*mask.shape[:-1], length // piece, piece)
    return pieces.sum(-1, dtype=jnp.int8).sum(-1, dtype=jnp.int32)


def check_ddof(name: str, ddof: int) -> None:
    """Raises: InputError, opened by the name of the part, unless ddof is 0 or 1."""
    if ddof not in (0, 1):
        raise InputError(f"{name}: ddof = {ddof}, expected 0 (by n) or 1 (by n - 1)")


class Summary(NamedTuple):
    """What one pass over an axis tells of the unmasked entries; the axis is kept with size 1."""

    low: Array  # in the dtype of the value; inf without any entry
    high: Array  # -inf without any entry
    mean: Array  # in the dtype of `widen`; 0 without any entry
    count: Array  # int32

    @property
    def flat(self) -> Array:
        """As `is_flat`."""
        return (self.low == self.high) | (self.count < 2)

    def where(self, kept: Array) -> Summary:
        """The same where `kept` [P, 1], and that of no entry elsewhere."""
        low, high = jnp.where(kept, self.low, jnp.inf), jnp.where(kept, self.high, -jnp.inf)
        return Summary(low, high, jnp.where(kept, self.mean, 0), jnp.where(kept, self.count, 0))


def of_groups(signal: Signal) -> Summary:
    """The summary of a signal over the samples of each prompt; no pass where it is known."""
    found = recall(signal)
    return summary(signal.value, signal.mask) if found is None else found


def recall(signal: Signal) -> Summary | None:
    """What is remembered of the groups of a signal, or None."""
    if signal.known is None:
        return None
    value, mask, found = signal.known
    return found if value is signal.value and mask is signal.mask else None


def remember(signal: Signal, found: Summary) -> Signal:
    """The signal with its summary, for the next `of_groups`: low, high and count exact.

    The mask must be that of the signal which the step was given, or a part of it.
    Known of these very arrays alone: with another value or mask, or behind the border of a jitted
    function, it is forgotten and computed anew.
    """
    return dataclasses.replace(signal, known=(signal.value, signal.mask, found))


def summary(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1) -> Summary:
    """Lowest, highest, mean and number of unmasked entries, in one pass."""
    low, high, total, number = onepass.reduce(
        onepass.lowest(value, mask),
        onepass.highest(value, mask),
        onepass.total(widen(value), mask),
        onepass.number(mask),
        axis=axis,
    )
    return Summary(low, high, _divided(total, number), number)


def mean(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1) -> Array:
    """sum(value) / n over unmasked entries; 0 where there is none.

    >>> mean(jnp.array([[1.0, 0.0, jnp.nan]]), jnp.array([[True, True, False]])).tolist()
    [[0.5]]
    """
    total, number = onepass.reduce(
        onepass.total(widen(value), mask), onepass.number(mask), axis=axis
    )
    return _divided(total, number)


def variance(
    value: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    axis: int = 1,
    ddof: int = 0,
    about: Summary | None = None,
) -> Array:
    """sum((value - mean)^2) / (n - ddof) over unmasked entries; 0 where n <= ddof.

    Two passes: the mean of squares less the squared mean cancels in float32.

    Args:
      about: their summary, where it is known; None: it is computed.
    """
    centre = mean(value, mask, axis) if about is None else about.mean
    residual = jnp.where(mask, widen(value), 0) - centre
    squares, number = onepass.reduce(
        onepass.total(jnp.square(residual), mask), onepass.number(mask), axis=axis
    )
    return jnp.where(number > ddof, _divided(squares, number - ddof), 0)


def std(
    value: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    axis: int = 1,
    ddof: int = 0,
    about: Summary | None = None,
) -> Array:
    """The square root of `variance`."""
    return jnp.sqrt(variance(value, mask, axis, ddof, about))


def extremes(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1
) -> tuple[Array, Array]:
    """(lowest, highest) unmasked entry, in the dtype of the value; (inf, -inf) without any."""
    found = summary(value, mask, axis)
    return found.low, found.high


def is_flat(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1
) -> Bool[Array, "..."]:
    """True where all unmasked entries are equal (max == min), or fewer than two are unmasked.

    Exact, never by a standard deviation: seven equal float32 rewards of 0.1 have std 7e-9.

    >>> value = jnp.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    >>> is_flat(value, jnp.ones((2, 3), bool)).tolist()
    [[True], [False]]
    """
    return summary(value, mask, axis).flat


def cross_rollout_variance(
    value: Float[Array, "P G *rest"],
    mask: Bool[Array, "P G *rest"],
    one: Float[Array, "P 1 *rest"] | None = None,
) -> Float[Array, "P 1 *rest"]:
    """How much the samples of a prompt differ at each position: population variance over samples.

        v[p, j] = mean_g (x[p, g, j] - mean_g x[p, g, j])^2

    Exactly 0 where all unmasked entries are equal and where fewer than two are: what varies can be
    told from what does not. Both the token weights and the query filter of R3 are made of it.

    One pass, over the differences d from one of the samples: (sum d^2 - (sum d)^2 / n) / n. As that
    sample is one of them, no more digits cancel than its distance from the mean, in deviations
    squared, which is below n; equal values differ by 0.

    Args:
      one: at each position the value of an unmasked sample, where it is known; anything where all
        are masked. None: the first is looked up.

    Source: DRO, arXiv 2506.13351 (its sigma_j is the square root).

    >>> value = jnp.array([[[0.1, -1.0], [0.1, -3.0], [0.1, 5.0]]])
    >>> mask = jnp.array([[[True, True], [True, True], [True, False]]])
    >>> cross_rollout_variance(value, mask).tolist()
    [[[0.0, 1.0]]]
    """
    if one is None:
        one = jnp.take_along_axis(value, jnp.argmax(mask, axis=1, keepdims=True), axis=1)
    apart = jnp.where(mask, widen(value) - widen(one), 0)
    total, squares, number = onepass.reduce(
        onepass.total(apart, mask),
        onepass.total(jnp.square(apart), mask),
        onepass.number(mask),
        axis=1,
    )
    spread = _divided(squares - total * _divided(total, number), number)
    return jnp.where(squares < jnp.inf, jnp.maximum(spread, 0), squares)


FEW = 32
"""Groups up to this size compare their samples one after the other, larger ones all at once."""


def count_lower(value: Float[Array, "P G"], mask: Bool[Array, "P G"]) -> Int[Array, "P G"]:
    """How many unmasked samples of the group lie below each sample, as int32.

    >>> count_lower(jnp.array([[0.5, 0.1, 0.5]]), jnp.ones((1, 3), bool)).tolist()
    [[1, 0, 1]]
    """
    size = value.shape[1]
    if size > FEW:
        lower = mask[:, None, :] & (value[:, None, :] < value[:, :, None])
        return lower.sum(-1, dtype=jnp.int32)
    total = jnp.zeros(value.shape, jnp.int32)
    for other in range(size):
        column = slice(other, other + 1)
        total = total + (mask[:, column] & (value[:, column] < value)).astype(jnp.int32)
    return total


def _divided(total: Array, number: Array) -> Array:
    return total / jnp.maximum(number, 1).astype(total.dtype)


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
    wide, keys = widen(value), _ordered(value, mask)
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
    wide = lax.stop_gradient(widen(value))
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


LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this; exp(20) is 4.9e8. Parts report the share that was clamped."""
