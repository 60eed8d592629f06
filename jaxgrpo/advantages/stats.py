"""Masked statistics: the one place where means, variances and flat groups are defined.

All of them reduce one axis and keep it with size 1 (axis 1, the samples of a group, by default),
read unmasked entries only, whatever the others hold, and accumulate in at least float32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.core.metrics import accumulate_dtype, counted, highest, lowest, reduce, summed

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this; exp(20) is 4.9e8. Parts report the share that was clamped."""


def widen(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The value in the dtype that statistics are accumulated in: float32, or float64 if it is."""
    return value.astype(accumulate_dtype(value.dtype))


def count(mask: Bool[Array, "..."], axis: int = 1) -> Int[Array, "..."]:
    """How many entries are unmasked, as int32."""
    return mask.sum(axis, keepdims=True, dtype=jnp.int32)


def count_tokens(mask: Bool[Array, "P G T"]) -> Int[Array, "P G"]:
    """How many tokens of each sample are unmasked, as int32."""
    # CPUs sum bytes 10 times as fast as int32 made of booleans: pieces that a byte can count.
    length = mask.shape[-1]
    piece = max(size for size in range(1, 128) if length % size == 0) if length else 1
    pieces = mask.reshape(*mask.shape[:-1], length // piece, piece)
    return pieces.sum(-1, dtype=jnp.int8).sum(-1, dtype=jnp.int32)


class Summary(NamedTuple):
    """Of the unmasked entries along an axis, which is kept with size 1; in the dtype of `widen`.

    The mean comes in two parts: one float32 number holds no mean of 1e8 and 1e8 + 8.
    """

    low: Array  # inf without any entry
    high: Array  # -inf without any entry
    near: Array  # an entry that is near all others, as `anchor` says, or 0
    above: Array  # the mean of value - near; 0 without any entry
    count: Array  # int32

    @property
    def flat(self) -> Array:
        """As `is_flat`."""
        return (self.low == self.high) | (self.count < 2)

    @property
    def mean(self) -> Array:
        """Rounded; what is subtracted from values is `centred`."""
        return self.near + self.above

    def centred(self, value: Array) -> Array:
        """value - mean."""
        return (widen(value) - self.near) - self.above


def anchor(low: Array, high: Array) -> Array:
    """What is subtracted before a mean is taken: the lowest value, or 0.

    The lowest if all values have one sign and the largest is at most twice the smallest: then no
    difference is rounded (Sterbenz), while a sum of such values would lose what sets them apart.
    Otherwise 0, which loses less than a bit and leaves rewards of 0 and 1 as they are.
    """
    near = (low <= high) & (high - low <= jnp.minimum(jnp.abs(low), jnp.abs(high)))
    return jnp.where(near, low, 0)


def summary(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1) -> Summary:
    """Lowest, highest, mean and number of unmasked entries, in two passes."""
    value = widen(value)
    low, high, number = reduce(lowest(value, mask), highest(value, mask), counted(mask), axis=axis)
    near = anchor(low, high)
    (total,) = reduce(summed(value - near, mask), axis=axis)
    return Summary(low, high, near, _divided(total, number), number)


def added(terms: Sequence[Float[Array, "P G"]], mask: Bool[Array, "P G"]) -> Float[Array, "P G"]:
    """The sum of arrays, where totals of a group that differ by rounding alone are equal.

    In float32 0.1 + 0.6 is 0.7 + 6e-8, so that a group in which one sample earned the first two
    rewards and the others the third would not be flat. Of K terms that are each a rounded product
    of rounded numbers the sum is known up to

        s[p, g] = (K + 2) / 2 eps sum_k |term_k[p, g]|           eps = 1.2e-7 in float32

    What is 0 within it is 0. What could be the group's lowest total within it is that one, and so
    for the highest: a group that could be flat is. One term is not changed, nor are totals that
    are further apart; equal ones between the ends of a group are left apart.

    Args:
      terms: one or more, in the dtype that sums are taken in.

    >>> weight, reward = [0.1, 0.6, 0.7], [[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]]
    >>> terms = [w * jnp.asarray(r) for w, r in zip(weight, reward)]
    >>> bool(is_flat(added(terms, jnp.ones((1, 2), bool)), jnp.ones((1, 2), bool))[0, 0])
    True
    """
    total = functools.reduce(operator.add, terms)
    if len(terms) < 2:
        return total
    size = functools.reduce(operator.add, map(jnp.abs, terms))
    slack = rounding_of_sum(len(terms), size)
    total = jnp.where((jnp.abs(total) <= slack) & (slack < jnp.inf), 0, total)
    low, high, least, most = reduce(
        lowest(total, mask),
        highest(total, mask),
        lowest(total + slack, mask),
        highest(total - slack, mask),
        axis=1,
    )
    upper = jnp.where(total + slack >= most, high, total)
    return jnp.where(total - slack <= least, low, upper)


def rounding_of_sum(number: int, size: Array) -> Array:
    """Up to what a sum is known, of so many terms that are each a rounded product of rounded
    numbers: (number + 2) / 2 eps size.

    Args:
      size: the sum of their absolute values.
    """
    return (number + 2) / 2 * float(jnp.finfo(size.dtype).eps) * size


def mean(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int = 1) -> Array:
    """sum(value) / n over unmasked entries; 0 where there is none.

    >>> mean(jnp.array([[1.0, 0.0, jnp.nan]]), jnp.array([[True, True, False]])).tolist()
    [[0.5]]
    """
    total, number = reduce(summed(widen(value), mask), counted(mask), axis=axis)
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
    about = summary(value, mask, axis) if about is None else about
    residual = about.centred(jnp.where(mask, value, 0))
    squares, number = reduce(summed(jnp.square(residual), mask), counted(mask), axis=axis)
    return jnp.where(number > ddof, _divided(squares, number - ddof), 0)


def is_flat(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Bool[Array, "..."]:
    """True where all unmasked entries are equal (max == min), or fewer than two are unmasked.

    Exact, never by a standard deviation: seven equal float32 rewards of 0.1 have std 7e-9.

    >>> value = jnp.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    >>> is_flat(value, jnp.ones((2, 3), bool)).tolist()
    [[True], [False]]
    """
    return summary(value, mask).flat


def cross_rollout_variance(
    value: Float[Array, "P G *rest"],
    mask: Bool[Array, "P G *rest"],
    reference: Float[Array, "P 1 *rest"] | None = None,
) -> Float[Array, "P 1 *rest"]:
    """How much the samples of a prompt differ at each position: population variance over samples.

        v[p, j] = mean_g (x[p, g, j] - mean_g x[p, g, j])^2

    Exactly 0 where all unmasked entries are equal and where fewer than two are: what varies is
    separated from what does not. Both the token weights and the query filter of R3 are made of it.

    One pass, over the differences d from one of the samples: (sum d^2 - (sum d)^2 / n) / n. As that
    sample is one of them, no more digits cancel than its distance from the mean, in deviations
    squared, which is below n; equal values differ by 0.

    Args:
      reference: at each position the value of an unmasked sample, where it is known; anything
        where all are masked. None: the first is looked up.

    Source: DRO, arXiv 2506.13351 (its sigma_j is the square root).

    >>> value = jnp.array([[[0.1, -1.0], [0.1, -3.0], [0.1, 5.0]]])
    >>> mask = jnp.array([[[True, True], [True, True], [True, False]]])
    >>> cross_rollout_variance(value, mask).tolist()
    [[[0.0, 1.0]]]
    """
    if reference is None:
        reference = jnp.take_along_axis(value, jnp.argmax(mask, axis=1, keepdims=True), axis=1)
    apart = jnp.where(mask, widen(value) - widen(reference), 0)
    total, squares, number = reduce(
        summed(apart, mask),
        summed(jnp.square(apart), mask),
        counted(mask),
        axis=1,
    )
    spread = _divided(squares - total * _divided(total, number), number)
    return jnp.where(squares < jnp.inf, jnp.maximum(spread, 0), squares)


def log_ratio(
    top: Float[Array, "*shape"], bottom: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """top - bottom, in at least float32; 0 where masked, whatever stands there. Not clamped."""
    dtype = jnp.promote_types(widen(top).dtype, widen(bottom).dtype)
    top, bottom = (jnp.where(mask, logp.astype(dtype), 0) for logp in (top, bottom))
    return top - bottom


def clamp(ratio: Float[Array, "*shape"]) -> tuple[Array, Array]:
    """(the log ratio within +- LOG_RATIO_LIMIT, where it was not)."""
    return jnp.clip(ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), jnp.abs(ratio) > LOG_RATIO_LIMIT


def _divided(total: Array, number: Array) -> Array:
    return total / jnp.maximum(number, 1).astype(total.dtype)
