"""A run on a model that always fails: what it says, and everything that it leaves behind."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import sys

import numpy as np
import pytest
import small_run
from event_files import events, wandb_history
from rich.console import Console

from jaxgrpo.config.files import to_toml
from jaxgrpo.environments.processes import ENDINGS
from jaxgrpo.evaluation.diversity import stated_metrics
from jaxgrpo.rollout import dialogue, refill
from jaxgrpo.rollout.selection import part_metrics
from jaxgrpo.training import loop
from jaxgrpo.training.records import console, logbook
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.report.record import read_run
from jaxgrpo.update.atlas import Atlas

pytestmark = pytest.mark.slow


def logged(config):
    """What a logbook reads of a config."""
    return config.run, config.tracking, to_toml(config)


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """(config, run, what was printed): rewards that are always 0, a KL penalty, every tracker."""
    folder = tmp_path_factory.mktemp("failing") / "r"
    changes = {
        "rewards": [
            {"use": f"{small_run.__file__}:nothing"},
            {"use": f"{small_run.__file__}:nothing", "name": "noisy", "weight": 0.0, "flip": 0.5},
        ],
        "loss.kl": {"use": "forward_kl_k3", "beta": 0.01},
        "reference.reset_every": 2,
        "loss.entropy": {"use": "adaptive", "target": 0.5},
        "train.steps": 5,
        "eval.data": "task:arithmetic:test",
        "eval.prompts": 8,
        "eval.samples": 4,
        "eval.scorer": "arithmetic",
        "eval.formats": {"sum": r"\+"},
        "eval.confidence": True,
        "eval.confidence_window": 4,
        "eval.kl_to_base": True,
        "run.samples_every": 2,
        "run.report": True,
        "tracking.wandb": {"project": "p", "mode": "offline"},
        "rollout.prompts": {"use": "no_positive_resampling"},
    }
    config = small_run.config(folder, **changes)
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("COLUMNS", "500")
        finished = loop.train(config)
    return config, finished, out.getvalue()


@pytest.mark.full
def test_a_model_that_always_fails_is_said_to_once_with_the_remedy(failing):
    _, _, printed = failing
    warnings = [line for line in printed.splitlines() if "warning at step" in line]
    assert len([line for line in warnings if "every sample fails" in line]) == 1
    (line,) = [line for line in warnings if "every sample fails" in line]
    assert line.startswith("warning at step 3: in 100% of groups every sample fails alike")
    assert "groups/all_fail = 1, above 0.9 over 3 steps" in line
    assert "read samples/" in line


def test_the_summary_counts_the_warnings(failing):
    _, finished, _ = failing
    assert finished.summary["warnings"]["all fail"] == 1
    assert json.loads((finished.path / "summary.json").read_text()) == finished.summary


def test_the_report_of_the_end_says_so_too(failing):
    _, finished, printed = failing
    assert f"{finished.path}: report.html, model, metrics.jsonl, samples\n" in printed
    text = (finished.path / "report.html").read_text()
    assert '<span class="status">finished</span>' in text
    assert "step 5 of 5" in text
    assert '<span class="holds">holds</span>: in 100% of groups every sample fails' in text


def test_best_and_worst_completion_are_shown_where_samples_are_written(failing):
    _, finished, printed = failing
    assert printed.count("all 32 scored the same, 0") == 3  # steps 1, 2 and 4
    written = sorted(file.stem for file in (finished.path / "samples").iterdir())
    assert written == ["step_1", "step_2", "step_4"]


def documented(repository) -> list[re.Pattern]:
    """The names in the tables of docs/metrics.md; words in capitals stand for any."""
    names = re.findall(r"^\| `([^`]+)` \|", (repository / "docs" / "metrics.md").read_text(), re.M)
    return [re.compile(re.sub(r"NAME|LEVEL|(?<=@)K", ".+", re.escape(name))) for name in names]


def test_every_metric_that_a_run_logs_is_explained(failing, repository):
    _, finished, _ = failing
    logged = {name for line in read_run(finished.path).lines for name in line} - {"step"}
    # The task states no confidence; any text that does brings these.
    stated = stated_metrics([["<confidence>1</confidence>"]], *[np.ones((1, 1), bool)] * 2)
    logged |= {f"eval/{name}" for name in stated}
    row, samples = np.zeros(1, int), np.ones((1, 1), bool)
    logged |= set(part_metrics(["source_easy", "prefix_0"], row, samples, samples))
    # A run whose policy leaves out prompts logs other metrics than one that refills its steps.
    logged |= set(re.findall(r'"(refill/\w+)"', inspect.getsource(refill)))
    logged.add("sampling/staleness")  # of runs with a lag: test_staleness.py
    logged |= set(re.findall(r'"((?:turns|tools|environment)/\w+)"', inspect.getsource(dialogue)))
    logged |= {f"calls/{name}" for name in ENDINGS}
    logged.add("sampling/interrupted")  # of texts that are forced: test_interruption.py
    logged |= {f"routing/{name}" for name in ("load", "dead", "rerouted", "aux_loss")}
    atlas = Atlas(("run", "sign"), np.eye(2))  # of runs with atlas.methods: test_atlas.py
    logged |= {"time/atlas", *atlas.metrics()}
    logged |= {"clip_ratio/covariance_mean", "off_policy/masked"}  # of surrogates: tests/losses
    logged.add("sampling/stopped")  # of samples that are ended: test_warmup_runs.py
    assert {"kl", "kl_clamped", "eval/pass@4", "groups/identical"} <= logged
    patterns = documented(repository)
    assert [n for n in sorted(logged) if not any(p.fullmatch(n) for p in patterns)] == []
    unused = [p.pattern for p in patterns if not any(p.fullmatch(name) for name in logged)]
    assert unused == []


def test_the_distance_from_the_base_grows_though_the_reference_is_reset(
    failing,
):
    _, finished, _ = failing
    lines = {line["step"]: line for line in read_run(finished.path).lines}
    assert lines[0]["eval/kl_to_base"] == pytest.approx(0, abs=1e-5)
    assert lines[0]["eval/kl_to_base_estimated"] == pytest.approx(0, abs=1e-5)
    assert lines[5]["eval/kl_to_base"] > 1e-5  # Adam moves by rounding errors


def test_the_same_numbers_reach_the_trackers(failing):
    _, finished, _ = failing
    lines = {line["step"]: line for line in read_run(finished.path).lines}
    tracked = {(step, tag): value for step, tag, value in events(finished.path)}
    rows = wandb_history(finished.path, lines=6)
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    for step in (1, 5):
        for name in ("reward", "entropy", "kl", "completions/mean_length"):
            assert tracked[step, name] == pytest.approx(lines[step][name])
            assert float(rows[step][name]) == pytest.approx(lines[step][name])
    assert tracked[0, "eval/pass@4"] == pytest.approx(lines[0]["eval/pass@4"])


def test_a_resumed_run_does_not_repeat_its_warnings(failing, capsys, monkeypatch):
    config, finished, _ = failing
    monkeypatch.setenv("COLUMNS", "500")
    display = console.Display(6, 5, active=True)
    with (
        RunFolder(finished.path, resume=True) as folder,
        logbook.Logbook(*logged(config), folder, display, finished_steps=5) as log,
    ):
        last = read_run(finished.path).lines[-1]
        log.step(6, {name: value for name, value in last.items() if name != "step"})
        summary = log.finish({"step": 6})
    assert "warning" not in capsys.readouterr().out
    assert summary["warnings"]["all fail"] == 1


@pytest.fixture
def book(tmp_path):
    """A log of a run without trackers, and its folder."""
    changes = {"tracking.tensorboard": False, "run.report": True, "run.report_every": 1}
    config = small_run.config(tmp_path / "r", **changes)
    with RunFolder(config.run.dir) as folder:
        folder.write_config("")
        yield config, folder


def display_to(out: io.StringIO) -> console.Display:
    display = console.Display(3, 0, active=True)
    display.console = Console(file=out, width=500, highlight=False)
    return display


def test_a_run_that_breaks_off_leaves_a_report(book):
    config, folder = book
    with logbook.Logbook(
        *logged(config), folder, display_to(io.StringIO()), finished_steps=0
    ) as log:
        log.step(1, {"reward": 0.5})
    assert '<span class="status">stopped</span>' in (folder.path / "report.html").read_text()


def test_reports_during_a_run_take_no_more_than_their_share():
    """Steps of 10 s, and reports that take 2 s; the first is thought to take 3."""
    elapsed, spent, cost, written = 0.0, 0.0, logbook.FIRST_REPORT_SECONDS, []
    for _ in range(100):
        elapsed += 10.0
        if logbook.affords_report(elapsed, spent, cost):
            written.append(elapsed)
            elapsed, spent, cost = elapsed + 2.0, spent + 2.0, 2.0
            assert spent <= 0.01 * elapsed
    assert written == [300.0, 402.0, 604.0, 806.0, 1008.0]


def test_a_report_is_refreshed_while_the_run_goes_on(book, monkeypatch):
    config, folder = book
    monkeypatch.setattr(logbook, "REPORT_SHARE", 1e9)  # as after many steps
    log = logbook.Logbook(*logged(config), folder, display_to(io.StringIO()), finished_steps=0)
    for step in (1, 2):
        log.step(step, {"reward": 0.5})
        text = (folder.path / "report.html").read_text()
        assert '<span class="status">under way</span>' in text
        assert f"step {step} of ?" in text


def test_a_report_that_fails_is_said_once_and_ends_nothing(book):
    config, folder = book
    (folder.path / "report.html").mkdir()
    out = io.StringIO()
    log = logbook.Logbook(*logged(config), folder, display_to(out), finished_steps=0)
    log.finish({"step": 3})
    log.close()
    assert out.getvalue().count("no report: ") == 1
    assert "report.html cannot be written" in out.getvalue()


def test_a_report_that_failed_is_written_once_it_can_be(book, monkeypatch):
    """As on a disk that is full for a while."""
    config, folder = book
    monkeypatch.setattr(logbook, "REPORT_SHARE", 1e9)
    (folder.path / "report.html").mkdir()
    out = io.StringIO()
    log = logbook.Logbook(*logged(config), folder, display_to(out), finished_steps=0)
    for step in (1, 2):
        log.step(step, {"reward": 0.5})
    assert out.getvalue().count("no report: ") == 1
    (folder.path / "report.html").rmdir()
    log.finish({"step": 2})
    assert '<span class="status">finished</span>' in (folder.path / "report.html").read_text()


def test_no_report_is_written_into_a_folder_that_took_the_place_of_the_run(book):
    config, folder = book
    log = logbook.Logbook(*logged(config), folder, display_to(io.StringIO()), finished_steps=0)
    log.step(1, {"reward": 0.5})
    folder.path.rename(folder.path.with_name("away"))
    folder.path.mkdir()
    for name in (".lock", "config.toml"):
        (folder.path / name).write_text("")
    log.close()
    assert not (folder.path / "report.html").exists()


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("tensorboardX", "pip install tensorboardX for them, or set"),
        ("tensorboardX.proto.event_pb2", "tensorboardX cannot be used here (ModuleNotFoundError: "),
    ],
    ids=["none", "broken"],
)
def test_without_tensorboard_installed_a_run_says_so_and_goes_on(
    module, problem, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed, or in part
    config = small_run.config(tmp_path / "r")
    out = io.StringIO()
    with RunFolder(config.run.dir) as folder:
        log = logbook.Logbook(*logged(config), folder, display_to(out), finished_steps=0)
        log.step(1, {"reward": 0.5})
    assert f"no TensorBoard events: {problem}" in out.getvalue()
    assert not os.path.exists(folder.path / "tensorboard")
