"""Attention on an NVIDIA GPU by the kernel of cuDNN, which keeps no scores in memory.

That kernel knows sequences: causal from their first token, of a given length, with a window to the
left. Its other masks are arrays [Q, N]. So a row of one sample becomes a sequence, its prompt and
then the sample, in which places are positions. Queries of the prompt are zeros: what is computed
for them, a prompt's own attention per row, is thrown away. A row of several takes two calls, joined
by their log-sum-exps (`kernels/cudnn_packed.py`). `refusals` lists what this cannot compute.

Source: jax.nn.dot_product_attention(implementation="cudnn").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.models.api import Attend, AttentionKind, KeyValue, ModelConfig
from jaxgrpo.models.kernels import compute_capability, load, not_of_nvidia
from jaxgrpo.models.kernels.plain import check_kind, lacking, take_per_bin

WIDEST_HEAD, WIDEST_BEFORE_HOPPER = 256, 128
HOPPER = 9.0  # its compute capability: before it cuDNN takes no samples side by side

Sequences = Callable[[Array, Array, Array, Array, int | None], Array]
"""(query [B, T, heads, head_dim], key, value [B, T, kv_heads, head_dim], length [B], window) ->
causal attention of sequences, as the query; where a sequence has ended, anything"""


def refusals(
    config: ModelConfig, samples_per_row: int | None, mesh: Mesh | None = None
) -> list[str]:
    """What cuDNN cannot compute of a model and its rows; empty if nothing.

    Args:
      samples_per_row: the most that a row may hold; None: any number, or some see no prompt.
      mesh: the run's; None on one device.
    """
    device = None if mesh is None else mesh.devices.flat[0]
    problems, capability = not_of_nvidia(device), compute_capability(device) or HOPPER
    widest = WIDEST_HEAD if capability >= HOPPER else WIDEST_BEFORE_HOPPER
    if config.dtype not in ("bfloat16", "float16"):
        problems.append(f"model.dtype = {config.dtype}: it takes bfloat16 or float16")
    if config.float32_attention:
        problems.append("model.float32_attention: it takes queries, keys and values of 16 bits")
    if config.head_dim % 8 or config.head_dim > widest:
        problems.append(f"head_dim = {config.head_dim}: it takes multiples of 8 up to {widest}")
    problems += lacking(config.attention, "soft_cap")
    if samples_per_row is None:
        problems.append(
            "rows of any samples: their number must be bounded, and each see its prompt"
        )
    elif samples_per_row > 1 and capability < HOPPER:
        problems.append(
            f"rows of several samples on compute capability {capability}: "
            f"it takes {HOPPER} and above"
        )
    elif samples_per_row > 1 and any(kind.window is not None for kind in config.attention):
        problems.append("windows in rows of several samples: they reach into prompts")
    if samples_per_row is not None and samples_per_row > 1:
        packed, missing = load("cudnn_packed")
        problems += missing or packed.refusals()
    if mesh is not None and mesh.shape["context"] > 1:
        problems.append(f"mesh.context = {mesh.shape['context']}: a device must have whole rows")
    return problems


def sequences(
    query: Array,
    key: Array,
    value: Array,
    length: Array,
    window: int | None,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """`Sequences` by cuDNN; or, for a test without a GPU, by the formula that JAX has for it."""
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=1.0,
        is_causal=True,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def causal(position: Array, valid: Array, *, sequences: Sequences = sequences) -> Attend:
    """`attention.causal` by the kernel. Positions count from 0, and valid tokens come first.

    Sequences where they do not give NaN. A query that is not valid gets 0, which differs from
    `attention.causal`.
    """

    def attend(query, key, value, memory, kind: AttentionKind, sinks=None):
        del memory
        check_kind("cuDNN", kind, "soft_cap")
        place = jnp.arange(query.shape[-3])
        length = valid.sum(-1, dtype=jnp.int32)
        first = valid == (place < length[..., None])
        fits = (first & ((position == place) | ~valid)).all(-1)
        # Places without a token get no gradient, whatever the kernel leaves there.
        inputs = [jnp.where(valid[..., None, None], leaf, 0) for leaf in (query, key, value)]
        out = _flat(sequences, *inputs, length=jnp.maximum(length, 1), window=kind.window)
        return _where(fits, valid, out), KeyValue(key, value)

    return attend


def rows_with_prefix(
    segment: Array,
    position: Array,
    row_prompt: Array,
    prompt_length: Array,
    *,
    sequences: Sequences = sequences,
) -> Attend:
    """`attention.rows_with_prefix` by the kernel, for rows of one sample from their first place.

    Its positions count from the prompt's length. Other rows give NaN.
    """
    prefix_length = jnp.take_along_axis(prompt_length, row_prompt, axis=1)  # [D, R]
    real = segment > 0
    row_length = real.sum(-1, dtype=jnp.int32)

    def attend(query, key, value, memory: KeyValue, kind: AttentionKind, sinks=None):
        check_kind("cuDNN", kind, "soft_cap")
        width = query.shape[-3]
        place = jnp.arange(width)
        in_sample = (segment == segment[..., :1]) & (place < row_length[..., None])
        counted = position == prefix_length[..., None] + place
        fits = ((in_sample & counted) | ~real).all(-1)
        prompts = [take_per_bin(leaf, row_prompt) for leaf in memory]
        zeros = jnp.zeros((*query.shape[:2], memory.key.shape[2], *query.shape[3:]), query.dtype)
        inputs = [
            _put_after(prompt, row, prefix_length)
            for prompt, row in zip((zeros, *prompts), (query, key, value), strict=True)
        ]
        # A row without a sample has no queries to answer, but no sequence is empty.
        length = jnp.where(row_length > 0, prefix_length + row_length, 1)
        out = _flat(sequences, inputs[0], inputs[1], inputs[2], length, kind.window)
        return _where(fits, real, _cut_from(out, prefix_length, width)), None

    return attend


def _flat(sequences: Sequences, query: Array, key: Array, value: Array, length: Array, window):
    """`sequences` over any leading dimensions."""
    inputs = [even(leaf.reshape(-1, 1, *leaf.shape[-3:]))[:, 0] for leaf in (query, key, value)]
    out = sequences(inputs[0], inputs[1], inputs[2], length.reshape(-1), window)
    return out[:, : query.shape[-3]].reshape(query.shape)


def even(leaf: Array) -> Array:
    """[D, R, Q, ...] with one place more where Q is odd: JAX 0.11 takes no odd sequences."""
    padding = [(0, 0), (0, 0), (0, leaf.shape[2] % 2), *[(0, 0)] * (leaf.ndim - 3)]
    return jnp.pad(leaf, padding) if leaf.shape[2] % 2 else leaf


def _put_after(prompt: Array, row: Array, length: Array) -> Array:
    """[D, R, S + Q, ...]: the first `length` of [D, R, S, ...], then [D, R, Q, ...]."""

    def put_row(prompt: Array, row: Array, length: Array) -> Array:
        wide = jnp.pad(prompt, [(0, row.shape[0]), (0, 0), (0, 0)])
        return jax.lax.dynamic_update_slice_in_dim(wide, row, length, axis=0)

    return jax.vmap(jax.vmap(put_row))(prompt, row, length)


def _cut_from(out: Array, start: Array, width: int) -> Array:
    """[D, R, Q, ...]: `width` places of [D, R, S + Q, ...], from `start` on."""
    cut_row = lambda out, start: jax.lax.dynamic_slice_in_dim(out, start, width)  # noqa: E731
    return jax.vmap(jax.vmap(cut_row))(out, start)


def _where(fits: Array, real: Array, out: Array) -> Array:
    """0 at padding, and NaN in the rows that are not as the kernel needs them."""
    out = jnp.where(real[..., None, None], out, 0)
    return jnp.where(fits[..., None, None, None], out, jnp.nan)
