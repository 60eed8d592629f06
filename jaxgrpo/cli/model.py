"""`jaxgrpo model`: what a model is, what it takes of each device, and what can be done with it.

Reads config.json, the headers of the weights and the tokenizer, as far as they are there, and no
weight.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from rich.console import Console
from rich.table import Column, Table

from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import MeshKeys, OptimizerKeys
from jaxgrpo.models import decoder, lora, sharding
from jaxgrpo.models.api import (
    LAYERS,
    AttentionKind,
    ExpertsKind,
    LayerKind,
    Model,
    ModelConfig,
    Rope,
)
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.models.counts import count_weights
from jaxgrpo.models.hf import families, folders, rope, texts, wrapped
from jaxgrpo.models.hf.weights import has_weights
from jaxgrpo.rollout.slots.capacity import state_bytes
from jaxgrpo.training import memory, parameters
from jaxgrpo.training.pretrained import find_config
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import Document, facts, show_whole
from jaxgrpo.training.stored_policy import config_for
from jaxgrpo.update.forward import trained
from jaxgrpo.update.optimizer import make_optimizer

TOKENIZERS = (*texts.VOCABULARIES, texts.TOKENIZER, "vocab.json")
"""Patterns of files: a folder with none of these has no tokenizer."""


def main(
    target: str,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    family: str | None = None,
    ignore: Sequence[str] | None = None,
    text_only: bool = False,
    as_json: bool = False,
    overrides: Sequence[str] = (),
) -> int | Document:
    """Prints what a model folder, or the model of a run or a config, is. Returns the exit code.

    Raises: InputError where it cannot be read, is not built or does not divide over the mesh.
    """
    changes = {"model.dtype": dtype, "model.revision": revision, "model.family": family}
    changes |= {"model.ignore": ignore, "model.text_only": text_only or None}
    config = config_for(target, changes, overrides)
    process.start(config.mesh.platform)
    model = describe(config)
    if as_json:
        return Document(model)
    console = Console(highlight=False)
    facts(console, dict(lines(model)))
    show_whole(console, leaves_table(model["leaves"]), wraps=True)
    return 0


def describe(config: Config) -> dict[str, Any]:
    """What `jaxgrpo model` prints, as a table or as JSON: names, sizes, bytes of each device.

    Raises: InputError as `main`.
    """
    folder, stored = find_config(config.model, fetch_weights=False)
    keys = config.model
    model_config = parameters.model_config_for_run(keys, config.lora, stored)
    model, base = decoder.build(model_config), decoder.build(lora.base_config(model_config))
    cache = cache_dtype(config.rollout.kv_cache_dtype, model_config)
    dtypes = folders.read_dtypes(folder, base) if has_weights(folder) else None
    return {
        "path": keys.path,
        "unread": families.unread(stored),
        "family": stored.family,
        "architecture": families.find_family(stored.family).architecture,
        **_sizes(stored),
        "rope": _rope_types(stored),
        "layers": [_kind_words(kind) for kind in stored.kinds],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.shapes)),
        "active": count_weights(model).work,
        "stored": dtypes,
        "dtype": keys.dtype,
        "cache_dtype": cache,
        **_on_devices(config.mesh, config.optimizer, config.train.updates, cache, model),
        **_texts(folder, stored),
        "leaves": list(_leaves(model)),
    }


def lines(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What to print of `describe`: name and value."""
    ends, limit, bytes_ = model["end_tokens"], model["position_limit"], model["bytes"]
    heads = f"{model['num_heads']} heads, {model['num_kv_heads']} KV heads"
    hidden, feed_forward = model["hidden_size"], model["intermediate_size"]
    yield "model", model["path"]
    if model["unread"]:
        yield "  not read", model["unread"]
    yield "family", f"{model['family']} ({model['architecture']})"
    yield "layers", f"{len(model['layers'])}: {_in_runs(model['layers'])}"
    yield "attention", f"{heads}, head_dim {model['head_dim']}{_extras(model)}"
    yield "sizes", f"hidden {hidden}, feed-forward {feed_forward} ({model['activation']})"
    head = "the embedding" if model["tie_embeddings"] else "of its own"
    cap, silent = model["logit_soft_cap"], model["without_text"]
    silent = _if(silent, f" ({silent} without text, never drawn)")
    yield "vocabulary", f"{model['vocab_size']}{silent}, head {head}{_if(cap, f', soft cap {cap}')}"
    yield "positions", f"rope {model['rope']}; meant for {model['max_positions']} tokens"
    yield "  limit", f"{limit} tokens, longer ones are refused" if limit else "none"
    stored = model["stored"]
    tensors = ", ".join(f"{n} tensors {dtype}" for dtype, n in stored.items()) if stored else ""
    experts = any(" experts " in layer for layer in model["layers"])
    active = _if(experts, f", of which a token is multiplied by {model['active']:,}")
    yield "parameters", f"{model['parameters']:,}{active}"
    yield "  stored", tensors or "no weights in the folder; those of the hub are not fetched"
    mesh = ", ".join(f"{name} {size}" for name, size in model["mesh"].items())
    yield "each device", f"of the mesh {mesh}"
    yield "  to compute", f"{memory.shown(bytes_['computed'])} in {model['dtype']}"
    weights, moments = memory.shown(bytes_["trained"]), memory.shown(bytes_["optimizer"])
    yield "  to train", f"{weights} in float32, {moments} the state of {model['optimizer']}"
    cached, dtype = memory.shown(bytes_["cached"]), model["cache_dtype"]
    states = _if(bytes_["states"], f"; {memory.shown(bytes_['states'])} for the states of a sample")
    yield "  to sample", f"{cached} for the keys and values of a token, in {dtype}{states}"
    tokenizer, template = model["tokenizer"], model["chat_template"]
    yield (
        "tokenizer",
        f"{tokenizer}, {'a' if template else 'no'} chat template" if tokenizer else "none",
    )
    if model["tokenizer_rules"]:
        yield "  rules", model["tokenizer_rules"]
    yield (
        "end tokens",
        ", ".join(f"{token} {text}".strip() for token, text in ends.items()) or "none",
    )
    yield "supported", ", ".join(model["supported"])
    if unsupported := model["unsupported"]:
        yield "not", ", ".join(f"{name} ({why})" for name, why in unsupported.items())


def leaves_table(leaves: Sequence[Mapping[str, Any]]) -> Table:
    """The kinds of parameters, one row each; the axes may be broken into lines."""
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("count", "numbers")]
    table = Table(Column("parameter", no_wrap=True), "axes of one", *numbers)
    for leaf in leaves:
        sizes = zip(leaf["axes"], leaf["shape"], strict=True)
        shape = " x ".join(f"{name} {size}" for name, size in sizes)
        table.add_row(leaf["name"], shape, str(leaf["count"]), f"{leaf['numbers']:,}")
    return table


def _sizes(config: ModelConfig) -> dict[str, Any]:
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
        *("head_dim", "activation", "tie_embeddings", "norms", "query_key_norm"),
        *("attention_bias", "logit_soft_cap", "max_positions", "position_limit"),
    )
    return {name: getattr(config, name) for name in names}


def _extras(model: Mapping[str, Any]) -> str:
    norm = model["query_key_norm"]
    norm_text = {"none": "", "whole": ", normed as one vector"}.get(norm, ", each normed")
    return norm_text + _if(model["attention_bias"], ", biases of queries, keys and values")


def _if(condition: Any, text: str) -> str:
    return text if condition else ""


def _kind_words(kind: LayerKind) -> str:
    """How a layer attends.

    >>> _kind_words(LayerKind(AttentionKind(window=5, rope=None)))
    'window 5, no rope'
    """
    mixer = kind.mixer
    if isinstance(mixer, AttentionKind):
        parts = [f"window {mixer.window}" if mixer.window else "full", _rope_words(mixer.rope)]
        parts += [f"soft cap {mixer.soft_cap:g}"] if mixer.soft_cap else []
        parts += [f"latents of {mixer.latent.size}"] if mixer.latent else []
    else:
        parts = [f"gated delta rule, {mixer.value_heads} heads"]
    if isinstance(feed := kind.feed, ExpertsKind):
        parts.append(f"{feed.top_k} of {feed.number} experts of {feed.size}")
    return ", ".join(parts)


def _rope_words(rope: Rope | None) -> str:
    """
    >>> _rope_words(Rope(10_000.0, share=0.5, stretch=(1.0, 0.25)))
    'theta 10000 on 0.5 of each head, frequencies x 0.25 to 1'
    """
    if rope is None:
        return "no rope"
    low, high = min(rope.stretch, default=1.0), max(rope.stretch, default=1.0)
    factor = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    return (
        f"theta {rope.theta:.10g}{_if(rope.share != 1, f' on {rope.share:g} of each head')}"
        f"{_if(low != 1 or high != 1, f', frequencies x {factor}')}"
        f"{_if(rope.scale != 1, f', scale {rope.scale:.4g}')}"
    )


def _rope_types(config: ModelConfig) -> str:
    """The types of rope of config.json, in words."""
    tables = rope.tables(wrapped.text_fields(json.loads(config.source)))
    types = {
        name: table.get("rope_type") or table.get("type") or "default"
        for name, table in tables.items()
    }
    return ", ".join(f"{kind} ({name})" if name else kind for name, kind in types.items())


def _in_runs(layers: Sequence[str]) -> str:
    """
    >>> _in_runs(["local", "local", "full", "local", "local", "full"])
    '2 x (local), 1 x (full), and again'
    """
    for length in range(1, len(layers) + 1):
        if all(layer == layers[i % length] for i, layer in enumerate(layers)):
            runs = [(layer, len(list(run))) for layer, run in itertools.groupby(layers[:length])]
            if length == 1:
                return layers[0]
            words = ", ".join(f"{count} x ({layer})" for layer, count in runs)
            return words + _if(length < len(layers), ", and again")
    return "none"


def _on_devices(
    sizes: MeshKeys, keys: OptimizerKeys, updates: int, cache: Any, model: Model
) -> dict[str, Any]:
    """Bytes of each device of the config's mesh, whichever devices are here."""
    shape = (sizes.data or 1, sizes.fsdp, sizes.tensor, sizes.context)
    mesh = AbstractMesh(shape, sharding.AXES, axis_types=(AxisType.Auto,) * len(shape))
    optimizer = make_optimizer(trained(model, model.axes), updates=updates, **vars(keys))
    trained_bytes, moment_bytes = memory.training_bytes(model, mesh, optimizer)
    computed_bytes, model_config = memory.parameters(model, mesh), model.config
    number = jnp.dtype(cache).itemsize
    cached = [model_config.cached(kind) for kind in model_config.attention]
    numbers = (max(1, heads // sizes.tensor) * (key + value) for heads, key, value in cached)
    cached_bytes = sum(numbers) * number
    return {
        "mesh": dict(zip(sharding.AXES, shape, strict=True)),
        "optimizer": keys.use,
        "bytes": {
            "computed": computed_bytes,
            "trained": trained_bytes,
            "optimizer": moment_bytes,
            "cached": cached_bytes,
            "states": sum(state_bytes(model_config.kinds, model_config.dtype, sizes.tensor)),
        },
    }


def _texts(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The tokenizer, the tokens that end a text, and what can be done with them."""
    tokenizer = None
    if any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        tokenizer = folders.read_tokenizer(folder)
    ends = folders.read_end_tokens(folder, tokenizer, config.vocab_size)
    words = ["" if tokenizer is None else tokenizer.decode([token]) for token in ends]
    silent: tuple[tuple[int, int], ...] = ()
    if tokenizer is not None:
        silent = folders.tokens_without_text(tokenizer, ends, config.vocab_size)
    unsupported = {}
    if tokenizer is None or not ends:
        why = "no tokenizer" if tokenizer is None else "no end token"
        unsupported = {"sampling": why, "training": why}
    uses = ("logits", "log-probs", "sampling", "training", "adapters (LoRA)", "export")
    return {
        "tokenizer": None if tokenizer is None else type(tokenizer).__name__,
        "tokenizer_rules": texts.tokenizer_line(folder, tokenizer),
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
        "end_tokens": dict(zip(ends, words, strict=True)),
        "without_text": sum(end - begin for begin, end in silent),
        "supported": [name for name in uses if name not in unsupported],
        "unsupported": unsupported,
    }


def _leaves(model: Model) -> Iterator[dict[str, Any]]:
    """The kinds of parameters: those of all layers are one."""
    entries: dict[str, dict[str, Any]] = {}
    axes = jax.tree.leaves(model.axes, is_leaf=lambda node: type(node) is tuple)
    paths = jax.tree_util.tree_leaves_with_path(model.shapes)
    for (keys, spec), names in zip(paths, axes, strict=True):
        parts, shape, count = [str(key.key) for key in keys], spec.shape, 1
        if parts[0] in LAYERS:
            parts = ["layer", *parts[2:]]
        if names[0] == "layers":
            names, (count, *shape) = names[1:], shape
        name = "/".join(parts)
        first = {"name": name, "axes": list(names), "shape": list(shape), "count": 0, "numbers": 0}
        entry = entries.setdefault(name, first)
        entry["count"] += count
        entry["numbers"] += count * math.prod(shape)
    yield from entries.values()
