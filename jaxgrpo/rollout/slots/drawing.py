"""One token per slot: temperature, truncation of the distribution, and the draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.records import NONE
from jaxgrpo.models.logprobs import is_named
from jaxgrpo.models.sharding import highest


class Distribution(NamedTuple):
    """What the distribution of the next token is made of, in this order, beside the logits."""

    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # keep the top_k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the fewest likeliest tokens of this probability
    min_p: float = 0.0  # keep tokens of at least this share of the likeliest one's probability


def draw(
    keys: Array, logits: Array, distribution: Distribution, shards: int = 1
) -> tuple[Array, Array]:
    """One token per row, and its log-probability under the distribution drawn from.

    Two-level Gumbel-max: first a block of the vocabulary by its log-sum-exp, then a token within
    it. Exact, with sqrt(V)-many random numbers per token instead of V; unlike an inverse CDF it
    does not flip under rounding noise unless two perturbed scores tie.

    Args:
      shards: of the vocabulary, over devices. Blocks without tokens are added until they divide
        them: without, every device would compute the logits of all. They are never drawn.

    Shapes: keys [*B], logits [*B, V] -> token, logp [*B]. The log-probability of temperature 0 is
    the model's own, at temperature 1.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if distribution.temperature == 0:
        token = logits.argmax(-1)
        return token, softmax_logp(logits, token)
    logits = truncate(logits / distribution.temperature, *distribution[1:])
    *rows, vocab = logits.shape
    width = block_width(vocab)
    blocks = -(-vocab // width)
    divided = -(-blocks // shards) * shards
    if divided * width > vocab:
        padding = [(0, 0)] * len(rows) + [(0, divided * width - vocab)]
        logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    blocked = logits.reshape(*rows, divided, width)
    weight = jax.nn.logsumexp(blocked, axis=-1)  # [*B, divided]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + width,), weight.dtype))
    gumbel = noise(keys.reshape(-1)).reshape(*rows, -1)
    block_gumbel = jnp.pad(gumbel[..., :blocks], [(0, 0)] * len(rows) + [(0, divided - blocks)])
    block = (weight + block_gumbel).argmax(-1)
    block_logits = jnp.take_along_axis(blocked, block[..., None, None], axis=-2)[..., 0, :]
    token = (block_logits + gumbel[..., blocks:]).argmax(-1)
    logp = _pick(block_logits, token) - jax.nn.logsumexp(weight, axis=-1)
    return block * width + token, logp


def block_width(vocab: int) -> int:
    """Tokens of a block: a power of two near sqrt(vocab), if possible one that divides it.

    Where none down to an eighth of the root does, the last block is filled up, which copies the
    logits.

    >>> block_width(512), block_width(151_936), 151_936 / 128
    (16, 128, 1187.0)
    """
    width = 1 << max(1, (vocab - 1).bit_length() // 2)
    dividing = math.gcd(width, vocab)
    return dividing if dividing >= max(2, width // 8) else width


def softmax_logp(logits: Array, token: Array) -> Array:
    """Log-probability of a token [*B] under softmax(logits [*B, V])."""
    return _pick(logits, token) - jax.nn.logsumexp(logits, axis=-1)


def truncate(logits: Array, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """Logits with -inf outside the `top_k` likeliest tokens, then outside the nucleus of the rest,
    then below `min_p` times the probability of the likeliest.

    The nucleus is the smallest set of likeliest tokens whose probability, renormalised over what
    `top_k` left, is at least `top_p`. Tokens as likely as the last of a set are in it too, so that
    nothing depends on the order of the vocabulary.

    The first two thresholds are found exactly, by bisection on the bits of the logits: 32 sums over
    the vocabulary, and no sort, which would collect a sharded one.

    Args:
      top_k: 0, or as many as there are tokens: no limit.
      top_p: in (0, 1]; 1: no limit.
      min_p: in [0, 1]; 0: no limit.

    Shapes: logits [..., V] float32 -> the same.
    Source: top-p: Holtzman et al. 2020, arXiv 1904.09751; min-p: Nguyen et al. 2024, arXiv
      2407.01082. The order is that of transformers' generate.
    """
    if 0 < top_k < logits.shape[-1]:
        logits = _likeliest(logits, lambda mask: mask.sum(-1, dtype=jnp.int32) >= top_k)
    if top_p < 1:
        probability = jax.nn.softmax(logits, axis=-1)
        logits = _likeliest(logits, lambda mask: jnp.where(mask, probability, 0).sum(-1) >= top_p)
    if min_p > 0:
        lowest = logits.max(-1, keepdims=True) + math.log(min_p)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    return logits


def named_support(
    logits: Array, distribution: Distribution, most: int, shards: int = 1
) -> tuple[Array, Array]:
    """A distribution whose tokens are named: cut, and then without those beyond the `most`
    likeliest. Of equally likely ones at that limit those of lower ids stay.

    Args:
      distribution: of a temperature above 0.
      most: at most as many as there are tokens.
      shards: as in `draw`.

    Returns: its logits [*B, V], which `draw` takes at temperature 1, and the ids [*B, most] of what
    is left, the likeliest first, -1 behind the last.
    Source: the "Keep Sampling Mask" of DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logits = truncate(logits / distribution.temperature, *distribution[1:])
    values, ids = highest(logits, most, shards)
    ids = jnp.where(values > -jnp.inf, ids, NONE)
    return jnp.where(is_named(ids, logits.shape[-1]), logits, -jnp.inf), ids


def _likeliest(logits: Array, is_enough: Callable[[Array], Array]) -> Array:
    """Logits at and above the highest threshold at which what is kept is enough; -inf elsewhere."""
    size = 8 * logits.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(logits, jnp.dtype(f"int{size}"))
    # Of negative floats the larger has the smaller bits; so ordered, integers compare as floats do.
    order = jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at low; not enough above high
        middle = (low | high) - ((low ^ high) >> 1)  # the mean rounded up, without overflow
        enough = is_enough(order >= middle[..., None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, size, halve, (order.min(-1), order.max(-1)))
    return jnp.where(order >= low[..., None], logits, -jnp.inf)


def _pick(values: Array, token: Array) -> Array:
    return jnp.take_along_axis(values, token[..., None], axis=-1)[..., 0]
