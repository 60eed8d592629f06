"""A model as the rest of the package sees it: its config, and pure functions over nested dicts."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import (
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.types import Params


class Rope(NamedTuple):
    """Rotary positions: pair i of a head turns by position * frequency_i, where

    frequency_i = theta^(-2 i / turned) * stretch_i,    turned = share * head_dim
    """

    theta: float = 10_000.0
    share: float = 1.0  # of a head's dimensions, the first ones; the others do not turn
    stretch: tuple[float, ...] = ()  # one for each pair; (): all 1
    scale: float = 1.0  # of cosine and sine, and so of what is turned
    growth: tuple[float, float] | None = None  # (b, n): queries x (1 + b log(1 + floor(pos / n)))


class LayerKind(NamedTuple):
    """How one layer attends: over everything before it, or over a window of positions."""

    window: int | None = None  # positions a query sees, itself included; None: all before it
    rope: Rope | None = Rope()  # None: queries and keys know no position
    soft_cap: float | None = None  # c: scores are c * tanh(score / c) before they are masked


Norms = Literal["before", "after", "both", "parallel"]
"""Where each branch of a layer is normed: its input, its output (OLMo 2 and 3), or both (Gemma).
"parallel": both branches read one normed input (Cohere 2)."""
NORMS: tuple[str, ...] = get_args(Norms)
QueryKeyNorm = Literal["none", "head", "whole", "turned"]
"""Whether queries and keys are normed: not, each head by itself, or all heads as one vector.
"turned": head by head, after positions have turned them (Hunyuan)."""
QUERY_KEY_NORMS: tuple[str, ...] = get_args(QueryKeyNorm)


NEVER = -1e20
"""Logit of a token that is never drawn: at any temperature no probability, and no gradient."""

LINEAR = (
    *("attention/query", "attention/key", "attention/value", "attention/out"),
    *("feed_forward/gate", "feed_forward/up", "feed_forward/down"),
)
"""The linear maps of a layer, which may have adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters beside the linear maps that `targets` names:

        y = x · kernel + scale * ((x · A) · B),    A [inputs, rank], B [rank, outputs]

    Source: Hu et al. 2021, arXiv 2106.09685; rsLoRA: Kalajdzievski 2023, arXiv 2312.03732.
    """

    rank: int
    alpha: float
    targets: str = ".*"  # regular expression that the whole of a name in LINEAR must match
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """alpha / rank, with rsLoRA alpha / sqrt(rank)."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names in LINEAR that are adapted, in models that have them."""
        return tuple(name for name in LINEAR if re.fullmatch(self.targets, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with rotary positions, grouped queries and a gated feed-forward.

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
    pad_token: int | None = None  # read as an input, its row of the embedding gets no gradient
    attention_bias: bool = False  # of queries, keys and values
    attention_out_bias: bool = False
    feed_forward_bias: bool = False
    query_key_norm: QueryKeyNorm = "head"
    activation: str = "silu"  # see layers.ACTIVATIONS
    norm_offset: float = 0.0  # norms multiply by (offset + weight): 1 for Gemma
    norms: Norms = "before"
    embedding_scale: float = 1.0
    query_scale: float | None = None  # None: head_dim ** -0.5
    residual_scale: float = 1.0  # of a branch that is added
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None  # c: logits are c * tanh(logit / c), after their scale
    max_positions: int = 32_768  # the longest sequence the weights are meant for; not enforced here
    position_limit: int | None = None  # beyond it the angles of all positions would change
    dtype: str = "float32"  # of parameters and activations
    float32_head: bool = False  # the last norm's output, the head and its product in float32
    lora: LoraConfig | None = None  # adapters that are trained in place of the weights
    weight_dtype: str | None = None  # of kernels with scales, which samplers read: `low_bit.DTYPES`
    fused: tuple[tuple[str, ...], ...] = ()  # names in LINEAR that are one map of the family, which
    # has one adapter: its A is that of the first of them
    without_text: tuple[tuple[int, int], ...] = ()
    """Ranges [begin, end) of tokens that the tokenizer has no text for: no probability, ever"""
    source: str = dataclasses.field(default="", compare=False, repr=False)
    """config.json of the checkpoint that it was read from; a model without one cannot be saved"""
    ignored: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    """Fields of it that change nothing, as the user says (`model.ignore`)"""
    gated: bool = True  # whether the feed-forward block has a gate
    center_norms: bool = False  # norms subtract the mean first: LayerNorm without bias
    text_only: bool = False  # the text part of a model that has others too (`model.text_only`)

    @property
    def periods(self) -> int:
        return self.num_layers // len(self.pattern)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def longest(self) -> int:
        """The longest sequence that the model can compute as it is meant to, in tokens."""
        return min(self.max_positions, self.position_limit or self.max_positions)

    @property
    def num_rest(self) -> int:
        return self.num_layers % len(self.pattern)

    @property
    def num_drawable(self) -> int:
        """Tokens that can be drawn: those with text."""
        return self.vocab_size - sum(end - begin for begin, end in self.without_text)

    @property
    def linear_weights(self) -> int:
        """Weights of the linear maps of all layers; each costs 2 operations per token."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * heads
        maps = 3 if self.gated else 2
        return self.num_layers * (attention + maps * self.hidden_size * self.intermediate_size)

    @property
    def product_weights(self) -> int:
        """`linear_weights` and those of the output head."""
        return self.linear_weights + self.hidden_size * self.vocab_size

    def holds_a(self, name: str) -> str:
        """The linear map with the A of an adapted one: itself, or the first that it is fused with.

        >>> fused = ModelConfig(
        ...     **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8),
        ...     **dict.fromkeys(("num_layers", "num_heads", "num_kv_heads", "head_dim"), 2),
        ...     fused=(("feed_forward/gate", "feed_forward/up"),),
        ...     lora=LoraConfig(rank=1, alpha=1.0),
        ... )
        >>> fused.holds_a("feed_forward/up"), fused.holds_a("feed_forward/down")
        ('feed_forward/gate', 'feed_forward/down')
        """
        assert self.lora is not None  # of a map that is adapted
        group = next((names for names in self.fused if name in names), (name,))
        return next(module for module in group if module in self.lora.modules)


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
    position. `memory` is this layer's entry of the memory given to `apply`; what is returned with
    the output [*B, Q, heads, head_dim] becomes this layer's entry of the memory it returns.
    """

    def __call__(
        self, query: Array, key: Array, value: Array, memory: Any, kind: LayerKind
    ) -> tuple[Array, Any]: ...


class Model(NamedTuple):
    """A decoder as functions.

    Parameters are {"embed", "blocks", "rest", "final_norm", ["head"]}: `blocks["k"]` holds layer k
    of the pattern, each leaf stacked over the periods [periods, ...]; `rest["i"]` the layers left
    over if the depth is no multiple of the pattern.

    Memory has two forms. *Stacked*: {"blocks": {"k": leaves [periods, ...]}, "rest": {"i": ...}},
    the layers are scanned. *Per layer*: a tuple with one entry per layer in order; the layers are
    unrolled, so that decoding updates each cache in place. None: every layer gets None, scanned.
    A loop that decodes takes its parameters through `params_per_layer` once, before it begins;
    `apply` with stacked memory or none takes them stacked.
    """

    config: ModelConfig
    init: Callable[[Array], Params]  # key -> parameters
    apply: Callable[[Params, Array, Array, Attend, Any], tuple[Array, Any]]
    """(params, tokens [*B, Q], positions [*B, Q], attend, memory)
    -> (hidden [*B, Q, hidden_size] after the final norm, memory in the form it came in)
    The final norm gives config.dtype, or at least float32 with config.float32_head."""
    unembed: Callable[[Params, Array], Array]
    """(params, hidden [..., E]) -> logits [..., V], float32; NEVER for tokens without text"""
    axes: Params  # parameter tree of tuples: the logical axis name of each dimension
    shapes: Params  # parameter tree of jax.ShapeDtypeStruct


def memory_per_layer(config: ModelConfig, stacked: Any) -> tuple[Any, ...]:
    """The stacked memory of a scan as one entry per layer, in the order of the layers."""

    def layer(period: int, k: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[period], stacked["blocks"][str(k)])

    scanned = [layer(p, k) for p in range(config.periods) for k in range(len(config.pattern))]
    return (*scanned, *(stacked["rest"][str(i)] for i in range(len(stacked["rest"]))))


def stacked_memory(config: ModelConfig, per_layer: tuple[Any, ...]) -> Any:
    """Memory with one entry per layer as the stacked memory of a scan."""
    width, scanned = len(config.pattern), config.num_layers - config.num_rest

    def stack(k: int) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer[k:scanned:width])

    rest = {str(i): entry for i, entry in enumerate(per_layer[scanned:])}
    return {"blocks": {str(k): stack(k) for k in range(width) if config.periods}, "rest": rest}


def params_per_layer(config: ModelConfig, params: Params) -> Params:
    """The parameters with each layer's apart, under "layers": a tuple in their order.

    A loop over tokens reads them so: a slice of stacked weights taken inside the loop is copied at
    every token. The rest is not copied. Parameters that are so already stay as they are.
    """
    if "layers" in params:
        return params
    shared = {name: tree for name, tree in params.items() if name not in ("blocks", "rest")}
    rest = tuple(params["rest"][str(i)] for i in range(config.num_rest))
    return {**shared, "layers": _sliced(config, params["blocks"]) + rest}


def stacked_params(config: ModelConfig, params: Params) -> Params:
    """The parameters with those of the layers stacked, where they are apart."""
    if "layers" not in params:
        return params
    shared = {name: tree for name, tree in params.items() if name != "layers"}
    return {**shared, **stacked_memory(config, params["layers"])}


@functools.partial(jax.jit, static_argnums=0)
def _sliced(config: ModelConfig, blocks: Params) -> tuple[Params, ...]:
    """Only what is computed: what a jitted function passes on is copied."""
    return memory_per_layer(config, {"blocks": blocks, "rest": {}})


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


@runtime_checkable
class WithBackward(Protocol[Arguments, Result]):
    """A function whose backward pass is written by hand."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result: ...

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], /) -> None: ...


def custom_vjp(
    *static: int,
) -> Callable[[Callable[Arguments, Result]], WithBackward[Arguments, Result]]:
    """`jax.custom_vjp`, whose own type forgets what the function takes and returns.

    Args:
      static: places of arguments that are no arrays.
    """
    decorator: Any = functools.partial(jax.custom_vjp, nondiff_argnums=static)
    return decorator
