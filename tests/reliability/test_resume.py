"""Killed, stopped and started again, a run ends as if nothing had happened."""

import json
import random
import signal
import time

import jax
import numpy as np
import pytest
import small_run

from jaxgrpo.cli.main import main
from jaxgrpo.training import loop
from jaxgrpo.training.processes import process

pytestmark = pytest.mark.slow

STEPS = 12
LIMIT = 120  # seconds that one start may take
FULL_KL = {"use": "full_kl", "beta": 0.01}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def finish(process):
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


def wait_for_lines(process, folder, count):
    """Until the run has logged `count` lines; the process must be alive until then."""
    began = time.monotonic()
    file = folder / "metrics.jsonl"
    while time.monotonic() - began < LIMIT:
        if file.exists() and len(file.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    raise AssertionError(f"{count} lines were not logged in {LIMIT} s")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, python, environment):
    """The folder of a run that nothing interrupted, its config, and the environment that it had."""
    folder = tmp_path_factory.mktemp("straight")
    changes = {
        "train.steps": STEPS,
        "eval.data": "task:arithmetic:test",
        "eval.every": 5,
        "eval.prompts": 8,
        "eval.samples": 4,
    }
    file = small_run.write(folder / "run.toml", folder / "r", **changes)
    variables = environment(devices=1)
    code, output = finish(small_run.command(python, "train", file, env=variables))
    assert code == 0, output
    return folder / "r", changes, variables


@pytest.mark.fault(8)
@pytest.mark.full
def test_six_kills_at_random_moments_change_nothing(tmp_path, python, straight):
    uninterrupted, changes, environment = straight
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    random.seed(0)
    kills = 0
    for target in [0, 2, 3, 5, 8, 11]:
        process = small_run.command(python, "train", file, "--resume", "auto", env=environment)
        wait_for_lines(process, tmp_path / "r", target)
        time.sleep(random.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        kills += finish(process)[0] == -signal.SIGKILL
    process = small_run.command(python, "train", file, "--resume", "auto", env=environment)
    code, output = finish(process)
    assert code == 0, output
    assert kills == 6
    assert small_run.metrics(tmp_path / "r") == small_run.metrics(uninterrupted)
    assert summary(tmp_path / "r")["parameter_hash"] == summary(uninterrupted)["parameter_hash"]
    weights = "model/model.safetensors"
    assert (tmp_path / "r" / weights).read_bytes() == (uninterrupted / weights).read_bytes()


@pytest.mark.fault(9)
def test_a_run_that_is_to_stop_saves_says_how_to_go_on_and_ends_the_same(
    tmp_path, monkeypatch, capsys
):
    """As after a signal: those that test_process sends, and in `make test-all` the next test."""
    uninterrupted = loop.train(small_run.config(tmp_path / "straight"))
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(process, "stop_requested", lambda step: step == 1)  # between two saves
        assert main(["train", str(file)]) == 128 + signal.SIGTERM
    assert f"jaxgrpo train {file} --resume auto" in capsys.readouterr().err
    assert main(["train", str(file), "--resume", "auto"]) == 0
    assert small_run.metrics(tmp_path / "r") == small_run.metrics(uninterrupted.path)
    assert summary(tmp_path / "r")["parameter_hash"] == uninterrupted.summary["parameter_hash"]


@pytest.mark.fault(14)
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_and_says_how_to_go_on(tmp_path, python, straight, number):
    uninterrupted, changes, environment = straight
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", **changes)
    process = small_run.command(python, "train", file, env=environment)
    wait_for_lines(process, tmp_path / "r", 3)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 128 + number, output
    assert f"jaxgrpo train {file} --resume auto" in output
    assert "Traceback" not in output
    process = small_run.command(python, "train", file, "--resume", "auto", env=environment)
    code, output = finish(process)
    assert code == 0, output
    assert small_run.metrics(tmp_path / "r") == small_run.metrics(uninterrupted)
    assert summary(tmp_path / "r")["parameter_hash"] == summary(uninterrupted)["parameter_hash"]


@pytest.mark.fault(9)
@pytest.mark.full
def test_a_penalty_with_memory_goes_on_bit_for_bit(tmp_path):
    entropy = {"use": "adaptive", "target": 5.0, "coefficient": 0.01}

    def train(name, steps, **more):
        changes = {"train.steps": steps, "loss.entropy": entropy, "loss.kl": FULL_KL}
        return loop.train(small_run.config(tmp_path / name, **changes), **more)

    straight = train("straight", 4)
    train("broken", 2)
    resumed = train("broken", 4, resume="auto")
    assert resumed.summary["parameter_hash"] == straight.summary["parameter_hash"]
    assert small_run.metrics(resumed.path) == small_run.metrics(straight.path)
    applied = [line["entropy_coefficient"] for line in small_run.metrics(straight.path)[-4:]]
    np.testing.assert_allclose(applied, [0, 0.015, 0.02, 0.025], rtol=1e-6)
    left, right = (run.learner.objective_state["adaptive_entropy"] for run in (straight, resumed))
    assert jax.tree.map(float, left) == jax.tree.map(float, right)
    assert float(left["coefficient"]) == pytest.approx(0.03)
