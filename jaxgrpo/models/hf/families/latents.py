"""Families that attend by latents: DeepSeek-V2 and V3 (Kimi-K2, Moonlight) and GLM-4.7-Flash."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxgrpo.models.api import AttentionKind, DenseKind, ExpertsKind, Latent, LayerKind
from jaxgrpo.models.hf import fp8, rope
from jaxgrpo.models.hf.families.base import (
    EXPERTS,
    FUSED_EXPERTS,
    Family,
    attention_bias,
    sizes,
    with_feeds,
)
from jaxgrpo.models.hf.families.experts import SHARED_MODULES, read_grouped
from jaxgrpo.models.hf.fields import Fields

DENSE, SPARSE = "dense", "sparse"
_BY_HEAD = {
    "self_attn.q_proj": ("attention/query", "attention/turned_query"),
    "self_attn.q_b_proj": ("attention/query_up", "attention/turned_query_up"),
    "self_attn.kv_b_proj": ("attention/key", "attention/value"),
}


def _by_latents(
    fields: Fields,
    *,
    query: int,
    plain: int = 128,
    value: int = 128,
    positions: int,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """What the families have in common, without their feed-forward parts.

    Args: what transformers assumes without the fields.
    """
    latent = Latent(
        size=fields.take("kv_lora_rank", "size", 512),
        plain=fields.take("qk_nope_head_dim", "size", plain),
        turned=fields.take("qk_rope_head_dim", "size", 64),
        value=fields.take("v_head_dim", "size", value),
        query=fields.nullable("q_lora_rank", "size", query),
    )
    head_dim = latent.plain + latent.turned
    config = sizes(fields, head_dim=head_dim, eps=eps, positions=positions, as_many_kv=True)
    if fields.content.get("head_dim") not in (None, latent.turned):
        why = f"expected qk_rope_head_dim = {latent.turned}, as transformers has it"
        fields.refuse("head_dim", why)
    if config["num_kv_heads"] != config["num_heads"]:
        why = f"expected num_attention_heads = {config['num_heads']}: each has keys"
        fields.refuse("num_key_value_heads", why)
    turn = rope.read_turn(fields, latent.turned, config["max_positions"])
    fields.check_quantised(fp8.SETTINGS, f"fp8 in blocks of {fp8.BLOCK} x {fp8.BLOCK}")
    layer = LayerKind(AttentionKind(rope=turn.rope, latent=latent))
    table = {} if fields.problems else rope.tables(fields.content).get("", {})
    temperature = _temperature(table)
    if temperature > float(np.finfo(np.float32).max):
        name = "rope_scaling" if fields.content.get("rope_scaling") else "rope_parameters"
        why = "float32 cannot hold the factor of scores that mscale_all_dim gives: take a usual one"
        fields.refuse(name, why)
    return {
        **config,
        **attention_bias(fields),
        "pattern": (layer,),
        "position_limit": turn.limit,
        "head_dim": head_dim,
        "query_scale": head_dim**-0.5 * temperature,
    }


def _temperature(parameters: dict[str, Any]) -> float:
    """The factor of scores that yarn has here beside that of turned dimensions."""
    factor, mscale = (parameters.get(name) or 0 for name in ("factor", "mscale_all_dim"))
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind != "yarn" or not mscale or factor <= 1:
        return 1.0
    root = 0.1 * mscale * math.log(factor) + 1
    return root * root


def _expect(fields: Fields, name: str, kind: str, *values: Any) -> Any:
    """A field of which one value, or some, are built; the first is assumed."""
    value = fields.take(name, kind, values[0])
    if value not in values:
        fields.refuse(name, f"only {' and '.join(map(repr, values))} built")
    return value


def _expect_pairs(fields: Fields) -> None:
    """Refuses heads that turn halves, as null says too."""
    if not fields.nullable("rope_interleave", "flag", True):
        fields.refuse("rope_interleave", "only True built")


def _deepseek_v3(fields: Fields) -> dict[str, Any]:
    """Dense layers first, then experts with a sigmoid each, in groups."""
    config = _by_latents(fields, query=1536, positions=4096)
    _expect_pairs(fields)
    _expect(fields, "scoring_func", "text", "sigmoid")
    _expect(fields, "topk_method", "text", "noaux_tc")
    experts = read_grouped(fields, count=256, width=2048, groups=8, top_groups=4, scale=2.5)
    return _with_dense_first(fields, config, experts, 3)


def _with_dense_first(
    fields: Fields, config: dict[str, Any], experts: ExpertsKind, dense: int
) -> dict[str, Any]:
    _expect(fields, "moe_layer_freq", "size", 1)
    dense = fields.take("first_k_dense_replace", "count", dense)
    return with_feeds(
        config, [experts if i >= dense else DenseKind() for i in range(config["num_layers"])]
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _deepseek_v3,
    modules={
        **SHARED_MODULES,
        "attention/query_down": "self_attn.q_a_proj",
        "attention/query_norm": "self_attn.q_a_layernorm",
        "attention/latent_norm": "self_attn.kv_a_layernorm",
    },
    fused={
        **_BY_HEAD,
        "self_attn.kv_a_proj_with_mqa": ("attention/latent", "attention/turned_key"),
    },
    by_head=(*_BY_HEAD,),
    experts=EXPERTS,
    fused_experts=FUSED_EXPERTS,
    # The sum of two others; layers that guess further tokens; of training and of other programs
    harmless=(
        *("qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"),
        *("aux_loss_alpha", "seq_aux", "ep_size"),
    ),
    in_pairs=True,
)


def _deepseek_v2(fields: Fields) -> dict[str, Any]:
    """As V3, with one softmax over the experts; a token may pass those of the best groups."""
    config = _by_latents(fields, query=1536, positions=2048)
    _expect(fields, "scoring_func", "text", "softmax")
    method = _expect(fields, "topk_method", "text", "greedy", "group_limited_greedy")
    experts = read_grouped(fields, count=64, width=1407, top_k=2, shared=2)
    experts = experts._replace(scores="softmax", normalised=False)
    if method == "greedy":
        experts = experts._replace(groups=1, top_groups=1)
    config["feed_forward_bias"] = fields.take("mlp_bias", "flag", False)
    return _with_dense_first(fields, config, experts, 0)


DEEPSEEK_V2 = DEEPSEEK_V3._replace(
    model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", read=_deepseek_v2
)


def _glm4_moe_lite(fields: Fields) -> dict[str, Any]:
    """As V3, with a list of which layers have experts."""
    config = _by_latents(fields, query=768, plain=192, value=256, positions=202_752, eps=1e-5)
    _expect_pairs(fields)
    experts = read_grouped(fields, count=64, width=1536, top_k=4, scale=1.8)
    count = config["num_layers"]
    types = fields.take("mlp_layer_types", "texts", [DENSE] + [SPARSE] * (count - 1))
    if len(types) != count or not {*types} <= {DENSE, SPARSE}:
        number = f"num_hidden_layers = {count} of them"
        fields.refuse("mlp_layer_types", f"expected {DENSE} and {SPARSE}, {number}")
        types = [SPARSE] * count
    dense = types.index(SPARSE) if SPARSE in types else count
    _expect(fields, "first_k_dense_replace", "count", dense)
    _expect(fields, "topk_method", "text", "noaux_tc")
    return with_feeds(config, [experts if kind == SPARSE else DenseKind() for kind in types])


GLM4_MOE_LITE = DEEPSEEK_V3._replace(
    model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", read=_glm4_moe_lite
)
