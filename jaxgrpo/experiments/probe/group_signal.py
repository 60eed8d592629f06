"""What groups of each size would carry, from the successes of many samples per prompt.

A group of G is a draw of G of a prompt's n samples, none twice; every expectation below is exact
over all such draws, and so unbiased for groups that a run would sample.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxgrpo.update.diagnostics import drawn_alike, flat_share

RARE = 0.125
"""A prompt below this success rate is hard; 1 / 8, the lower end of `mask_difficulty_band`."""


class GroupShares(NamedTuple):
    """Per prompt, the probabilities of the kinds of group; NaN where n < G. Each [P]."""

    all_fail: Array
    all_pass: Array
    mixed: Array
    one_success: Array  # a part of mixed, but for G = 1


def group_shares(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> GroupShares:
    """How often a group of G all fails, all passes, is mixed, or holds a single success.

        all_fail     C(n - c, G) / C(n, G)
        all_pass     C(c, G) / C(n, G)
        one_success  c C(n - c, G - 1) / C(n, G) = G c / n C(n - c, G - 1) / C(n - 1, G - 1)

    Args:
      correct, samples: successes c and samples n per prompt.
      group_size: G, static, at least 1.
    """
    failures = samples - correct
    fail, passed = (drawn_alike(kind, samples, group_size) for kind in (failures, correct))
    rate = _rate(correct, samples)
    if group_size == 1:
        one = jnp.where(samples >= 1, rate, jnp.nan)
    else:
        one = group_size * rate * drawn_alike(failures, samples - 1, group_size - 1)
    return GroupShares(fail, passed, 1 - fail - passed, one)


def live_tokens(
    correct: Int[Array, "P"],
    samples: Int[Array, "P"],
    right_tokens: Float[Array, "P"],
    wrong_tokens: Float[Array, "P"],
    group_size: int,
) -> Float[Array, "P"]:
    """Expected tokens of a group of G that lie in a mixed group: a flat one counts 0.

        G (c/n - all_pass) (mean length of successes) + G ((n-c)/n - all_fail) (that of failures)

    since a success is in a mixed group unless its group all passes.

    Args:
      right_tokens, wrong_tokens: the sums of tokens over a prompt's successes and failures.
    """
    shares = group_shares(correct, samples, group_size)
    rate = _rate(correct, samples)
    right = (rate - shares.all_pass) * _per_sample(right_tokens, correct)
    wrong = (1 - rate - shares.all_fail) * _per_sample(wrong_tokens, samples - correct)
    return group_size * (right + wrong)


def lucky_share(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int, below: float = RARE
) -> Float[Array, ""]:
    """Of mixed groups, the share that are a hard prompt's with a single success.

        sum_{x: c_x / n_x < below} one_success_x / sum_x mixed_x

    Such a success, the right answer by whatever way, is all that its group learns from. The rate is
    that of the same samples, so a prompt must have more than 1 / below of them to be hard and yet
    succeed once.

    Returns: NaN where no prompt has more than 1 / below samples and at least G, or none is mixed.
    Source: the rare accidental success as exemplar, arXiv 2605.28388; the metric is ours.
    """
    usable = (samples >= group_size) & (samples > int(1 / below))
    shares = group_shares(correct, samples, group_size)
    hard = usable & (_rate(correct, samples) < below)
    lone = jnp.where(hard, shares.one_success, 0).sum()
    mixed = jnp.where(usable, shares.mixed, 0).sum()
    return jnp.where(mixed > 0, lone / jnp.where(mixed > 0, mixed, 1), jnp.nan)


def gap_influence(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> Float[Array, "P"]:
    """What each prompt adds to the error of `diagnostics.jensen_gap`, to first order.

        a_x = f_x - mean f - G (r_x - p) (p^(G-1) - (1 - p)^(G-1))

    with f_x the prompt's unbiased share of flat groups, r_x = c_x / n_x and p their mean. The gap
    less its expectation is the mean of a_x, up to terms of order 1 / P: so the deviation of a_x
    over sqrt(P) is its standard error. Drawing prompts anew and computing the gap of each draw is
    no substitute: a prompt drawn twice then counts as two that are independent and agree.

    Returns: 0 where a prompt has fewer than G samples, as the gap leaves it out.
    Source: Hoeffding's projection of a U-statistic, Ann. Math. Statist. 19 (1948).
    """
    usable = samples >= group_size
    flat = jnp.where(usable, flat_share(correct, samples, group_size), 0)
    number = jnp.maximum(usable.sum(), 1).astype(flat.dtype)
    rate = jnp.where(usable, _rate(correct, samples), 0)
    p = rate.sum() / number
    slope = group_size * (p ** (group_size - 1) - (1 - p) ** (group_size - 1))
    return jnp.where(usable, flat - flat.sum() / number - slope * (rate - p), 0)


def _rate(correct: Array, samples: Array) -> Array:
    dtype = jnp.result_type(float)
    return correct.astype(dtype) / jnp.maximum(samples, 1).astype(dtype)


def _per_sample(total: Array, count: Array) -> Array:
    return total / jnp.maximum(count, 1).astype(total.dtype)
