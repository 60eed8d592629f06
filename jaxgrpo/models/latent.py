"""Attention by latents: keys and values of all heads are linear maps of one short vector a token.

Decoding keeps that vector and the turned part of the key, and reads them as one head (`absorbed`);
passes over whole sequences compute each head's keys and values, which are less work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxgrpo.models.api import AttentionKind, Caller, ModelConfig
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.models.layers import Angles, Dense, RMSNorm, rotate, scaled_by, side_by_side
from jaxgrpo.models.products import rounded

EPS = 1e-6
"""What the norms of short vectors add; that of the others is `rms_norm_eps`."""


class LatentAttention(nnx.Module):
    """out(attend(query, key, value)), with c = norm(latent(x)), in each head

        query = [query(low), turn(turned_query(low))],    low = x or norm(query_down(x))
        key = [key(c), turn(turned_key(x))],    value = value(c)

    The query carries the scale. Where the caller keeps latents its plain part is multiplied by the
    map of keys, and the map of values by what is attended to: q · (K c) = (K^T q) · c.

    Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1 and appendix C.
    """

    def __init__(self, config: ModelConfig, kind: AttentionKind, rngs: nnx.Rngs):
        assert kind.latent is not None  # or it is `layers.Attention`
        sizes, embed = kind.latent, {"embed": config.hidden_size}
        latent, norms = {"latent": sizes.size}, dataclasses.replace(config, rms_norm_eps=EPS)

        def dense(name: str, inputs: dict[str, int], outputs: dict[str, int], bias: bool) -> Dense:
            return Dense(f"attention/{name}", inputs, outputs, config, rngs, bias=bias)

        def heads(size: int) -> dict[str, int]:
            return {"heads": config.num_heads, "head_dim": size}

        bias = config.attention_bias
        self.has_low: bool = sizes.query is not None
        if sizes.query is None:
            self.query: Dense = dense("query", embed, heads(sizes.plain), False)
            self.turned_query: Dense = dense("turned_query", embed, heads(sizes.turned), False)
        else:
            low = {"latent": sizes.query}
            self.query_down: Dense = dense("query_down", embed, low, bias)
            self.query_norm: RMSNorm = RMSNorm({"norm": sizes.query}, norms)
            self.query_up: Dense = dense("query_up", low, heads(sizes.plain), False)
            self.turned_query_up: Dense = dense("turned_query_up", low, heads(sizes.turned), False)
        self.latent: Dense = dense("latent", embed, latent, bias)
        self.turned_key: Dense = dense("turned_key", embed, {"head_dim": sizes.turned}, bias)
        self.latent_norm: RMSNorm = RMSNorm({"norm": sizes.size}, norms)
        self.key: Dense = dense("key", latent, heads(sizes.plain), False)
        self.value: Dense = dense("value", latent, heads(sizes.value), False)
        out_bias = config.attention_out_bias
        self.out: Dense = dense("out", heads(sizes.value), embed, out_bias)
        self.attended: str = cache_dtype("auto", config)
        self.scale: float = config.query_scale or config.head_dim**-0.5

    def __call__(
        self, x: Array, angles: Angles, caller: Caller, memory: Any, kind: AttentionKind
    ) -> tuple[Array, Any]:
        if self.has_low:
            low, maps = self.query_norm(self.query_down(x)), (self.query_up, self.turned_query_up)
        else:
            low, maps = x, (self.query, self.turned_query)
        query, turned_query = side_by_side(low, *maps)
        query, turned_query = (
            rotate(q, a, self.scale) for q, a in ((query, None), (turned_query, angles))
        )
        latent, turned_key = side_by_side(x, self.latent, self.turned_key)
        latent, turned_key = self.latent_norm(latent), rotate(turned_key[..., None, :], angles)
        if caller.keeps_latents:
            adapters = {"...hn,khn->...hk": self.key.lora_b, "...hk,rk->...hr": self.key.lora_a}
            query = _by_heads(query, self.key, x.dtype, "...hn,rhn->...hr", adapters)
            key = value = latent[..., None, :]
        else:
            key, value = side_by_side(latent, self.key, self.value)
            turned_key = jnp.broadcast_to(turned_key, (*key.shape[:-1], turned_key.shape[-1]))
        query = jnp.concatenate([query, turned_query], axis=-1)
        key = jnp.concatenate([key, turned_key], axis=-1)
        query, key, value = (rounded(leaf, self.attended) for leaf in (query, key, value))
        out, memory = caller.attend(query, key, value, memory, kind)
        if caller.keeps_latents:
            low = self.key.lora_a if self.value.lora_a is None else self.value.lora_a
            adapters = {"...hr,rk->...hk": low, "...hk,khv->...hv": self.value.lora_b}
            out = _by_heads(out, self.value, x.dtype, "...hr,rhv->...hv", adapters)
        return self.out(out), memory


def _by_heads(
    x: Array,
    linear: Dense,
    dtype: Any,
    equation: str,
    adapters: Mapping[str, nnx.Param[Array] | None],
) -> Array:
    """x [..., heads, size], each head by its matrix, and by its adapters beside it.

    Args:
      dtype: that weights are multiplied in.
      equation: of einsum, for x and the kernel.
      adapters: the same for x and those of the map, in the order in which x passes them.
    """
    matrix = linear.matrix().astype(dtype)
    if linear.lora_b is None:
        return jnp.einsum(equation, x, matrix)
    # Rounded once, as a sum: the last bit of the larger part may be more than all of the smaller.
    multiply = functools.partial(
        jnp.einsum, preferred_element_type=jnp.promote_types(dtype, jnp.float32)
    )
    added = x
    for adapter_equation, weights in adapters.items():
        assert weights is not None  # a map with a lora_b has a lora_a, or shares one
        added = multiply(adapter_equation, added.astype(dtype), weights[...].astype(dtype))
    y = multiply(equation, x, matrix)
    return (y + scaled_by(added, linear.scale)).astype(jnp.result_type(x, matrix))
