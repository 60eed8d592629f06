"""How two judgements of the same samples agree, where what counts is the order within groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxgrpo.evaluation.intervals import finite_mean

ROUNDING = 3e-7
"""A deviation from the mean of a group that is smaller, relative to the largest value, is none, and
values whose difference is smaller are equal: rewards are float32 numbers, and weighted sums of the
same amount, as .1 + .6 and .7, are rounded in different ways. A chain takes them for equal too
(`advantages.stats.added`)."""


class Agreement(NamedTuple):
    """A new judgement of samples beside an old one. Samples that either left unscored are in no
    comparison; each mean is of all that its judgement scored."""

    samples: int  # compared
    unscored: int  # by the new one
    old_mean: float
    new_mean: float
    spearman: float  # NaN where one of the two is the same for all
    sign_changed: float  # share of samples that lie on another side of their group's mean
    rank_changed: float  # share of samples that have another rank in their group
    now_flat: int  # groups that could teach and could not any more
    now_informative: int  # groups that can only now


def compare(old: np.ndarray, new: np.ndarray, group: np.ndarray) -> Agreement:
    """Compares two judgements.

    A group is flat where it has no two samples with different values.

    Args:
      old, new: [N] float, NaN = not scored.
      group: [N], the number of each sample's group.
    """
    compared = np.isfinite(old) & np.isfinite(new)
    pair = old[compared], new[compared]
    signs, orders = (_share_changed(*pair, group[compared], f) for f in (sides, ranks))
    flat = [{g for g in np.unique(group) if is_flat(v[group == g])} for v in (old, new)]
    return Agreement(
        samples=int(compared.sum()),
        unscored=int((~np.isfinite(new)).sum()),
        old_mean=finite_mean(old),
        new_mean=finite_mean(new),
        spearman=spearman(*pair),
        sign_changed=signs,
        rank_changed=orders,
        now_flat=len(flat[1] - flat[0]),
        now_informative=len(flat[0] - flat[1]),
    )


def is_flat(values: np.ndarray) -> bool:
    """Whether no two of the values that are finite differ, but for rounding.

    >>> is_flat(np.array([0.2 * 3, 0.3 * 2, np.nan])), is_flat(np.array([0.0, 1e-9]))
    (True, False)
    """
    finite = values[np.isfinite(values)]
    return not finite.size or bool(np.ptp(finite) <= ROUNDING * abs(finite).max())


def ranks(values: np.ndarray) -> np.ndarray:
    """1 for the lowest; values that are equal, but for rounding, share the mean of their ranks.

    >>> ranks(np.array([5.0, 2.0, 5.0, 9.0])).tolist()
    [2.5, 1.0, 2.5, 4.0]
    """
    order = np.argsort(values)
    rises = np.diff(values[order], prepend=values[order[:1]]) > ROUNDING * abs(values).max(
        initial=0
    )
    level = np.cumsum(rises)
    counts = np.bincount(level)
    last = np.cumsum(counts)
    shared = np.empty(len(values))
    shared[order] = (last - (counts - 1) / 2)[level]
    return shared


def sides(values: np.ndarray) -> np.ndarray:
    """-1, 0 or 1: below the mean of the values, at it or above.

    >>> sides(np.array([0.1, 0.1, 0.1])).tolist(), sides(np.array([0.0, 1.0])).tolist()
    ([0.0, 0.0, 0.0], [-1.0, 1.0])
    """
    gap = values - values.mean()
    return np.where(abs(gap) > ROUNDING * abs(values).max(), np.sign(gap), 0.0)


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """The correlation of the ranks of two lists of numbers; NaN where one has equal values only.

        rho = cov(rank(x), rank(y)) / (std rank(x) std rank(y))

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    if is_flat(first) or is_flat(second):
        return float("nan")
    x, y = (rank - rank.mean() for rank in (ranks(first), ranks(second)))
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _share_changed(
    old: np.ndarray, new: np.ndarray, group: np.ndarray, measure: Callable[[np.ndarray], np.ndarray]
) -> float:
    """The share of samples whose number, by `measure` within each group, is another one."""
    changed = 0
    for number in np.unique(group):
        members = group == number
        changed += int((measure(old[members]) != measure(new[members])).sum())
    return changed / len(old) if len(old) else float("nan")
