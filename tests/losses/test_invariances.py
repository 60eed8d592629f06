"""Every surrogate with every reduction: what may not change the loss or its gradient, and where.

| invariance | where it holds |
|---|---|
| micro-batches, order, padding, masked groups, devices, what is masked, packing | every pair |
| a masked row more | every pair; with count_empty the divisor counts it |
| no gradient beyond the bounds | clip, gspo, gmpo and their relatives, dppo_tv; not cispo |
| the gradient on policy is REINFORCE's | all but rewards_as_labels, and shaped_ratio's multiple |
| gspo = gspo_token | weights and advantages that are constant within a sequence |

One jitted function evaluates all pairs (`loss_pairs.py`); each invariance changes its arguments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from loss_pairs import (
    BATCH_FIELDS,
    BOUNDED,
    BY_PROBABILITY,
    COUNTS_MASKED_ROWS,
    NO_SCORE,
    OPTIONS,
    REDUCTIONS,
    SLOPE_AT_1,
    SURROGATES,
    TOLERANCE,
    G,
    P,
    T,
    check_changed,
    check_equal,
    evaluate_all,
    evaluate_batch,
    make_batch,
    pick,
    reduce_all,
)

from jaxgrpo.core.metrics import merge
from jaxgrpo.losses import policy_loss


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_what_masked_entries_hold_reaches_neither_value_nor_gradient(dtype, garbage):
    batch = make_batch(dtype)
    mask = batch["mask"]
    spoilt = {
        name: jnp.where(mask, leaf, garbage) if leaf.dtype == dtype else leaf
        for name, leaf in batch.items()
    }
    clean = evaluate_batch(batch)
    check_equal(clean, evaluate_batch(spoilt), 0)
    for loss, gradient, _ in clean.values():
        assert np.isfinite(list(loss.values())).all()
        for leaf in gradient.values():
            assert (np.asarray(leaf)[~np.asarray(mask)] == 0).all()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32], indirect=True)
def test_micro_batches_add_up_to_the_whole(dtype):
    batch = make_batch(dtype)
    weights = reduce_all(batch["mask"])
    halves = [
        evaluate_all(pick(batch, part), pick(weights, part)) for part in np.split(np.arange(P), 2)
    ]
    for name, case in evaluate_all(batch, weights).items():
        parts = [half[name] for half in halves]
        added = jax.tree.map(lambda *leaves: sum(leaves), *(part[0] for part in parts))
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part[1] for part in parts))
        merged = merge(parts[0][2], parts[1][2])
        check_equal((added, joined, merged), case, TOLERANCE[dtype])


@pytest.mark.slow
def test_order_of_prompts_and_samples_does_not_matter(float64):
    batch = make_batch(float64)
    random = np.random.default_rng(5)
    index = np.ix_(random.permutation(P), random.permutation(G))
    back = tuple(np.argsort(order, axis=None).reshape(order.shape) for order in index)
    check_changed(
        evaluate_batch(batch), evaluate_batch(pick(batch, index)), lambda leaf: leaf[back], 1e-12
    )


@pytest.mark.slow
def test_padding_and_masked_rows_and_groups_change_nothing(float64):
    """Two positions, a row in every group and a whole group, all masked; only TRL counts rows."""
    batch = make_batch(float64)
    wide = {
        name: jnp.pad(
            leaf, ((0, 1), (0, 1), (0, 2)), constant_values=False if leaf.dtype == bool else 7
        )
        for name, leaf in batch.items()
    }
    plain, padded = evaluate_batch(batch), evaluate_batch(wide)
    check_changed(plain, padded, lambda leaf: leaf[:P, :G, :T], 1e-12, COUNTS_MASKED_ROWS)
    for cases, rows in ((plain, P * G), (padded, (P + 1) * (G + 1))):
        loss = cases["clip"][0]
        shrunk = loss["sequence_mean of all"] / loss["sequence_mean"]
        np.testing.assert_allclose(shrunk, (P * G - 1) / rows, rtol=1e-12)  # one row is empty


@pytest.mark.full
@pytest.mark.slow
def test_four_devices_give_what_one_gives(float64):
    batch = make_batch(float64)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    assert len(spread["logp"].sharding.device_set) == 4
    check_equal(evaluate_batch(batch), evaluate_batch(spread), 1e-12)


@pytest.mark.slow
def test_samples_packed_into_one_row_give_what_they_give_in_rows(float64):
    """Each group in a row, its samples one after another, from another position in each."""
    batch = make_batch(float64)
    batch["segment"] = batch["segment"] * jnp.arange(1, G + 1, dtype=jnp.int32)[None, :, None]
    weights = reduce_all(batch["mask"])

    def pack(leaf):
        rows = leaf.reshape(P, G * T)
        return jnp.stack([jnp.roll(row, 2 * number) for number, row in enumerate(rows)])

    def unpack(leaf):
        rows = [np.roll(row, -2 * number) for number, row in enumerate(leaf)]
        return np.stack(rows).reshape(P, G, T)

    packed = evaluate_all(jax.tree.map(pack, batch), jax.tree.map(pack, weights))
    check_changed(evaluate_all(batch, weights), packed, unpack, 1e-12)


@pytest.mark.slow
def test_plain_arrays_give_the_numbers_of_the_trainer_packed_or_not(float64):
    batch = make_batch(float64)
    weights = reduce_all(batch["mask"])
    expected = evaluate_all(batch, weights)["gspo"]
    sample = jnp.arange(P * G, dtype=jnp.int32).repeat(T)
    prompt = 7 - 5 * (sample // G)  # any numbers
    shapes = {"rows": (P * G, T), "one prompt a row": (P, G * T), "two": (P // 2, 2 * G * T)}

    @jax.jit
    def losses(batch):
        results = {}
        for layout, shape in shapes.items():
            arrays = [
                batch[key].reshape(shape) for key in ("logp", "proximal", "advantage", "mask")
            ]
            segment = None if layout == "rows" else (1000 - 30 * sample).reshape(shape)
            for name, reduction in REDUCTIONS.items():

                def loss(logp, rest=arrays[1:], segment=segment, reduction=reduction):
                    group = prompt.reshape(rest[0].shape)
                    options = OPTIONS["gspo"]
                    return policy_loss(
                        *("gspo", reduction, logp),
                        *(rest[0], rest[1], rest[2], segment, group),
                        surrogate_options=options,
                    )[0]

                results[f"{layout}: {name}"] = jax.value_and_grad(loss)(arrays[0])
        return results

    for name, (loss, gradient) in losses(batch).items():
        reduction = name.partition(": ")[2]
        np.testing.assert_allclose(loss, expected[0][reduction], 1e-12, err_msg=name)
        np.testing.assert_allclose(
            gradient.reshape(P, G, T), expected[1][reduction], 1e-12, 1e-15, err_msg=name
        )


@pytest.mark.slow
def test_on_policy_the_gradient_is_that_of_reinforce(dtype):
    """Ratios are exactly 1: no surrogate sees a difference between the two policies."""
    batch = make_batch(dtype)
    nothing = 0 * batch["replayed"]
    batch |= {"proximal": batch["logp"], "behavior_logp": batch["logp"]}
    batch |= dict.fromkeys(("replayed", "group_log_ratio", *BATCH_FIELDS), nothing)
    weights, results = reduce_all(batch["mask"]), evaluate_batch(batch)
    for name in SURROGATES.keys() - NO_SCORE:
        loss, gradient, metrics = results[name]
        for reduction, weight in weights.items():
            expected = -np.asarray(weight) * np.asarray(batch["advantage"])
            slope = SLOPE_AT_1.get(name, 1.0)
            check_equal(gradient[reduction], slope * expected, TOLERANCE[dtype])
            if name in BOUNDED - {"dppo_tv"} | {"on_policy", "by_sample", "ce_gppo", "kl_cov"}:
                check_equal(loss[reduction], expected.sum(), TOLERANCE[dtype])
        assert metrics["ratio_max"].result() == 1
        assert metrics["policy_kl"].result() == 0
        assert "clip_ratio/region_mean" not in metrics or (
            metrics["clip_ratio/region_mean"].result() == 0
        )
    check_equal(results["cispo"][1], results["reinforce"][1], 0)
    check_equal(results["cispo"][0], results["reinforce"][0], 0)


def test_gspo_and_gspo_token_agree_where_weights_and_advantages_are_constant(float64):
    batch = make_batch(float64)
    results = evaluate_batch(batch)
    check_equal(results["gspo"], results["gspo_token"], 1e-12)
    cut = results["gspo"][2]["clip_ratio/region_mean"].result()
    assert 0.1 < cut < 0.9
    uneven = {**batch, "advantage": batch["advantage"] * jnp.arange(1.0, T + 1)[None, None]}
    results = evaluate_batch(uneven)
    gradients = [results[name][1]["token_mean"] for name in ("gspo", "gspo_token")]
    assert np.abs(gradients[0] - gradients[1]).max() > 1e-3


def test_tokens_beyond_the_bounds_get_no_gradient_but_from_cispo(float64):
    """Every token 0.5 beyond its old log-prob in the direction that its advantage wants."""
    batch = make_batch(float64)
    sign = jnp.sign(batch["advantage"])
    batch["clip_cov_tokens"] = 0 * batch["replayed"]
    moved, back = (
        {**batch, **dict.fromkeys(("proximal", "behavior_logp"), batch["logp"] + shift * sign)}
        for shift in (-0.5, 0.5)
    )
    mask = np.asarray(batch["mask"] & (sign != 0))
    gone, returning = evaluate_batch(moved), evaluate_batch(back)
    for name in SURROGATES.keys() - {"by_sample"}:
        gradient = np.asarray(gone[name][1]["token_mean"])
        touched = gradient[mask] != 0
        if name in BY_PROBABILITY:  # rare tokens are not touched
            share = gone[name][2]["clip_ratio/region_mean"].result()
            assert 0 < (~touched).sum() == round(share * np.asarray(batch["mask"]).sum())
        else:
            assert (~touched if name in BOUNDED else touched).all(), name
        assert (np.asarray(returning[name][1]["token_mean"])[mask] != 0).all(), name
