"""Weights in 8 bits: a sampler's own copy of the parameters, made once per sync.

The kernels of the layers' linear maps have a scale for each output channel, and products take

    y = (x · values) * scale,    kernel[i, o] ≈ values[i, o] * scale[o]

Embedding, output head, norms and biases stay as they are: on SmolLM2-135M the table alone would
move log-probs by as much as all layers in fp8, and by half of that in int8 (docs/performance.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from jaxgrpo.core.types import Params
from jaxgrpo.models import lora
from jaxgrpo.models.api import EXPERT_MAPS, LINEAR, Model, ModelConfig, params_per_layer
from jaxgrpo.models.cache import FP8, narrowed

DTYPES = {"int8": "int8", "fp8": FP8}
"""rollout.weight_dtype -> the dtype of the values"""


def quantised(kernel: Array, contracted: int, weight_dtype: str) -> tuple[Array, Array]:
    """(values, scale) of a kernel, symmetric, in float32:

        scale[o] = max_i |kernel[i, o]| / largest,    values = kernel / scale, rounded to nearest

    with 127 as the largest number of int8 and 448 of fp8. So int8 is off by at most half a scale,
    fp8 by 1 / 16 of a weight or, below 2^-6 scales, by 2^-10 scales.

    Args:
      contracted: how many dimensions of the kernel are inputs, the first ones.
      weight_dtype: of DTYPES.

    Shapes: kernel and values [*inputs, *outputs]; scale [*outputs].
    Source: Dettmers et al. 2022, arXiv 2208.07339, section 2.1 (absmax), by column of the weights.
    """
    dtype = jnp.dtype(DTYPES[weight_dtype])
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    kernel = kernel.astype(jnp.float32)
    scale = jnp.abs(kernel).max(tuple(range(contracted))) / largest
    values = kernel / jnp.where(scale > 0, scale, 1.0)
    return narrowed(jnp.rint(values) if is_integer else values, dtype), scale


def sampler_config(model: Model, platform: str, weight_dtype: str) -> ModelConfig:
    """The model that a sampler computes; `model.config` where it needs no copy of its own.

    Args:
      weight_dtype: "auto", or of DTYPES: adapters are then merged before weights are rounded.
    """
    if weight_dtype != "auto":
        return dataclasses.replace(model.config, lora=None, weight_dtype=DTYPES[weight_dtype])
    is_merged = lora.are_merged_to_sample(model, platform)
    return lora.base_config(model.config) if is_merged else model.config


def make_copy_per_layer(model: Model, weight_dtype: str) -> Callable[[Params], Params]:
    """From parameters of `model`, stacked or each layer's apart, to those that a sampler with such
    weights reads, each layer's apart. No leaf is one of those given."""
    per_layer = functools.partial(params_per_layer, model.config)
    if model.config.lora is not None:
        per_layer = lora.make_merge_per_layer(model)

    @jax.jit
    def copy_per_layer(params: Params) -> Params:
        if "layers" not in params:  # those of a learner may be in more bits
            params = jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype), params, model.shapes)
        params = per_layer(params)
        layers = tuple(_quantised_layer(layer, weight_dtype) for layer in params["layers"])
        return jax.tree.map(jnp.copy, {**params, "layers": layers})

    return copy_per_layer


def _quantised_layer(params: Params, weight_dtype: str) -> Params:
    leaves: Any = flatten_dict(params)
    for path in [path for path in leaves if path[-1] == "kernel"]:
        name = "/".join(path[:-1])
        if name in LINEAR:  # not of a router
            contracted = 2 if name in ("attention/out", "delta/out") else 1  # heads and head_dim
            quantise = functools.partial(
                quantised, contracted=contracted, weight_dtype=weight_dtype
            )
            quantise = jax.vmap(quantise) if name in EXPERT_MAPS else quantise
            leaves[path], leaves[*path[:-1], "kernel_scale"] = quantise(leaves[path])
    return unflatten_dict(leaves)
