"""The KL divergence of two policies over the whole vocabulary, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxgrpo.core.metrics import accumulate_dtype
from jaxgrpo.models.logprobs import tokens_per_chunk

LIMIT = 20.0
"""Log ratios of single tokens are held below it: a reference without probability costs no more."""


def full_kl(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "D N E"],
    anchor_unembed: Callable[[Array], Array],
    anchor_hidden: Float[Array, "D N E"],
    *,
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
) -> tuple[Float[Array, "D N"], Float[Array, "D N"]]:
    """KL(policy || anchor) of the next token at each position, and how much of it was held.

        l_v = min(log p_v - log q_v, 20),   p = softmax(z / temperature), q the anchor's
        kl = sum_v p_v l_v
        held = sum_v p_v [log p_v - log q_v > 20]

    The gradient is taken with l held: sum_v p_v d l_v is 0 without the limit, and with it a token
    that the anchor does not know is pushed down as one of 20 nats. Tokens are taken in chunks along
    N, whose logits, of both policies, the backward pass computes again. Gradients of what `unembed`
    reads are summed over chunks in at least float32.

    Args:
      unembed, anchor_unembed: hidden [..., E] -> logits [..., V]; the anchor's gets no gradient.
      temperature: of the sampling distribution, for both.
      logits_per_chunk: upper bound on the logits of one chunk and bin, both policies together;
        None: see `jaxgrpo.models.logprobs.TOKENS_PER_CHUNK`.

    Returns: (kl, held) in at least float32, in nats and as a share.
    """
    vocab = jax.eval_shape(unembed, hidden[:, :1]).shape[-1]
    chunk = min(tokens_per_chunk(2 * vocab, logits_per_chunk), hidden.shape[1])
    # What unembed closes over becomes an argument, held wide: the chunks' gradients are added in
    # the dtype of what they belong to.
    converted, read = jax.closure_convert(unembed, hidden[:, :chunk])
    dtypes = [leaf.dtype for leaf in read]
    wide = [leaf.astype(accumulate_dtype(leaf.dtype)) for leaf in read]

    @jax.checkpoint
    def one(hidden: Array, anchor: Array) -> tuple[Array, Array]:
        weights = [leaf.astype(dtype) for leaf, dtype in zip(wide, dtypes, strict=True)]
        log_p = _log_softmax(converted(hidden, *weights), temperature)
        log_q = jax.lax.stop_gradient(_log_softmax(anchor_unembed(anchor), temperature))
        p = jnp.exp(log_p)
        # Where p is 0 both may be -inf.
        ratio = jnp.where(p > 0, jax.lax.stop_gradient(log_p) - log_q, 0)
        far = ratio > LIMIT
        kl = (p * jnp.minimum(ratio, LIMIT)).sum(-1)
        return kl, jax.lax.stop_gradient(jnp.where(far, p, 0).sum(-1))

    return _in_chunks(one, chunk, hidden, jax.lax.stop_gradient(anchor_hidden))


def _in_chunks(
    one: Callable[[Array, Array], tuple[Array, Array]], chunk: int, hidden: Array, anchor: Array
) -> tuple[Array, Array]:
    """`one`, [D, n, E] twice -> [D, n] twice, over `chunk` positions of N at a time."""
    bins, length, width = hidden.shape
    count = -(-length // chunk)
    if count == 1:
        return one(hidden, anchor)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, count * chunk - length), (0, 0)))
        return jnp.moveaxis(padded.reshape(bins, count, chunk, width), 1, 0)

    chunks = (split(hidden), split(anchor))
    _, pieces = jax.lax.scan(lambda carry, xs: (carry, one(*xs)), None, chunks)
    kl, held = (
        jnp.moveaxis(piece, 0, 1).reshape(bins, count * chunk)[:, :length] for piece in pieces
    )
    return kl, held


def _log_softmax(logits: Array, temperature: float) -> Array:
    wide = logits.astype(accumulate_dtype(logits.dtype))
    return jax.nn.log_softmax(wide / temperature, axis=-1)
