"""Runs whose samples end below a threshold that the first samples of their prompt set."""

from __future__ import annotations

import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.cli.main import main
from jaxgrpo.training import loop
from jaxgrpo.training.records import rollout_files

WARMUP = 2
STOP = {
    "rollout.early_stop": {"percentile": 50, "warmup": WARMUP, "window": 2, "tokens": 5},
    "rollout.staleness": 1,
}
CHANGES = {
    "loss.surrogate": {"use": "cispo"},
    "train.steps": 3,
    "run.rollouts_every": 1,
    "checkpoint.every": 2,
    "eval.data": "task:arithmetic:test",
    "eval.prompts": 4,
    "eval.samples": 4,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that ends samples, and a step of one that ends none."""
    folder = tmp_path_factory.mktemp("warmup")
    run = loop.train(small_run.config(folder / "with", **CHANGES, **STOP))
    plain = loop.train(small_run.config(folder / "without", **{**CHANGES, "train.steps": 1}))
    return run, plain


@pytest.mark.full
@pytest.mark.slow
def test_first_samples_are_those_of_a_run_that_ends_none_and_others_their_beginnings(runs):
    stopped, plain = (
        rollout_files.load(run.path / "rollouts" / "00000001.safetensors") for run in runs
    )
    lengths, plain_lengths = stopped.token_mask.sum(-1), plain.token_mask.sum(-1)
    mask = stopped.token_mask
    np.testing.assert_array_equal(stopped.completion_tokens[mask], plain.completion_tokens[mask])
    np.testing.assert_array_equal(lengths[:, :WARMUP], plain_lengths[:, :WARMUP])
    ended = lengths < plain_lengths
    assert 0 < ended.sum() < ended[:, WARMUP:].size
    assert stopped.truncated[ended].all()
    first, *_ = (line for line in small_run.metrics(runs[0].path) if "sampling/stopped" in line)
    assert first["sampling/stopped"] >= ended.mean()
    without_end = stopped.truncated & (lengths < mask.shape[-1])
    assert first["sampling/stopped"] == pytest.approx(without_end.mean())


@pytest.mark.full
@pytest.mark.slow
def test_the_likeliest_answers_of_an_evaluation_are_not_ended(runs):
    stopped, plain = (small_run.metrics(run.path)[0] for run in runs)
    assert stopped["eval/accuracy"] == plain["eval/accuracy"]
    assert stopped["eval/truncated"] > plain["eval/truncated"]


@pytest.mark.full
@pytest.mark.slow
def test_a_resumed_run_ends_as_another(runs, tmp_path):
    uninterrupted, _ = runs
    resumed = resuming.died_and_resumed(small_run.config(tmp_path / "r", **CHANGES, **STOP), step=3)
    assert resumed.summary["parameter_hash"] == uninterrupted.summary["parameter_hash"]


@pytest.mark.full
@pytest.mark.slow
def test_a_dry_run_says_what_the_keys_need(tmp_path, capsys):
    file = small_run.write(tmp_path / "warmup.toml", tmp_path / "r", **CHANGES, **STOP)
    assert main(["train", str(file), "--dry-run"]) == 0
    assert main(["train", str(file), "--dry-run", "--set", "rollout.group_size=2"]) == 2
    assert "rollout.group_size = 2 leaves none" in capsys.readouterr().err
