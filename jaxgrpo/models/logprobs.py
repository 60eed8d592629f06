"""Log-probabilities and entropies, chunk by chunk: no [B, T, V] array is ever whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.core.metrics import accumulate_dtype
from jaxgrpo.models.products import custom_vjp
from jaxgrpo.models.sharding import highest

LOGITS_PER_CHUNK = 2**20
TOKENS_PER_CHUNK = 256
"""Tokens of one bin held at a time: LOGITS_PER_CHUNK / V, at least TOKENS_PER_CHUNK.

Measured on a 2-core CPU (benchmarks/logprobs.py). Small vocabularies like chunks that stay in the
cache. Of large ones every chunk reads the head and adds to its gradient: below 128 tokens that
traffic is more than the products. A run on a GPU or TPU takes more (`training.memory`).
"""

LIKELIEST = 20
"""Tokens at a position, of whose log-probs a confidence is the mean."""

Entropy = Literal["none", "value", "gradient"]
"""Whether the entropy is computed, and whether it carries gradient."""


class Head(NamedTuple):
    """An output head whose weights are trained, perhaps in more bits, and over several devices."""

    weights: Any  # as they are held: a tree of arrays
    unembed: Callable[[Any, Array], Array]  # (weights as they are read, hidden) -> logits
    as_read: Callable[[Any], Any] = lambda weights: weights
    """weights as held -> as read: narrower, gathered. Once in each direction, before the chunks"""
    as_held: Callable[[Any], Any] = lambda sums: jax.tree.map(lambda leaf: leaf.sum(0), sums)
    """adds up the gradients [D, ...] of all bins, laid out as the weights are held; once"""


def token_logprobs(
    unembed: Callable[[Array], Array] | Head,
    hidden: Float[Array, "D N E"],
    targets: Int[Array, "D N"],
    *,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    logits_per_chunk: int | None = None,
    count: Int[Array, "D"] | None = None,
    support: Int[Array, "D N K"] | None = None,
) -> tuple[Float[Array, "D N"], Float[Array, "D N"] | None]:
    """Log-probability of each target, and the entropy of the model's distribution there.

        z = unembed(hidden) / temperature
        logp = z[target] - logsumexp(z)
        entropy = logsumexp(z) - sum_v softmax(z)_v z_v

    Tokens are taken in chunks along N; D, the sharded dimension, stays whole, and the vocabulary
    stays sharded as `unembed` gives it. Of a chunk's logits nothing is kept but logsumexp and
    entropy; the backward pass computes them again, and with p = softmax(z), for cotangents a of
    logp and b of the entropy,

        d loss / d z = a (onehot(target) - p) - b p (log p + entropy)

    Gradients of what `unembed` reads are summed over chunks in at least float32, for each bin, and
    then over bins: devices add them up once, not once a chunk. Only reverse mode, once.

    Args:
      unembed: hidden [D, n, E] -> logits [D, n, V]. Arrays it closes over get their gradients; any
        differentiable function will do. Or a `Head`.
      temperature: of the sampling distribution, so that ratios compare like with like.
      entropy: "none" costs nothing and gives None; "value" carries no gradient.
      logits_per_chunk: upper bound on n * V of one chunk and bin; None: see `TOKENS_PER_CHUNK`.
      count: tokens of each bin that are asked for, the first ones; chunks without any are not
        computed, and their values are 0. None: all.
      support: ids of the tokens S that each target was drawn among, -1 behind the last; then
        logp = z[target] - logsumexp(z[S]), with softmax(z[S]), 0 outside S, for p in its gradient.
        The entropy is that of all tokens anyway. -1 alone, or None: drawn among all.

    Returns: (logp, entropy) in at least float32, in nats.
    """
    head = unembed if isinstance(unembed, Head) else _make_head(unembed, hidden, logits_per_chunk)
    logits = functools.partial(head.unembed, head.as_read(head.weights))
    chunk, _ = chunk_and_vocab(logits, hidden, logits_per_chunk)
    settings = _Settings(head._replace(weights=None), temperature, entropy, chunk)
    chunks = _chunks_to_compute(hidden, count, chunk)
    return _token_logprobs(settings, head.weights, hidden, (targets, support), chunks)


def _make_head(
    unembed: Callable[[Array], Array], hidden: Array, logits_per_chunk: int | None
) -> Head:
    """What unembed closes over becomes an argument, so that a gradient can be returned for it."""
    chunk, _ = chunk_and_vocab(unembed, hidden, logits_per_chunk)
    converted, read = jax.closure_convert(unembed, hidden[:1, :chunk])
    return Head(tuple(read), lambda read, hidden: converted(hidden, *read))


Cost = Callable[[Array, Array | None, Any, Any], Array]
"""(logp, entropy, args of each token, what all tokens share) -> cost of each token, [D, n]"""


def loss_of_tokens(
    head: Head,
    hidden: Float[Array, "D N E"],
    targets: Int[Array, "D N"],
    cost: Cost,
    args: Any,
    shared: Any,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    logits_per_chunk: int | None = None,
    count: Int[Array, "D"] | None = None,
    sums: Any = None,
    support: Int[Array, "D N K"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, "D N"], Float[Array, "D N"] | None, Any]:
    """The sum of a cost of each token, and what it is made of, in one pass over the logits.

        loss = sum_t cost(logp_t, entropy_t, args_t, shared)

    Values and gradients of `token_logprobs` and a sum over them, if a token's cost depends on its
    own log-prob and entropy only. The derivative of the cost is then known as soon as the logits
    are, so that three products with the head's weights are computed instead of four, and their
    gradients are kept for the backward pass.

    Args:
      cost: 0 at tokens that do not count. Its entropy carries gradient for "gradient" only.
      args: a tree of [D, N, ...]; no gradient, as for `shared`.
      sums: None, or a tree as the weights, each leaf [D, ...] in at least float32, to which a pass
        that is differentiated adds the gradient of each bin, for a cotangent of 1 of the loss. Then
        the weights get none: over several calls bins are added up once, by `Head.as_held`.
      support: as in `token_logprobs`.

    Returns: (loss, logp, entropy, sums); only the loss carries gradient, to hidden and weights.
    """
    logits = functools.partial(head.unembed, head.as_read(head.weights))
    chunk, _ = chunk_and_vocab(logits, hidden, logits_per_chunk)
    settings = _Settings(head._replace(weights=None), temperature, entropy, chunk, cost)
    chunks = _chunks_to_compute(hidden, count, chunk)
    drawn = targets, support
    return _loss_of_tokens(settings, head.weights, hidden, (drawn, args, shared, chunks, sums))


def token_confidence(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "D N E"],
    *,
    k: int = LIKELIEST,
    has_text: np.ndarray | None = None,
    shards: int = 1,
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
) -> Float[Array, "D N"]:
    """How peaked the distribution of the next token is at each position.

        p = softmax(unembed(hidden) / temperature)
        C = -(1 / k) sum of log p_v over the k likeliest v

    High is peaked: all but the first of the k are then unlikely. It is log k at least, where
    k tokens share all probability. The token that was drawn plays no part. Chunked as
    `token_logprobs` is; no gradient.

    Args:
      unembed: hidden [D, n, E] -> logits [D, n, V].
      k: more than V: V, and C = log V + KL(uniform || p).
      has_text: bool [V], the tokens that can be drawn, which alone count: V is their number. None:
        all can.
      shards: devices that the vocabulary is divided over.
      temperature: of the sampling distribution.
      logits_per_chunk: as in `token_logprobs`.

    Returns: C in at least float32, in nats; inf if fewer than k tokens have any probability.
    Source: Fu et al. 2025 (DeepConf), arXiv 2508.15260: k = 20. There the log-probs are what the
      inference engine reports, of the model before temperature by default in vLLM.
    """
    chunk, _ = chunk_and_vocab(unembed, hidden, logits_per_chunk)

    def chunk_confidence(hidden: Array) -> Array:
        return confidence_from_logits(
            scaled(unembed(jax.lax.stop_gradient(hidden)), temperature), k, has_text, shards
        )

    return jax.lax.stop_gradient(by_chunks(chunk_confidence, chunk, hidden))


def confidence_from_logits(
    logits: Float[Array, "*B V"], k: int, has_text: np.ndarray | None = None, shards: int = 1
) -> Float[Array, "*B"]:
    """`token_confidence` of softmax(logits)."""
    number = logits.shape[-1] if has_text is None else int(has_text.sum())
    if k < number:
        mean = highest(logits, k, shards)[0].mean(-1)
    elif has_text is None:
        mean = logits.mean(-1)
    else:  # the others have logits so low that no digit of these would be left beside them
        mean = jnp.where(jnp.broadcast_to(has_text, logits.shape), logits, 0).sum(-1) / number
    return jax.nn.logsumexp(logits, axis=-1) - mean


def token_rank(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "D N E"],
    targets: Int[Array, "D N"],
    *,
    logits_per_chunk: int | None = None,
) -> Float[Array, "D N"]:
    """How many tokens of the vocabulary are likelier than each target: 0 where greedy decoding
    would take it. Of equally likely tokens those of lower ids come first.

    Whole numbers. V where the target's logit is NaN. Chunked as `token_logprobs` is; no gradient.
    """
    chunk, vocab = chunk_and_vocab(unembed, hidden, logits_per_chunk)

    def chunk_rank(hidden: Array, targets: Array) -> Array:
        z = scaled(unembed(hidden), 1.0)
        target_z = jnp.where(_is_target(z, targets), z, 0).sum(-1, keepdims=True)
        ids = jax.lax.broadcasted_iota(targets.dtype, z.shape, z.ndim - 1)
        is_behind = (z < target_z) | ((z == target_z) & (ids >= targets[..., None]))
        return vocab - is_behind.sum(-1, dtype=jnp.float32)

    return by_chunks(chunk_rank, chunk, jax.lax.stop_gradient(hidden), targets)


class _Settings(NamedTuple):
    """What is static in a pass."""

    head: Head  # without weights
    temperature: float
    entropy: Entropy
    chunk: int  # tokens of one bin
    cost: Cost | None = None


_Drawn = tuple[Array, Array | None]
"""(targets [D, N], support [D, N, K]): what each token was drawn as, and among which ids"""


class _Totals(NamedTuple):
    """logsumexp of the logits [D, N]: of all tokens, and of the support, if there is one."""

    vocabulary: Array
    support: Array | None


@custom_vjp(0)
def _token_logprobs(settings: _Settings, weights: Any, hidden: Array, drawn: _Drawn, chunks: Array):
    return _forward(settings, weights, hidden, drawn, chunks)[0]


def _forward(settings: _Settings, weights: Any, hidden: Array, drawn: _Drawn, chunks: Array):
    logp, totals, entropy = _values(settings, weights, hidden, drawn, chunks)
    return (logp, entropy), (weights, hidden, drawn, chunks, totals, entropy)


def _backward(settings: _Settings, saved: Any, cotangents: tuple[Array, Array | None]):
    weights, hidden, drawn, count, totals, entropy = saved
    a, b = cotangents
    b = b if settings.entropy == "gradient" else None
    chunks = _split(settings.chunk, (hidden, drawn, totals, entropy, a, b))
    read = settings.head.as_read(weights)

    def bin_gradients(hidden: Array, *token_values: Any) -> Any:
        logits, pull = jax.vjp(settings.head.unembed, read, hidden[None])
        token_values = jax.tree.map(lambda leaf: leaf[None], token_values)
        d_logits = _logits_gradient(settings, logits, *token_values).astype(logits.dtype)
        d_read, d_hidden = pull(d_logits)
        return d_read, d_hidden[0]

    def add_chunk(index: Array, carry: Any):
        sums, d_chunks = carry
        d_read, d_hidden = jax.vmap(bin_gradients)(*_chunk_at(chunks, index))
        sums = jax.tree.map(lambda leaf, part: leaf + part.astype(leaf.dtype), sums, d_read)
        return sums, d_chunks.at[index].set(d_hidden)

    def zeros(leaf: Array) -> Array:
        return jnp.zeros((len(hidden), *leaf.shape), accumulate_dtype(leaf.dtype))

    start = (jax.tree.map(zeros, read), jnp.zeros_like(chunks[0]))
    sums, d_hidden = jax.lax.fori_loop(0, count, add_chunk, start)
    return _over_bins(settings, sums, weights), _join(d_hidden, hidden.shape[1]), None, None


_token_logprobs.defvjp(_forward, _backward)


@custom_vjp(0)
def _loss_of_tokens(settings: _Settings, weights: Any, hidden: Array, inputs: Any):
    drawn, args, shared, count, sums = inputs
    logp, _, entropy = _values(settings, weights, hidden, drawn, count)
    assert settings.cost is not None
    return settings.cost(logp, entropy, args, shared).sum(), logp, entropy, sums


def _loss_forward(settings: _Settings, weights: Any, hidden: Array, inputs: Any):
    drawn, args, shared, count, earlier_sums = inputs
    chunks = _split(settings.chunk, (hidden, drawn, args))
    read = settings.head.as_read(weights)

    def bin_loss(hidden: Array, drawn: _Drawn, args: Any) -> Any:
        drawn, args = jax.tree.map(lambda leaf: leaf[None], (drawn, args))
        logits, pull = jax.vjp(settings.head.unembed, read, hidden[None])
        logp, totals, entropy = _values_from_logits(settings, logits, drawn)

        def cost(logp: Array, differentiated: Array | None) -> Array:
            cost_entropy = entropy if differentiated is None else differentiated
            assert settings.cost is not None
            return settings.cost(logp, cost_entropy, args, shared).sum()

        differentiable = entropy if settings.entropy == "gradient" else None
        loss, (a, b) = jax.value_and_grad(cost, argnums=(0, 1))(logp, differentiable)
        d_logits = _logits_gradient(settings, logits, drawn, totals, entropy, a, b)
        d_read, d_hidden = pull(d_logits.astype(logits.dtype))
        return d_read, (d_hidden[0], logp[0], None if entropy is None else entropy[0]), loss

    def add_chunk(index: Array, carry: Any) -> Any:
        sums, values, losses = carry
        d_read, parts, loss = jax.vmap(bin_loss)(*_chunk_at(chunks, index))
        sums = jax.tree.map(lambda leaf, part: leaf + part.astype(leaf.dtype), sums, d_read)
        values = jax.tree.map(lambda leaf, part: leaf.at[index].set(part), values, parts)
        return sums, values, losses + loss

    no_sums, *zeros = _empty(lambda: jax.vmap(bin_loss)(*_chunk_at(chunks, 0)), len(chunks[0]))
    start = (no_sums if earlier_sums is None else earlier_sums, *zeros)
    sums, values, losses = jax.lax.fori_loop(0, count, add_chunk, start)
    d_hidden, logp, entropy = _join(values, hidden.shape[1])
    if earlier_sums is None:
        return (losses.sum(), logp, entropy, None), (_over_bins(settings, sums, weights), d_hidden)
    return (losses.sum(), logp, entropy, sums), (None, d_hidden)


def _loss_backward(settings: _Settings, saved: Any, cotangents: Any):
    del settings
    slope, *_ = cotangents
    d_weights, d_hidden = jax.tree.map(lambda leaf: (leaf * slope).astype(leaf.dtype), saved)
    return d_weights, d_hidden, None


_loss_of_tokens.defvjp(_loss_forward, _loss_backward)


def _empty(function: Callable[[], Any], chunks: int) -> Any:
    """Zeros for (sums over chunks, values of each chunk, sums over chunks) of what it returns."""
    d_read, parts, loss = jax.eval_shape(function)
    zeros = lambda leaf: jnp.zeros(leaf.shape, accumulate_dtype(leaf.dtype))  # noqa: E731
    chunk_values = jax.tree.map(lambda leaf: jnp.zeros((chunks, *leaf.shape), leaf.dtype), parts)
    return jax.tree.map(zeros, d_read), chunk_values, zeros(loss)


def _values(settings: _Settings, weights: Any, hidden: Array, drawn: _Drawn, count: Array):
    """(logp, logsumexps, entropy or None) [D, N], of the first `count` chunks; 0 in the others."""
    read = settings.head.as_read(weights)

    def logits(hidden: Array) -> Array:
        return settings.head.unembed(read, hidden[None])[0]

    def chunk_values(hidden: Array, drawn: _Drawn):
        return _values_from_logits(settings, jax.vmap(logits)(hidden), drawn)

    chunks = _split(settings.chunk, (hidden, drawn))

    def write(index: Array, arrays: Any) -> Any:
        values = chunk_values(*_chunk_at(chunks, index))
        return jax.tree.map(lambda leaf, part: leaf.at[index].set(part), arrays, values)

    shapes = jax.eval_shape(lambda: chunk_values(*_chunk_at(chunks, 0)))
    start = jax.tree.map(lambda leaf: jnp.zeros((len(chunks[0]), *leaf.shape), leaf.dtype), shapes)
    return _join(jax.lax.fori_loop(0, count, write, start), hidden.shape[1])


def _values_from_logits(settings: _Settings, logits: Array, drawn: _Drawn):
    """(logp, logsumexps, entropy or None) [D, n] of one chunk."""
    (targets, support), z = drawn, scaled(logits, settings.temperature)
    highest = z.max(-1)
    shifted = z - highest[..., None]
    weight = jnp.exp(shifted)
    mass = weight.sum(-1)
    log_mass = jnp.log(mass)
    total = highest + log_mass
    target_z = jnp.where(_is_target(z, targets), z, 0).sum(-1)
    entropy = None
    if settings.entropy != "none":
        # As a product: of a sum, XLA computes the exponentials again, one by one on a CPU.
        expected = jnp.einsum("dnv,dnv->dn", weight, shifted, precision="highest")
        entropy = log_mass - expected / mass
    if support is None:
        return target_z - total, _Totals(total, None), entropy
    # Padding names token 0, which may have no probability.
    support_total = jax.nn.logsumexp(_among(support, z), -1)
    support_total = jnp.maximum(support_total, jnp.finfo(z.dtype).min)
    return target_z - support_total, _Totals(total, support_total), entropy


def _logits_gradient(settings, logits, drawn: _Drawn, totals: _Totals, entropy, a, b) -> Array:
    """d loss / d logits of one chunk, from the cotangents a of logp and b of the entropy."""
    (targets, support), z = drawn, scaled(logits, settings.temperature)
    log_p, by_logp = z - totals.vocabulary[..., None], a[..., None]
    slope = by_logp if support is None else jnp.zeros_like(by_logp)
    if b is not None:
        slope = slope + b[..., None] * (log_p + entropy[..., None])
    gradient = jnp.where(_is_target(z, targets), by_logp, 0) - jnp.exp(log_p) * slope
    if support is not None and totals.support is not None:
        gradient -= by_logp * jnp.exp(_among(support, z) - totals.support[..., None])
    return gradient / settings.temperature


def is_named(ids: Int[Array, "*B K"], vocab: int) -> Bool[Array, "*B V"]:
    """Which tokens are among some ids, -1 behind the last; where there is none, all are."""
    is_empty, ids = ids[..., :1] < 0, jnp.where(ids < 0, ids[..., :1], ids)
    nowhere = jnp.zeros((*ids.shape[:-1], vocab), bool)
    return is_empty | jnp.put_along_axis(nowhere, ids, True, -1, inplace=False)


def _among(ids: Array, z: Array) -> Array:
    return jnp.where(is_named(ids, z.shape[-1]), z, -jnp.inf)


def _is_target(z: Array, targets: Array) -> Array:
    # A comparison stays on the shard that holds the token; a gather would collect the logits.
    return jax.lax.broadcasted_iota(targets.dtype, z.shape, z.ndim - 1) == targets[..., None]


def scaled(logits: Array, temperature: float) -> Array:
    """logits / temperature in at least float32."""
    return logits.astype(accumulate_dtype(logits.dtype)) / temperature


def chunk_and_vocab(
    unembed: Callable[[Array], Array],
    hidden: Array,
    logits_per_chunk: int | None,
    policies: int = 1,
) -> tuple[int, int]:
    """How many tokens of a bin are held at a time, and the size V of the vocabulary."""
    vocab = jax.eval_shape(unembed, hidden[:, :1]).shape[-1]
    return chunk_tokens(policies * vocab, hidden.shape[1], logits_per_chunk), vocab


def chunk_tokens(vocab: int, tokens: int, logits_per_chunk: int | None = None) -> int:
    """How many of a bin's tokens are held at a time; `logits_per_chunk` as in `token_logprobs`."""
    if logits_per_chunk is None:
        return min(max(TOKENS_PER_CHUNK, LOGITS_PER_CHUNK // vocab), tokens)
    return min(max(1, logits_per_chunk // vocab), tokens)


def _chunks_to_compute(hidden: Array, count: Array | None, chunk: int) -> Array:
    """As many as the fullest bin needs."""
    most = hidden.shape[1] if count is None else count.max()
    return jnp.asarray(-(-most // chunk), jnp.int32)


def _over_bins(settings: _Settings, sums: Any, weights: Any) -> Any:
    """The gradient of the weights as they are held, from sums [D, ...] of each bin."""
    gradient = settings.head.as_held(sums)
    return jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), gradient, weights)


def by_chunks(function: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """`function` of arrays [D, N, ...], over `chunk` positions of N at a time."""

    _, pieces = jax.lax.scan(lambda _, xs: (None, function(*xs)), None, _split(chunk, arrays))
    return _join(pieces, arrays[0].shape[1])


def _split(chunk: int, tree: Any) -> Any:
    """Leaves [D, N, ...] as [chunks, D, chunk, ...], the last one filled up with zeros."""

    def split_leaf(leaf: Array) -> Array:
        bins, length, *trailing = leaf.shape
        count = -(-length // chunk)
        padding = [(0, 0), (0, count * chunk - length), *[(0, 0)] * len(trailing)]
        return jnp.moveaxis(jnp.pad(leaf, padding).reshape(bins, count, chunk, *trailing), 1, 0)

    return jax.tree.map(split_leaf, tree)


def _chunk_at(chunks: Any, index: Array | int) -> Any:
    """One chunk of what `_split` made."""
    take = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(take, chunks)


def _join(tree: Any, length: int) -> Any:
    """The inverse of `_split`."""

    def join_leaf(leaf: Array) -> Array:
        count, bins, chunk, *trailing = leaf.shape
        return jnp.moveaxis(leaf, 0, 1).reshape(bins, count * chunk, *trailing)[:, :length]

    return jax.tree.map(join_leaf, tree)
