"""Small checkpoints of transformers' models in PyTorch, one family after the other, to compare."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxgrpo

VOCAB, LENGTH = 61, 15  # three windows of 5
WINDOW = 5
FULL, SLIDING = "full_attention", "sliding_attention"

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / heads
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

GROWING = {
    **YARN,
    "factor": 2.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.5,
    "max_position_embeddings": 64,
}

HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
GATED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}

GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
"""Experts in groups, beside some that all tokens pass."""
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    **GROUPED,
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
}

RICH: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **LATENTS,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "mlp_bias": True,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {**LATENTS, "first_k_dense_replace": 1, "attention_bias": True},
    "glm4_moe_lite": {
        **LATENTS,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
    },
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "rope_parameters": YARN,
    },
    "qwen3": {"attention_bias": True, "tie_word_embeddings": True},
    "llama": {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "smollm3": {
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
    },
    "granitemoehybrid": {
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "layer_types": [FULL] * 3,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
        "attention_bias": True,
        "mamba_n_heads": 4,
    },
    "granitemoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
        "attention_bias": True,
    },
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": WINDOW, "hidden_act": "gelu"},
    "ministral": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]},
    "phi3": {
        "hidden_size": 64,  # it has no head_dim of its own
        "sliding_window": WINDOW,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        },
        "original_max_position_embeddings": 32,
    },
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 9,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, FULL],
        "query_pre_attn_scalar": 9,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
    },
    "olmo_hybrid": {
        **{name: size for name, size in HYBRID.items() if name.startswith("linear_")},
        # transformers cuts convolutions into three equal parts to save them, whatever their sizes.
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", FULL, "linear_attention"],
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **GATED_EXPERTS},
    "qwen3_next": {
        **HYBRID,
        **GATED_EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", FULL, "linear_attention", "linear_attention"],
        "mlp_only_layers": [2],
        "norm_topk_prob": False,
        "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        **GROUPED,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "swiglu_limit": 1.0,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
    "olmo2": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
    },
    "olmo3": {
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, FULL],
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 300.0}, FULL: YARN},
    },
    "exaone4": {
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_parameters": LLAMA3,
        "sliding_window_pattern": "LG",
    },
    "ministral3": {"sliding_window": WINDOW, "rope_parameters": GROWING},
    "arcee": {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN},
    "hunyuan_v1_dense": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 50.0,
            "alpha": 9.0,
            "factor": 1.0,
        },
    },
    "glm4": {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}},
    "ernie4_5": {"use_bias": True, "rope_parameters": LLAMA3},
    "cohere2": {
        "hidden_size": 64,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL, SLIDING],
        "logit_scale": 0.5,  # without biases: those of keys in layers without rope do nothing
    },
}
"""Family -> fields that leave what its smallest model would compute."""


def transformers_config(family: str, **changes: Any) -> Any:
    """The transformers config of a family's small model, with what makes the family different."""
    from transformers import CONFIG_MAPPING

    fields = {**SIZES, **RICH[family], **changes}
    without = (
        "phi3",
        "olmo2",
        "olmo3",
        "olmoe",
        "olmo_hybrid",
        "cohere2",
    )  # a head_dim of their own
    if family in without or "kv_lora_rank" in fields:
        fields.pop("head_dim")
    return CONFIG_MAPPING[family](**fields)


def saved(config: Any, folder: Path, seed: int = 0, **options: Any) -> Any:
    """A model of transformers with random weights, biases and norms, written to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        corrections = [b for b in model.named_buffers() if b[0].endswith("correction_bias")]
        for name, weight in [*model.named_parameters(), *corrections]:
            spread = 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            noise = spread * torch.randn(weight.shape)
            weight.copy_(weight + noise if weight.ndim == 1 else 1.5 * noise)
            if name.endswith("A_log"):  # states that remember some ten tokens, and not one
                weight.copy_(noise - 3)
    pad = getattr(config, "pad_token_id", None)
    if (pad or 0) < 0:  # most releases of transformers 5 refuse to save it
        model.generation_config.pad_token_id = None
    model.save_pretrained(folder, **options)
    return model


def batch(seed: int = 0, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask [4, length]: whole, short, padded left, and padded left to one token."""
    tokens = np.random.default_rng(seed).integers(3, VOCAB, (4, length))
    mask = np.ones_like(tokens)
    mask[1, length - 4 :] = 0
    mask[2, :6] = 0
    mask[3, : length - 1] = 0
    return tokens * mask, mask


def transformers_logits(model: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[B, T, V] of transformers, with positions that count the real tokens."""
    import torch

    position = np.maximum(mask.cumsum(1) - 1, 0)
    with torch.no_grad():
        inputs = [torch.as_tensor(array) for array in (tokens, mask, position)]
        options = {"attention_mask": inputs[1], "position_ids": inputs[2]}
        # A cache cannot say how long it is where no layer attends.
        return model(inputs[0], **options, use_cache=False).logits.numpy()


def distance(
    model: Any,
    folder: Path,
    logits: np.ndarray,
    tokens: np.ndarray,
    mask: np.ndarray,
    near: float,
    adapter: Path | None = None,
) -> float:
    """The largest distance of our logits, at real tokens, from those of transformers in float32.

    Some configs, as of attention that is all but one-hot, turn float32 by more than `near`,
    transformers' own too. There, where ours are less than 5 times as far from those of transformers
    in float64 as `near`, or as its own float32, it is 1,000 times that of our float64: a formula
    that differed would differ there.

    Args: the folder of the model, and of its adapter.
    """
    real = mask.astype(bool)
    theirs = transformers_logits(model, tokens, mask)[real]
    apart = np.abs(logits[real] - theirs).max()
    if apart <= near:
        return float(apart)
    exact = exact_transformers_logits(folder, tokens, mask, adapter)[real]
    apart, rounding = (np.abs(values - exact).max() for values in (logits[real], theirs))
    if apart <= 5 * max(near, rounding):
        apart = 1000 * np.abs(exact_logits(folder, tokens, mask, adapter)[real] - exact).max()
    return float(apart)


def exact_logits(
    folder: Path, tokens: np.ndarray, mask: np.ndarray, adapter: Path | None = None
) -> np.ndarray:
    """Our logits [B, T, V] in float64."""
    with jax.enable_x64(True):
        model, params = jaxgrpo.load_model(folder, "float64", adapter=adapter)
        return np.asarray(jaxgrpo.logits(model, params, tokens, mask))


def exact_transformers_logits(
    folder: Path, tokens: np.ndarray, mask: np.ndarray, adapter: Path | None = None
) -> np.ndarray:
    """Those of transformers in float64, each row by itself, so that no padding counts; 0 there."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with _float32_is_float64():
        model = type(loaded)(loaded.config).double()  # with the rotations of float64
        model.load_state_dict(loaded.state_dict())
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(adapter)).double()
        model.config._experts_implementation = "eager"  # PyTorch has no grouped product in float64
        logits = [
            transformers_logits(model.eval(), row[None, at], row_mask[None, at])[0]
            for row, row_mask, at in zip(tokens, mask, mask.astype(bool), strict=True)
        ]
    exact = np.zeros((*tokens.shape, logits[0].shape[-1]))
    exact[mask.astype(bool)] = np.concatenate(logits)
    return exact


@contextlib.contextmanager
def _float32_is_float64() -> Iterator[None]:
    """Where transformers asks PyTorch for float32 (norms, rotations, routers, states), it gets
    float64."""
    import torch

    def widened(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
            return function(*map(wide, args), **{n: wide(v) for n, v in options.items()})

        return call

    sources = {
        torch.Tensor: ("to", "type", "sum", "cumsum", "softmax"),
        torch.nn.functional: ("softmax",),
        torch: ("zeros", "ones", "arange", "tensor", "full"),
    }
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in [(owner, name) for owner, names in sources.items() for name in names]:
            patched.setattr(owner, name, widened(getattr(owner, name)))
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def config_fields(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a family's rich small model, as transformers writes it."""
    config = transformers_config(family, **changes)
    names = {
        "gemma3_text": "Gemma3ForCausalLM",
        "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }
    architecture = names.get(family)
    config.architectures = [architecture or type(config).__name__.replace("Config", "ForCausalLM")]
    return json.loads(config.to_json_string())


def redrawn(fields: dict[str, Any], folder: Path, seed: int = 0) -> Any:
    """A model folder with just this config.json and random weights, as transformers reads it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text = json.dumps(fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    saved(AutoConfig.from_pretrained(folder), folder, seed)
    (folder / "config.json").write_text(text)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def peft_model(theirs: Any, folder: Path, spread: float = 0.25, **options: Any) -> Any:
    """The model with random adapters, which are written to a folder.

    Args:
      spread: deviation of their weights.
    """
    import torch
    from peft import LoraConfig as Settings
    from peft import get_peft_model

    wrapped = get_peft_model(
        theirs, Settings(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options)
    ).eval()
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.copy_(spread * torch.randn(weight.shape))
    wrapped.save_pretrained(str(folder))
    return wrapped
