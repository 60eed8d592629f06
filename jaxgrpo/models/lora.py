"""Low-rank adapters (LoRA) as parts of the parameters: apart, together, and added to the weights.

A model is built with adapters if its config has a LoraConfig. Its parameters are then those of the
model without them, and at each adapted linear map two more leaves: "lora_a" [*inputs, rank] and
"lora_b" [rank, *outputs]; maps that are fused share the lora_a of the first. `split` and `join`
know these names and nothing else of the tree, so they take trees of axes, shapes or shardings too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.types import Params
from jaxgrpo.models import decoder
from jaxgrpo.models.api import LAYERS, Model, ModelConfig, params_per_layer

NAMES = ("lora_a", "lora_b")


def base_config(config: ModelConfig) -> ModelConfig:
    """The config of the base: the model without adapters."""
    return dataclasses.replace(config, lora=None)


def base_model(model: Model) -> Model:
    """The model without adapters, to read and to save its weights."""
    return decoder.build(base_config(model.config))


def split(params: Params) -> tuple[Params, Params]:
    """(the adapters, the base) of a tree of parameters.

    The adapters are a tree of the same nesting without its empty parts; the base is a tree of
    parameters of the model without adapters.

    >>> split({"up": {"kernel": 1, "lora_a": 2, "lora_b": 3}, "norm": {"scale": 4}})
    ({'up': {'lora_a': 2, 'lora_b': 3}}, {'up': {'kernel': 1}, 'norm': {'scale': 4}})
    """
    adapters, base = {}, {}
    for name, value in params.items():
        if name in NAMES:
            adapters[name] = value
        elif isinstance(value, dict):
            nested, base[name] = split(value)
            adapters |= {name: nested} if nested else {}
        else:
            base[name] = value
    return adapters, base


def join(adapters: Params, base: Params) -> Params:
    """The parameters of which `split` gives these two; no array is copied."""
    joined = dict(base)
    for name, value in adapters.items():
        joined[name] = join(value, base[name]) if isinstance(value, dict) else value
    return joined


def init(model: Model, key: Array) -> Params:
    """The adapters that training begins with, those of `model.init(key)`: B is 0.

    To be jitted, so that the weights beside them are not drawn.
    """
    return split(model.init(key))[0]


def merge(model: Model, params: Params) -> Params:
    """The parameters of the model without adapters that computes the same:

        kernel + scale * A · B

    Added in at least float32 and rounded once, to the dtype of the kernel. In bfloat16 that loses
    what is below 1/256 of a weight.
    """
    if model.config.lora is None:
        return params
    adapters, base = split(params)
    merged = dict(base)
    for part, layers in adapters.items():
        merged_layers = {
            k: _merged(model.config, layer, base[part][k]) for k, layer in layers.items()
        }
        merged[part] = {**base[part], **merged_layers}
    return merged


def are_merged_to_sample(model: Model, platform: str) -> bool:
    """Whether a sampler adds adapters to its own copy of the weights, once per sync.

    On a GPU they would be 7 products and their sums in each layer of a step, hundreds of kernels.
    """
    return model.config.lora is not None and platform == "gpu"


def make_merge_per_layer(model: Model) -> Callable[[Params], Params]:
    """`params_per_layer` of what `merge` gives, without a stacked copy of it.

    What it takes is stacked, or has each layer's parameters apart.
    """
    config = model.config

    @jax.jit
    def merged_layers(layers: Params) -> tuple[Params, ...]:
        per_layer = params_per_layer(config, layers)["layers"]
        return tuple(_merged(config, *split(layer)) for layer in per_layer)

    def merge_per_layer(params: Params) -> Params:
        names = ("layers",) if "layers" in params else LAYERS
        outside = {name: tree for name, tree in params.items() if name not in names}
        return {
            **outside,
            "layers": merged_layers({name: params[name] for name in names if name in params}),
        }

    return merge_per_layer


def _merged(config: ModelConfig, adapters: Params, base: Params, place: str = "") -> Params:
    """The parameters of a layer, or of layers that are stacked.

    Args: place: in a layer, of parts of it: "attention/".
    """
    assert config.lora is not None  # as `merge` returns
    layer = dict(base)
    for name, value in adapters.items():
        if "lora_b" in value:
            first = config.holds_a(f"{place}{name}").rpartition("/")[2]
            low, high = adapters[first]["lora_a"], value["lora_b"]
            _, scale = config.lora.rank_and_scale(f"{place}{name}")
            kernel = _added(base[name]["kernel"], low, high, scale)
            layer[name] = {**base[name], "kernel": kernel}
        else:
            layer[name] = _merged(config, value, base[name], f"{place}{name}/")
    return layer


def _added(kernel: Array, low: Array, high: Array, scale: float) -> Array:
    """kernel + scale * low [..., rank] · high [*stacked, rank, ...], for each of stacked layers and
    experts."""
    dtype = jnp.promote_types(kernel.dtype, jnp.float32)
    product = functools.partial(jnp.tensordot, axes=1, precision="highest")
    for _ in range(low.ndim + high.ndim - 2 - kernel.ndim):  # what is stacked counts twice
        product = jax.vmap(product)
    change = product(low.astype(dtype), high.astype(dtype))
    return (kernel.astype(dtype) + scale * change).astype(kernel.dtype)
