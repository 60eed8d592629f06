"""Runs that train adapters: the weights stay, resumed is uninterrupted, folders are ordinary."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import small_run

import jaxgrpo
from jaxgrpo.core.types import WEIGHTS
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.hf import adapters, folders
from jaxgrpo.training import memory
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.setup import kept_policies, setup

LORA = {
    "lora.rank": 2,
    "lora.alpha": 4.0,
    "loss.kl": {"use": "full_kl", "beta": 0.01},
    "optimizer.learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return jaxgrpo.train(small_run.config(folder / "run", **LORA))


def test_adapters_move_and_weights_and_reference_do_not(finished):
    state = finished.state
    _, base = folders.load_model(small_run.base())
    jax.tree.map(np.testing.assert_array_equal, state.frozen[WEIGHTS], base)
    assert lora.split(state.trainable)[1].keys() == state.trainable.keys()
    moments = {leaf.shape for leaf in jax.tree.leaves(state.opt_state) if np.ndim(leaf)}
    assert moments == {leaf.shape for leaf in jax.tree.leaves(state.trainable)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.trainable):
        assert path[-1].key in lora.NAMES
        assert np.abs(leaf).max() > 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.frozen["reference"]):
        assert path[-1].key == "lora_a" or not leaf.any()
    lines = finished.metrics
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-3


def test_a_resumed_run_ends_as_the_uninterrupted_one(finished, tmp_path):
    changes = {**LORA, "train.steps": 2}
    jaxgrpo.train(small_run.config(tmp_path / "run", **changes))
    resumed = jaxgrpo.train(small_run.config(tmp_path / "run", **LORA), resume="auto")
    assert resumed.summary["parameter_hash"] == finished.summary["parameter_hash"]
    assert parameter_hash(resumed.state.trainable) == parameter_hash(finished.state.trainable)


def test_the_folder_has_the_merged_model_and_the_adapter(finished, tmp_path):
    plain, base = folders.load_model(small_run.base())
    settings = adapters.read_config(finished.path / "adapter", plain.config)
    model = decoder.build(dataclasses.replace(plain.config, lora=settings))
    own = adapters.read_params(finished.path / "adapter", model)
    jax.tree.map(np.testing.assert_array_equal, own, finished.state.trainable)
    tokens = np.random.default_rng(0).integers(3, 12, (2, 9))
    mask = np.ones_like(tokens)
    expected = jaxgrpo.logits(model, lora.join(own, base), tokens, mask)
    finished.export(tmp_path / "exported")
    for folder in (finished.path / "model", tmp_path / "exported"):
        found = jaxgrpo.logits(*folders.load_model(folder), tokens, mask)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected - jaxgrpo.logits(plain, base, tokens, mask)).max() > 1e-3


def test_memory_counts_narrow_weights_once_and_wide_adapters(tmp_path):
    changes = {**LORA, "model.dtype": "bfloat16"}
    run = setup(small_run.config(tmp_path / "run", **changes))
    kept = kept_policies(run.blueprint)
    assert kept == ["reference"]
    counted = memory.count(run.blueprint, kept)

    def size(tree):
        return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))

    assert counted.frozen == size(run.state.frozen[WEIGHTS])
    assert counted.copies == size(run.state.frozen["reference"])
    assert counted.parameters == size(run.state.trainable)
    assert counted.optimizer == size(run.state.opt_state)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(run.state.frozen)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(run.state.trainable)} == {"float32"}
    assert "frozen weights" in counted.lines(2**30)["  kept"]
