"""The shape of a decoder, independent of any library's configuration files."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class LayerKind(NamedTuple):
    """How one layer attends: over everything before it, or over a window of positions."""

    window: int | None = None  # positions a query sees, itself included; None: all before it
    rope_theta: float = 10_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with rotary positions, grouped queries and a gated feed-forward.

    `pattern` is the repeating sequence of layer kinds: one entry for uniform models, five local and
    one global for Gemma-like ones. Layers beyond the last whole period follow the pattern's start.
    """

    family: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    query_key_norm: bool = True
    activation: str = "silu"  # or "gelu_tanh"
    norm_offset: float = 0.0  # norms multiply by (offset + weight): 1 for Gemma
    sandwich_norms: bool = False  # norms after attention and feed-forward too, as in Gemma 2 and 3
    embedding_scale: float = 1.0
    query_scale: float | None = None  # None: head_dim ** -0.5
    max_positions: int = 32_768  # the longest sequence the weights are meant for; not enforced here
    dtype: str = "float32"  # of parameters and activations
    float32_head: bool = False  # the last norm's output, the head and its product in float32

    @property
    def periods(self) -> int:
        return self.num_layers // len(self.pattern)

    @property
    def num_rest(self) -> int:
        return self.num_layers % len(self.pattern)
