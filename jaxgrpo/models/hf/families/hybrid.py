"""Families some of whose layers recur in place of attending: Qwen3.5, Qwen3-Next, OLMo-Hybrid."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal

from jaxgrpo.models.api import AttentionKind, DeltaKind, ExpertsKind, LayerKind
from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import (
    EXPERTS,
    FUSED_EXPERTS,
    MODULES,
    Family,
    attention_bias,
    shortest_pattern,
    sizes,
    with_feeds,
)
from jaxgrpo.models.hf.families.experts import read_experts, sparse_feeds
from jaxgrpo.models.hf.families.olmo import AFTER, read_olmo
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
OUTPUT_GATES: dict[str, str] = dict.fromkeys(("silu", "swish"), "silu")
"""What Qwen3.8 calls the gate of layers that recur, which is silu whatever the field says in
transformers."""
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Parameters of positions in two dimensions: those of text are equal in both, and so plain."""


def delta_kind(fields: Fields, defaults: DeltaKind) -> DeltaKind:
    """The sizes of the layers that recur."""
    take = lambda name, default: fields.take(f"linear_{name}", "size", default)  # noqa: E731
    kind = defaults._replace(
        key_heads=take("num_key_heads", defaults.key_heads),
        value_heads=take("num_value_heads", defaults.value_heads),
        key_dim=take("key_head_dim", defaults.key_dim),
        value_dim=take("value_head_dim", defaults.value_dim),
        conv=take("conv_kernel_dim", defaults.conv),
    )
    if kind.value_heads % kind.key_heads:
        why = f"expected a multiple of linear_num_key_heads = {kind.key_heads}"
        fields.refuse("linear_num_value_heads", why)
    if kind.conv < 2:
        fields.refuse("linear_conv_kernel_dim", "expected 2 or more")
    return kind


def layers(
    fields: Fields, attends: Sequence[bool], attention: LayerKind, delta: LayerKind
) -> dict[str, Any]:
    """The kinds of the layers, by `layer_types` or, where there are none, by which attend."""
    default, count = [FULL if attending else LINEAR for attending in attends], len(attends)
    types = fields.take("layer_types", "texts", default)
    kinds = {FULL: attention, LINEAR: delta}
    if len(types) != count or not set(types) <= set(kinds):
        names = " and ".join(kinds)
        fields.refuse("layer_types", f"expected {names}, num_hidden_layers = {count} of them")
        types = default
    return {"pattern": shortest_pattern([kinds[kind] for kind in types])}


def _hybrid(fields: Fields, width: int | None = None) -> dict[str, Any]:
    """Qwen3.5, and what those with experts have in common with it."""
    config = sizes(fields, head_dim=256, width=width)
    turn = rope.read_turn(
        fields,
        config["head_dim"],
        config["max_positions"],
        partial=True,
        share=0.25,
        ignored=OF_IMAGES,
    )
    if config["activation"] != "silu":  # which acts on convolutions too
        fields.refuse("hidden_act", "layers that recur are built with silu only")
    interval, count = fields.take("full_attention_interval", "size", 4), config["num_layers"]
    attends = [(i + 1) % interval == 0 for i in range(count)]
    delta = delta_kind(fields, DeltaKind(16, 32, 128, 128))
    if not fields.take("attn_output_gate", "flag", True):
        fields.refuse("attn_output_gate", "only gated attention is built")
    fields.choice("output_gate_type", OUTPUT_GATES, "silu")
    return {
        **config,
        **attention_bias(fields),
        **layers(fields, attends, LayerKind(AttentionKind(rope=turn.rope)), LayerKind(delta)),
        "position_limit": turn.limit,
        "query_key_norm": "head",
        "norm_offset": 1.0,
        "attention_gate": True,
    }


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _hybrid,
    modules={**MODULES, **DELTA},
    fused=FUSED,
    # what states are held in, here always float32; layers that guess further tokens
    harmless=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    carried=("mtp.", "model.visual."),
)


def _gated_experts(
    fields: Fields, count: int, top_k: int, normalised: bool | Literal["always"] = True
) -> ExpertsKind:
    """Experts beside one that all tokens pass, with a gate."""
    width = fields.take("moe_intermediate_size", "size", 512)
    experts = read_experts(fields, "num_experts", count, width, top_k, normalised)
    shared = fields.take("shared_expert_intermediate_size", "size", 512)
    return experts._replace(shared=shared, shared_gate=True)


def _qwen3_5_moe(fields: Fields) -> dict[str, Any]:
    experts = _gated_experts(fields, 256, 8, "always")
    config = _hybrid(fields, experts.size)
    return with_feeds(config, [experts] * config["num_layers"])


QWEN3_5_MOE = QWEN3_5._replace(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read=_qwen3_5_moe,
    modules={
        **QWEN3_5.modules,
        "experts/router": "mlp.gate",
        "experts/shared_gate": "mlp.shared_expert_gate",
        **{f"experts/shared/{n}": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
    },
    experts=EXPERTS,
    fused_experts=FUSED_EXPERTS,
)


def _qwen3_next(fields: Fields) -> dict[str, Any]:
    experts = _gated_experts(fields, 512, 10)
    config = _hybrid(fields, 5632)
    return with_feeds(config, sparse_feeds(fields, config["num_layers"], experts))


_BY_HEAD = {
    "linear_attn.in_proj_qkvz": ("delta/query", "delta/key", "delta/value", "delta/gate"),
    "linear_attn.in_proj_ba": ("delta/rate", "delta/decay"),
}
QWEN3_NEXT = QWEN3_5_MOE._replace(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_qwen3_next,
    fused={**_BY_HEAD, "linear_attn.conv1d": FUSED["linear_attn.conv1d"]},
    by_head=(*_BY_HEAD,),
    carried=("mtp.",),
)


def _olmo_hybrid(fields: Fields) -> dict[str, Any]:
    """OLMo 3 without windows, whose other layers recur and norm what a branch reads."""
    config = read_olmo(fields, eps=1e-6, positions=65_536, pad=100_277)
    heads, hidden, count = (config[name] for name in ("num_heads", "hidden_size", "num_layers"))
    key_heads = fields.take("linear_num_key_heads", "size", heads)
    key_dim = fields.take("linear_key_head_dim", "size", max(1, int(0.75 * hidden / key_heads)))
    negative = fields.take("linear_allow_neg_eigval", "flag", True)
    sizes = DeltaKind(heads, heads, key_dim, 2 * key_dim, reach=1.0 + negative, eps=1e-5)
    if config["activation"] != "silu":
        fields.refuse("hidden_act", "expected silu, which convolutions have too")
    # As in published folders, which have the null in rope_parameters or beside them.
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"], nullable=True)
    attends = [i % 4 == 3 for i in range(count)]
    if True not in attends:
        attends[-1] = True
    attention = LayerKind(AttentionKind(rope=turn.rope))
    delta = LayerKind(delta_kind(fields, sizes), norms="before")
    kinds = layers(fields, attends, attention, delta)
    return {**config, **kinds, "position_limit": turn.limit}


CONVOLVED = ("query", "key", "value")
OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    _olmo_hybrid,
    modules={
        **MODULES,
        **AFTER,
        "attention_norm": "attention_layer_norm",
        "feed_forward_norm": "feedforward_layer_norm",
        "delta": "linear_attn",
        "delta/norm": "linear_attn.o_norm",
        **{f"delta/{name}_conv": f"linear_attn.{name[0]}_conv1d" for name in CONVOLVED},
        **{
            f"delta/{name}": f"linear_attn.{letter}_proj"
            for name, letter in zip(
                ("query", "key", "value", "gate", "rate", "decay", "out"), "qkvgbao", strict=True
            )
        },
    },
    # It renames a norm of attention as if it were that of a layer that recurs.
    aliases={"post_attention_layernorm": "feedforward_layer_norm"},
    # of the first weights
    harmless=tuple(
        f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
    ),
)
