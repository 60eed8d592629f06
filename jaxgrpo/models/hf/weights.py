"""The weights of a model folder: safetensors, their index, the leaves made of them. Both ways."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.data import sources
from jaxgrpo.models.hf import qwen3
from jaxgrpo.models.sharding import to_host

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
FLOATS = ("float32", "bfloat16", "float16", "float64")
"""The dtypes in which weights may be stored."""

MAX_NAMES = 8  # tensors named in an error message


def read_json(file: Path) -> dict[str, Any]:
    remedy = "copy the model folder anew"
    with refusing(f"{file} is not JSON ({{reason}}): {remedy}", ValueError, OSError):
        found = sources.parse_json(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise InputError(
            f"{file} holds a JSON {type(found).__name__}, expected an object: {remedy}"
        )
    return found


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Tensor name -> open file with `get_tensor(name)`, over all shards of the folder.

    Raises: InputError if there are no safetensors, a shard is missing or a file is damaged.
    """
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in files_of(folder):
            problem = f"{path} is no readable safetensors file ({{reason}}): fetch it again"
            with refusing(problem, SafetensorError, OSError):
                file = stack.enter_context(safe_open(path, framework="numpy"))
            files.update(dict.fromkeys(file.keys(), file))
        yield files


def files_of(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = _shards(index)
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


def read(folder: Path, files: Mapping[str, Any], entry: qwen3.Entry) -> np.ndarray:
    """A tensor of an opened folder. Raises: InputError if its dtype, shape or values are wrong."""
    tensor = files[entry.name].get_tensor(entry.name)
    if str(tensor.dtype) not in FLOATS:
        raise InputError(
            f"{folder}: {entry.name} holds {tensor.dtype}, expected {', '.join(FLOATS)}: "
            "quantised weights are not read; take the plain checkpoint"
        )
    if tensor.shape != entry.hf_shape:
        raise InputError(
            f"{folder}: {entry.name} has shape {tensor.shape}, but config.json asks for "
            f"{entry.hf_shape}: the weights and the config belong to different models"
        )
    finite = np.isfinite(tensor)
    if not finite.all():
        wrong = tensor.size - int(finite.sum())
        raise InputError(
            f"{folder}: {entry.name} holds {wrong} values that are not finite (NaN or infinite) of "
            f"{tensor.size}: training went wrong before it was saved, or the file is damaged; take "
            "an earlier checkpoint, or copy the model anew"
        )
    return tensor


def check_names(folder: Path, expected: set[str], files: Mapping[str, Any], tied: bool) -> None:
    def listed(names: set[str]) -> str:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return ", ".join(sorted(names)[:MAX_NAMES]) + more

    found = set(files)
    head, embed = qwen3.TIED_HEAD
    if tied and head in found:
        found.remove(head)
        held = [files[name].get_tensor(name) for name in qwen3.TIED_HEAD if name in files]
        if len(held) != 2 or not np.array_equal(*held):
            raise InputError(
                f"{folder}: tie_word_embeddings is true, but {head} differs from {embed}: set "
                "tie_word_embeddings to false in config.json, or remove the tensor"
            )
    odd = {"missing": expected - found, "unknown": found - expected}
    problems = [f"{kind}: {listed(names)}" for kind, names in odd.items() if names]
    if problems:
        raise InputError(
            f"{folder}: the tensors are not those that config.json describes; "
            + "; ".join(problems)
        )


def place(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None,
    parts: Iterator[tuple[int | None, np.ndarray]],
) -> Array:
    """One leaf from its tensors (period or None for the whole leaf, values), read once each."""

    def bounds(index: Any) -> tuple[tuple[int, int], ...]:
        return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))

    held: Iterable[Any] = [tuple(map(slice, shape))]
    if sharding is not None:
        held = sharding.addressable_devices_indices_map(shape).values()
    buffers = {  # one per distinct part, however many devices keep it
        index: np.empty([stop - start for start, stop in index], dtype)
        for index in set(map(bounds, held))
    }
    for period, tensor in parts:
        for index, buffer in buffers.items():
            if period is None:
                buffer[...] = tensor[tuple(slice(*span) for span in index)]
            elif index[0][0] <= period < index[0][1]:
                buffer[period - index[0][0]] = tensor[tuple(slice(*span) for span in index[1:])]
    if sharding is None:
        return jax.device_put(*buffers.values(), may_alias=False)
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[bounds(index)])


@jax.jit
def _period(leaf: Array, period: int | Array) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, period, keepdims=False)


def write(
    folder: Path | None, tensors: dict[str, tuple[Any, qwen3.Entry]], max_shard_bytes: int
) -> None:
    """Writes tensors in files, and the index if there are several. One is held in memory.

    Args:
      tensors: name -> (the leaf that holds it, of devices or of the host, and where in it).

    Without a folder it takes part in the gathers, and keeps nothing.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda one: math.prod(one[1].shape) * one[0].dtype.itemsize,
        max_shard_size=max_shard_bytes,
        filename_pattern="model{suffix}.safetensors",
    )

    def gathered(name: str) -> np.ndarray:
        leaf, entry = tensors[name]
        whole = leaf if entry.period is None else _period(leaf, entry.period)
        return qwen3.to_hf(entry, to_host(whole))

    for file, names in plan.filename_to_tensors.items():
        whole = ((name, gathered(name)) for name in names)
        shard = {name: tensor for name, tensor in whole if folder is not None}
        if folder is not None:
            save_file(shard, folder / file, metadata={"format": "pt"})
            # The library makes files that only their owner may read: as open as the others here.
            (folder / file).chmod((folder / "config.json").stat().st_mode)
    if folder is not None and plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of them in its own folder."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InputError(
            f"{index} has no weight_map, {{tensor: file}} (found {table!r}): copy the folder anew"
        )
    for tensor, name in table.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise InputError(
                f"{index}: {tensor} is in {name!r}, expected the name of a file in that folder: "
                "nothing outside a model's folder is read; copy the folder anew"
            )
    return sorted(set(table.values()))
