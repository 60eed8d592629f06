"""Metrics that add up: across micro-batches, devices and hosts; divided once, at the edge.

At the end several reductions of arrays of one shape in one pass (`reduce`): on CPUs XLA takes 2 to
15 times as long for one after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError, refusing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean as its two sums. `+` merges; `result` divides, NaN if nothing was counted."""

    total: Array  # []
    weight: Array  # []

    def __add__(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    def result(self) -> float:
        weight = float(self.weight)
        return float(self.total) / weight if weight else math.nan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Max:
    """The largest value seen. `+` merges; `result` is -inf if nothing was seen."""

    value: Array  # []

    def __add__(self, other: Max) -> Max:
        return Max(value=jnp.maximum(self.value, other.value))

    def result(self) -> float:
        return float(self.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Min:
    """The smallest value seen. `+` merges; `result` is inf if nothing was seen."""

    value: Array  # []

    def __add__(self, other: Min) -> Min:
        return Min(value=jnp.minimum(self.value, other.value))

    def result(self) -> float:
        return float(self.value)


Metric = Mean | Max | Min
Metrics = dict[str, Metric]


def accumulate_dtype(dtype: Any) -> Any:
    """The dtype that sums are taken in: float64 for float64, float32 for everything else."""
    return dtype if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def mean(value: Array, mask: Array | None = None) -> Mean:
    """The mean of `value` over the True entries of `mask` (all of them by default).

    Shapes: value and mask broadcast against each other; masked entries may hold anything, NaN too.
    """
    dtype = accumulate_dtype(value.dtype)
    if mask is None:
        mask = jnp.ones(value.shape, bool)
    value, mask = jnp.broadcast_arrays(value.astype(dtype), mask)
    if value.ndim < 2:  # one axis may lie on several devices; the pass would bring them together
        return Mean(total=jnp.where(mask, value, 0).sum(), weight=mask.sum(dtype=dtype))
    total, number = reduce(summed(value, mask), counted(mask), axis=-1)
    return Mean(total=total.sum(), weight=number.sum().astype(dtype))


def maximum(value: Array, mask: Array | None = None) -> Max:
    """The largest entry of `value` where `mask` is True; -inf if there is none."""
    value = value.astype(accumulate_dtype(value.dtype))
    return Max(value=value.max(initial=-jnp.inf, where=mask))


def minimum(value: Array, mask: Array | None = None) -> Min:
    """The smallest entry of `value` where `mask` is True; inf if there is none."""
    return Min(value=-maximum(-value.astype(accumulate_dtype(value.dtype)), mask).value)


def as_metrics(where: str, reported: Any, weight: Any = 1.0) -> Metrics:
    """What a part reports, by name: metrics as they are, a plain number as a mean of this weight.

    Args:
      where: the part; opens the message of an error.

    Raises: InputError if it is no mapping of metrics and numbers.

    >>> as_metrics("mine", {"limit": 3})["limit"].result()
    3.0
    """
    if not isinstance(reported, Mapping):
        kind = type(reported).__name__
        raise InputError(f"{where} reported {kind}, expected its metrics {{name: number}}, or {{}}")
    return {
        name: _as_metric(f"{where}: metric {name}", value, weight)
        for name, value in reported.items()
    }


def _as_metric(where: str, value: Any, weight: Any) -> Metric:
    if isinstance(value, (Mean, Max, Min)):
        return value
    expected = "a number, or a Mean, Max or Min of jaxgrpo.core.metrics"
    with refusing(
        f"{where} is a {type(value).__name__}: expected {expected}", TypeError, ValueError
    ):
        number = jnp.asarray(value)
    if number.ndim:
        raise InputError(f"{where} has shape {number.shape}: expected {expected}")
    dtype = accumulate_dtype(number.dtype)
    weight = jnp.asarray(weight).astype(dtype)
    # Of nothing it may be anything, as the largest of no entries is -inf.
    return Mean(total=jnp.where(weight > 0, number.astype(dtype) * weight, 0), weight=weight)


def empty_like(metrics: Mapping[str, Any]) -> Metrics:
    """Metrics of the same names and dtypes into which nothing has been counted yet.

    Args:
      metrics: metrics, or their shapes as `jax.eval_shape` gives them.
    """

    def empty(metric: Any) -> Metric:
        identity = {Max: -jnp.inf, Min: jnp.inf}.get(type(metric), 0)
        return jax.tree.map(lambda leaf: jnp.full((), identity, leaf.dtype), metric)

    return {name: empty(metric) for name, metric in metrics.items()}


def merge(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> Metrics:
    """Adds two sets of metrics name by name; a name in only one of them is kept as it is."""
    merged = dict(left)
    for name, metric in right.items():
        merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def finalise(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers of a set of metrics, on the host."""
    return {name: metric.result() for name, metric in metrics.items()}


Reduced = tuple[Array, Array, Callable[[Array, Array], Array]]
"""An array, the value that a reduction of it begins with, and what joins two of its entries."""

_BLOCK = 512
"""Entries added one after the other at most: a float32 sum of 200,000 in a row loses 4 digits."""


def summed(value: Array, mask: Array) -> Reduced:
    """The sum of the unmasked entries, in the dtype of the value."""
    value = jnp.where(mask, value, 0)
    return value, jnp.zeros((), value.dtype), jax.lax.add


def counted(mask: Array) -> Reduced:
    """How many entries are unmasked, as int32."""
    return mask.astype(jnp.int32), jnp.int32(0), jax.lax.add


def lowest(value: Array, mask: Array) -> Reduced:
    """The lowest unmasked entry; inf without any."""
    inf = jnp.asarray(jnp.inf, value.dtype)
    return jnp.where(mask, value, inf), inf, jnp.minimum


def highest(value: Array, mask: Array) -> Reduced:
    """The highest unmasked entry; -inf without any."""
    inf = jnp.asarray(jnp.inf, value.dtype)
    return jnp.where(mask, value, -inf), -inf, jnp.maximum


def reduce(*reductions: Reduced, axis: int) -> tuple[Array, ...]:
    """Each array reduced over one axis, which is kept with size 1. No gradient flows through."""
    arrays, first, join = zip(*reductions, strict=True)
    axis = axis % arrays[0].ndim
    arrays = jax.lax.stop_gradient(arrays)

    def joined(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(f(a, b) for f, a, b in zip(join, left, right, strict=True))

    while arrays[0].shape[axis] > _BLOCK:
        blocks = (_blocked(array, start, axis) for array, start in zip(arrays, first, strict=True))
        arrays = jax.lax.reduce(tuple(blocks), first, joined, (axis + 1,))
    reduced = jax.lax.reduce(arrays, first, joined, (axis,))
    return tuple(jnp.expand_dims(array, axis) for array in reduced)


def _blocked(array: Array, start: Array, axis: int) -> Array:
    """An axis of n as two of [ceil(n / _BLOCK), _BLOCK], filled with the start of the reduction."""
    blocks = -(-array.shape[axis] // _BLOCK)
    missing = blocks * _BLOCK - array.shape[axis]
    edges = [(0, missing if place == axis else 0, 0) for place in range(array.ndim)]
    shape = (*array.shape[:axis], blocks, _BLOCK, *array.shape[axis + 1 :])
    return jax.lax.pad(array, start, edges).reshape(shape)
