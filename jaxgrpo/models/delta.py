"""The gated delta net of a layer, and the functions by which callers let it recur.

They are what `models.attention` has for attention: whole sequences, packed rows that go on from
prompts, chunks of prompts, decoding steps. A state is `recurrence.DeltaState`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxgrpo.models import recurrence
from jaxgrpo.models.api import Constrain, DeltaKind, ModelConfig, Recur
from jaxgrpo.models.cache import cache_dtype
from jaxgrpo.models.kernels.plain import take_per_bin
from jaxgrpo.models.layers import Dense, RMSNorm, side_by_side
from jaxgrpo.models.products import as_sampled, rounded
from jaxgrpo.models.recurrence import DeltaInputs, DeltaState, wide

FASTEST = 16.0
"""The largest rate of forgetting, e^(log_rate), that a random model begins with."""


class Taps(nnx.Module):
    """The numbers by which a channel's last tokens are summed, the current one's last."""

    def __init__(self, heads: dict[str, int], width: int, dtype: str, rngs: nnx.Rngs):
        shape, bound = (*heads.values(), width), width**-0.5
        value = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
        self.taps: nnx.Param[Array] = nnx.Param(value.astype(dtype), axes=(*heads, "taps"))
        self.dtype: str = dtype

    def as_sampled(self) -> Array:
        return as_sampled(self.taps[...], self.dtype)


class GatedDelta(nnx.Module):
    """out(norm(o) * silu(gate(x))), where o is what the gated delta rule gives of

        query(x), key(x), value(x), behind their convolutions
        rate = reach sigmoid(rate(x)),    log_decay = -exp(log_rate) softplus(decay(x) + bias)

    Source: Yang et al. 2024, arXiv 2412.06464, section 3.3, as Qwen3.5 has it.
    """

    def __init__(self, config: ModelConfig, kind: DeltaKind, rngs: nnx.Rngs):
        embed = {"embed": config.hidden_size}
        keys = {"kv_heads": kind.key_heads, "head_dim": kind.key_dim}
        values = {"heads": kind.value_heads, "head_dim": kind.value_dim}
        heads = {"heads": kind.value_heads}
        self.query: Dense = Dense("delta/query", embed, keys, config, rngs)
        self.key: Dense = Dense("delta/key", embed, keys, config, rngs)
        self.value: Dense = Dense("delta/value", embed, values, config, rngs)
        self.query_conv: Taps = Taps(keys, kind.conv, config.dtype, rngs)
        self.key_conv: Taps = Taps(keys, kind.conv, config.dtype, rngs)
        self.value_conv: Taps = Taps(values, kind.conv, config.dtype, rngs)
        self.gate: Dense = Dense("delta/gate", embed, values, config, rngs)
        self.rate: Dense = Dense("delta/rate", embed, heads, config, rngs)
        self.decay: Dense = Dense("delta/decay", embed, heads, config, rngs)
        self.attended: str = cache_dtype("auto", config)
        dtype = str(wide(jnp.dtype(config.dtype)))
        in_wide = dataclasses.replace(
            config, norm_offset=0.0, dtype=dtype, rms_norm_eps=kind.eps or config.rms_norm_eps
        )
        self.norm: RMSNorm = RMSNorm({"norm": kind.value_dim}, in_wide)
        self.out: Dense = Dense("delta/out", values, embed, config, rngs)
        spread = jax.random.uniform(rngs.params(), (kind.value_heads,), jnp.float32, 0.01, FASTEST)
        self.log_rate: nnx.Param[Array] = nnx.Param(jnp.log(spread).astype(dtype), axes=("heads",))
        self.bias: nnx.Param[Array] = nnx.Param(jnp.ones(kind.value_heads, dtype), axes=("heads",))

    def __call__(self, x: Array, recur: Recur, memory: Any, kind: DeltaKind) -> tuple[Array, Any]:
        query, key, value, gate = side_by_side(x, self.query, self.key, self.value, self.gate)
        rate, decay = side_by_side(x, self.rate, self.decay)
        dtype = wide(x.dtype)
        rate = jax.nn.sigmoid(rate.astype(dtype))
        rate = rate if kind.reach == 1.0 else rate * kind.reach
        speed = jax.nn.softplus(decay.astype(dtype) + self.bias[...].astype(dtype))
        log_decay = -jnp.exp(self.log_rate[...].astype(dtype)) * speed
        first, second, third = self.query_conv, self.key_conv, self.value_conv
        taps = first.as_sampled(), second.as_sampled(), third.as_sampled()
        query, key, value = (rounded(leaf, self.attended) for leaf in (query, key, value))
        inputs = DeltaInputs(query, key, value, log_decay, rate, taps)
        out, memory = recur(inputs, memory, kind)
        out = self.norm(out).astype(dtype) * jax.nn.silu(gate.astype(dtype))
        return self.out(out.astype(x.dtype)), memory


def sequences(real: Array) -> Recur:
    """Each sequence by itself; the memory it returns is its state.

    Shapes: real [*B, Q], as in `recurrence.over_sequences`.
    """

    def recur(inputs: DeltaInputs, memory: Any, kind: DeltaKind) -> tuple[Array, DeltaState]:
        del memory, kind
        return recurrence.over_sequences(inputs, real, recurrence.first_state(inputs))

    return recur


def packed(segment: Array, row_prompt: Array, prompt_real: Array) -> Callable[..., Any]:
    """Prompts, and rows whose segments each go on from the state of their prompt.

    Segments begin at multiples of `recurrence.chunk_size`.

    Shapes: segment [D, R, Q], 0 at padding; row_prompt [D, R]; prompt_real [D, A, S] bool.

    Returns: (inputs of rows, inputs of prompts) -> (outputs of rows, outputs of prompts)
    """
    before = jnp.pad(segment[..., :-1], ((0, 0), (0, 0), (1, 0)))
    size = recurrence.chunk_size(segment.shape[-1])
    begins = segment[..., ::size] != before[..., ::size]

    def compute(rows: DeltaInputs, prompts: DeltaInputs) -> tuple[Array, Array]:
        start = recurrence.first_state(prompts)
        prompt_out, state = recurrence.over_sequences(prompts, prompt_real, start)
        start = jax.tree.map(lambda leaf: take_per_bin(leaf, row_prompt), state)
        row_out, _ = recurrence.over_sequences(rows, segment > 0, start, begins)
        return row_out, prompt_out

    return compute


def chunk(row: Array, start: Array, length: Array) -> Recur:
    """A chunk of each of some prompts, behind the state that its row has; as `attention.chunk`.

    Memory per layer: the prompts' DeltaState [D, A, ...].
    """

    def recur(inputs: DeltaInputs, memory: DeltaState, kind: DeltaKind):
        del kind
        return _advanced(inputs, memory, row, length, is_first=start == 0)

    return recur


def slot_chunk(slot: Array, size: Array) -> Recur:
    """A chunk of each of some slots' tokens; as `attention.slot_chunk`.

    Memory per layer: (prompts' DeltaState, own DeltaState [D * N, ...]).
    """

    def recur(inputs: DeltaInputs, memory: tuple[DeltaState, DeltaState], kind: DeltaKind):
        del kind
        prompts, slots = memory
        bins = len(slot)
        per_bin = jax.tree.map(lambda leaf: leaf.reshape(bins, -1, *leaf.shape[1:]), slots)
        out, per_bin = _advanced(inputs, per_bin, slot, size)
        slots = jax.tree.map(lambda leaf, old: leaf.reshape(old.shape), per_bin, slots)
        return out, (prompts, slots)

    return recur


def _advanced(
    inputs: DeltaInputs, states: Any, place: Array, length: Array, is_first: Array | None = None
) -> tuple[Array, Any]:
    """Outputs of chunks [D, R, W], and states [D, n, ...] that are behind them at `place` [D, R].

    Args:
      length: [D, R], tokens of each that are real; 0: its state stays.
      is_first: chunks with nothing before them.
    """
    number = len(states.matrix[0])
    before = jax.tree.map(lambda leaf: take_per_bin(leaf, jnp.minimum(place, number - 1)), states)
    if is_first is not None:
        before = jax.tree.map(lambda leaf: jnp.where(_beside(is_first, leaf), 0, leaf), before)
    real = jnp.arange(inputs.query.shape[2]) < length[..., None]
    out, behind = recurrence.over_sequences(inputs, real, before)
    place = jnp.where(length > 0, place, number)
    return out, jax.tree.map(lambda leaf, new: _put(leaf, place, new), states, behind)


def decode(is_paused: Array | None) -> Recur:
    """One decoding step of every slot. Memory per layer: as in `slot_chunk`.

    Args:
      is_paused: [D, N] bool, slots that keep their state; None: none does.
    """

    def recur(inputs: DeltaInputs, memory: tuple[DeltaState, DeltaState], kind: DeltaKind):
        del kind
        prompts, slots = memory
        leaves = (leaf.reshape(-1, *leaf.shape[3:]) for leaf in inputs[:5])
        out, new = recurrence.step(inputs.with_tokens(leaves), slots)
        if is_paused is not None:
            stays = is_paused.reshape(-1)
            keep = lambda old, new: jnp.where(_beside(stays, old), old, new)  # noqa: E731
            new = jax.tree.map(keep, slots, new)
        return out.reshape(*inputs.value.shape[:3], *out.shape[1:]), (prompts, new)

    return recur


def begin_slots(memory: Any, begins: Array, row: Array, is_empty: Array) -> Any:
    """The memory with the states of prompts' rows copied into the slots that begin to read them.

    One slot of each bin after another: few begin at a step, and all states are gigabytes.

    Args:
      memory: per layer, of any kind.
      begins, is_empty: [D, N] bool, slots that begin, and those whose row has no token.
      row: [D, N], that each slot reads.
    """
    order = jnp.argsort(~begins, axis=-1, stable=True)
    number, (bins, slots) = begins.sum(-1), begins.shape

    def copy(at: Array, states: list[tuple[DeltaState, DeltaState]]) -> Any:
        slot = order[:, at, None]  # [D, 1]
        place = jnp.where(at < number[:, None], slot, slots)
        its_row, starts_empty = (jnp.take_along_axis(x, slot, 1) for x in (row, is_empty))

        def copied(prompts: Array, target: Array) -> Array:
            state = take_per_bin(prompts, its_row)
            state = jnp.where(_beside(starts_empty, state), 0, state)
            per_bin = target.reshape(bins, slots, *target.shape[1:])
            return _put(per_bin, place, state).reshape(target.shape)

        return [(prompts, jax.tree.map(copied, prompts, slots)) for prompts, slots in states]

    is_state = [isinstance(slots, DeltaState) for _, slots in memory]
    states = [entry for entry, recurs in zip(memory, is_state, strict=True) if recurs]
    copied = iter(jax.lax.fori_loop(0, number.max(), copy, states))
    return tuple(
        next(copied) if recurs else entry for entry, recurs in zip(memory, is_state, strict=True)
    )


def empty_states(
    kind: DeltaKind, dtype: str, batch: tuple[int, ...], lay_out: Constrain
) -> DeltaState:
    """States of sequences [*batch], bins first, before their first tokens."""
    axes = ("bins", *[None] * (len(batch) - 1))
    keys, values = (kind.key_heads, kind.key_dim), (kind.value_heads, kind.value_dim)

    def tail(sizes: tuple[int, int], heads: str) -> Array:
        zeros = jnp.zeros((*batch, kind.conv - 1, *sizes), dtype)
        return lay_out(zeros, (*axes, None, heads, None))

    sizes = kind.value_heads, kind.key_dim, kind.value_dim
    matrix = jnp.zeros((*batch, *sizes), wide(jnp.dtype(dtype)))
    tails = tail(keys, "kv_heads"), tail(keys, "kv_heads"), tail(values, "heads")
    return DeltaState(lay_out(matrix, (*axes, "heads", None, None)), tails)


def _beside(mask: Array, leaf: Array) -> Array:
    """A mask of a leaf's first dimensions, with as many as it."""
    return mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))


def _put(leaf: Array, place: Array, new: Array) -> Array:
    """An array [D, n, ...] with [D, m, ...] at [D, m], bin by bin; beyond its end nowhere."""
    put_bin = lambda leaf, place, new: leaf.at[place].set(new, mode="drop")  # noqa: E731
    return jax.vmap(put_bin)(leaf, place, new.astype(leaf.dtype))
