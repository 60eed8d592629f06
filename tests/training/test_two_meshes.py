"""A run that samples on a mesh of its own is the run that samples on the mesh of its update."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small_run
from moved import sync_bytes
from processes import together
from quick import LONG
from resuming import assert_same_bits, died_and_resumed

import jaxgrpo
from jaxgrpo.cli import make_base
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.hf import families, folders
from jaxgrpo.training import memory
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

SGD = {"use": "sgd", "learning_rate": 0.1}
LORA = {"lora": {"rank": 2, "alpha": 4.0}}
EVAL = {"data": "task:arithmetic:test", "prompts": 6, "samples": 4, "kl_to_base": True}


@functools.cache
def base() -> str:
    """A random model whose heads and vocabulary four devices can share."""
    home = Path(small_run.base())
    tokenizer = folders.read_tokenizer(home)
    vocab_size = -(-len(tokenizer) // 4) * 4
    small = make_base.base_config(vocab_size, hidden_size=32)
    fields = dataclasses.replace(small, num_heads=4, num_kv_heads=4, head_dim=8)
    stored = families.model_config(families.plain_fields(fields), "the model of the test")
    model, path = decoder.build(stored), tempfile.mkdtemp(prefix="jaxgrpo-test-heads-")
    folders.save_model(model, jax.jit(model.init)(jax.random.key(0)), f"{path}/base", tokenizer)
    return f"{path}/base"


def config(folder: Path, mesh: dict[str, int], **changes):
    settings = {"model.path": base(), "optimizer": SGD, "train.steps": 2, "run.samples_every": 1}
    return small_run.config(folder, **{**settings, "mesh": mesh, **changes})


def drawn(folder: Any) -> list[list[int]]:
    """The tokens of all samples of a run, in order."""
    files = sorted((folder / "samples").glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(line)["completion_ids"] for line in lines]


def assert_same_run(first: Path, second: Path) -> None:
    assert drawn(first) == drawn(second) != []
    for left, right in zip(*map(small_run.metrics, (first, second)), strict=True):
        assert left.keys() == right.keys()
        for name in left.keys() & {"loss", "reward"}:
            assert left[name] == pytest.approx(right[name], abs=1e-5)
        for name in left.keys() & {"grad_norm", "weights/norm"}:
            assert left[name] == pytest.approx(right[name], rel=1e-4)
        for name in [name for name in left if name.startswith("eval/")]:
            assert left[name] == pytest.approx(right[name], abs=1e-5), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "tensor", "more"),
    [
        ({"fsdp": 4}, 2, {}),
        ({"fsdp": 4}, 4, {"eval": EVAL, **LORA}),
        pytest.param({"fsdp": 4}, 4, {}, marks=LONG),
        pytest.param({"fsdp": 2, "tensor": 2}, 4, {"eval": EVAL}, marks=LONG),
        ({"fsdp": 2, "tensor": 2}, 1, LORA),
        ({"data": 2, "context": 2}, 1, {}),
        (
            {"fsdp": 4},
            2,
            {"rollout.refill": {"factor": 2.0}, "rollout.overlap_rewards": True},
        ),
        (
            {"fsdp": 4},
            2,
            {"train.minibatches": 2, "loss.kl": {"use": "k2", "beta": 0.1}},
        ),
    ],
    ids=str,
)
def test_another_mesh_for_sampling_draws_and_learns_the_same(mesh, tensor, more, tmp_path):
    jaxgrpo.train(config(tmp_path / "one", mesh, **more))
    jaxgrpo.train(config(tmp_path / "two", {**mesh, "sampling_tensor": tensor}, **more))
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=["whole", "tensor"])
def test_a_run_that_goes_on_with_its_weights_divided_otherwise_learns_the_same(mesh, tmp_path):
    optimizer = {"use": "sgd", "learning_rate": 0.1, "momentum": 0.9}

    def train(name, sizes, steps, **more):
        changes = {"optimizer": optimizer, "train.steps": steps}
        return jaxgrpo.train(config(tmp_path / name, sizes, **changes), **more)

    train("straight", {"fsdp": 4}, 4)
    train("moved", {"fsdp": 4}, 2)
    resumed = train("moved", mesh, 4, resume="auto")
    weight = resumed.learner.trainable["blocks"]["0"]["feed_forward"]["up"]["kernel"]
    part = weight.sharding.shard_shape(weight.shape)
    assert part[-2:] == ((16, 48) if mesh else (32, 96))
    assert_same_run(tmp_path / "straight", tmp_path / "moved")


@pytest.mark.full
def test_each_stage_has_its_own_mesh(tmp_path):
    run = setup(config(tmp_path / "r", {"fsdp": 4, "sampling_tensor": 2}))
    sampling, training = run.blueprint.samples_on, run.inputs.pretrained.mesh
    assert dict(sampling.shape) == {"data": 2, "fsdp": 1, "tensor": 2, "context": 1}
    assert [*sampling.devices.flat] == [*training.devices.flat]
    params = run.sync(run.learner)
    layout = params["layers"][0]["feed_forward"]["up"]["kernel"].sharding
    assert layout.shard_shape((32, 96)) == (32, 48)
    _, collected = run.collect(params, 0, run.stream)
    shards = collected.rollouts.completion_tokens.addressable_shards
    assert {shard.data.shape[0] for shard in shards} == {2}
    _, prepared = run.prepare(run.learner, collected.rollouts)
    tokens = prepared.batches[0].tokens
    assert tokens.sharding.shard_shape(tokens.shape)[1] == tokens.shape[1] // 4


@pytest.mark.full
@pytest.mark.parametrize("tensor", [0, 1])
def test_without_a_sampling_mesh_or_with_the_same_there_is_one(tensor, tmp_path):
    blueprint = setup(config(tmp_path / "r", {"fsdp": 4, "sampling_tensor": tensor})).blueprint
    assert blueprint.sampling_mesh is blueprint.mesh
    assert not blueprint.has_two_meshes


@pytest.mark.full
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    changes = {"mesh": {"fsdp": 4, "sampling_tensor": 2}, "train.steps": 4, "checkpoint.every": 2}
    straight = jaxgrpo.train(config(tmp_path / "whole", **changes))
    again = died_and_resumed(config(tmp_path / "again", **changes), 3)
    trained = (sharding.to_host(run.learner.trainable) for run in (straight, again))
    assert_same_bits(*trained)
    assert drawn(straight.path) == drawn(again.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"sampling_tensor": 3}}, "sampling_tensor = 3: must divide the 4 devices"),
        (
            {"mesh": {"context": 4, "sampling_tensor": 1}, "rollout.prompts_per_step": 6},
            "sampling_tensor = 1: rollout.prompts_per_step = 6: must be a multiple of 4",
        ),
        (
            {"mesh": {"fsdp": 4, "sampling_tensor": 4}, "model.path": None},
            "smaller tensor, fsdp or sampling_tensor sizes",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, message, tmp_path):
    if "model.path" in changes:
        changes = {**changes, "model.path": small_run.base()}
    with pytest.raises(InputError, match=message):
        setup(config(tmp_path / "r", **changes))


def test_what_a_sync_brings_is_counted(tmp_path):
    single = setup(config(tmp_path / "r", {"fsdp": 4})).blueprint
    two = setup(config(tmp_path / "r", {"fsdp": 4, "sampling_tensor": 4})).blueprint
    alone = setup(config(tmp_path / "r", {"data": 4})).blueprint
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(single.model.shapes))
    assert sync_bytes(alone.model, alone.mesh, alone.samples_on) == 0
    # Three quarters of what fsdp has divided come from others; norms of heads are everywhere.
    assert 0.7 * total < sync_bytes(single.model, single.mesh, single.samples_on) <= 0.75 * total
    assert 0.17 * total < sync_bytes(two.model, two.mesh, two.samples_on) <= 0.19 * total
    bytes_ = (
        memory.weights_to_sample(single.model, single.mesh, single.samples_on),
        memory.weights_to_sample(two.model, two.mesh, two.samples_on),
    )
    blocks = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(single.model.shapes["blocks"])
    )
    assert bytes_[0] == total  # one copy, that is written layer by layer
    assert bytes_[1] < 0.27 * (total + blocks)  # a quarter, and from mesh to mesh a second time


@pytest.mark.full
@pytest.mark.parametrize("tensor", [2, 4])
def test_two_processes_sample_on_a_mesh_of_their_own(tensor, tmp_path, python, environment):
    """Copies of the weights within a process, and over both of them."""
    rows = tasks.load("task:arithmetic:train", count=8)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {"data.path": str(tmp_path / "rows.jsonl"), "model.path": base()}
    changes |= {"optimizer": SGD, "run.samples_every": 1}
    meshes = {"one": {"fsdp": 4}, "two": {"fsdp": 4, "sampling_tensor": tensor}}
    files = {
        name: small_run.write(tmp_path / f"{name}.toml", tmp_path / name, **changes, mesh=mesh)
        for name, mesh in meshes.items()
    }
    processes = [
        small_run.command(python, "train", files["two"], env=environment(devices=2, **variables))
        for variables in together()
    ]
    processes.append(small_run.command(python, "train", files["one"], env=environment(devices=4)))
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert len(drawn(tmp_path / "two")) == 3 * 8 * 4
    assert np.isfinite([line["loss"] for line in small_run.metrics(tmp_path / "two")]).all()
