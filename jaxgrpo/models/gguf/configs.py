"""The metadata of a GGUF file as the fields of a config.json.

The keys are those of llama.cpp (gguf/constants.py of its package lists them); what the format has
no key for is what llama.cpp takes for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError, refuse_all
from jaxgrpo.models.gguf.files import OTHERWISE, Gguf
from jaxgrpo.models.hf.fields import ON, Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
"""Tensors: the embedding; the head, if it is another one; what angles are divided by."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of the scaling of Llama 3.1 to 3.3, which a file holds as divisors only."""
GEMMA3_27B_LAYERS = 62
"""Of Gemma 3's only model whose queries are divided by sqrt(hidden size / heads), in llama.cpp too;
the others' by sqrt(size of a head)."""
LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a window
LOCAL_LAYERS = 5  # of Gemma 3, before each without a window

_READ = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length",),
)
_GEMMA3_KEYS = (
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    *("final_logit_softcapping",),
)
_HARMLESS = ("rope.scaling.finetuned",)
_ONE = ("rope.scaling.attn_factor",)  # a factor that changes nothing if it is 1
_CAUSAL = "attention.causal"  # false in encoders


class Architecture(NamedTuple):
    """How models of one `general.architecture` are read."""

    model_type: str  # in config.json
    extra_fields: Callable[[Fields, dict[str, Any]], dict[str, Any]] = lambda *_: {}
    """Fields of config.json beside those that all have: (keys of the file, those)"""
    keys: tuple[str, ...] = ()  # that `extra_fields` reads
    turned: bool = False  # whether rows of queries and keys are stored pair by pair
    norm_offset: float = 0.0  # what is stored of a norm's weight is more by so much


def read_fields(gguf: Gguf) -> dict[str, Any]:
    """The fields of config.json.

    Raises: InputError naming every key that is missing or asks for what is not built.
    """
    name = gguf.architecture
    architecture = find_architecture(gguf)
    fields = Fields(gguf.metadata, "the file")
    config = _sizes(fields, name, gguf) | _rope(fields, name, gguf)
    config |= architecture.extra_fields(fields, config)
    known_keys = {f"{name}.{key}" for key in (*_READ, *_HARMLESS, _CAUSAL, *architecture.keys)}
    if not gguf.metadata.get(f"{name}.{_CAUSAL}", True):
        fields.refuse(f"{name}.{_CAUSAL}", ON["is_causal"])
    for key, value in gguf.metadata.items():
        is_one = key.removeprefix(f"{name}.") in _ONE and value == 1
        if key.startswith(f"{name}.") and key not in known_keys and not is_one and value:
            fields.refuse(key, "not read, and it may change what the model computes")
    refuse_all(f"{gguf.path} holds a model that cannot be imported:", fields.problems)
    return config


def find_architecture(gguf: Gguf) -> Architecture:
    """Raises: InputError on an architecture that is not read."""
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise InputError(
            f"{gguf.path}: general.architecture = {name!r} is not read, known are "
            f"{', '.join(sorted(ARCHITECTURES))}: {OTHERWISE}"
        )
    return ARCHITECTURES[name]


def _sizes(fields: Fields, name: str, gguf: Gguf) -> dict[str, Any]:
    """What every architecture has."""
    take = fields.take
    heads = take(f"{name}.attention.head_count", "size") or 1
    hidden = take(f"{name}.embedding_length", "size") or 1
    turned = take(f"{name}.rope.dimension_count", "size", max(1, hidden // heads))
    head_dim = take(f"{name}.attention.key_length", "size", turned)
    for key in ("attention.value_length", "rope.dimension_count"):
        if take(f"{name}.{key}", "size", head_dim) != head_dim:
            fields.refuse(f"{name}.{key}", f"expected {head_dim}, the size of a head")
    embedding = gguf.tensors.get(EMBEDDING)
    if embedding is None:
        fields.problems.append(f"the tensor {EMBEDDING}: missing")
    return {
        "model_type": find_architecture(gguf).model_type,
        "vocab_size": embedding.shape[0] if embedding else 1,
        "hidden_size": hidden,
        "intermediate_size": take(f"{name}.feed_forward_length", "size"),
        "num_hidden_layers": take(f"{name}.block_count", "layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": take(f"{name}.attention.head_count_kv", "size", heads),
        "head_dim": head_dim,
        "max_position_embeddings": take(f"{name}.context_length", "size"),
        "rms_norm_eps": take(f"{name}.attention.layer_norm_rms_epsilon", "positive"),
        "tie_word_embeddings": HEAD not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
    }


def _rope(fields: Fields, name: str, gguf: Gguf) -> dict[str, Any]:
    """Theta, and how angles are scaled for texts longer than the model was trained on."""
    theta = fields.take(f"{name}.rope.freq_base", "positive", 10_000.0)
    kind = fields.take(f"{name}.rope.scaling.type", "text", "linear")
    factor = fields.take(f"{name}.rope.scaling.factor", "positive", 1.0)
    original = f"{name}.rope.scaling.original_context_length"
    scaling: dict[str, Any] = {}
    if kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        length = fields.take(original, "size")
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = length
    elif kind not in ("none", "linear"):
        fields.refuse(f"{name}.rope.scaling.type", "known are none, linear and yarn")
    if ROPE_FACTORS in gguf.tensors:
        divisors = gguf.tensors[ROPE_FACTORS].read().ravel()
        scaling = _llama3(divisors, theta)
        if not scaling:
            fields.problems.append(
                f"the tensor {ROPE_FACTORS}: expected the divisors of Llama 3.1's scaling, with "
                + ", ".join(f"{key} = {value:g}" for key, value in LLAMA3.items())
            )
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def _llama3(divisors: np.ndarray, theta: float) -> dict[str, Any]:
    """The scaling of Llama 3.1 that has these divisors, or {}.

    With pairs i of `d` dimensions, wavelength w_i = 2 pi theta^(2 i / d), length L of training and
    low and high factors l, h: the divisor is 1 where w < L / h, the factor f where w > L / l, and
    between them 1 / ((1 - s) / f + s) with s = (L / w - l) / (h - l).
    """
    factor = float(divisors.max())
    low, high, length = LLAMA3.values()
    size = 2 * len(divisors)
    waves = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    share = np.clip((length / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if not np.allclose(divisors, expected, rtol=1e-4):
        return {}
    return {"rope_type": "llama3", "factor": float(f"{factor:.6g}"), **LLAMA3}


def _qwen2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Its biases are always there, and no field says so."""
    del config["attention_bias"]
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        fields.problems.append("qwen2.attention.key_length: expected embedding_length / head_count")
    del config["head_dim"]
    return {}


def _gemma3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"] or 1, config["num_attention_heads"]
    key = "gemma3.attention.sliding_window_pattern"
    is_list = isinstance(fields.content.get(key), list)
    pattern = fields.take(key, "flags" if is_list else "size", LOCAL_LAYERS + 1)
    windowed = pattern if is_list else [bool((i + 1) % pattern) for i in range(layers)]
    if len(windowed) != layers:
        fields.refuse(key, f"expected a flag for each of {layers} layers")
    query = config["hidden_size"] // heads if layers == GEMMA3_27B_LAYERS else config["head_dim"]
    cap = fields.take("gemma3.final_logit_softcapping", "number", 0.0)
    return {
        "sliding_window": fields.take("gemma3.attention.sliding_window", "size"),
        "layer_types": [SLIDING if has_window else FULL for has_window in windowed],
        "query_pre_attn_scalar": query,
        "rope_local_base_freq": fields.take("gemma3.rope.freq_base_swa", "positive", LOCAL_THETA),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": cap or None,
    }


ARCHITECTURES = {
    "llama": Architecture("llama", turned=True),
    "qwen2": Architecture("qwen2", _qwen2),
    "qwen3": Architecture("qwen3"),
    "gemma3": Architecture("gemma3_text", _gemma3, _GEMMA3_KEYS, norm_offset=1.0),
}
"""general.architecture -> how its models are read."""
