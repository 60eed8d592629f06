"""Model folders as Hugging Face writes them: config.json, safetensors, tokenizer. Both ways.

A path is a local folder, or else the name of a model on the hub ("owner/name"), which is then
fetched: nothing else here uses the network. Pickled weights and code that comes with a checkpoint
are refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxgrpo.core.errors import InputError, one_line, refusing
from jaxgrpo.core.types import Params
from jaxgrpo.data import sources
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.models.hf import qwen3
from jaxgrpo.models.sharding import to_host

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
OURS = (
    "README.md",
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The files of a model folder beside its weights. A folder that holds another is not replaced."""

CARD_TITLE = "# Trained with jaxgrpo"
"""In each model card that we write: a README.md without it was written by someone else."""

PROBES, PROBE_BYTES = 64, 1 << 16  # of a large file, for its fingerprint

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
FLOATS = ("float32", "bfloat16", "float16", "float64")
"""The dtypes in which weights may be stored."""

MAX_NAMES = 8  # tensors named in an error message
MAX_REASON = 200  # characters of another library's message in ours


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The ModelConfig of a model folder; its dtype is that of the stored weights.

    Raises: InputError naming every field that is missing or asks for what is not built.
    """
    source = find_folder(path) / "config.json"
    if not source.is_file():
        raise InputError(f"{source} does not exist: give the folder of a Hugging Face model")
    return qwen3.model_config(_read_json(source), str(source))


def read_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model folder, by transformers, from the folder's files alone.

    Raises: InputError if the folder holds none that can be read.
    """
    from transformers import AutoTokenizer

    folder = find_folder(path)

    def problem(error: Exception) -> str:
        reason = f"{type(error).__name__}: {one_line(error)[:MAX_REASON]}"
        return (
            f"{folder}: its tokenizer cannot be read ({reason}): put tokenizer.json and "
            "tokenizer_config.json there, as tokenizer.save_pretrained writes"
        )

    with refusing(problem):  # transformers, tokenizers and json raise many kinds
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_end_tokens(path: str | os.PathLike[str], tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text: the tokenizer's own, then those of generation_config.json.

    Chat models have several (Qwen3: <|im_end|> and <|endoftext|>), of which a tokenizer knows one.

    Raises: InputError on a token that the model does not have.
    """
    folder = find_folder(path)
    source = folder / "generation_config.json"
    more = (_read_json(source) if source.is_file() else {}).get("eos_token_id")
    given = [(source, token) for token in (more if isinstance(more, list) else [more])]
    given.insert(0, (folder / "tokenizer_config.json", tokenizer.eos_token_id))
    size = read_config(folder).vocab_size
    for file, token in given:
        if token is not None and (type(token) is not int or not 0 <= token < size):
            raise InputError(
                f"{file}: the end token {token!r}, expected a whole number from 0 to {size - 1}, "
                "the tokens of config.json's vocab_size: set eos_token_id to the model's own"
            )
    return tuple(dict.fromkeys(token for _, token in given if token is not None))


def check_tokens(path: str | os.PathLike[str], tokenizer: Any, config: ModelConfig) -> None:
    """Refuses a tokenizer of another model, some of whose tokens have no embedding.

    Raises: InputError with the largest token that has none.
    """
    text, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last >= config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer knows the token {last}, {text!r}, but config.json's vocab_size "
            f"= {config.vocab_size} gives embeddings to 0 to {config.vocab_size - 1}: take the "
            "tokenizer of this model, or give the model more embeddings (resize_token_embeddings "
            "of transformers)"
        )


def end_fields(tokens: Sequence[int]) -> dict[str, Any]:
    """The fields of generation_config.json for a model that ends at `tokens`."""
    return {"eos_token_id": list(tokens) if len(tokens) > 1 else tokens[0]}


def read_params(
    path: str | os.PathLike[str], model: Model, dtype: str | None = None, shardings: Any = None
) -> Params:
    """The parameters of a model folder, in the layout of `model`.

    Holds one leaf on the host at a time, and of it only what this process's devices keep.

    Args:
      dtype: of the result; None: what the model computes in, leaf by leaf (`model.shapes`).
      shardings: tree of shardings like the parameters (over processes too); None: this process's
        default device.

    Raises: InputError naming tensors that are missing, unknown, of another shape or not finite.
    """
    folder = find_folder(path)
    entries = qwen3.entries(model)
    specs, tree = jax.tree.flatten(model.shapes)
    layouts = [None] * len(specs) if shardings is None else jax.tree.leaves(shardings)
    with _open_weights(folder) as files:
        names = {entry.name for of_leaf in entries for entry in of_leaf}
        _check_names(folder, names, files, model.config.tie_embeddings)

        def read(entry: qwen3.Entry) -> tuple[int | None, np.ndarray]:
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
            if not np.isfinite(tensor).all():
                wrong = tensor.size - int(np.isfinite(tensor).sum())
                raise InputError(
                    f"{folder}: {entry.name} holds {wrong} values that are not finite (NaN or "
                    "infinite) of "
                    f"{tensor.size}: training went wrong before it was saved, or the file is "
                    "damaged; take an earlier checkpoint, or copy the model anew"
                )
            return entry.period, qwen3.to_ours(entry, tensor)

        leaves = [
            _place(spec.shape, jnp.dtype(dtype or spec.dtype), layout, map(read, of_leaf))
            for spec, layout, of_leaf in zip(specs, layouts, entries, strict=True)
        ]
    return jax.tree.unflatten(tree, leaves)


def save_model(
    path: str | os.PathLike[str],
    model: Model,
    params: Params,
    tokenizer: Any = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    card: str | None = None,
) -> None:
    """Writes an ordinary Hugging Face folder, whole or not at all.

    Every process calls it, since arrays laid out over processes are gathered, tensor by tensor;
    process 0 writes, and none returns before the folder is there. A model folder that is already
    there is replaced.

    Args:
      tokenizer: anything with `save_pretrained(folder)`; its special tokens go into the configs.
      generation_config: fields of generation_config.json, over those the tokenizer gives.
      max_shard_bytes: weights beyond it are split over several files with an index.
      card: text of the folder's README.md, the model card.

    Raises: InputError if Qwen3 cannot express the model, or `path` holds anything but a model.
    """
    leaves = jax.tree.leaves(params)
    tensors = {
        entry.name: (leaf, entry)
        for leaf, of_leaf in zip(leaves, qwen3.entries(model), strict=True)
        for entry in of_leaf
    }
    dtype = {str(leaf.dtype) for leaf in leaves}
    if len(dtype) != 1:
        raise InputError(f"save_model: parameters of several dtypes {sorted(dtype)}: cast to one")
    fields = qwen3.config_fields(model.config, *dtype)
    mine = jax.process_index() == 0
    with _replaced(Path(path).absolute()) if mine else contextlib.nullcontext() as folder:
        if folder is not None:
            known = ((name, getattr(tokenizer, name, None)) for name in SPECIAL_TOKENS)
            tokens = {name: token for name, token in known if token is not None}
            _write_configs(folder, {**fields, **tokens}, {**tokens, **(generation_config or {})})
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            if card is not None:
                (folder / "README.md").write_text(card, encoding="utf-8")
        _write_weights(folder, tensors, max_shard_bytes)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jaxgrpo save_model")


def find_folder(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The local folder of a model: `path` itself, or the hub's files fetched into its cache.

    Args:
      revision: of the hub: a branch, tag or commit.

    Raises: InputError if `path` is neither a folder nor a model that the hub gives.
    """
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):
        return folder
    if not isinstance(path, str) or not sources.is_name(path):
        raise InputError(
            f"model.path = {str(path)!r} is no folder: give one that holds a Hugging Face model, "
            "or a name on the hub, owner/name"
        )
    return sources.fetch_model(path, revision)


def fingerprint(path: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Name -> [bytes, crc32] of the files of a model folder that act on a run.

    Of files above 4 MiB the crc32 is of PROBES pieces spread evenly over them: it tells one model
    from another in a moment, and is no check for damage.
    """
    folder = find_folder(path)
    texts = [folder / name for name in OURS if name not in ("README.md", INDEX)]
    found = {}
    for file in [*(text for text in texts if text.is_file()), *_weight_files(folder)]:
        size, crc = file.stat().st_size, 0
        stride = max(PROBE_BYTES, size // PROBES)
        with open(file, "rb") as opened:
            for begin in range(0, size, stride):
                opened.seek(begin)
                crc = zlib.crc32(opened.read(PROBE_BYTES), crc)
        found[file.name] = [size, crc]
    return found


def _read_json(file: Path) -> dict[str, Any]:
    remedy = "copy the model folder anew"
    with refusing(f"{file} is not JSON ({{reason}}): {remedy}", ValueError, OSError):
        found = sources.parse_json(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise InputError(
            f"{file} holds a JSON {type(found).__name__}, expected an object: {remedy}"
        )
    return found


def _check_names(folder: Path, expected: set[str], files: Mapping[str, Any], tied: bool) -> None:
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


def _place(
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


def _write_weights(
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


def _write_configs(folder: Path, fields: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig, Qwen3Config

    Qwen3Config(**fields).save_pretrained(folder)
    # Readers older than transformers 5 look for the base frequency here, and else take 10 000.
    written = json.loads((folder / "config.json").read_text())
    written["rope_theta"] = fields["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    GenerationConfig(**generation).save_pretrained(folder)


@contextlib.contextmanager
def _open_weights(folder: Path) -> Iterator[dict[str, Any]]:
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


def _refuse_unless_ours(folder: Path) -> None:
    """Raises: InputError if `folder` is there and neither empty nor a model that we may replace.

    That is a folder with config.json and weights, and no file that we do not write ourselves.
    """
    if not folder.is_dir():
        if folder.exists():
            raise InputError(f"{folder} is a file: choose the name of a folder for the model")
        return
    found = {path.name: path for path in folder.iterdir()}
    foreign = sorted(name for name, path in found.items() if not _is_ours(path))
    has_model = "config.json" in found and not found.keys().isdisjoint((SINGLE, INDEX))
    if foreign or (found and not has_model):
        what = (
            f"{foreign[0]}, which is no file of a model"
            if foreign
            else f"{min(found)} and no model (config.json and its weights)"
        )
        raise InputError(
            f"{folder} exists and holds {what}: it is not replaced; choose another folder or empty "
            "this one"
        )


def _is_ours(path: Path) -> bool:
    """Whether a file may be deleted with the model in its folder: by name, a card by its text."""
    if not path.is_file() or path.is_symlink():
        return False
    if path.name == "README.md":
        return CARD_TITLE in path.read_text(encoding="utf-8", errors="replace")
    return path.name in OURS or WEIGHTS.fullmatch(path.name) is not None


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of them in its own folder."""
    table = _read_json(index).get("weight_map")
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


@contextlib.contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the block ends without an error.

    The files are flushed to disk before they are renamed, so that `folder` is at any moment the
    old one, the new one or, between two renames, absent; never half written.

    Raises: InputError as `_refuse_unless_ours`.
    """
    _refuse_unless_ours(folder)
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
