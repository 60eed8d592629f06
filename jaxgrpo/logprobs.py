"""Log-probabilities of chosen tokens, chunk by chunk: no [B, T, V] array is ever whole."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

LOGITS_PER_CHUNK = 2**23
"""Logits of one bin held at a time (32 MiB in float32)."""


def token_logprobs(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "D N E"],
    targets: Int[Array, "D N"],
    *,
    temperature: float = 1.0,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> tuple[Float[Array, "D N"], Float[Array, "D N"]]:
    """Log-probability of each target, and the entropy of the distribution it was drawn from.

        z = unembed(hidden) / temperature
        logp = z[target] - logsumexp(z)
        entropy = logsumexp(z) - sum_v softmax(z)_v z_v

    Tokens are taken in chunks along N, whose logits the backward pass computes again; D, the
    sharded dimension, stays whole. The entropy carries no gradient unless it is used.

    Args:
      unembed: hidden [..., E] -> logits [..., V].
      temperature: of the sampling distribution, so that ratios compare like with like.
      logits_per_chunk: upper bound on N' * V of one chunk and bin.

    Returns: (logp, entropy) in at least float32, in nats.
    """
    bins, length, width = hidden.shape
    vocab = jax.eval_shape(unembed, hidden[:, :1]).shape[-1]
    chunk = max(1, min(length, logits_per_chunk // vocab))
    count = -(-length // chunk)
    padding = count * chunk - length

    @jax.checkpoint
    def one(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = unembed(hidden)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / temperature
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        expected = (jnp.exp(logits - total[..., None]) * logits).sum(-1)
        return chosen - total, total - expected

    if count == 1:
        return one(hidden, targets)
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))
    hidden = jnp.moveaxis(hidden.reshape(bins, count, chunk, width), 1, 0)
    targets = jnp.moveaxis(targets.reshape(bins, count, chunk), 1, 0)
    _, pieces = jax.lax.scan(lambda carry, xs: (carry, one(*xs)), None, (hidden, targets))
    logp, entropy = (
        jnp.moveaxis(piece, 0, 1).reshape(bins, count * chunk)[:, :length] for piece in pieces
    )
    return logp, entropy
