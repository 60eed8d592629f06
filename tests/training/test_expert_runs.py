"""Runs of a small Qwen3-MoE: what they record, save and replay."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import small_run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxgrpo
from jaxgrpo.cli import make_base
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.records import EXPERTS
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.hf import folders
from jaxgrpo.training import loop
from jaxgrpo.training.export import export
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model with experts that has the tokenizer of `small_run.base`."""
    path = tmp_path_factory.mktemp("base") / "base"
    tokenizer = folders.read_tokenizer(small_run.base())
    model = decoder.build(make_base.base_config(len(tokenizer), 32, family="qwen3_moe"))
    folders.save_model(model, jax.jit(model.init)(jax.random.key(0)), path, tokenizer=tokenizer)
    return str(path)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """Two steps of a run that writes its rollouts and fills its steps with live groups."""
    folder = tmp_path_factory.mktemp("experts") / "r"
    changes = {"train.steps": 2, "run.rollouts_every": 1, "rollout.refill": {"factor": 2.0}}
    return loop.train(small_run.config(folder, **{"model.path": base, **changes}))


def test_a_run_says_how_its_experts_are_used(run):
    for line in small_run.metrics(run.path):
        assert 1 <= line["routing/load"] < 2  # 4 experts, of which a token passes 2
        assert 0 <= line["routing/dead"] < 1
        assert line["routing/rerouted"] < 0.01
        assert line["sampling/sampling_logp_difference/max"] < 1e-4


def test_saved_rollouts_hold_the_experts_of_what_was_drawn(run):
    files = sorted((run.path / "rollouts").iterdir())
    for file in files:
        arrays = load_file(file)
        experts, mask = arrays[f"fields.{EXPERTS}"], arrays["token_mask"]
        assert experts.shape == (*mask.shape, 2, 2)
        assert experts.dtype == np.int16
        recorded = (experts >= 0).all((-1, -2))
        np.testing.assert_array_equal(recorded, mask)
        assert experts.max() == 3


@pytest.mark.full
def test_a_replay_of_its_files_ends_with_the_parameters_of_the_run(run, base, tmp_path):
    files = sorted((run.path / "rollouts").iterdir())
    changes = {"model.path": base, "train.steps": 2}
    again = loop.train(small_run.config(tmp_path / "r", **changes), rollouts=files)
    assert again.summary["parameter_hash"] == run.summary["parameter_hash"]


@pytest.mark.full
def test_a_run_trains_adapters_of_its_experts_and_exports_both_forms(base, tmp_path):
    """And continues bit for bit, and merged weights compute what it sampled from."""
    changes = {"model.path": base, "lora.rank": 2, "lora.alpha": 4.0, "checkpoint.every": 1}
    changes |= {"lora.targets": r".*experts[.](gate_up|down)_proj"}
    finished = loop.train(small_run.config(tmp_path / "r", **changes, **{"train.steps": 2}))
    for line in small_run.metrics(finished.path):
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    loop.train(small_run.config(tmp_path / "again", **changes, **{"train.steps": 1}))
    again = loop.train(
        small_run.config(tmp_path / "again", **changes, **{"train.steps": 2}), resume="auto"
    )
    assert again.summary["parameter_hash"] == finished.summary["parameter_hash"]
    adapted, params = folders.load_model(base, adapter=finished.path / "adapter")
    learned, _ = lora.split(params)
    assert learned["blocks"]["0"].keys() == {"experts"}
    jax.tree.map(np.testing.assert_array_equal, learned, finished.learner.trainable)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(learned))
    export(finished.path, tmp_path / "merged")
    plain, merged = folders.load_model(tmp_path / "merged")
    tokens = np.random.default_rng(0).integers(3, plain.config.vocab_size, (2, 7))
    logits = [
        jaxgrpo.logits(model, values, tokens, np.ones_like(tokens))
        for model, values in ((adapted, params), (plain, merged))
    ]
    np.testing.assert_allclose(*logits, atol=1e-4, rtol=0)


@pytest.mark.full
def test_fresh_routing_is_a_setting(base, tmp_path):
    changes = {"model.path": base, "train.steps": 1, "train.routing": "fresh"}
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    (line,) = small_run.metrics(finished.path)
    assert "routing/rerouted" not in line
    assert line["routing/load"] >= 1


@pytest.mark.full
def test_corrections_that_move_are_resumed_bit_for_bit_and_exported(tmp_path):
    tokenizer = folders.read_tokenizer(small_run.base())
    model = decoder.build(make_base.base_config(len(tokenizer), 32, family="glm4_moe"))
    params = jax.jit(model.init)(jax.random.key(0))
    folders.save_model(model, params, tmp_path / "base", tokenizer=tokenizer)
    changes = {"model.path": str(tmp_path / "base"), "checkpoint.every": 1}
    changes |= {"train.router_aux_loss_coef": 0.01, "train.router_bias_update_rate": 0.125}
    finished = loop.train(small_run.config(tmp_path / "r", **changes, **{"train.steps": 3}))
    assert all(line["routing/aux_loss"] > 1.9 for line in small_run.metrics(finished.path))
    loop.train(small_run.config(tmp_path / "again", **changes, **{"train.steps": 2}))
    again = loop.train(
        small_run.config(tmp_path / "again", **changes, **{"train.steps": 3}), resume="auto"
    )
    assert again.summary["parameter_hash"] == finished.summary["parameter_hash"]
    trained = finished.learner.trainable
    _, exported = folders.load_model(finished.path / "model")
    jax.tree.map(np.testing.assert_array_equal, exported, trained)
    correction = np.asarray(trained["blocks"]["1"]["experts"]["router"]["correction"])
    steps = correction / 0.125  # from 0
    np.testing.assert_array_equal(steps, np.round(steps))
    assert 1 <= np.abs(steps).max() <= 3


def test_files_without_records_are_refused_where_loads_are_read(run, base, tmp_path):
    file = min((run.path / "rollouts").iterdir())
    arrays = load_file(file)
    del arrays[f"fields.{EXPERTS}"]
    with safe_open(file, "numpy") as content:
        save_file(arrays, tmp_path / file.name, content.metadata())
    changes = {"model.path": base, "train.steps": 1, "train.router_aux_loss_coef": 0.01}
    with pytest.raises(InputError, match=r"reads the fields experts.*write fields\.experts too"):
        loop.train(small_run.config(tmp_path / "r", **changes), rollouts=[tmp_path / file.name])


def with_experts(path, file, change):
    """A file of rollouts whose records of experts are changed."""
    arrays = load_file(file)
    arrays[f"fields.{EXPERTS}"] = np.ascontiguousarray(change(arrays[f"fields.{EXPERTS}"]))
    with safe_open(file, "numpy") as content:
        save_file(arrays, path, content.metadata())
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda experts: np.concatenate([experts, experts], -2),  # four layers
        lambda experts: experts[..., :1],  # of a model whose tokens pass one expert
        lambda experts: experts + 1,  # counted from 1
        lambda experts: experts - 1,
    ],
    ids=["layers", "k", "from one", "negative"],
)
def test_experts_of_another_model_are_refused_before_anything_is_trained(
    run, base, tmp_path, change
):
    file = with_experts(tmp_path / "x.safetensors", min((run.path / "rollouts").iterdir()), change)
    changes = {"model.path": base, "train.steps": 1}
    with pytest.raises(InputError, match=r"x\.safetensors: fields\.experts has experts -?\d+ to"):
        setup(small_run.config(tmp_path / "r", **changes), rollouts=[file])


@pytest.mark.full
def test_a_model_without_experts_replays_what_a_model_with_them_has_drawn(run, tmp_path):
    file = min((run.path / "rollouts").iterdir())
    finished = loop.train(small_run.config(tmp_path / "r", **{"train.steps": 1}), rollouts=[file])
    (line,) = small_run.metrics(finished.path)
    assert "routing/load" not in line
    assert np.isfinite(line["loss"])
