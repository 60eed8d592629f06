"""Mistral and Ministral, which attend to windows, and Phi-3 and Phi-4, which join projections."""

from __future__ import annotations

from typing import Any

from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import Family, layered, refuse_without_rope, sizes, uniform
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING

WINDOW = 4096  # what transformers assumes without sliding_window
PHI_TYPES = {kind: rope.TYPES[kind] for kind in ("default", "longrope")}
"""The types of positions that transformers allows Phi-3, where it takes yarn for longrope."""


def _mistral(fields: Fields) -> dict[str, Any]:
    """Every layer has the window, if there is one."""
    config = sizes(fields, positions=131_072)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    return {**config, **uniform(turn, fields.nullable("sliding_window", "size", WINDOW))}


MISTRAL = Family("mistral", "MistralForCausalLM", _mistral)


def _ministral(fields: Fields) -> dict[str, Any]:
    """Layers with and without a window, as `layer_types` says."""
    config = sizes(fields, positions=131_072)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"])
    window = fields.nullable("sliding_window", "size", WINDOW)
    kind = FULL if window is None else SLIDING
    turns = {FULL: turn, SLIDING: turn}
    return {**config, **layered(fields, config["num_layers"], turns, lambda _: kind, window)}


MINISTRAL = Family("ministral", "MinistralForCausalLM", _ministral)


def _ministral3(fields: Fields) -> dict[str, Any]:
    """Mistral whose queries grow with their position, beyond the length of training."""
    config = sizes(fields, head_dim=128, eps=1e-5, positions=262_144, pad=11)
    turn = rope.read_turn(fields, config["head_dim"], config["max_positions"], types=rope.GROWING)
    refuse_without_rope(fields)
    return {**config, **uniform(turn, fields.nullable("sliding_window", "size", None))}


MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", _ministral3)


def _phi3(fields: Fields) -> dict[str, Any]:
    """Mistral that may turn a share of each head."""
    config = sizes(fields, eps=1e-5, positions=4096, as_many_kv=True, pad=32_000)
    # Of the two original lengths transformers takes the one beside rope_parameters, or 4096.
    turn = rope.read_turn(
        fields,
        config["head_dim"],
        config["max_positions"],
        partial=True,
        original=4096,
        types=PHI_TYPES,
    )
    return {**config, **uniform(turn, fields.nullable("sliding_window", "size", None))}


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _phi3,
    fused={
        "self_attn.qkv_proj": ("attention/query", "attention/key", "attention/value"),
        "mlp.gate_up_proj": ("feed_forward/gate", "feed_forward/up"),
    },
    # Of Phi-4-mini, and read by no code of transformers.
    harmless=("full_attn_mod", "interpolate_factor"),
)
