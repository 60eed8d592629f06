"""Model folders as Hugging Face writes them: config.json, safetensors, tokenizer. Both ways.

A path is a local folder, or else the name of a model on the hub ("owner/name"), which is then
fetched: nothing else here uses the network. Pickled weights and code that comes with a checkpoint
are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxgrpo.core.errors import InputError, one_line, refusing
from jaxgrpo.core.types import Params
from jaxgrpo.data import limits, sources, storage
from jaxgrpo.data.storage import Place
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.api import Model, ModelConfig, is_wide
from jaxgrpo.models.hf import (
    absent,
    adapters,
    families,
    mapping,
    replacing,
    texts,
    weights,
    wrapped,
)
from jaxgrpo.models.hf.families import Family
from jaxgrpo.models.hf.mapping import Entry
from jaxgrpo.models.hf.weights import IN_A_COPY

CONTENTS = replacing.Contents(
    "a model",
    re.compile("|".join([texts.NAMES, re.escape(weights.INDEX), weights.WEIGHTS.pattern])),
    "config.json",
    (weights.SINGLE, weights.INDEX),
    "; export --overwrite and save_model(overwrite=True) replace it",
)

PROBES, PROBE_BYTES = 64, 1 << 16  # of large weights, for their fingerprint

OTHER_PARAMETERS = (
    "save_model: these are not the parameters of this model; if it has adapters, give them "
    "together with the weights (jaxgrpo.models.lora.join; update.forward.params_of a state)"
)
SECONDS = 60.0  # in which a tokenizer must be read
MAX_REASON = 200  # characters of another library's message in ours


def read_config(
    path: str | os.PathLike[str],
    family: Family | None = None,
    ignored: Collection[str] = (),
    text_only: bool = False,
    fetch: Callable[[], Path] | None = None,
) -> ModelConfig:
    """The ModelConfig of a model folder; its dtype is that of the stored weights.

    Args:
      family: one's own, which is registered; None: that of model_type.
      ignored: fields of config.json that change nothing, as the user says.
      text_only: read the text part of a model that has others too.
      fetch: gives the folder with its weights, whose names say what fields leave open, where
        `path` has neither its weights nor an index; None: that counts as no such tensor.

    Raises: InputError naming every field that is missing or asks for what is not built.
    """
    source = find_folder(path) / "config.json"
    if not source.is_file():
        remedy = absent.gguf_remedy(source.parent)
        if (source.parent / adapters.CONFIG).is_file():
            remedy = "; this is an adapter: name it by lora.path, and its base by model.path"
        raise InputError(
            f"{source} does not exist: give the folder of a Hugging Face model{remedy}"
        )
    if family is not None:
        families.register(family)

    def has_tensor(ending: str, carried: tuple[str, ...] = ()) -> bool:
        folder = source.parent
        if fetch and not any((folder / file).is_file() for file in (weights.SINGLE, weights.INDEX)):
            folder = fetch()
        return weights.has_tensor(folder, ending, carried)

    config_json = wrapped.resolve_tied(weights.read_json(source), lambda: has_tensor(wrapped.HEAD))
    config = families.model_config(config_json, str(source), family, ignored, text_only)
    tensors = families.find_family(config.family, str(source))
    name, carried = next(iter(tensors.fused_experts), None), tuple(tensors.carried)
    fused = config.fused_experts or (name is not None and has_tensor(name, carried))
    return dataclasses.replace(config, fused_experts=fused)


def read_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model folder, by transformers, from the folder's files alone.

    Without a chat template it gets that of the folder's processor, if there is one.

    Raises: InputError if the folder holds none that can be read.
    """
    folder = find_folder(path)

    def problem(error: Exception) -> str:
        reason = f"{type(error).__name__}: {one_line(error)[:MAX_REASON]}"
        return (
            f"{folder}: its tokenizer cannot be read ({reason}): put tokenizer.json and "
            f"tokenizer_config.json, as tokenizer.save_pretrained writes, {IN_A_COPY}"
        )

    with refusing(problem):  # transformers, tokenizers and json raise many kinds
        absent.refuse_pointers(texts.text_files(folder))
        try:
            for file in folder.glob("tokenizer*.json"):
                _try_normalizer(file)
            tokenizer = limits.left_after(SECONDS, functools.partial(_read_tokenizer, folder))
        except (limits.TimedOut, subprocess.TimeoutExpired):
            raise TimeoutError(f"it takes more than {SECONDS:g} s") from None
    if not texts.has_vocabulary(folder, getattr(tokenizer, "vocab_files_names", {})):
        raise InputError(
            f"{folder}: its {type(tokenizer).__name__} has no vocabulary: complete the copy, or "
            f"put tokenizer.json, as tokenizer.save_pretrained writes it, {IN_A_COPY}"
        )
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = texts.processor_template(folder)
    return tokenizer


def _read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, as transformers reads it where mistral-common is not installed.

    Where it is, a folder with tekken.json gets mistral-common's. That one leaves out of its
    vocabulary what is part of a character, and has no chat template.
    """
    from transformers import AutoTokenizer, TokenizersBackend

    options: Any = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if type(tokenizer).__name__ == "MistralCommonBackend":
        return TokenizersBackend.from_pretrained(folder, **options)
    return tokenizer


def _try_normalizer(file: Path) -> None:
    """Reads a tokenizer in a process of its own if its normalizer has a regular expression.

    It is matched with each token that the file adds, and no thread here could run meanwhile.
    Raises: subprocess.TimeoutExpired after SECONDS.
    """
    text, has_pattern = file.read_bytes() if file.is_file() else b"", False
    if b'"Regex"' in text:
        with contextlib.suppress(ValueError, AttributeError):  # which `read_tokenizer` reports
            has_pattern = '"Regex"' in json.dumps(json.loads(text).get("normalizer"))
    if has_pattern:
        code = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"
        command = [sys.executable, "-P", "-c", code, str(file)]
        subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)


def read_end_tokens(
    path: str | os.PathLike[str], tokenizer: Any, vocab_size: int
) -> tuple[int, ...]:
    """The tokens that end a text: the tokenizer's own, then those of generation_config.json.

    Chat models have several (Qwen3: <|im_end|> and <|endoftext|>), of which a tokenizer knows one.
    As transformers' generate, a folder without generation_config.json ends at those of config.json.
    Where that has none either, the tokenizer's counts, and not what transformers assumes of the
    class, which may be another vocabulary's.

    Raises: InputError on a token that the model does not have.
    """
    folder = find_folder(path)
    source = folder / "generation_config.json"
    if not source.is_file():
        source = folder / "config.json"
    stored = wrapped.generation_fields(weights.read_json(source)).get("eos_token_id")
    end_tokens = [(source, token) for token in (stored if isinstance(stored, list) else [stored])]
    end_tokens.insert(
        0, (folder / "tokenizer_config.json", getattr(tokenizer, "eos_token_id", None))
    )
    for file, token in end_tokens:
        if token is not None and (type(token) is not int or not 0 <= token < vocab_size):
            raise InputError(
                f"{file}: the end token {token!r}, expected a whole number from 0 to "
                f"{vocab_size - 1}, the tokens of config.json's vocab_size: set eos_token_id to "
                f"the model's own {IN_A_COPY}"
            )
    return tuple(dict.fromkeys(token for _, token in end_tokens if token is not None))


def tokens_without_text(
    tokenizer: Any, end_tokens: Iterable[int], vocab_size: int
) -> tuple[tuple[int, int], ...]:
    """Ranges [begin, end) of a model's tokens that its tokenizer has no text for.

    Vocabularies are often padded to a round size (Qwen2.5: 271 tokens), and have gaps (Phi-4-mini).
    A token that ends a text is none of them.

    >>> from types import SimpleNamespace
    >>> tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "c": 5})
    >>> tokens_without_text(tokenizer, [2], 8)
    ((3, 5), (6, 8))
    """
    with_text = np.array([*tokenizer.get_vocab().values(), *end_tokens])
    absent = np.ones(vocab_size, np.int8)
    absent[with_text[with_text < vocab_size]] = 0
    edges = np.flatnonzero(np.diff(absent, prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def refuse_adapter(
    path: str | os.PathLike[str], adapter: str | os.PathLike[str] | None = None
) -> None:
    """Refuses a model folder that holds an adapter too, which transformers adds to the model.

    Args:
      adapter: folder of the adapter that is read with the model; it may be the same.

    Raises: InputError with the file that says so.
    """
    folder = find_folder(path)
    home = None if adapter is None else storage.local(adapter, "lora.path")
    is_read = home is not None and home.is_dir() and os.path.samefile(home, folder)
    if (folder / adapters.CONFIG).is_file() and not is_read:
        raise InputError(
            f"{folder} holds an adapter beside the model ({adapters.CONFIG}), and transformers "
            "would add it: name the folder by lora.path too (load_model(adapter=...)), or take "
            f"the adapter out {IN_A_COPY}"
        )


def read_params(
    path: str | os.PathLike[str],
    model: Model,
    dtype: str | None = None,
    shardings: Any = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Params:
    """The parameters of a model folder, in the layout of `model`.

    Holds one device's part of one leaf on the host at a time.

    Args:
      dtype: of the result; None: what the model computes in, leaf by leaf (`model.shapes`).
      shardings: tree of shardings like the parameters (over processes too); None: this process's
        default device.
      adapter: as in `refuse_adapter`.

    Raises: InputError naming tensors that are missing, unknown, of another shape or not finite,
      and as `refuse_adapter`.
    """
    folder = find_folder(path)
    refuse_adapter(folder, adapter)
    family = families.find_family(model.config.family, str(folder))
    with weights.agreed(folder, shardings), weights.opened(folder) as files:
        entries = _checked(folder, files, model, family)
        return weights.read_leaves(folder, files, model.shapes, entries, dtype, shardings)


def _checked(
    folder: Path, files: Mapping[str, Any], model: Model, family: Family, headers_only: bool = False
) -> list[list[Entry]]:
    """The tensors of each leaf, by their names in an opened folder. Raises: as `weights.check`."""
    entries, tied_head, carried = wrapped.find_tensors(files, model, family, str(folder))
    weights.check(folder, files, entries, tied_head, headers_only, carried=carried)
    return entries


def read_adapted(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    model: Model,
    dtype: str | None = None,
    shardings: Any = None,
) -> Params:
    """The parameters of a model with adapters: the weights of one folder, the adapters of another.

    Args:
      dtype: of the adapters; None: what the model computes in, as the weights are.
      shardings: as in `read_params`.

    Raises: InputError as `read_params` and `adapters.read_params`.
    """
    adapter_shardings, weight_shardings = (
        (None, None) if shardings is None else lora.split(shardings)
    )
    adapter_params = adapters.read_params(adapter, model, dtype, adapter_shardings)
    base_params = read_params(path, lora.base_model(model), None, weight_shardings, adapter)
    return lora.join(adapter_params, base_params)


def load_model(
    path: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    revision: str | None = None,
    family: Family | None = None,
    ignore: Collection[str] = (),
    text_only: bool = False,
    adapter: str | os.PathLike[str] | None = None,
    shardings: Any = None,
) -> tuple[Model, Params]:
    """A model folder, or a model of the hub, as a Model and its parameters.

    Args:
      path: a folder as Hugging Face writes them, or the name of a model on the hub, "owner/name".
      dtype: of parameters and activations.
      revision: of the hub: a branch, tag or commit.
      family: one's own, which is registered; None: that of config.json's model_type.
      ignore: fields of config.json that change nothing the model computes, else refused.
      text_only: read the text part of a model that has others too, of images for example.
      adapter: folder of an adapter (LoRA) that PEFT wrote for this model; its matrices are then
        parameters beside the weights. `lora.merge` adds them to the weights.
      shardings: tree of shardings like the parameters; None: this process's default device.

    Raises: InputError naming what is missing, damaged, or not built.
    """
    folder = find_folder(path, revision)
    config = dataclasses.replace(read_config(folder, family, ignore, text_only), dtype=dtype)
    if adapter is None:
        model = decoder.build(config)
        return model, read_params(folder, model, shardings=shardings)
    settings = adapters.read_config(adapter, config)
    model = decoder.build(dataclasses.replace(config, lora=settings))
    return model, read_adapted(folder, adapter, model, shardings=shardings)


def save_model(
    model: Model,
    params: Params,
    path: str | os.PathLike[str],
    tokenizer: Any = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    card: str | None = None,
    overwrite: bool = False,
    base: str | os.PathLike[str] | None = None,
    revision: str | None = None,
) -> None:
    """Writes an ordinary Hugging Face folder, whole or not at all.

    Adapters are merged into the weights (`lora.merge`); `adapters.save` keeps them apart.
    Every process calls it, since arrays laid out over processes are gathered, tensor by tensor;
    process 0 writes, and none returns before the folder is there. A model of ours is replaced.

    Args:
      tokenizer: anything with `save_pretrained(folder)`; its special tokens go into the configs.
        With a base only its chat template is written, if it is a text that differs.
      generation_config: fields of generation_config.json, over the base's or the tokenizer's.
      max_shard_bytes: weights beyond it are split over several files with an index.
      card: text of README.md; our title, which marks the folder as ours, is added to it.
      overwrite: replace a model that someone else wrote too.
      base: the model that this one was trained from, whose tokenizer, generation_config.json and
        config.json are copied as they are, where nothing in them changed. Of a model that was read
        with text_only it is needed: its other tensors are copied too.
      revision: of a base on the hub, as in `load_model`.

    Raises: InputError if config.json cannot say what the model is, or `path` is another's.
    """
    if jax.tree.structure(params) != jax.tree.structure(model.shapes):
        raise InputError(OTHER_PARAMETERS)
    if model.config.lora is not None:
        model, params = lora.base_model(model), lora.merge(model, params)
    family = families.find_family(model.config.family, "save_model")
    refuse = functools.partial(refuse_unless_ours, overwrite=overwrite)
    out = replacing.replaced(storage.on_host(path, "a model"), refuse)
    home = None if base is None else find_folder(base, revision)
    with _base_tensors(model, family, home, dtype := _common_dtype(params)) as (entries, *of_base):
        tensors = mapping.by_tensor(jax.tree.leaves(params), entries)
        fields = families.config_fields(model.config, dtype)
        with out if jax.process_index() == 0 else contextlib.nullcontext() as folder:
            if folder is not None:
                texts.write(folder, fields, generation_config or {}, tokenizer, home)
                replacing.write_card(folder, card)
            weights.write(folder, tensors, max_shard_bytes, *of_base)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jaxgrpo save_model")


@contextlib.contextmanager
def _base_tensors(
    model: Model, family: Family, base: Path | None, dtype: str
) -> Iterator[tuple[list[list[Entry]], dict[str, Any], dict[str, np.dtype]]]:
    """Where to write each leaf, the open files of tensors that are copied from the base, and the
    dtypes of `weights.stored_dtypes`."""
    if base is None and model.config.text_only:
        raise InputError(
            "save_model: this is the text part of a model that has others too: give the folder "
            "that it was read from as base=, whose other tensors are copied"
        )
    has_names = base is not None and weights.has_weights(base)
    with weights.opened(base) if base and has_names else contextlib.nullcontext({}) as files:
        stored = wrapped.find_tensors(files, model, family, str(base))
        names = {entry.name for leaf_entries in stored.entries for entry in leaf_entries}
        dtypes = weights.stored_dtypes(files, names.intersection(files), dtype)
        yield stored.entries, {name: files[name] for name in stored.carried}, dtypes


def _common_dtype(params: Params) -> str:
    """The dtype of all leaves but those that are wide."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    dtypes = sorted({str(leaf.dtype) for path, leaf in paths if not is_wide(path)})
    if len(dtypes) != 1:
        raise InputError(f"save_model: parameters of several dtypes {dtypes}: cast to one")
    return dtypes[0]


def refuse_unless_ours(
    path: Place, bases: Iterable[str | Path] = (), overwrite: bool = False
) -> None:
    """Raises: InputError where a model may not be written, as `replacing.refuse_unless_ours`."""
    replacing.refuse_unless_ours(path, CONTENTS, bases, overwrite)


def read_dtypes(path: str | os.PathLike[str], model: Model) -> dict[str, int]:
    """dtype -> how many tensors of a model folder are stored in it, from the files' headers.

    Raises: InputError naming tensors that are missing, unknown or of another shape.
    """
    folder = find_folder(path)
    family = families.find_family(model.config.family, str(folder))
    counts = Counter()
    with weights.opened(folder) as files:
        _checked(folder, files, model, family, headers_only=True)
        for name, file in files.items():
            dtype = file.get_slice(name).get_dtype()
            counts[weights.FLOATS.get(dtype, dtype)] += 1
    return dict(counts)


def find_folder(
    path: str | os.PathLike[str],
    revision: str | None = None,
    with_weights: bool = True,
    key: str = "model.path",
) -> Path:
    """The local folder of a model: `path` itself, or files copied from the hub or a bucket.

    Args:
      revision: of the hub: a branch, tag or commit.
      with_weights: fetch the weights too.
      key: of a config, that names it, for messages.

    Raises: InputError if `path` is neither a folder nor a model that the hub gives.
    """
    folder = storage.local(path, key, **sources.model_files(with_weights))
    if os.path.isdir(folder):
        return folder
    if str(path).endswith(".gguf") and os.path.isfile(path):
        raise InputError(
            f"{key} = {str(path)!r} is a GGUF file: jaxgrpo import {path} OUT writes a folder "
            "from it; give that one"
        )
    if not isinstance(path, str) or not sources.is_name(path):
        raise InputError(
            f"{key} = {str(path)!r} is no folder: give one that holds a Hugging Face model, "
            "or a name on the hub, owner/name"
        )
    return sources.fetch_model(path, revision, with_weights)


def fingerprint(path: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Name -> [bytes, crc32] of the files of a model folder that act on a run.

    Of weights above 4 MiB the crc32 is of PROBES pieces spread evenly over them: it tells one model
    from another in a moment, and is no check for damage.
    """
    folder = find_folder(path)
    small, checksums = texts.text_files(folder), {}
    for file in [*small, *weights.weight_files(folder)]:
        size, crc = file.stat().st_size, 0
        stride = PROBE_BYTES if file in small else max(PROBE_BYTES, size // PROBES)
        with open(file, "rb") as stream:
            for begin in range(0, size, stride):
                stream.seek(begin)
                crc = zlib.crc32(stream.read(PROBE_BYTES), crc)
        checksums[file.relative_to(folder).as_posix()] = [size, crc]
    return checksums
