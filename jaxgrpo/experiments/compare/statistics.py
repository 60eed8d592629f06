"""Statistics of a comparison: pure functions of numbers per seed. The unit is the seed.

Prompts of one seed share one trained model, so that they are no independent trials of a method:
more prompts make each number exact, only more seeds say whether a difference comes back.

Which arm differs from the control, by how much, and what could be seen at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcomes, tuning_values, values_of

RESAMPLES = 10_000
EXACT = 12  # seeds up to which every exchange of labels is looked at
DRAWN = 20_000  # exchanges drawn where there are more
SAME = 1e-12  # numbers that differ by less are one


def interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean over seeds, [n]; the same for the same values.

    With few seeds it is too narrow: a sample of 7 has a spread of its own. NaN for one seed.
    """
    values = np.asarray(values, float)
    if len(values) < 2:
        return float("nan"), float("nan")
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    tail = (1 - level) / 2 * 100
    low, high = np.percentile(values[drawn].mean(1), [tail, 100 - tail])
    return float(low), float(high)


def smallest_p(seeds: int) -> float:
    """The smallest two-sided p that an exchange of labels can give: 2 of 2^n."""
    return 2.0 / 2**seeds if seeds <= EXACT else max(2.0 / 2**seeds, 1 / (DRAWN + 1))


def seeds_needed(comparisons: int, level: float) -> int:
    """With how many seeds the smallest corrected p is at most `level`."""
    seeds = 1
    while comparisons * 2.0 / 2**seeds > level:
        seeds += 1
    return seeds


def choose(values: np.ndarray) -> int:
    """The row of the highest mean, [L, n]; the first of equal ones."""
    means = np.asarray(values, float).mean(1)
    return int(np.flatnonzero(means >= means.max() - SAME)[0])


def exchange_test(arm: np.ndarray, control: np.ndarray) -> float:
    """Two-sided p that two arms, each at its best of L learning rates, are the same.

        T = | mean_s arm[l*(arm), s] - mean_s control[l*(control), s] |,   l* = choose(...)
        p = share of the 2^n exchanges of the two within seeds whose T is at least the observed one

    Were the arms the same, each seed's two columns could as well bear each other's names: exact for
    any distribution, and for any way of choosing l*, since the choice is made again in every
    exchange. For L = 1 it is the sign-flip test of the paired differences. Above EXACT seeds,
    DRAWN exchanges are drawn, the same for the same n, and the observed one counts as one of them.

    Shapes: arm, control [L, n], the same rates and seeds. Higher is better.
    """
    arm, control = np.asarray(arm, float), np.asarray(control, float)
    observed = _best(arm) - _best(control)
    least = abs(float(observed)) - SAME
    met, count = (0, 0) if arm.shape[1] <= EXACT else (1, 1)
    for swapped in _exchanges(arm.shape[1]):
        one = np.where(swapped[:, None, :], control, arm)
        other = np.where(swapped[:, None, :], arm, control)
        met += int((np.abs(_best(one) - _best(other)) >= least).sum())
        count += len(swapped)
    return met / count


def sign_flip_test(difference: np.ndarray) -> float:
    """Two-sided p that paired differences [n] are as likely of either sign: exact, no normality."""
    difference = np.asarray(difference, float)[None]
    return exchange_test(difference, np.zeros_like(difference))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Each p corrected for being one of several: with all below a level, none is by chance.

        sorted p_(1) <= ... <= p_(m):   p'_(i) = max over j <= i of min(1, (m - j + 1) p_(j))

    Whatever the comparisons have to do with each other. Source: Holm 1979, Scand. J. Stat. 6.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - place) * p[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p}


def band(values: np.ndarray, resamples: int = RESAMPLES) -> np.ndarray:
    """`interval` at each of m places by itself: [n, m] -> [2, m]."""
    seeds = len(values)
    drawn = np.random.default_rng(0).integers(0, seeds, (resamples, seeds))
    weights = (drawn[..., None] == np.arange(seeds)).mean(1)  # [resamples, n]
    return np.percentile(weights @ np.asarray(values, float), [2.5, 97.5], axis=0)


def sign_flip_tests(differences: np.ndarray) -> np.ndarray:
    """`sign_flip_test` of several numbers per seed, corrected for being several: [n, K] -> [K].

        T_k = | mean_s d[s, k] | / sqrt(mean_s d[s, k]^2)
        p_k = share of the sign flips of seeds whose max over j of T_j is at least the observed T_k

    A seed's numbers are flipped together, and so may depend on each other in any way.
    Source: Westfall and Young 1993, Resampling-Based Multiple Testing, the single-step maximum.
    """
    differences = np.asarray(differences, float)
    scale = np.sqrt((differences**2).mean(0))
    scaled = differences / np.where(scale > SAME, scale, 1.0) / len(differences)
    least = np.abs(scaled.sum(0)) - SAME
    met, count = (0, 0) if len(differences) <= EXACT else (1, 1)
    for flipped in _exchanges(len(differences)):
        largest = np.abs(np.where(flipped, -1.0, 1.0) @ scaled).max(1)
        met = met + (largest[:, None] >= least).sum(0)
        count += len(flipped)
    return np.asarray(met / count)


def crossing(base: np.ndarray, trained: np.ndarray, level: float = 0.05) -> int | None:
    """The smallest k at which the trained model is shown to solve less than the base, or None.

    Shown: the 95% bootstrap interval over seeds of trained - base lies wholly below 0, and p,
    corrected for all k looked at, is at most `level`. Base and trained are drawn independently, so
    that their means cross by chance, and some interval of many k does too. Takes six seeds.

    Args:
      base, trained: pass@1, pass@2, ... by seeds, [n, K].
    """
    difference = np.asarray(trained, float) - np.asarray(base, float)
    if len(difference) < 2:
        return None
    shown = (band(difference)[1] < -SAME) & (sign_flip_tests(difference) <= level)
    below = np.flatnonzero(shown)
    return int(below[0]) + 1 if len(below) else None


def _best(values: np.ndarray) -> Any:
    """The highest of the means over seeds: [..., L, n] -> [...]. Whichever of equal ones."""
    return values.mean(-1).max(-1)


def _exchanges(seeds: int) -> Iterator[np.ndarray]:
    """Which seeds' labels are exchanged, in blocks [m, n]."""
    if seeds <= EXACT:
        yield np.array(list(itertools.product([False, True], repeat=seeds)))
        return
    random = np.random.default_rng(0)
    for _ in range(0, DRAWN, 1000):
        yield random.random((1000, seeds)) < 0.5


class Estimate(NamedTuple):
    """A mean over seeds and its bootstrap interval."""

    value: float
    low: float
    high: float


class Row(NamedTuple):
    """One arm in a table."""

    arm: str
    rate: float
    metric: Estimate
    difference: Estimate | None = None  # from the control, by seeds; None for the control itself
    p: float | None = None  # of the tested arms
    corrected: float | None = None


class Standing(NamedTuple):
    """How an arm stands to the control."""

    word: str  # "better", "worse" or "no difference shown"
    row: Row


Table = list[Row]


def estimate(values: np.ndarray) -> Estimate:
    """Of values by seeds, [n]."""
    return Estimate(float(np.mean(values)), *interval(values))


def at_rate(experiment: Experiment, outcomes: Outcomes, rate: float) -> Table:
    """The arms that have this learning rate; differences where the control has it too."""
    chosen = {
        arm: experiment.rates(arm).index(rate)
        for arm in experiment.arms
        if rate in experiment.rates(arm)
    }
    return _table(experiment, outcomes, chosen, experiment.tested)


def at_best(experiment: Experiment, outcomes: Outcomes) -> Table:
    """Every arm at the learning rate with its best mean over the tuning seeds, or over all seeds.

    Without tuning seeds the test of an arm with the control's rates makes the choice again in every
    exchange, so that its p is right; the means themselves are those of the best of L and so a
    little too good, in every arm alike. Only `testable` arms have a p.
    """
    chosen = {arm: best_rate(experiment, outcomes, arm) for arm in experiment.arms}
    again = not experiment.tuning_seeds
    return _table(experiment, outcomes, chosen, testable(experiment), repeats_choice=again)


def testable(experiment: Experiment) -> tuple[str, ...]:
    """The tested arms whose p at the best rates is right.

    That is where rates are chosen on other seeds, where the arm has the control's rates, in any
    order, or where neither has a choice. Otherwise the best of more rates on the very seeds that
    are judged would look like a better arm.
    """
    theirs = set(experiment.rates(experiment.control))
    return tuple(
        arm
        for arm in experiment.tested
        if experiment.tuning_seeds
        or set(experiment.rates(arm)) == theirs
        or len(experiment.rates(arm)) == len(theirs) == 1
    )


def best_rate(experiment: Experiment, outcomes: Outcomes, arm: str) -> int:
    """The place of an arm's best learning rate among its rates."""
    return choose(_sign(experiment) * tuning_values(experiment, outcomes, arm))


def standing(experiment: Experiment, row: Row) -> Standing:
    """What may be said of a tested arm, in the same words whichever way it went.

    "better" or "worse" only where the corrected p is at most the level and the interval of the
    difference does not hold 0.
    """
    assert row.difference is not None
    assert row.corrected is not None
    value, low, high = row.difference
    shown = row.corrected <= experiment.level and (low > 0 or high < 0)
    if not shown:
        return Standing("no difference shown", row)
    return Standing("better" if value * _sign(experiment) > 0 else "worse", row)


def detectable(experiment: Experiment) -> tuple[float, float, int]:
    """The smallest p there can be, the same corrected, and the seeds it takes to get below the
    level."""
    comparisons = len(testable(experiment))
    least = smallest_p(len(experiment.seeds))
    needed = seeds_needed(comparisons, experiment.level)
    return least, min(1.0, comparisons * least), needed


def _table(
    experiment: Experiment,
    outcomes: Outcomes,
    chosen: Mapping[str, int],
    tested: Sequence[str],
    repeats_choice: bool = False,
) -> Table:
    """Rows of the arms in `chosen`, each at its place among its rates; p of those `tested`."""
    values = {arm: values_of(experiment, outcomes, arm, experiment.metric) for arm in chosen}
    control = experiment.control
    rows, p = [], {}
    for arm, place in chosen.items():
        rate = experiment.rates(arm)[place]
        row = Row(arm, rate, estimate(values[arm][place]))
        if arm != control and control in chosen:
            difference = values[arm][place] - values[control][chosen[control]]
            row = row._replace(difference=estimate(difference))
            if arm in tested:
                order = np.argsort(experiment.rates(arm)), np.argsort(experiment.rates(control))
                pair = (values[arm][order[0]], values[control][order[1]])
                p[arm] = _p(difference, pair if repeats_choice else None, _sign(experiment))
        rows.append(row)
    corrected = holm(p)
    return [row._replace(p=p.get(row.arm), corrected=corrected.get(row.arm)) for row in rows]


def _p(difference: np.ndarray, pair: Sequence[np.ndarray] | None, sign: float) -> float:
    if pair is None:
        return sign_flip_test(difference)
    arm, control = pair
    return exchange_test(sign * arm, sign * control)


def _sign(experiment: Experiment) -> float:
    return 1.0 if experiment.better == "higher" else -1.0
