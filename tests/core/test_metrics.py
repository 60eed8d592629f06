"""Metrics add up across parts and are divided once."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.metrics import (
    Max,
    Mean,
    accumulate_dtype,
    empty_like,
    finalise,
    maximum,
    mean,
    merge,
    minimum,
)


def test_merged_means_are_the_mean_of_the_whole_and_no_mean_of_means():
    value = jnp.array([1.0, 2.0, 3.0, 10.0])
    parts = [mean(value[:3]), mean(value[3:])]
    assert (parts[0] + parts[1]).result() == 4
    assert sum(part.result() for part in parts) / 2 == 6


def test_masked_entries_may_hold_anything():
    value = jnp.array([1.0, jnp.nan, 3.0, -jnp.inf])
    mask = jnp.array([True, False, True, False])
    assert mean(value, mask).result() == 2
    assert maximum(value, mask).result() == 3
    assert minimum(value, mask).result() == 1
    assert mean(value[:, None], jnp.array([[True], [False], [True], [False]])).result() == 2


def test_masks_broadcast_against_values():
    mask = jnp.array([[True, False]])
    assert mean(jnp.array([[3.0], [5.0]]), mask).result() == 4
    assert float(mean(jnp.array([[3.0], [5.0]]), mask).weight) == 2
    assert maximum(jnp.array([[3.0], [5.0]]), mask).result() == 5


def test_nothing_counted_is_told_from_zero():
    empty = jnp.zeros(2, bool)
    assert math.isnan(mean(jnp.ones(2), empty).result())
    assert maximum(jnp.ones(2), empty).result() == -math.inf
    assert minimum(jnp.ones(2), empty).result() == math.inf
    assert maximum(jnp.ones(0)).result() == -math.inf


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "float16", "float32"])
def test_sums_are_taken_in_float32_without_silent_promotion(dtype):
    with jax.numpy_dtype_promotion("strict"):
        many = mean(jnp.ones(1000, dtype))
        largest = maximum(jnp.ones(3, dtype))
    assert many.total.dtype == many.weight.dtype == largest.value.dtype == jnp.float32
    assert float(many.total) == 1000
    assert accumulate_dtype(jnp.dtype(dtype)) == jnp.float32


def test_float64_stays_float64():
    with jax.enable_x64(True):
        assert mean(jnp.ones(3, jnp.float64)).total.dtype == jnp.float64


def test_merging_keeps_what_only_one_side_has():
    left = {"a": Mean(total=jnp.float32(1), weight=jnp.float32(1)), "b": Max(value=jnp.float32(2))}
    right = {"a": Mean(total=jnp.float32(5), weight=jnp.float32(2)), "c": Max(value=jnp.float32(7))}
    merged = merge(left, right)
    assert finalise(merged) == {"a": 2.0, "b": 2.0, "c": 7.0}
    assert finalise(merge({"b": Max(value=jnp.float32(9))}, left))["b"] == 9


def test_metrics_pass_through_jit_and_loops():
    @jax.jit
    def total(values):
        def body(index, carry):
            return merge(carry, {"x": mean(values[index]), "top": maximum(values[index])})

        return jax.lax.fori_loop(1, 4, body, {"x": mean(values[0]), "top": maximum(values[0])})

    values = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    result = finalise(total(values))
    assert result["x"] == pytest.approx(values.mean(), abs=1e-6)
    assert result["top"] == values.max()


def test_metrics_of_every_kind_add_up_from_nothing():
    value = jnp.array([4, 7, 1, 9])
    kinds = {"mean": mean, "max": maximum, "min": minimum}
    metrics = {name: kind(value) for name, kind in kinds.items()}
    merged = empty_like(metrics)
    for part in (value[:1], value[1:]):
        merged = merge(merged, {name: kind(part) for name, kind in kinds.items()})
    assert finalise(merged) == finalise(metrics) == {"mean": 5.25, "max": 9, "min": 1}
