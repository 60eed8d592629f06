"""What a family of decoders is: how its config.json is read, and where its tensors stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxgrpo.models.api import AttentionKind, DenseKind, ExpertsKind, LayerKind
from jaxgrpo.models.hf.fields import REQUIRED, Fields
from jaxgrpo.models.hf.rope import FULL, SLIDING, Turn

MODULES: Mapping[str, str] = MappingProxyType(
    {  # those of a layer follow "model.layers.{layer}."
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "attention/query": "self_attn.q_proj",
        "attention/query_norm": "self_attn.q_norm",
        "attention/key": "self_attn.k_proj",
        "attention/key_norm": "self_attn.k_norm",
        "attention/value": "self_attn.v_proj",
        "attention/out": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward/gate": "mlp.gate_proj",
        "feed_forward/up": "mlp.up_proj",
        "feed_forward/down": "mlp.down_proj",
    }
)
"""Our module -> that of Llama, which most families keep."""

EXPERTS: Mapping[str, str] = MappingProxyType(
    {f"experts/{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
)
"""Our map of experts -> that of one in most families, {} for its number."""
FUSED_EXPERTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mlp.experts.gate_up_proj": ("experts/gate", "experts/up"),
        "mlp.experts.down_proj": ("experts/down",),
    }
)
"""The tensor of all experts in most families, if they are saved so -> our maps."""

ACTIVATIONS = MappingProxyType(
    {
        **dict.fromkeys(("silu", "swish"), "silu"),
        **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_tanh"),
        "gelu": "gelu",
        "relu": "relu",
        "relu2": "relu2",
    }
)
"""The name of an activation in config.json -> ours."""

DTYPES = MappingProxyType({name: name for name in ("float32", "bfloat16", "float16")})


class Family(NamedTuple):
    """A family: one of `jaxgrpo.models.hf.families`, or a user's own (`model.family`).

    `read` gives the fields of a ModelConfig, those of `sizes` among them; what it does not read
    must be off, be known to change nothing (`harmless`), or is refused.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], dict[str, Any]]
    modules: Mapping[str, str] = MODULES
    fused: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Module of a layer -> ours, whose outputs lie side by side in it"""
    by_head: Sequence[str] = ()
    """Those of `fused` with the outputs of one key head of a delta net after another's"""
    experts: Mapping[str, str] = MappingProxyType({})
    """Our map of experts -> Hugging Face's module of one of them, {} for its number"""
    fused_experts: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The same as one tensor of all experts -> ours, whose outputs lie side by side in it"""
    interleaves_experts: bool = False  # they are always fused: see `mapping.Names`
    harmless: Sequence[str] = ()
    in_pairs: bool = False
    """Whether dimensions 2 i and 2 i + 1 of a head turn together, not i and i + half of them"""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Part of a tensor's name -> what transformers writes in its place"""
    carried: Sequence[str] = ()
    """Beginnings of the names of tensors that transformers does not read either: an export keeps
    them as they are"""
    older_names: Mapping[str, str] = MappingProxyType({})
    """Field of config.json -> its name in transformers 4, which an export has too"""


def sizes(
    fields: Fields,
    *,
    head_dim: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    positions: int = 32_768,
    activation: str = "hidden_act",
    act: str = "silu",
    as_many_kv: bool = False,
    pad: int | None = None,
    norm_eps: str = "rms_norm_eps",
    width: int | None = None,
) -> dict[str, Any]:
    """What every family gives.

    Args:
      head_dim, eps, tied, positions, act, pad: what transformers assumes without head_dim, the
        field norm_eps, tie_word_embeddings, max_position_embeddings, the field activation, or
        pad_token_id. A head_dim that is null, or None here, is hidden_size / heads.
      activation, norm_eps: the fields that name the activation, and what norms add.
      as_many_kv: whether transformers assumes as many KV heads as heads where none are given.
      width: what stands in for an intermediate_size that may be left out.
    """
    # Ones stand in for what is missing, which is a problem already, so that the rest is read too.
    num_heads = fields.take("num_attention_heads", "size") or 1
    hidden = fields.take("hidden_size", "size") or 1
    if head_dim is None or "head_dim" in fields.content:
        head_dim = fields.take("head_dim", "size", max(1, hidden // num_heads))
    num_kv_heads = _kv_heads(fields, num_heads, as_many_kv)
    name = "dtype" if fields.content.get("dtype") is not None else "torch_dtype"
    vocab = fields.take("vocab_size", "size")
    return {
        "vocab_size": vocab,
        "pad_token": _pad_token(fields.nullable("pad_token_id", "token", pad), vocab or 1),
        "hidden_size": hidden,
        "intermediate_size": fields.take("intermediate_size", "size", width or REQUIRED),
        "num_layers": fields.take("num_hidden_layers", "layers") or 1,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.take(norm_eps, "positive", eps),
        "tie_embeddings": fields.take("tie_word_embeddings", "flag", tied),
        "activation": fields.choice(activation, ACTIVATIONS, act),
        "max_positions": fields.take("max_position_embeddings", "size", positions),
        "dtype": fields.choice(name, DTYPES, "float32"),
        "query_key_norm": "none",
    }


def _kv_heads(fields: Fields, num_heads: int, as_many: bool) -> int:
    if not as_many and "num_key_value_heads" not in fields.content:
        fields.problems.append("num_key_value_heads: missing")
    num_kv_heads = fields.take("num_key_value_heads", "size", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"expected a divisor of {num_heads} heads")
    return num_kv_heads


def _pad_token(token_id: int | None, vocab: int) -> int | None:
    """The row that nn.Embedding takes for padding: a negative one is counted from the end."""
    token = token_id if token_id is None or token_id >= 0 else token_id + vocab
    return token if token is not None and 0 <= token < vocab else None


def refuse_without_rope(fields: Fields) -> None:
    """Of families for which transformers assumes more than a theta: releases may differ in it."""
    if not any(fields.content.get(name) for name in ("rope_parameters", "rope_scaling")):
        fields.problems.append("rope_parameters or rope_scaling: missing")


def attention_bias(fields: Fields, default: bool = False) -> dict[str, bool]:
    """Biases of queries, keys, values and the output, by one field."""
    bias = fields.take("attention_bias", "flag", default)
    return {"attention_bias": bias, "attention_out_bias": bias}


def uniform(turn: Turn, window: int | None = None, soft_cap: float | None = None) -> dict[str, Any]:
    """A model whose layers are all alike."""
    return {
        "pattern": (LayerKind(AttentionKind(window, turn.rope, soft_cap)),),
        "position_limit": turn.limit,
    }


def layered(
    fields: Fields,
    count: int,
    turns: Mapping[str, Turn],
    default: Callable[[int], str],
    window: int | None,
    soft_cap: float | None = None,
) -> dict[str, Any]:
    """A model whose layers are of the types of `layer_types`.

    Args:
      turns: the Rope of each type.
      default: the type of layer i where config.json has no list.
      window: of the layers of type SLIDING.
    """
    kinds = layer_types(fields, count, default, window)
    limits = [turns[kind].limit for kind in set(kinds)]
    layer_kinds = {
        FULL: LayerKind(AttentionKind(None, turns[FULL].rope, soft_cap)),
        SLIDING: LayerKind(AttentionKind(window, turns[SLIDING].rope, soft_cap)),
    }
    return {
        "pattern": shortest_pattern([layer_kinds[kind] for kind in kinds]),
        "position_limit": min((limit for limit in limits if limit), default=None),
    }


def layer_types(
    fields: Fields, count: int, default: Callable[[int], str], window: int | None
) -> list[str]:
    """The type of each layer, FULL or SLIDING."""
    kinds = fields.take("layer_types", "texts", [default(i) for i in range(count)])
    allowed = (FULL,) if window is None else (FULL, SLIDING)
    if len(kinds) != count or not set(kinds) <= set(allowed):
        without = " (no sliding_window, or use_sliding_window is off)" if window is None else ""
        fields.refuse(
            "layer_types",
            f"expected {' and '.join(allowed)}{without}, num_hidden_layers = {count} of them",
        )
        return [FULL] * count
    return kinds


def with_feeds(config: dict[str, Any], feeds: Sequence[DenseKind | ExpertsKind]) -> dict[str, Any]:
    """A model whose layer i has the feed-forward part feeds[i], of which the first may be others.

    Args:
      config: as in `uniform` or `layered`, whose layers are dense.
    """
    pattern = config["pattern"]
    kinds = [pattern[i % len(pattern)]._replace(feed=feed) for i, feed in enumerate(feeds)]
    lead = next((i for i, feed in enumerate(feeds) if feed != feeds[0]), 0)
    # As many first layers as leave the shortest pattern.
    choices = [(kinds[:begin], shortest_pattern(kinds[begin:])) for begin in {0, lead}]
    first, rest = min(choices, key=lambda choice: len(choice[0]) + len(choice[1]))
    return {**config, "lead": tuple(first), "pattern": rest}


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest sequence that repeats to the kinds of all layers, the last time perhaps in part.

    >>> local, full = LayerKind(AttentionKind(window=4)), LayerKind()
    >>> len(shortest_pattern([local, local, full, local, local, full, local]))
    3
    """
    for length in range(1, len(kinds) + 1):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    raise ValueError("shortest_pattern: no layers")
