"""Which arm differs from the control, by how much, and what could be seen at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxgrpo.experiments.compare import statistics
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcomes, tuning_values, values_of


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
    return Estimate(float(np.mean(values)), *statistics.interval(values))


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
    return statistics.choose(_sign(experiment) * tuning_values(experiment, outcomes, arm))


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
    least = statistics.smallest_p(len(experiment.seeds))
    needed = statistics.seeds_needed(comparisons, experiment.level)
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
    corrected = statistics.holm(p)
    return [row._replace(p=p.get(row.arm), corrected=corrected.get(row.arm)) for row in rows]


def _p(difference: np.ndarray, pair: Sequence[np.ndarray] | None, sign: float) -> float:
    if pair is None:
        return statistics.sign_flip_test(difference)
    arm, control = pair
    return statistics.exchange_test(sign * arm, sign * control)


def _sign(experiment: Experiment) -> float:
    return 1.0 if experiment.better == "higher" else -1.0
