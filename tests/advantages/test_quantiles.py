"""The largest share of masked values against NumPy, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.ranking import top_count, top_share

SHARES = (0.0, 0.2, 0.5, 0.9, 1.0)


def rows(dtype) -> tuple[np.ndarray, np.ndarray]:
    """Ties, signed zeros, infinities, tiny and huge numbers; a row of none and a row of one."""
    random = np.random.default_rng(0)
    value = random.normal(size=(9, 50)).astype(dtype)
    value[1] = random.integers(-2, 3, 50)
    value[2, ::2], value[2, 1::2] = 0.0, -0.0
    value[3, :3] = np.inf, -np.inf, np.finfo(dtype).max
    value[4] *= np.finfo(dtype).tiny * 1e3  # smaller ones are 0 to XLA
    value[5] = -0.1
    mask = random.random((9, 50)) < 0.7
    mask[6], mask[7] = False, np.arange(50) == 7
    value[~mask] = np.nan
    return value, mask


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_largest_share_is_exact_and_equal_entries_all_enter(dtype):
    value, mask = rows(dtype)
    with jax.enable_x64(dtype is np.float64):
        arrays = jnp.asarray(value), jnp.asarray(mask)
        masks = jax.jit(lambda x, keep: [top_share(x, keep, share) for share in SHARES])(*arrays)
    for share, top in zip(SHARES, masks, strict=True):
        for row, keep, selected in zip(value, mask, top, strict=True):
            entries = np.sort(row[keep])
            if not len(entries):
                assert not selected.any()
                continue
            count = int(np.ceil(np.round(share * len(entries), 9)))
            expected = keep & (row >= entries[-count]) if count else np.zeros(50, bool)
            assert (np.asarray(selected) == expected).all()


@pytest.mark.parametrize("count", [0, 1, 20, 50])
def test_the_largest_are_so_many_and_of_equal_ones_the_first(count):
    value, mask = rows(np.float32)
    top = np.asarray(top_count(jnp.asarray(value), jnp.asarray(mask), count))
    for row, keep, selected in zip(value, mask, top, strict=True):
        order = sorted(np.flatnonzero(keep), key=lambda place: -row[place])  # stable
        assert np.flatnonzero(selected).tolist() == sorted(order[:count])


def test_the_first_of_a_whole_batch_are_those_of_its_first_rows():
    everything = jnp.ones((2, 3), bool)
    top = top_count(jnp.zeros((2, 3)), everything, 4, axis=(0, 1))
    assert top.tolist() == [[True] * 3, [True, False, False]]


def test_the_share_may_be_taken_of_the_whole_batch_or_of_another_axis():
    value = jnp.asarray(np.random.default_rng(1).permutation(24).reshape(2, 3, 4) * 1.0)
    everything = jnp.ones(value.shape, bool)
    batch_top = top_share(value, everything, 0.25, axis=(0, 1, 2))
    assert sorted(np.asarray(value)[np.asarray(batch_top)]) == [18, 19, 20, 21, 22, 23]
    first = top_share(value, everything, 0.1, axis=1)
    np.testing.assert_array_equal(
        first, np.asarray(value) == np.asarray(value).max(1, keepdims=True)
    )


def test_half_precision_is_ranked_as_it_is():
    value = jnp.asarray([[0.5, -2.0, 1.5]], jnp.bfloat16)
    top = top_share(value, jnp.ones((1, 3), bool), 0.5)
    assert top.tolist() == [[True, False, True]]
