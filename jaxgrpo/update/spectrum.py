"""The effective rank of a sample's hidden states, on the way along its tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import xlogy
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int

from jaxgrpo.models import sharding


def effective_rank(states: Float[Array, "*B n E"], mask: Bool[Array, "*B n"]) -> Float[Array, "*B"]:
    """How many directions the states spread over, 1 to the smaller of their number and E.

        s = singular values of the states less their mean;   p = s / sum s
        rank = exp(-sum_j p_j log p_j)

    Args:
      mask: the states that count. Of one, or of equal ones, the rank is 1.

    Source: Roy and Vetterli 2007 (the effective rank); VERL, arXiv 2509.23808 (of centred hidden
      states of a response), which takes s from the eigenvalues of a Gram matrix: in float32 its
      rounding alone adds some 3e-4 of the largest s to each.
    """
    counted = mask[..., None]
    count = jnp.maximum(counted.sum(-2, keepdims=True), 1)
    wide = jnp.where(counted, states.astype(jnp.promote_types(states.dtype, jnp.float32)), 0)
    centred = jnp.where(counted, wide - wide.sum(-2, keepdims=True) / count, 0)
    values = _singular_values(centred)
    total = values.sum(-1, keepdims=True)
    share = jnp.where(total > 0, values / jnp.where(total > 0, total, 1), 0)
    return jnp.exp(-xlogy(share, share).sum(-1))


def _singular_values(matrices: Array) -> Array:
    """Of matrices [..., n, E], [..., min(n, E)], one after the other.

    A batch of them divides itself over the threads that the devices of a CPU run on, and waits for
    these: with as many devices as threads for ever (jaxlib 0.10).
    """
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    values = jax.lax.map(functools.partial(jnp.linalg.svd, compute_uv=False), flat)
    return values.reshape(*matrices.shape[:-2], -1)


def ranks_along(
    mesh: Mesh, hidden: Float[Array, "D R Q E"], segment: Int[Array, "D R Q"], stride: int
) -> Float[Array, "D R Q"]:
    """The effective rank of the states of a sample up to each `stride`-th of its tokens and up to
    its last one; 0 at the others.

    A state is that from which its token was drawn. One decomposition at a time for each row: a row
    of many samples takes as many as they have such tokens. Each device computes its own bins, as
    often as these need, and waits for no other.

    Args:
      segment: 0 = padding, the samples of a row counted from 1, side by side.
    """
    bins = PartitionSpec(sharding.TRAINING["bins"])
    ranks = functools.partial(_ranks, stride=stride)
    return jax.shard_map(ranks, mesh=mesh, in_specs=(bins, bins), out_specs=bins)(hidden, segment)


def _ranks(hidden: Array, segment: Array, stride: int) -> Array:
    """`ranks_along` of the bins of one device."""
    places = jnp.arange(segment.shape[-1], dtype=jnp.int32)
    begins = (segment != jnp.roll(segment, 1, -1)).at[..., 0].set(True)
    start = jax.lax.cummax(jnp.where(begins, places, 0), axis=2)
    ends = (segment != jnp.roll(segment, -1, -1)).at[..., -1].set(True)
    is_point = (segment > 0) & (ends | ((places - start + 1) % stride == 0))

    def next_point(last: Array) -> Array:
        ahead = is_point & (places > last[..., None])
        return jnp.where(ahead.any(-1), jnp.argmax(ahead, -1), segment.shape[-1])

    def measure(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        ranks, point = carry
        own_start = jnp.take_along_axis(start, jnp.minimum(point, places[-1])[..., None], axis=2)
        within = (places >= own_start) & (places <= point[..., None])
        at_point = places == point[..., None]
        ranks = jnp.where(at_point, effective_rank(hidden, within)[..., None], ranks)
        return ranks, next_point(point)

    # Of the arguments, not constants: as what a loop of one device changes they vary with it.
    nowhere = jnp.zeros_like(segment)
    zeros = nowhere.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    start_of_loop = zeros, next_point(nowhere[..., 0] - 1)
    last = segment.shape[-1]
    return jax.lax.while_loop(lambda carry: (carry[1] < last).any(), measure, start_of_loop)[0]
