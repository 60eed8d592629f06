"""The pass over reference answers: samples whose completions are thought, prefix and answer.

A policy scores them like any samples, in micro-batches that share prompts:

    answer_logp[p, g, j]      = log pi(y_j | prompt, thought g, prefix, y_<j)
    masked_answer_logp[p, j]  = log pi(y_j | prompt, prefix, y_<j), from one more sample per group,
                                whose thought is empty
    answer_rank[p, g, j]      = the number of tokens that are likelier than y_j there
    cut_answer_logp[p, g, k]  = sum_j log pi(y_j | prompt, first k of K parts of thought g, prefix,
                                y_<j), k = 0 to K, from K samples for each; the parts are equal

pi is the trained policy before the update, the base (frozen), or the reference, which lags behind
with `reference.reset_every`; at the temperature of sampling, as for `trainer_logp`.

Source: DRO, arXiv 2506.13351, with its three policies that score.

What is trained may then be the answers themselves, behind the thoughts: `with_answers`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxgrpo.advantages.tokens import part_ends
from jaxgrpo.core.scores import ANSWERED, REACHED
from jaxgrpo.core.types import Rollouts, only_tokens
from jaxgrpo.models import sharding
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.update.packing import Geometry

ANSWER, MASKED, CUT = "answer_logp", "masked_answer_logp", "cut_answer_logp"
RANK = "answer_rank"


def answer_geometry(
    geometry: Geometry, longest: int, cuts: int, masked: bool, mesh: Mesh
) -> Geometry:
    """The sizes of the pass: those of the update, with room for an answer behind a thought.

    A micro-batch has the update's tokens, or those of the longest sample if they are more.

    Args:
      longest: L, the tokens of the longest prefix and answer.
      cuts: K, the parts of a thought behind each of which the answer is scored; 1: all of it.
      masked: whether groups have the sample without a thought.
    """
    steps = geometry.max_completion_tokens + longest
    steps = sharding.rounded_up(mesh, steps, "sequence")
    samples = geometry.group_size * cuts + masked
    longer = geometry._replace(group_size=samples, max_completion_tokens=steps)
    least = sharding.rounded_up(mesh, longer.widest, "sequence")
    return longer._replace(tokens=max(geometry.tokens, least))


def behind_thoughts(rollouts: Rollouts, geometry: Geometry, cuts: int = 1) -> Rollouts:
    """Samples of thought, prefix and answer: prompts, tokens and token mask; the rest is empty.

    Those of each sample's K parts of a thought are side by side. The mask is True at all their
    tokens, so that lengths count them. Where `geometry` has a sample more per group, it is the one
    without a thought.
    """
    forced, thought = rollouts.fields[FORCED], rollouts.fields[THOUGHT]
    groups, samples, steps = rollouts.completion_tokens.shape
    extra = geometry.group_size - samples * cuts, geometry.max_completion_tokens - steps
    parts = part_ends(thought, cuts)[..., 1:].reshape(groups, samples * cuts)
    completions = jnp.repeat(rollouts.completion_tokens, cuts, axis=1)
    thought = jnp.pad(parts, ((0, 0), (0, extra[0])))
    completions = jnp.pad(completions, ((0, 0), (0, extra[0]), (0, extra[1])))
    offset = jnp.arange(geometry.max_completion_tokens) - thought[..., None]
    forced_index = jnp.clip(offset, 0, forced.shape[1] - 1)
    answer_tokens = jnp.take_along_axis(forced[:, None], forced_index, axis=2)
    real = offset < (forced >= 0).sum(-1, dtype=jnp.int32)[:, None, None]
    tokens = jnp.where(offset < 0, completions, answer_tokens)
    return only_tokens(rollouts, jnp.where(real, tokens, 0), real)


def pick_answer_logp(logp: Array, rollouts: Rollouts, cuts: int = 1) -> dict[str, Array]:
    """The answers' log-probs among those [P, G', T'] of `behind_thoughts`; 0 where no token is.
    With ranks for `logp`, `ANSWER` has the answers' ranks.

    Samples of a group with the same thought, or the same part of one, have those of the first of
    them, bit for bit: what rounding makes of other places in a micro-batch is no difference between
    samples.
    """
    forced, thought, mask = (rollouts.fields[name] for name in (FORCED, THOUGHT, MASK))
    groups, samples = thought.shape
    parts = part_ends(thought, cuts)[..., 1:]
    flat = jnp.pad(parts.reshape(groups, -1), ((0, 0), (0, logp.shape[1] - samples * cuts)))
    tokens = (forced >= 0).sum(-1, dtype=jnp.int32)  # [P]
    prefix_tokens = tokens - mask.sum(-1, dtype=jnp.int32)
    place = (flat + prefix_tokens[:, None])[..., None] + jnp.arange(mask.shape[1])
    answer_logp = jnp.take_along_axis(logp, jnp.minimum(place, logp.shape[2] - 1), axis=2)
    answer_logp = jnp.where(mask[:, None], answer_logp, 0)
    behind = answer_logp[:, : samples * cuts].reshape(groups, samples, cuts, -1)
    first = jnp.stack(
        [_first_alike(rollouts.completion_tokens, parts[..., k]) for k in range(cuts)], axis=2
    )
    behind = jnp.take_along_axis(behind, first[..., None], axis=1)
    if logp.shape[1] == samples * cuts:
        return {ANSWER: behind[:, :, -1]}
    without = answer_logp[:, -1]
    start = jnp.broadcast_to(without.sum(-1)[:, None, None], (groups, samples, 1))
    at_cuts = jnp.concatenate([start, behind.sum(-1)], axis=-1)
    return {ANSWER: behind[:, :, -1], MASKED: without, CUT: at_cuts}


def with_answers(rollouts: Rollouts, answer_logp: Array) -> Rollouts:
    """The samples with prefix and answer behind each thought, in place of what followed it.

    The policy chose the thought's tokens, and is to learn the answer's: the mask is True at both
    and False at the prefix. Log-probs of the answer's tokens are those of the parameters before the
    update, so that their ratio begins at 1. Where the completion has no room for all of the answer,
    or the limit cut it, the sample ends with its thought. One that ended without an answer stays as
    it was drawn, with its end token.

    Args:
      answer_logp: [P, G, J], of the trained policy.

    Returns: rollouts whose field `ANSWERED` [P, G, T] is True at the answers' tokens.
    """
    forced, thought, mask = (rollouts.fields[name] for name in (FORCED, THOUGHT, MASK))
    steps = rollouts.token_mask.shape[2]
    counts = (real.sum(-1, dtype=jnp.int32)[:, None, None] for real in (forced >= 0, mask))
    size, answer = counts
    place = jnp.arange(steps, dtype=jnp.int32) - thought[..., None]
    has_room = thought[..., None] + size <= steps
    reached, truncated = rollouts.fields[REACHED][..., None], rollouts.truncated[..., None]
    within = (place < 0) | (~reached & ~truncated)
    behind = ~within & (place < size) & has_room & reached
    answer_place = place - (size - answer)
    answered = behind & (answer_place >= 0)

    def at(values: Array, index: Array) -> Array:
        return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[2] - 1), axis=2)

    tokens = jnp.where(behind, at(forced[:, None], place), 0)
    thought_logp = jnp.where(within, rollouts.behavior_logp, 0)
    answer_logp = at(answer_logp, answer_place).astype(thought_logp.dtype)
    return dataclasses.replace(
        rollouts,
        completion_tokens=jnp.where(within, rollouts.completion_tokens, tokens),
        token_mask=(within & rollouts.token_mask) | answered,
        behavior_logp=jnp.where(answered, answer_logp, thought_logp),
        fields={**rollouts.fields, ANSWERED: answered},
    )


def _first_alike(tokens: Array, length: Array) -> Array:
    """[P, G]: the first sample of the group with the same first tokens.

    Args:
      length: [P, G], how many tokens of each sample count.
    """
    begins = jnp.where(jnp.arange(tokens.shape[2]) < length[..., None], tokens, -1)
    return jnp.argmax((begins[:, :, None] == begins[:, None]).all(-1), axis=2)
