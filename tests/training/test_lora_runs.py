"""Runs that train adapters: the weights stay, resumed is uninterrupted, folders are ordinary."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import small_run

import jaxgrpo
from jaxgrpo.cli import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import WEIGHTS
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.hf import adapters, folders, texts
from jaxgrpo.training import memory, parameters
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.export import export
from jaxgrpo.training.setup import setup

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


@pytest.mark.slow
def test_adapters_move_and_weights_and_reference_do_not(finished):
    learner = finished.learner
    _, base = folders.load_model(small_run.base())
    jax.tree.map(np.testing.assert_array_equal, learner.frozen[WEIGHTS], base)
    assert lora.split(learner.trainable)[1].keys() == learner.trainable.keys()
    moments = {leaf.shape for leaf in jax.tree.leaves(learner.opt_state) if np.ndim(leaf)}
    assert moments == {leaf.shape for leaf in jax.tree.leaves(learner.trainable)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(learner.trainable):
        assert path[-1].key in lora.NAMES
        assert np.abs(leaf).max() > 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(learner.frozen["reference"]):
        assert path[-1].key == "lora_a" or not leaf.any()
    lines = finished.metrics
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-3


@pytest.mark.full
@pytest.mark.slow
def test_adapters_merged_to_sample_as_on_a_gpu_draw_and_train_the_same(
    finished, tmp_path, monkeypatch
):
    has_adapters = lambda model, platform: model.config.lora is not None  # noqa: E731
    monkeypatch.setattr(lora, "are_merged_to_sample", has_adapters)
    run = jaxgrpo.train(small_run.config(tmp_path, **LORA))
    for left, right in zip(finished.metrics, run.metrics, strict=True):
        assert left["reward"] == right["reward"]  # the same tokens
        assert right["sampling/sampling_logp_difference/max"] < 1e-3
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)  # noqa: E731
    jax.tree.map(close, finished.learner.trainable, run.learner.trainable)


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_export_never_replaces_the_base_of_its_run(finished, overwrite):
    base = Path(small_run.base())
    before = folders.fingerprint(base)
    with pytest.raises(InputError, match="from which this run was trained"):
        finished.export(base, overwrite=overwrite)
    assert folders.fingerprint(base) == before


@pytest.mark.slow
def test_an_export_replaces_another_model_only_where_that_is_asked_for(finished, tmp_path):
    shutil.copytree(small_run.base(), tmp_path / "theirs")
    (tmp_path / "theirs" / "README.md").unlink(missing_ok=True)
    arguments = ["export", str(finished.path), str(tmp_path / "theirs")]
    assert main.main(arguments) == 2
    assert main.main([*arguments, "--overwrite"]) == 0
    assert main.main(arguments) == 0


def test_a_run_in_whose_folder_its_base_is_in_the_way_is_refused_at_its_start(tmp_path):
    shutil.copytree(small_run.base(), tmp_path / "run" / "model")
    changes = {"model.path": str(tmp_path / "run" / "model")}
    with pytest.raises(InputError, match="from which this run was trained"):
        jaxgrpo.train(small_run.config(tmp_path / "run", **changes), resume="auto")


@pytest.mark.slow
def test_a_run_in_whose_folder_its_adapter_is_in_the_way_is_refused_at_its_start(
    finished, tmp_path
):
    adapter = tmp_path / "run" / "adapter"
    shutil.copytree(finished.path / "adapter", adapter)
    with pytest.raises(InputError, match="adapter, from which this run was trained"):
        jaxgrpo.train(
            small_run.config(tmp_path / "run", **{"lora.path": str(adapter)}), resume="auto"
        )


@pytest.mark.full
def test_a_resumed_run_ends_as_the_uninterrupted_one(finished, tmp_path):
    changes = {**LORA, "train.steps": 2}
    jaxgrpo.train(small_run.config(tmp_path / "run", **changes))
    resumed = jaxgrpo.train(small_run.config(tmp_path / "run", **LORA), resume="auto")
    assert resumed.summary["parameter_hash"] == finished.summary["parameter_hash"]
    assert parameter_hash(resumed.learner.trainable) == parameter_hash(finished.learner.trainable)


@pytest.mark.full
def test_checkpoints_hold_no_weights_and_the_run_goes_on_only_over_the_same(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(small_run.base(), base)
    config = small_run.config(
        tmp_path / "run", **LORA, **{"train.steps": 2, "model.path": str(base)}
    )
    stopped = jaxgrpo.train(config)
    saved = json.loads((stopped.path / "checkpoints" / "2" / "meta.json").read_text())
    assert any("lora_b" in name for name in saved["leaves"])
    assert not [name for name in saved["leaves"] if name.endswith(("kernel']", "table']"))]
    # Other weights of the same shapes.
    model, params = folders.load_model(base)
    tokenizer = folders.read_tokenizer(base)
    jaxgrpo.save_model(model, jax.tree.map(lambda leaf: leaf * 1.5, params), base, tokenizer)
    longer = small_run.config(tmp_path / "run", **LORA, **{"model.path": str(base)})
    with pytest.raises(InputError, match="its weights are not those that this run's adapters"):
        jaxgrpo.train(longer, resume="auto")
    with pytest.raises(InputError, match="put the weights back"):
        export(tmp_path / "run", tmp_path / "exported")


@pytest.mark.full
def test_a_run_begins_with_the_adapter_of_a_folder(finished, tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(finished.path / "adapter", adapter)
    changes = {"lora.path": str(adapter), "optimizer.learning_rate": 1e-2}
    run = setup(small_run.config(tmp_path / "run", **changes))
    jax.tree.map(np.testing.assert_array_equal, run.learner.trainable, finished.learner.trainable)
    assert (
        run.inputs.pretrained.model.config.lora
        == setup(small_run.config(tmp_path / "r", **LORA)).inputs.pretrained.model.config.lora
    )
    model, params = jaxgrpo.load_model(small_run.base(), adapter=adapter)
    jax.tree.map(np.testing.assert_array_equal, lora.split(params)[0], run.learner.trainable)
    assert model.config == run.inputs.pretrained.model.config
    with pytest.raises(InputError, match="give them together with the weights"):
        jaxgrpo.save_model(run.inputs.pretrained.model, run.learner.trainable, tmp_path / "saved")
    changes |= {"eval": {"data": "task:arithmetic:test", "prompts": 8, "kl_to_base": True}}
    again = jaxgrpo.train(small_run.config(tmp_path / "run", **changes))
    # The base is what the run began with, and that has the adapter.
    assert again.metrics[0]["eval/kl_to_base"] == pytest.approx(0, abs=1e-6)
    assert again.metrics[-1]["eval/kl_to_base"] > 1e-4
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), again.learner.trainable, finished.learner.trainable
    )
    assert min(jax.tree.leaves(moved)) > 0
    # The checkpoint says what it was trained as, whatever is in that folder later.
    saved = json.loads((again.path / "checkpoints" / "3" / "meta.json").read_text())["meta"]
    now = parameters.adapter_identity(Path(small_run.base()), run.inputs.pretrained.model)
    parameters.refuse_changed_adapters(run.config.model.path, saved, now)
    assert run.inputs.pretrained.model.config.lora is not None
    settings = dataclasses.replace(run.inputs.pretrained.model.config.lora, alpha=400.0)
    rescaled = decoder.build(dataclasses.replace(run.inputs.pretrained.model.config, lora=settings))
    now = parameters.adapter_identity(Path(small_run.base()), rescaled)
    with pytest.raises(InputError, match=r"lora: the run's adapters have rank = 2, alpha = 4\.0"):
        parameters.refuse_changed_adapters(run.config.model.path, saved, now)
    shutil.rmtree(adapter)
    again.export(tmp_path / "exported")
    _, merged = folders.load_model(again.path / "model")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        folders.load_model(tmp_path / "exported")[1],
        merged,
    )


@pytest.mark.full
def test_weights_in_parts_train_the_adapters_that_whole_weights_train(tmp_path):
    steps = {**LORA, "train.steps": 2, "optimizer.use": "sgd", "optimizer.learning_rate": 0.5}
    meshes = {"data": 4}, {"data": 2, "fsdp": 2}
    runs = [
        jaxgrpo.train(small_run.config(tmp_path / str(number), **steps, mesh=mesh))
        for number, mesh in enumerate(meshes)
    ]
    expected = runs[0].learner.trainable
    for run in runs[1:]:
        parts = run.learner.trainable["blocks"]["0"]["attention"]["query"]["lora_a"].sharding
        assert not parts.is_fully_replicated
        for left, right in zip(runs[0].metrics, run.metrics, strict=True):
            assert left["reward"] == pytest.approx(right["reward"], rel=1e-6)
            assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
            assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            expected,
            run.learner.trainable,
        )


@pytest.mark.full
def test_no_gradient_of_a_weight_is_computed(tmp_path):
    def products(**changes):
        """The shapes of all products of the update's program."""
        run = setup(small_run.config(tmp_path / "run", **changes))
        arguments = memory.update_arguments(
            run.blueprint.geometry, run.blueprint.objective, run.blueprint.mesh, run.learner
        )
        text = run.steps.update_program.lower(*arguments).compile().as_text()
        return set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))

    assert {"32,96", "96,32"} & products()
    assert not {"32,96", "96,32"} & products(**LORA)


@pytest.mark.full
def test_narrow_weights_under_wide_adapters_train_evaluate_and_reset(tmp_path):
    changes = {
        **LORA,
        "model.dtype": "bfloat16",
        "reference.reset_every": 2,
        "eval": {"data": "task:arithmetic:test", "prompts": 8, "every": 1, "kl_to_base": True},
    }
    finished = jaxgrpo.train(small_run.config(tmp_path / "run", **changes))
    first, *_, last = finished.metrics
    assert first["eval/kl_to_base"] == pytest.approx(0, abs=1e-6)
    assert last["eval/kl_to_base"] > 1e-5
    learner = finished.learner
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(learner.frozen)} == {"bfloat16"}
    reference = jax.tree.leaves(learner.frozen["reference"])
    assert all(leaf.any() for leaf in reference)  # no longer that of the start, whose B is 0
    model, _ = jaxgrpo.load_model(finished.path / "model")
    assert json.loads((finished.path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.lora is None


@pytest.mark.full
@pytest.mark.slow
def test_commands_say_what_is_trained_and_what_stays(tmp_path, capsys):
    file = small_run.write(tmp_path / "run.toml", tmp_path / "run", **LORA)
    assert main.main(["train", str(file), "--dry-run"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "of adapters (rank 2, of attention/query, attention/key" in output
    assert "frozen weights" in output
    assert main.main(["model", small_run.base(), "--set", "lora.rank=2"]) == 0
    assert "lora_a" in capsys.readouterr().out
    assert main.main(["train", str(file), "--dry-run", "--set", "lora.rank=0"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "lora.alpha: acts on adapters, and there are none; set lora.rank or lora.path" in output
    more = ["--set", f"lora.path={tmp_path}"]
    assert main.main(["train", str(file), "--dry-run", *more]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "lora.rank, lora.alpha: the adapter of lora.path says this itself" in output


@pytest.mark.full
def test_the_folder_has_the_merged_model_and_the_adapter(finished, tmp_path):
    plain, base = folders.load_model(small_run.base())
    settings = adapters.read_config(finished.path / "adapter", plain.config)
    model = decoder.build(dataclasses.replace(plain.config, lora=settings))
    adapter = adapters.read_params(finished.path / "adapter", model)
    jax.tree.map(np.testing.assert_array_equal, adapter, finished.learner.trainable)
    tokens = np.random.default_rng(0).integers(3, 12, (2, 9))
    mask = np.ones_like(tokens)
    expected = jaxgrpo.logits(model, lora.join(adapter, base), tokens, mask)
    finished.export(tmp_path / "exported")
    for folder in (finished.path / "model", tmp_path / "exported"):
        for file in texts.text_files(Path(small_run.base())):
            assert (folder / file.name).read_bytes() == file.read_bytes()
        logits = jaxgrpo.logits(*folders.load_model(folder), tokens, mask)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected - jaxgrpo.logits(plain, base, tokens, mask)).max() > 1e-3


@pytest.mark.slow
def test_memory_counts_narrow_weights_once_and_wide_adapters(tmp_path):
    changes = {**LORA, "model.dtype": "bfloat16"}
    run = setup(small_run.config(tmp_path / "run", **changes))
    policies = run.blueprint.policies
    assert policies == ["reference"]
    counted = memory.count(run.blueprint, policies)

    def size(tree):
        return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))

    assert counted.frozen == size(run.learner.frozen[WEIGHTS])
    assert counted.copies == size(run.learner.frozen["reference"])
    assert counted.parameters == size(run.learner.trainable)
    assert counted.optimizer == size(run.learner.opt_state)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(run.learner.frozen)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(run.learner.trainable)} == {"float32"}
    assert "frozen weights" in counted.lines(2**30)["  kept"]


def test_the_adapter_of_a_run_names_the_revision_of_its_base(tmp_path, monkeypatch):
    base = Path(small_run.base())
    monkeypatch.setattr(folders, "find_folder", lambda *_, **__: base)  # as the hub gives it
    changes = {**LORA, "model.path": "owner/name", "model.revision": "stage1"}
    run = setup(small_run.config(tmp_path / "run", **changes))
    run.inputs.pretrained.save(run.learner, tmp_path, {})
    fields = json.loads((tmp_path / "adapter" / adapters.CONFIG).read_text())
    assert (fields["base_model_name_or_path"], fields["revision"]) == ("owner/name", "stage1")


@pytest.mark.parametrize(
    ("stored", "base", "line"),
    [
        ({}, ("owner/name", None), ""),
        ({"base_model_name_or_path": "/data/name"}, ("owner/name", None), ""),
        ({"base_model_name_or_path": "owner/name"}, ("runs/model", None), ""),
        ({"base_model_name_or_path": "owner/name"}, ("owner/name", "main"), ""),
        (
            {"base_model_name_or_path": "owner/name", "revision": "stage1"},
            ("owner/name", None),
            "over owner/name (stage1), and is added to owner/name (main)",
        ),
        (
            {"base_model_name_or_path": "owner/base"},
            ("owner/chat", None),
            "over owner/base (main), and is added to owner/chat (main)",
        ),
    ],
)
def test_an_adapter_of_another_base_is_named(tmp_path, monkeypatch, stored, base, line):
    monkeypatch.chdir(tmp_path)
    Path("runs/model").mkdir(parents=True)  # a folder goes before a name
    Path(adapters.CONFIG).write_text(json.dumps(stored))
    assert parameters.base_line(str(tmp_path), *base).endswith(line)
    assert bool(parameters.base_line(str(tmp_path), *base)) == bool(line)


@pytest.mark.slow
def test_an_export_reads_nothing_of_a_damaged_step(finished, tmp_path):
    """Its meta.json says how much the adapters count."""
    run = shutil.copytree(finished.path, tmp_path / "run")
    meta = run / "checkpoints" / "3" / "meta.json"
    text = meta.read_text()
    assert '"alpha": 4.0' in text
    meta.write_text(text.replace('"alpha": 4.0', '"alpha": 8.0'))
    newest = export(run, tmp_path / "newest")
    expected = export(finished.path, tmp_path / "second", step=2)
    assert "2 of 3 steps" in (newest / "README.md").read_text()
    files = [folder / "model.safetensors" for folder in (newest, expected)]
    assert files[0].read_bytes() == files[1].read_bytes()
