"""Every surrogate with every reduction and penalty: what may not change the loss or its gradient.

One jitted function evaluates all pairs; each invariance changes its arguments.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgrpo.losses import (
    build_entropy,
    build_penalty,
    build_reduction,
    build_surrogate,
    registry,
    token_loss,
)
from jaxgrpo.metrics import merge

P, G, T = 4, 3, 6
BY_SEQUENCE = ("k2", "forward_kl_k3", "reverse_kl_off_policy")
OPTIONS = {"constant": {"length": 5.0}}
SURROGATES = {name: build_surrogate(name, OPTIONS.get(name)) for name in registry.surrogates}
REDUCTIONS = {name: build_reduction(name, OPTIONS.get(name)) for name in registry.reductions}
PENALTIES = [
    *(build_penalty(name, {"beta": 0.1}) for name in registry.penalties),
    *(build_penalty(name, {"beta": 0.1, "level": "sequence"}) for name in BY_SEQUENCE),
    *(build_entropy("bonus", {"coefficient": 0.1}), build_entropy("adaptive", {"target": 1.0})),
]
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


@pytest.fixture(params=[np.float64, np.float32], ids=["float64", "float32"])
def dtype(request):
    with jax.enable_x64(request.param is np.float64):
        yield request.param


def make_batch(dtype):
    """Arrays [P, G, T] with an empty row and a group without advantage."""
    random = np.random.default_rng(0)
    logp = -random.exponential(size=(P, G, T))
    proximal, reference = (logp + 0.4 * random.normal(size=(P, G, T)) for _ in range(2))
    advantage = np.repeat(random.normal(size=(P, G, 1)), T, 2)
    advantage[2] = 0  # a flat group, in the denominator all the same
    mask = np.arange(T) < random.integers(1, T + 1, (P, G, 1))
    mask[1, 2] = False
    arrays = {"logp": logp, "proximal": proximal, "advantage": advantage, "reference": reference}
    return {name: jnp.asarray(leaf, dtype) for name, leaf in arrays.items()} | {
        "mask": jnp.asarray(mask)
    }


@jax.jit
def reduce_all(mask):
    return {name: reduction.weights(mask) for name, reduction in REDUCTIONS.items()}


@jax.jit
def evaluate_all(batch, weights):
    """pair -> (loss, gradient, metrics), given the weights of the whole batch."""

    def one(logp, surrogate, penalties, weight):
        other = batch["reference"]
        fields = {"reference_logp": other, "full_kl": other, "policy_entropy": other}
        rows = batch["mask"].astype(jnp.int32)
        value, metrics = token_loss(
            surrogate, penalties, logp, batch["proximal"], batch["advantage"], batch["mask"],
            rows, fields,
        )  # fmt: skip
        return (weight.astype(value.dtype) * value).sum(), metrics

    results = {}
    for (name, surrogate), reduction, penalties in itertools.product(
        SURROGATES.items(), REDUCTIONS, ([], PENALTIES)
    ):
        slope = jax.value_and_grad(one, has_aux=True)
        (loss, metrics), gradient = slope(batch["logp"], surrogate, penalties, weights[reduction])
        results[f"{name} {reduction} {len(penalties)}"] = loss, gradient, metrics
    return results


def check_equal(left, right, tolerance):
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, tolerance, tolerance),
        left,
        right,
    )


def pick(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def whole(batch):
    return evaluate_all(batch, reduce_all(batch["mask"]))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_what_masked_entries_hold_reaches_neither_value_nor_gradient(dtype, garbage):
    batch = make_batch(dtype)
    mask = batch["mask"]
    spoil = lambda leaf: leaf if leaf is mask else jnp.where(mask, leaf, garbage)  # noqa: E731
    clean, spoilt = whole(batch), whole({name: spoil(leaf) for name, leaf in batch.items()})
    check_equal(clean, spoilt, 0)
    for loss, gradient, _ in clean.values():
        assert np.isfinite(loss)
        assert (np.asarray(gradient)[~np.asarray(mask)] == 0).all()


def test_micro_batches_add_up_to_the_whole(dtype):
    batch = make_batch(dtype)
    weights = reduce_all(batch["mask"])
    halves = [
        evaluate_all(pick(batch, part), pick(weights, part)) for part in np.split(np.arange(P), 2)
    ]
    for name, (loss, gradient, metrics) in evaluate_all(batch, weights).items():
        parts = [half[name] for half in halves]
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(sum(part[0] for part in parts), loss, tolerance, tolerance)
        joined = np.concatenate([part[1] for part in parts])
        np.testing.assert_allclose(joined, gradient, tolerance, tolerance)
        check_equal(merge(parts[0][2], parts[1][2]), metrics, tolerance)


def test_order_of_prompts_and_samples_does_not_matter(dtype):
    batch = make_batch(dtype)
    random = np.random.default_rng(5)
    index = np.ix_(random.permutation(P), random.permutation(G))
    plain, moved = whole(batch), whole(pick(batch, index))
    for name, (loss, gradient, metrics) in plain.items():
        expected = loss, gradient[index], metrics
        check_equal(expected, moved[name], TOLERANCE[dtype])


def test_padding_and_masked_rows_change_nothing(dtype):
    batch = make_batch(dtype)
    wide = {
        name: jnp.pad(
            leaf, ((0, 1), (0, 0), (0, 2)), constant_values=False if leaf.dtype == bool else 7
        )
        for name, leaf in batch.items()
    }
    padded = whole(wide)
    for name, (loss, gradient, metrics) in whole(batch).items():
        cut = padded[name][0], padded[name][1][:P, :, :T], padded[name][2]
        check_equal((loss, gradient, metrics), cut, TOLERANCE[dtype])


def test_four_devices_give_what_one_gives(dtype):
    batch = make_batch(dtype)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    assert len(spread["logp"].sharding.device_set) == 4
    check_equal(whole(batch), whole(spread), TOLERANCE[dtype])


def test_on_policy_the_gradient_is_that_of_reinforce(dtype):
    batch = make_batch(dtype)
    batch = {**batch, "proximal": batch["logp"]}
    weights = reduce_all(batch["mask"])
    for reduction, weight in weights.items():
        loss, gradient, metrics = whole(batch)[f"clip {reduction} 0"]
        expected = -np.asarray(weight) * np.asarray(batch["advantage"])
        np.testing.assert_allclose(gradient, expected, TOLERANCE[dtype], TOLERANCE[dtype])
        np.testing.assert_allclose(loss, expected.sum(), TOLERANCE[dtype], TOLERANCE[dtype])
        assert metrics["ratio_max"].result() == 1
        assert metrics["policy_kl"].result() == 0


def test_a_batch_without_any_token_has_loss_and_gradient_zero(dtype):
    batch = make_batch(dtype)
    batch = {**batch, "mask": jnp.zeros((P, G, T), bool), "logp": batch["logp"] * np.nan}
    for loss, gradient, metrics in whole(batch).values():
        assert loss == 0
        assert (np.asarray(gradient) == 0).all()
        assert np.isnan(metrics["clip_ratio/region_mean"].result())  # of nothing


def test_bfloat16_is_computed_in_float32():
    batch = make_batch(np.float32)
    rounded = {
        name: leaf if leaf.dtype == bool else leaf.astype(jnp.bfloat16)
        for name, leaf in batch.items()
    }
    back = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, rounded
    )
    for name, (loss, gradient, _) in whole(rounded).items():
        assert loss.dtype == jnp.float32
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(loss, whole(back)[name][0], rtol=1e-6)
