"""`jaxgrpo samples`: which rows of which step it prints, in which order, and none of them cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxgrpo.cli.main import main
from jaxgrpo.training.records.folder import RunFolder

CONFIG = 'rewards = [{ use = "mine.py:right", weight = 2.0 }, { use = "short", name = "brief" }]'


def row(step: int, sample: int, completion: Any, **changes: Any) -> dict[str, Any]:
    length = sample + 1
    return {
        "step": step, "ordinal": 0, "row": 7, "sample": sample, "prompt": "1+1=",
        "completion": completion, "completion_ids": [1] * length, "logps": [-0.5] * length,
        "rewards": {"right": 1.0, "brief": 0.0}, "advantage": 0.0, "truncated": False,
    } | changes  # fmt: skip


@pytest.fixture
def run(tmp_path) -> str:
    """Step 2 has four samples: the best, one not scored, the worst, and the longest."""
    folder = tmp_path / "run"
    rows = [
        row(2, 0, "best", rewards={"right": 1.0, "brief": 0.5}, advantage=1.0),
        row(2, 1, "not scored", rewards={"right": None, "brief": 1.0}, advantage=[0.0, None]),
        row(2, 2, "worst", rewards={"right": 0.0, "brief": 0.25}, advantage=[-2.0, -1.0, 0.0]),
        row(2, 3, f"the longest {'z' * 300}", advantage=0.5, truncated=True),
    ]
    with RunFolder(folder) as opened:
        opened.write_config(CONFIG)
        opened.write_samples(2, rows)
        opened.write_samples(10, [row(10, 0, "of step ten"), row(10, 1, "[bold]\x1b[31mred")])
        opened.write_samples(30, [row(30, 0, [{"role": "assistant", "content": "of step thirty"}])])
    return str(folder)


def test_an_empty_file_of_samples_is_said(run, capsys):
    (Path(run) / "samples" / "step_40.jsonl").write_text("")
    assert main(["samples", run]) == 2
    assert "step_40.jsonl holds no sample: take the file away" in capsys.readouterr().err


WORDS = ("best", "not scored", "worst", "the longest")


def printed(capsys, *words: str) -> str:
    code = main(["samples", *words])
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return streams.out


def order(text: str) -> list[str]:
    """The completions of step 2 in the order in which they are printed."""
    places = {text.find(f"\n{word}"): word for word in WORDS if f"\n{word}" in text}
    return [places[place] for place in sorted(places)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ["best", "not scored", "worst", "the longest"]),
        ("--sort reward", ["best", "the longest", "worst", "not scored"]),
        ("--sort reward --ascending", ["worst", "the longest", "best", "not scored"]),
        ("--sort length", ["the longest", "worst", "not scored", "best"]),
        ("--sort advantage", ["best", "the longest", "not scored", "worst"]),
        ("--sort length --limit 1", ["the longest"]),
        ("--contains st --sort length --ascending", ["best", "worst", "the longest"]),
        ("--contains ST", []),
        ("--contains 1+1", ["best", "not scored", "worst", "the longest"]),
    ],
)
def test_samples_are_sorted_searched_and_limited(run, capsys, options, expected):
    assert order(printed(capsys, run, "--step", "2", *options.split())) == expected


def test_a_sample_is_whole_with_all_its_numbers(run, capsys):
    text = printed(capsys, run, "--step", "2", "--sort", "reward")
    assert f"the longest {'z' * 300}\n" in text, "a pipe breaks no line"
    heads = [line for line in text.splitlines() if line.startswith("row ")]
    assert heads == [
        "row 7, sample 0 · reward 2.5 (right 1, brief 0.5) · advantage +1 · 1 tokens",
        "row 7, sample 3 · reward 2 (right 1, brief 0) · advantage +0.5 · 4 tokens, cut",
        "row 7, sample 2 · reward 0.25 (right 0, brief 0.25) · advantage -1 · 3 tokens",
        "row 7, sample 1 · reward – (right –, brief 1) · advantage +0 · 2 tokens",
    ]
    assert text.endswith("4 of 4 samples of step 2, highest reward first\n")


def test_the_reward_is_the_sum_of_what_was_scored_where_the_chain_adds_that_up(run, capsys):
    (Path(run) / "config.toml").write_text(f'recipe = "like_trl"\n{CONFIG}')
    text = printed(capsys, run, "--step", "2", "--sort", "reward")
    assert order(text) == ["best", "the longest", "not scored", "worst"]
    assert "row 7, sample 1 · reward 1 (right –, brief 1) · advantage +0" in text


def test_the_newest_step_is_the_default_and_texts_do_not_act(run, capsys):
    assert "assistant: of step thirty" in printed(capsys, run)
    text = printed(capsys, run, "--step", "10")
    assert "[bold]\\x1b[31mred" in text
    assert "\x1b" not in text


def test_a_run_is_named_from_the_home_folder_by_its_mark(run, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(Path(run).parent))
    for command in ("samples", "report"):  # bash leaves the mark in --option=~/run, and in quotes
        assert main([command, "~/run", "--json"]) == 0
    assert '"run": "run"' in capsys.readouterr().out


def test_the_numbers_are_one_document(run, capsys):
    words = ("--step", "2", "--sort", "reward", "--contains", "st", "--limit", "2", "--json")
    document = json.loads(printed(capsys, run, *words))
    assert (document["step"], document["samples"], document["matching"]) == (2, 4, 3)
    best, longest = document["shown"]
    assert best == {
        "row": 7, "sample": 0, "prompt": "1+1=", "completion": "best", "truncated": False,
        "rewards": {"right": 1.0, "brief": 0.5}, "reward": 2.5, "length": 1, "advantage": 1.0,
    }  # fmt: skip
    assert longest["completion"].endswith("z" * 300)
    rows = json.loads(printed(capsys, run, "--step", "2", "--json"))["shown"]
    assert rows[1]["reward"] is rows[1]["rewards"]["right"] is None, "not scored"
    assert "\x1b" not in printed(capsys, run, "--step", "10", "--json")


def test_a_step_without_samples_names_those_that_have_some(run, capsys):
    assert main(["samples", run, "--step", "11"]) == 2
    errors = capsys.readouterr().err
    assert f"error: --step 11: {run} has no samples of it" in errors
    assert "are 2, 10, 30, the last is 30" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none",), "there is no such folder"),
        (("empty",), "the run has no samples yet"),
        (("empty", "--limit", "0"), "--limit 0: expected 1 or more"),
    ],
)
def test_what_has_no_samples_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with RunFolder(Path("empty")) as opened:
        opened.write_config(CONFIG)
    assert main(["samples", *words]) == 2
    assert message in capsys.readouterr().err
