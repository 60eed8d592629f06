"""Every surrogate with every reduction: extreme ratios, batches without a token, bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_pairs import G, P, T, check_equal, evaluate_batch, make_batch

BY_SEQUENCE = {
    *("gspo", "gspo_token", "gmpo", "vespo", "gvpo"),
    *("topr", "mirror_descent", "rewards_as_labels"),
}


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.full)]
)
def test_log_ratios_of_100_are_clamped_and_counted(dtype, advantage):
    with jax.enable_x64(dtype is np.float64):
        batch = make_batch(np.float64 if dtype is np.float64 else np.float32)
        log_ratio = jnp.asarray(100 * (-1) ** np.arange(T), batch["logp"].dtype)
        batch["proximal"] = batch["logp"] - log_ratio[None, None]
        batch["advantage"] = jnp.full_like(batch["logp"], advantage)
        batch = {
            name: leaf.astype(dtype) if leaf.dtype == batch["logp"].dtype else leaf
            for name, leaf in batch.items()
        }
        for name, (loss, gradient, metrics) in evaluate_batch(batch).items():
            assert np.isfinite(list(loss.values())).all(), name
            for leaf in gradient.values():
                assert leaf.dtype == dtype
                assert np.isfinite(np.asarray(leaf, np.float64)).all(), name
            assert loss["token_mean"].dtype == (np.float64 if dtype is np.float64 else np.float32)
            counted = metrics["clip_ratio/log_ratio_clamped"].result()
            # Means over a sequence: +100 and -100 may cancel, one more of either does not.
            by_sequence = name in BY_SEQUENCE
            assert (0 < counted <= 1) if by_sequence else counted == 1, name


@pytest.mark.slow
def test_a_batch_without_any_token_has_loss_and_gradient_zero(dtype):
    batch = make_batch(dtype)
    batch = {**batch, "mask": jnp.zeros((P, G, T), bool), "logp": batch["logp"] * np.nan}
    for name, (loss, gradient, metrics) in evaluate_batch(batch).items():
        assert all(value == 0 for value in loss.values()), name
        assert all((np.asarray(leaf) == 0).all() for leaf in gradient.values()), name
        assert np.isnan(metrics["policy_kl"].result())  # of nothing


@pytest.mark.slow
def test_bfloat16_is_computed_in_float32():
    batch = make_batch(np.float32)
    rounded = {
        name: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf
        for name, leaf in batch.items()
    }
    back = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, rounded
    )
    plain = evaluate_batch(back)
    for name, (loss, gradient, _) in evaluate_batch(rounded).items():
        check_equal(loss, plain[name][0], 1e-6)
        assert gradient["token_mean"].dtype == jnp.bfloat16
