"""What is named by a URL: copied once per host, copied again when it changes, refused in words."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import mirror, sources, storage
from jaxgrpo.data.storage import write_atomically
from jaxgrpo.experiments.compare import experiment
from jaxgrpo.training.records.report.html import check_writable

ROWS = "".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(3))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    for path in memory.find("/"):
        memory.rm_file(path)
    return tmp_path / "cache" / "jaxgrpo" / "copies"


def copies(cache: Path) -> list[str]:
    return sorted(str(file.relative_to(cache).parts[1]) for file in cache.glob("*/*"))


def test_a_file_of_rows_is_copied_once_and_again_when_it_changes(cache):
    storage.write("memory://bucket/rows.jsonl", ROWS.encode())
    source = sources.Source("memory://bucket/rows.jsonl")
    assert [row["answer"] for _, row in sources.read(source)] == ["1", "2", "3"]
    first = {file: file.stat().st_mtime_ns for file in cache.glob("*/*")}
    sources.read(source)
    assert {file: file.stat().st_mtime_ns for file in cache.glob("*/*")} == first
    storage.write("memory://bucket/rows.jsonl", ROWS.encode() * 2)
    assert len(sources.read(source)) == 6
    assert copies(cache) == ["rows.jsonl", "rows.jsonl"]


def test_of_a_model_only_its_files_are_copied_and_weights_only_where_they_are_needed():
    layouts = ("original/model.safetensors", "consolidated.safetensors")
    for name in ("config.json", "model.safetensors", "optimizer.pt", "nested/notes.md", *layouts):
        storage.write(f"memory://bucket/model/{name}", name.encode())
    local_folders = [
        storage.local("memory://bucket/model", "model.path", **sources.model_files(with_weights))
        for with_weights in (True, False)
    ]
    names = [sorted(file.name for file in folder.iterdir()) for folder in local_folders]
    assert names == [["config.json", "model.safetensors"], ["config.json"]]
    assert {folder.name for folder in local_folders} == {"model"}


def test_many_processes_of_a_host_make_one_copy(cache, monkeypatch):
    storage.write("memory://bucket/rows.jsonl", ROWS.encode())
    downloads, real = [], storage.download
    monkeypatch.setattr(
        storage, "download", lambda *arguments: (downloads.append(arguments), real(*arguments))
    )
    local = lambda: storage.local("memory://bucket/rows.jsonl", "data.path")  # noqa: E731
    readers = [threading.Thread(target=local) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(downloads) == 1
    assert copies(cache) == ["rows.jsonl"]
    assert local().read_text() == ROWS


def test_what_an_interrupted_copy_left_is_no_copy(cache, monkeypatch):
    for name in ("a.json", "b.json"):
        storage.write(f"memory://bucket/model/{name}", b"{}")
    real = storage.download

    def fails(url: str, file: Path) -> None:
        if url.endswith("b.json"):
            raise OSError("the network is gone")
        real(url, file)

    monkeypatch.setattr(storage, "download", fails)
    with pytest.raises(InputError, match=r"model\.path = memory://bucket/model .*network is gone"):
        storage.local("memory://bucket/model", "model.path")
    monkeypatch.setattr(storage, "download", real)
    folder = storage.local("memory://bucket/model", "model.path")
    assert sorted(os.listdir(folder)) == ["a.json", "b.json"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("memory://bucket/none.jsonl", "data.path = memory://bucket/none.jsonl does not exist"),
        (
            "nothing://bucket/rows.jsonl",
            "nothing:// cannot be read .*: give gs://",
        ),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_by_its_key(path, words):
    with pytest.raises(InputError, match=words):
        sources.read(sources.Source(path))


@pytest.mark.parametrize("name", ["../../../evil.json", "a/../../../evil.json", "{root}evil.json"])
def test_an_object_whose_name_leads_out_of_the_copy_is_not_written(cache, tmp_path, name):
    name = name.format(root=f"{tmp_path}/")
    storage.write("memory://bucket/model/config.json", b"{}")
    storage.write(f"memory://bucket/model/{name}", b"{}")
    with pytest.raises(InputError, match=r"an object whose name leads out of a folder: '.*evil"):
        storage.local("memory://bucket/model", "model.path", **sources.model_files(True))
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(OSError, match=r"model holds an object whose name leads out of a folder"):
        mirror.Mirror("memory://bucket/model", folder)
    assert not [*tmp_path.rglob("evil.json")]
    assert storage.read("memory://bucket/model/.lock") is None


def test_a_missing_package_is_named_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    registry = vars(importlib.import_module("fsspec.registry"))["_registry"]
    for scheme in ("gs", "gcs"):
        monkeypatch.delitem(registry, scheme, raising=False)
    with pytest.raises(InputError, match=r"pip install 'jaxgrpo\[gcs\]'"):
        sources.read(sources.Source("gs://bucket/rows.jsonl"))


def test_what_is_written_to_this_host_alone_is_not_given_a_url(tmp_path):
    lines = ('base = "quickstart"', 'dir = "gs://bucket/compare"', 'control = "a"', "seeds = 2")
    arms = (
        "learning_rates = [1e-3]",
        "[arms]",
        'a = { recipe = "grpo" }',
        'b = { recipe = "sign" }',
    )
    (tmp_path / "experiment.toml").write_text("\n".join((*lines, *arms)))
    with pytest.raises(InputError, match="gs://bucket/compare: a comparison is written to a"):
        experiment.load(tmp_path / "experiment.toml")


def test_urls_in_a_config_stay_as_they_are(tmp_path):
    options: dict[str, Any] = {
        "model": {"path": "gs://bucket/model"},
        "lora": {"path": "s3://bucket/adapter"},
        "data": {"path": "gs://bucket/rows.jsonl", "prompt": "question"},
        "rewards": [{"use": "arithmetic"}],
        "recipe": "grpo",
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 2,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 8,
        },
        "train": {"steps": 1},
        "eval": {"data": "memory://bucket/held_out.jsonl"},
        "run": {"dir": "gs://bucket/run"},
    }
    (tmp_path / "run.toml").write_text(configs.to_toml(configs.from_dict(options)))
    read = configs.load(tmp_path / "run.toml")
    assert (read.model.path, read.lora.path) == ("gs://bucket/model", "s3://bucket/adapter")
    assert (read.data.path, read.eval.data) == (options["data"]["path"], options["eval"]["data"])
    assert read.run.dir == "gs://bucket/run"


def test_where_this_user_may_not_write_is_said_before_anything_begins(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for name, problem in {"file": "is a file", "file/below": "file is a file: choose an"}.items():
        with pytest.raises(InputError, match=problem):
            storage.refuse_unwritable(tmp_path / name, "a model")
    storage.refuse_unwritable(tmp_path / "new" / "model", "a model")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    with pytest.raises(InputError, match="cannot be written: choose another folder for a model"):
        storage.refuse_unwritable(tmp_path / "new" / "model", "a model")
    with pytest.raises(InputError, match=r"a\.html: cannot be written; see to permissions"):
        check_writable(str(tmp_path / "a.html"))


def test_nothing_is_above_the_root_and_a_pipe_is_not_replaced(tmp_path):
    with contextlib.suppress(InputError):  # of a user that may not write there
        storage.refuse_unwritable(Path("/"), "a model")
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is no file, and one is written there"):
        write_atomically(pipe, "text")
    assert pipe.is_fifo()


def test_a_name_of_a_host_that_a_full_disk_left_empty_is_drawn_again(tmp_path):
    """Two hosts of one name would each take the other's lock for its own."""
    copy = object.__new__(mirror.Mirror)
    copy.folder = tmp_path / "run"
    (tmp_path / "id").touch()
    name = copy._load_host_id()
    assert len(name) == 32
    assert copy._load_host_id() == name == (tmp_path / "id").read_text()
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["id"]
