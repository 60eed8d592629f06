"""Distributions over the vocabulary, of two policies against each other: whole, and shortened.

A shortened distribution has log-probs of a few tokens and one of all others together, the tail.
Divergences of shortened distributions are at most those of the whole ones.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxgrpo.core.metrics import accumulate_dtype
from jaxgrpo.models.logprobs import by_chunks, chunk_and_vocab, is_named, scaled
from jaxgrpo.models.sharding import highest

LIMIT = 20.0
"""Log ratios of single tokens in `full_kl` are at most this: a reference without any probability
costs no more.
"""


def full_kl(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "D N E"],
    anchor_unembed: Callable[[Array], Array],
    anchor_hidden: Float[Array, "D N E"],
    *,
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
) -> tuple[Float[Array, "D N"], Float[Array, "D N"]]:
    """KL(policy || anchor) of the next token at each position, and how much of it was limited.

        l_v = min(log p_v - log q_v, 20),   p = softmax(z / temperature), q the anchor's
        kl = sum_v p_v l_v
        limited = sum_v p_v [log p_v - log q_v > 20]

    The gradient is taken with l fixed: sum_v p_v d l_v is 0 without the limit, and with it a token
    that the anchor does not know is pushed down as one of 20 nats. Tokens are taken in chunks along
    N, whose logits, of both policies, the backward pass computes again. Gradients of what `unembed`
    reads are summed over chunks in at least float32.

    Args:
      unembed, anchor_unembed: hidden [..., E] -> logits [..., V]; the anchor's gets no gradient.
      temperature: of the sampling distribution, for both.
      logits_per_chunk: upper bound on the logits of one chunk and bin, both policies together;
        None: see `jaxgrpo.models.logprobs.TOKENS_PER_CHUNK`.

    Returns: (kl, limited) in at least float32, in nats and as a share.
    """
    chunk, _ = chunk_and_vocab(unembed, hidden, logits_per_chunk, policies=2)
    policy_unembed = _summed_wide(unembed, hidden[:, :chunk])

    @jax.checkpoint
    def chunk_kl(hidden: Array, anchor: Array) -> tuple[Array, Array]:
        log_p = jax.nn.log_softmax(scaled(policy_unembed(hidden), temperature))
        log_q = jax.nn.log_softmax(scaled(anchor_unembed(anchor), temperature))
        p = jnp.exp(log_p)
        # Where p is 0 both may be -inf.
        ratio = jnp.where(p > 0, jax.lax.stop_gradient(log_p - log_q), 0)
        kl = (p * jnp.minimum(ratio, LIMIT)).sum(-1)
        return kl, jax.lax.stop_gradient(jnp.where(ratio > LIMIT, p, 0).sum(-1))

    anchor_hidden = jax.lax.stop_gradient(anchor_hidden)
    if chunk == hidden.shape[1]:
        return chunk_kl(hidden, anchor_hidden)
    return by_chunks(chunk_kl, chunk, hidden, anchor_hidden)


def likeliest(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "D N E"],
    *,
    count: int,
    ids: Int[Array, "D N k"] | None = None,
    shards: int = 1,
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
) -> Float[Array, "D N 2 K"]:
    """The likeliest tokens at each position, and the distribution shortened to them.

    Args:
      unembed: hidden [D, n, E] -> logits [D, n, V].
      count: of the tokens, below V; K = count + 1.
      ids: so many tokens to take instead, in this order.
      shards: devices that the vocabulary is divided over.
      temperature, logits_per_chunk: as in `shortened`.

    Returns: [..., 0, :], token ids, the likeliest first, and -1 for all others; [..., 1, :], their
    log-probs. One array: floats hold ids up to 2^24. No gradient.
    """
    chunk, _ = chunk_and_vocab(unembed, hidden, logits_per_chunk)

    def chunk_likeliest(hidden: Array, ids: Array | None = None) -> Array:
        z = scaled(unembed(hidden), temperature)
        top = highest(z, count, shards)[1] if ids is None else ids
        logp = _shortened(z, top)
        no_token = jnp.full((*top.shape[:-1], 1), -1, top.dtype)
        named = jnp.concatenate([top, no_token], -1).astype(logp.dtype)
        return jnp.stack([named, logp], -2)

    tokens = (hidden,) if ids is None else (hidden, ids)
    return by_chunks(chunk_likeliest, chunk, *jax.lax.stop_gradient(tokens))


def shortened(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "D N E"],
    ids: Int[Array, "D N k"],
    *,
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
) -> Float[Array, "D N K"]:
    """The distribution at each position shortened to some tokens, with its gradient.

        z = unembed(hidden) / temperature
        log p_j = z[ids_j] - logsumexp(z)
        log p_tail = logsumexp of z at all others - logsumexp(z)

    Chunked as `full_kl` is; the backward pass computes the logits again.

    Args:
      unembed: hidden [D, n, E] -> logits [D, n, V].
      ids: different tokens of a position, fewer than V.
      temperature: of the sampling distribution.
      logits_per_chunk: as in `jaxgrpo.models.logprobs.token_logprobs`.

    Returns: K = k + 1 log-probs in at least float32, in the order of ids, the tail last.
    """
    chunk, _ = chunk_and_vocab(unembed, hidden, logits_per_chunk)
    policy_unembed = _summed_wide(unembed, hidden[:, :chunk])

    @jax.checkpoint
    def chunk_shortened(hidden: Array, ids: Array) -> Array:
        return _shortened(scaled(policy_unembed(hidden), temperature), ids)

    return by_chunks(chunk_shortened, chunk, hidden, ids)


def _shortened(z: Array, ids: Array) -> Array:
    """As `shortened`, of softmax(z)."""
    # Summed by itself: 1 less the sum of the others is 0 where the tail is below 1e-7.
    tail = jax.nn.logsumexp(jnp.where(is_named(ids, z.shape[-1]), -jnp.inf, z), -1, keepdims=True)
    picked = jnp.concatenate([jnp.take_along_axis(z, ids, -1), tail], -1)
    return picked - jax.nn.logsumexp(z, -1, keepdims=True)


def _summed_wide(unembed: Callable[[Array], Array], chunk: Array) -> Callable[[Array], Array]:
    """`unembed`, with gradients of what it reads that chunks add up in at least float32.

    What it closes over becomes an argument, held wide: gradients are added in the dtype of what
    they belong to.
    """
    converted, read = jax.closure_convert(unembed, chunk)
    dtypes = [leaf.dtype for leaf in read]
    wide = [leaf.astype(accumulate_dtype(leaf.dtype)) for leaf in read]

    def unembed_wide(hidden: Array) -> Array:
        weights = [leaf.astype(dtype) for leaf, dtype in zip(wide, dtypes, strict=True)]
        return converted(hidden, *weights)

    return unembed_wide
