"""The families of decoders that are built, and a user's own: config.json to a ModelConfig and back.

`model.family = "my_family.py:family"` names a Family of one's own (docs/models.md).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxgrpo.core.errors import InputError, refuse_all, suggest
from jaxgrpo.models.api import ModelConfig
from jaxgrpo.models.hf import rope, wrapped
from jaxgrpo.models.hf.families import (
    experts,
    gemma,
    hybrid,
    interleaved,
    latents,
    llama,
    mistral,
    olmo,
    qwen,
)
from jaxgrpo.models.hf.families.base import Family
from jaxgrpo.models.hf.fields import Fields

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(qwen.QWEN2, qwen.QWEN3, llama.LLAMA, llama.SMOLLM3, llama.GRANITE, llama.SEED_OSS),
        *(mistral.MISTRAL, mistral.MINISTRAL, mistral.PHI3, gemma.GEMMA2, gemma.GEMMA3),
        *(olmo.OLMO2, olmo.OLMO3, olmo.EXAONE4, mistral.MINISTRAL3, llama.ARCEE, llama.HUNYUAN),
        *(interleaved.GLM4, interleaved.ERNIE, interleaved.COHERE2),
        *(experts.QWEN3_MOE, experts.OLMOE, experts.GLM4_MOE, experts.GPT_OSS),
        *(
            llama.GRANITE4,
            experts.GRANITE_MOE,
            latents.DEEPSEEK_V2,
            latents.DEEPSEEK_V3,
            latents.GLM4_MOE_LITE,
        ),
        *(hybrid.QWEN3_5, hybrid.QWEN3_5_MOE, hybrid.QWEN3_NEXT, hybrid.OLMO_HYBRID),
    )
}
"""model_type of config.json -> the family, built in or registered."""
_BUILT_IN = frozenset(FAMILIES)
ALIASES = {"kimi_k2": "deepseek_v3"}
"""model_type of published folders -> that of the family that they are."""

RUN_FIELDS = (
    *("source", "dtype", "float32_head", "float32_activations", "float32_attention"),
    *("without_text", "fused_experts"),
)
"""Fields of a ModelConfig that a run, a tokenizer or the files of weights decide; the others must
be those of its config.json."""


LACKING = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), "layers of short convolutions"),
    **dict.fromkeys(("nemotron_h", "falcon_h1", "bamba"), "layers of Mamba-2"),
    "gemma4_text": "heads of two sizes, embeddings for each layer and caches of other layers",
    "kimi_linear": "a decay for each channel",
    "qwen4_exp_text": "attention to chosen tokens, gated residuals and embeddings of n-grams",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), "attention to chosen tokens"),
}
"""model_type -> what it needs and no kind of layer has."""


def register(family: Family) -> None:
    """Adds a family of one's own: its folders are then read, trained and saved like any other.

    The same family may be registered again, and so may the one that its file, or a cell of a
    notebook, defines again.

    Raises: InputError where its model_type is that of a family that is built in or of another file.
    """
    if not isinstance(family, Family):
        raise InputError(
            f"register: a {type(family).__name__}, expected a jaxgrpo.models.hf.families.Family"
        )
    registered = FAMILIES.get(family.model_type)
    if family.model_type in _BUILT_IN and registered is not family:
        raise InputError(
            f'the family "{family.model_type}" is built in and cannot be replaced: give your own '
            "another model_type, in config.json too"
        )
    if registered is not None and _home(registered) != _home(family):
        raise InputError(
            f'the family "{family.model_type}" is that of {_home(registered)} already, not of '
            f"{_home(family)}: give one of them another model_type, in config.json too"
        )
    FAMILIES[family.model_type] = family


def _home(family: Family) -> str:
    """Where a family's function comes from."""
    read: Any = family.read
    return f"{getattr(read, '__module__', '')}.{getattr(read, '__qualname__', repr(read))}"


def find_family(model_type: Any, source: str = "") -> Family:
    """Raises: InputError with the nearest names for a family that is not built."""
    family = (
        FAMILIES.get(ALIASES.get(model_type, model_type)) if isinstance(model_type, str) else None
    )
    if family is None:
        from transformers import CONFIG_MAPPING

        lacking = LACKING.get(str(model_type))
        # qwen3_moe is no slip of the pen for qwen3, nor mixtral for mistral.
        is_kin = any(str(model_type).startswith(f"{name}_") for name in FAMILIES)
        is_name = is_kin or str(model_type) in CONFIG_MAPPING
        hint = f"Known: {', '.join(sorted(FAMILIES))}" if is_name else suggest(model_type, FAMILIES)
        hint = f"it needs {lacking}, which no kind of layer has" if lacking else hint
        raise InputError(
            f"{source}: model_type = {model_type!r} is not built: {hint}; "
            "model.family names a family of your own (docs/models.md)"
        )
    return family


def model_config(
    config_json: Mapping[str, Any],
    source: str,
    family: Family | None = None,
    ignored: Collection[str] = (),
    text_only: bool = False,
) -> ModelConfig:
    """The ModelConfig of a config.json's fields, in the form of transformers 4 or 5.

    Args:
      source: where they are from, for messages.
      family: a user's own; None: that of model_type.
      ignored: fields that change nothing, as the user says.
      text_only: read the text part of a model that has others too.

    Raises: InputError naming every field that is missing or asks for what is not built.
    """
    text = wrapped.text_fields(config_json)
    family = family or find_family(text.get("model_type"), source)
    if family.model_type not in (text.get("model_type"), ALIASES.get(str(text.get("model_type")))):
        raise InputError(
            f"{source}: model_type = {text.get('model_type')!r}, but the family given is "
            f'"{family.model_type}": take the folder or the family that fits the other'
        )
    is_wrapped = wrapped.is_wrapped(config_json)
    if is_wrapped and not text_only and wrapped.find_wrapper(config_json):
        raise InputError(
            f"{source}: model_type = {config_json.get('model_type')!r} has a {family.model_type} "
            "under text_config, and reads more than text: set model.text_only = true to train its "
            "text part alone (an export keeps the rest as it is)"
        )
    fields = Fields(text, ignored=ignored)
    architectures = fields.take("architectures", "texts", [family.architecture])
    # Early folders of ERNIE 4.5 have Ernie4_5_ForCausalLM.
    names = (family.architecture, wrapped.full_architecture(family.model_type))
    plain = [name.replace("_", "") for name in architectures]
    if plain not in [[name.replace("_", "")] for name in names if name]:
        fields.refuse("architectures", f"only {family.architecture} is built")
    model_fields = family.read(fields)
    fields.refuse_unread(family.harmless)
    problems = wrapped.problems(config_json, ignored) if is_wrapped else []
    problems += fields.problems
    refuse_all(f"{source} is not a {family.model_type} that can be built:", problems)
    origin = {"source": json.dumps(dict(config_json)), "ignored": tuple(ignored)}
    origin |= {"text_only": is_wrapped}
    fused = tuple(family.fused.values())
    return ModelConfig(family=family.model_type, fused=fused, **origin, **model_fields)


def unread(config: ModelConfig) -> str:
    """What config.json has and is not read though it looks as if it acts; empty: nothing."""
    config_json = wrapped.text_fields(json.loads(config.source or "{}"))
    kind = json.loads(config.source or "{}").get("model_type")
    words = [f"of the {kind} all but its text (model.text_only)"] if config.text_only else []
    words += [f"{name} of config.json is not read (model.ignore)" for name in config.ignored]
    if any("attn_factor" in table for table in rope.tables(config_json).values()):
        words.append("attn_factor of its rope is not read, as by transformers")
    return "; ".join(words)


def config_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The fields of config.json for a model whose weights are stored in `dtype`.

    Those that the config was read from; for one that was built by hand, its sizes and whatever else
    the family's plainest model has. Positions, and numbers of experts, are there for transformers 4
    too. They are read again, and must give this config.

    Raises: InputError naming every field of the config that the family's config.json cannot say.
    """
    family = find_family(config.family, "ModelConfig.family")
    config_json = json.loads(config.source) if config.source else plain_fields(config)
    names = [name for name in ("dtype", "torch_dtype") if config_json.get(name) is not None]
    if names or dtype != "float32":  # which a config.json without it means
        config_json |= dict.fromkeys(names or ["dtype"], dtype)
    text = config_json
    if wrapped.is_wrapped(config_json):
        text = config_json[wrapped.TEXT]
        text |= {name: dtype for name in ("dtype", "torch_dtype") if text.get(name) is not None}
        if config_json.get(wrapped.TIED) is None:  # transformers does not look into text_config
            config_json[wrapped.TIED] = config.tie_embeddings
    text["model_type"] = family.model_type  # and of no alias
    text |= rope.older_fields(text)
    older_names = [pair for pair in family.older_names.items() if text.get(pair[1]) is None]
    text |= {older: text[name] for name, older in older_names if name in text}
    # What is quantised is written in bfloat16, and code that comes with a checkpoint is not copied.
    for name in ("quantization_config", "auto_map"):
        config_json.pop(name, None)
    reread = model_config(config_json, "the model's config.json", family, config.ignored, True)
    names = [field.name for field in dataclasses.fields(config) if field.name not in RUN_FIELDS]
    odd = [name for name in names if getattr(config, name) != getattr(reread, name)]
    problems = [
        f"{name} = {getattr(config, name)!r}: its config.json says {getattr(reread, name)!r}"
        for name in odd
    ]
    refuse_all(f"this model cannot be saved as a {family.model_type}:", problems)
    return config_json


def plain_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that say the sizes; what they leave out, the family assumes."""
    turn = next((kind.rope for kind in config.attention), None)
    activations = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
    return {
        "model_type": config.family,
        "architectures": [find_family(config.family, "ModelConfig.family").architecture],
        "dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "pad_token_id": config.pad_token,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": activations.get(config.activation, config.activation),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": turn.theta if turn else 10_000.0},
    }
