"""Sketches of each sample's gradient, from which the updates of many methods follow.

Methods that weigh samples differently move the parameters by different sums of the same gradients.
A gradient is as large as the model; a sketch keeps SIZE random sums of its entries, from which
inner products of gradients are estimated without bias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgrpo.core.types import GENERATOR, Learner, Params, Rollouts, TrainBatch
from jaxgrpo.models import sharding
from jaxgrpo.update import packing
from jaxgrpo.update.flat import fullest
from jaxgrpo.update.forward import (
    Pass,
    forward,
    full_params,
    micro_batch,
    read_by_update,
)

SIZE = 8191
"""Numbers of a sketch, a prime: no period of an array's rows deals its columns to a few of them.

An estimated cosine has a standard deviation of at most about sqrt(2 / SIZE) = .016.
"""

SEED = 0
"""Of the signs: only sketches with the same signs can be compared."""

Sketch = Callable[[Learner, Rollouts, np.ndarray], np.ndarray]
"""(learner, rollouts, weights of tokens [P, G, T]) -> [P, G, SIZE], the sketch of each sample's
sum over t of weight_t grad log p_t: 0 where no token weighs anything"""


def make_sketch(settings: Pass) -> Sketch:
    """The function that sketches the gradients of samples, by one pass over each of them.

        sketch(g)_k = sum over arrays w, and entries i with order_w(k) = i mod SIZE, of sign_i g_i

    over all parameters that are trained. Signs and orders are random and fixed; over the signs
    E <sketch(a), sketch(b)> = <a, b>. In a micro-batch each part of the axis "data" computes one
    sample, and holds its whole gradient, as an update does.

    Args:
      settings: of passes over micro-batches of one sample per part.

    Source: the count sketch of Charikar, Chen and Farach-Colton 2002, with entries dealt in turn.
    """
    mesh = settings.mesh
    program = jax.jit(functools.partial(_sketch_batch, settings))
    gather = jax.jit(functools.partial(packing.gather, constrain=sharding.constrain(mesh)))

    def sketch(learner: Learner, rollouts: Rollouts, weights: np.ndarray) -> np.ndarray:
        live = (weights != 0).any(-1)
        plan = plan_apart(live, mesh.shape["data"], mesh.shape["fsdp"])
        zero, weight = jnp.float32(0), jnp.asarray(weights, jnp.float32)
        batch = gather(rollouts, plan, zero, weight, rollouts.token_mask, {})
        frozen = read_by_update(learner, ())
        by_place = sharding.to_host(program(learner.trainable, frozen, batch))
        sketches = np.zeros((*live.shape, SIZE), np.float32)
        sketches[live] = by_place.reshape(-1, SIZE)[: live.sum()]
        return sketches

    return sketch


def plan_apart(live: np.ndarray, parts: int, bins_per_part: int) -> packing.Plan:
    """A plan of micro-batches of `parts` samples, each in the first bin of its part: the live ones
    [P, G] in order."""
    places = -(-live.size // parts), parts, bins_per_part
    order = np.arange(live.sum())
    row = np.full(live.shape, -1, np.int32)
    row[live] = order * bins_per_part
    prompt = np.full((places[0] * parts, bins_per_part), -1, np.int32)
    prompt[order, 0] = np.nonzero(live)[0]
    return packing.Plan(
        row=row,
        start=np.zeros_like(row),
        segment=np.ones_like(row),
        prompt=prompt.reshape(places[0], -1, 1),
        row_prompt=np.zeros((places[0], parts * bins_per_part, 1), np.int32),
        num_live=np.asarray(-(-len(order) // parts), np.int32),
    )


def _sketch_batch(settings: Pass, trainable: Params, frozen: Any, batch: TrainBatch) -> Array:
    """[K, parts, SIZE]: the sketches of the samples of each micro-batch, by part."""
    parts, dealt = settings.mesh.shape["data"], deals(trainable)

    def weighted_logp(trainable: Params, micro: TrainBatch, fullest: Array) -> Array:
        params = full_params(trainable, frozen)
        logp, _ = forward(settings, params, micro, fullest=fullest)
        return jnp.where(micro.mask, micro.weight * logp, 0).sum()

    gradient = jax.grad(weighted_logp)
    if parts > 1:
        gradient = sharding.over_data(settings.mesh, gradient)

    def body(index: Array, sketches: Array) -> Array:
        micro = micro_batch(batch, index)
        gradients = gradient(trainable, micro, fullest(micro))
        return sketches.at[index].set(fold(dealt, gradients, parts))

    start = jnp.zeros((batch.tokens.shape[0], parts, SIZE), jnp.float32)
    return jax.lax.fori_loop(0, batch.num_live, body, start)


class Deal(NamedTuple):
    """How the entries of an array are dealt to the numbers of a sketch."""

    signs: Array  # int8, of each entry
    order: Array  # [SIZE] int32, the number that takes the entries with i mod SIZE = k


def deals(params: Params) -> list[Deal]:
    """Random ones, of each array in the order of the tree."""
    keys = jax.random.split(jax.random.key(SEED, impl=GENERATOR), (len(jax.tree.leaves(params)), 2))
    return [
        Deal(
            signs=jax.random.rademacher(sign_key, (leaf.size,), jnp.int8),
            order=jax.random.permutation(order_key, SIZE),
        )
        for leaf, (sign_key, order_key) in zip(jax.tree.leaves(params), keys, strict=True)
    ]


def fold(deal: Sequence[Deal], gradients: Params, parts: int) -> Array:
    """[parts, SIZE]: the sketches of gradients, leaves [parts, ...], or [...] of a single part."""
    sketches = jnp.zeros((parts, SIZE), jnp.float32)
    for (signs, order), gradient in zip(deal, jax.tree.leaves(gradients), strict=True):
        signed = gradient.reshape(parts, -1).astype(jnp.float32) * signs
        missing = -signed.shape[1] % SIZE
        padded = jnp.pad(signed, ((0, 0), (0, missing)))
        sketches += padded.reshape(parts, -1, SIZE).sum(1)[:, order]
    return sketches
