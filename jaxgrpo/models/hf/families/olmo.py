"""OLMo 2 and 3 and EXAONE 4, which norm what a branch gives."""

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

AFTER = {
    "attention_out_norm": "post_attention_layernorm",
    "feed_forward_out_norm": "post_feedforward_layernorm",
}
_MODULES = {name: module for name, module in MODULES.items() if name != "attention_norm"} | AFTER


def read_olmo(
    fields: Fields, eps: float = 1e-5, positions: int = 2048, pad: int = 1
) -> dict[str, Any]:
    """Queries and keys are normed over all heads at once. Args: as in `sizes`."""
    return {
        **sizes(fields, eps=eps, positions=positions, as_many_kv=True, pad=pad),
        **attention_bias(fields),
        "norms": "after",
        "query_key_norm": "whole",
    }


def _olmo2(fields: Fields) -> dict[str, Any]:
    config = read_olmo(fields)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    return {**config, **uniform(turn)}


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _olmo2, modules=_MODULES)


def _olmo3(fields: Fields) -> dict[str, Any]:
    """Three layers with a window, then one without, which alone has scaled positions."""
    config = read_olmo(fields)
    thetas = dict.fromkeys((FULL, SLIDING), 5e5)
    turns = rope.read_turns_by_type(fields, config["head_dim"], config["max_positions"], thetas)
    window = fields.nullable("sliding_window", "size", 4096)

    def default(i: int) -> str:
        return SLIDING if (i + 1) % 4 and window is not None else FULL

    return {**config, **layered(fields, config["num_layers"], turns, default, window)}


OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _olmo3, modules=_MODULES)


def _exaone4(fields: Fields) -> dict[str, Any]:
    """Queries and keys are normed head by head; where some layers have a window, those without
    know no positions."""
    config = sizes(fields, eps=1e-5, positions=2048)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    window = fields.nullable("sliding_window", "size", 4096)
    period = fields.nullable("sliding_window_pattern", "anything", 4)
    if type(period) is not int or period < 1:
        if fields.content.get("layer_types") is None:
            fields.refuse("sliding_window_pattern", "expected layer_types beside it, or a number")
        period = 1

    def default(i: int) -> str:
        return SLIDING if (i + 1) % period else FULL

    turns = {SLIDING: turn, FULL: turn if window is None else turn._replace(rope=None)}
    layers = layered(fields, config["num_layers"], turns, default, window)
    return {**config, **layers, "norms": "after", "query_key_norm": "head"}


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", _exaone4, modules=_MODULES)
