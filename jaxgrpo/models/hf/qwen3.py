"""Qwen3 as data: our parameter paths and Hugging Face's tensor names, our config and theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxgrpo.core.errors import refuse_all
from jaxgrpo.models.api import LayerKind, ModelConfig, Rope

ARCHITECTURE = "Qwen3ForCausalLM"
TIED_HEAD = ("lm_head.weight", "model.embed_tokens.weight")
"""A tied checkpoint may hold the embedding a second time, as the head."""

REQUIRED = {  # our field -> that of config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
OPTIONAL: Mapping[str, tuple[str, Any]] = {  # with what transformers assumes without the field
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "attention_bias": ("attention_bias", False),
    "max_positions": ("max_position_embeddings", 32_768),
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


UNSUPPORTED = {  # fields that must be absent, false or 0
    "auto_map": "code that comes with a checkpoint is never run",
    "quantization_config": "only plain weights are read",
    "use_sliding_window": "Qwen3 is built without windows",
    "attention_dropout": "dropout is not built; set it to 0",
}


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is(kind: type) -> Callable[[Any], bool]:
    """Whether a value is of that kind, or null."""
    return lambda value: value is None or isinstance(value, kind)


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # field -> what it may be, in words
    **dict.fromkeys(
        (*REQUIRED.values(), "max_position_embeddings"), (_is_size, "a whole number, 1 or more")
    ),
    "head_dim": (lambda value: value is None or _is_size(value), "a whole number, or null"),
    "rms_norm_eps": (_is_positive, "a number above 0"),
    "tie_word_embeddings": (_is(bool), "true or false"),
    "attention_bias": (_is(bool), "true or false"),
    "rope_parameters": (_is(dict), "an object"),
    "rope_scaling": (_is(dict), "an object"),
    "layer_types": (
        lambda value: _is(list)(value) and all(isinstance(kind, str) for kind in value or ()),
        "a list of texts",
    ),
    "hidden_act": (_is(str), "a text"),
    "dtype": (_is(str), "a text"),
    "torch_dtype": (_is(str), "a text"),
}


MODULES: Mapping[str, str] = {  # those of a layer follow "model.layers.{layer}."
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention/query": "self_attn.q_proj",
    "attention/query_norm": "self_attn.q_norm",
    "attention/key": "self_attn.k_proj",
    "attention/key_norm": "self_attn.k_norm",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/up": "mlp.up_proj",
    "feed_forward/down": "mlp.down_proj",
}
FUSED: Mapping[str, tuple[str, ...]] = {}


class Family(NamedTuple):
    modules: Mapping[str, str] = MODULES
    fused: Mapping[str, tuple[str, ...]] = FUSED
    tied_head: tuple[str, str] = TIED_HEAD


FAMILY = Family()


def model_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """The ModelConfig of a config.json's fields, in the form of transformers 4 or 5.

    Raises: InputError naming every field of `source` that is missing or asks for what is not built.
    """
    missing = [f"{name}: missing" for name in REQUIRED.values() if name not in fields]
    odd = _wrong_kinds(fields) or _unsupported(fields)
    refuse_all(f"{source} is not a Qwen3 that can be built:", [*odd, *missing])
    return ModelConfig(
        family="qwen3",
        **{ours: fields[theirs] for ours, theirs in REQUIRED.items()},
        **{ours: _given(fields, theirs, default) for ours, (theirs, default) in OPTIONAL.items()},
        attention_out_bias=bool(fields.get("attention_bias")),
        head_dim=fields.get("head_dim") or 128,
        pattern=(LayerKind(rope=Rope(theta=float(_rope(fields)["rope_theta"]))),),
        activation=ACTIVATIONS[fields.get("hidden_act", "silu")],
        dtype=fields.get("dtype") or fields.get("torch_dtype") or "float32",
    )


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if fields.get(name) is None else fields[name]


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, which are two fields before."""
    return {
        "rope_theta": fields.get("rope_theta", 10_000.0),
        **(fields.get("rope_scaling") or {}),
        **(fields.get("rope_parameters") or {}),
    }


def _wrong_kinds(fields: Mapping[str, Any]) -> list[str]:
    """The fields whose values are of another kind than Qwen3's."""
    odd = {
        name: (fields[name], expected)
        for name, (is_right, expected) in KINDS.items()
        if name in fields and not is_right(fields[name])
    }
    if not odd and not _is_positive(theta := _rope(fields)["rope_theta"]):
        odd["rope_theta"] = theta, "a number above 0"
    return [f"{name} = {value!r}: expected {expected}" for name, (value, expected) in odd.items()]


def _unsupported(fields: Mapping[str, Any]) -> list[str]:
    problems = []

    def expect(met: bool, name: str, expected: str) -> None:
        if not met:
            problems.append(f"{name} = {fields.get(name)!r}: {expected}")

    expect(fields.get("model_type") == "qwen3", "model_type", 'only "qwen3" is built')
    architectures = fields.get("architectures") or [ARCHITECTURE]
    expect(architectures == [ARCHITECTURE], "architectures", f"only {ARCHITECTURE} is built")
    for name, expected in UNSUPPORTED.items():
        expect(not fields.get(name), name, expected)
    kinds = set(fields.get("layer_types") or ())
    expect(kinds <= {"full_attention"}, "layer_types", 'only "full_attention" is built')
    known = ", ".join(ACTIVATIONS)
    expect(fields.get("hidden_act", "silu") in ACTIVATIONS, "hidden_act", f"known are {known}")
    dtype = "dtype" if "dtype" in fields else "torch_dtype"
    known = ("float32", "bfloat16", "float16", None)
    expect(fields.get(dtype) in known, dtype, "known are float32, bfloat16, float16")
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name) or {}
        plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        plain = plain and set(rope) <= {"rope_theta", "rope_type", "type"}
        expect(plain, name, "scaled or partial rotary positions are not built")
    return problems


def config_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The fields of config.json for a model whose weights are stored in `dtype`.

    Raises: InputError naming every field of the config that Qwen3 cannot express.
    """
    kind = config.pattern[0]
    assert kind.rope is not None
    plain = {
        "family": config.family == "qwen3",
        "pattern": all(other == kind for other in config.pattern) and kind.window is None,
        "query_key_norm": config.query_key_norm == "head",
        "norm_offset": config.norm_offset == 0.0,
        "norms": config.norms == "before",
        "embedding_scale": config.embedding_scale == 1.0,
        "query_scale": config.query_scale in (None, config.head_dim**-0.5),
        "dtype": dtype in ("float32", "bfloat16", "float16"),
    }
    odd = [f"{name} = {getattr(config, name)!r}" for name, fits in plain.items() if not fits]
    problems = [f"{field}: Qwen3 has no such model" for field in odd]
    refuse_all("this model cannot be saved as a Qwen3:", problems)
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return {
        "architectures": [ARCHITECTURE],
        **{theirs: getattr(config, ours) for ours, theirs in REQUIRED.items()},
        **{theirs: getattr(config, ours) for ours, (theirs, _) in OPTIONAL.items()},
        "head_dim": config.head_dim,
        "hidden_act": activations[config.activation],
        "rope_parameters": {"rope_type": "default", "rope_theta": kind.rope.theta},
        "dtype": dtype,
    }
