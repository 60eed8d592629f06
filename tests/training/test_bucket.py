"""Runs whose folder, model and data are in a bucket, through the clients that Google's take.

The server is `gcs_server`; Orbax, tensorstore and gcsfs are the real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gcs_server
import numpy as np
import pytest
import small_run
from checkpointed import small_run_state
from processes import together
from safetensors.numpy import load, load_file

from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import mirror, storage, tasks
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.processes import process
from jaxgrpo.training.processes.recovery import Keeper, Progress
from jaxgrpo.training.records import folder
from jaxgrpo.training.records.console import Display

# Read when gcsfs is imported: it would ask Google's own servers about the bucket.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
pytest.importorskip("gcsfs")
pytestmark = pytest.mark.slow

KILLING = '''
"""A reward that kills process KILL once four steps are done."""

import os
import signal


def killing(completions, trainer_state, **columns):
    mine = os.environ.get("KILL") == os.environ.get("JAX_PROCESS_ID", "0")
    if trainer_state.global_step == 4 and mine:
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(text) / 24 for text in completions]
'''


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The clients keep the address of the first server that they meet: one for all tests."""
    with gcs_server.serving() as bucket, pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        for name, value in {**bucket.environment, "XDG_CACHE_HOME": str(cache)}.items():
            patch.setenv(name, value)
        yield bucket


@pytest.fixture
def bucket(served, monkeypatch):
    served.objects.clear()
    served.refuses, served.refused = None, ""
    monkeypatch.setattr(mirror, "SECONDS_BETWEEN", 0.2)
    return served


def config(run_dir: Any, **changes: Any) -> Any:
    tracking = {"tracking": {"tensorboard": False}}
    return small_run.config(run_dir, **{**tracking, **changes})


def lines(bucket: gcs_server.Bucket, name: str = "run") -> list[dict[str, Any]]:
    text = bucket.objects[f"{name}/metrics.jsonl"].data.decode()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("time/")}
        for line in text.splitlines()
    ]


def killing(folder: Path) -> list[dict[str, str]]:
    """The reward of KILLING, for a config."""
    file = folder / "killing.py"
    file.write_text(KILLING)
    return [{"use": f"{file}:killing"}]


@pytest.mark.full
def test_a_killed_run_goes_on_and_ends_as_a_local_one(bucket, tmp_path):
    base = Path(small_run.base())
    storage.upload_folder(base, "gs://bucket/base")
    data = {"model.path": "gs://bucket/base", "train.steps": 5}
    data["rewards"] = killing(tmp_path)
    local = loop.train(config(tmp_path / "here", **{**data, "model.path": str(base)}))
    file = small_run.write(tmp_path / "run.toml", "gs://bucket/run", **data)
    ended = subprocess.run(
        [sys.executable, "-m", "jaxgrpo", "train", str(file)],
        env={**os.environ, "KILL": "0"},
        timeout=300,
    )
    assert ended.returncode == -9
    assert "run/checkpoints/2/manifest.json" in bucket.objects
    assert ".lock" in {name.rpartition("/")[2] for name in bucket.objects}
    run = loop.train(config("gs://bucket/run", **data), resume="auto")
    assert run.summary["parameter_hash"] == local.summary["parameter_hash"]
    assert lines(bucket) == small_run.metrics(tmp_path / "here")
    for name in ("model/model.safetensors", "samples/step_1.jsonl"):
        assert bucket.objects[f"run/{name}"].data == (tmp_path / "here" / name).read_bytes()
    assert "run/.lock" not in bucket.objects
    assert run.summary["model"] == "gs://bucket/run/model"
    assert len(run.metrics) == 5
    assert run.samples == local.samples


@pytest.mark.full
def test_a_finished_run_is_read_where_it_is(bucket, tmp_path, capsys):
    run = loop.train(config("gs://bucket/run"))
    weights = bucket.objects["run/model/model.safetensors"].data
    assert main(["export", "gs://bucket/run", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model/model.safetensors").read_bytes() == weights
    run.export("gs://bucket/exported")
    assert bucket.objects["exported/model.safetensors"].data == weights
    assert main(["report", "gs://bucket/run"]) == 0
    assert b"finished" in bucket.objects["run/report.html"].data
    options = ["--data", "task:arithmetic:test", "--samples", "2", "--num-prompts", "4"]
    assert main(["eval", "gs://bucket/run", *options]) == 0
    assert "gs://bucket/run on task:arithmetic:test" in capsys.readouterr().out


@pytest.mark.full
def test_a_damaged_checkpoint_is_passed_over(bucket):
    loop.train(config("gs://bucket/run", **{"train.steps": 4}))
    with Checkpoints("gs://bucket/run/checkpoints") as checkpoints:
        assert checkpoints.steps() == [2, 4]
    name = max(n for n in bucket.objects if n.startswith("run/checkpoints/4/state/d/"))
    stored = bucket.objects[name]
    flipped = stored.data[:-1] + bytes([stored.data[-1] ^ 1])
    bucket.objects[name] = stored._replace(data=flipped, generation=10**6)
    run = loop.train(config("gs://bucket/run", **{"train.steps": 4}), resume="auto")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    with Checkpoints("gs://bucket/run/checkpoints") as checkpoints:
        assert checkpoints.steps() == [2, 4]
        assert checkpoints._intact(4) == 4


@pytest.mark.full
def test_rows_come_from_a_bucket(bucket):
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 40)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    storage.write("gs://bucket/data/rows.jsonl", text.encode())
    changes = {
        "data": {"path": "gs://bucket/data/rows.jsonl", "prompt": "question"},
        "eval": {"data": "gs://bucket/data/rows.jsonl", "prompts": 4, "samples": 2},
        "train.steps": 1,
    }
    run = loop.train(config("gs://bucket/run", **changes))
    assert {row["prompt"] for row in run.samples} <= {row["question"] for row in rows}
    assert run.summary["trained"]["pass@1"] is not None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://elsewhere/run", "run.dir = gs://elsewhere/run cannot be read: .*elsewhere"),
        ("s3://bucket/run", "checkpoints can be written to folders and gs:// only"),
        ("gs://bucket/taken", r"is not empty \(it holds notes.txt\)"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_before_the_model_is_read(bucket, url, words):
    storage.write("gs://bucket/taken/notes.txt", b"mine")
    with pytest.raises(InputError, match=words):
        loop.train(config(url, **{"model.path": "/there/is/none"}))


@pytest.mark.full
def test_a_run_that_another_host_writes_is_refused_and_a_dead_one_is_taken(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "LEASE", 3.0)
    lock = {"id": "another", "who": "process 7 on other", "beat": 1, "time": 0.0}
    storage.write("gs://bucket/run/.lock", json.dumps(lock).encode())
    beating = threading.Timer(
        1.5, storage.write, ("gs://bucket/run/.lock", json.dumps({**lock, "beat": 2}).encode())
    )
    beating.start()
    with pytest.raises(InputError, match=r"in use by another trainer \(process 7 on other\)"):
        folder.RunFolder("gs://bucket/run")
    beating.join()
    with folder.RunFolder("gs://bucket/run") as run_folder:
        assert mirror.is_held("gs://bucket/run")
        with pytest.raises(InputError, match="in use by another trainer"):
            folder.RunFolder(str(run_folder.place))
    assert not mirror.is_held("gs://bucket/run")


@pytest.mark.full
def test_a_run_whose_lock_was_taken_writes_no_more(bucket, monkeypatch):
    monkeypatch.setattr(mirror, "BEAT", 0.2)
    with folder.RunFolder("gs://bucket/run") as run_folder:
        lock = {"id": "another", "who": "process 7 on other", "beat": 1, "time": 0.0}
        storage.write("gs://bucket/run/.lock", json.dumps(lock).encode())
        threading.Event().wait(1.5)
        run_folder.write_summary({"step": 1})
        with pytest.raises(OSError, match=r"taken by another trainer \(process 7"):
            run_folder.publish()
    assert "run/summary.json" not in bucket.objects
    assert json.loads(bucket.objects["run/.lock"].data) == lock


def test_a_run_that_was_taken_while_its_machine_slept_writes_nothing(bucket):
    """Before the next beat, which is seconds away."""
    with folder.RunFolder("gs://bucket/run") as run_folder:
        lock = {"id": "another", "who": "process 7 on other", "beat": 1, "time": 0.0}
        storage.write("gs://bucket/run/.lock", json.dumps(lock).encode())
        run_folder.write_summary({"step": 1})
        with pytest.raises(OSError, match=r"taken by another trainer \(process 7"):
            run_folder.publish()
    assert "run/summary.json" not in bucket.objects
    assert json.loads(bucket.objects["run/.lock"].data) == lock


def test_the_lock_is_written_again_until_the_last_copy_has_ended(bucket, monkeypatch):
    """A copy that takes longer than a lock counts: another trainer would take the run."""
    monkeypatch.setattr(mirror, "BEAT", 0.1)
    monkeypatch.setattr(mirror, "SECONDS_BETWEEN", 60.0)
    upload, beats = storage.upload, []

    def beat() -> int:
        return json.loads(bucket.objects["run/.lock"].data)["beat"]

    def upload_slowly(file: Path, url: str) -> None:
        first = beat()
        threading.Event().wait(1.0)
        beats.append((first, beat()))
        upload(file, url)

    with folder.RunFolder("gs://bucket/run") as run_folder:
        run_folder.write_summary({"step": 1})
        monkeypatch.setattr(storage, "upload", upload_slowly)
    ((first, last),) = beats
    assert last > first + 2
    assert "run/summary.json" in bucket.objects
    assert "run/.lock" not in bucket.objects


@pytest.mark.full
def test_a_reward_that_fails_in_a_run_that_was_taken_saves_no_step(bucket, monkeypatch):
    """A save would remove the newer steps of the trainer that has taken it."""
    monkeypatch.setattr(mirror, "BEAT", 0.2)
    with (
        folder.RunFolder("gs://bucket/run") as run_folder,
        Checkpoints(run_folder.checkpoints) as checkpoints,
    ):
        display, progress = Display(9, 0, active=False), Progress.from_meta({})
        keeper = Keeper(None, 3, run_folder, checkpoints, display, progress, {})
        lock = {"id": "another", "who": "process 7 on other", "beat": 1, "time": 0.0}
        storage.write("gs://bucket/run/.lock", json.dumps(lock).encode())
        threading.Event().wait(1.5)
        with (
            pytest.raises(process.RewardFailed, match=r"taken by another trainer \(process 7"),
            keeper.saving(3, small_run_state(2)),
        ):
            raise RewardError("no grader")
    assert not [name for name in bucket.objects if name.startswith("run/checkpoints")]


@pytest.mark.full
def test_a_bucket_that_refuses_ends_the_run_with_its_files_kept_here(bucket):
    def refuse(number: int, metrics: Any) -> None:
        bucket.refuses = 403 if number == 3 else bucket.refuses

    with pytest.raises(process.NotSaved, match="go on by --resume auto") as raised:
        loop.train(config("gs://bucket/run"), on_step=refuse)
    assert raised.value.code == 74
    local = mirror.local_folder("gs://bucket/run")
    assert len((local / "metrics.jsonl").read_text().splitlines()) == 3
    bucket.refuses = None
    run = loop.train(config("gs://bucket/run"), resume="auto")
    assert [line["step"] for line in lines(bucket)] == [1, 2, 3]
    assert run.summary["step"] == 3


@pytest.mark.full
def test_a_bucket_that_refuses_for_a_while_costs_a_checkpoint_and_no_step(bucket):
    def refuse(number: int, metrics: Any) -> None:
        bucket.refuses = 403 if number == 2 else None

    run = loop.train(config("gs://bucket/run", **{"train.steps": 4}), on_step=refuse)
    assert run.summary["step"] == 4
    assert [line["step"] for line in lines(bucket)] == [1, 2, 3, 4]


def over_four_devices(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes of a run whose data are in a folder, and of the same run with all in the bucket."""
    rows = folder / "rows.jsonl"
    task_rows = tasks.load("task:arithmetic:train", count=32)
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in task_rows))
    storage.upload(rows, "gs://bucket/rows.jsonl")
    storage.upload_folder(Path(small_run.base()), "gs://bucket/base")
    shared = {
        "mesh": {"data": 2, "fsdp": 2},
        "optimizer": {"use": "sgd", "learning_rate": 0.1},
        "tracking": {"tensorboard": False},
        **changes,
    }
    bucket_paths = {"model.path": "gs://bucket/base", "data.path": "gs://bucket/rows.jsonl"}
    return {**shared, "data.path": str(rows)}, {**shared, **bucket_paths}


def trained_by_two(
    changes: Any, folder: Path, environment: Any, caches: int, **more: str
) -> list[tuple[int, str]]:
    """Exit code and output of two processes of two devices each, that trained as one run.

    Args:
      caches: how many the two have: 2 are caches of their own, as on two hosts.
    """
    file = small_run.write(folder / "run.toml", "gs://bucket/run", **changes)
    processes = []
    for index, variables in enumerate(together()):
        cache = str(folder / f"cache_{index % caches}")
        env = environment(devices=2, XDG_CACHE_HOME=cache, **variables, **more)
        processes.append(small_run.command(sys.executable, "train", file, env=env))
    try:
        outputs = [each.communicate(timeout=120)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
    return [(each.returncode, output) for each, output in zip(processes, outputs, strict=True)]


def assert_ended_as(bucket: gcs_server.Bucket, local: Path) -> None:
    """The run in the bucket has the files of one in a folder, and they say the same."""
    names = {str(file.relative_to(local)) for file in local.rglob("*") if file.is_file()}
    bucket_names = {name.removeprefix("run/") for name in bucket.objects if name.startswith("run/")}
    # Those of "before_" are logged, but not saved.
    bucket_names = {name for name in bucket_names if not name.startswith("before_")}
    local_names = {name for name in names - {".lock"} if not name.startswith("checkpoints/")}
    assert {name for name in bucket_names if not name.startswith("checkpoints/")} == local_names
    for left, right in zip(small_run.metrics(local), lines(bucket), strict=True):
        # Means of float32 are summed in another order; one other token would show in 1e-3.
        assert left["step"] == right["step"]
        assert left["reward"] == pytest.approx(right["reward"], rel=1e-6)
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
    weights = load(bucket.objects["run/model/model.safetensors"].data)
    for name, value in load_file(local / "model" / "model.safetensors").items():
        np.testing.assert_allclose(value, weights[name], atol=1e-5)
    drawn = bucket.objects["run/samples/step_1.jsonl"].data.decode().splitlines()
    expected = (local / "samples" / "step_1.jsonl").read_text().splitlines()
    for row, expected_row in zip(map(json.loads, drawn), map(json.loads, expected), strict=True):
        assert row["completion_ids"] == expected_row["completion_ids"]
    with Checkpoints("gs://bucket/run/checkpoints") as checkpoints:
        assert checkpoints._intact(None) == lines(bucket)[-1]["step"]


@pytest.mark.full
def test_two_processes_train_in_a_bucket_as_one_in_a_folder(bucket, tmp_path, environment):
    files = {"run.report": True, "run.rollouts_every": 2}
    local, in_bucket = over_four_devices(tmp_path, **files)
    two = trained_by_two(in_bucket, tmp_path, environment, caches=1)
    assert [code for code, _ in two] == [0, 0], two
    loop.train(config(tmp_path / "here", **local))
    assert_ended_as(bucket, tmp_path / "here")


@pytest.mark.full
@pytest.mark.parametrize("harm", ["killed", "refused"])
def test_harm_to_one_of_two_processes_ends_both_and_one_goes_on(
    harm, bucket, tmp_path, environment, monkeypatch
):
    """On another host. What is refused: the part of checkpoint 4 that process 1 writes."""
    local, in_bucket = over_four_devices(
        tmp_path, **{"train.steps": 5, "rewards": killing(tmp_path)}
    )
    if harm == "refused":
        bucket.refuses, bucket.refused = 403, "/checkpoints/4/state/ocdbt.process_1/"
    more = {"KILL": "1"} if harm == "killed" else {}
    two = trained_by_two(in_bucket, tmp_path, environment, caches=2, **more)
    assert [code for code, _ in two] == ([6, -9] if harm == "killed" else [74, 74]), two
    assert ("process 1 is gone" if harm == "killed" else "could not be saved") in two[0][1]
    bucket.refuses = None
    with Checkpoints("gs://bucket/run/checkpoints") as checkpoints:
        last = checkpoints.latest() or 0
    assert last in ((2, 4) if harm == "killed" else (2,))
    monkeypatch.setattr(mirror, "LEASE", 2.0)
    steps = []
    again = config("gs://bucket/run", **in_bucket)
    loop.train(again, resume="auto", on_step=lambda number, metrics: steps.append(number))
    assert steps == [*range(last + 1, 6)]
    loop.train(config(tmp_path / "here", **local))
    assert_ended_as(bucket, tmp_path / "here")
    if harm == "refused":
        assert "run/before_3/metrics.jsonl" in bucket.objects
