"""Folders of safetensors files: read one tensor at a time, written shard by shard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxgrpo.core.errors import InputError, refusing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

OURS = (
    "README.md",
    "config.json",
    "generation_config.json",
    "*.safetensors",
    INDEX,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The files of a model folder: only a folder of nothing else may be replaced."""


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Tensor name -> open file with `get_tensor(name)`, over all shards of the folder.

    Raises: InputError if there are no safetensors, a shard is missing or a file is damaged.
    """
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _weight_files(folder):
            problem = f"{path} is no readable safetensors file ({{reason}}): fetch it again"
            with refusing(problem, SafetensorError, OSError):
                file = stack.enter_context(safe_open(path, framework="numpy"))
            files.update(dict.fromkeys(file.keys(), file))
        yield files


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{index} lists {', '.join(missing)}, not in the folder: complete the copy"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{folder} has weights only as {pickles[0]}, a pickle, which can run any code and is "
            "not read: convert it to safetensors (save_pretrained of transformers writes them)"
        )
    raise InputError(f"{folder} has no {SINGLE} and no {INDEX}: give a folder with weights")


def plan_shards(sizes: dict[str, int], max_bytes: int) -> dict[str, str]:
    """Tensor name -> file name, in order; a file grows to at most `max_bytes` (or one tensor)."""
    shard_of, count, filled = {}, 1, 0
    for name, size in sizes.items():
        if filled and filled + size > max_bytes:
            count, filled = count + 1, 0
        shard_of[name], filled = count, filled + size
    if count == 1:
        return dict.fromkeys(sizes, SINGLE)
    file = "model-{:05d}-of-{:05d}.safetensors"
    return {name: file.format(number, count) for name, number in shard_of.items()}


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], file_of: dict[str, str]
) -> None:
    """Writes tensors, which come in the order of `file_of`, and the index where there are shards.

    Holds one shard in memory.
    """
    total, shard, current = 0, {}, None
    for name, tensor in tensors:
        if shard and file_of[name] != current:
            save_file(shard, folder / str(current), metadata={"format": "pt"})
            shard = {}
        current, shard[name] = file_of[name], tensor
        total += math.prod(tensor.shape) * tensor.itemsize
    save_file(shard, folder / str(current), metadata={"format": "pt"})
    if current != SINGLE:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the block ends without an error.

    The files are flushed to disk before they are renamed, so that `folder` is at any moment the
    old one, the new one or, between two renames, absent; never half written.

    Raises: InputError if `folder` exists and holds files that are not a model's.
    """
    if folder.exists():
        foreign = sorted(
            path.name
            for path in (folder.iterdir() if folder.is_dir() else [folder])
            if not path.is_file() or not any(path.match(pattern) for pattern in OURS)
        )
        if foreign:
            raise InputError(
                f"{folder} exists and holds {foreign[0]}, which is no file of a model: it is not "
                "replaced; choose another folder or empty this one"
            )
    partial = folder.with_name(f".{folder.name}.partial")
    previous = folder.with_name(f".{folder.name}.previous")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        shutil.rmtree(previous, ignore_errors=True)
        if folder.exists():
            folder.rename(previous)
        partial.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
