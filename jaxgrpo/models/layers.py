"""The modules of a decoder, defined in Flax NNX; `decoder.py` runs them over plain dicts.

Every parameter names its dimensions in the metadata `axes`, never a mesh: "vocab", "embed",
"heads", "kv_heads", "head_dim", "mlp", "latent", "rank" of adapters, "norm" for scales of norms.
Matrices are drawn from a normal of standard deviation 0.02, biases are 0 and a norm begins as the
identity up to scale, as in the Hugging Face models of these families (`initializer_range`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jaxgrpo.models.api import AttentionKind, Caller, ModelConfig, Rope
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.models.products import as_sampled, custom_vjp, product, product_in_pieces, rounded

INITIAL_STD = 0.02
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

Norm = Callable[[Array], Array]
Angles = tuple[Array, Array, Array | float] | None
"""Cosine and sine of the rotary angles, each [*B, Q, 1, turned / 2], and a factor of the queries,
[*B, Q, 1, 1] or the number 1; None: no turn."""


def rotary_angles(
    position: Int[Array, "*B Q"], rope: Rope | None, head_dim: int, dtype: Any = jnp.float32
) -> Angles:
    """Cosine and sine, times `rope.scale`, of position * frequency (see `Rope`).

    Args: dtype: of the result, in which it is computed.
    Source: Su et al. 2021, arXiv 2104.09864, with the "rotate half" pairing of `rotate`.
    """
    if rope is None:
        return None
    turned = turned_dims(rope, head_dim)
    frequency = np.float64(rope.theta) ** (-np.arange(0, turned, 2) / turned)
    frequency = (frequency * (rope.stretch or 1.0)).astype(dtype)
    angle = position[..., None, None].astype(dtype) * frequency

    def wave(sine: Array) -> Array:
        return jnp.where(sine, jnp.sin(angle), jnp.cos(angle)) * rope.scale

    # In a loop of two, which nothing is fused across: XLA on a CPU else computes both again for
    # every head of every layer, a quarter of the time of a small layer's attention.
    cos, sin = jax.lax.map(wave, jnp.asarray([False, True]))
    if not rope.growth:
        return cos, sin, 1.0
    beta, original = rope.growth
    periods = jnp.floor(position.astype(dtype) / original)
    return cos, sin, (1 + beta * jnp.log1p(periods))[..., None, None]


def turned_dims(rope: Rope, head_dim: int) -> int:
    """How many dimensions of a head turn, the first ones."""
    return int(rope.share * head_dim)


def rotate(
    x: Float[Array, "*B Q heads head_dim"], angles: Angles, scale: Array | float = 1.0
) -> Float[Array, "*B Q heads head_dim"]:
    """Turns the pairs (x[i], x[i + turned / 2]) by their angles, then multiplies all by `scale`.

    Done in at least float32 and rounded once. Published interleaved weights pair (2 i, 2 i + 1);
    Hugging Face checkpoints are already permuted to this pairing.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    if angles is None:
        return (x.astype(dtype) * scale).astype(x.dtype)
    cos, sin = (angle.astype(dtype) for angle in angles[:2])
    half = cos.shape[-1]
    first, second, still = jnp.split(x.astype(dtype), [half, 2 * half], axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.concatenate([*parts, still] if still.shape[-1] else parts, axis=-1)
    return (turned * scale).astype(x.dtype)


def soft_capped(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), which stays within the cap; x itself without one (Gemma 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def scaled_by(x: Float[Array, "..."], factor: Any) -> Float[Array, "..."]:
    """x * factor in at least float32, rounded once, as torch multiplies by a number of Python.

    A factor in x's bfloat16 would be off by up to 0.4%, everywhere in the same direction.
    """
    if factor == 1.0:
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * jnp.asarray(factor, wide)).astype(x.dtype)


class Embedding(nnx.Module):
    """A table of one vector per token; read by `encode`, and as an output head by `decode`.

    A `wide` table is held in at least float32, and its product is computed in that dtype. Reading
    the pad token gives its row no gradient, as padding_idx of torch's nn.Embedding; as a head the
    same table gets it.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, wide: bool = False):
        shape = (config.vocab_size, config.hidden_size)
        dtype = wide_dtype(config) if wide else config.dtype
        self.table: nnx.Param[Array] = matrix(shape, ("vocab", "embed"), dtype, rngs)
        self.dtype: str = config.dtype
        self.wide: bool = wide
        self.pad: int | None = config.pad_token
        self.scale: float = config.logit_scale
        self.cap: float | None = config.logit_soft_cap
        exact, scale = config.exact_embedding_scale, config.embedding_scale
        self.vector_scale: float = scale if exact else float(np.asarray(scale, config.dtype))
        self.summed: str = wide_dtype(config) if config.float32_activations else config.dtype

    def scaled(self, vectors: Float[Array, "*B Q E"]) -> Float[Array, "*B Q E"]:
        """Vectors that `encode` gave, as the first layer takes them."""
        return scaled_by(vectors.astype(self.summed), self.vector_scale)

    def encode(self, tokens: Int[Array, "*B Q"]) -> Float[Array, "*B Q E"]:
        vectors = rounded(self.table[...][tokens], self.dtype)
        if self.pad is None:
            return vectors
        is_pad = (tokens == self.pad)[..., None]
        return jnp.where(is_pad, jax.lax.stop_gradient(vectors), vectors)

    def decode(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Logits in at least float32, whatever the dtype of the table."""
        table = self.table[...] if self.wide else rounded(self.table[...], self.dtype)
        # By default a TPU multiplies float32 in bfloat16 and a GPU in TF32.
        precision = "highest" if self.wide else None
        multiply = _bfloat16_logits if table.dtype == jnp.bfloat16 else _logits
        logits = multiply(hidden, table, precision)
        return soft_capped(logits if self.scale == 1.0 else logits * self.scale, self.cap)


def _logits(hidden: Array, table: Array, precision: str | None) -> Array:
    dtype = jnp.promote_types(table.dtype, jnp.float32)
    return jnp.einsum(
        "...e,ve->...v", hidden, table, preferred_element_type=dtype, precision=precision
    )


@custom_vjp(2)
def _bfloat16_logits(hidden: Array, table: Array, precision: str | None) -> Array:
    """`_logits` of a table in bfloat16, whose float32 gradient a GPU rounds to bfloat16 too.

    It would else take both products of the gradient in TF32, at a third of the speed, and a TPU
    rounds by default. Only reverse mode, once.
    """
    return _logits(hidden, table, precision)


def _bfloat16_logits_forward(hidden: Array, table: Array, precision: str | None):
    return _logits(hidden, table, precision), (hidden, table)


def _bfloat16_logits_backward(
    precision: str | None, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    def as_given(cotangent: Array, hidden: Array, table: Array) -> tuple[Array, Array]:
        return jax.vjp(functools.partial(_logits, precision=precision), hidden, table)[1](cotangent)

    return jax.lax.platform_dependent(cotangent, *saved, cuda=rounded_gradients, default=as_given)


def rounded_gradients(cotangent: Array, hidden: Array, table: Array) -> tuple[Array, Array]:
    """The gradients of hidden and table, from logits' gradients in the dtype of the table.

    The sums of their products are taken in float32, and rounded.
    """
    narrow = cotangent.astype(table.dtype)
    d_hidden = jnp.einsum("...v,ve->...e", narrow, table)
    return d_hidden, jnp.einsum("...v,...e->ve", narrow, hidden)


_bfloat16_logits.defvjp(_bfloat16_logits_forward, _bfloat16_logits_backward)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + scale), in at least float32, over the last dimensions.

    With config.center_norms of x - mean(x): a LayerNorm without bias.

    `sizes` maps the logical name of each of them to its size, in order.
    """

    def __init__(self, sizes: dict[str, int], config: ModelConfig):
        initial = jnp.full(tuple(sizes.values()), 1.0 - config.norm_offset, config.dtype)
        self.scale: nnx.Param[Array] = nnx.Param(initial, axes=tuple(sizes))
        self.dtype: str = config.dtype
        self.eps: float = config.rms_norm_eps
        self.offset: float = config.norm_offset
        self.centers: bool = config.center_norms

    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        wide = x.astype(dtype)
        scale = self.offset + as_sampled(self.scale[...], self.dtype).astype(dtype)
        over = tuple(range(-scale.ndim, 0))
        if self.centers:
            wide = wide - jnp.mean(wide, axis=over, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=over, keepdims=True) + self.eps)
        return _scaled(wide * inverse, scale).astype(x.dtype)


@custom_vjp()
def _scaled(x: Array, scale: Array) -> Array:
    """x * scale along the last dimensions.

    The scale's gradient is summed over all else as a product with ones: as a reduction, it takes
    XLA on a CPU 3% of an update. Only reverse mode, once.
    """
    return x * scale


def _scaled_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, scale = saved
    unit_weights = jnp.ones(x.shape[: x.ndim - scale.ndim], x.dtype)
    summed = jnp.tensordot(unit_weights, cotangent * x, axes=unit_weights.ndim, precision="highest")
    return cotangent * scale, summed


_scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), _scaled_backward)


class LinearMap(nnx.Module):
    """The arrays of a linear map whose inputs and outputs may be several dimensions each, or of as
    many maps as `stacked` has: kernel, and bias where there is one.

    With adapters, where config.lora names it, lora_a and lora_b; of maps that are fused only the
    first has a lora_a (`ModelConfig.fused`). With config.weight_dtype the kernel's columns are to
    be multiplied by kernel_scale (`low_bit`); no gradient is to be taken.
    """

    def __init__(
        self,
        name: str,
        inputs: dict[str, int],
        outputs: dict[str, int],
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        stacked: Mapping[str, int] = MappingProxyType({}),
    ):
        """`inputs`, `outputs` and `stacked`, the leading ones of all arrays, map the logical name
        of each dimension to its size, in order.

        Args:
          name: one of LINEAR.
        """
        sizes, columns = {**stacked, **inputs, **outputs}, {**stacked, **outputs}
        shape, weight_dtype = (*columns.values(),), config.weight_dtype
        self.kernel: nnx.Param[Array] = matrix(
            (*sizes.values(),), (*sizes,), weight_dtype or config.dtype, rngs
        )
        unit, zero = jnp.ones(shape, jnp.float32), jnp.zeros(shape, config.dtype)
        self.kernel_scale: nnx.Param[Array] | None = (
            None if weight_dtype is None else nnx.Param(unit, axes=(*columns,))
        )
        self.bias: nnx.Param[Array] | None = nnx.Param(zero, axes=(*columns,)) if bias else None
        self.contracted: int = len(inputs)
        self.dtype: str = config.dtype
        self.in_pieces: bool = config.float32_activations
        lora = config.lora
        lora = lora if lora is not None and name in lora.modules else None
        rank, scale = (0, 0.0) if lora is None else lora.rank_and_scale(name)
        has_a = lora is not None and config.holds_a(name) == name
        self.lora_a: nnx.Param[Array] | None = (
            low_map(inputs, rank, config.dtype, rngs, stacked) if has_a else None
        )
        self.lora_b: nnx.Param[Array] | None = (
            high_map(rank, outputs, config.dtype, stacked) if rank else None
        )
        self.scale: float = scale


class Dense(LinearMap):
    """y = x · kernel (+ bias), with adapters + scale * ((x · lora_a) · lora_b)."""

    def __call__(
        self, x: Float[Array, "..."], low: Float[Array, "... rank"] | None = None
    ) -> Float[Array, "..."]:
        """
        Args:
          low: x · lora_a of the map that this one is fused with.
        """
        y: Any = self.times(x, self.kernel[...], self.contracted)
        if self.kernel_scale is not None:
            y = (y * self.kernel_scale[...]).astype(y.dtype)
        if self.lora_b is not None:
            inner: Any = self.low(x) if low is None else low
            added: Any = self.times(inner, self.lora_b[...], 1)
            y = y + scaled_by(added, self.scale)
        if self.bias is None:
            return y
        bias = as_sampled(self.bias[...], self.dtype)
        return (y.astype(jnp.promote_types(y.dtype, bias.dtype)) + bias).astype(y.dtype)

    def matrix(self) -> Any:
        """The kernel with its scale and without adapters, for products by heads."""
        kernel: Any = self.kernel[...]
        if self.kernel_scale is None:
            return kernel
        return kernel.astype(jnp.float32) * self.kernel_scale[...]

    def low(self, x: Float[Array, "..."]) -> Any:
        """x · lora_a; None without one."""
        return None if self.lora_a is None else self.times(x, self.lora_a[...], self.contracted)

    def times(self, x: Array, kernel: Array, contracted: int) -> Array:
        """x · kernel, of inputs in the dtype of weights or in float32."""
        if not self.in_pieces:
            return product(x, kernel, contracted)
        return product_in_pieces(x, kernel, contracted, self.dtype)


def side_by_side(x: Float[Array, "..."], *maps: Dense) -> list[Array]:
    """What maps give of one input. One without a lora_a takes that of those before it."""
    outputs, low = [], None
    for linear in maps:
        inner = linear.low(x)
        low = low if inner is None else inner
        outputs.append(linear(x, low))
    return outputs


class Attention(nnx.Module):
    """Projections, q/k norm and rotation; who attends to what is the caller's `attend`.

    The query carries the scale, so that `attend` multiplies by nothing. With
    `config.attention_gate` a head of the query's map is a query and then a gate.
    """

    def __init__(self, config: ModelConfig, kind: AttentionKind, rngs: nnx.Rngs):
        embed = {"embed": config.hidden_size}
        heads = {"heads": config.num_heads, "head_dim": config.head_dim}
        kv_heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        self.is_gated: bool = config.attention_gate
        gated = {**heads, "head_dim": 2 * config.head_dim} if self.is_gated else heads
        bias, out_bias = config.attention_bias, config.attention_out_bias
        self.query: Dense = Dense("attention/query", embed, gated, config, rngs, bias=bias)
        self.key: Dense = Dense("attention/key", embed, kv_heads, config, rngs, bias=bias)
        self.value: Dense = Dense("attention/value", embed, kv_heads, config, rngs, bias=bias)
        self.out: Dense = Dense("attention/out", heads, embed, config, rngs, bias=out_bias)
        self.query_norm: Norm = _head_norm(heads, config)
        self.key_norm: Norm = _head_norm(kv_heads, config)
        zeros = jnp.zeros(config.num_heads, config.dtype)
        self.sinks: nnx.Param[Array] | None = (
            nnx.Param(zeros, axes=("heads",)) if kind.sinks else None
        )
        scale = config.query_scale
        self.scale: float = config.head_dim**-0.5 if scale is None else scale
        self.norms_turned: bool = config.query_key_norm == "turned"
        self.dtype: str = config.dtype
        self.attended: str = cache_dtype("auto", config)

    def __call__(
        self, x: Array, angles: Angles, caller: Caller, memory: Any, kind: AttentionKind
    ) -> tuple[Array, Any]:
        query, key, value = side_by_side(x, self.query, self.key, self.value)
        query, *gate = jnp.split(query, 1 + self.is_gated, axis=-1)
        growth = 1.0 if angles is None else angles[2]
        if self.norms_turned:
            query, key = rotate(query, angles, growth), rotate(key, angles)
            query, key = rotate(self.query_norm(query), None, self.scale), self.key_norm(key)
        else:
            query, key = self.query_norm(query), self.key_norm(key)
            query, key = rotate(query, angles, self.scale * growth), rotate(key, angles)
        sinks = () if self.sinks is None else (as_sampled(self.sinks[...], self.dtype),)
        query, key, value = (rounded(leaf, self.attended) for leaf in (query, key, value))
        out, memory = caller.attend(query, key, value, memory, kind, *sinks)
        return self.out(out * jax.nn.sigmoid(gate[0]) if gate else out), memory


def _head_norm(heads: dict[str, int], config: ModelConfig) -> Norm:
    """The norm of queries or keys [..., heads, head_dim]."""
    if config.query_key_norm in ("head", "turned"):
        return RMSNorm({"norm": config.head_dim}, config)
    return RMSNorm(heads, config) if config.query_key_norm == "whole" else jax.nn.identity


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)); without a gate down(activation(up(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        size: int | None,
        rngs: nnx.Rngs,
        place: Literal["feed_forward", "experts/shared"] = "feed_forward",
    ):
        embed, mlp = {"embed": config.hidden_size}, {"mlp": size or config.intermediate_size}
        bias = config.feed_forward_bias
        self.gate: Dense | None = (
            Dense(f"{place}/gate", embed, mlp, config, rngs, bias=bias) if config.gated else None
        )
        self.up: Dense = Dense(f"{place}/up", embed, mlp, config, rngs, bias=bias)
        self.down: Dense = Dense(f"{place}/down", mlp, embed, config, rngs, bias=bias)
        self.activation: str = config.activation

    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        activation = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(activation(self.up(x)))
        gate, up = side_by_side(x, self.gate, self.up)
        return self.down(activation(gate) * up)


def wide_dtype(config: ModelConfig) -> str:
    """The dtype of a model in float32 or wider; float32 of narrower ones."""
    return str(jnp.promote_types(config.dtype, jnp.float32))


def matrix(
    shape: tuple[int, ...], axes: tuple[str, ...], dtype: str, rngs: nnx.Rngs
) -> nnx.Param[Array]:
    """Weights as training from nothing begins with them."""
    # Drawn in float32 whatever the dtype: the same key gives the same weights, rounded.
    value = INITIAL_STD * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value.astype(dtype), axes=axes)


def low_map(
    inputs: dict[str, int],
    rank: int,
    dtype: str,
    rngs: nnx.Rngs,
    stacked: Mapping[str, int],
) -> nnx.Param[Array]:
    """lora_a [*stacked, *inputs, rank], uniform within 1 / sqrt(inputs).

    Source: the default of PEFT, kaiming_uniform_(a=sqrt(5)), and zeros as lora_b.
    """
    bound, sizes = math.prod(inputs.values()) ** -0.5, {**stacked, **inputs, "rank": rank}
    # A stream of its own: the weights are those of a model without adapters.
    value = jax.random.uniform(rngs.lora(), (*sizes.values(),), jnp.float32, -bound, bound)
    return nnx.Param(value.astype(dtype), axes=(*sizes,))


def high_map(
    rank: int, outputs: dict[str, int], dtype: str, stacked: Mapping[str, int]
) -> nnx.Param[Array]:
    """lora_b [*stacked, rank, *outputs], zeros."""
    sizes = {**stacked, "rank": rank, **outputs}
    return nnx.Param(jnp.zeros((*sizes.values(),), dtype), axes=(*sizes,))
