"""The run folder: who may have it, and what a kill leaves of its files."""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from faulty_runs import limit_files

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.storage import write_atomically
from jaxgrpo.training.opening import refuse_to_forget
from jaxgrpo.training.records import unwritten
from jaxgrpo.training.records.folder import SAMPLE_KEYS, RunFolder, plain
from jaxgrpo.training.records.reading import read_metrics

ROW = {
    "step": np.int32(3),
    "ordinal": 1,
    "row": 5,
    "sample": 0,
    "prompt": "1+1",
    "completion": "zwei \u2028 \udc80 <img>",
    "completion_ids": np.array([4, 2], np.int32),
    "logps": np.array([-0.5, -1.0], np.float32),
    "rewards": {"correct": np.float32(1.0), "judge": math.nan},
    "advantage": jnp.float32(0.25),
    "truncated": np.bool_(False),
}


def append(file: Path, text: bytes) -> None:
    with open(file, "ab") as end:
        end.write(text)


def test_a_fresh_folder_is_made_and_a_full_one_refused(tmp_path):
    path = tmp_path / "runs" / "a"
    with RunFolder(path) as run:
        run.write_metrics(1, {"reward": 0.5})
    with pytest.raises(InputError, match=r"holds metrics.jsonl\): go on .* by --resume auto"):
        RunFolder(path)
    with RunFolder(path, resume=True):
        assert read_metrics(path) == [{"step": 1, "reward": 0.5}]


def test_a_refused_folder_is_left_as_it_was(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not empty"):
        RunFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="is a file: give a folder"):
        RunFolder(tmp_path / "thesis.tex", resume=True)


def test_an_empty_folder_may_be_begun_and_begun_again(tmp_path):
    RunFolder(tmp_path).close()
    RunFolder(tmp_path).close()


def test_a_line_is_json_with_its_names_in_order_and_no_nan(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_metrics(
            2, {"z": jnp.float32(0.1), "a": np.nan, "b": -math.inf, "c": np.int64(7), "note": "x"}
        )
        line = (tmp_path / "metrics.jsonl").read_text()  # already there: nothing is buffered
    expected = '{"step": 2, "a": null, "b": null, "c": 7, "note": "x", "z": 0.10000000149011612}\n'
    assert line == expected


def test_the_same_run_writes_the_same_bytes(tmp_path):
    for name, order in (("a", 1), ("b", -1)):
        with RunFolder(tmp_path / name) as run:
            for step in range(5):
                metrics = {"loss": np.float32(1) / (step + 3), "entropy": 0.1 * step}
                run.write_metrics(step, dict(list(metrics.items())[::order]))
            run.write_samples(4, [ROW])
    for file in ("metrics.jsonl", "samples/step_4.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_metric_that_is_no_number_is_named(tmp_path):
    with RunFolder(tmp_path) as run, pytest.raises(TypeError, match=r"reward is set, which JSON"):
        run.write_metrics(1, {"reward": {1}})
    with pytest.raises(TypeError, match=r"value\.a\[1\] is object"):
        plain({"a": [1, object()]})


@pytest.mark.parametrize("torn", [b"", b'{"step": 5, "lo', b'{"step": 5}', b"\x00\x00\x00"])
def test_resuming_keeps_the_lines_up_to_the_checkpoint_byte_for_byte(tmp_path, torn):
    with RunFolder(tmp_path) as run:
        for step in range(5):
            run.write_metrics(step, {"loss": 0.1 * step})
            run.write_samples(step, [ROW])
            run.write_rollouts(step, b"arrays")
    file = tmp_path / "metrics.jsonl"
    written = file.read_bytes()
    file.write_bytes(written + torn)
    assert len(read_metrics(file)) == 5
    with RunFolder(tmp_path, resume=True) as run:
        run.rewind(2)
        assert file.read_bytes() == b"".join(written.splitlines(keepends=True)[:3])
        assert sorted(p.stem for p in (tmp_path / "samples").iterdir()) == [
            "step_0",
            "step_1",
            "step_2",
        ]
        rollouts = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
        assert rollouts == [f"0000000{step}.safetensors" for step in (0, 1, 2)]
        for step in (3, 4):
            run.write_metrics(step, {"loss": 0.1 * step})
    assert file.read_bytes() == written
    aside = tmp_path / "before_3"
    assert (aside / "metrics.jsonl").read_bytes() == b"".join(written.splitlines(keepends=True)[3:])
    assert sorted(p.name for p in (aside / "samples").iterdir()) == ["step_3.jsonl", "step_4.jsonl"]
    assert len(list((aside / "rollouts").iterdir())) == 2


def test_resuming_at_the_last_step_drops_only_the_torn_line(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_metrics(7, {"loss": 1.0})
        append(tmp_path / "metrics.jsonl", b'{"step": 8, "loss"')
        run.rewind(7)
        run.write_metrics(8, {"loss": 2.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [7, 8]


def test_what_was_logged_is_put_aside_however_many_checkpoints_are_removed(tmp_path):
    with RunFolder(tmp_path) as run:
        for last, folder in [(2, "before_3"), (None, "before_1"), (None, "before_1_2")]:
            for step in range(1 if last is None else 0, 5):
                if step not in {line["step"] for line in read_metrics(tmp_path)}:
                    run.write_metrics(step, {"reward": step / 8})
                    run.write_samples(step, [ROW])
            logged = {line["step"] for line in read_metrics(tmp_path)}
            assert run.rewind(last) == tmp_path / folder
            left = {line["step"] for line in read_metrics(tmp_path)}
            aside = {line["step"] for line in read_metrics(tmp_path / folder)}
            assert left | aside == logged
            assert {step for step in logged if last is None or step > last} == aside
            files = {f"step_{step}.jsonl" for step in aside}
            assert files == {file.name for file in (tmp_path / folder / "samples").iterdir()}
        assert run.rewind(None) is None


def test_beginning_again_without_a_checkpoint_begins_new_files(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_metrics(0, {"eval/accuracy": 0.5})
        run.write_samples(0, [ROW])
        run.rewind(None)
    assert read_metrics(tmp_path) == []
    assert list((tmp_path / "samples").iterdir()) == []


@pytest.mark.parametrize("lost", ["the folder", "all steps of a finished run", "a step long past"])
def test_a_run_whose_checkpoints_are_gone_keeps_its_metrics_and_is_refused(tmp_path, lost):
    with RunFolder(tmp_path) as run:
        run.rewind(None)
        for step in range(1, 6):
            run.write_metrics(step, {"reward": 0.5})
        if lost == "the folder":
            run.checkpoints.rmdir()
        if lost == "all steps of a finished run":
            run.write_summary({"step": 5})
        most_steps = 4 if lost == "a step long past" else 100
        with pytest.raises(InputError, match=r"of 5 steps and no checkpoint.*start again without"):
            refuse_to_forget(run.place, run.path, most_steps)
    assert len(read_metrics(tmp_path)) == 5


def test_a_run_killed_before_its_first_checkpoint_may_begin_again(tmp_path):
    with RunFolder(tmp_path) as run:
        refuse_to_forget(run.place, run.path, 4)
        run.rewind(None)
        for step in range(5):
            run.write_metrics(step, {"reward": 0.5})
        refuse_to_forget(run.place, run.path, 4)  # the save of step 2 may have been under way


def test_evaluations_of_other_questions_are_put_aside_however_often_a_start_is_killed(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_metrics(0, {"eval/accuracy": 0.5})
        run.write_metrics(1, {"reward": 0.1})
        run.write_metrics(2, {"reward": 0.2, "eval/accuracy": 0.7})
        for _ in range(2):
            run.replace_evaluations(2, {0: {"eval/accuracy": np.float32(0.25)}})
    assert read_metrics(tmp_path) == [
        {"step": 0, "eval/accuracy": 0.25, "eval_until_2/accuracy": 0.5},
        {"step": 1, "reward": 0.1},
        {"step": 2, "eval_until_2/accuracy": 0.7, "reward": 0.2},
    ]


def test_metrics_that_a_killed_start_rewrote_are_known_until_somebody_else_changes_them(tmp_path):
    """Evaluations are put aside before the next checkpoint is saved, which alone knows the metrics
    anew: a start that is killed between them, again and again, leaves what no checkpoint has."""
    logged = {}
    with RunFolder(tmp_path) as run:
        run.write_config("")
        run.write_metrics(0, {"eval/accuracy": 0.5})
        for step in (1, 2):
            run.write_metrics(step, {"reward": 0.1, "eval/accuracy": 0.7})
            logged[step] = run.logged()
            (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    metrics = tmp_path / "metrics.jsonl"
    contents = [metrics.read_bytes()]
    for value in (0.25, 0.125):  # two starts, each with other questions
        with RunFolder(tmp_path, resume=True) as run:
            assert run.problems(2, logged[2]) == run.problems(1, logged[1]) == []
            run.replace_evaluations(2, {0: {"eval/accuracy": value}})
        contents.append(metrics.read_bytes())
    assert len({*contents}) == 3
    with RunFolder(tmp_path, resume=True) as run:
        for content in contents:  # killed before, between and after the two
            metrics.write_bytes(content)
            assert run.problems(2, logged[2]) == run.problems(1, logged[1]) == []
        first, second, third = contents[-1].splitlines(keepends=True)
        for content in (first + third, first + second.replace(b"0.1", b"0.2") + third, b""):
            metrics.write_bytes(content)
            assert len(run.problems(2, logged[2])) == 1, content
        metrics.write_bytes(first + third)
        run.replace_evaluations(2, {0: {"eval/accuracy": 1.0}})  # does not make it the run's
        assert len(run.problems(2, logged[2])) == 1
        metrics.write_bytes(contents[-1])
        (tmp_path / "rewritten.json").write_bytes(b"[1]")
        assert len(run.problems(2, logged[2])) == 1


def test_a_base_that_is_evaluated_late_gets_the_first_line(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_metrics(1, {"reward": 0.1})
        for _ in range(2):
            run.replace_evaluations(1, {0: {"eval/accuracy": 0.25}, 1: {"eval/accuracy": 0.5}})
    assert read_metrics(tmp_path) == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "eval/accuracy": 0.5, "reward": 0.1},
    ]


def test_an_evaluation_of_a_logged_step_gets_into_its_line_and_is_known_to_be_of_the_run(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_config("")
        run.write_metrics(0, {"eval/accuracy": 0.5})
        run.write_metrics(1, {"reward": 0.1, "eval/accuracy": 0.7})
        run.write_metrics(2, {"reward": 0.2})
        logged = run.logged()
        (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    with RunFolder(tmp_path, resume=True) as run:
        assert run.evaluation(0) == {"accuracy": 0.5}
        assert run.evaluation(2) == run.evaluation(3) == {}
        run.add_evaluation(2, {"eval/accuracy": 0.6})
        assert run.problems(2, logged) == []
    assert read_metrics(tmp_path) == [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "eval/accuracy": 0.7, "reward": 0.1},
        {"step": 2, "eval/accuracy": 0.6, "reward": 0.2},
    ]


def test_a_torn_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_metrics(1, {})
        append(tmp_path / "metrics.jsonl", b'{"st\n')
        run.write_metrics(2, {})
        with pytest.raises(InputError, match=r"metrics.jsonl, line 2 is not a JSON object"):
            run.rewind(1)


def test_samples_hold_their_keys_in_order_and_text_survives(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_samples(3, [dict(reversed(ROW.items())), ROW])
    lines = (tmp_path / "samples" / "step_3.jsonl").read_bytes().decode("utf-8").split("\n")
    assert len(lines) == 3
    assert lines[0] == lines[1]
    row = json.loads(lines[0])
    assert tuple(row) == SAMPLE_KEYS
    assert row["completion"] == ROW["completion"]
    assert row["completion_ids"] == [4, 2]
    assert row["logps"] == [-0.5, -1.0]
    assert row["rewards"] == {"correct": 1.0, "judge": None}
    assert row["advantage"] == 0.25
    assert row["truncated"] is False


def test_a_sample_with_other_keys_is_refused_and_nothing_is_written(tmp_path):
    bad = {**ROW, "score": 1}
    del bad["logps"]
    message = r"row 1 of step 3: missing \['logps'\], unknown \['score'\]"
    with RunFolder(tmp_path) as run, pytest.raises(ValueError, match=message):
        run.write_samples(3, [ROW, bad])
    assert not (tmp_path / "samples").exists()


def test_samples_and_rollouts_that_a_full_disk_does_not_take_are_written_once_it_does(tmp_path):
    with RunFolder(tmp_path) as run:
        limit_files(10)
        try:
            with pytest.raises(OSError, match="File too large"):
                run.write_samples(3, [ROW])
            with pytest.raises(OSError, match="File too large"):
                run.write_rollouts(3, b"a" * 11)
            with pytest.raises(OSError, match="File too large") as raised:
                run.catch_up()
            assert raised.value.filename == str(tmp_path / "samples" / "step_3.jsonl")
        finally:
            limit_files()
        assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / ".lock"]
        run.write_rollouts(4, b"later")
    assert json.loads((tmp_path / "samples" / "step_3.jsonl").read_text())["step"] == 3
    assert {file.name: file.read_bytes() for file in (tmp_path / "rollouts").iterdir()} == {
        "00000003.safetensors": b"a" * 11,
        "00000004.safetensors": b"later",
    }


def test_what_waits_for_a_full_disk_is_bounded_and_what_another_fault_stopped_waits_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(unwritten, "LIMIT", 25)
    with RunFolder(tmp_path) as run:
        limit_files(10)
        try:
            for step in (1, 2, 3):
                with pytest.raises(OSError, match="File too large"):
                    run.write_rollouts(step, b"12 bytes are")
        finally:
            limit_files()
        run.catch_up()
        files = sorted(file.name for file in (tmp_path / "rollouts").iterdir())
        assert files == ["00000001.safetensors", "00000002.safetensors"]
        (tmp_path / "samples").write_text("in the way")
        with pytest.raises(FileExistsError):
            run.write_samples(1, [ROW])
        run.catch_up()


def test_the_summary_is_replaced_as_a_whole(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_summary({"accuracy": {"base": np.float32(0.5), "trained": math.nan}})
        run.write_summary({"accuracy": {"base": 0.5}, "steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "accuracy": {"base": 0.5},
        "steps": 3,
    }
    assert list(tmp_path.glob("*.tmp")) == []


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "summary.json"
    write_atomically(file, "old")
    (
        tmp_path / f"summary.json.{os.getpid()}.tmp"
    ).mkdir()  # so that the write fails before it replaces anything
    with pytest.raises(IsADirectoryError):
        write_atomically(file, "new")
    assert file.read_text() == "old"


def test_a_full_disk_is_named_with_the_file_that_it_does_not_take(tmp_path):
    limit_files(100)
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write_atomically(tmp_path / "page", "x" * 1000)
    finally:
        limit_files()
    assert str(tmp_path / "page") in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_config_and_own_code_are_kept_beside_the_results(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = tmp_path / "a" / "reward.py", tmp_path / "b" / "reward.py"
    first.write_text("one")
    second.write_text("two")
    with RunFolder(tmp_path / "run") as run:
        assert run.config() is None
        run.write_config('recipe = "grpo"\n')
        assert run.config() == 'recipe = "grpo"\n'
        run.copy_code([first, second])
        run.copy_code([second, first])  # resumed with the same files: nothing new
    copies = {path.name: path.read_text() for path in (tmp_path / "run" / "code").iterdir()}
    assert copies == {"reward.py": "one", "reward_2.py": "two"}


def test_what_rewards_logged_stands_last_in_its_rows_and_only_there(tmp_path):
    with RunFolder(tmp_path / "r") as run:
        extra = {"found": np.float32(2.5), "box": None}
        run.write_samples(3, [{"extra": extra, **ROW}, ROW])
    lines = (tmp_path / "r" / "samples" / "step_3.jsonl").read_text("utf-8").strip().split("\n")
    first, second = map(json.loads, lines)
    assert list(first) == [*SAMPLE_KEYS, "extra"]
    assert first["extra"] == {"found": 2.5, "box": None}
    assert list(second) == list(SAMPLE_KEYS)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "code/reward.py", "summary.json"])
def test_a_link_in_a_run_folder_has_nothing_written_through_it(tmp_path, name):
    precious, folder = tmp_path / "profile", tmp_path / "run"
    precious.write_text("mine")
    (tmp_path / "reward.py").write_text("def reward(): ...")
    (folder / "code").mkdir(parents=True)

    def write_all():
        with RunFolder(folder, resume=True) as run:
            run.write_metrics(1, {"reward": 0.5})
            run.copy_code([tmp_path / "reward.py"])
            run.write_summary({"step": 1})

    (folder / name).symlink_to(precious)
    if name in (".lock", "metrics.jsonl"):
        with pytest.raises(InputError, match=rf"{name} is a symbolic link \(to .*remove the link"):
            write_all()
    else:
        write_all()
    assert precious.read_text() == "mine"


def test_a_link_where_a_file_is_written_first_is_taken_away(tmp_path):
    precious = tmp_path / "profile"
    precious.write_text("mine")
    (tmp_path / f"page.{os.getpid()}.tmp").symlink_to(precious)
    write_atomically(tmp_path / "page", "new")
    assert (precious.read_text(), (tmp_path / "page").read_text()) == ("mine", "new")


def test_a_run_folder_and_its_checkpoints_may_be_links(tmp_path):
    for name in ("disk", "large"):
        (tmp_path / name).mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "checkpoints").symlink_to(tmp_path / "large")
    with RunFolder(tmp_path / "run", resume=True) as run:
        run.rewind(None)
        run.write_metrics(1, {"reward": 0.5})
        assert not run.is_moved()
    assert len(read_metrics(tmp_path / "disk")) == 1


@pytest.mark.parametrize("how", ["renamed", "replaced", "deleted", "a file"])
def test_a_folder_that_is_moved_while_it_is_locked_is_noticed(tmp_path, how):
    with RunFolder(tmp_path / "run") as run:
        assert not run.is_moved()
        (tmp_path / "run").rename(tmp_path / "run2")
        if how == "deleted":
            (tmp_path / "run2" / ".lock").unlink()
        if how == "a file":
            (tmp_path / "run").write_text("mine")
        if how == "replaced":
            with RunFolder(tmp_path / "run"):
                assert run.is_moved()
        assert run.is_moved()


def test_metrics_that_are_not_what_was_written_are_said_and_a_missing_config_too(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_config("")
        for step in range(1, 4):
            run.write_metrics(step, {"reward": step / 8})
            if step == 2:
                logged = run.logged()
    file = tmp_path / "metrics.jsonl"
    written = file.read_bytes()
    first, second, third = written.splitlines(keepends=True)
    assert logged == [len(first + second), zlib.crc32(first + second)]
    cases = {
        written: 0,
        written + b'{"step": 4, "rew': 0,
        first + second: 0,
        first + third: 1,
        second + first: 1,
        first.replace(b"0.125", b"0.5") + second: 1,
        b"": 1,
    }
    with RunFolder(tmp_path, resume=True) as run:
        for content, count in cases.items():
            file.write_bytes(content)
            problems = run.problems(2, logged)
            assert len(problems) == count, content
            assert all("metrics.jsonl is not what this run wrote" in text for text in problems)
        assert run.problems(2, None) == run.problems(None, logged) == []  # of an older version
        (tmp_path / "config.toml").unlink()
        (problem,) = run.problems(2, None)
        assert "config.toml is gone" in problem


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "samples", "checkpoints"])
def test_a_folder_with_the_name_of_a_file_or_the_reverse_is_refused_at_the_start(tmp_path, name):
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).touch()
    with pytest.raises(
        InputError, match=rf"{name} is .*folder, and a run writes .* there: move it"
    ):
        RunFolder(tmp_path, resume=True)
    (tmp_path / name).rename(tmp_path / "away")
    RunFolder(tmp_path, resume=True).close()
