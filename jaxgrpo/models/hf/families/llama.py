"""Llama 3.x (and SmolLM2, which is one), and the families that differ from it by a few numbers."""

from __future__ import annotations

from typing import Any

from jaxgrpo.models.api import AttentionKind, LayerKind
from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import (
    MODULES,
    Family,
    attention_bias,
    layer_types,
    shortest_pattern,
    sizes,
    uniform,
)
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING


def _llama(fields: Fields) -> dict[str, Any]:
    config = {**sizes(fields, positions=2048, as_many_kv=True), **attention_bias(fields)}
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    return {**config, "feed_forward_bias": fields.take("mlp_bias", "flag", False), **uniform(turn)}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _llama,
    harmless=("is_llama_config",),  # SmolLM2
)


def read_granite(fields: Fields) -> dict[str, Any]:
    """Llama with a number each for embeddings, attention, branches and logits."""
    return {
        **_llama(fields),
        "embedding_scale": fields.take("embedding_multiplier", "number", 1.0),
        "exact_embedding_scale": True,
        "query_scale": fields.take("attention_multiplier", "number", 1.0),
        "residual_scale": fields.take("residual_multiplier", "number", 1.0),
        "logit_scale": 1 / fields.take("logits_scaling", "positive", 1.0),
    }


GRANITE = Family("granite", "GraniteForCausalLM", read_granite)


def _granite4(fields: Fields) -> dict[str, Any]:
    """Granite 4.0 without recurrent layers and experts (micro, 1B, 350M), with rope or without."""
    config, size = read_granite(fields), fields.take("shared_intermediate_size", "size", 1024)
    count = config["num_layers"]
    types = fields.take("layer_types", "texts", ["mamba"] * count)
    if len(types) != count or not {*types} <= {FULL, "attention"}:
        number = f"num_hidden_layers = {count} of them"
        fields.refuse("layer_types", f"expected {FULL}, {number}: no layers of Mamba-2 yet")
    if fields.take("num_local_experts", "count", 8):
        fields.refuse("num_local_experts", "expected 0: experts beside a dense part are not built")
    if fields.take("position_embedding_type", "text", "none") != "rope":
        config |= {"pattern": (LayerKind(AttentionKind(rope=None)),), "position_limit": None}
    return {**config, "intermediate_size": size, "feed_forward_bias": False}


GRANITE4 = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _granite4,
    modules={**MODULES, "feed_forward/down": "shared_mlp.output_linear"},
    fused={"shared_mlp.input_linear": ("feed_forward/gate", "feed_forward/up")},
    # of layers that it does not have, and read by no code of transformers
    harmless=(
        *(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv")),
        *(f"mamba_{name}" for name in ("expand", "chunk_size", "conv_bias", "proj_bias")),
        *("time_step_limit", "num_experts_per_tok", "router_aux_loss_coef"),
        *("normalization_function", "init_method", "attention_head_dim"),
    ),
)


def _seed_oss(fields: Fields) -> dict[str, Any]:
    """Llama with heads of 128, and biases of queries, keys and values only."""
    config = sizes(fields, head_dim=128, positions=524_288, pad=1)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    return {
        **config,
        "attention_bias": fields.take("attention_bias", "flag", True),
        "attention_out_bias": fields.take("attention_out_bias", "flag", False),
        "feed_forward_bias": fields.take("mlp_bias", "flag", False),
        **uniform(turn),
    }


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", _seed_oss)


def _smollm3(fields: Fields) -> dict[str, Any]:
    """Llama whose every fourth layer knows no positions; these may have a window."""
    config = {**sizes(fields, tied=True, pad=128_004), **attention_bias(fields)}
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"], theta=2e6)
    count = config["num_layers"]
    interval = fields.take("no_rope_layer_interval", "size", 4)
    turned = [int((i + 1) % interval != 0) for i in range(count)]
    turned = fields.take("no_rope_layers", "flags", turned)
    if len(turned) != count:
        fields.refuse(
            "no_rope_layers", f"expected a 0 or 1 for each of num_hidden_layers = {count}"
        )
        turned = [1] * count
    window = fields.nullable("sliding_window", "size", None)
    window = window if fields.take("use_sliding_window", "flag", False) else None

    def default(i: int) -> str:
        return SLIDING if window is not None and not turned[i] else FULL

    types = layer_types(fields, count, default, window)
    kinds = [
        LayerKind(AttentionKind(window if kind == SLIDING else None, turn.rope if turns else None))
        for kind, turns in zip(types, turned, strict=True)
    ]
    return {
        **config,
        "feed_forward_bias": fields.take("mlp_bias", "flag", False),
        "pattern": shortest_pattern(kinds),
        "position_limit": turn.limit,
    }


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _smollm3, harmless=("max_window_layers",))


def _arcee(fields: Fields) -> dict[str, Any]:
    """Llama without a gate in its feed-forward blocks."""
    config = sizes(fields, eps=1e-5, positions=4096, act="relu2", as_many_kv=True)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    bias = {"feed_forward_bias": fields.take("mlp_bias", "flag", False)}
    return {**config, **attention_bias(fields), **bias, **uniform(turn), "gated": False}


ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    _arcee,
    modules={name: text for name, text in MODULES.items() if name != "feed_forward/gate"},
)


def _hunyuan(fields: Fields) -> dict[str, Any]:
    """Llama whose queries and keys are normed after they are turned, and theta may be stretched."""
    config = sizes(fields, eps=1e-5, positions=2048, as_many_kv=True, pad=0)
    turn = rope.read_turn(
        fields, config["head_dim"], config["max_positions"], types=rope.WITH_ALPHA
    )
    return {**config, **attention_bias(fields), **uniform(turn), "query_key_norm": "turned"}


HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    _hunyuan,
    modules={
        **MODULES,
        "attention/query_norm": "self_attn.query_layernorm",
        "attention/key_norm": "self_attn.key_layernorm",
    },
    # Of published folders, and read by no code of transformers.
    harmless=(
        *("use_qk_norm", "cla_share_factor", "org_vocab_size", "norm_type", "use_rotary_pos_emb"),
        *("attention_head_dim", "pad_id", "mask_init_id", "dense_list", "pool_type"),
    ),
)
