"""The real tokens of a micro-batch side by side, and the layers over them.

Layers and head compute these tokens alone; rows and prompts, with their padding, are for attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.records import EXPERTS, SUPPORT
from jaxgrpo.core.types import Params, TrainBatch
from jaxgrpo.models import delta, routing
from jaxgrpo.models.api import (
    AttentionKind,
    Caller,
    DeltaKind,
    Model,
    memory_per_layer,
    stacked_memory,
)
from jaxgrpo.models.attention import XLA, Kernel
from jaxgrpo.models.products import custom_vjp
from jaxgrpo.models.recurrence import DeltaInputs
from jaxgrpo.rollout.dialogue import FORK


class Flat(NamedTuple):
    """The real tokens of a micro-batch side by side: rows first, then prompts, then nothing.

    Layers and head compute these N tokens. Rows and prompts, with their padding, are only for
    attention: their positions, [D, R * Q] and [D, A * S], are one dimension of size M here.
    """

    tokens: Array  # [D, N] int32
    position: Array  # [D, N] int32
    targets: Array  # [D, N] int32, of the rows
    origin: Array  # [D, N] int32, the place in M of each token; M: none
    place: Array  # [D, M] int32, the token of each place in M; N: padding
    count: Array  # [D] int32, tokens of the rows


def flatten(micro: TrainBatch, size: int) -> Flat:
    """The tokens of a micro-batch that are real, in `size` places of each bin."""
    bins, prompts, width = micro.prompt_tokens.shape
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (bins, prompts, width))
    real = _joined(micro.segment > 0, position < micro.prompt_length[..., None])
    place = jnp.where(real, jnp.cumsum(real, 1, dtype=jnp.int32) - 1, size)
    indices = jnp.arange(real.shape[1], dtype=jnp.int32)
    no_origin = jnp.full(size, real.shape[1], jnp.int32)
    origin = jax.vmap(lambda place: no_origin.at[place].set(indices, mode="drop"))(place)
    return Flat(
        tokens=_picked(_joined(micro.tokens, micro.prompt_tokens), origin),
        position=_picked(_joined(micro.position, position), origin),
        targets=_picked(micro.targets.reshape(bins, -1), origin),
        origin=origin,
        place=place,
        count=(micro.segment > 0).sum((1, 2), dtype=jnp.int32),
    )


def fullest(micro: TrainBatch) -> Array:
    """[]: the tokens of the fullest bin's rows."""
    return (micro.segment > 0).sum((1, 2), dtype=jnp.int32).max()


def filled(flat: Flat, fullest: Array | None) -> Array:
    """[D]: tokens of rows that the head computes. It takes as many chunks as the fullest bin needs,
    and the parts of `sharding.over_data` are computed in one loop, so in all of them the same."""
    return flat.count if fullest is None else jnp.broadcast_to(fullest, flat.count.shape)


def hidden_states(
    model: Model,
    params: Params,
    micro: TrainBatch,
    flat: Flat,
    kernel: Kernel = XLA,
    replays: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """Hidden states [D, N, E]: each prompt once, and rows that read the keys of their prompts.

    Where it replays recorded experts, of rows alone, there is REROUTED [D, N] beside them, and
    AUX_LOSS [D, N] where the micro-batch has LOADS.
    """
    caller = call_packed(micro, flat, kernel)
    record = _recorded(micro, flat, EXPERTS) if replays else None
    if record is not None:
        if (loads := micro.fields.get(LOADS)) is None:
            return _replayed(model, params, flat, caller._replace(route=routing.replay), record)
        caller = caller._replace(route=routing.replay_priced)
        return _replayed(model, params, flat, caller, (record, loads[:, None]))
    hidden, _ = model.apply(params, flat.tokens, flat.position, caller, None)
    return hidden, {}


def _replayed(
    model: Model, params: Params, flat: Flat, caller: Caller, record: Any
) -> tuple[Array, dict[str, Array]]:
    """`hidden_states` with the experts of a record [D, N, layers, k], or of it and loads."""
    config = model.config
    memory = routing.with_records(config.kinds, (None,) * config.num_layers, record)
    stacked = stacked_memory(config, memory)
    hidden, memory = model.apply(params, flat.tokens, flat.position, caller, stacked)
    _, layers = routing.without_records(config.kinds, memory_per_layer(config, memory))

    def over_layers(*values: Array) -> Array:
        return jnp.stack(values).mean(0, dtype=jnp.promote_types(values[0].dtype, jnp.float32))

    means = jax.tree.leaves(jax.tree.map(over_layers, *layers))
    return hidden, dict(zip((REROUTED, AUX_LOSS), means, strict=False))


def recorded_support(micro: TrainBatch, flat: Flat) -> Array | None:
    """[D, N, K]: the tokens that each target was drawn among, -1 behind the last and where nothing
    was recorded; None where nothing is taken again."""
    return _recorded(micro, flat, SUPPORT)


def _recorded(micro: TrainBatch, flat: Flat, name: str) -> Array | None:
    """A record [D, N, ...] at the flat tokens, -1 at those of prompts."""
    record = micro.fields.get(name)
    # What is picked from nowhere is 0, which is an expert and a token.
    return None if record is None else flatten_rows(flat, record + 1) - 1


def call_packed(micro: TrainBatch, flat: Flat, kernel: Kernel = XLA) -> Caller:
    """How the flat tokens attend and recur: in rows, behind the prompts that these read."""
    bins, prompts, width = micro.prompt_tokens.shape
    rows, places = micro.segment.shape[1:], micro.segment[0].size
    split = flat.place[:, :places], flat.place[:, places:]
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (bins, prompts, width))
    prompt_real = position < micro.prompt_length[..., None]
    attend_prompts = kernel.causal(position, prompt_real)
    segment, alone = micro.segment, ()
    if (fork := micro.fields.get(FORK)) is not None:  # a rewritten conversation is a segment too
        segment = jnp.where(segment > 0, segment * segment.shape[-1] + fork, 0)
        alone = (fork > 0,)
    attend_rows = kernel.rows_with_prefix(
        segment, micro.position, micro.row_prompt, micro.prompt_length, *alone
    )
    recur_rows = delta.packed(micro.segment, micro.row_prompt, prompt_real)

    def apart(leaf: Array) -> tuple[Array, Array]:
        """[D, N, ...] as rows [D, R, Q, ...] and prompts [D, A, S, ...]."""
        row_part, prompt_part = moved((leaf,), split, (flat.origin,))
        row_part = row_part.reshape(bins, *rows, *leaf.shape[2:])
        return row_part, prompt_part.reshape(bins, prompts, width, *leaf.shape[2:])

    def together(row_out: Array, prompt_out: Array) -> Array:
        parts = tuple(leaf.reshape(bins, -1, *leaf.shape[3:]) for leaf in (row_out, prompt_out))
        return moved(parts, (flat.origin,), split)[0]

    def attend(query, key, value, memory: None, kind: AttentionKind, sinks: Array | None = None):
        queries, keys, values = map(apart, (query, key, value))
        prompt_out, prefix = attend_prompts(queries[1], keys[1], values[1], memory, kind, sinks)
        row_out, _ = attend_rows(queries[0], keys[0], values[0], prefix, kind, sinks)
        return together(row_out, prompt_out), memory

    def recur(inputs: DeltaInputs, memory: None, kind: DeltaKind):
        del kind
        row_parts, prompt_parts = zip(*map(apart, inputs[:5]), strict=True)
        return together(
            *recur_rows(inputs.with_tokens(row_parts), inputs.with_tokens(prompt_parts))
        ), memory

    return Caller(attend, recur=recur)


REROUTED = "rerouted"
"""Field of a pass: the share of layers whose router would have chosen other experts."""
AUX_LOSS = "aux_loss"
"""Field of a pass: what a token adds to the auxiliary loss of routers, before the mean over tokens,
averaged over layers."""
LOADS = "expert_loads"
"""Field of a micro-batch [D, layers, experts]: choices of each expert over the tokens of an update,
from which the pass gives AUX_LOSS."""


def flatten_rows(flat: Flat, values: Array) -> Array:
    """Values [D, R, Q, ...] of rows at the flat tokens [D, N, ...]; 0 at those of prompts."""
    return _picked(values.reshape(len(values), -1, *values.shape[3:]), flat.origin)


def in_rows(micro: TrainBatch, flat: Flat, values: Array) -> Array:
    """Values [D, N, ...] of the flat tokens as rows [D, R, Q, ...]; 0 at padding."""
    place = flat.place[:, : micro.segment[0].size]
    (row_values,) = moved((values,), (place,), (flat.origin,))
    return row_values.reshape(*micro.segment.shape, *values.shape[2:])


Arrays = tuple[Array, ...]


@custom_vjp()
def moved(parts: Arrays, sources: Arrays, targets: Arrays) -> Arrays:
    """Of parts [D, n, ...] side by side, the entries [D, m, ...] at each of sources [D, m]; 0 where
    that is behind them all.

    No entry is moved twice. So gradients are moved back by `targets` [D, n], the inverse of
    `sources`, and not added up entry by entry. Nothing is sliced: a TPU writes slices out,
    5% of what an update of Qwen3-0.6B moved.
    """
    del targets
    return _picked_each(parts, sources)


def _moved(parts: Arrays, sources: Arrays, targets: Arrays) -> tuple[Arrays, Arrays]:
    return _picked_each(parts, sources), targets


moved.defvjp(_moved, lambda targets, gradients: (_picked_each(gradients, targets), None, None))


def _picked_each(parts: Arrays, sources: Arrays) -> Arrays:
    joined = jnp.concatenate(parts, axis=1)
    return tuple(_picked(joined, source) for source in sources)


def _picked(values: Array, source: Array) -> Array:
    return jax.vmap(lambda row, index: row.at[index].get(mode="fill", fill_value=0))(values, source)


def _joined(rows: Array, prompts: Array) -> Array:
    """[D, R, Q, ...] and [D, A, S, ...] as one [D, R * Q + A * S, ...]."""
    parts = (leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:]) for leaf in (rows, prompts))
    return jnp.concatenate([*parts], axis=1)
