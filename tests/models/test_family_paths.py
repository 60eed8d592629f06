"""Every family sampled and updated, on one device and on four, beside plain whole sequences."""

from __future__ import annotations

import functools

import family_runs
import jax
import numpy as np
import pytest
from family_runs import CLOSE, KINDS, LONG, shortest
from quick import LONG as RARE
from quick import long_but

import jaxgrpo
from jaxgrpo.models.hf.families import FAMILIES

DIFFERENT = {"gemma2", "olmo3"}
"""Soft caps and norms on both sides; norms after branches and two ropes."""


def paths(quick, single):
    """Families and devices: of four devices the quick families, in `make test-all` `single` on one
    and the kinds on four, in `make test-long` all of both."""

    def marks(family: str, devices: int):
        if family in (single if devices == 1 else KINDS - quick):
            return pytest.mark.full
        return pytest.mark.slow if family in quick else RARE

    return [
        pytest.param(family, devices, marks=marks(family, devices))
        for family in sorted(FAMILIES)
        for devices in (1, 4)
    ]


def by_token_logp(family, rollouts):
    with jax.enable_x64(True):
        logp_of = functools.partial(jaxgrpo.token_logp, *family_runs.read(family, "float64"))
        return np.asarray(family_runs.whole_sequence_logp(logp_of, rollouts))


@pytest.mark.parametrize(("family", "devices"), paths(DIFFERENT - {"gemma2"}, FAMILIES))
def test_decoded_log_probs_are_those_of_whole_sequences(family, devices):
    rollouts = family_runs.sampled(family, devices)
    expected = by_token_logp(family, rollouts)
    np.testing.assert_allclose(rollouts.behavior_logp, expected, rtol=0, atol=CLOSE)
    lengths = rollouts.token_mask.sum(-1)
    assert lengths.min() < lengths.max() == LONG
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("family", long_but(KINDS, sorted(FAMILIES)))
def test_four_devices_draw_the_tokens_of_one(family):
    single, four = family_runs.sampled(family, 1), family_runs.sampled(family, 4)
    np.testing.assert_array_equal(four.completion_tokens, single.completion_tokens)
    np.testing.assert_allclose(four.behavior_logp, single.behavior_logp, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("family", "devices"), paths(DIFFERENT - {"olmo3"}, KINDS | {"olmo_hybrid"})
)
def test_an_update_has_the_log_probs_and_the_gradient_of_whole_sequences(family, devices):
    """Its rows hold several samples and share their prompts. In float64: equal means equal."""
    logp, gradient = family_runs.plain(family, alone=False)
    with jax.enable_x64(True):
        run = family_runs.run(family, shortest(family), devices=devices, dtype="float64")
        furthest, update_gradient = family_runs.updated(run, alone=False)
    assert 0 < furthest < 1e-9
    rollouts, _ = family_runs.update_inputs(False, shortest(family))
    np.testing.assert_allclose(by_token_logp(family, rollouts), logp, rtol=0, atol=1e-9)
    assert np.abs(logp).max() > 1
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    for (path, expected), leaf in zip(leaves, jax.tree.leaves(update_gradient), strict=True):
        error = np.linalg.norm(np.asarray(leaf) - expected)
        assert error <= 1e-9 * np.linalg.norm(expected), jax.tree_util.keystr(path)
