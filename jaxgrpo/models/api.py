"""A model as the rest of the package sees it: its config, and pure functions over nested dicts."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

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


class Latent(NamedTuple):
    """Sizes of attention whose keys and values are linear maps of one short vector of each token.

    A head's query and key have `plain` dimensions that know no position, and behind them `turned`
    ones, which of keys are the same for all heads.
    Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
    """

    size: int  # of the vector
    plain: int
    turned: int
    value: int  # of a head's value
    query: int | None = None  # of a vector that queries are maps of; None: of the hidden state


class AttentionKind(NamedTuple):
    """How a layer attends: over everything before it, or over a window of positions."""

    window: int | None = None  # positions a query sees, itself included; None: all before it
    rope: Rope | None = Rope()  # None: queries and keys know no position
    soft_cap: float | None = None  # c: scores are c * tanh(score / c) before they are masked
    sinks: bool = False  # each head has a score of its own, whose weight goes to no value
    latent: Latent | None = None  # None: keys and values are maps of the hidden state

    def positioned(self, head_dim: int) -> int:
        """The dimensions of a head of so many that may turn."""
        return head_dim if self.latent is None else self.latent.turned


class DeltaKind(NamedTuple):
    """The sizes of a gated delta rule, which keeps a state instead of keys and values."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4  # tokens that its short convolution reads
    reach: float = 1.0  # rates of writing go from 0 to it; above 1 what is read may change its sign
    eps: float | None = None  # of the norm of its output; None: `ModelConfig.rms_norm_eps`


class DenseKind(NamedTuple):
    """A feed-forward part that all tokens pass."""

    size: int | None = None  # None: `ModelConfig.intermediate_size`


class ExpertsKind(NamedTuple):
    """A feed-forward part of which each token passes `top_k` of `number` experts."""

    number: int
    top_k: int
    size: int  # of each expert, as intermediate_size
    normalised: bool = True  # gates of a token are divided by their sum
    scores: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: and a correction of the choice
    scale: float = 1.0  # of gates
    groups: int = 1  # of experts, side by side, of which a token passes experts of top_groups
    top_groups: int = 1
    shared: int = 0  # size of an expert that all tokens pass; 0: there is none
    shared_gate: bool = False  # what it gives is times the sigmoid of a number for each token
    bias: bool = False  # of the router and of each expert's maps
    clamp: tuple[float, float] | None = None  # alpha, limit: see `experts.clamped`


class LayerKind(NamedTuple):
    """What a layer is made of."""

    mixer: AttentionKind | DeltaKind = AttentionKind()
    feed: DenseKind | ExpertsKind = DenseKind()
    norms: Norms | None = None  # None: `ModelConfig.norms`

    def has(self, name: str) -> bool:
        """Whether its layers have a linear map, of the names in LINEAR; gates may be absent."""
        part, _, linear = name.partition("/")
        if name in EXPERT_MAPS:
            return isinstance(self.feed, ExpertsKind)
        if part == "experts":
            field = "shared_gate" if linear == "shared_gate" else "shared"
            return isinstance(self.feed, ExpertsKind) and bool(getattr(self.feed, field))
        if part == "feed_forward":
            return isinstance(self.feed, DenseKind)
        if isinstance(self.mixer, DeltaKind):
            return part == "delta"
        if (latent := self.mixer.latent) is None:
            return name in LINEAR[:4]
        return part == "attention" and linear not in QUERIES[latent.query is None]


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

EXPERT_MAPS = ("experts/gate", "experts/up", "experts/down")
"""The maps that each expert has; adapters of an expert's gate and up have one A."""
QUERIES = ("query", "turned_query"), ("query_down", "query_up", "turned_query_up")
LINEAR = (
    *("attention/query", "attention/key", "attention/value", "attention/out"),
    *("feed_forward/gate", "feed_forward/up", "feed_forward/down"),
    *("delta/query", "delta/key", "delta/value", "delta/gate", "delta/rate", "delta/decay"),
    "delta/out",
    *(f"attention/{name}" for name in ("turned_query", *QUERIES[1], "latent", "turned_key")),
    *(f"experts/{name}" for name in ("shared/gate", "shared/up", "shared/down", "shared_gate")),
    *EXPERT_MAPS,
)
"""The linear maps of a layer, which may have adapters; QUERIES are those of latents, by `query`."""


WIDE = ("router/correction", "delta/log_rate", "delta/bias", "delta/norm/scale")
"""The ends of leaves that have at least float32 whatever a model's dtype: they are small, computed
in float32, and often published so beside weights in bfloat16."""


def is_wide(path: Sequence[Any]) -> bool:
    """Whether a leaf is one of WIDE, by its keys in the parameters."""
    return "/".join(str(key.key) for key in path).endswith(WIDE)


def in_dtype(params: Params, dtype: str) -> Params:
    """The parameters in a dtype, but those of WIDE as they are."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_wide(path) else leaf.astype(dtype), params
    )


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
    ranks: tuple[tuple[str, int, float], ...] = ()  # (name, rank, alpha) of those that have others

    def rank_and_scale(self, name: str = "") -> tuple[int, float]:
        """Those of a name in LINEAR; the scale is alpha / rank, with rsLoRA alpha / sqrt(rank)."""
        table = {module: (rank, alpha) for module, rank, alpha in self.ranks}
        rank, alpha = table.get(name, (self.rank, self.alpha))
        return rank, alpha / (rank**0.5 if self.use_rslora else rank)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names in LINEAR that are adapted where a layer has them (`ModelConfig.adapted`)."""
        return tuple(name for name in LINEAR if re.fullmatch(self.targets, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with rotary positions, grouped queries and a gated feed-forward.

    `lead` is the kinds of the first layers. Behind them `pattern` repeats: one entry for uniform
    models, five local and one global for Gemma-like ones. Layers beyond the last whole period
    follow the pattern's start.
    """

    family: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lead: tuple[LayerKind, ...] = ()
    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    pad_token: int | None = None  # read as an input, its row of the embedding gets no gradient
    attention_bias: bool = False  # of queries, keys and values
    attention_out_bias: bool = False
    feed_forward_bias: bool = False
    attention_gate: bool = False  # each head's output is times the sigmoid of a linear map's
    query_key_norm: QueryKeyNorm = "head"
    activation: str = "silu"  # see layers.ACTIVATIONS
    norm_offset: float = 0.0  # norms multiply by (offset + weight): 1 for Gemma
    norms: Norms = "before"
    embedding_scale: float = 1.0
    exact_embedding_scale: bool = False  # else it is rounded to the dtype first, as Gemma's
    query_scale: float | None = None  # None: head_dim ** -0.5
    residual_scale: float = 1.0  # of a branch that is added
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None  # c: logits are c * tanh(logit / c), after their scale
    max_positions: int = 32_768  # the longest sequence the weights are meant for; not enforced here
    position_limit: int | None = None  # beyond it the angles of all positions would change
    dtype: str = "float32"  # of parameters and activations, but for what follows
    float32_head: bool = False  # the last norm's output, the head and its product in float32
    float32_activations: bool = False  # what layers add up and multiply with their weights, too
    float32_attention: bool = False  # with it: queries, keys, values and what mixers keep of them
    lora: LoraConfig | None = None  # adapters that are trained in place of the weights
    weight_dtype: str | None = None  # of kernels with scales, which samplers read: `low_bit.DTYPES`
    fused: tuple[tuple[str, ...], ...] = ()  # names in LINEAR that are one map of the family, which
    # has one adapter: its A is that of the first of them
    fused_experts: bool = False  # in the checkpoint's files, all experts of a layer are one tensor
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
        return (self.num_layers - len(self.lead)) // len(self.pattern)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        behind = self.num_layers - len(self.lead)
        return (*self.lead, *(self.pattern[i % len(self.pattern)] for i in range(behind)))

    @property
    def attention(self) -> tuple[AttentionKind, ...]:
        """How each layer attends, of those that do, in order."""
        return tuple(kind.mixer for kind in self.kinds if isinstance(kind.mixer, AttentionKind))

    @property
    def recurs(self) -> bool:
        """Whether layers keep states that follow from all tokens so far."""
        return any(isinstance(kind.mixer, DeltaKind) for kind in self.kinds)

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names in LINEAR that have adapters, of the maps that its layers have."""
        kinds, modules = {*self.kinds}, () if self.lora is None else self.lora.modules
        absent = () if self.gated else ("feed_forward/gate",)
        modules = (name for name in modules if name not in absent)
        return tuple(name for name in modules if any(kind.has(name) for kind in kinds))

    def cached(self, kind: AttentionKind) -> tuple[int, int, int]:
        """What decoding keeps of a token in a layer: (heads, size of a key, size of a value)."""
        if (latent := kind.latent) is None:
            return self.num_kv_heads, self.head_dim, self.head_dim
        return 1, latent.size + latent.turned, latent.size

    @property
    def longest(self) -> int:
        """The longest sequence that the model can compute as it is meant to, in tokens."""
        return min(self.max_positions, self.position_limit or self.max_positions)

    @property
    def num_rest(self) -> int:
        return (self.num_layers - len(self.lead)) % len(self.pattern)

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
        fused = (*self.fused, EXPERT_MAPS[:2])
        group = next((names for names in fused if name in names), (name,))
        return next(module for module in group if module in self.lora.modules)


Constrain = Callable[[Array, tuple[str | None, ...]], Array]
"""(activation, logical axis names) -> the same values, laid out on the caller's mesh."""


@runtime_checkable
class Spread(Protocol):
    """Runs a function of tokens and weights on each device that holds a part of them.

    Each argument comes with its logical axes, as in `Constrain`. The function computes each token
    by itself, and its results, laid out as the first one, are summed over what divides weights.
    """

    def __call__(
        self,
        function: Callable[..., Array],
        tokens: Sequence[tuple[Array, tuple[str | None, ...]]],
        weights: Sequence[tuple[Array, tuple[str | None, ...]]],
    ) -> Array: ...


class KeyValue(NamedTuple):
    """Keys (after RoPE) and values of one layer, or of a stack of layers."""

    key: Array  # [..., positions, kv_heads, head_dim]
    value: Array  # same shape, of latents (`Latent`) another head_dim


@runtime_checkable
class Attend(Protocol):
    """Attention belongs to the caller: the model knows no segments, prefixes, caches or slots.

    Shapes: query [*B, Q, heads, head_dim]; key, value [*B, Q, kv_heads, head_dim], rotated by
    position; sinks [heads], of a kind that has them. What is returned with the output
    [*B, Q, heads, head_dim] is the layer's new memory.
    """

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        memory: Any,
        kind: AttentionKind,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]: ...


@runtime_checkable
class Route(Protocol):
    """Which experts each token passes: those of the highest scores, or recorded ones.

    Shapes: scores, and shares, the router's probabilities with their gradient, [*B, Q, experts],
    float32; returned are experts [*B, Q, top_k], int32, and the memory of the layer's experts.
    """

    def __call__(
        self, scores: Array, shares: Array, memory: Any, kind: ExpertsKind
    ) -> tuple[Array, Any]: ...


@runtime_checkable
class Recur(Protocol):
    """A recurrence from the state that the caller keeps: (output, the layer's new memory)."""

    def __call__(self, inputs: Any, memory: Any, kind: DeltaKind) -> tuple[Array, Any]: ...


def highest_scores(scores: Array, shares: Any, memory: Any, kind: ExpertsKind) -> tuple[Array, Any]:
    """The experts of the highest scores, the highest first; of equal ones that of lower number.

    They are the layer's memory too.
    """
    del shares, memory
    experts = jax.lax.top_k(scores, kind.top_k)[1]
    return experts, experts


def no_recurrence(inputs: Any, memory: Any, kind: DeltaKind) -> tuple[Array, Any]:
    """What a caller without states recurs by."""
    del inputs, memory
    raise ValueError(f"apply: the model has layers of {kind}: give a Caller with `recur`")


class Caller(NamedTuple):
    """What a model leaves to the code that applies it: all that depends on other tokens."""

    attend: Attend
    route: Route = highest_scores
    recur: Recur = no_recurrence
    keeps_latents: bool = False
    """Whether `attend` gets latents as keys and values of one head, which are few to keep, where
    layers have some. Otherwise it gets each head's keys and values, which are less work."""


class LayerMemory(NamedTuple):
    """The memory of a layer with experts; that of others is the mixer's alone."""

    mixer: Any = None  # of `attend` or `recur`
    experts: Any = None  # of `route`


class Model(NamedTuple):
    """A decoder as functions.

    Parameters are {"embed", ["lead"], "blocks", "rest", "final_norm", ["head"]}: `lead["i"]` holds
    layer i of those before the pattern; `blocks["k"]` layer k of the pattern, each leaf stacked
    over the periods [periods, ...]; `rest["i"]` the layers left over if the depth is no multiple of
    the pattern.

    Memory has two forms. *Stacked*: {["lead": {"i": ...}], "blocks": {"k": leaves [periods, ...]},
    "rest": {"i": ...}}, the layers are scanned. *Per layer*: a tuple with one entry per layer in
    order; the layers are unrolled, so that decoding updates each cache in place. None: every layer
    gets None, scanned. A layer with experts has a LayerMemory, another one its mixer's memory.
    A loop that decodes takes its parameters through `params_per_layer` once, before it begins;
    `apply` with stacked memory or none takes them stacked.
    """

    config: ModelConfig
    init: Callable[[Array], Params]  # key -> parameters
    apply: Callable[[Params, Array, Array, Caller, Any], tuple[Array, Any]]
    """(params, tokens [*B, Q], positions [*B, Q], caller, memory)
    -> (hidden [*B, Q, hidden_size] after the final norm, memory in the form it came in)
    The final norm gives config.dtype, or at least float32 with config.float32_head."""
    unembed: Callable[[Params, Array], Array]
    """(params, hidden [..., E]) -> logits [..., V], float32; NEVER for tokens without text"""
    axes: Params  # parameter tree of tuples: the logical axis name of each dimension
    shapes: Params  # parameter tree of jax.ShapeDtypeStruct


LAYERS = ("lead", "blocks", "rest")
"""The parts of parameters and of memory that hold layers, in their order."""


def memory_per_layer(config: ModelConfig, stacked: Any) -> tuple[Any, ...]:
    """The stacked memory of a scan as one entry per layer, in the order of the layers."""

    def layer(period: int, k: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[period], stacked["blocks"][str(k)])

    scanned = [layer(p, k) for p in range(config.periods) for k in range(len(config.pattern))]
    lead, rest = (_in_order(stacked.get(part, {})) for part in ("lead", "rest"))
    return (*lead, *scanned, *rest)


def _in_order(layers: Any) -> tuple[Any, ...]:
    return tuple(layers[str(i)] for i in range(len(layers)))


def stacked_memory(config: ModelConfig, per_layer: tuple[Any, ...]) -> Any:
    """Memory with one entry per layer as the stacked memory of a scan."""
    width, begin = len(config.pattern), len(config.lead)
    end = config.num_layers - config.num_rest

    def stack(k: int) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer[begin + k : end : width])

    lead = {str(i): entry for i, entry in enumerate(per_layer[:begin])}
    return {
        **({"lead": lead} if lead else {}),
        "blocks": {str(k): stack(k) for k in range(width) if config.periods},
        "rest": {str(i): entry for i, entry in enumerate(per_layer[end:])},
    }


def params_per_layer(config: ModelConfig, params: Params) -> Params:
    """The parameters with each layer's apart, under "layers": a tuple in their order.

    A loop over tokens reads them so: a slice of stacked weights taken inside the loop is copied at
    every token. The rest is not copied. Parameters that are so already stay as they are.
    """
    if "layers" in params:
        return params
    shared = {name: tree for name, tree in params.items() if name not in LAYERS}
    lead, rest = (_in_order(params.get(part, {})) for part in ("lead", "rest"))
    return {**shared, "layers": lead + _sliced(config, params["blocks"]) + rest}


def stacked_params(config: ModelConfig, params: Params) -> Params:
    """The parameters with those of the layers stacked, where they are apart."""
    if "layers" not in params:
        return params
    shared = {name: tree for name, tree in params.items() if name != "layers"}
    return {**shared, **stacked_memory(config, params["layers"])}


@functools.partial(jax.jit, static_argnums=0)
def _sliced(config: ModelConfig, blocks: Params) -> tuple[Params, ...]:
    """Only what is computed: what a jitted function passes on is copied."""
    return memory_per_layer(config, {"blocks": blocks})
