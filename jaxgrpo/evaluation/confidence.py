"""From the confidence of tokens to that of a whole completion, by windows (DeepConf)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.core.metrics import accumulate_dtype


class TraceConfidence(NamedTuple):
    """Four ways to put the confidence of a completion into one number, [N] each."""

    mean: Array  # over all of its tokens
    least: Array  # its least confident window
    bottom: Array  # mean of the least confident tenth of its windows
    tail: Array  # its last window


def trace_confidence(
    confidence: Float[Array, "N T"], mask: Bool[Array, "N T"], window: int
) -> TraceConfidence:
    """Summaries of the confidence of tokens, over windows of so many tokens.

        W[t] = mean of C over tokens t - window + 1 ... t, one for each place that a window fits
        mean = mean C,  least = min W,  bottom = mean of the max(1, len(W) // 10) lowest W,
        tail = the last W

    A slip that a long completion's mean hides shows in its least window. Masked tokens are left
    out and the rest joined. A completion shorter than the window has one, of all its tokens; an
    empty one is 0 everywhere.

    Args:
      confidence: of tokens, as `jaxgrpo.models.logprobs.token_confidence` gives it.
      window: static, at least 1.

    Source: Fu et al. 2025 (DeepConf), arXiv 2508.15260: windows of 2048 tokens. The tail there has
      a length of its own, of the same 2048 tokens.
    """
    if window < 1:
        raise ValueError(f"window = {window}: a window has at least 1 token")
    dtype = accumulate_dtype(confidence.dtype)
    size = min(window, confidence.shape[1])
    joined = jnp.argsort(~mask, axis=1, stable=True)
    length = mask.sum(1, keepdims=True)
    real = jnp.arange(confidence.shape[1])[None, :] < length
    value = jnp.where(real, jnp.take_along_axis(confidence, joined, axis=1), 0).astype(dtype)
    mean = value.sum(1, keepdims=True) / jnp.maximum(length, 1).astype(dtype)
    # Sums of what is left of the mean: running sums of C itself would swallow its changes.
    sums = jnp.cumsum(jnp.where(real, value - mean, 0), axis=1)
    sums = jnp.concatenate([jnp.zeros_like(mean), sums], axis=1)
    short = length < size
    windows = jnp.where(short, mean, mean + (sums[:, size:] - sums[:, :-size]) / size)
    number = jnp.where(short, 1, length - size + 1)
    place = jnp.arange(windows.shape[1])[None, :]
    lowest = jnp.sort(jnp.where(place < number, windows, jnp.inf), axis=1)
    tenth = jnp.maximum(1, number // 10)
    bottom = jnp.where(place < tenth, lowest, 0).sum(1) / tenth[:, 0].astype(dtype)
    tail = jnp.take_along_axis(windows, number - 1, axis=1)[:, 0]
    return TraceConfidence(mean[:, 0], lowest[:, 0], bottom, tail)
