"""A run folder read as it stands: under way, killed, finished, or no run at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.training.records.console import METRICS
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.report.html import write_report
from jaxgrpo.training.records.report.record import (
    FINISHED,
    STOPPED,
    UNDER_WAY,
    RewardSum,
    read_run,
    reward_sum,
    shown,
    total_reward,
)

TABLES = """
recipe = "grpo"
rewards = [{ use = "mine.py:right", weight = 2.0 }, { use = "short", name = "brief" }]
[train]
steps = 4
"""


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "step": 2,
        "ordinal": 0,
        "row": 0,
        "sample": 0,
        "prompt": "1+1=",
        "completion": "\u2028 2",
        "completion_ids": [3],
        "logps": [-0.1],
        "rewards": {"right": 1.0, "brief": 0.5},
        "advantage": 0.5,
        "truncated": False,
    } | changes


@pytest.fixture
def folder(tmp_path) -> Path:
    """A killed run: two steps, the line of the third half written."""
    path = tmp_path / "my run"
    with RunFolder(path) as run:
        run.write_config(TABLES)
        for step in (1, 2):
            run.write_metrics(step, {"reward": 0.25 * step, "groups/all_fail": 1.0, "time/step": 1})
            run.write_samples(step, [sample(step=step)])
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "rew')
    return path


def test_a_killed_run_is_read_up_to_its_last_whole_line(folder):
    record = read_run(folder)
    assert (record.name, record.status, record.step, record.steps) == ("my run", STOPPED, 2, 4)
    assert record.series("reward") == ([1, 2], [0.25, 0.5])
    assert record.samples[0]["step"] == 2
    assert record.samples[0]["completion"] == "\u2028 2"


def test_a_run_under_way_is_told_from_one_that_ended(folder):
    with RunFolder(folder, resume=True) as run:
        assert read_run(folder).status == UNDER_WAY
        run.rewind(2)
        run.write_summary({"step": 2})
    assert read_run(folder).status == FINISHED
    with RunFolder(folder, resume=True) as run:  # goes on: the summary is of an earlier end
        run.write_metrics(3, {"reward": 1.0})
    assert read_run(folder).status == STOPPED


def test_reading_leaves_the_folder_free_and_untouched(folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    read_run(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    RunFolder(folder, resume=True).close()


def test_warnings_come_from_the_lines_alone(folder, capsys):
    with RunFolder(folder, resume=True) as run:
        run.rewind(2)
        run.write_metrics(3, {"groups/all_fail": 1.0, "eval/accuracy": 0.5, "eval/brier": None})
    record = read_run(folder)
    assert [(alarm.name, alarm.step) for alarm in record.warnings] == [("all fail", 3)]
    assert record.active == {"all fail"}
    assert main(["report", str(folder), "--text", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (warning,) = document["warnings"]
    assert (warning["name"], warning["step"]) == ("all fail", 3)
    assert warning["text"] == record.warnings[0].text
    assert document["evaluations"] == [{"step": 3, "accuracy": 0.5}]


def test_the_report_is_made_again_from_a_killed_run(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "stopped" in text
    assert "step 2 of 4" in text


def test_the_report_in_the_terminal_needs_no_charts(folder, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["report", str(folder), "--text"]) == 0
    shown_text = capsys.readouterr().out
    assert "my run: stopped, step 2 of 4" in shown_text
    assert "▁█" in shown_text
    assert main(["report", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["status"], document["step"], document["steps"]) == (
        *("my run", "stopped", 2, 4),
    )
    assert document["warnings"] == []
    assert document["metrics"].keys() <= set(METRICS)
    for metric, curve in document["metrics"].items():
        assert metric in shown_text
        assert f"{curve['values'][0]:.3g}" in shown_text
        assert len(curve["steps"]) == len(curve["values"])
    assert document["metrics"]["reward"] == {"steps": [1, 2], "values": [0.25, 0.5]}
    assert main(["report", str(folder)]) == 2
    assert "report.html needs matplotlib: pip install" in capsys.readouterr().err
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such folder; give the folder that run.dir names"),
        (lambda path: path.mkdir(), "it holds no run"),
        (
            lambda path: (path.mkdir(), (path / "config.toml").write_text("a = ")),
            "config.toml is no config",
        ),
        *(
            (
                lambda path, text=text: (path.mkdir(), (path / "config.toml").write_text(text)),
                f"config.toml is no config ({problem}): put back",
            )
            for text, problem in (
                ("train = 1", "train is no table"),
                ("model = []", "model is no table"),
                ("rewards = 5", "rewards is no list of tables"),
                ("rewards = [5]", "rewards is no list of tables"),
                ("rewards = [{ weight = 'a' }]", "a weight of rewards is no number"),
            )
        ),
        (
            lambda path: (path.mkdir(), (path / "config.toml").write_text("a = " + "[" * 5_000)),
            "config.toml is no config",
        ),
        (
            lambda path: (
                path.mkdir(),
                (path / "config.toml").write_text(""),
                (path / "summary.json").write_text("[1]"),
            ),
            "summary.json is no JSON object",
        ),
    ],
)
def test_what_is_no_run_is_refused_without_a_traceback(tmp_path, capsys, make, message):
    make(tmp_path / "x")
    assert main(["report", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_a_report_that_cannot_be_written_says_where_and_what_else_to_do(folder):
    (folder / "report.html").mkdir()
    with pytest.raises(InputError, match=r"report\.html cannot be written .*--text"):
        write_report(folder)


def test_the_total_of_a_sample_weighs_its_rewards():
    summing = RewardSum({"right": 2.0, "brief": 1.0})
    assert total_reward(sample(), summing) == 2.5
    unread = sample(rewards={"right": None, "brief": 1.0})
    assert total_reward(unread, summing) is None
    assert total_reward(unread, RewardSum({"right": 0.0})) == 1.0


@pytest.mark.parametrize(
    "tables",
    [
        {"recipe": "like_trl"},
        {"recipe": {"use": "like_trl", "scale_rewards": "none"}},
        {"advantage": ["sum_scored", {"use": "subtract_group_mean"}]},
        {"advantage": [{"use": "python:like_trl"}]},
    ],
)
def test_the_total_is_of_what_was_scored_where_the_chain_adds_that_up(tables):
    """As the metric `reward` is: None where no reward with a weight scored the sample."""
    rewards = [{"use": "mine.py:right", "weight": 2.0}, {"use": "brief", "weight": 0.0}]
    summing = reward_sum({**tables, "rewards": [*rewards, {"use": "short"}]})
    assert summing == ({"right": 2.0, "brief": 0.0, "short": 1.0}, True)
    assert total_reward(sample(rewards={"right": 1.5, "short": None}), summing) == 3.0
    unscored = {"right": None, "brief": 1.0, "short": None}
    assert total_reward(sample(rewards=unscored), summing) is None
    assert not reward_sum({"recipe": "grpo"}).adds_scored


def test_prompts_may_be_texts_messages_or_anything():
    assert shown("a") == "a"
    assert shown([{"role": "user", "content": "hi"}, {"content": [1]}]) == "user: hi\n?: [1]"
    assert json.loads(shown({"a": 1})) == {"a": 1}
