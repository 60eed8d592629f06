"""Whatever a file holds, its reader reads it or refuses it in a message: no crash, no hang."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import hypothesis
import jax
import jax.numpy as jnp
import minimal_config
import numpy as np
import pyarrow as pa
import pytest
from checkpointed import small
from hypothesis import strategies as st
from pyarrow import parquet
from quick import LONG, all_but

from jaxgrpo.cli.make_base import base_config
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts
from jaxgrpo.data import tasks
from jaxgrpo.data.prompts import load_rows
from jaxgrpo.data.sources import Source
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.models.gguf import files as gguf_files
from jaxgrpo.models.hf import folders
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.records import rollout_files
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.reading import read_metrics, read_samples
from jaxgrpo.training.step_files import damage

pytestmark = pytest.mark.fault(20)

FEW = 60
MANY, SLOW = 9_000, {"safetensors": 2_000, "metadata": 2_000}
"""Examples of a reader in `make test-long`, and of those that take more than 5 ms for each."""
SECONDS = 5.0  # that a reader may take

CONFIG = minimal_config.MINIMAL.encode()
ROWS = b'{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4", "more": [1, null]}\n'
LINES = b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null, "reward": 1e-3}\n'
SAMPLES = (
    b'{"step": 1, "ordinal": 0, "row": 3, "sample": 1, "prompt": "a", "completion": "b", '
    b'"completion_ids": [7], "logps": [-0.5], "rewards": {"r": 1.0}, "advantage": 0.5, '
    b'"truncated": false}\n'
)


class Reader(NamedTuple):
    """A reader of a format.

    Attributes:
      make: makes a folder that holds the file.
      name: the file within it.
      read: reads it, given the folder.
    """

    make: Callable[[Path], object]
    name: str
    read: Callable[[Path], Any]


def text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def make_parquet(folder: Path) -> None:
    table = pa.table({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"], "n": [1.5, None]})
    parquet.write_table(table, folder / "rows.parquet")


def make_weights(folder: Path) -> None:
    tokenizer = character_tokenizer(tasks.find("arithmetic").alphabet)
    model = decoder.build(base_config(len(tokenizer), 16, 1))
    draw = np.random.default_rng(0)
    leaf = lambda spec: jnp.asarray(draw.normal(size=spec.shape), spec.dtype)  # noqa: E731
    folders.save_model(model, jax.tree.map(leaf, model.shapes), folder / "model", tokenizer)


@functools.cache
def build_model(config: ModelConfig) -> Model:
    return decoder.build(config)


def read_weights(folder: Path) -> Any:
    path = folder / "model"
    return folders.read_params(path, build_model(folders.read_config(path)))


def make_gguf(folder: Path) -> None:
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b", "\u00fc"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file):
        part()
    writer.write_tensors_to_file()
    writer.close()


def make_step(folder: Path) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, small(3), {"step": 3})


def restore_with_matching_manifest(folder: Path) -> Any:
    """As where a stranger has changed meta.json and the manifest alike."""
    step = folder / "3"
    content, manifest = (step / "meta.json").read_bytes(), step / "manifest.json"
    entries = json.loads(manifest.read_text())
    entries["files"]["meta.json"] = [len(content), zlib.crc32(content)]
    manifest.write_text(json.dumps(entries))
    with Checkpoints(folder) as checkpoints:
        step = checkpoints.choose()
        checkpoints.meta(step)
        return checkpoints.restore(small(0), step)


def make_rollouts(folder: Path) -> None:
    shape = (2, 2, 3)
    arrays = {
        "prompt_tokens": np.ones((2, 2), np.int32),
        "prompt_mask": np.ones((2, 2), bool),
        "completion_tokens": np.ones(shape, np.int32),
        "token_mask": np.ones(shape, bool),
        "behavior_logp": np.zeros(shape, np.float32),
        "truncated": np.zeros((2, 2), bool),
        "ordinal": np.arange(2, dtype=np.int32),
        "row": np.arange(2, dtype=np.int32),
        "policy_version": np.zeros((2, 2), np.int32),
        "step": np.zeros((), np.int32),
    }
    rewards: dict[str, Any] = {"r": np.ones((2, 2), np.float32)}
    rollout_files.save(folder / "r.safetensors", Rollouts(**arrays, rewards=rewards, fields={}), 1)


def open_locked(folder: Path) -> None:
    """A lock that another process holds, whatever is written in it."""
    with open(folder / ".lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        RunFolder(folder, resume=True).close()


def load_data(name: str) -> Callable[[Path], Any]:
    return lambda folder: load_rows(Source(str(folder / name)), "prompt", "answer")


def judge_answers(folder: Path) -> None:
    """A file of bytes as what a model wrote, and as what is right."""
    words = (folder / "answer").read_bytes().decode("utf-8", "replace")
    for name in ("arithmetic", "calculator"):
        scores = tasks.find(name).score([words, words[::-1]], ["4", words])
        assert all(score is None or np.isfinite(score) for score in scores)


READERS = {
    "TOML": Reader(text("run.toml", CONFIG), "run.toml", lambda f: configs.load(f / "run.toml")),
    "JSONL": Reader(text("rows.jsonl", ROWS), "rows.jsonl", load_data("rows.jsonl")),
    "CSV": Reader(text("rows.csv", b"prompt,answer\n1+1=,2\n"), "rows.csv", load_data("rows.csv")),
    "Parquet": Reader(make_parquet, "rows.parquet", load_data("rows.parquet")),
    "safetensors": Reader(make_weights, "model/model.safetensors", read_weights),
    "config.json": Reader(
        make_weights, "model/config.json", lambda f: folders.read_config(f / "model")
    ),
    "GGUF": Reader(make_gguf, "model.gguf", lambda f: gguf_files.read(f / "model.gguf")),
    "metadata": Reader(make_step, "3/meta.json", restore_with_matching_manifest),
    "rollouts": Reader(
        make_rollouts, "r.safetensors", lambda f: rollout_files.load(f / "r.safetensors")
    ),
    "metrics": Reader(text("metrics.jsonl", LINES), "metrics.jsonl", read_metrics),
    "samples": Reader(
        lambda f: [(f / "samples").mkdir(), text("samples/step_1.jsonl", SAMPLES)(f)],
        "samples/step_1.jsonl",
        read_samples,
    ),
    "lock": Reader(text(".lock", b"process 12 on host\n"), ".lock", open_locked),
    "answers": Reader(text("answer", b"4+4=8 8"), "answer", judge_answers),
}


@st.composite
def edits(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Bits flipped, bytes overwritten, put in or taken out, the end cut off, or other bytes."""
    if draw(st.integers(0, 9)) == 0:
        content = draw(st.binary(max_size=200))
        return lambda _: content
    changes = draw(
        st.lists(
            st.tuples(
                st.sampled_from(("flip", "write", "put", "take", "cut")),
                st.floats(0, 1, exclude_max=True),
                st.binary(min_size=1, max_size=9),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def apply(content: bytes) -> bytes:
        for kind, where, data in changes:
            place = int(where * len(content))
            rest = content[place:]
            if kind == "flip" and rest:
                rest = bytes([rest[0] ^ 1 << data[0] % 8]) + rest[1:]
            replaced = {
                "flip": rest,
                "write": data + rest[len(data) :],
                "put": data + rest,
                "take": rest[len(data) :],
                "cut": b"",
            }[kind]
            content = content[:place] + replaced
        return content

    return apply


SIZES = ["few", pytest.param("many", marks=LONG)]


def count_examples(name: str, size: str) -> int:
    """Examples of a reader; the variable EXAMPLES says how many at most."""
    if size == "few":
        return FEW
    count = SLOW.get(name, MANY)
    return min(count, int(os.environ.get("EXAMPLES", count)))


def test_all_readers_get_100000_examples_together(monkeypatch):
    monkeypatch.delenv("EXAMPLES", raising=False)
    assert sum(count_examples(name, "many") for name in (*READERS, "manifest")) >= 100_000


def settings(count: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        deadline=1000 * SECONDS,
        database=None,
        derandomize=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name",
    all_but(["TOML"], READERS),
)
def test_any_bytes_are_read_or_refused_in_a_message(name, size, tmp_path_factory, tries):
    reader, count = READERS[name], count_examples(name, size)
    home = tmp_path_factory.mktemp("whole")
    reader.make(home)
    content = (home / reader.name).read_bytes()
    if name != "lock":  # which is held
        reader.read(home)
    copy = tmp_path_factory.mktemp("copies") / "copy"
    refused, longest, tried = [0], [0], [0]

    @settings(count)
    @hypothesis.given(edits())
    def check(edit: Callable[[bytes], bytes]) -> None:
        if name == "metadata" or not copy.exists():  # whose reader writes
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(home, copy)
        (copy / reader.name).write_bytes(edit(content))
        tried[0] += 1
        try:
            reader.read(copy)
        except InputError as error:
            refused[0] += 1
            longest[0] = max(longest[0], len(str(error)))

    check()
    assert tried[0] >= count  # not fewer, as where no more examples are different
    assert longest[0] < 4_000
    assert name == "answers" or refused[0] > count / 20
    tries(count)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_no_manifest_that_says_something_else_is_taken_for_whole(size, tmp_path, tries):
    make_step(tmp_path)
    count = count_examples("manifest", size)
    file = tmp_path / "3" / "manifest.json"
    content = file.read_bytes()

    @settings(count)
    @hypothesis.given(edits())
    def check(edit: Callable[[bytes], bytes]) -> None:
        file.write_bytes(edit(content))
        problem = damage(tmp_path / "3")
        if problem is None:
            stored = json.loads(file.read_bytes())["files"]
            listed = json.loads(content)["files"]
            assert stored == {name: listed[name] for name in stored}
        else:
            assert str(tmp_path) in problem

    check()
    tries(count)


@pytest.mark.fault(11)
def test_200_flipped_bits_of_a_step_are_all_found(saved, tries):
    """Of any file of a step, at any place; the manifest is of the same kind as the others."""
    draw = np.random.default_rng(0)
    files = sorted(p for p in (saved / "3").rglob("*") if p.is_file() and p.stat().st_size)
    for _ in range(200):
        file = files[draw.integers(len(files))]
        content = file.read_bytes()
        changed = bytearray(content)
        changed[draw.integers(len(changed))] ^= 1 << int(draw.integers(8))
        file.write_bytes(changed)
        problem = damage(saved / "3")
        if problem is None:  # blanks between the words of the manifest
            assert file.name == "manifest.json"
            assert json.loads(changed) == json.loads(content)
        file.write_bytes(content)
    assert damage(saved / "3") is None
    tries(200)
