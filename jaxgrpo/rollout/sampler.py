"""Sampling: each prompt is prefilled once, its G samples decode together in jitted segments.

Slots are the samples themselves, [P, G]. A slot opens with the last prompt token, so that every
forward pass, the first one too, is the same program and yields one new token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.types import DecodeState, Params, Prompts, Rollouts
from jaxgrpo.models.api import Constrain, KeyValue, Model, memory_per_layer, params_per_layer
from jaxgrpo.models.attention import causal, decode


class SamplingSettings(NamedTuple):
    """What is fixed while a program samples."""

    group_size: int
    max_completion_tokens: int
    temperature: float  # 0: the likeliest token
    stop_tokens: tuple[int, ...]
    pad_token: int
    segment_tokens: int = 64  # tokens decoded between two looks of the host
    purpose: int = 0  # folded into the key: evaluation never repeats training's draws
    top_k: int = 0  # draw from the top_k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest likeliest tokens of this probability


class Sampler(NamedTuple):
    """The jitted programs of sampling; `sample` runs them."""

    settings: SamplingSettings
    prefill: Callable[[Params, Prompts, Array], DecodeState]
    decode: Callable[[Params, DecodeState], tuple[DecodeState, Array]]
    finish: Callable[[DecodeState, Prompts], Rollouts]


def make_sampler(
    model: Model, settings: SamplingSettings, constrain: Constrain = lambda value, axes: value
) -> Sampler:
    """Jits prefill, one decode segment and the packing into `Rollouts`.

    Args:
      constrain: lays an array out on the caller's mesh by logical axis names.
    """
    return Sampler(
        settings=settings,
        prefill=jax.jit(functools.partial(_prefill, model, settings, constrain)),
        decode=jax.jit(functools.partial(_segment, model, settings), donate_argnums=1),
        finish=jax.jit(_finish),
    )


def sample(sampler: Sampler, params: Params, prompts: Prompts, key: Array) -> Rollouts:
    """Draws G completions for every prompt from the policy `params`.

    A token is drawn by Gumbel-max from softmax(logits / temperature), cut to top_k and top_p, with
    the key folded from (key, purpose, step, ordinal, sample, token), so a sample depends on nothing
    else.

    Args:
      key: [2] uint32, the data of the run's key.

    Returns: rollouts without rewards; `behavior_logp` is of the distribution drawn from (for
    temperature 0 of the model's own, at temperature 1).
    """
    settings, finished = sampler.settings, None
    state = sampler.prefill(params, prompts, key)
    for _ in range(0, settings.max_completion_tokens, settings.segment_tokens):
        state, next_finished = sampler.decode(params, state)
        # Read the segment before the one just dispatched: the device never waits for the host.
        if finished is not None and bool(finished):
            break
        finished = next_finished
    return sampler.finish(state, prompts)


def draw(
    keys: Array, logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Array, Array]:
    """One token per row, and its log-probability under the distribution drawn from.

    Two-level Gumbel-max: first a block of the vocabulary by its log-sum-exp, then a token within
    it. Exact, with sqrt(V)-many random numbers per token instead of V; unlike an inverse CDF it
    does not flip under rounding noise unless two perturbed scores tie.

    Shapes: keys [P, G], logits [P, G, V] -> token, logp [P, G].
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if temperature == 0:
        token = logits.argmax(-1)
        return token, _chosen(jax.nn.log_softmax(logits, axis=-1), token)
    logits = truncate(logits / temperature, top_k, top_p)
    *rows, vocab = logits.shape
    width = 1 << max(1, (vocab - 1).bit_length() // 2)
    blocks = -(-vocab // width)
    padding = [(0, 0)] * len(rows) + [(0, blocks * width - vocab)]
    blocked = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*rows, blocks, width)
    weight = jax.nn.logsumexp(blocked, axis=-1)  # [P, G, blocks]
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (blocks + width,), weight.dtype)))
    gumbel = noise(keys)
    block = (weight + gumbel[..., :blocks]).argmax(-1)
    inside = jnp.take_along_axis(blocked, block[..., None, None], axis=-2)[..., 0, :]
    token = block * width + (inside + gumbel[..., blocks:]).argmax(-1)
    return token, _chosen(logits, token) - jax.nn.logsumexp(weight, axis=-1)


def truncate(logits: Array, top_k: int = 0, top_p: float = 1.0) -> Array:
    """Logits with -inf outside the `top_k` likeliest tokens, then outside the nucleus of the rest.

    The nucleus is the smallest set of likeliest tokens whose probability, renormalised over what
    `top_k` left, is at least `top_p`. Tokens as likely as the last of a set are in it too, so that
    nothing depends on the order of the vocabulary.

    Each threshold is found exactly, by bisection on the bits of the logits: 32 sums over the
    vocabulary, and no sort, which would collect a sharded one.

    Args:
      top_k: 0, or as many as there are tokens: no limit.
      top_p: in (0, 1]; 1: no limit.

    Shapes: logits [..., V] float32 -> the same.
    Source: top-p: Holtzman et al. 2020, arXiv 1904.09751.
    """
    if 0 < top_k < logits.shape[-1]:
        logits = _likeliest(logits, lambda kept: kept.sum(-1, dtype=jnp.int32) >= top_k)
    if top_p < 1:
        probability = jax.nn.softmax(logits, axis=-1)
        logits = _likeliest(logits, lambda kept: jnp.where(kept, probability, 0).sum(-1) >= top_p)
    return logits


def _likeliest(logits: Array, is_enough: Callable[[Array], Array]) -> Array:
    """Logits at and above the highest threshold at which what is kept is enough; -inf elsewhere."""
    size = 8 * logits.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(logits, jnp.dtype(f"int{size}"))
    # Of negative floats the larger has the smaller bits; so ordered, integers compare as floats do.
    order = jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at low; not enough above high
        middle = (low | high) - ((low ^ high) >> 1)  # the mean rounded up, without overflow
        enough = is_enough(order >= middle[..., None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, size, halve, (order.min(-1), order.max(-1)))
    return jnp.where(order >= low[..., None], logits, -jnp.inf)


def _chosen(values: Array, token: Array) -> Array:
    return jnp.take_along_axis(values, token[..., None], axis=-1)[..., 0]


def _prefill(model, settings: SamplingSettings, constrain, params, prompts: Prompts, key):
    num_prompts, width = prompts.prompt_tokens.shape
    shape = (num_prompts, settings.group_size)
    length = prompts.prompt_mask.sum(-1, dtype=jnp.int32) - 1
    last = jnp.take_along_axis(prompts.prompt_tokens, length[:, None], axis=1)
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (num_prompts, width))
    valid = position < length[:, None]
    tokens = jnp.where(valid, prompts.prompt_tokens, settings.pad_token)
    _, stacked = model.apply(params, tokens, position, causal(position, valid), None)
    steps = settings.max_completion_tokens

    def placed(array: Array, *last: str | None) -> Array:
        return constrain(array, ("bins", *[None] * (array.ndim - 1 - len(last)), *last))

    def of_prompt(array: Array) -> Array:
        return placed(array, "kv_heads", None)

    def of_sample(prefix: Array) -> Array:
        return of_prompt(jnp.zeros((*shape, steps, *prefix.shape[2:]), prefix.dtype))

    return DecodeState(
        index=jnp.int32(0),
        token=placed(jnp.broadcast_to(last, shape)),
        done=placed(jnp.zeros(shape, bool)),
        tokens=placed(jnp.full((*shape, steps), settings.pad_token, jnp.int32)),
        logp=placed(jnp.zeros((*shape, steps), jnp.float32)),
        mask=placed(jnp.zeros((*shape, steps), bool)),
        memory=tuple(
            (KeyValue(*map(of_prompt, prefix)), KeyValue(*map(of_sample, prefix)))
            for prefix in memory_per_layer(model.config, stacked)
        ),
        prompt_length=length,
        keys=_sample_keys(key, settings, prompts),
    )


def _sample_keys(key: Array, settings: SamplingSettings, prompts: Prompts) -> Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key), settings.purpose)
    key = jax.random.fold_in(key, prompts.step)
    of_prompt = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, prompts.ordinal)
    of_sample = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(of_sample, in_axes=(0, None))(of_prompt, jnp.arange(settings.group_size))


def _segment(model: Model, settings: SamplingSettings, params, state: DecodeState):
    params = params_per_layer(model.config, params)
    last = jnp.minimum(state.index + settings.segment_tokens, settings.max_completion_tokens)

    def running(state: DecodeState) -> Array:
        return (state.index < last) & ~state.done.all()

    one_token = functools.partial(_one_token, model, settings, params)
    state = jax.lax.while_loop(running, one_token, state)
    finished = state.done.all() | (state.index >= settings.max_completion_tokens)
    return state, finished


def _one_token(model: Model, settings: SamplingSettings, params, state: DecodeState) -> DecodeState:
    position = jnp.broadcast_to(state.prompt_length[:, None] + state.index, state.token.shape)
    attend = decode(state.index, position[..., None], state.prompt_length)
    hidden, memory = model.apply(
        params, state.token[..., None], position[..., None], attend, state.memory
    )
    logits = model.unembed(params, hidden[..., 0, :])
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)), in_axes=(0, None))
    keys = fold(state.keys, state.index)
    token, logp = draw(keys, logits, settings.temperature, settings.top_k, settings.top_p)
    active = ~state.done
    token = jnp.where(active, token, settings.pad_token).astype(jnp.int32)
    stopped = (token[..., None] == jnp.asarray(settings.stop_tokens, jnp.int32)).any(-1)

    def write(array: Array, value: Array) -> Array:
        value = value[..., None].astype(array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(array, value, state.index, axis=2)

    return dataclasses.replace(
        state,
        index=state.index + 1,
        token=token,
        done=state.done | (active & stopped),
        tokens=write(state.tokens, token),
        logp=write(state.logp, jnp.where(active, logp, 0)),
        mask=write(state.mask, active),
        memory=memory,
    )


def _finish(state: DecodeState, prompts: Prompts) -> Rollouts:
    return Rollouts(
        **vars(prompts),
        completion_tokens=state.tokens,
        token_mask=state.mask,
        behavior_logp=state.logp,
        rewards={},
        truncated=~state.done,
        policy_version=jnp.broadcast_to(prompts.step, state.done.shape),
        fields={},
    )
