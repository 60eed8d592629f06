"""`jaxgrpo rescore`: saved samples judged again, with what rewards get in training."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import minimal_config
import numpy as np
import pytest
import small_run
from rich.console import Console

from jaxgrpo.cli import make_base, rescore
from jaxgrpo.cli.main import main
from jaxgrpo.cli.rescore import StepScores
from jaxgrpo.config import files as configs
from jaxgrpo.data.tasks import calculator
from jaxgrpo.rewards import Reward, RewardLog
from jaxgrpo.training import loop
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.reading import read_samples
from jaxgrpo.training.records.report.record import RewardSum

CODE = '''
def call(text):
    return text, [{"name": "calculate", "arguments": {"expression": "6*7"}}]


def spoken(prompts, completions, completion_ids, group_ids, answer, trainer_state, **columns):
    """Depends on all that rewards get."""
    scores = []
    for prompt, talk, ids, group in zip(prompts, completions, completion_ids, group_ids):
        assert prompt[-1]["role"] == "user"
        tools = sum("42" in message["content"] for message in talk if message["role"] == "tool")
        calls = sum(len(message.get("tool_calls", ())) for message in talk)
        letters = sum(len(message["content"]) for message in talk)
        scores.append(tools + calls / 7 + letters / 11 + len(ids) / 13 + group / 17)
    return [score + len(text) / 19 + trainer_state.epoch for score, text in zip(scores, answer)]


def tools(completions, **columns):
    return [sum(message["role"] == "tool" for message in talk) for talk in completions]


def letters(completions, log_extra, **columns):
    log_extra("length", [len(text) for text in completions])
    return [None if text == "unread" else len(text) for text in completions]


def closed(completions, **columns):
    raise RuntimeError("no service")


def wants(completions, colour):
    return [0.0] * len(completions)


def looks(completions, environments):
    return [0.0] * len(completions)


def agent(base_url, answer):
    return 1.0
'''


MIXTURE = ("--set", 'data.path=[{path="RUN/../rows.jsonl"}]')


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(CODE)
    return path


def sample(ordinal: int, number: int, completion: str, reward: float | None, **changes: Any) -> Any:
    return {
        "step": 4, "ordinal": ordinal, "row": ordinal, "sample": number, "prompt": f"{ordinal}+1=",
        "completion": completion, "completion_ids": [1] * len(completion),
        "logps": [-0.5] * len(completion), "rewards": {"right": reward}, "advantage": 0.0,
        "truncated": False,
    } | changes  # fmt: skip


@pytest.fixture
def run(tmp_path, mine) -> Path:
    """Group 0 could teach, and by the number of letters could not; group 1 the other way round."""
    data = tmp_path / "rows.jsonl"
    rows = ({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3))
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rewards = [{"use": f"{mine}:letters", "name": "right", "weight": 2.0}]
    tables = minimal_config.tables(data={"path": str(data)}, rewards=rewards)
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(configs.to_toml(configs.from_dict(tables)))
        texts = [("a", 1.0), ("b", 0.0), ("cc", 1.0), ("unread", 1.0)]
        samples = [sample(n // 2, n % 2, *text) for n, text in enumerate(texts)]
        samples += [sample(2, 0, "ddd", 0.5), sample(2, 1, "d", 0.5)]
        folder.write_samples(4, samples)
    return tmp_path / "run"


def rescored(capsys, run, *words) -> Any:
    capsys.readouterr()  # of the training
    code = main(["rescore", str(run), *map(str, words), "--json"])
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return json.loads(streams.out)


def test_the_numbers_are_of_the_new_reward_beside_the_old_sum(run, mine, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    document = rescored(capsys, run, "--rewards", f"{mine}:letters", "--out", out)
    (entry,) = document["rows"]
    assert document["left_out"] == 0
    assert (entry["step"], entry["reward"]) == (4, "letters")
    assert (entry["samples"], entry["unscored"]) == (5, 1)
    assert entry["old_mean"] == pytest.approx(2 * 4 / 6)
    assert entry["new_mean"] == pytest.approx((1 + 1 + 2 + 3 + 1) / 5)
    # Group 0 comes to its mean, group 2 leaves it; in group 1 one sample is compared.
    assert entry["sign_changed"] == entry["rank_changed"] == pytest.approx(4 / 5)
    assert (entry["now_flat"], entry["now_informative"]) == (1, 1)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["rewards"]["letters"] for line in lines] == [1, 1, 2, None, 3, 1]
    assert [line["saved"]["right"] for line in lines] == [1, 0, 1, 1, 0.5, 0.5]
    assert [line["extra"]["length"] for line in lines] == [1, 1, 2, 6, 3, 1]
    assert lines[2].keys() == {"step", "ordinal", "row", "sample", "saved", "rewards", "extra"}


def test_the_rows_of_a_run_may_have_moved(run, mine, tmp_path, capsys):
    before = rescored(capsys, run, "--rewards", f"{mine}:letters")
    moved = (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    assert main(["rescore", str(run), "--rewards", f"{mine}:letters"]) == 2
    assert "rows.jsonl" in capsys.readouterr().err
    words = ("--rewards", f"{mine}:letters", "--set", f"data.path={moved}")
    assert rescored(capsys, run, *words) == before


def test_several_rewards_have_a_sum_by_the_weights_of_the_run(run, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    words = ("--rewards", "right", "length", "--set", "rollout.max_completion_tokens=4")
    entries = rescored(capsys, run, *words, "--out", out)["rows"]
    assert [entry["reward"] for entry in entries] == ["right", "length", "total"]
    pairs = [json.loads(line)["rewards"].values() for line in out.read_text().splitlines()]
    totals = [2 * right + length for right, length in pairs if right is not None]
    assert len(totals) == 5
    assert min(length for _, length in pairs) < 0, "it knows the limit of the run"
    assert entries[2]["new_mean"] == pytest.approx(np.mean(totals))
    assert [entry["unscored"] for entry in entries] == [1, 0, 1]
    assert main(["rescore", str(run), "--rewards", "right"]) == 0
    printed = capsys.readouterr().out
    assert "Spearman" in printed
    assert "groups that would become so" in printed


def test_why_a_reward_failed_is_said_once(run, mine, capsys):
    folder = run / "samples"
    later = (folder / "step_4.jsonl").read_text().replace('"step": 4', '"step": 5')
    (folder / "step_5.jsonl").write_text(later)
    words = ("--set", f"rewards.0.use={mine}:closed", "rewards.0.on_error=unscored")
    assert main(["rescore", str(run), "--rewards", "right", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("rewards.right raised RuntimeError on completion") == 1
    assert shown.count('left unscored, as on_error = "unscored" says') == 1


def test_both_sums_are_of_what_was_scored_where_the_run_adds_that_up(run, capsys):
    words = ("--rewards", "right", "length", "--set", "rollout.max_completion_tokens=4")
    plain = rescored(capsys, run, *words)["rows"]
    summed = rescored(capsys, run, *words, "--set", "recipe=like_trl")["rows"]
    assert [entry["unscored"] for entry in plain] == [1, 0, 1]
    assert [entry["unscored"] for entry in summed] == [1, 0, 0]
    assert summed[:2] == plain[:2]


@pytest.mark.parametrize(
    ("weights", "first", "second"),
    [
        ((0.1, 0.2, -0.3), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)),
        ((1.0, -1.0), (float(np.float32(30.1)), 30.0), (float(np.float32(0.1)), 0.0)),
    ],
    ids=["zero", "near"],
)
def test_a_group_whose_sums_differ_by_the_rounding_of_larger_terms_is_flat(weights, first, second):
    """As in training: .1 + .2 - .3 is 5.6e-17, and 30.1 - 30 as float32 numbers 0.1000004."""
    by_name = dict(zip("abc", weights, strict=False))
    judges = [Reward(name, sum, weight) for name, weight in by_name.items()]
    pair = [dict(zip(by_name, values, strict=True)) for values in (first, second)]
    scores = {name: np.array([rewards[name] for rewards in pair], np.float32) for name in by_name}
    rows, log = [sample(0, n, "a", float(n)) for n in range(2)], RewardLog({}, {}, {}, {})
    entries = [*rescore.compare_step(StepScores(rows, scores, log), judges, RewardSum())]
    assert [entry["now_flat"] for entry in entries] == [0] * len(judges) + [1]
    rows = [sample(0, n, "a", None, rewards=rewards) for n, rewards in enumerate(pair)]
    right = {"right": np.array([0, 1], np.float32)}
    (entry,) = rescore.compare_step(StepScores(rows, right, log), judges[:1], RewardSum(by_name))
    assert (entry["now_informative"], entry["sign_changed"]) == (1, 1.0)


def test_the_table_of_many_steps_fits_a_terminal_of_80_columns():
    numbers = {
        "reward": "correct", "old_mean": 0.5, "new_mean": -0.25, "spearman": -0.125,
        "sign_changed": 1.0, "rank_changed": 0.5, "unscored": 1024, "now_flat": 16,
        "now_informative": 128,
    }  # fmt: skip
    console = Console(file=(screen := io.StringIO()), width=80)
    rescore._show(console, [{"step": step, **numbers} for step in range(100, 120)], 0)
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    (head,) = [line for line in lines if line.split() == [*rescore.HEAD]]
    rows = [line for line in lines if "100.0%" in line]
    assert len(rows) == 20
    assert max(map(len, (head, *rows))) <= 80


@pytest.mark.parametrize(
    ("rewards", "words", "message"),
    [
        ("lenght", (), "unknown reward 'lenght': did you mean 'length'"),
        ("MINE:wants", (), "rewards.wants asks for 'colour', which does not exist"),
        ("MINE:looks", (), "rewards.looks reads the environments of samples"),
        ("MINE:none", (), "has no 'none'"),
        ("right", ("--step", "3"), "--step 3: "),
        ("right", ("--out", "RUN/none/out.jsonl"), "there is no folder "),
        ("right", ("--out", "RUN/samples/step_4.jsonl"), "the command reads this file"),
        ("right", ("--out", "RUN/config.toml"), "the command reads this file"),
        ("right", (*MIXTURE, "--out", "RUN/../rows.jsonl"), "the command reads this file"),
        ("right", ("--set", "data.path=task:arithmetic:test"), "its data has another prompt in"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_a_line(run, mine, rewards, words, message, capsys):
    name = rewards.replace("MINE", str(mine))
    words = (word.replace("RUN", str(run)) for word in words)
    assert main(["rescore", str(run), "--rewards", name, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_run_without_samples_or_rows_is_refused(run, mine, tmp_path, capsys):
    (run / "samples" / "step_4.jsonl").unlink()
    assert main(["rescore", str(run), "--rewards", "right"]) == 2
    assert "the run has no samples yet" in capsys.readouterr().err
    assert main(["rescore", str(tmp_path), "--rewards", "right"]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_rows_from_python_give_no_columns(run, mine, tmp_path, capsys):
    text = (run / "config.toml").read_text()
    lines = [
        line for line in text.splitlines() if not line.startswith("path") or "jsonl" not in line
    ]
    (run / "config.toml").write_text("\n".join(lines))
    assert rescored(capsys, run, "--rewards", "right")["rows"][0]["unscored"] == 1
    assert main(["rescore", str(run), "--rewards", f"{mine}:wants"]) == 2
    assert "the run got its rows from Python" in capsys.readouterr().err


def test_conversations_that_were_not_saved_are_left_out(run, mine, tmp_path, capsys):
    rows = read_samples(run)
    turn = {"text": "a", "tokens": 1, "reply": "", "reply_tokens": 0, "reward": 0.0}
    for row in rows:
        row["turns"] = [turn]
    rows[4]["messages"] = [{"role": "assistant", "content": "ddd"}]
    rows[5] |= {"messages": [{"role": "assistant", "content": "d"}], "problem": "step raised"}
    file = run / "samples" / "step_4.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    out = tmp_path / "out.jsonl"
    document = rescored(capsys, run, "--rewards", f"{mine}:letters", "--out", out)
    assert document["left_out"] == 4
    assert (document["rows"][0]["samples"], document["rows"][0]["unscored"]) == (1, 1)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["rewards"]["letters"] for line in lines] == [3, None]
    assert [line["extra"]["length"] for line in lines] == [3, None], "a reward never sees it"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:4]))
    assert main(["rescore", str(run), "--rewards", "right"]) == 2
    assert "no conversation was saved" in capsys.readouterr().err


def test_what_a_program_asked_first_is_the_prompt_whatever_its_row_says(run, mine, capsys):
    """Before, such a run was told that its data had changed."""
    rows = read_samples(run)
    for row in rows:
        row["prompt"] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1?"}]
        row["messages"] = [{"role": "assistant", "content": row["completion"]}]
    file = run / "samples" / "step_4.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("--rewards", f"{mine}:tools")
    assert main(["rescore", str(run), *words]) == 2
    assert "its data has another prompt in row 0" in capsys.readouterr().err
    words += ("--set", f"environment={mine}:agent")
    assert rescored(capsys, run, *words)["rows"][0]["samples"] == 6
    rows[5]["row"] = 3
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["rescore", str(run), *words]) == 2
    assert "its data has another prompt in row 3" in capsys.readouterr().err


def saved_scores(run: Any) -> dict[str, dict[int, list[Any]]]:
    """reward -> step -> what was saved."""
    scores: dict[str, dict[int, list[Any]]] = {}
    for file in (run / "samples").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for name in rows[0]["rewards"]:
            step = scores.setdefault(name, {})
            step[rows[0]["step"]] = [row["rewards"][name] for row in rows]
    return scores


def new_scores(out: Path) -> dict[str, dict[int, list[Any]]]:
    scores: dict[str, dict[int, list[Any]]] = {}
    for line in map(json.loads, out.read_text().splitlines()):
        for name, value in line["rewards"].items():
            scores.setdefault(name, {}).setdefault(line["step"], []).append(value)
    return scores


@pytest.mark.full
@pytest.mark.slow
def test_the_same_rewards_say_the_same_bit_for_bit(tmp_path, capsys):
    run = loop.train(small_run.config(tmp_path / "run", **{"run.samples_every": 1}))
    out, negated = tmp_path / "out.jsonl", f"{small_run.__file__}:negated"
    document = rescored(capsys, run.path, "--rewards", "arithmetic", "digits", "--out", out)
    assert saved_scores(run.path) == new_scores(out)
    assert len(document["rows"]) == 3 * 3
    for entry in document["rows"][2::3]:
        assert entry["reward"] == "total"
        assert entry["old_mean"] == entry["new_mean"]
        assert (entry["spearman"], entry["now_flat"]) == (pytest.approx(1), 0)
        assert entry["sign_changed"] == entry["rank_changed"] == 0
    rescored(capsys, run.path, "--rewards", negated, "--step", 2, "--out", out)
    right = np.array(saved_scores(run.path)["arithmetic"][2])
    assert new_scores(out) == {"negated": {2: (1 - right).tolist()}}


@pytest.mark.full
@pytest.mark.parametrize("too_long", [pytest.param("error", marks=pytest.mark.full), "drop"])
def test_conversations_reach_rewards_as_in_training(tmp_path, mine, capsys, too_long):
    make_base.make_base(tmp_path / "base", "calculator", steps=20, batch=32, hidden_size=32)
    data = tmp_path / "rows.jsonl"
    rows = calculator.rows("train", 12)
    if too_long == "drop":
        rows.insert(1, {**rows[0], "prompt": "1+" * 40 + "1="})
    talks = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in talks))
    changes = {
        "model.path": str(tmp_path / "base"),
        "data": {"path": str(data), "too_long": too_long},
        "rewards": [{"use": f"{mine}:spoken"}],
        "tools": ["jaxgrpo.data.tasks.calculator:calculate"],
        "rollout.call_format": f"{mine}:call",
        "rollout.max_turns": 3,
        "rollout.max_prompt_tokens": 12,
        "rollout.max_completion_tokens": 60,
        "run.samples_every": 1,
        "train.steps": 2,
    }
    run = loop.train(small_run.config(tmp_path / "run", **changes))
    out = tmp_path / "out.jsonl"
    rescored(capsys, run.path, "--rewards", "spoken", f"{mine}:tools", "--out", out)
    scores = new_scores(out)
    assert scores["spoken"] == saved_scores(run.path)["spoken"]
    assert max(scores["tools"][1]) >= 1
