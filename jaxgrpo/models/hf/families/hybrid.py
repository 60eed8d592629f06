"""Families some of whose layers recur in place of attending: Qwen3.5, its text part."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from jaxgrpo.models.api import AttentionKind, DeltaKind, LayerKind
from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import (
    MODULES,
    Family,
    attention_bias,
    shortest_pattern,
    sizes,
)
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL

LINEAR = "linear_attention"

DELTA = MappingProxyType(
    {
        "delta": "linear_attn",
        "delta/gate": "linear_attn.in_proj_z",
        "delta/rate": "linear_attn.in_proj_b",
        "delta/decay": "linear_attn.in_proj_a",
        "delta/norm": "linear_attn.norm",
        "delta/out": "linear_attn.out_proj",
    }
)
"""Our module of a layer that recurs -> that of Qwen3.5."""
FUSED = MappingProxyType(
    {
        "linear_attn.in_proj_qkv": ("delta/query", "delta/key", "delta/value"),
        "linear_attn.conv1d": ("delta/query_conv", "delta/key_conv", "delta/value_conv"),
    }
)
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Parameters of positions in two dimensions: those of text are equal in both, and so plain."""


def delta_kind(fields: Fields) -> DeltaKind:
    """The sizes of the layers that recur."""
    take = lambda name, default: fields.take(f"linear_{name}", "size", default)  # noqa: E731
    kind = DeltaKind(
        key_heads=take("num_key_heads", 16),
        value_heads=take("num_value_heads", 32),
        key_dim=take("key_head_dim", 128),
        value_dim=take("value_head_dim", 128),
        conv=take("conv_kernel_dim", 4),
    )
    if kind.value_heads % kind.key_heads:
        why = f"expected a multiple of linear_num_key_heads = {kind.key_heads}"
        fields.refuse("linear_num_value_heads", why)
    if kind.conv < 2:
        fields.refuse("linear_conv_kernel_dim", "expected 2 or more")
    return kind


def layers(fields: Fields, count: int, attention: AttentionKind) -> dict[str, Any]:
    """The kinds of the layers, by `layer_types` or every `full_attention_interval`-th attending."""
    interval = fields.take("full_attention_interval", "size", 4)
    default = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)]
    types = fields.take("layer_types", "texts", default)
    kinds = {FULL: LayerKind(attention), LINEAR: LayerKind(delta_kind(fields))}
    if len(types) != count or not set(types) <= set(kinds):
        names = " and ".join(kinds)
        fields.refuse("layer_types", f"expected {names}, num_hidden_layers = {count} of them")
        types = default
    return {"pattern": shortest_pattern([kinds[kind] for kind in types])}


def _qwen3_5(fields: Fields) -> dict[str, Any]:
    config = sizes(fields, head_dim=256)
    turn = rope.read_turn(
        fields,
        config["head_dim"],
        config["max_positions"],
        partial=True,
        share=0.25,
        ignored=OF_IMAGES,
    )
    if not fields.take("attn_output_gate", "flag", True):
        fields.refuse("attn_output_gate", "only gated attention is built")
    return {
        **config,
        **attention_bias(fields),
        **layers(fields, config["num_layers"], AttentionKind(rope=turn.rope)),
        "position_limit": turn.limit,
        "query_key_norm": "head",
        "norm_offset": 1.0,
        "attention_gate": True,
    }


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _qwen3_5,
    modules={**MODULES, **DELTA},
    fused=FUSED,
    # what states are held in, here always float32; layers that guess further tokens
    harmless=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    carried=("mtp.",),
)
