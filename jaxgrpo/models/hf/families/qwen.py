"""Qwen2 and Qwen2.5, which are one family, and Qwen3."""

from __future__ import annotations

from typing import Any

from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import Family, attention_bias, layered, sizes
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING


def _qwen(fields: Fields, head_dim: int | None) -> dict[str, Any]:
    """The layers from max_window_layers on have the window, if it is used."""
    config = sizes(fields, head_dim=head_dim)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    uses_window = fields.take("use_sliding_window", "flag", False)
    window = fields.nullable("sliding_window", "size", 4096)
    window = window if uses_window else None
    first = fields.take("max_window_layers", "count", 28)

    def default(i: int) -> str:
        return SLIDING if window is not None and i >= first else FULL

    turns = {FULL: turn, SLIDING: turn}
    return {**config, **layered(fields, config["num_layers"], turns, default, window)}


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {**_qwen(fields, None), "attention_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    """Without Qwen2's biases; queries and keys are normed head by head."""
    return {**_qwen(fields, 128), **attention_bias(fields), "query_key_norm": "head"}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _qwen3)
