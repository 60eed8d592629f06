"""Runs that are planned and not run: tiny models, as tables of a config."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

from jaxgrpo.config import files
from jaxgrpo.config.files import Config
from jaxgrpo.planning import programs, topologies
from jaxgrpo.planning.programs import Run

NEEDS_CUDA = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_{name}_plugin") for name in ("cuda12", "cuda13")),
    reason="no compiler for GPUs here: jaxgrpo[plan] brings jax_cuda12_plugin",
)
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1187 * 8,  # an odd number of blocks, as Qwen3 has
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA: dict[str, Any] = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": False,
}


def tables(**changes: Any) -> dict[str, Any]:
    """A config as tables; changes are tables, or dotted keys: tables(**{"train.steps": 5})."""
    values: dict[str, Any] = {
        "model": {"path": "none/here", "dtype": "bfloat16", "config": QWEN3},
        "mesh": {"fsdp": 2, "tensor": 2},
        "data": {"path": "task:arithmetic:train"},
        "rewards": [{"use": "arithmetic"}],
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 4,
            "max_prompt_tokens": 64,
            "max_completion_tokens": 128,
            "segment_tokens": 16,
        },
        "train": {"steps": 3},
        "run": {"dir": "runs/planned"},
    }
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        (values.setdefault(table, {}) if table else values)[name] = value
    return values


def config(**changes: Any) -> Config:
    return files.from_dict(tables(**changes))


def run(devices: Sequence[Any] = (), topology: str = "v5e:2x2", **changes: Any) -> Run:
    """The run of `config` on a topology, or on devices that are here."""
    run_config = config(**changes)
    if not devices:
        return programs.build_run(run_config, topologies.topology(topology).devices)
    return programs.build_run(run_config, devices)
