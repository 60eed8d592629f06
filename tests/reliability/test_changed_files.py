"""Files of a run that say something twice, something odd or something of another run."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_runs
import pytest
from checkpointed import small

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.evaluation.diversity import find_collapse
from jaxgrpo.training import export
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.reading import (
    OPTIONAL_TYPES,
    is_number,
    read_metrics,
    read_object,
    read_samples,
)
from jaxgrpo.training.records.report.charts import draw
from jaxgrpo.training.records.report.record import read_run
from jaxgrpo.training.step_files import damage

pytestmark = pytest.mark.fault(12)

SAVED, STEPS = 3, 5


def say_twice(file: Path, name: str, value: Any) -> None:
    """Adds a name to a JSON object that has it already."""
    text = file.read_text()
    assert json.loads(text)[name] != value
    file.write_text(f"{text.rstrip()[:-1]}, {json.dumps(name)}: {json.dumps(value)}}}\n")


def accept(step: Path) -> None:
    """Makes the manifest of a step fit its meta.json, as a stranger can."""
    content = (step / "meta.json").read_bytes()
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"]["meta.json"] = [len(content), zlib.crc32(content)]
    (step / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["files", "meta.json"])
def test_a_manifest_that_says_something_twice_is_damaged(name, saved):
    file = saved / "3" / "manifest.json"
    before = file.read_text()
    twice = '{"files": {}, ' if name == "files" else '"meta.json": [1, 2], "meta.json": '
    file.write_text(before.replace("{" if name == "files" else '"meta.json": ', twice, 1))
    assert json.loads(file.read_text()) == json.loads(before), "a reader may take the last of them"
    assert "manifest.json cannot be read" in str(damage(saved / "3"))
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.choose() == 2


def test_a_step_whose_meta_says_something_twice_is_refused(saved):
    say_twice(saved / "3" / "meta.json", "meta", {})
    accept(saved / "3")
    with Checkpoints(saved) as checkpoints, pytest.raises(InputError, match="does not describe"):
        checkpoints.restore(small(0), 3)


def test_the_best_step_is_read_off_numbers_and_a_meta_of_other_kinds_is_refused(saved):
    meta = {"best": None, "best_metric": None, "base": None, "resets": {}, "not_finite": 0}
    lines = [{"step": 1, "eval/a": 0.5}, {"step": 2, "eval/a": "high"}, {"step": 3}]
    (saved / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Checkpoints(saved) as checkpoints:
        checkpoints.restore(small(0))
        checkpoints.save(4, small(4), meta)
        checkpoints.wait()
        assert export._number(saved, "eval/a", "best", checkpoints) == 1
        checkpoints.save(5, small(5), {**meta, "best": 5})
        checkpoints.wait()
        with pytest.raises(InputError, match="is not what a run writes"):
            export._number(saved, "eval/a", "best", checkpoints)


def test_the_best_step_is_that_of_the_metric_asked_for_and_of_an_intact_checkpoint(saved):
    meta = {"best": [1, 0.5], "best_metric": "eval/a", "base": None, "resets": {}, "not_finite": 0}
    lines = [{"step": 1, "eval/a": 0.5, "eval/b": 0.1}, {"step": 2, "eval/a": 0.9, "eval/b": 0.7}]
    (saved / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Checkpoints(saved, keep=4) as checkpoints:
        checkpoints.restore(small(0))
        checkpoints.save(4, small(4), meta)
        checkpoints.save(5, small(5), {**meta, "best": [4, 0.8]})
        checkpoints.wait()

        def best(metric: str) -> int | None:
            return export._number(saved, metric, "best", checkpoints)

        assert best("eval/a") == 4  # step 2 could not be saved
        assert best("eval/b") == 2
        with open(saved / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 5, "eval/a": 0.85}) + "\n")
        assert best("eval/a") == 5  # evaluated by a later start, as train.steps was 5 then
        text = (saved / "5" / "meta.json").read_text()
        (saved / "5" / "meta.json").write_text(text.replace("0.8", "9.8"))
        assert best("eval/a") == 1  # as step 4 says
        base = {"asked": {}, "metrics": {"a": 0.25}}
        checkpoints.save(6, small(6), {**meta, "base": base})
        checkpoints.wait()
        first, second = (f"{json.dumps({'step': 0, 'eval/a': value})}\n" for value in (0.25, 0.1))
        text = (saved / "metrics.jsonl").read_text()
        (saved / "metrics.jsonl").write_text(first + text)
        assert best("eval/a") == 1
        (saved / "metrics.jsonl").write_text(second + text)  # evaluated on other questions since
        assert best("eval/a") == 2


@pytest.mark.parametrize("order", [(3, 4), (3, 2), (1, 9)])
def test_steps_that_were_renamed_are_refused_by_both_numbers(order, saved):
    old, new = (saved / str(step) for step in order)
    if new.exists():
        new.rename(saved / "aside")
    old.rename(new)
    if (saved / "aside").exists():
        (saved / "aside").rename(old)
    message = rf"/{order[1]} holds step {order[0]} and not {order[1]}: give it its own name back"
    with Checkpoints(saved) as checkpoints, pytest.raises(InputError, match=message):
        checkpoints.restore(small(0), order[1])


LINES = {
    "a step twice": '{"step": 2, "reward": 1.0, "step": 7}',
    "a metric twice": '{"step": 2, "reward": 1.0, "reward": 2.0}',
    "a truth value": '{"step": true}',
    "below 0": '{"step": -2}',
    "beyond counting": f'{{"step": {10**40}}}',
    "a number with a point": '{"step": 2.0}',
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_metrics_without_a_place_among_the_steps_is_refused(name, tmp_path):
    lines = ['{"step": 1, "reward": 0.5}', LINES[name], '{"step": 3, "reward": 0.5}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(InputError, match=r"metrics.jsonl, line 2 is not a JSON object with a"):
        read_metrics(tmp_path)


ODD_VALUES = ("NaN", "-Infinity", "1e999", str(10**400), "true", '"a"', "[1]", "{}", "null")


@pytest.mark.parametrize("value", [*ODD_VALUES, "1.7e308", "-1.7e308"])
def test_an_odd_value_in_metrics_is_no_number_and_a_huge_one_is_drawn(value, tmp_path):
    texts = [f'{{"step": {step}, "reward": {step}, "kl": {step}}}' for step in (1, 2, 3)]
    texts[1] = f'{{"step": 2, "reward": {value}, "kl": {value}}}'
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in texts))
    record = read_run(tmp_path)
    counts = value in ("true", "1.7e308", "-1.7e308")  # Python counts with truth values
    assert is_number(record.lines[1]["reward"]) == counts
    assert len(record.series("reward")[0]) == 2 + counts
    assert all(svg.startswith("<?xml") for _, svg in draw(record))


def test_huge_numbers_and_odd_names_in_metrics_disturb_no_rule_and_no_curve(tmp_path, capsys):
    lines = []
    for step in range(14):
        huge = (-1) ** step * 1.7e308
        odd = {"eval/pass@x/low": 0.5, "eval/pass@x/high": 0.1, "eval/pass@8": "a"}
        ends = {"eval/pass@8/low": 0.5, "eval/pass@8/high": 0.1, "eval/accuracy": huge}
        odd |= {"atlas/norm/run": None, "atlas/norm/a": "a", "atlas/cosine/a/run": "b"}
        odd |= {"eval/format/a": "a", "eval/format/b": 0.95, "flops": "many"}
        line = {"step": step, "reward": huge, "policy_kl": 1.7e308, "grad_norm": huge}
        lines.append(json.dumps(line | odd | ends) + "\n")
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert "policy kl" in {alarm.name for alarm in read_run(tmp_path).warnings}
    assert main(["report", str(tmp_path), "--text"]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    assert find_collapse(read_metrics(tmp_path)) is None, "it began so"
    assert main(["fit", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


SAMPLE = {
    "step": 1, "ordinal": 0, "row": 3, "sample": 1, "prompt": "a", "completion": "b",
    "completion_ids": [7], "logps": [-0.5], "rewards": {"r": None}, "advantage": 0.5,
    "truncated": False,
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_that_lacks_what_each_has_is_refused_by_its_name(name, tmp_path):
    (tmp_path / "samples").mkdir()
    file = tmp_path / "samples" / "step_1.jsonl"
    file.write_text(f"{json.dumps(SAMPLE)}\n")
    assert read_samples(tmp_path) == [SAMPLE]
    without = {key: value for key, value in SAMPLE.items() if key != name}
    for row in (without, {**SAMPLE, name: {"a": 1} if name != "rewards" else 7}):
        file.write_text(f"{json.dumps(SAMPLE)}\n{json.dumps(row)}\n")
        with pytest.raises(InputError, match=rf"line 2 is no sample \({name} is "):
            read_samples(tmp_path)
    file.write_text(f"{json.dumps(SAMPLE)}\n")
    say_twice(file, name, "b2")
    with pytest.raises(InputError, match=rf"'{name}' stands twice"):
        read_samples(tmp_path)


TURN = {"text": "b", "tokens": 1, "reply": "", "reply_tokens": 0, "reward": None}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        *((name, 5, name) for name in OPTIONAL_TYPES),
        ("turns", [5], "no JSON object"),
        *(("turns", [TURN, {**TURN, name: [5]}], name) for name in TURN),
    ],
)
def test_a_sample_with_something_odd_in_its_turns_is_refused(name, value, problem, tmp_path):
    (tmp_path / "samples").mkdir()
    file = tmp_path / "samples" / "step_1.jsonl"
    row = {**SAMPLE, "turns": [TURN]}
    file.write_text(f"{json.dumps(row)}\n")
    assert read_samples(tmp_path) == [row]
    file.write_text(f"{json.dumps(row)}\n{json.dumps({**row, name: value})}\n")
    with pytest.raises(InputError, match=rf"line 2 is no sample \({problem}"):
        read_samples(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": 1, "b": 2, "a": 3}', "{" * 2000])
def test_a_summary_or_a_replay_that_is_no_object_is_refused_in_a_line(text, tmp_path):
    (tmp_path / "f.json").write_text('{"a": 1, "b": 2}')
    assert read_object(tmp_path / "f.json", "a", "b") == {"a": 1, "b": 2}
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(InputError, match="is no JSON object with a, b") as refusal:
        read_object(tmp_path / "f.json", "a", "b")
    assert "\n" not in str(refusal.value)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "replay.json").write_text(text)
    with RunFolder(tmp_path / "r", resume=True) as folder, pytest.raises(InputError, match="files"):
        folder.replay()


def test_lines_that_are_taken_from_a_run_under_way_are_missed(tmp_path, caplog):
    with RunFolder(tmp_path / "r") as folder:
        folder.rewind(None)
        folder.write_metrics(1, {"reward": 0.5})
        folder.write_metrics(2, {"reward": 0.5})
        assert not caplog.records
        (tmp_path / "r" / "metrics.jsonl").unlink()
        folder.write_metrics(3, {"reward": 0.5})
        assert "has 0 bytes, and this run has written" in caplog.text
        folder.write_metrics(4, {"reward": 0.5})
        assert len(caplog.records) == 1
    assert [line["step"] for line in read_metrics(tmp_path / "r")] == [3, 4]


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory, fork_server, environment) -> faulty_runs.Folders:
    home = tmp_path_factory.mktemp("runs")

    def train(name: str, **changes: Any) -> Path:
        file = write(base, home / name, home / "run", **changes)
        return faulty_runs.train(fork_server, file, environment())

    run = train("run", **{"train.steps": SAVED})
    stranger = train("stranger", **{"train.steps": SAVED, "train.seed": 1})
    return faulty_runs.Folders(run, stranger, faulty_runs.outcome(train("straight")))


def write(base: Path, home: Path, rewards: Path, **changes: Any) -> Path:
    changes = {"train.steps": STEPS, "rewards": [{"use": f"{rewards}/mine.py:digits"}], **changes}
    return faulty_runs.write(base, home, **changes)


def edit_line(run: Path, change: Callable[[str], str]) -> None:
    """Changes the second line of metrics."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1] = change(lines[1])
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


NOTICED = {
    "a value that is no number": lambda run, _: edit_line(
        run, lambda line: line.replace('"reward": ', '"reward": NaN, "more": ')
    ),
    "a line of another run": lambda run, stranger: edit_line(
        run, lambda _: (stranger / "metrics.jsonl").read_text().splitlines()[1]
    ),
    "a line twice": lambda run, _: edit_line(run, lambda line: f"{line}\n{line}"),
    "no end of lines but of Windows": lambda run, _: edit_line(run, lambda line: f"{line}\r"),
}
UNHARMED = {
    "a manifest that says something twice": lambda run, _: say_twice(
        run / "checkpoints" / "3" / "manifest.json", "files", {}
    ),
    "a summary that says something twice": lambda run, _: say_twice(
        run / "summary.json", "step", 9
    ),
    "zeros behind the last line": lambda run, _: (run / "metrics.jsonl").write_bytes(
        (run / "metrics.jsonl").read_bytes() + b"\0" * 4096
    ),
    "a step with zeros before its number": lambda run, _: (run / "checkpoints" / "3").rename(
        run / "checkpoints" / "0003"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", [*NOTICED, *UNHARMED])
def test_a_run_continues_behind_what_was_changed_and_says_what_was_lost(
    name, runs, base, tmp_path, start
):
    file = write(base, tmp_path, runs.run.parent)
    shutil.copytree(runs.run, tmp_path / "r")
    (NOTICED | UNHARMED)[name](tmp_path / "r", runs.stranger)
    run = start("train", file, "--resume", "auto")
    output, _ = run.communicate(timeout=faulty_runs.SECONDS)
    assert run.returncode == 0, output
    assert faulty_runs.disorder(output) == []
    assert ("metrics.jsonl is not what this run wrote" in output) == (name in NOTICED)
    different = faulty_runs.differences(runs.outcome, tmp_path / "r")
    lost = {"metrics of step 2", "number of lines"} if name in NOTICED else set()
    assert set(different) <= lost


@pytest.mark.full
def test_a_reward_that_fails_while_nothing_can_be_saved_is_what_the_run_ends_by(
    base, tmp_path, start
):
    harm = (
        "if step == 3 and not is_called_to_try:\n"
        f"    os.rename({str(tmp_path / 'r' / 'checkpoints')!r}, {str(tmp_path / 'aside')!r})\n"
        f"    open({str(tmp_path / 'r' / 'checkpoints')!r}, 'w').close()\n"
        "    raise ValueError('no grader')"
    )
    file = faulty_runs.write(base, tmp_path, harm, "import os")
    run = start("train", file, merged=False)
    _, errors = run.communicate(timeout=faulty_runs.SECONDS)
    assert run.returncode == 3, errors
    assert "no grader" in errors
    assert faulty_runs.disorder(errors) == []
