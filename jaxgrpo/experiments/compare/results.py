"""What the finished runs of a comparison say: their numbers, and how far arms differ.

The unit of the statistics is the seed: prompts of one seed share one trained model, so they are no
independent trials of a method. More prompts make each number more exact; only more seeds show
whether a difference comes back.
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.evaluation.intervals import student_interval
from jaxgrpo.experiments.compare.exchanges import (
    TOLERANCE,
    exchange_test,
    holm,
    seeds_needed,
    sign_flip_test,
    sign_flip_tests,
    smallest_p,
)
from jaxgrpo.experiments.compare.experiment import Case, Experiment
from jaxgrpo.training.records import reading
from jaxgrpo.training.records.reading import evaluation_metrics, read_metrics, read_object
from jaxgrpo.update import diagnostics

OVER_STEPS = (
    *("reward", "entropy", "entropy_estimated", "live_groups"),
    *("groups/all_fail", "groups/all_pass", "groups/mixed"),
)
"""Metrics of training that are compared by their curves, and by their means over all steps."""

SHOWN = 8  # runs that a message names
ROUNDING = 1e-6  # evaluations that differ by less differ by rounding
FEW = 5  # with fewer seeds charts show the lowest and the highest instead of an interval

BOUNDS: dict[tuple[float, float], tuple[str, ...]] = {
    (0.0, 1.0): (
        *("accuracy*", "pass@*", "maj@*", "deepconf*", "unscored", "truncated", "flat_groups"),
        *("confidence/*", "brier", "ece", "auroc", "format/*", "format_diversity"),
        *("kl_to_base_clamped", "live_groups", "groups/all_*", "groups/mixed"),
    ),
    (0.0, np.inf): (
        *("kl_to_base", "format_entropy", "distinct_*", "mean_length"),
        *("entropy", "entropy_estimated", "tokens", "time/*"),
    ),
}
"""What metrics cannot leave -> patterns of their names, without "eval/" and "base/". Of rewards it
is not known."""


class Outcome(NamedTuple):
    """One finished run."""

    case: Case
    numbers: dict[str, float]  # its row of results.csv
    curves: dict[str, np.ndarray]  # of OVER_STEPS, one value per step, NaN if it has none
    base_pass: np.ndarray  # [n] pass@1 ... pass@n of the base
    trained_pass: np.ndarray  # [n]
    warnings: dict[str, int]  # what the run warned of, and how often


Outcomes = Mapping[tuple[str, float], Mapping[int, Outcome]]
"""(arm, learning rate) -> seed -> outcome"""


def read_all(cases: Sequence[Case]) -> Outcomes:
    """Every outcome. All runs must be finished."""
    outcomes = {(case.arm, case.rate): dict[int, Outcome]() for case in cases}
    for case in cases:
        outcomes[case.arm, case.rate][case.seed] = read(case)
    return outcomes


def read(case: Case) -> Outcome:
    """The numbers of a run:

    base/NAME, eval/NAME   the evaluations before and after training
    reward, entropy, ...   means over the steps, of OVER_STEPS
    tokens                 sampled in training
    time/seconds           spent in training, without evaluation
    """
    lines = read_metrics(case.path)
    numbers = {
        prefix + name: float(value)
        for prefix, line in (("base/", lines[0]), ("eval/", lines[-1]))
        for name, value in evaluation_metrics(line).items()
        if reading.is_number(value)
    }
    steps = [line for line in lines if "reward" in line]
    curves = {name: _column(steps, name) for name in OVER_STEPS}
    numbers |= {name: float(np.nanmean(c)) for name, c in curves.items() if np.isfinite(c).any()}
    numbers["tokens"] = float(np.nansum(_column(steps, "num_tokens")))
    numbers["time/seconds"] = float(np.nansum(_column(steps, "time/step")))
    base_pass, trained_pass = (_pass_at(case.path, step) for step in (0, case.config.train.steps))
    summary = read_object(case.path / "summary.json", "warnings")
    return Outcome(case, numbers, curves, base_pass, trained_pass, summary["warnings"])


def check_metric(experiment: Experiment, case: Case) -> None:
    """Refuses a metric that a finished run does not have, before the others are taken."""
    outcome = read(case)
    if experiment.metric in read_metrics(case.path)[-1]:
        check_complete(experiment.metric, {(case.arm, case.rate): {case.seed: outcome}})
    elif experiment.metric not in outcome.numbers:
        hint = suggest(experiment.metric, outcome.numbers)
        raise InputError(f"metric = {experiment.metric!r}: no such number; {hint}")


def check_complete(metric: str, outcomes: Outcomes) -> None:
    """Refuses a metric that has no value in some runs, and so cannot be compared."""
    lacking = [
        f"arm {arm}, learning rate {rate:g}, seed {seed}"
        for (arm, rate), by_seed in outcomes.items()
        for seed, outcome in by_seed.items()
        if metric not in outcome.numbers
    ]
    if lacking:
        more = f"\n  and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        raise InputError(
            f"metric = {metric!r}: it has no value (no number in metrics.jsonl) in\n  "
            + "\n  ".join(lacking[:SHOWN])
            + f"{more}\nname another metric, one that results.csv has for every run; finished runs "
            "are kept, no run is taken twice"
        )


def mixtures(outcomes: Outcomes) -> list[str]:
    """Signs that the runs do not have one base and one code, as sentences; [] if there are none.

    All runs of a seed evaluate the same base on the same prompts with the same keys. Runs that name
    the same own files should have the same copies of them.
    """
    runs = [run for by_seed in outcomes.values() for run in by_seed.values()]
    signs = []
    for seed in dict.fromkeys(run.case.seed for run in runs):
        bases = [_base_numbers(run) for run in runs if run.case.seed == seed]
        common = set.intersection(*map(set, bases))
        values = {name: [base[name] for base in bases] for name in sorted(common)}
        names = [
            name
            for name, column in values.items()
            if not np.allclose(column, column[0], rtol=0, atol=ROUNDING)
        ]
        if names:
            signs.append(f"Seed {seed}: runs begin at different bases ({', '.join(names)} differ).")
    copies: dict[tuple[Path, ...], set[frozenset[bytes]]] = {}
    for run in runs:
        copies.setdefault(run.case.config.own_files, set()).add(_read_code(run.case.path))
    for files, states in copies.items():
        if len(states) > 1:
            signs.append(f"Runs with {len(states)} states of {', '.join(map(str, files))}.")
    return signs


def has_other_code(case: Case) -> bool:
    """Whether a run was taken with own files that have changed since."""
    files = case.config.own_files
    present = {file.read_bytes() for file in files if file.is_file()}
    return bool(files) and present != _read_code(case.path)


def arm_values(
    experiment: Experiment,
    outcomes: Outcomes,
    arm: str,
    metric: str,
    seeds: Sequence[int] | None = None,
) -> np.ndarray:
    """A metric of an arm, [L, n]: its learning rates by seeds; None: the seeds that count."""
    seeds = experiment.seeds if seeds is None else seeds
    runs = [outcomes[arm, rate] for rate in experiment.rates(arm)]
    return np.array([[by_seed[seed].numbers[metric] for seed in seeds] for by_seed in runs])


def csv_text(experiment: Experiment, outcomes: Outcomes) -> str:
    """results.csv: arm, lr, seed, metric, value. Tuning seeds are in it too."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["arm", "lr", "seed", "metric", "value"])
    for arm in experiment.arms:
        for rate in experiment.rates(arm):
            for seed, outcome in sorted(outcomes[arm, rate].items()):
                for name in sorted(outcome.numbers):
                    writer.writerow([arm, repr(rate), seed, name, repr(outcome.numbers[name])])
    return text.getvalue()


class Estimate(NamedTuple):
    """A mean over seeds and its 95% interval."""

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


Table = list[Row]


def metric_bounds(metric: str) -> tuple[float, float]:
    """What the metric cannot leave; infinite where that is not known.

    >>> metric_bounds("eval/pass@16"), metric_bounds("entropy"), metric_bounds("reward")
    ((0.0, 1.0), (0.0, inf), (-inf, inf))
    """
    name = metric.removeprefix("eval/").removeprefix("base/")
    for bounds, patterns in BOUNDS.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return bounds
    return -np.inf, np.inf


def estimate(values: np.ndarray, metric: str) -> Estimate:
    """Of a metric by seeds, [n], with Student's interval, cut where the metric's range ends; NaN
    for one seed."""
    low, high = np.clip(student_interval(values), *metric_bounds(metric))
    return Estimate(float(np.mean(values)), float(low), float(high))


def estimate_difference(values: np.ndarray, metric: str) -> Estimate:
    """The same of differences of the metric: none is wider than its range."""
    lowest, highest = metric_bounds(metric)
    low, high = np.clip(student_interval(values), lowest - highest, highest - lowest)
    return Estimate(float(np.mean(values)), float(low), float(high))


def at_rate(experiment: Experiment, outcomes: Outcomes, rate: float) -> Table:
    """The arms that have this learning rate; differences if the control has it too."""
    rates_by_arm = {arm: experiment.rates(arm) for arm in experiment.arms}
    rate_indices = {arm: rates.index(rate) for arm, rates in rates_by_arm.items() if rate in rates}
    return _table(experiment, outcomes, rate_indices, experiment.tested)


def at_best(experiment: Experiment, outcomes: Outcomes) -> Table:
    """Every arm at the learning rate with its best mean over the tuning seeds, or over all seeds.

    Without tuning seeds the test of an arm with the control's rates makes the choice again in every
    exchange, so that its p is right if the arms are alike at every rate (`exchange_test`); the
    means themselves are those of the best of L and so a little too good. Only `testable` arms have
    a p.
    """
    best = best_rates(experiment, outcomes)
    rate_indices = {arm: experiment.rates(arm).index(rate) for arm, rate in best.items()}
    tested, repeats_choice = testable(experiment), not experiment.tuning_seeds
    return _table(experiment, outcomes, rate_indices, tested, repeats_choice)


def best_rates(experiment: Experiment, outcomes: Outcomes) -> dict[str, float]:
    """arm -> its rate with the best mean over the tuning seeds, or over all seeds if none are."""
    seeds = experiment.tuning_seeds or experiment.seeds
    sign, metric = experiment.direction, experiment.metric
    means = {
        arm: sign * arm_values(experiment, outcomes, arm, metric, seeds) for arm in experiment.arms
    }
    return {arm: experiment.rates(arm)[choose(values)] for arm, values in means.items()}


def testable(experiment: Experiment) -> tuple[str, ...]:
    """The tested arms that have a p at the best rates.

    They have one if rates are chosen on other seeds, if the arm has the control's rates, in any
    order, or if neither has a choice. Otherwise the best of more rates on the very seeds that are
    judged would look like a better arm.
    """
    rates = {arm: set(experiment.rates(arm)) for arm in experiment.arms}
    control_rates = rates[experiment.control]
    return tuple(
        arm
        for arm in experiment.tested
        if experiment.tuning_seeds
        or rates[arm] == control_rates
        or len(rates[arm]) == len(control_rates) == 1
    )


def standing(experiment: Experiment, row: Row) -> str:
    """How a tested arm compares with the control: "better", "worse" or "no difference shown".

    "better" or "worse" only if the corrected p is at most the level and the interval of the
    difference does not contain 0.
    """
    assert row.difference is not None
    assert row.corrected is not None
    value, low, high = row.difference
    if row.corrected > experiment.level or not (low > 0 or high < 0):
        return "no difference shown"
    return "better" if value * experiment.direction > 0 else "worse"


def detectable(experiment: Experiment) -> tuple[float, float, int | None]:
    """The smallest p there can be, the same corrected, and the seeds that get below the level; None
    where no number does."""
    comparisons, smallest = len(testable(experiment)), smallest_p(len(experiment.seeds))
    return smallest, min(1.0, comparisons * smallest), seeds_needed(comparisons, experiment.level)


def choose(values: np.ndarray) -> int:
    """The row of the highest mean, [L, n]; the first of equal ones."""
    means = np.asarray(values, float).mean(1)
    return int(np.flatnonzero(means >= means.max() - TOLERANCE * np.abs(means).max())[0])


def crossing(base: np.ndarray, trained: np.ndarray, level: float = 0.05) -> int | None:
    """The smallest k at which the trained model is shown to solve less than the base, or None.

    Shown: the 95% interval over seeds of trained - base lies wholly below 0, and p,
    corrected for all k looked at, is at most `level`. Base and trained are drawn independently, so
    that their means cross by chance, and some interval of many k does too. Takes six seeds.

    Args:
      base, trained: pass@1, pass@2, ... by seeds, [n, K].
    """
    difference = np.asarray(trained, float) - np.asarray(base, float)
    if len(difference) < 2:
        return None
    is_below = student_interval(difference)[1] < -TOLERANCE
    below = np.flatnonzero(is_below & (sign_flip_tests(difference) <= level))
    return int(below[0]) + 1 if len(below) else None


def _table(
    experiment: Experiment,
    outcomes: Outcomes,
    rate_indices: Mapping[str, int],
    tested: Sequence[str],
    repeats_choice: bool = False,
) -> Table:
    """Rows of the arms in `rate_indices`, each at that place of its rates; p of those `tested`."""
    control, sign, metric = experiment.control, experiment.direction, experiment.metric
    rates = {arm: experiment.rates(arm)[place] for arm, place in rate_indices.items()}
    values = {
        arm: np.array([outcomes[arm, rate][seed].numbers[metric] for seed in experiment.seeds])
        for arm, rate in rates.items()
    }
    rows, p = [], {}
    for arm, rate in rates.items():
        row = Row(arm, rate, estimate(values[arm], metric))
        if arm != control and control in rate_indices:
            difference = values[arm] - values[control]
            row = row._replace(difference=estimate_difference(difference, metric))
            if arm in tested and repeats_choice:
                sorted_by_rate = (
                    arm_values(experiment, outcomes, name, metric)[
                        np.argsort(experiment.rates(name))
                    ]
                    for name in (arm, control)
                )
                p[arm] = exchange_test(*(sign * array for array in sorted_by_rate))
            elif arm in tested:
                p[arm] = sign_flip_test(difference)
        rows.append(row)
    corrected = holm(p)
    return [row._replace(p=p.get(row.arm), corrected=corrected.get(row.arm)) for row in rows]


def _read_code(run: Path) -> frozenset[bytes]:
    """The contents of the own files that a run was taken with."""
    files = (run / "code").glob("*")
    return frozenset(file.read_bytes() for file in files if file.is_file())


def _base_numbers(run: Outcome) -> dict[str, float]:
    """Those of its base that depend on nothing in which arms may differ, as their group sizes."""
    names = run.numbers.keys() - {"base/flat_groups"}
    return {name: run.numbers[name] for name in names if name.startswith("base/")}


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A metric of every step; NaN where it is no number."""
    values = (line.get(name) for line in lines)
    return np.array([value if reading.is_number(value) else np.nan for value in values], float)


def _pass_at(run: Path, step: int) -> np.ndarray:
    """Unbiased pass@1 ... pass@n, means over prompts, [n]."""
    file = run / "successes" / f"step_{step}.json"
    counts = read_object(file, "samples", "correct")
    return _pass_table(counts["samples"])[counts["correct"]].mean(0)


@functools.cache
def _pass_table(samples: int) -> np.ndarray:
    """pass@k of a prompt with c successes, [n + 1, n] for c = 0 ... n and k = 1 ... n."""
    correct = jnp.arange(samples + 1)
    totals = jnp.full(correct.shape, samples)
    columns = [diagnostics.pass_at_k(correct, totals, k) for k in range(1, samples + 1)]
    return np.stack([np.asarray(column, float) for column in columns], axis=1)
