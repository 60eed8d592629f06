"""GLM-4, ERNIE 4.5 and Cohere 2, whose rotary pairs stand side by side in each head."""

from __future__ import annotations

from typing import Any

from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import (
    MODULES,
    Family,
    attention_bias,
    layered,
    sizes,
    uniform,
)
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING


def _glm4(fields: Fields) -> dict[str, Any]:
    """Norms on both sides of a branch; half of each head turns."""
    config = sizes(fields, head_dim=128, eps=1.5625e-7, positions=131_072, pad=151_329)
    turn = rope.read_turn(
        fields, config["head_dim"], config["max_positions"], share=0.5, partial=True
    )
    bias = fields.take("attention_bias", "flag", True)
    return {**config, **uniform(turn), "attention_bias": bias, "norms": "both"}


GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    _glm4,
    modules={
        **MODULES,
        "attention_out_norm": "post_self_attn_layernorm",
        "feed_forward_out_norm": "post_mlp_layernorm",
    },
    fused={"mlp.gate_up_proj": ("feed_forward/gate", "feed_forward/up")},
    in_pairs=True,
)


def _ernie(fields: Fields) -> dict[str, Any]:
    """Llama, with biases everywhere or nowhere."""
    config = sizes(fields, head_dim=128, eps=1e-5, tied=True, positions=131_072, pad=0)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"], theta=5e5)
    bias = fields.take("use_bias", "flag", False)
    names = ("attention_bias", "attention_out_bias", "feed_forward_bias")
    return {**config, **uniform(turn), **dict.fromkeys(names, bias)}


ERNIE = Family("ernie4_5", "Ernie4_5ForCausalLM", _ernie, in_pairs=True)


def _cohere2(fields: Fields) -> dict[str, Any]:
    """Both branches read one norm, a LayerNorm; three layers with a window, then one without, which
    knows no positions."""
    config = sizes(
        fields,
        eps=1e-5,
        tied=True,
        positions=8192,
        as_many_kv=True,
        pad=0,
        norm_eps="layer_norm_eps",
    )
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    window = fields.nullable("sliding_window", "size", 4096)
    period = fields.take("sliding_window_pattern", "size", 4)

    def default(i: int) -> str:
        return SLIDING if (i + 1) % period else FULL

    turns = {SLIDING: turn, FULL: turn._replace(rope=None)}
    return {
        **config,
        **attention_bias(fields),
        **layered(fields, config["num_layers"], turns, default, window),
        "norms": "parallel",
        "center_norms": True,
        "logit_scale": fields.take("logit_scale", "number", 0.0625),
    }


COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _cohere2,
    modules={name: text for name, text in MODULES.items() if name != "feed_forward_norm"},
    # Of published folders, and read by no code of transformers.
    harmless=(
        *("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"),
        *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
        *("use_parallel_embedding", "rms_norm_eps"),
    ),
    in_pairs=True,
)
