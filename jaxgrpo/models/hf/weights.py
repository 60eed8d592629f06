"""The weights of a model folder: safetensors, their index, the leaves made of them. Both ways."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.core.types import Params
from jaxgrpo.data import sources
from jaxgrpo.models.hf import absent, equal_parts, fp8, mapping, mxfp4
from jaxgrpo.models.hf.mapping import Box, Entry
from jaxgrpo.models.sharding import to_host

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""The dtypes in which weights may be stored, by their names in safetensors."""
COMPUTED = "rotary_emb.inv_freq"
"""The end of names of tensors in older files that are computed from config.json: not read."""
PIECE = 1 << 19
"""Elements that are read at once: few enough that they stay in a cache while they are turned."""

IN_A_COPY = "in a copy of the folder, and name the copy by model.path"
"""Where to edit a file of a model, whose folder may be the cache of a hub."""

MAX_NAMES = 8  # tensors named in an error message


def read_json(file: Path, remedy: str = "copy the model folder again") -> dict[str, Any]:
    with refusing(f"{file} is not JSON ({{reason}}): {remedy}", ValueError, OSError):
        content = sources.parse_json(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(
            f"{file} holds a JSON {type(content).__name__}, expected an object: {remedy}"
        )
    return content


@contextlib.contextmanager
def opened(folder: Path, file: str | None = None) -> Iterator[dict[str, Any]]:
    """Tensor name -> open file with `get_slice(name)`, over all shards of the folder.

    Args:
      file: the only one to open, by its name; None: the weights of a model.

    Raises: InputError if there are no safetensors, a shard is missing or a file is damaged.
    """
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        for path in [folder / file] if file else weight_files(folder):
            problem = f"{path} is no readable safetensors file ({{reason}}): fetch it again"
            with refusing(problem, SafetensorError, OSError):
                absent.refuse_pointers([path])
                shard = stack.enter_context(safe_open(path, framework="numpy"))
            names = [name for name in shard.keys() if not name.endswith(COMPUTED)]  # noqa: SIM118
            files.update(dict.fromkeys(names, shard))
            paths.update(dict.fromkeys(names, path))
        yield equal_parts.joined(fp8.unpacked(mxfp4.unpacked(files, folder), paths))


def has_tensor(folder: Path, ending: str, carried: tuple[str, ...] = ()) -> bool:
    """Whether a tensor of a folder has such a name; no where its weights are not there.

    Args:
      carried: beginnings of the names of those that do not count.
    """

    def is_found(names: Iterable[str]) -> bool:
        return any(name.endswith(ending) and not name.startswith(carried) for name in names)

    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        return is_found(_weight_map(folder / INDEX))
    if not (folder / SINGLE).is_file():
        return False
    with opened(folder) as files:
        return is_found(files)


def has_weights(folder: Path) -> bool:
    """Whether weights are in a folder: not an index alone, nor a part of a snapshot of the hub."""
    if not absent.is_of_hub(folder):
        return any(folder.glob(sources.WEIGHTS))
    with contextlib.suppress(InputError):
        return bool(weight_files(folder))
    return False


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights: the single file goes before an index, as in transformers."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{index} lists {', '.join(missing)}, not in the folder: complete the copy"
            )
        return [folder / name for name in names]
    raise absent.no_weights(folder, f"{SINGLE} and no {INDEX}")


def check(
    folder: Path,
    files: Mapping[str, Any],
    entries: list[list[Entry]],
    tied_head: tuple[str, str] | None = None,
    headers_only: bool = False,
    config_file: str = "config.json",
    carried: Collection[str] = (),
) -> None:
    """Compares an opened folder with what the parameters are made of, before they are read.

    Args:
      tied_head: head and embedding, which may be there as both; None: the model is not tied.
      headers_only: read no values, and so not whether that second one is the embedding.
      config_file: the file that says which tensors there are, for messages.
      carried: tensors that nothing is made of.

    Raises: InputError if tensors are missing, unknown, of another dtype or shape, or if a tied
      head differs from the embedding.
    """
    expected = {entry.name: entry for leaf_entries in entries for entry in leaf_entries}
    present = set(files).difference(carried)
    repeated = tied_head if tied_head and present.issuperset(tied_head) else None
    if repeated:
        present.remove(repeated[0])
    odd = {"missing": expected.keys() - present, "unknown": present - expected.keys()}
    problems = [f"{kind}: {listed(names)}" for kind, names in odd.items() if names]
    if problems:
        is_head = len(odd["missing"]) == 1 and max(odd["missing"]).endswith("lm_head.weight")
        raise InputError(
            f"{folder}: the tensors are not those that {config_file} describes; "
            + "; ".join(problems)
            + f": copy the folder again, or put the {config_file} of these weights beside them"
            + ", with tie_word_embeddings true if the head is the embedding" * is_head
        )
    for entry in expected.values():
        stored = _stored(folder, files, entry.name)
        if tuple(stored.get_shape()) != entry.hf_shape:
            raise InputError(
                f"{folder}: {entry.name} has shape {tuple(stored.get_shape())}, but {config_file} "
                f"asks for {entry.hf_shape}: the weights and the config belong to different models"
            )
    if repeated and not headers_only:
        _check_tied(folder, files, repeated)


def _stored(folder: Path, files: Mapping[str, Any], name: str) -> Any:
    """A tensor to be read in slices. Raises: InputError if its dtype is not one of FLOATS."""
    stored = files[name].get_slice(name)
    if stored.get_dtype() not in FLOATS:
        raise InputError(
            f"{folder}: {name} holds {stored.get_dtype()}, expected {', '.join(FLOATS.values())}: "
            "quantised weights are not read; take the plain checkpoint"
        )
    return stored


def listed(names: set[str]) -> str:
    """The first MAX_NAMES, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(sorted(names)[:MAX_NAMES]) + more


def _check_tied(folder: Path, files: Mapping[str, Any], tied_head: tuple[str, str]) -> None:
    head, embed = tied_head
    head_tensor, embed_tensor = (_stored(folder, files, name) for name in tied_head)
    is_same_shape = head_tensor.get_shape() == embed_tensor.get_shape()
    if not is_same_shape or not all(
        np.array_equal(head_tensor[rows], embed_tensor[rows]) for rows in _some_rows(head_tensor)
    ):
        raise InputError(
            f"{folder}: tie_word_embeddings is true, but {head} differs from {embed}: set "
            f"tie_word_embeddings to false in config.json, or remove the tensor, {IN_A_COPY}"
        )


def _some_rows(stored: Any) -> Iterator[slice]:
    """All rows of a tensor, as slices of at most PIECE elements where a row is not larger."""
    rows, *columns = stored.get_shape()
    step = max(1, PIECE // math.prod(columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def read_leaves(
    folder: Path,
    files: Mapping[str, Any],
    shapes: Params,
    entries: Sequence[list[Entry]],
    dtype: str | None,
    shardings: Any,
) -> Params:
    """A tree of parameters from an opened folder, one device's part of one leaf at a time.

    Args:
      shapes: of the leaves, with the dtypes that the model computes in, which must hold all values.
      dtype: of the result; None: those of `shapes`.
      entries: the tensors of each leaf.
      shardings: tree like `shapes`; None: this process's default device.
    """
    specs, tree = jax.tree.flatten(shapes)
    layouts = [None] * len(specs) if shardings is None else jax.tree.leaves(shardings)
    leaves = [
        read_leaf(folder, files, leaf_entries, spec, np.dtype(dtype or spec.dtype), layout)
        for leaf_entries, spec, layout in zip(entries, specs, layouts, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def read_leaf(
    folder: Path,
    files: Mapping[str, Any],
    entries: list[Entry],
    spec: jax.ShapeDtypeStruct,
    dtype: np.dtype,
    sharding: Sharding | None,
) -> Array:
    """One leaf on its devices. Of it, the host holds what one device keeps, one after another.

    Only that part is read, and its values are checked; devices that keep the same part share a
    read. The files are mapped into memory: their pages are the system's cache.

    Args:
      spec: shape of the leaf, and the dtype that the model computes in.
      dtype: of the result.
      sharding: over processes too; None: the default device.

    Raises: InputError if values are not finite, or would not be in one of the two dtypes.
    """
    layouts: dict[Box, list[Sharding | None]] = {}
    if sharding is None:
        layouts[tuple((0, size) for size in spec.shape)] = [None]
    else:
        for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
            assert index is not None  # of a device that is addressable
            spans = zip(index, spec.shape, strict=True)
            box = tuple(span.indices(size)[:2] for span, size in spans)
            device_layout = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            layouts.setdefault(box, []).append(device_layout)

    def placed(box: Box, targets: list[Sharding | None]) -> list[Array]:
        part = np.empty([stop - start for start, stop in box], dtype)
        for entry in entries:
            pairs, rest = [*zip(entry.index, box, strict=False)], box[len(entry.index) :]
            if all(start <= i < stop for i, (start, stop) in pairs):
                place = tuple(i - start for i, (start, _) in pairs)
                _fill(part[place], rest, folder, files, entry, spec.dtype)
        copies = [jax.device_put(part, target, may_alias=False) for target in targets]
        return jax.block_until_ready(copies)

    shards = []
    for box, targets in layouts.items():
        shards += placed(box, targets)
        # JAX keeps what it was given until its next call or garbage collection; here, the next
        # part would be read before that.
        gc.collect(0)
    if sharding is None:
        return shards[0]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards)


@contextlib.contextmanager
def agreed(folder: Path, shardings: Any) -> Iterator[None]:
    """A block that fails in every process if it fails in one, where arrays span processes.

    A process reads just what its devices keep, so it may be the only one that finds a wrong value;
    the others would wait for it in their next common computation.

    Raises: InputError naming the processes in which it failed.
    """
    spans = any(not sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings))
    try:
        yield
    except Exception:
        if spans:
            multihost_utils.process_allgather(np.bool_(True))
        raise
    if spans:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.bool_(False)))
        if failed.size:
            raise InputError(
                f"{folder}: not read in process {', '.join(map(str, failed))} (processes count "
                "from 0): see the message there"
            )


@np.errstate(over="ignore")  # of stored scales and of casts: what is not finite is refused
def _fill(
    part: np.ndarray,
    box: Box,
    folder: Path,
    files: Mapping[str, Any],
    entry: Entry,
    computed: np.dtype,
) -> None:
    """Reads the part `box` of an entry's parameter into `part`, in its dtype, piece by piece.

    Args:
      computed: the dtype that the model computes in.
    """
    if entry.swaps:
        part, box = part.swapaxes(0, 1), (box[1], box[0], *box[2:])
    narrow = min((part.dtype, computed), key=lambda dtype: float(jnp.finfo(dtype).max))
    stored = files[entry.name].get_slice(entry.name)
    for piece, where in mapping.pieces(entry, box, PIECE):
        values = mapping.read_slice(entry, stored, where)
        if not np.isfinite(values).all():
            raise InputError(_not_finite(folder, entry.name, stored))
        if jnp.finfo(values.dtype).max > jnp.finfo(narrow).max:
            _refuse_overflow(folder, entry.name, values, narrow)
        shape = tuple(stop - start for start, stop in piece)
        offsets = (start - first for (start, _), (first, _) in zip(piece, box, strict=True))
        place = tuple(slice(k, k + size) for k, size in zip(offsets, shape, strict=True))
        part[place] = mapping.to_ours(entry, values, shape)


def _refuse_overflow(folder: Path, name: str, values: np.ndarray, dtype: np.dtype) -> None:
    beyond = values[~np.isfinite(values.astype(dtype))]
    if beyond.size:
        fits = np.abs(beyond).max() <= jnp.finfo(jnp.float32).max
        remedy = 'set model.dtype = "float32"' if fits else "take another checkpoint"
        raise InputError(
            f"{folder}: {name} holds {float(beyond[0]):.9g}, which {dtype} cannot hold (at most "
            f"{float(jnp.finfo(dtype).max):.4g}): {remedy}"
        )


def _not_finite(folder: Path, name: str, stored: Any) -> str:
    wrong = sum(int((~np.isfinite(stored[rows])).sum()) for rows in _some_rows(stored))
    return (
        f"{folder}: {name} holds {wrong} values that are not finite (NaN or infinite) of "
        f"{math.prod(stored.get_shape())}: training went wrong before it was saved, or the file is "
        "damaged; take an earlier checkpoint, or copy the model again"
    )


@jax.jit
def _part(leaf: Array, index: tuple[int | Array, ...]) -> Array:
    for i in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
    return leaf


def gathered(parts: list[tuple[Any, Entry]]) -> np.ndarray:
    """A tensor on the host, of the leaves that it is made of."""

    def rows(leaf: Any, entry: Entry) -> np.ndarray:
        array = to_host(_part(leaf, entry.index) if entry.index else leaf)
        return mapping.to_hf(entry, array.swapaxes(0, 1) if entry.swaps else array)

    def joined(parts: Iterable[tuple[Any, Entry]]) -> np.ndarray:
        parts = [*parts]
        row_blocks = [rows(leaf, entry) for leaf, entry in parts]
        if parts[0][1].turn[1] > 1:
            return np.stack(row_blocks, axis=-1).reshape(parts[0][1].matrix)
        if heads := parts[0][1].heads:
            by_head = [rows.reshape(heads, -1, *rows.shape[1:]) for rows in row_blocks]
            return np.concatenate(by_head, axis=1).reshape(parts[0][1].matrix)
        return np.concatenate(row_blocks) if len(row_blocks) > 1 else row_blocks[0]

    experts = [joined(group) for _, group in itertools.groupby(parts, lambda p: p[1].expert)]
    return experts[0] if parts[0][1].expert is None else np.stack(experts)


def write(
    folder: Path | None,
    tensors: Mapping[str, list[tuple[Any, Entry]]],
    max_shard_bytes: int,
    carried: Mapping[str, Any] = MappingProxyType({}),
    dtypes: Mapping[str, np.dtype] = MappingProxyType({}),
) -> None:
    """Writes parameters as tensors, as `write_tensors`.

    Args:
      tensors: name -> its parts, in order: (the leaf, of devices or of the host, where in it).
      carried: name -> the open file of a tensor that is copied as it is.
      dtypes: name -> that of a tensor, where it is not that of its leaf.

    Without a folder it takes part in the gathers, and keeps nothing.
    """
    dtypes = {name: parts[0][0].dtype for name, parts in tensors.items()} | dict(dtypes)
    sizes = {
        name: sum(math.prod(entry.shape) for _, entry in parts) * dtypes[name].itemsize
        for name, parts in tensors.items()
    }
    sizes |= {name: _bytes(file.get_slice(name)) for name, file in carried.items()}

    def read(name: str) -> Any:
        if name in tensors:
            return gathered(tensors[name]).astype(dtypes[name], copy=False)
        return None if folder is None else carried[name].get_tensor(name)

    write_tensors(folder, sizes, read, max_shard_bytes)


def stored_dtypes(
    files: Mapping[str, Any], names: Collection[str], dtype: str
) -> dict[str, np.dtype]:
    """Name -> the dtype of a tensor in a folder, for an export in the dtype that most of them have.

    So some that the folder has in more bits are written in these. Of an export in another dtype,
    and of tensors in a dtype that cannot hold it, nothing is returned.
    """
    by_name = {name: jnp.dtype(FLOATS[files[name].get_slice(name).get_dtype()]) for name in names}
    most, common = jnp.dtype(dtype), Counter(by_name.values()).most_common(1)
    if not common or common[0][0] != most:
        return {}
    return {name: kind for name, kind in by_name.items() if jnp.promote_types(kind, most) == kind}


def _bytes(stored: Any) -> int:
    """Of a tensor in a file, whose dtype is called by its bits: F32, I64, F8_E4M3, BOOL."""
    bits = re.search(r"\d+", stored.get_dtype())
    return math.prod(stored.get_shape()) * (int(bits.group()) if bits else 8) // 8


def write_tensors(
    folder: Path | None,
    sizes: Mapping[str, int],
    read: Callable[[str], np.ndarray],
    max_shard_bytes: int,
) -> None:
    """Writes tensors in files, and the index if there are several. One file is held in memory.

    Args:
      sizes: bytes of each tensor, by name.
      read: gives a tensor by its name; called once for each, also without a folder.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=int,
        max_shard_size=max_shard_bytes,
        filename_pattern="model{suffix}.safetensors",
    )

    for file, names in plan.filename_to_tensors.items():
        tensors = ((name, read(name)) for name in names)
        shard = {name: tensor for name, tensor in tensors if folder is not None}
        if folder is not None:
            write_file(shard, folder / file, folder / "config.json")
    if folder is not None and plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(tensors: Mapping[str, np.ndarray], file: Path, neighbour: Path) -> None:
    """Writes a file of tensors, which those may read who may read its neighbour.

    Raises: OSError with the file's name, as on a full disk.
    """
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
    file.chmod(neighbour.stat().st_mode)  # the library's are for their owner alone


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the file that an index names, in its own folder."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InputError(
            f"{index} has no weight_map, {{tensor: file}} (found {table!r}): copy the folder again"
        )
    for tensor, name in table.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise InputError(
                f"{index}: {tensor} is in {name!r}, expected the name of a file in that folder: "
                "nothing outside a model's folder is read; copy the folder again"
            )
    return table
