"""From a ModelConfig to a Model: NNX modules are taken apart once, then run over nested dicts.

Layers that repeat are one `lax.scan` over the periods of the layer pattern, so that the size of the
program and the time to compile it do not grow with depth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.errors import pattern_problem, refuse_all
from jaxgrpo.core.types import GENERATOR, Params
from jaxgrpo.models import sharding
from jaxgrpo.models.api import (
    EXPERT_MAPS,
    LAYERS,
    LINEAR,
    NEVER,
    NORMS,
    QUERY_KEY_NORMS,
    AttentionKind,
    Caller,
    Constrain,
    ExpertsKind,
    LayerKind,
    LoraConfig,
    Model,
    ModelConfig,
    Rope,
    memory_per_layer,
    stacked_memory,
)
from jaxgrpo.models.attention import SAVED
from jaxgrpo.models.block import Block
from jaxgrpo.models.layers import (
    ACTIVATIONS,
    Embedding,
    RMSNorm,
    rotary_angles,
    turned_dims,
    wide_dtype,
)
from jaxgrpo.models.products import rounded
from jaxgrpo.models.sharding import OnMesh, on_one_device

Axes = tuple[str | None, ...]

HIDDEN_AXES: dict[int, Axes] = {
    3: ("bins", "sequence", None),
    4: ("bins", "rows", "sequence", None),
}
"""Logical axes of hidden states by their number of dimensions; others are not laid out."""

LOOKED_UP_AXES: Axes = ("parts", "sequence", "embed")
"""The same of what tokens [D, N] of an update look up in their table, and of the gradients that are
added to that: divided as the table is. So devices exchange vectors of tokens, and no tables."""

Remat = Literal["none", "full", "dots", "attention"]
"""What the backward pass computes again of each period of the layers:

    full        everything but its input
    attention   everything but its input and what attention's backward pass reads
    dots        what is cheap: results of products with weights are kept
    none        nothing
"""

UNROLLED = 8
"""Layers of a model with remat = "none" that are unrolled, where no memory says otherwise.

A scan sets the arrays of what the backward pass reads to zero before it fills them: 0.85 of the
time of an update of 4 layers on a CPU. More layers take long to compile. With recomputation they
are scanned, because XLA on a CPU finds what is computed twice in one program, and keeps it.
"""

ADAPTER_FOLD = 2**31 - 1
"""The fold of a layer's key that adapters draw from: none of the small numbers of its weights."""


def choose_remat(setting: str, platform: str) -> Remat:
    """What a run that asks for `setting`, a Remat or "auto", recomputes on a platform.

    "auto": nothing on a CPU, where memory is cheap and arithmetic is not, and all of it elsewhere,
    unless memory is known to allow for more (`training.memory.fitting_passes`).
    """
    if setting == "auto":
        return "none" if platform == "cpu" else "full"
    return cast(Remat, setting)


Layer = Callable[[Params, Array, Any], tuple[Array, Any]]
"""(parameters of one layer, hidden, its memory) -> (hidden, its memory)"""
Layers = dict[LayerKind, Layer]


class _Definition(NamedTuple):
    """An NNX module without its values."""

    make: Callable[[nnx.Rngs], nnx.Module]
    graph: nnx.GraphDef
    axes: Params

    def init(self, key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(self.make(_rngs(key))))

    def bind(self, params: Params) -> Any:
        return nnx.merge(self.graph, params)


Modules = Mapping[str | LayerKind, _Definition]
"""Those of the parameter tree by its names, and of layers. A tied head is the embedding itself."""


def build(
    config: ModelConfig, *, constrain: Constrain | None = None, remat: Remat = "full"
) -> Model:
    """The decoder of `config` as pure functions.

    Args:
      constrain: given hidden states and their logical axes after the embedding and after each
        block, lays them out on the caller's mesh.
      remat: see `Remat`.

    Raises: InputError naming every field of the config that cannot be built.
    """
    _check(config)
    modules = _modules(config)
    init = functools.partial(_init, config, modules)
    spread = constrain.spread if isinstance(constrain, OnMesh) else on_one_device

    def lay_out(hidden: Array) -> Array:
        axes = HIDDEN_AXES.get(hidden.ndim)
        return hidden if constrain is None or axes is None else constrain(hidden, axes)

    def apply(
        params: Params, tokens: Array, positions: Array, caller: Caller, memory: Any
    ) -> tuple[Array, Any]:
        embedding = modules["embed"].bind(params["embed"])
        hidden = lay_out(embedding.scaled(_looked_up(embedding, tokens, constrain)))
        turned = {mixer.rope: mixer.positioned(config.head_dim) for mixer in config.attention}
        wide = wide_dtype(config)
        angles = {rope: rotary_angles(positions, rope, size, wide) for rope, size in turned.items()}

        def layer(kind: LayerKind, params: Params, hidden: Array, memory: Any):
            block = modules[kind].bind(params)
            hidden, memory = block(hidden, angles, caller, memory, kind, spread)
            return lay_out(hidden), memory

        layers: Layers = {kind: functools.partial(layer, kind) for kind in {*config.kinds}}
        hidden, memory = _through(config, layers, params, hidden, memory, remat)
        norm = modules["final_norm"].bind(params["final_norm"])
        if config.float32_head:
            return norm(hidden.astype(wide)), memory
        return rounded(norm(hidden), config.dtype), memory

    def unembed(params: Params, hidden: Array) -> Array:
        table = params["embed" if config.tie_embeddings else "head"]
        return _exclude_textless(config, modules["head"].bind(table).decode(hidden))

    # The key is made inside, so that building a model touches no device.
    shapes = jax.eval_shape(lambda: init(jax.random.key(0, impl=GENERATOR)))
    axes = _axes((config.lead, config.pattern), modules, shapes)
    return Model(config, init, apply, unembed, axes, shapes)


def to_sample(model: Model, mesh: Mesh) -> Model:
    """The model over parameters that are laid out by `sharding.sampling_rules`."""
    rules = sharding.sampling_rules(mesh, model.config.kinds)
    if rules["experts"] is None:
        return model
    return build(model.config, constrain=sharding.constrain(mesh, rules))


def _exclude_textless(config: ModelConfig, logits: Array) -> Array:
    """Logits [..., V] that are NEVER for tokens without text; as they are where all have some."""
    has_text = tokens_with_text(config.vocab_size, config.without_text)
    if has_text is None:
        return logits
    return jnp.where(jnp.broadcast_to(has_text, logits.shape), logits, NEVER)


def tokens_with_text(vocab_size: int, without_text: Sequence[tuple[int, int]]) -> np.ndarray | None:
    """[V] bool, the tokens that can be drawn; None: all can.

    Args:
      without_text: as of `ModelConfig`.
    """
    if not without_text:
        return None
    has_text = np.ones(vocab_size, bool)
    for begin, end in without_text:
        has_text[begin:end] = False
    return has_text


def _looked_up(embedding: Embedding, tokens: Array, constrain: Constrain | None) -> Array:
    """The vectors of tokens; see LOOKED_UP_AXES."""
    if constrain is None or tokens.ndim != 2:
        return embedding.encode(tokens)
    tokens = constrain(tokens, LOOKED_UP_AXES[:2])
    return constrain(embedding.encode(tokens), LOOKED_UP_AXES)


def _rngs(key: Array) -> nnx.Rngs:
    """The streams that weights and adapters are drawn from."""
    return nnx.Rngs(params=key, lora=jax.random.fold_in(key, ADAPTER_FOLD))


def _define(make: Callable[[nnx.Rngs], nnx.Module]) -> _Definition:
    abstract = nnx.eval_shape(lambda: make(_rngs(jax.random.key(0, impl=GENERATOR))))
    graph, state = nnx.split(abstract)
    axes = jax.tree.map(
        lambda param: param.get_metadata("axes"),
        state,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    return _Definition(make, graph, nnx.to_pure_dict(axes))


def _modules(config: ModelConfig) -> Modules:
    wide, tied, kinds = config.float32_head, config.tie_embeddings, dict.fromkeys(config.kinds)
    embed = _define(lambda rngs: Embedding(config, rngs, wide=wide and tied))
    return {
        "embed": embed,
        "head": embed if tied else _define(lambda rngs: Embedding(config, rngs, wide=wide)),
        "final_norm": _define(lambda rngs: RMSNorm({"norm": config.hidden_size}, config)),
        **{kind: _define(lambda rngs, kind=kind: Block(config, kind, rngs)) for kind in kinds},
    }


def _init(config: ModelConfig, modules: Modules, key: Array) -> Params:
    """Layer i draws from fold_in(key, i), wherever the pattern puts it."""
    depth, begin = config.num_layers, len(config.lead)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(depth + 2))
    scanned = depth - config.num_rest

    def layers(first: int, last: int) -> Params:
        return {str(i - first): modules[config.kinds[i]].init(keys[i]) for i in range(first, last)}

    stacked = {
        k: (kind, keys[begin + k : scanned : len(config.pattern)])
        for k, kind in enumerate(config.pattern if config.periods else ())
    }
    params: Params = {
        "embed": modules["embed"].init(keys[depth]),
        **({"lead": layers(0, begin)} if begin else {}),
        "blocks": {str(k): jax.vmap(modules[kind].init)(at) for k, (kind, at) in stacked.items()},
        "rest": layers(scanned, depth),
        "final_norm": modules["final_norm"].init(key),
    }
    if not config.tie_embeddings:
        params["head"] = modules["head"].init(keys[depth + 1])
    return params


def _axes(
    kinds: tuple[Sequence[LayerKind], Sequence[LayerKind]], modules: Modules, shapes: Params
) -> Params:
    """Args: kinds: those of the lead, and of the pattern."""

    def stacked(axes: Params) -> Params:
        is_names = lambda node: type(node) is tuple  # noqa: E731
        return jax.tree.map(lambda names: ("layers", *names), axes, is_leaf=is_names)

    axes: Params = {}
    for name, tree in shapes.items():
        if name in LAYERS:
            axes[name] = {i: modules[kinds[name != "lead"][int(i)]].axes for i in tree}
        else:
            axes[name] = modules[name].axes
    return {**axes, "blocks": {k: stacked(layer) for k, layer in axes["blocks"].items()}}


def _through(
    config: ModelConfig,
    layers: Layers,
    params: Params,
    hidden: Array,
    memory: Any,
    remat: Remat,
) -> tuple[Array, Any]:
    """The layers in order, unrolled or scanned."""
    is_stacked = type(memory) is not tuple
    unrolls = is_stacked and remat == "none" and config.num_layers <= UNROLLED
    # Jitted so that layers of one kind are traced once; while decoding they are lowered once, too.
    jitted: Layers = {kind: jax.jit(run, inline=unrolls) for kind, run in layers.items()}
    if not is_stacked:
        return _unrolled(config, jitted, params, hidden, memory)
    if unrolls:
        none = (None,) * config.num_layers
        per_layer = none if memory is None else memory_per_layer(config, memory)
        hidden, memory = _unrolled(config, jitted, params, hidden, per_layer)
        return hidden, stacked_memory(config, memory)
    return _scanned(config, layers, params, hidden, memory, _keeper(remat))


def _scanned(
    config: ModelConfig,
    layers: Layers,
    params: Params,
    hidden: Array,
    memory: Any,
    keep: Callable[..., Any],
) -> tuple[Array, Any]:
    """The lead, a scan of the periods, the layers left over; memory is stacked or None."""
    if memory is None:
        memory = {part: dict.fromkeys(params[part]) for part in LAYERS if part in params}
    written: dict[str, Any] = {part: {} for part in memory}

    def run_each(part: str, kinds: Sequence[LayerKind], hidden: Array) -> Array:
        for i, kind in enumerate(kinds):
            layer_params, entry = params[part][str(i)], memory[part][str(i)]
            hidden, written[part][str(i)] = keep(layers[kind])(layer_params, hidden, entry)
        return hidden

    def period(hidden: Array, xs: tuple[Params, Any]) -> tuple[Array, Any]:
        blocks, entries = xs
        written = {}
        for k, kind in enumerate(config.pattern):
            hidden, written[str(k)] = layers[kind](blocks[str(k)], hidden, entries[str(k)])
        return hidden, written

    hidden = run_each("lead", config.lead, hidden)
    if config.periods:
        # A barrier against common subexpressions is not needed inside a scan, and costs fusion.
        hidden, written["blocks"] = jax.lax.scan(
            keep(period, prevent_cse=False), hidden, (params["blocks"], memory["blocks"])
        )
    hidden = run_each("rest", config.pattern[: config.num_rest], hidden)
    return hidden, written


def _keeper(remat: Remat) -> Callable[..., Any]:
    """jax.checkpoint for `remat`, as (function, prevent_cse=True) -> function."""
    if remat == "none":
        return lambda run, **_: run
    policies = jax.checkpoint_policies
    policy = {
        "full": None,
        "attention": policies.save_only_these_names(SAVED),
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SAVED)
        ),
    }[remat]
    return functools.partial(jax.checkpoint, policy=policy)


def _unrolled(
    config: ModelConfig, layers: Layers, params: Params, hidden: Array, memory: tuple[Any, ...]
) -> tuple[Array, tuple[Any, ...]]:
    """Runs layer by layer, so that a donated cache of one layer is updated in place."""
    if len(memory) != config.num_layers:
        raise ValueError(
            f"apply: memory has {len(memory)} entries, but the model has {config.num_layers} "
            "layers: give one entry per layer (memory_per_layer), or stacked memory as a dict"
        )
    per_layer = params["layers"] if "layers" in params else memory_per_layer(config, params)
    written = []
    for kind, layer_params, entry in zip(config.kinds, per_layer, memory, strict=True):
        hidden, entry = layers[kind](layer_params, hidden, entry)
        written.append(entry)
    return hidden, tuple(written)


def _check(config: ModelConfig) -> None:
    problems = [
        f"{name} = {getattr(config, name)}: must be at least 1"
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        if getattr(config, name) < 1
    ]
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if kv_heads < 1 or heads % kv_heads:
        problems.append(f"num_kv_heads = {kv_heads}: must divide num_heads = {heads}")
    if config.head_dim < 2 or config.head_dim % 2:
        problems.append(f"head_dim = {config.head_dim}: rotary positions need an even number")
    if not config.pattern:
        problems.append("pattern = (): give at least one LayerKind")
    if len(config.lead) > config.num_layers:
        problems.append(f"lead: {len(config.lead)} kinds for num_layers = {config.num_layers}")
    for kind in dict.fromkeys((*config.lead, *config.pattern)):
        problems += _odd_kind(kind, config.head_dim)
    for name, choices in (("norms", NORMS), ("query_key_norm", QUERY_KEY_NORMS)):
        if getattr(config, name) not in choices:
            problems.append(f'{name} = "{getattr(config, name)}": known are {", ".join(choices)}')
    if config.activation not in ACTIVATIONS:
        activations = ", ".join(ACTIVATIONS)
        problems.append(f'activation = "{config.activation}": known are {activations}')
    lora = config.lora
    adapted = () if lora is None or pattern_problem(lora.targets) else config.adapted
    groups = (*config.fused, EXPERT_MAPS[:2])
    problems += [] if lora is None else _odd_lora(lora, adapted, groups)
    problems += _odd_experts(config.kinds)
    if config.dtype not in ("float32", "bfloat16", "float16", "float64"):
        problems.append(f'dtype = "{config.dtype}": choose float32, bfloat16, float16 or float64')
    refuse_all("ModelConfig cannot be built:", problems)


def _odd_lora(
    lora: LoraConfig, adapted: tuple[str, ...], groups: Sequence[tuple[str, ...]]
) -> list[str]:
    """Args: groups: of maps whose adapters have one A."""
    problems = []
    if lora.rank < 1:
        problems.append(f"lora.rank = {lora.rank}: must be at least 1")
    if not 0 < lora.alpha < math.inf:
        problems.append(f"lora.alpha = {lora.alpha}: must be above 0 and finite")
    if problem := pattern_problem(lora.targets):
        return [*problems, f"lora.targets = {lora.targets!r}: {problem}"]
    if not adapted:
        linear_maps = ", ".join(LINEAR)
        problems.append(f"lora.targets = {lora.targets!r}: matches none of {linear_maps}")
    for group in groups:
        part = [name for name in group if name in adapted]
        if part and len(part) < len(group):
            problems.append(
                f"lora.targets = {lora.targets!r}: has {', '.join(part)} only, of maps that share "
                f"the A of their adapters: adapt {', '.join(group)}, or none of them"
            )
    return problems


def _odd_experts(kinds: Sequence[LayerKind]) -> list[str]:
    feeds = {kind.feed for kind in kinds if isinstance(kind.feed, ExpertsKind)}
    problems = [
        f"{feed}: top_k must be from 1 to the number of experts"
        for feed in feeds
        if not 1 <= feed.top_k <= feed.number
    ]
    problems += [
        f"{feed}: groups must divide the experts, and top_k fit into top_groups of them"
        for feed in feeds
        if feed.number % feed.groups
        or not 1 <= feed.top_groups <= feed.groups
        or (feed.groups > 1 and feed.number // feed.groups < 2)
        or feed.top_k > feed.number // feed.groups * feed.top_groups
    ]
    if len({feed.top_k for feed in feeds}) > 1:
        problems.append("layers have experts of several top_k: one is built")
    return problems


def _odd_kind(kind: LayerKind, head_dim: int) -> list[str]:
    if isinstance(kind.mixer, AttentionKind):
        problems, latent = [], kind.mixer.latent
        if latent is not None:
            sizes = *latent[:4], 1 if latent.query is None else latent.query
            if min(sizes) < 1 or head_dim != latent.plain + latent.turned:
                why = f"expected sizes of 1 or more, plain + turned = head_dim = {head_dim}"
                problems.append(f"{latent}: {why}")
        return problems + _odd_rope(kind.mixer.rope, kind.mixer.positioned(head_dim))
    least, key_heads = min(kind.mixer[:6]), kind.mixer.key_heads
    if least < 1 or kind.mixer.value_heads % key_heads or kind.mixer.conv < 2:
        why = "sizes of 1 or more, value_heads a multiple of key_heads, conv 2 or more"
        return [f"{kind.mixer}: expected {why}"]
    return []


def _odd_rope(rope: Rope | None, head_dim: int) -> list[str]:
    if rope is None:
        return []
    turned = turned_dims(rope, head_dim)
    if turned % 2 or not 0 <= turned <= head_dim:
        return [f"{rope}: turns {turned} of {head_dim} dimensions, expected an even number of them"]
    if rope.stretch and len(rope.stretch) != turned // 2:
        return [f"{rope}: {len(rope.stretch)} numbers in stretch, expected {turned // 2}"]
    return []
