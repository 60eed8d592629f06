"""Gemma 2, and Gemma 3's models of text."""

from __future__ import annotations

from typing import Any

from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import MODULES, Family, attention_bias, layered, sizes
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING

WINDOW = 4096  # what transformers assumes without sliding_window
_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_out_norm": "post_feedforward_layernorm",
}
_HARMLESS = ("hidden_act",)  # hidden_activation is what counts


def _gemma(fields: Fields, positions: int) -> dict[str, Any]:
    """Norms of (1 + weight) before and after each branch, and scaled embeddings."""
    activation = "hidden_activation"
    config = sizes(
        fields,
        head_dim=256,
        tied=True,
        positions=positions,
        activation=activation,
        act="gelu_pytorch_tanh",
        pad=0,
    )
    return {
        **config,
        **attention_bias(fields),
        "norm_offset": 1.0,
        "norms": "both",
        "embedding_scale": config["hidden_size"] ** 0.5,
        "query_scale": fields.take("query_pre_attn_scalar", "positive", 256) ** -0.5,
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    """Every second layer has a window; scores and logits are soft-capped."""
    config = _gemma(fields, positions=8192)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    window = fields.nullable("sliding_window", "size", WINDOW)
    cap = fields.nullable("attn_logit_softcapping", "positive", 50.0)

    def default(i: int) -> str:
        return FULL if i % 2 or window is None else SLIDING

    turns = {FULL: turn, SLIDING: turn}
    return {
        **config,
        **layered(fields, config["num_layers"], turns, default, window, cap),
        "logit_soft_cap": fields.nullable("final_logit_softcapping", "positive", 30.0),
    }


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _gemma2,
    modules={**MODULES, **_NORMS},
    harmless=(*_HARMLESS, "sliding_window_size"),  # sliding_window is what counts
)


def _gemma3(fields: Fields) -> dict[str, Any]:
    """Five layers with a window and a theta of their own, then one without; normed heads."""
    config = _gemma(fields, positions=131_072)
    thetas = {FULL: 1e6, SLIDING: 1e4}
    turns = rope.read_turns_by_type(
        fields, config["head_dim"], config["max_positions"], thetas, rope.LOCAL_THETA
    )
    window = fields.nullable("sliding_window", "size", WINDOW)
    period = fields.take("sliding_window_pattern", "size", 6)

    def default(i: int) -> str:
        return SLIDING if (i + 1) % period and window is not None else FULL

    return {
        **config,
        **layered(fields, config["num_layers"], turns, default, window),
        "query_key_norm": "head",
        "logit_soft_cap": fields.nullable("final_logit_softcapping", "positive", None),
    }


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _gemma3,
    modules={**MODULES, **_NORMS},
    harmless=_HARMLESS,
)
