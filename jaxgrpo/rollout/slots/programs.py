"""The jitted programs of an engine with slots, for one model, settings and mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.types import Params
from jaxgrpo.models import decoder, lora, low_bit, sharding
from jaxgrpo.models.api import Model, params_per_layer
from jaxgrpo.models.attention import Decoding, choose_decoding
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots import decoding, replying
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.state import (
    Counters,
    DecodeState,
    Drawn,
    Entries,
    Finals,
    Replies,
    Samples,
    SlotContents,
    take,
)


class Programs(NamedTuple):
    """The functions of `decoding`, jitted; those that change a state donate the one they get."""

    attention: Decoding
    model: Model  # that samples: with adapters merged and weights in 8 bits, where they are to be
    split: Callable[[Params], Params]
    """its parameters, each layer's apart; no program"""
    begin: Callable[[Sizes], DecodeState]
    enter: Callable[[DecodeState, Entries], DecodeState]
    prefill: Callable[..., DecodeState]  # (params, state, tokens, row, start)
    admit: Callable[..., DecodeState]  # (state, place, row, reader, row_length, ready)
    decode: Callable[..., tuple[DecodeState, Counters]]  # (aligned, params, state, enough)
    staying: Callable[..., tuple[Array, Array]]  # (state, slots, aligned)
    take: Callable[..., Any]
    take_slots: Callable[..., Any]
    drawn: Callable[[Samples], Drawn]
    cut: Callable[[DecodeState, np.ndarray], DecodeState]
    aside: Callable[[DecodeState, int], SlotContents]  # so many empty places of each bin
    reply: Callable[
        [DecodeState, SlotContents | None, Replies], tuple[DecodeState, SlotContents | None]
    ]
    give: Callable[..., DecodeState]  # (params, state, place, size, left)
    finals: Callable[[Samples, np.ndarray], Finals]


def make_programs(
    model: Model,
    settings: SamplingSettings,
    mesh: Mesh | None,
    *,
    attention: Decoding | None = None,
) -> Programs:
    """Jits the programs; none is compiled.

    Args:
      mesh: that parameters are laid out on; None: one device.
      attention: None: that of the platform.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    constrain = None if mesh is None else sharding.constrain(mesh)
    if attention is None:
        dtype = cache_dtype(settings.kv_cache_dtype, model.config)
        attention = choose_decoding(device, model, dtype, mesh, settings.attention)
    split = functools.partial(params_per_layer, model.config)
    config = low_bit.sampler_config(model, device.platform, settings.weight_dtype)
    if config.weight_dtype is not None:
        split = low_bit.make_copy_per_layer(model, settings.weight_dtype)
    elif config != model.config:
        split = lora.make_merge_per_layer(model)
    if config != model.config:
        model = decoder.build(config, constrain=constrain)
    if mesh is not None:
        model = decoder.to_sample(model, mesh)
    shards = 1 if mesh is None else mesh.shape["tensor"]
    parts = decoding.Parts(model, settings, constrain or _anywhere, shards, attention)
    bind = functools.partial
    return Programs(
        attention=attention,
        model=model,
        split=split,
        begin=jax.jit(bind(decoding.first_state, parts), static_argnums=0),
        enter=jax.jit(bind(decoding.enter, parts), donate_argnums=0),
        prefill=jax.jit(bind(decoding.prefill, parts), donate_argnums=1),
        admit=jax.jit(decoding.admit, donate_argnums=0),
        decode=jax.jit(bind(decoding.segment, parts), static_argnums=0, donate_argnums=2),
        staying=jax.jit(decoding.staying, static_argnums=(1, 2)),
        take=jax.jit(take),
        take_slots=jax.jit(decoding.take_slots),
        drawn=jax.jit(bind(replying.drawn, parts)),
        cut=jax.jit(bind(replying.cut, settings), donate_argnums=0),
        aside=jax.jit(replying.empty_places, static_argnums=1),
        reply=jax.jit(bind(replying.reply, parts), donate_argnums=(0, 1)),
        give=jax.jit(bind(replying.give, parts), donate_argnums=1),
        finals=jax.jit(bind(decoding.finals, parts)),
    )


def _anywhere(value: Array, axes: tuple[str | None, ...]) -> Array:
    """`Constrain` of one device."""
    del axes
    return value
