"""Two processes of two devices each train as one process of four."""

import json
import socket

import numpy as np
import pytest
import small_run
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow

MESH = {"mesh": {"data": 2, "fsdp": 2}, "optimizer": {"use": "sgd", "learning_rate": 0.1}}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_train_three_steps_like_one(tmp_path, python, environment):
    folders = {count: tmp_path / f"r{count}" for count in (1, 2)}
    files = {
        count: small_run.write(tmp_path / f"{count}.toml", folder, **MESH)
        for count, folder in folders.items()
    }
    port = free_port()
    processes = [
        small_run.command(
            python,
            "train",
            files[2],
            env=environment(
                devices=2,
                JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(index),
            ),
        )
        for index in range(2)
    ]
    processes.append(small_run.command(python, "train", files[1], env=environment(devices=4)))
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    one, two = (small_run.metrics(folders[count]) for count in (1, 2))
    assert [line["step"] for line in two] == [1, 2, 3]
    for left, right in zip(one, two, strict=True):
        assert left["reward"] == right["reward"]
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
    weights = [load_file(folders[count] / "model" / "model.safetensors") for count in (1, 2)]
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], atol=1e-5)
    summary = json.loads((folders[2] / "summary.json").read_text())
    assert summary["step"] == 3
    assert (folders[2] / "checkpoints" / "3").exists()


def test_a_mistake_ends_both_processes_with_one_message(tmp_path, python, environment):
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **{"mesh.fsdp": 3})
    port = free_port()
    processes = [
        small_run.command(
            python,
            "train",
            file,
            env=environment(
                devices=2,
                JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(index),
            ),
        )
        for index in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert "fsdp 3" in output
        assert "Traceback" not in output
