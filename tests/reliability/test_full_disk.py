"""A disk that is full, for a while or for good, and a reward that changes the working directory."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import small_run
from checkpointed import small_run_state
from faulty_runs import limit_files

from jaxgrpo.core.errors import InputError
from jaxgrpo.evaluation.evaluate import Evaluation
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.processes import process
from jaxgrpo.training.processes.recovery import MAX_UNSAVED, Keeper, Progress
from jaxgrpo.training.records.console import Display
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.logbook import TensorBoard
from jaxgrpo.training.records.reading import read_metrics

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


@pytest.mark.full
def test_a_reward_that_fails_behind_a_step_that_is_not_saved_says_so(tmp_path):
    def letters(completions, trainer_state, log_metric, **columns):
        if trainer_state.global_step == 1 and len(completions) > 2:
            log_metric("grad_norm", 1.0)
            limit_files(TEXTS)
        return [float(len(text)) for text in completions]

    message = r"(?s)log_metric\('grad_norm', .*in step 2; step 2: .*saved.*holds no step yet; mend"
    with pytest.raises(process.RewardFailed, match=message):
        loop.train(config(tmp_path / "r", 3, **{"checkpoint.every": 9}), rewards=[letters])


@pytest.mark.full
def test_an_evaluation_that_fails_behind_a_step_that_is_not_saved_says_so(tmp_path):
    unread: Any = None

    def evaluator(run):
        def evaluate(params, key, step, **options):
            if step == 1:
                limit_files(TEXTS)
                raise MemoryError("a second pass")
            ends = {"accuracy/low": 0.4, "accuracy/high": 0.6}
            return Evaluation({"accuracy": 0.5, **ends}, unread, unread)

        return evaluate

    keys = {"eval.data": "task:arithmetic:test", "eval.every": 1, "checkpoint.every": 9}
    with pytest.raises(MemoryError, match="a second pass") as raised:
        loop.take(config(tmp_path / "r", 3, **keys), evaluator)
    (note,) = raised.value.__notes__
    assert note.startswith("the evaluation of step 1 failed; step 1: ")
    assert "make space and go on by --resume auto; " in note


def test_tensorboard_whose_thread_has_ended_is_opened_again_and_blocks_nothing(tmp_path):
    board = TensorBoard(tmp_path)
    board.write(1, {"reward": 0.5})
    board._thread.stop()  # as an error of the disk ends it
    for step in range(2, 40):
        board.write(step, {f"metric {number}": 1.0 for number in range(20)})
    board.close()
    assert sum(file.stat().st_size > 1000 for file in (tmp_path / "tensorboard").iterdir()) == 1


@pytest.mark.full
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


@pytest.fixture
def keeper(tmp_path) -> Iterator[Keeper]:
    """Of a run that keeps its newest checkpoint and the best one."""
    with RunFolder(tmp_path / "r") as folder, Checkpoints(folder.checkpoints, 1) as checkpoints:
        folder.rewind(None)
        display = Display(9, 0, active=True)
        yield Keeper(None, 3, folder, checkpoints, display, Progress.from_meta({}), {})


def save(keeper: Keeper, step: int, value: float | None = None, is_full: bool = False) -> None:
    """Saves a step to its end; with a value it is the best one."""
    if value is not None:
        keeper.progress.replace_best(step, value)
    limit_files(TEXTS) if is_full else limit_files()
    keeper.save(*small_run_state(step), step, must=False)
    if keeper.checkpoints._pending:
        wait([keeper.checkpoints._pending])
    limit_files()


@pytest.mark.full
def test_a_best_step_that_was_not_saved_leaves_the_one_before_it(keeper, capsys):
    save(keeper, 2, 0.5)
    save(keeper, 4, 0.9, is_full=True)
    save(keeper, 6)
    assert keeper.checkpoints.steps() == [2, 6]
    assert keeper.checkpoints.meta(6)["best"] == [2, 0.5]
    assert "step 4, the best, was not saved; the best is now step 2" in capsys.readouterr().out
    save(keeper, 7, 0.7)  # better than what is saved, and not than what is lost
    save(keeper, 8)
    assert keeper.checkpoints.steps() == [7, 8]
    assert keeper.progress.best == (7, 0.7)


def test_a_best_step_without_a_saved_one_before_it_is_none(keeper):
    save(keeper, 2, 0.5, is_full=True)
    save(keeper, 4)
    assert keeper.progress.best is None
    assert keeper.checkpoints.steps() == [4]


def test_a_reward_that_fails_behind_a_save_that_failed_has_its_last_step_saved(keeper):
    save(keeper, 2)
    save(keeper, 4, is_full=True)
    with (
        pytest.raises(process.RewardFailed, match=r"no grader\n.*holds step 5; mend the reward"),
        keeper.saving(6, small_run_state(5)),
    ):
        raise RewardError("no grader")
    assert keeper.checkpoints.steps() == [5]


def test_what_was_before_a_step_in_which_own_code_fails_is_saved(keeper):
    save(keeper, 2)
    before = small_run_state(5)
    with pytest.raises(KeyError, match="my prompts") as raised, keeper.saving(6, before):
        raise KeyError("my prompts")
    (note,) = raised.value.__notes__
    assert note.startswith(f"the run ended in step 6; {keeper.folder.place} holds step 5; go on: ")
    assert keeper.checkpoints.steps() == [5]

    def fail() -> None:
        with keeper.saving(7, small_run_state(6)):
            raise InputError("scores[0].prompt: row 3: it returned an empty text")

    assert process.guard(fail) == 2
    assert keeper.checkpoints.steps() == [6]


def test_a_part_of_a_line_that_a_faulty_disk_has_is_cut_off_before_the_next(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    file = tmp_path / "metrics.jsonl"
    with RunFolder(tmp_path) as run:
        run.write_metrics(1, {"reward": 0.5})
        size = file.stat().st_size
        limit_files(size + 10)
        with monkeypatch.context() as patch:
            patch.setattr(os, "truncate", refuse)
            with pytest.raises(OSError, match="could not be written"):
                run.write_metrics(2, {"reward": 1.0})
        limit_files()
        assert file.stat().st_size == size + 10
        run.write_metrics(3, {"reward": 0.0})
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3]


def test_saves_that_fail_one_by_one_never_end_a_run_and_those_in_a_row_do(keeper):
    for step in range(1, 5 * (MAX_UNSAVED + 1), 2):  # each is followed by one that succeeds
        save(keeper, step, is_full=True)
        save(keeper, step + 1)
        assert keeper.checkpoints.steps() == [step + 1]

    def save_in_vain() -> None:
        for step in range(101, 103 + MAX_UNSAVED):
            save(keeper, step, is_full=True)

    with pytest.raises(process.NotSaved, match="make space and go on"):
        save_in_vain()


def test_a_reward_that_fails_behind_lines_that_wait_has_them_written_with_its_last_step(keeper):
    keeper.folder.write_metrics(1, {"reward": 0.5})
    limit_files(NOTHING // 3)
    with contextlib.suppress(OSError):
        keeper.folder.write_metrics(2, {"reward": 1.0})
    limit_files()
    with (
        pytest.raises(process.RewardFailed, match="holds step 2"),
        keeper.saving(3, small_run_state(2)),
    ):
        raise RewardError("no grader")
    assert [line["step"] for line in small_run.metrics(keeper.folder.path)] == [1, 2]
    assert keeper.checkpoints.meta(2)["logged"] == keeper.folder.logged()


def test_a_run_that_diverges_behind_a_save_that_failed_says_so(keeper):
    save(keeper, 2)
    save(keeper, 4, is_full=True)
    values = {"weights/growth": math.inf, "weights/norm": math.inf, "learning_rate": 0.1}
    values |= {"skipped_updates/not_finite": 0.0, "sampling/not_finite": 0.0}
    with pytest.raises(process.Diverged, match="the last good checkpoint is of step 2"):
        keeper.refuse_diverged(5, values)


def test_a_run_that_diverges_where_its_checkpoints_cannot_be_read_says_so(keeper, monkeypatch):
    def steps() -> list[int]:
        raise OSError(errno.EIO, "Input/output error", "r/checkpoints")

    monkeypatch.setattr(keeper.checkpoints, "steps", steps)
    values = {"weights/growth": math.inf, "weights/norm": math.inf, "learning_rate": 0.1}
    values |= {"skipped_updates/not_finite": 0.0, "sampling/not_finite": 0.0}
    message = r"its checkpoints cannot be read \(r/checkpoints: Input/output error\)"
    with pytest.raises(process.Diverged, match=message):
        keeper.refuse_diverged(5, values)


def test_the_last_good_checkpoint_stays_while_nothing_finite_is_computed(keeper):
    values = {"weights/growth": 1.0, "weights/norm": 1.0, "learning_rate": 0.1}
    values |= {"skipped_updates/not_finite": 1.0, "sampling/not_finite": 0.0}
    save(keeper, 4)
    save(keeper, 5)
    for step in (6, 7):
        keeper.refuse_diverged(step, values)
        save(keeper, step)
    assert keeper.checkpoints.steps() == [5, 7]
    with pytest.raises(process.Diverged, match="the last good checkpoint is of step 5"):
        keeper.refuse_diverged(8, values)
    keeper.refuse_diverged(8, {**values, "skipped_updates/not_finite": 0.0})
    save(keeper, 8)
    assert keeper.checkpoints.steps() == [8]


def test_a_file_system_that_is_gone_for_a_while_costs_a_checkpoint(keeper, monkeypatch, capsys):
    """As one in user space whose program has died."""

    def look_away(folder: RunFolder) -> bool:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(folder.path / ".lock"))

    save(keeper, 2)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "is_moved", look_away)
        save(keeper, 4)
        output = capsys.readouterr().out
        assert "step 4: " in output
        assert "Transport endpoint is not connected; the run goes on" in output
        with pytest.raises(process.NotSaved, match="not connected; mend that and go on by --res"):
            keeper.save(*small_run_state(5), 5, must=True)
    assert keeper.checkpoints.steps() == [2]
    save(keeper, 6)
    assert keeper.checkpoints.steps() == [6]
