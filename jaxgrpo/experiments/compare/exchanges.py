"""Tests of differences by exchanges of labels: exact or drawn, of one arm or several numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

EXACT = 12  # up to so many seeds every exchange of labels is counted
DRAWN = 20_000  # exchanges that are drawn if there are more seeds
TOLERANCE = 1e-12  # of the largest value: statistics that differ by less are equal


@functools.cache
def smallest_p(seeds: int) -> float:
    """The smallest two-sided p that an exchange of labels can give: 2 of 2^n, or of those drawn."""
    return sign_flip_test(np.ones(seeds))


def seeds_needed(comparisons: int, level: float) -> int | None:
    """With how many seeds the smallest corrected p is at most `level`.

    None: with none. Of drawn exchanges, above EXACT seeds, the observed one is always counted, so
    that a p is at least 1 / (DRAWN + 1).

    >>> seeds_needed(5, 0.05), seeds_needed(5, 1e-4)
    (8, None)
    """
    if comparisons / (DRAWN + 1) > level:
        return None
    return next(seeds for seeds in itertools.count(1) if comparisons * smallest_p(seeds) <= level)


def exchange_test(arm: np.ndarray, control: np.ndarray) -> float:
    """Two-sided p that two arms, each at its best of L learning rates, are the same.

        T = | mean_s arm[l*(arm), s] - mean_s control[l*(control), s] |,   l* = choose(...)
        p = share of the 2^n exchanges of the two within seeds whose T is at least the observed one

    If the arms were the same at every rate, all values of a seed could be exchanged with the
    control's: then it is exact for any distribution, and for any way of choosing l*, since the
    choice is made again in every exchange. For L = 1 it is the sign-flip test of the paired
    differences, exact wherever they are symmetric about 0.

    For L > 1 arms of equal means at every rate need not be alike: the best of L noisy means lies
    higher than the best of L quiet ones, so that the noisier arm looks better. With three rates,
    seven seeds and normal values of 3 or 5 times the control's deviation p <= .05 comes in .08 and
    .11 of comparisons. Rates that are chosen on other seeds avoid it.

    Above EXACT seeds,
    DRAWN exchanges are drawn, the same for the same n, and the observed one counts as one of them.

    Shapes: arm, control [L, n], the same rates and seeds. Higher is better.
    """
    values = np.array([arm, control], float)
    arm, control = values / (np.abs(values).max() or 1.0)

    def statistic(swapped: np.ndarray) -> np.ndarray:
        pairs = (arm, control), (control, arm)
        first, second = (np.where(swapped[:, None, :], *pair) for pair in pairs)
        # The best of the means over seeds, [m, L, n] -> [m]; whichever of equal ones.
        return np.abs(first.mean(-1).max(-1) - second.mean(-1).max(-1))[:, None]

    return float(_share_as_large(statistic, np.shape(arm)[1])[0])


def sign_flip_test(difference: np.ndarray) -> float:
    """Two-sided p that paired differences [n] are as likely of either sign: exact, no normality."""
    difference = np.asarray(difference, float)[None]
    return exchange_test(difference, np.zeros_like(difference))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Each p corrected for being one of several: with all below a level, none is by chance.

        sorted p_(1) <= ... <= p_(m):   p'_(i) = max over j <= i of min(1, (m - j + 1) p_(j))

    Whatever the comparisons have to do with each other. Source: Holm 1979, Scand. J. Stat. 6.
    """
    order = sorted(p, key=lambda name: p[name])
    several = (min(1.0, (len(p) - place) * p[name]) for place, name in enumerate(order))
    corrected = dict(zip(order, itertools.accumulate(several, max), strict=True))
    return {name: corrected[name] for name in p}


def sign_flip_tests(differences: np.ndarray) -> np.ndarray:
    """`sign_flip_test` of several numbers per seed, corrected for being several: [n, K] -> [K].

        T_k = | mean_s d[s, k] | / sqrt(mean_s d[s, k]^2)
        p_k = share of the sign flips of seeds whose max over j of T_j is at least the observed T_k

    A seed's numbers are flipped together, and so may depend on each other in any way.
    Source: Westfall and Young 1993, Resampling-Based Multiple Testing, the single-step maximum.
    """
    differences = np.asarray(differences, float)
    scale = np.sqrt((differences**2).mean(0))
    scaled = differences / np.where(scale > TOLERANCE, scale, 1.0) / len(differences)
    return _share_as_large(lambda flip: abs(np.where(flip, -1.0, 1.0) @ scaled), len(scaled))


def _share_as_large(statistic: Callable[[np.ndarray], np.ndarray], seeds: int) -> np.ndarray:
    """The share of exchanges whose largest statistic is at least each observed one, [K].

    Args:
      statistic: of whether each seed's labels are exchanged, [m, n] -> [m, K].
    """
    observed = statistic(np.zeros((1, seeds), bool))
    reached = [
        statistic(exchanged).max(1, keepdims=True) >= observed - TOLERANCE
        for exchanged in _exchanges(seeds)
    ]
    return np.concatenate(reached).mean(0)


def _exchanges(seeds: int) -> Iterator[np.ndarray]:
    """Which seeds' labels are exchanged, in blocks [m, n]; none of them first."""
    if seeds <= EXACT:
        yield np.array(list(itertools.product([False, True], repeat=seeds)))
        return
    yield np.zeros((1, seeds), bool)
    random = np.random.default_rng(0)
    for _ in range(0, DRAWN, 1000):
        yield random.random((1000, seeds)) < 0.5
