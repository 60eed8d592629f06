"""Rows of several samples on an NVIDIA GPU, by two calls of cuDNN whose log-sum-exps join them.

One call is over the samples of a row, side by side, each causal; the other over the prompt, which
every token of the row sees. With L the log-sum-exp of all that a query sees,

    L = logaddexp(L_own, L_prompt),    o = exp(L_own - L) o_own + exp(L_prompt - L) o_prompt

The backward pass of cuDNN computes exp(score - L) again, so each part with the joint o and L gives
its exact share of the gradient. Measured on an H200 (benchmarks/results/2026-11-27-h200.md).

Source: jax._src.cudnn.fused_attention_stablehlo; FlashAttention, arXiv 2205.14135, algorithm 4.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, custom_batching
from jax.ad_checkpoint import checkpoint_name

from jaxgrpo.core.errors import one_line
from jaxgrpo.models.api import Attend, AttentionKind, KeyValue
from jaxgrpo.models.kernels.cudnn import even
from jaxgrpo.models.kernels.plain import SAVED, check_kind, take_per_bin
from jaxgrpo.models.products import custom_vjp

NEVER_SEEN = 1e30
"""The log-sum-exp of a place without a token: exp(score - this) is 0."""


class Samples(NamedTuple):
    """Where the samples of rows are: M at the most in each, one after another."""

    length: Array  # [B, M], 0 behind the last
    start: Array  # [B, M], of those behind the last: its end
    index: Array  # [B, Q], the sample of each place; M: none
    place: Array  # [B, Q], from the sample's first token


class Parts(NamedTuple):
    """Attention to samples, or to prompts [B] of these lengths, whole and backwards."""

    forward: Callable[[Array, Array, Array, Any], tuple[Array, Array]]
    """(query [B, Q, heads, head_dim], key, value [B, N, kv_heads, head_dim], Samples or lengths)
    -> (output as the query, log-sum-exps [B, Q, heads] in float32); without a token, anything"""
    backward: Callable[..., tuple[Array, Array, Array]]
    """(query, key, value, Samples or lengths, output, log-sum-exps, the output's cotangent)
    -> gradients of query, key and value"""


def rows_with_prefix(
    segment: Array,
    position: Array,
    row_prompt: Array,
    prompt_length: Array,
    *,
    most: int,
    parts: Parts | None = None,
) -> Attend:
    """`attention.rows_with_prefix` for samples one after another, each in one piece.

    There may be places without a token between them, as where each begins with a chunk of layers
    that recur. Their positions count from the prompt's length. Other rows give NaN, and places
    without a token 0. No windows, and no soft caps.

    Args:
      most: samples of a row.
      parts: cuDNN's by default; or, for a test without a GPU, formulas.
    """
    width = segment.shape[-1]
    segment, position = even(segment), even(position)
    real, at = segment > 0, jnp.arange(segment.shape[-1], dtype=jnp.int32)
    is_in = segment[..., None] == jnp.arange(1, most + 1, dtype=segment.dtype)  # [D, R, Q, M]
    length = is_in.sum(-2, dtype=jnp.int32)  # [D, R, M]
    first = jnp.where(is_in, at[:, None], at.size).min(-2)
    end = jnp.where(length > 0, first + length, 0).max(-1, keepdims=True)
    start = jnp.minimum(first, end)  # of samples that are not there: behind the last
    index = jnp.where(real, segment - 1, most)
    place = at - jnp.take_along_axis(start, jnp.minimum(index, most - 1), axis=-1)
    before = jnp.take_along_axis(prompt_length, row_prompt, axis=1)  # [D, R]
    in_order = (place >= 0) & (place < jnp.take_along_axis(length, index % most, axis=-1))
    counted = position == before[..., None] + place
    fits = (in_order & counted & (segment <= most) | ~real).all(-1)
    fits &= (jnp.diff(start) >= 0).all(-1)
    # An empty row has one sample of one token, which is not read: cuDNN wants some.
    length = length.at[..., 0].set(jnp.maximum(length[..., 0], 1))

    def flat(leaf: Array) -> Array:
        return leaf.reshape(-1, *leaf.shape[2:])

    samples = Samples(*map(flat, (length, start, index, place)))

    def attend(query, key, value, memory: KeyValue, kind: AttentionKind, sinks=None):
        check_kind("packed rows by cuDNN", kind, "soft_cap", "window")
        prompts = [take_per_bin(leaf, row_prompt) for leaf in memory]
        arrays = tuple(flat(even(leaf)) for leaf in (query, key, value, *prompts))
        out = _joined(parts or CUDNN, arrays, (samples, flat(before)))[:, :width]
        return jnp.where(fits[..., None, None, None], out.reshape(query.shape), jnp.nan), None

    return attend


@custom_vjp(0)
def _joined(parts: Parts, arrays: tuple[Array, ...], spans: tuple[Samples, Array]) -> Array:
    """Attention to the samples and the prompts of rows; 0 where there is no token.

    Args:
      arrays: queries, keys and values of rows, keys and values of their prompts.
    """
    return _forward(parts, arrays, spans)[0]


def _forward(parts: Parts, arrays: tuple[Array, ...], spans: tuple[Samples, Array]):
    (query, key, value, prompt_key, prompt_value), (samples, before) = arrays, spans
    own_out, own_sum = parts.forward(query, key, value, samples)
    prompt_out, prompt_sum = parts.forward(query, prompt_key, prompt_value, before)
    prompt_sum = jnp.where(before[:, None, None] > 0, prompt_sum, -jnp.inf)
    total = jnp.logaddexp(own_sum, prompt_sum)
    own_share, prompt_share = (jnp.exp(part - total)[..., None] for part in (own_sum, prompt_sum))
    real = (samples.index < samples.length.shape[1])[..., None]
    out = jnp.where(real[..., None], own_out * own_share + prompt_out * prompt_share, 0).astype(
        query.dtype
    )
    total = jnp.where(real, total, NEVER_SEEN)
    out, total = checkpoint_name(out, SAVED), checkpoint_name(total, SAVED)
    return out, (arrays, spans, out, total)


def _backward(parts: Parts, saved: tuple[Any, ...], slope: Array):
    (query, key, value, prompt_key, prompt_value), (samples, before), out, total = saved
    real = (samples.index < samples.length.shape[1])[..., None, None]
    slope = jnp.where(real, slope, 0)
    of_prompt = jnp.where(before[:, None, None] > 0, total, NEVER_SEEN)
    row_grads = parts.backward(query, key, value, samples, out, total, slope)
    d_again, *prompt = parts.backward(
        query, prompt_key, prompt_value, before, out, of_prompt, slope
    )
    # Where there is no token, cuDNN leaves what was there.
    d_query, *row_grads = (jnp.where(real, leaf, 0) for leaf in row_grads)
    is_read = jnp.arange(prompt_key.shape[1]) < before[:, None]
    prompt = [jnp.where(is_read[..., None, None], leaf, 0) for leaf in prompt]
    return (d_query + jnp.where(real, d_again, 0), *row_grads, *prompt), None


_joined.defvjp(_forward, _backward)


GROUPED = jax.__version_info__ >= (0, 11, 1)
"""Whether JAX finds the samples of packed keys whose heads are shared: before, it multiplies where
they begin by the heads of queries, and other keys are read (jax-ml/jax, pull request 39521)."""


class _NoFunction(NamedTuple):
    """The arguments of cuDNN's backward pass by which nothing changes its scores."""

    options: dict[str, Any]  # beside those of all releases of JAX
    values: tuple[Any, ...]  # among those that the forward pass leaves


NO_FUNCTION = (
    _NoFunction({"score_mod": None, "cudnn_version": 0}, ((),))
    if jax.__version_info__ >= (0, 12)
    else _NoFunction({"is_training": True}, ())
)


UNUSED: dict[str, Any] = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),
    "layout": 0,
    "sliding_window_length": None,
    "return_residual": False,
    **NO_FUNCTION.options,
}
"""Arguments of JAX's rule for the backward pass by which it does nothing more than is needed."""
USED = ("scale", "mask_type", "res", "grad_output")
"""The others."""


def refusals() -> list[str]:
    """What this release of JAX has not as it is called here; empty if nothing.

    JAX has no public name for cuDNN's backward pass with log-sum-exps that are given.
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused

        arguments = {*inspect.signature(fused._dot_product_attention_bwd_rule).parameters}
    except (ImportError, AttributeError) as error:
        return [
            f"rows of several samples: JAX {jax.__version__} hides cuDNN's backward pass "
            f"elsewhere ({one_line(error)})"
        ]
    if arguments == {*USED, *UNUSED}:
        return []
    unknown = ", ".join(sorted(arguments ^ {*USED, *UNUSED}))
    return [
        f"rows of several samples: cuDNN's backward pass of JAX {jax.__version__} takes other "
        f"arguments ({unknown})"
    ]


def _a_key_each(query: Array, pair: Sequence[Array], spans: Samples | Array) -> list[Array]:
    """Keys and values with a head for each of the queries', where JAX needs that."""
    if GROUPED or not isinstance(spans, Samples):
        return [*pair]
    return [jnp.repeat(leaf, query.shape[2] // leaf.shape[2], axis=2) for leaf in pair]


def _arguments(query: Array, spans: Samples | Array) -> tuple[Any, tuple[Array, ...]]:
    """cuDNN's mask, and lengths and offsets of queries and keys."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    if not isinstance(spans, Samples):
        width = jnp.full(query.shape[0], query.shape[1], jnp.int32)
        return fused.MaskType.PADDING, (width, jnp.maximum(spans, 1))
    # Where samples begin, and -1 behind the last: with its end cuDNN would see one more. Those that
    # are not there have no token: JAX moves the others together where they are -1, over all rows.
    offsets = jnp.pad(spans.start, [(0, 0), (0, 1)], constant_values=-1)
    return fused.MaskType.PADDING_CAUSAL, (spans.length, spans.length, offsets, offsets)


def _cudnn_forward(query: Array, key: Array, value: Array, spans: Samples | Array):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    mask, lengths = _arguments(query, spans)
    call: Any = functools.partial(fused.dot_product_attention, mask_type=mask, return_residual=True)
    pair = _a_key_each(query, (key, value), spans)
    out, sums = call(query, *pair, None, None, *lengths, scale=1.0)
    if not isinstance(spans, Samples):
        return out, sums.transpose(0, 2, 1)
    # Of packed rows cuDNN keeps them by sample, from its first token on.
    rows, most = spans.length.shape
    by_sample = sums.reshape(rows, most, *sums.shape[1:])
    row = jnp.arange(rows)[:, None]
    return out, by_sample.at[row, spans.index, :, spans.place].get(mode="clip")


def _cudnn_backward(query, key, value, spans: Samples | Array, out, sums, slope):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    mask, lengths = _arguments(query, spans)
    if isinstance(spans, Samples):
        rows, most = spans.length.shape
        empty = jnp.zeros((rows, most, sums.shape[2], sums.shape[1]), sums.dtype)
        row = jnp.arange(rows)[:, None]
        by_sample = empty.at[row, spans.index, :, spans.place].set(sums, mode="drop")
        sums = by_sample.reshape(-1, *by_sample.shape[2:])
    else:
        sums = sums.transpose(0, 2, 1)
    absent = jnp.zeros(0, query.dtype)
    lengths = (*lengths, *[absent] * (4 - len(lengths)))
    pair = _a_key_each(query, (key, value), spans)
    rule: Any = fused._dot_product_attention_bwd_rule
    grads = rule(
        scale=1.0,
        mask_type=mask,
        res=(query, *pair, absent, *lengths, absent, absent, *NO_FUNCTION.values, sums, out),
        grad_output=slope,
        **UNUSED,
    )
    shape = (*key.shape[:3], -1, key.shape[3])
    return grads[0], *(
        grad.reshape(shape).sum(3, dtype=jnp.float32).astype(key.dtype) for grad in grads[1:3]
    )


def _with_more_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays [B, ...], and of more rows by vmap: cuDNN's own knows no packed ones."""
    mapped = custom_batching.custom_vmap(function)

    def rule(size: int, are_batched: Any, *arrays: Any) -> tuple[Any, Any]:
        def folded(leaf: Array, is_batched: bool) -> Array:
            leaf = leaf if is_batched else jnp.broadcast_to(leaf, (size, *leaf.shape))
            return leaf.reshape(-1, *leaf.shape[2:])

        out = mapped(*jax.tree.map(folded, arrays, tuple(are_batched)))
        unfolded = jax.tree.map(lambda leaf: leaf.reshape(size, -1, *leaf.shape[1:]), out)
        return unfolded, jax.tree.map(lambda _: True, out)

    mapped.def_vmap(rule)
    return mapped


CUDNN = Parts(_with_more_rows(_cudnn_forward), _with_more_rows(_cudnn_backward))
