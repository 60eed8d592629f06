"""A disk that is full, for a while or for good, and a reward that changes the working directory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import small_run
from faulty_runs import limit_files

from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.logbook import TensorBoard

pytestmark = [pytest.mark.slow, pytest.mark.fault(13), pytest.mark.usefixtures("space")]

NOTHING = 100  # bytes that a file may have: every file of a run is larger
TEXTS = 40_000  # the arrays of a checkpoint are larger, a few lines of metrics are not


def config(folder: Path, steps: int, **changes: Any) -> Any:
    tracking = {"tracking": {"tensorboard": False}}
    return small_run.config(folder, **{"train.steps": steps, **tracking, **changes})


def filling(folder: Path, size: int, first: int, last: int | None = None) -> Any:
    """A reward under which files of `size` bytes are the largest from step `first` to `last`."""

    def letters(completions, trainer_state, **columns):
        step = trainer_state.global_step + 1
        if step == first:
            wait_for(folder / "checkpoints" / str(first - 1) / "manifest.json")
            limit_files(size)
        if last is not None and step == last + 1:
            limit_files()
        return [float(len(text)) for text in completions]

    return letters


def wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until, file
        time.sleep(0.01)


@pytest.mark.full
def test_a_run_goes_on_while_the_disk_is_full_and_ends_as_if_it_had_never_been(tmp_path, capsys):
    def letters(completions, **columns):
        return [float(len(text)) for text in completions]

    straight = loop.train(config(tmp_path / "s", 8), rewards=[letters])
    capsys.readouterr()
    full = filling(tmp_path / "r", NOTHING, 3, 5)
    run = loop.train(config(tmp_path / "r", 8), rewards=[full])
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("metrics not written") == 1
    # A checkpoint is saved only with the lines of its steps.
    assert output.count("the run goes on, and ends if this happens 3 times more") == 1
    assert run.summary["parameter_hash"] == straight.summary["parameter_hash"]
    assert small_run.metrics(run.path) == small_run.metrics(straight.path)
    with Checkpoints(run.path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [6, 8]


@pytest.mark.full
def test_a_disk_that_stays_full_ends_the_run_after_some_saves_in_one_line(tmp_path, capsys):
    run_config = config(tmp_path / "r", 30, **{"checkpoint.every": 1})

    def command():
        loop.train(run_config, rewards=[filling(tmp_path / "r", TEXTS, 3)])

    assert process.guard(command) == 74
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: step ")
    assert "could not be saved" in line
    assert line.endswith("make space and go on by --resume auto")
    limit_files()
    steps = [entry["step"] for entry in small_run.metrics(tmp_path / "r")]
    assert steps == list(range(1, steps[-1] + 1))
    assert 6 <= steps[-1] <= 7  # whether Orbax fails at once or in the background
    with Checkpoints(tmp_path / "r" / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 2


def test_tensorboard_whose_thread_has_ended_is_opened_again_and_blocks_nothing(tmp_path):
    board = TensorBoard(tmp_path)
    board.write(1, {"reward": 0.5})
    board._thread.stop()  # as an error of the disk ends it
    for step in range(2, 40):
        board.write(step, {f"metric {number}": 1.0 for number in range(20)})
    board.close()
    assert sum(file.stat().st_size > 1000 for file in (tmp_path / "tensorboard").iterdir()) == 1


def test_a_reward_may_change_the_working_directory_of_a_run_in_a_relative_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def wandering(completions, **columns):
        os.chdir(elsewhere)
        return [float(len(text)) for text in completions]

    run = loop.train(config(Path("runs/r"), 1), rewards=[wandering])
    assert run.path == tmp_path / "runs" / "r"
    assert run.metrics[0]["step"] == 1
    assert (run.path / "model" / "config.json").exists()
    assert list(elsewhere.iterdir()) == []
    with contextlib.chdir(tmp_path):
        assert run.export("out").joinpath("config.json").exists()
