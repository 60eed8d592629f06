"""What is changed of a config.json, one field at a time: the fields of every family and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpoints import FULL, LLAMA3, SLIDING, VOCAB, YARN

Change = tuple[str, dict[str, Any]]
"""The field that is changed, which a refusal must name, and the whole config.json."""

ABSENT: Any = object()
HEADS, LAYERS = 4, 3
LINEAR = "linear_attention"
ACTIVATIONS = ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "tanh", 3]
MULTIPLIERS = [1.0, 2, 0.3, -0.5, 0]

OWN: dict[str, list[Any]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "vocab_size": [VOCAB + 2, "61"],
    "rms_norm_eps": [1e-3, 1, 0, -1e-6, "1e-6"],
    "max_position_embeddings": [128, 8, 64.5],
    "tie_word_embeddings": [True, False, 1],
    "num_key_value_heads": [1, 2, HEADS, 3, 0],
    "num_attention_heads": [2, 8],
    "num_hidden_layers": [LAYERS + 1],
    "head_dim": [8, 12, 7, 0],
    **{name: [True, False, 1] for name in ("attention_bias", "attention_out_bias", "mlp_bias")},
    **{name: [0.0, 0.5] for name in ("attention_dropout", "resid_pdrop", "embd_pdrop")},
    "residual_dropout": [0.0, 0.5],
    "sliding_window": [3, 1, 100, 0],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 2, 9],
    "layer_types": [
        [FULL] * LAYERS,
        [SLIDING] * LAYERS,
        [FULL, SLIDING, FULL],
        [FULL],
        [FULL, FULL, "chunked_attention"],
        [],
        *([LINEAR] * LAYERS, [FULL, LINEAR, LINEAR], [FULL, FULL, LINEAR], [LINEAR, LINEAR, FULL]),
    ],
    "no_rope_layers": [[0, 1, 1], [1, 1, 1], [0, 0, 0], [True, False, True], [1, 1], [1] * 4, []],
    "no_rope_layer_interval": [1, 3, 0],
    "embedding_multiplier": MULTIPLIERS,
    "attention_multiplier": MULTIPLIERS,
    "residual_multiplier": MULTIPLIERS,
    "logits_scaling": MULTIPLIERS,
    "attn_logit_softcapping": [1.5, 0, -2.0],
    "final_logit_softcapping": [1.5, 0, -2.0],
    "query_pre_attn_scalar": [4, 25, 4.5, 0, -4],
    "use_bidirectional_attention": [True, False],
    "_sliding_window_pattern": [2],
    "original_max_position_embeddings": [16, 12],
    "use_cache": [False],
    "pretraining_tp": [2],
    "initializer_range": [0.5],
    "hidden_size": [48, 36, 0],
    "intermediate_size": [40, 0],
    "pad_token_id": [5, -1, 999, [0, 1]],
    "bos_token_id": [5, [1, 2], -1],
    "eos_token_id": [5, [1, 2], -1],
    "eod_token_id": [5, [1, 2], -1],
    "layer_norm_eps": [1e-3, 0],
    "logit_scale": MULTIPLIERS,
    "use_bias": [True, False, 1],
    "sliding_window_pattern": [2, 1, "LLG", 0],
    "clip_qkv": [0.1, 8.0],
    "swiglu_alpha": [1.0, 2, 0, -1.0],
    "swiglu_limit": [0.5, 3, 0, -1.0],
    # of experts
    "num_experts_per_tok": [1, 4, 6, 9, 0],
    "num_experts": [4, 12, 1, 0],
    "num_local_experts": [4, 12, 1, 0],
    "n_routed_experts": [4, 12, 1, 0],
    "norm_topk_prob": [True, False, 1],
    "output_router_logits": [True, False],
    "router_aux_loss_coef": [0.0, 0.5],
    "moe_intermediate_size": [16, 0],
    "shared_expert_intermediate_size": [16, 0],
    "decoder_sparse_step": [2, 3, 9, 0],
    "mlp_only_layers": [[], [0], [0, 1, 2, 3], [-1], [7]],
    "first_k_dense_replace": [0, 2, 9, -1],
    "n_group": [1, 2, 3, 8, 0],
    "topk_group": [1, 4, 5, 0],
    "n_shared_experts": [1, 3, 0],
    "routed_scaling_factor": [1, 0.3, 0, -1.0],
    "use_qk_norm": [True, False, 1],
    "num_nextn_predict_layers": [0, 3],
    # of latents
    "q_lora_rank": [8, 0],
    "kv_lora_rank": [8, 0],
    "qk_nope_head_dim": [8, 0],
    "qk_rope_head_dim": [4, 5, 0],
    "v_head_dim": [8, 0],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "rope_interleave": [True, False, 1],
    "mlp_layer_types": [
        ["sparse"] * LAYERS,
        ["dense"] * LAYERS,
        ["sparse", "dense", "dense"],
        ["dense"],
        ["dense", "dense", "another"],
    ],
    # of Granite 4.0
    "position_embedding_type": ["rope", "nope", 3],
    "shared_intermediate_size": [16, 0],
    # of layers that recur
    "linear_allow_neg_eigval": [True, False, 1],
    "linear_conv_kernel_dim": [2, 3, 6, 1, 0],
    "linear_key_head_dim": [16, 4, 0],
    "linear_value_head_dim": [8, 32, 0],
    "linear_num_key_heads": [1, 4, 3, 0],
    "linear_num_value_heads": [2, 8, 3, 0],
    "full_attention_interval": [1, 2, 9],
}
"""Field that transformers writes for a family -> other values. Null and absent come with them."""

ADDED: dict[str, list[Any]] = {
    "a_field_of_tomorrow": [3, "yes", [1], 0, None],
    "is_causal": [False, True, None],
    "attention_chunk_size": [5, None],
    "hidden_dropout": [0.5],
    "sliding_window_pattern": [2, 3],
    "rope_local_base_freq": [33.0],
    "rope_theta": [77.0, 0, None],
    "partial_rotary_factor": [0.5, 1.0, 0, None],
    "original_max_position_embeddings": [16, None],
    "quantization_config": [{"quant_method": "fp8"}],
    "auto_map": [{"AutoModelForCausalLM": "modeling.Mine"}],
    "dtype": ["bfloat16", "float64"],
    "torch_dtype": ["float16"],
    "architectures": [["Another"], None],
    "hidden_act": ["relu"],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "head_dim": [8],
    "sliding_window": [3],
    "use_sliding_window": [True],
    "layer_types": [[FULL] * LAYERS, [FULL, SLIDING, FULL]],
    "attn_logit_softcapping": [2.0],
    "final_logit_softcapping": [2.0],
    "query_pre_attn_scalar": [4],
    "embedding_multiplier": [2.0],
    "use_bidirectional_attention": [True, False],
    "scale_attn_weights": [False],
    "norm_topk_prob": [True],
    "full_attention_interval": [2],
    "attn_output_gate": [False, True],
    "mtp_num_hidden_layers": [1],
    "num_local_experts": [4],
    "num_experts": [4],
    "n_routed_experts": [4],
    "swiglu_limit": [1.0],
    "clip_qkv": [0.1],
    "use_qk_norm": [True],
    "n_shared_experts": [1],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[0]],
}
"""Field that a family's config.json may hold although transformers does not write it -> values."""

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": 32,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "default"},
    {"rope_theta": 50.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "rope_theta": 50.0, "factor": 0.5},
    {"rope_type": "linear", "rope_theta": 50.0},
    {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0},
    {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "mrope_section": [2, 3, 3]},
    {"rope_type": "default", "factor": 9.0},
    {"rope_type": None, "rope_theta": 50.0},
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": "su", **{k: v for k, v in LONGROPE.items() if k != "rope_type"}},
    LLAMA3,
    {**LLAMA3, "factor": 2},
    {**LLAMA3, "low_freq_factor": 3.0, "high_freq_factor": 2.0},
    {**LLAMA3, "original_max_position_embeddings": 40},
    {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"},
    YARN,
    {**YARN, "factor": 1.0},
    {**YARN, "factor": None},
    {**YARN, "attention_factor": 1.4},
    {**YARN, "beta_fast": 3, "beta_slow": 0.5},
    {**YARN, "beta_fast": None},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.5},
    {**YARN, "mscale": 0.7},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0},
    {**YARN, "beta_fast": 0, "beta_slow": 0.5},
    {**YARN, "truncate": False},
    {**YARN, "truncate": None},
    {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
    LONGROPE,
    {**LONGROPE, "attention_factor": 1.3},
    {**LONGROPE, "factor": 4.0},
    {**LONGROPE, "short_factor": [1.5]},
    {k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"},
]


GROWING = ("llama_4_scaling_beta", "original_max_position_embeddings")
FLAT = {"rope_type": "default", "llama_4_scaling_beta": 0.0}
"""Of Ministral 3, without which it is refused; and not growing."""


def config_changes(fields: dict[str, Any]) -> Iterator[Change]:
    """All changes of one family's config.json."""
    for name, values in OWN.items():
        if name in fields:
            for value in (*values, None, ABSENT):
                yield name, _with(fields, **{name: value})
    for name, values in ADDED.items():
        if name not in fields:
            for value in values:
                yield name, _with(fields, **{name: value})
    yield from rope_changes(fields)


def rope_changes(fields: dict[str, Any]) -> Iterator[Change]:
    """Changes of the rotary positions, as transformers 5 and 4 name them."""
    now = fields["rope_parameters"]
    plain = _with(fields, rope_parameters=ABSENT)
    yield "rope_parameters", plain
    yield "rope_parameters", _with(fields, rope_parameters=None)
    growing = {name: now[name] for name in GROWING if "llama_4_scaling_beta" in now}
    for rope in ROPES if not growing else [{**growing, **rope} for rope in [*ROPES, FLAT]]:
        if FULL in now:
            for kind in (FULL, SLIDING):
                yield "rope_parameters", _with(fields, rope_parameters={**now, kind: rope})
        yield "rope_parameters", _with(fields, rope_parameters=rope)
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        theta = rope.get("rope_theta") or 70.0
        yield "rope_scaling", _with(plain, rope_theta=theta, rope_scaling=scaling)
    yield "rope_scaling", _with(plain, rope_theta=70.0, rope_scaling=None)
    yield "rope_scaling", _with(fields, rope_scaling={"rope_type": "linear", "factor": 2.0})
    if FULL in now:
        yield "rope_parameters", _with(fields, rope_parameters={FULL: now[FULL]})
        yield "rope_parameters", _with(fields, rope_parameters={**now, SLIDING: None})


def _with(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (fields | changes).items() if value is not ABSENT}
