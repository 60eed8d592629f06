"""The `attend` functions: causal over prompts, rows with a shared prefix, one decoding step.

Every mask is a function of (segment, position) and the layer's window; nothing else is trusted.
Softmax is taken in at least float32; masked scores are the lowest finite number, so that a query
without any key gives finite garbage that the loss masks, never NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.models.api import Attend, KeyValue, LayerKind


def causal(position: Array, valid: Array) -> Attend:
    """Attention within each sequence: a query reads the valid keys at or before its position.

    Shapes: position, valid [*B, Q]. The memory it returns is KeyValue of this layer.
    """

    def attend(query, key, value, memory, kind: LayerKind):
        del memory
        mask = _visible(position, position, kind) & valid[..., None, :]
        out = _weigh(_scores(query, key, mask), value)
        return out, KeyValue(key, value)

    return attend


def rows_with_prefix(
    segment: Array, position: Array, row_prompt: Array, prompt_length: Array
) -> Attend:
    """Attention of packed rows to their own segment and to the prompt that their group shares.

    The memory given is the prompts' KeyValue [D, A, S, kv_heads, head_dim]; none is returned.
    Shapes: segment, position [D, R, Q]; row_prompt [D, R]; prompt_length [D, A].
    """
    length = jnp.take_along_axis(prompt_length, row_prompt, axis=1)  # [D, R]

    def attend(query, key, value, memory: KeyValue, kind: LayerKind):
        take = jax.vmap(lambda prompts, rows: prompts[rows])
        prefix = KeyValue(*(take(leaf, row_prompt) for leaf in memory))
        prefix_position = jnp.arange(prefix.key.shape[2])
        real = prefix_position < length[..., None]  # [D, R, S]
        in_prefix = _visible(position, prefix_position, kind) & real[..., None, :]
        same = segment[..., :, None] == segment[..., None, :]
        in_row = _visible(position, position, kind) & same
        scores = [_scores(query, prefix.key, in_prefix), _scores(query, key, in_row)]
        values = jnp.concatenate([prefix.value, value], axis=-3)
        return _weigh(jnp.concatenate(scores, axis=-1), values), None

    return attend


def decode(index: Array, position: Array, prompt_length: Array) -> Attend:
    """One decoding step of every slot: reads the group's prompt and the slot's own cache.

    Memory per layer: (prompt KeyValue [P, S, kv_heads, head_dim], own KeyValue [P, G, T, ...]).
    The new key and value are written at `index`, the number of tokens fed before; own position i
    of a slot comes i tokens after the last prompt token.
    Shapes: index []; position [P, G, 1]; prompt_length [P], tokens of the prefix that are real.
    """

    def attend(query, key, value, memory: tuple[KeyValue, KeyValue], kind: LayerKind):
        prefix, own = memory
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=2)
        own = KeyValue(write(own.key, key), write(own.value, value))
        prefix_position = jnp.arange(prefix.key.shape[1])
        real = (prefix_position < prompt_length[:, None])[:, None, None, :]  # [P, 1, 1, S]
        in_prefix = _visible(position, prefix_position, kind) & real
        own_position = prompt_length[:, None, None] + jnp.arange(own.key.shape[2])
        in_own = _visible(position, own_position, kind)
        # All samples of a group read the one prefix: its keys are never copied per sample.
        groups, samples, one, heads, head_dim = query.shape
        folded = query.reshape(groups, samples * one, heads, head_dim)
        prefix_scores = _scores(folded, prefix.key, in_prefix.reshape(groups, samples * one, -1))
        own_scores = _scores(query, own.key, in_own)
        kv_heads, shared = own_scores.shape[2:4]
        # [P, kv, h, G, S] -> [P, G, kv, h, 1, S]
        prefix_scores = jnp.moveaxis(prefix_scores, 3, 1)[..., None, :]
        scores = jnp.concatenate([prefix_scores, own_scores], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        split = prefix.key.shape[1]
        from_prefix = jnp.einsum("pgkhqs,pskd->pgqkhd", weights[..., :split], prefix.value)
        from_own = jnp.einsum("pgkhqt,pgtkd->pgqkhd", weights[..., split:], own.value)
        out = (from_prefix + from_own).reshape(groups, samples, one, kv_heads * shared, head_dim)
        return out, (prefix, own)

    return attend


def _visible(query_position: Array, key_position: Array, kind: LayerKind) -> Array:
    """[..., Q, N]: at or before the query, and inside the layer's window."""
    distance = query_position[..., :, None] - key_position[..., None, :]
    mask = distance >= 0
    return mask if kind.window is None else mask & (distance < kind.window)


def _scores(query: Array, key: Array, mask: Array) -> Array:
    """Masked scores [*B, kv_heads, heads per kv head, Q, N] in at least float32.

    Nothing is divided here: the query comes scaled.
    """
    *batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[-2]
    grouped = query.reshape(*batch, length, kv_heads, heads // kv_heads, head_dim)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("...qkhd,...nkd->...khqn", grouped, key, preferred_element_type=dtype)
    return jnp.where(mask[..., None, None, :, :], scores, jnp.finfo(dtype).min)


def _weigh(scores: Array, value: Array) -> Array:
    """Softmax-weighted values [*B, Q, heads, head_dim]."""
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("...khqn,...nkd->...qkhd", weights, value)
    return out.reshape(*out.shape[:-3], out.shape[-3] * out.shape[-2], out.shape[-1])
