"""Normalisers as token weights: `loss = sum(weight * loss per token)`, no other division.

Weights are computed once, on the mask [P, G, T] of the whole batch. Whatever is done afterwards,
leaving out the dead, splitting into micro-batches, packing, devices, the sum stays the same.

A built-in reduction is a divisor of numbers that are counted from the mask (`Counts`), so that it
is defined on packed rows too. A row without any unmasked token (empty completion, masked sample)
is no sequence: it is counted in no denominator. verl does the same; TRL counts such rows, which
is `count_empty`. Weights of an empty mask are all 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.core.errors import InputError


class Counts(NamedTuple):
    """What a divisor may read, int32, each of a shape that broadcasts to the mask's."""

    tokens: Array  # unmasked tokens of the batch
    sequences: Array  # sequences with at least one
    rows: Array  # sequences, those without any too
    sequence_tokens: Array  # unmasked tokens of a token's own sequence
    prompts: Array | None  # prompts with at least one; None: prompts are not known
    prompt_tokens: Array | None  # unmasked tokens of a token's own prompt

    def count_sequences(self, count_empty: bool) -> Array:
        return self.rows if count_empty else self.sequences


class Reduction(NamedTuple):
    """A denominator."""

    name: str
    weights: Callable[[Array], Array]
    """mask [P, G, T] -> weights [P, G, T], 0 where masked; float32, or float64 under x64"""
    divisor: Callable[[Counts], tuple[Array, ...]] | None = None
    """The factors of a token's divisor: what `weights` comes from, and packed rows need"""


def token_mean() -> Reduction:
    """Every token of the batch weighs the same.

        weight = mask / sum(mask)

    Source: DAPO, arXiv 2503.14476, section 3.3.

    >>> mask = jnp.array([[[True, True, True], [True, False, False]]])  # two sequences, 4 tokens
    >>> token_mean().weights(mask).tolist()
    [[[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]]
    """
    return _reduction("token_mean", lambda counts: (counts.tokens,))


def sequence_mean(count_empty: bool = False) -> Reduction:
    """The mean over sequences of the mean over their tokens: long answers' tokens weigh less.

        weight[i, t] = mask[i, t] / (number of sequences * sum_t mask[i, t])

    Args:
      count_empty: True counts sequences without a token in the loss too, as TRL does.

    Source: Shao et al. 2024, arXiv 2402.03300, equation 3.

    >>> mask = jnp.array([[[True, True], [True, False]]])  # two sequences
    >>> sequence_mean().weights(mask).tolist()
    [[[0.25, 0.25], [0.5, 0.0]]]
    """

    def divisor(counts: Counts) -> tuple[Array, ...]:
        return counts.sequence_tokens, counts.count_sequences(count_empty)

    return _reduction("sequence_mean", divisor)


def sequence_sum(count_empty: bool = False) -> Reduction:
    """The mean over sequences of the sum over their tokens: the gradient of the expected reward.

        weight[i, t] = mask[i, t] / number of sequences

    Args:
      count_empty: True counts sequences without a token in the loss too, as TRL does.

    Source: verl's seq-mean-token-sum; alpha-DPG, arXiv 2512.05962.

    >>> mask = jnp.array([[[True, True], [True, False]]])  # two sequences
    >>> sequence_sum().weights(mask).tolist()
    [[[0.5, 0.5], [0.5, 0.0]]]
    """

    return _reduction("sequence_sum", lambda counts: (counts.count_sequences(count_empty),))


def constant(length: float, count_empty: bool = False) -> Reduction:
    """Sums over tokens, divided by a constant length: no token's weight depends on its sequence.

        weight[i, t] = mask[i, t] / (number of sequences * length)

    Args:
      length: in tokens; usually max_completion_tokens.
      count_empty: True counts sequences without a token in the loss too, as TRL does.

    Raises: InputError unless length is positive.
    Source: Dr. GRPO, Liu et al. 2025, arXiv 2503.20783.

    >>> mask = jnp.array([[[True, True], [True, False]]])  # two sequences
    >>> constant(4).weights(mask).tolist()
    [[[0.125, 0.125], [0.125, 0.0]]]
    """
    if not (length > 0 and math.isfinite(length)):
        raise InputError(
            f"constant: length = {length}, expected a positive number of tokens, usually"
            " rollout.max_completion_tokens"
        )

    def divisor(counts: Counts) -> tuple[Array, ...]:
        return counts.count_sequences(count_empty), jnp.asarray(length)

    return _reduction("constant", divisor)


def prompt_mean() -> Reduction:
    """The mean over prompts of the mean over all tokens of their samples.

        weight[p, g, t] = mask[p, g, t] / (number of prompts * sum_gt mask[p, g, t])

    Prompts without an unmasked token are not counted, so that `mask_zero_variance` takes flat
    groups out of the denominator, as ScaleRL does.

    Raises: InputError if prompts are not known: plain arrays without `group`.
    Source: ScaleRL, arXiv 2510.13786.

    >>> mask = jnp.array([[[True, True], [True, True]], [[True, False], [False, False]]])
    >>> prompt_mean().weights(mask).tolist()  # two prompts, of 4 tokens and 1
    [[[0.125, 0.125], [0.125, 0.125]], [[0.5, 0.0], [0.0, 0.0]]]
    """

    def divisor(counts: Counts) -> tuple[Array, ...]:
        if counts.prompts is None or counts.prompt_tokens is None:
            raise InputError(
                "prompt_mean needs to know which rows answer the same prompt: give `group`, prompt"
                " ids [B], or [B, T] where rows are packed"
            )
        return counts.prompt_tokens, counts.prompts

    return _reduction("prompt_mean", divisor)


def packed_weights(
    reduction: Reduction,
    mask: Bool[Array, "B T"],
    segment: Int[Array, "B T"],
    group: Int[Array, "B T"] | None,
) -> Float[Array, "B T"]:
    """The weights of rows that hold sequences one after another.

    Args:
      segment: 0 = padding, else the sequence's id, 1 .. T within its row.
      group: prompt ids at each token, any numbers; a row may hold several prompts.

    A sequence without a position in any row cannot be counted, `count_empty` or not.
    Raises: InputError for a reduction without a divisor.
    """
    if reduction.divisor is None:
        raise InputError(
            f"reduction {reduction.name} is defined on masks [P, G, T] alone: leave out segment"
            " and group, or give it a divisor"
        )
    per_segment = _count_by(segment, mask, mask.shape[-1] + 1)
    present = _count_by(segment, segment > 0, mask.shape[-1] + 1)
    prompts = prompt_tokens = None
    if group is not None:
        ids = dense_ids(group.reshape(-1))
        by_prompt = _count_by(ids, mask.reshape(-1), ids.size)
        prompts = _number(by_prompt > 0)[None]
        prompt_tokens = by_prompt[ids].reshape(mask.shape)
    counts = Counts(
        tokens=_number(mask),
        sequences=_number(per_segment > 0),
        rows=_number(present > 0),
        sequence_tokens=jnp.take_along_axis(per_segment, segment, -1),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
    )
    return _divide(mask, reduction.divisor(counts))


def dense_ids(ids: Int[Array, "*rows N"]) -> Int[Array, "*rows N"]:
    """The rank of each id among the different ones along the last axis, from 0."""
    order = jnp.argsort(ids, -1)
    ordered = jnp.take_along_axis(ids, order, -1)
    rank = jnp.cumsum(ordered[..., 1:] != ordered[..., :-1], -1, dtype=jnp.int32)
    rank = jnp.pad(rank, [(0, 0)] * (ids.ndim - 1) + [(1, 0)])
    return jnp.take_along_axis(rank, jnp.argsort(order, -1), -1)


def _reduction(name: str, divisor: Callable[[Counts], tuple[Array, ...]]) -> Reduction:
    def weights(mask: Bool[Array, "P G T"]) -> Float[Array, "P G T"]:
        sequence_tokens = mask.sum(-1, keepdims=True, dtype=jnp.int32)
        prompt_tokens = sequence_tokens.sum(-2, keepdims=True)
        counts = Counts(
            tokens=_number(mask),
            sequences=_number(sequence_tokens > 0),
            rows=jnp.full((1,) * mask.ndim, sequence_tokens.size, jnp.int32),
            sequence_tokens=sequence_tokens,
            prompts=_number(prompt_tokens > 0),
            prompt_tokens=prompt_tokens,
        )
        return _divide(mask, divisor(counts))

    return Reduction(name, weights, divisor)


def _divide(mask: Array, factors: tuple[Array, ...]) -> Array:
    weight = mask.astype(jnp.result_type(float))
    for factor in factors:
        # Counted in int32: a float32 sum of ones is inexact beyond 2**24 tokens.
        if jnp.issubdtype(factor.dtype, jnp.integer):
            factor = jnp.maximum(factor, 1)
        weight = weight / factor.astype(weight.dtype)
    return weight


def _number(flags: Array) -> Array:
    """How many are True, as int32 of the same rank."""
    return flags.sum(keepdims=True, dtype=jnp.int32)


def _count_by(ids: Array, flags: Array, size: int) -> Array:
    """[..., size] int32: how many flags are True at each id, 0 .. size - 1, along the last axis."""

    def row(ids: Array, flags: Array) -> Array:
        return jnp.zeros(size, jnp.int32).at[ids].add(flags.astype(jnp.int32))

    for _ in range(ids.ndim - 1):
        row = jax.vmap(row)
    return row(ids, flags)
