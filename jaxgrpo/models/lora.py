"""Low-rank adapters (LoRA) as parts of the parameters: apart, together, and added to the weights.

A model is built with adapters if its config has a LoraConfig. Its parameters are then those of the
model without them, and at each adapted linear map two more leaves: "lora_a" [*inputs, rank] and
"lora_b" [rank, *outputs]. The functions here know these names and nothing else of the tree, so
`split` and `join` also take trees of logical axes, shapes or shardings.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.types import Params
from jaxgrpo.models import decoder
from jaxgrpo.models.api import Model, ModelConfig

NAMES = ("lora_a", "lora_b")


def without(config: ModelConfig) -> ModelConfig:
    """The config of the base: the model without adapters."""
    return dataclasses.replace(config, lora=None)


def base_of(model: Model) -> Model:
    """The model without adapters, to read and to save its weights."""
    return decoder.build(without(model.config))


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
            own, base[name] = split(value)
            adapters |= {name: own} if own else {}
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
    lora = model.config.lora
    return params if lora is None else _merged(*split(params), lora.scale)


def _merged(adapters: Params, base: Params, scale: float) -> Params:
    if NAMES[0] in adapters:
        low, high = (adapters[name] for name in NAMES)
        return {**base, "kernel": _added(base["kernel"], low, high, scale)}
    merged = {name: _merged(own, base[name], scale) for name, own in adapters.items()}
    return {**base, **merged}


def _added(kernel: Array, low: Array, high: Array, scale: float) -> Array:
    """kernel + scale * low [..., rank] · high [*stacked, rank, ...], for each of stacked layers."""
    dtype = jnp.promote_types(kernel.dtype, jnp.float32)
    product = functools.partial(jnp.tensordot, axes=1, precision="highest")
    for _ in range(low.ndim + high.ndim - 2 - kernel.ndim):  # the layers' dimension counts twice
        product = jax.vmap(product)
    change = product(low.astype(dtype), high.astype(dtype))
    return (kernel.astype(dtype) + scale * change).astype(kernel.dtype)
