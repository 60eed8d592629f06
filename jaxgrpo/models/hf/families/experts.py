"""Families with experts: Qwen3-MoE, OLMoE, Granite-MoE, GLM-4.5 and GPT-OSS."""

from __future__ import annotations

from typing import Any, Literal

from jaxgrpo.models.api import DenseKind, ExpertsKind
from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import (
    EXPERTS,
    FUSED_EXPERTS,
    MODULES,
    Family,
    attention_bias,
    layered,
    refuse_without_rope,
    sizes,
    uniform,
    with_feeds,
)
from jaxgrpo.models.hf.families.llama import read_granite
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING

_MODULES = {**MODULES, "experts/router": "mlp.gate"}
SHARED_MODULES = _MODULES | {
    f"experts/shared/{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
}


def read_experts(
    fields: Fields,
    number: str,
    count: int,
    width: int | None,
    top_k: int,
    normalised: bool | Literal["always"] = False,
) -> ExpertsKind:
    """The experts of a layer.

    Args:
      number: the field that says how many, `count` without it.
      width: of each.
      top_k, normalised: what transformers assumes without num_experts_per_tok, norm_topk_prob;
        "always": it normalises whatever that field says.
    """
    # What transformers returns and adds to a loss of its own, and no weight or logit.
    fields.take("output_router_logits", "flag", False)
    fields.take("router_aux_loss_coef", "number", 0.001)
    top_k = fields.take("num_experts_per_tok", "size", top_k)
    total = fields.take(number, "experts", count)
    if top_k > total:
        fields.refuse("num_experts_per_tok", f"expected at most {total}, the experts of {number}")
    stored = fields.nullable("norm_topk_prob", "flag", bool(normalised))  # null: they do not
    return ExpertsKind(total, min(top_k, total), width or 1, stored or normalised == "always")


def sparse_feeds(fields: Fields, count: int, experts: ExpertsKind) -> list[DenseKind | ExpertsKind]:
    """The experts in every layer, or in those that two fields say."""
    step = fields.take("decoder_sparse_step", "size", 1)
    dense = fields.take("mlp_only_layers", "counts", [])
    return [DenseKind() if i in dense or (i + 1) % step else experts for i in range(count)]


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    """Qwen3 with experts."""
    config = sizes(fields)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    uses_window = fields.take("use_sliding_window", "flag", False)
    window = fields.nullable("sliding_window", "size", 4096)
    window = window if uses_window else None
    number = "num_local_experts" if "num_local_experts" in fields.content else "num_experts"
    width = fields.take("moe_intermediate_size", "size", 768)
    experts = read_experts(fields, number, 128, width, top_k=8)
    is_twice = number != "num_experts" and fields.content.get("num_experts") is not None
    if is_twice and fields.take("num_experts", "size", experts.number) != experts.number:
        fields.refuse("num_experts", f"expected num_local_experts = {experts.number}, or none")
    config |= {**attention_bias(fields), **uniform(turn, window), "query_key_norm": "head"}
    return with_feeds(config, sparse_feeds(fields, config["num_layers"], experts))


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _qwen3_moe,
    modules=_MODULES,
    experts=EXPERTS,
    fused_experts=FUSED_EXPERTS,
    # Of published folders, as Qwen3-Coder's, and read by no code of transformers.
    harmless=("max_window_layers", "use_qk_norm"),
    older_names={"num_local_experts": "num_experts"},
)


def _olmoe(fields: Fields) -> dict[str, Any]:
    """Experts in every layer; queries and keys are normed over all heads at once."""
    config = sizes(fields, eps=1e-5, positions=4096, as_many_kv=True, pad=1)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    experts = read_experts(fields, "num_experts", 64, config["intermediate_size"], top_k=8)
    config |= {**attention_bias(fields), **uniform(turn), "query_key_norm": "whole"}
    return with_feeds(config, [experts] * config["num_layers"])


OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    _olmoe,
    modules=_MODULES,
    experts=EXPERTS,
    fused_experts=FUSED_EXPERTS,
)


def _granite_moe(fields: Fields) -> dict[str, Any]:
    """Granite with experts in every layer; in files those of a layer are always one tensor."""
    config = read_granite(fields)
    width = config["intermediate_size"]
    experts = read_experts(fields, "num_local_experts", 8, width, top_k=2)
    # transformers takes a softmax over the token's own experts, which is that over all, normalised.
    experts = experts._replace(normalised=True)
    return with_feeds({**config, "fused_experts": True}, [experts] * config["num_layers"])


GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _granite_moe,
    modules={**MODULES, "experts/router": "block_sparse_moe.router.layer"},
    experts={ours: hf.replace("mlp", "block_sparse_moe") for ours, hf in EXPERTS.items()},
    fused_experts={
        f"block_sparse_moe.{name}_linear.weight": maps
        for name, maps in zip(("input", "output"), FUSED_EXPERTS.values(), strict=True)
    },
)


def read_grouped(
    fields: Fields,
    *,
    count: int = 128,
    width: int = 1408,
    top_k: int = 8,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    shared: int = 1,
) -> ExpertsKind:
    """Experts with a sigmoid each, in groups, beside some that all tokens pass, as one.

    Args: what transformers assumes without the fields.
    """
    width = fields.take("moe_intermediate_size", "size", width)
    experts = read_experts(fields, "n_routed_experts", count, width, top_k, normalised=True)
    groups = fields.take("n_group", "size", groups)
    top_groups = fields.take("topk_group", "size", top_groups)
    each, odd = divmod(experts.number, groups)
    if odd or each < 2 <= groups or top_groups > groups or experts.top_k > each * top_groups:
        why = f"n_routed_experts = {experts.number} must divide into groups of 2 or more, and "
        few = f"topk_group = {top_groups} of them hold num_experts_per_tok = {experts.top_k}"
        fields.refuse("n_group", why + few)
    return experts._replace(
        scores="sigmoid",
        scale=fields.take("routed_scaling_factor", "positive", scale),
        groups=groups,
        top_groups=top_groups,
        shared=width * fields.take("n_shared_experts", "size", shared),
    )


def _glm4_moe(fields: Fields) -> dict[str, Any]:
    """Dense layers first; a sigmoid for each expert, groups of them, and one that all pass."""
    config = sizes(fields, eps=1e-5, positions=131_072)
    turn = rope.read_turn(
        fields, config["head_dim"], config["max_positions"], partial=True, share=0.5
    )
    experts = read_grouped(fields)
    dense, count = fields.take("first_k_dense_replace", "count", 1), config["num_layers"]
    config |= {
        **uniform(turn),
        "attention_bias": fields.take("attention_bias", "flag", False),
        "query_key_norm": "head" if fields.take("use_qk_norm", "flag", False) else "none",
    }
    return with_feeds(config, [DenseKind() if i < dense else experts for i in range(count)])


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _glm4_moe,
    modules=SHARED_MODULES,
    experts=EXPERTS,
    fused_experts=FUSED_EXPERTS,
    harmless=("num_nextn_predict_layers", "num_mtp_layers"),  # of layers that nothing reads
)


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    """Every second layer has a window; heads have sinks, experts biases and a clamped SwiGLU."""
    config = sizes(fields, head_dim=64, eps=1e-5, positions=131_072)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"], theta=150_000.0)
    refuse_without_rope(fields)
    window = fields.nullable("sliding_window", "size", 128)
    turns = {FULL: turn, SLIDING: turn}

    def default(i: int) -> str:
        return FULL if i % 2 or window is None else SLIDING

    config |= {
        **attention_bias(fields, default=True),
        **layered(fields, config["num_layers"], turns, default, window),
    }
    pattern = [kind._replace(mixer=kind.mixer._replace(sinks=True)) for kind in config["pattern"]]
    fields.check_quantised({"quant_method": "mxfp4"}, "mxfp4")
    width = config["intermediate_size"]
    experts = read_experts(fields, "num_local_experts", 128, width, top_k=4, normalised="always")
    alpha = fields.take("swiglu_alpha", "positive", 1.702)
    clamp = alpha, fields.take("swiglu_limit", "positive", 7.0)
    experts = experts._replace(bias=True, clamp=clamp)
    return with_feeds({**config, "pattern": (*pattern,)}, [experts] * config["num_layers"])


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _gpt_oss,
    modules={**MODULES, "experts/router": "mlp.router", "attention": "self_attn"},
    experts=EXPERTS,
    fused_experts=FUSED_EXPERTS,
    interleaves_experts=True,
    harmless=("initial_context_length", "experts_per_token"),  # of the hub's; other fields count
)
