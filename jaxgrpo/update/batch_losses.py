"""The loss of a batch of samples that lie unpacked, [P, G, T], as updates compute it packed.

For what is asked of methods and not of models: their exact expected updates (`jaxgrpo check`), and
how alike the updates of several are (the atlas).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.scores import TOKEN_DRAW
from jaxgrpo.core.types import GENERATOR, Rollouts
from jaxgrpo.losses import Objective, Tokens, token_loss
from jaxgrpo.losses.objective import with_batch_fields


def batch_loss(
    objective: Objective,
    current: Mapping[str, Array],
    rollouts: Rollouts,
    advantage: Array,
    mask: Array,
) -> Array:
    """The loss of a batch, weighed and with its dead left out as in training.

    Args:
      current: "logp" and what else the update's pass gives, [P, G, T].
      advantage, mask: [P, G, T], of the tokens that the chain leaves.
    """
    live = mask.any(-1) if objective.acts_on_all else (advantage != 0).any(-1)
    weight = jnp.where(live[..., None], objective.reduction.weights(mask), 0)
    tokens = loss_tokens(objective, current, rollouts, advantage, mask & live[..., None])
    losses, _ = token_loss(objective.surrogate, objective.penalties, tokens, objective.init())
    return (weight.reshape(losses.shape) * losses).sum()


def loss_tokens(
    objective: Objective,
    current: Mapping[str, Array],
    rollouts: Rollouts,
    advantage: Array,
    mask: Array,
) -> Tokens:
    """What the loss reads, a row for each sample. Args: as in `batch_loss`."""
    shape = mask.shape
    now = rollouts.policy_version == rollouts.step
    available = {"sampled_now": now, **rollouts.rewards, **rollouts.fields}
    available |= {"behavior_logp": rollouts.behavior_logp, TOKEN_DRAW: token_draw(rollouts)}
    available |= current
    fields = {
        name: per_token(value, rollouts)
        for name, value in available.items()
        if name in objective.fields_read
    }
    is_scored = objective.proximal == "trainer"
    arrays = {
        "logp": current["logp"],
        "proximal_logp": rollouts.fields["trainer_logp"] if is_scored else rollouts.behavior_logp,
        "advantage": advantage,
        "mask": mask,
        "segment": jnp.ones(shape, jnp.int32),
    }
    rows = {name: value.reshape(-1, shape[-1]) for name, value in arrays.items()}
    field_rows = {name: value.reshape(-1, shape[-1]) for name, value in fields.items()}
    group = jnp.broadcast_to(jnp.arange(shape[0])[:, None, None], shape).reshape(-1, shape[-1])
    return with_batch_fields(objective.batch_fields, Tokens(**rows, fields=field_rows), group)


def per_token(value: Array, rollouts: Rollouts) -> Array:
    """A field [], [P], [P, G] or [P, G, T, ...] at every token of the samples, [P, G, T, ...]."""
    value = value.reshape(*value.shape, *[1] * (3 - value.ndim))
    return jnp.broadcast_to(value, (*rollouts.token_mask.shape, *value.shape[3:]))


def token_draw(rollouts: Rollouts) -> Array:
    """A uniform number in [0, 1) for each token, [P, G, T]."""
    key = jax.random.fold_in(jax.random.key(0, impl=GENERATOR), rollouts.step)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(rollouts.ordinal)
    return jax.vmap(lambda key: jax.random.uniform(key, rollouts.token_mask.shape[1:]))(keys)
