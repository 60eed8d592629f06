"""Killed, stopped and started again, a run ends as if nothing had happened."""

import json
import signal

import jax
import numpy as np
import pytest
import small_run

from jaxgrpo.cli.main import main
from jaxgrpo.training import loop
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.reading import read_metrics

pytestmark = pytest.mark.slow

FULL_KL = {"use": "full_kl", "beta": 0.01}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.full
@pytest.mark.fault(9)
def test_a_run_that_is_to_stop_saves_says_how_to_go_on_and_ends_the_same(
    tmp_path, monkeypatch, capsys
):
    """As after a signal: those of test_signals.py, in `make test-reliability`."""
    uninterrupted = loop.train(small_run.config(tmp_path / "straight"))
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(process, "stop_requested", lambda step: step == 1)  # between two saves
        assert main(["train", str(file)]) == 128 + signal.SIGTERM
    assert f"jaxgrpo train {file} --resume auto" in capsys.readouterr().err
    assert main(["train", str(file), "--resume", "auto"]) == 0
    assert small_run.metrics(tmp_path / "r") == small_run.metrics(uninterrupted.path)
    assert summary(tmp_path / "r")["parameter_hash"] == uninterrupted.summary["parameter_hash"]
    lines = read_metrics(tmp_path / "r")
    tokens, seconds = (sum(line[name] for line in lines) for name in ("num_tokens", "time/step"))
    speed = "time/tokens_per_second"
    assert summary(tmp_path / "r")[speed] == pytest.approx(tokens / seconds)  # of all steps
    assert main(["train", str(file), "--resume", "auto"]) == 0
    assert summary(tmp_path / "r")[speed] == pytest.approx(tokens / seconds)


@pytest.mark.full
def test_a_stopped_call_with_a_function_is_not_told_to_go_on_by_a_command(tmp_path, monkeypatch):
    def letters(completions, **columns):
        return [float(len(text)) for text in completions]

    monkeypatch.setattr(process, "stop_requested", lambda step: step == 1)
    with pytest.raises(process.StopRequested, match=r'call of jaxgrpo\.train, and resume="auto"$'):
        loop.train(small_run.config(tmp_path / "r"), rewards=[letters])
    with pytest.raises(process.StopRequested, match=r"jaxgrpo train '.*/a run/config\.toml' --res"):
        loop.train(small_run.config(tmp_path / "a run"))


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
