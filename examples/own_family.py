"""A family of models that is not built in: EXAONE 4.0, LGAI-EXAONE/EXAONE-4.0-1.2B on the hub.

model.family = "examples/own_family.py:family"

Unlike Llama it norms what each branch gives instead of what it reads, and queries and keys head by
head. Where some layers have a window, those without know no positions. Compared with
modeling_exaone4.py of transformers by tests/models/test_own_family.py.
"""

from __future__ import annotations

from typing import Any

from jaxgrpo.models.hf import rope
from jaxgrpo.models.hf.families.base import MODULES, Family, layered, sizes
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING


def read(fields: Fields) -> dict[str, Any]:
    """The fields of a ModelConfig, from those of a config.json."""
    if "layer_types" not in fields.content:
        fields.problems.append("layer_types: missing; save the folder with transformers again")
    size_fields = sizes(fields, eps=1e-5)  # what transformers assumes where a folder says nothing
    turn = rope.read_turn(fields, size_fields["head_dim"], size_fields["max_positions"])
    window = fields.nullable("sliding_window", "size", 4096)
    turns = {SLIDING: turn, FULL: turn if window is None else turn._replace(rope=None)}
    layers = layered(fields, size_fields["num_layers"], turns, lambda _: FULL, window)
    return {**size_fields, **layers, "norms": "after", "query_key_norm": "head"}


modules = {  # our module -> theirs, where it is not Llama's
    **MODULES,
    "attention_out_norm": "post_attention_layernorm",
    "feed_forward_out_norm": "post_feedforward_layernorm",
}
# Two of Llama's norms do not exist here, and their names mean others.
del modules["attention_norm"], modules["feed_forward_norm"]

family = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    read,
    modules=modules,
    harmless=("sliding_window_pattern",),  # layer_types says it layer by layer
)
