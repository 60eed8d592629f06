"""The pass over reference answers: samples whose completions are thought, prefix and answer.

A policy scores them like any samples, in micro-batches that share prompts:

    answer_logp[p, g, j]      = log pi(y_j | prompt, thought g, prefix, y_<j)
    masked_answer_logp[p, j]  = log pi(y_j | prompt, prefix, y_<j), from one more sample per group,
                                whose thought is empty

pi is the trained policy before the update, the base (frozen), or the reference, which lags behind
with `reference.reset_every`; at the temperature of sampling, as for `trainer_logp`.

Source: DRO, arXiv 2506.13351, with its three policies that score.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.core.types import Rollouts
from jaxgrpo.models import sharding
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.update.packing import Geometry

ANSWER, MASKED = "answer_logp", "masked_answer_logp"


def answer_geometry(geometry: Geometry, longest: int, masked: bool, mesh: Mesh) -> Geometry:
    """The sizes of the pass: those of the update, with room for an answer behind a thought.

    A micro-batch has the update's tokens, or those of the longest sample if they are more.

    Args:
      longest: L, the tokens of the longest prefix and answer.
      masked: whether groups have the sample without a thought.
    """
    steps = geometry.max_completion_tokens + longest
    steps = sharding.rounded_up(mesh, steps, "sequence")
    longer = geometry._replace(group_size=geometry.group_size + masked, max_completion_tokens=steps)
    least = sharding.rounded_up(mesh, longer.widest, "sequence")
    return longer._replace(tokens=max(geometry.tokens, least))


def behind_thoughts(rollouts: Rollouts, geometry: Geometry) -> Rollouts:
    """Samples of thought, prefix and answer: prompts, tokens and token mask; the rest is empty.

    The mask is True at all their tokens, so that lengths count them. Where `geometry` has a sample
    more per group than the rollouts, it is the one without a thought.
    """
    forced, thought = rollouts.fields[FORCED], rollouts.fields[THOUGHT]
    _, samples, steps = rollouts.completion_tokens.shape
    extra = geometry.group_size - samples, geometry.max_completion_tokens - steps
    thought = jnp.pad(thought, ((0, 0), (0, extra[0])))
    completions = jnp.pad(rollouts.completion_tokens, ((0, 0), (0, extra[0]), (0, extra[1])))
    offset = jnp.arange(geometry.max_completion_tokens) - thought[..., None]
    forced_index = jnp.clip(offset, 0, forced.shape[1] - 1)
    answer_tokens = jnp.take_along_axis(forced[:, None], forced_index, axis=2)
    real = offset < (forced >= 0).sum(-1, dtype=jnp.int32)[:, None, None]
    tokens = jnp.where(offset < 0, completions, answer_tokens)
    return dataclasses.replace(
        rollouts,
        completion_tokens=jnp.where(real, tokens, 0),
        token_mask=real,
        behavior_logp=jnp.zeros(real.shape, rollouts.behavior_logp.dtype),
        rewards={},
        truncated=jnp.zeros(real.shape[:2], bool),
        policy_version=jnp.zeros(real.shape[:2], jnp.int32),
        fields={},
    )


def pick_answer_logp(logp: Array, rollouts: Rollouts) -> dict[str, Array]:
    """The answers' log-probs among those [P, G', T'] of `behind_thoughts`; 0 where no token is.

    Samples of a group with the same thought have those of the first of them, bit for bit: what
    rounding makes of other places in a micro-batch is no difference between samples.
    """
    forced, thought, mask = (rollouts.fields[name] for name in (FORCED, THOUGHT, MASK))
    samples = thought.shape[1]
    thought = jnp.pad(thought, ((0, 0), (0, logp.shape[1] - samples)))
    tokens = (forced >= 0).sum(-1, dtype=jnp.int32)  # [P]
    prefix_tokens = tokens - mask.sum(-1, dtype=jnp.int32)
    place = (thought + prefix_tokens[:, None])[..., None] + jnp.arange(mask.shape[1])
    answer_logp = jnp.take_along_axis(logp, jnp.minimum(place, logp.shape[2] - 1), axis=2)
    answer_logp = jnp.where(mask[:, None], answer_logp, 0)
    without_thought = {MASKED: answer_logp[:, samples]} if logp.shape[1] > samples else {}
    first = _first_alike(rollouts)[..., None]
    return {ANSWER: jnp.take_along_axis(answer_logp, first, axis=1), **without_thought}


def _first_alike(rollouts: Rollouts) -> Array:
    """[P, G]: the first sample of the group that has the same thought."""
    tokens, thought = rollouts.completion_tokens, rollouts.fields[THOUGHT]
    thoughts = jnp.where(jnp.arange(tokens.shape[2]) < thought[..., None], tokens, -1)
    return jnp.argmax((thoughts[:, :, None] == thoughts[:, None]).all(-1), axis=2)
