"""TensorBoard's and Weights & Biases' own files, read back record by record."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
import time
from pathlib import Path

import minimal_config
import pytest
from event_files import events, records, wandb_history
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.config.ranges import wandb_problem
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.training.records.console import Display
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.logbook import Logbook, TensorBoard, WandB, numbers
from jaxgrpo.training.records.reading import read_metrics


def test_event_files_hold_every_number_under_its_step(tmp_path):
    board = TensorBoard(tmp_path)
    board.write(0, {"eval/pass@4": 0.5})
    board.write(1, {"reward": 0.25, "loss": math.nan, "note": "x", "kl": None})
    board.close()
    assert events(tmp_path) == [(0, "eval/pass@4", 0.5), (1, "reward", 0.25)]


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path):
    first = TensorBoard(tmp_path)
    first.write(5, {"reward": 0.5})
    first.close()
    second = TensorBoard(tmp_path, finished_steps=3)
    second.write(4, {"reward": 0.75})
    second.close()
    assert sorted(events(tmp_path)) == [(4, "reward", 0.75), (5, "reward", 0.5)]
    # The mark by which TensorBoard drops what earlier files hold from this step on.
    assert [event.step for event in records(tmp_path) if event.session_log.status == 1] == [0, 4]


def test_a_tracker_that_raises_ends_no_run(tmp_path, monkeypatch):
    """Whatever it raises: metrics.jsonl is the record of a run."""

    def fail(*_):
        raise ValueError("no such tag")

    tables = minimal_config.tables(run={"dir": "runs/x", "report": False})
    config, out = configs.from_dict(tables), io.StringIO()
    display = Display(9, 0, active=True)
    display.console = Console(file=out, width=500)
    with RunFolder(tmp_path / "r") as folder:
        folder.write_config("")
        with Logbook(config.run, config.tracking, "", folder, display, 0) as log:
            for name in ("write", "close"):
                monkeypatch.setattr(TensorBoard, name, fail)
            for step in (1, 2):
                log.step(step, {"reward": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path / "r")] == [1, 2]
    assert out.getvalue().count("TensorBoard not written: no such tag") == 1
    assert out.getvalue().count("TensorBoard not closed: no such tag") == 1


def test_only_finite_numbers_reach_a_chart():
    metrics = {"a": 1, "b": math.inf, "c": "text", "d": None, "e": [1], "f": 0.5}
    assert numbers(metrics) == {"a": 1.0, "f": 0.5}


@pytest.mark.full
def test_weights_and_biases_gets_the_metrics_with_their_step(tmp_path):
    run = WandB(tmp_path, {"project": "p", "mode": "offline"}, {"train": {"steps": 3}})
    run.write(1, {"reward": 0.5, "kl": None})
    run.write(2, {"reward": 0.75})
    run.close()
    history = wandb_history(tmp_path, lines=2)
    assert [(line["step"], line["reward"]) for line in history] == [("1", "0.5"), ("2", "0.75")]
    assert "kl" not in history[0]
    assert run.place.startswith("wandb sync ")


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_there(tmp_path):
    for step in (1, 2):
        run = WandB(tmp_path, {"project": "p", "mode": "offline"}, {})
        run.write(step, {"reward": 0.5})
        run.close()
    names = {file.name for file in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert names == {f"run-{(tmp_path / 'wandb_id.txt').read_text()}.wandb"}


def kill_process_of_wandb() -> None:
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            is_core = b"wandb-core" in (place / "cmdline").read_bytes()
            if int(parent) == os.getpid() and is_core:
                os.kill(int(place.name), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="its process is found in /proc")
def test_weights_and_biases_whose_process_is_killed_ends_no_run(tmp_path):
    options = {"project": "p", "mode": "offline"}
    tracking = {"tensorboard": False, "wandb": options}
    config, out = configs.from_dict(minimal_config.tables(tracking=tracking)), io.StringIO()
    display = Display(9, 0, active=True)
    display.console = Console(file=out, width=500)
    with RunFolder(tmp_path / "r") as folder:
        folder.write_config("")
        with Logbook(config.run, config.tracking, "", folder, display, 0) as log:
            log.step(1, {"reward": 0.5})
            kill_process_of_wandb()
            for step in range(2, 9):  # the first ones may find the connection open
                log.step(step, {"reward": 0.5})
                time.sleep(0.1)
    assert len(read_metrics(tmp_path / "r")) == 8
    assert out.getvalue().count("WandB not written: ") == 1
    assert out.getvalue().count("WandB not closed: ") == 1
    again = WandB(tmp_path / "r", options, {})
    again.write(9, {"reward": 0.5})
    again.close()


@pytest.mark.full
def test_weights_and_biases_is_closed_where_no_event_file_can_be_opened(tmp_path):
    options = {"project": "p", "mode": "offline"}
    tables = minimal_config.tables(tracking={"tensorboard": True, "wandb": options})
    config = configs.from_dict(tables)
    with RunFolder(tmp_path / "r") as folder:
        (tmp_path / "r" / "tensorboard").write_text("")
        display = Display(9, 0, active=True)
        with pytest.raises(NotADirectoryError):
            Logbook(config.run, config.tracking, "", folder, display, 0)
    assert sys.modules["wandb"].run is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"project": "p", "grup": "x"}, r"tracking\.wandb\.grup: .* did you mean 'group'"),
        ({"project": "p", "id": "x"}, r"tracking\.wandb\.id: the run gives this itself"),
        ({"project": "p", "mode": "ofline"}, r"could not start: .*mode.*; mend what is wrong"),
    ],
)
def test_an_option_that_wandb_does_not_take_is_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        WandB(tmp_path, options, {})


def test_wandb_without_a_login_says_what_to_do(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"tracking.wandb could not start: .*`wandb login`"):
        WandB(tmp_path, {"project": "p"}, {})


def test_asking_for_wandb_where_it_is_not_installed_is_an_error_of_the_config(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python puts there for "not to be found"
    with pytest.raises(
        ConfigError, match=r"wandb is not installed: pip install 'jaxgrpo\[wandb\]'"
    ):
        configs.from_dict(minimal_config.tables(tracking={"wandb": {"project": "p"}}))
    assert wandb_problem({"project": "p"}) is not None


@pytest.mark.parametrize(
    ("tracking", "problem"),
    [
        ({"wandb": {}}, 'tracking.wandb = {}: has no project; add project = "..."'),
        ({"wandb": {"project": 3}}, "tracking.wandb.project = 3: expected a text"),
        ({"wandb": "p"}, 'tracking.wandb = "p": expected a table, { project = "..." }'),
        ({"tensorboard": 1}, "tracking.tensorboard = 1: expected true or false"),
        ({"tensorbord": True}, "tracking.tensorbord: unknown key; did you mean tracking.tensor"),
    ],
)
def test_a_wrong_tracking_table_is_named(tracking, problem):
    with pytest.raises(ConfigError) as caught:
        configs.from_dict(minimal_config.tables(tracking=tracking))
    assert problem in str(caught.value)


def test_tracking_may_change_when_a_run_goes_on_and_survives_toml():
    import tomllib

    tracking = {"tensorboard": False, "wandb": {"project": "p", "mode": "offline"}}
    old = configs.from_dict(minimal_config.tables())
    new = configs.from_dict(minimal_config.tables(tracking=tracking))
    assert configs.resume_difference(old, new) == []
    assert configs.from_dict(tomllib.loads(configs.to_toml(new))) == new
    assert old.tracking.tensorboard
