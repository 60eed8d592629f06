"""What the rest of the package knows of a model: pure functions over a nested dict of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax import Array

from jaxgrpo.core.types import Params
from jaxgrpo.models.config import LayerKind, ModelConfig

Constrain = Callable[[Array, tuple[str | None, ...]], Array]
"""(activation, logical axis names) -> the same values, laid out on the caller's mesh."""


class KeyValue(NamedTuple):
    """Keys (after RoPE) and values of one layer, or of a stack of layers."""

    key: Array  # [..., positions, kv_heads, head_dim]
    value: Array  # same shape


@runtime_checkable
class Attend(Protocol):
    """Attention belongs to the caller: the model knows no segments, prefixes, caches or slots.

    Shapes: query [*B, Q, heads, head_dim]; key, value [*B, Q, kv_heads, head_dim], rotated by
    position. `memory` is this layer's entry of the memory given to `apply`; what is returned beside
    the output [*B, Q, heads, head_dim] becomes this layer's entry of the memory it returns.
    """

    def __call__(
        self, query: Array, key: Array, value: Array, memory: Any, kind: LayerKind
    ) -> tuple[Array, Any]: ...


class Model(NamedTuple):
    """A decoder as functions.

    Parameters are {"embed", "blocks", "rest", "final_norm", ["head"]}: `blocks["k"]` holds layer k
    of the pattern, each leaf stacked over the periods [periods, ...]; `rest["i"]` the layers left
    over where the depth is no multiple of the pattern.

    Memory has two forms. *Stacked*: {"blocks": {"k": leaves [periods, ...]}, "rest": {"i": ...}},
    the layers are scanned. *Per layer*: a tuple with one entry per layer in order; the layers are
    unrolled, so that decoding updates each cache in place. None: every layer gets None, scanned.
    A loop that decodes takes its parameters through `params_per_layer` once, before it begins.
    """

    config: ModelConfig
    init: Callable[[Array], Params]  # key -> parameters
    apply: Callable[[Params, Array, Array, Attend, Any], tuple[Array, Any]]
    """(params, tokens [*B, Q], positions [*B, Q], attend, memory)
    -> (hidden [*B, Q, hidden_size] after the final norm, memory in the form it came in)
    The final norm gives config.dtype, or at least float32 with config.float32_head."""
    unembed: Callable[[Params, Array], Array]
    """(params, hidden [..., E]) -> logits [..., V], float32"""
    axes: Params  # parameter tree of tuples: the logical axis name of each dimension
    shapes: Params  # parameter tree of jax.ShapeDtypeStruct


def memory_per_layer(config: ModelConfig, stacked: Any) -> tuple[Any, ...]:
    """The stacked memory of a scan as one entry per layer, in the order of the layers."""
    periods, pattern = config.periods, len(config.pattern)
    layers: list[Any] = []
    for period in range(periods):
        for k in range(pattern):
            stack = stacked["blocks"][str(k)]
            layers.append(jax.tree.map(lambda leaf, at=period: leaf[at], stack))
    layers.extend(stacked["rest"][str(i)] for i in range(len(stacked["rest"])))
    return tuple(layers)


def params_per_layer(config: ModelConfig, params: Params) -> Params:
    """The parameters with each layer's apart too, under "layers": a tuple in their order.

    To be called in a jitted function, outside its loop over tokens: a slice of stacked weights
    taken inside the loop is copied at every token.
    """
    return {**params, "layers": memory_per_layer(config, params)}
