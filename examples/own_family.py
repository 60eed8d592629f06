"""A family of models that is not built in: VaultGemma, google/vaultgemma-1b on the hub.

model.family = "examples/own_family.py:family"

Gemma 2 without the norms behind its branches: norms multiply by 1 + weight, embeddings are scaled,
scores and logits are soft-capped, and every second layer has a window. Compared with
modeling_vaultgemma.py of transformers by tests/models/test_own_family.py.
"""

from __future__ import annotations

from typing import Any

from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import MODULES, Family, attention_bias, layered, sizes
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING


def read(fields: Fields) -> dict[str, Any]:
    """The fields of a ModelConfig, from those of a config.json."""
    if "layer_types" not in fields.content:
        fields.problems.append("layer_types: missing; save the folder with transformers again")
    # What transformers assumes where a folder says nothing.
    assumed: dict[str, Any] = {"head_dim": 256, "tied": True, "positions": 8192, "pad": 0}
    assumed |= {"activation": "hidden_activation", "act": "gelu_pytorch_tanh"}
    config = sizes(fields, **assumed)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    window = fields.nullable("sliding_window", "size", 4096)
    cap = fields.nullable("attn_logit_softcapping", "positive", 50.0)
    turns = {SLIDING: turn, FULL: turn}
    return {
        **config,
        **attention_bias(fields),
        **layered(fields, config["num_layers"], turns, lambda _: FULL, window, cap),
        "norm_offset": 1.0,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "query_scale": fields.take("query_pre_attn_scalar", "positive", 256) ** -0.5,
        "logit_soft_cap": fields.nullable("final_logit_softcapping", "positive", 30.0),
    }


family = Family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    read,
    # Our module -> theirs, where it is not Llama's.
    modules={**MODULES, "feed_forward_norm": "pre_feedforward_layernorm"},
)
