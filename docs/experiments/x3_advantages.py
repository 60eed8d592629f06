"""X3: six advantages by three learning rates by nine seeds, with groups of 2 and of 4.

python -m docs.experiments.x3_advantages

Does the 324 runs of configs/experiments/x3_g2.toml and x3_g4.toml in runs/, about half an hour
on two cores; finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result
from jaxgrpo.cli import make_base
from jaxgrpo.experiments import compare
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import report, results
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcomes
from jaxgrpo.experiments.sections import Section

NAME = "x3_advantages"
SIZES = (2, 4)
BASE = Path("runs/base")


class Compared(NamedTuple):
    """One finished comparison."""

    experiment: Experiment
    outcomes: Outcomes


def find() -> dict[int, Compared]:
    """Group size -> its comparison."""
    return {size: find_comparison(f"x3_g{size}") for size in SIZES}


def find_comparison(name: str) -> Compared:
    """A shipped comparison. Makes the base, and takes the runs, that are missing."""
    if not (BASE / "config.json").exists():
        make_base.make_base(BASE)
    compare.compare(name)
    return read(experiments.load(name))


def read(experiment: Experiment) -> Compared:
    """A comparison whose runs are all finished."""
    return Compared(experiment, results.read_all(experiments.make_cases(experiment)))


def result(comparisons: Mapping[int, Compared]) -> Result:
    """What the page reports about them."""
    parts: dict[str, str] = {}
    checks: list[Check] = []
    for size, comparison in comparisons.items():
        by_title = {section.title: section for section in report.sections(*comparison)}
        answer, detectable, best = list(by_title.values())[:3]
        passes, groups = by_title["pass@k before and after"], by_title["Groups in training"]
        parts |= {
            f"answer_{size}": "\n\n".join([*answer.text, *detectable.text]),
            f"best_{size}": _table(best),
            f"rates_{size}": rates_table(comparison),
            f"passes_{size}": _table(passes),
            f"groups_{size}": _table(groups),
            f"ends_{size}": ends_table(comparison),
        }
        checks += check_comparison(size, comparison)
    parts["cost"] = cost(comparisons)
    return Result(parts, checks, lambda: figure(comparisons))


def check_comparison(size: int, comparison: Compared) -> list[Check]:
    """That everything is there. Which arm is better is not a criterion."""
    experiment, outcomes = comparison
    runs = [outcome for by_seed in outcomes.values() for outcome in by_seed.values()]
    case_count = len(experiments.make_cases(experiment))
    finite = all(np.isfinite(run.numbers[experiment.metric]) for run in runs)
    (sign,) = [row for row in results.at_best(*comparison) if row.arm == "sign"]
    assert sign.difference is not None
    difference = f"{sign.difference.value:+.4f}, corrected p = {sign.corrected:.2g}"
    interval = np.isfinite([*sign.difference, sign.corrected or np.nan]).all()
    base = {run.case.seed: run.numbers["base/pass@1"] for run in runs}
    same_base = all(run.numbers["base/pass@1"] == base[run.case.seed] for run in runs)
    return [
        Check(f"G = {size}: every run has a result", f"{len(runs)} of {case_count}",
              finite and len(runs) == case_count),
        Check(f"G = {size}: arms start from the same base, on the same samples, in each seed",
              f"{len(base)} seeds", same_base),
        Check(f"G = {size}: sign minus grpo has an interval and p", difference, bool(interval)),
    ]  # fmt: skip


def rates_table(comparison: Compared) -> str:
    """The metric of every arm at every rate, with its interval."""
    experiment, outcomes = comparison
    rows = []
    for arm in experiment.arms:
        values = results.arm_values(experiment, outcomes, arm, experiment.metric)
        cells = [results.estimate(row, experiment.metric) for row in values]
        rows.append([arm, *(f"{c.value:.3f} ({c.low:.3f} to {c.high:.3f})" for c in cells)])
    head = [experiment.metric, *(f"rate {rate:g}" for rate in experiment.learning_rates)]
    return common.table(head, rows)


def ends_table(comparison: Compared) -> str:
    """Greedy accuracy and entropy of every arm at its best rate, means over seeds."""
    rows = []
    for arm, runs in report.best_runs(*comparison).items():
        base_accuracy, trained_accuracy = (
            np.mean([run.numbers[f"{when}/accuracy"] for run in runs]) for when in ("base", "eval")
        )
        # Of samples in live groups: a step without any has none.
        entropy = np.array([run.curves["entropy"] for run in runs])
        tenth = max(1, entropy.shape[1] // 10)
        first, last = np.nanmean(entropy[:, :tenth]), np.nanmean(entropy[:, -tenth:])
        rows.append(
            [arm, f"{base_accuracy:.3f} → {trained_accuracy:.3f}", f"{first:.3f}, {last:.3f}"]
        )
    head = ["arm", "greedy accuracy, base → trained", "entropy, first and last tenth"]
    return common.table(head, rows)


class Totals(NamedTuple):
    """What the runs of several comparisons took."""

    runs: int
    tokens: float  # sampled in training
    minutes: float  # of training, without evaluation


def total_cost(comparisons: Iterable[Compared]) -> Totals:
    """Summed over all finished runs."""
    runs = [
        run
        for comparison in comparisons
        for by_seed in comparison.outcomes.values()
        for run in by_seed.values()
    ]
    tokens, seconds = (
        sum(run.numbers[name] for run in runs) for name in ("tokens", "time/seconds")
    )
    return Totals(len(runs), tokens, seconds / 60)


def cost(comparisons: Mapping[int, Compared]) -> str:
    """What all of it took."""
    runs, tokens, minutes = total_cost(comparisons.values())
    return (
        f"{runs} runs, {tokens / 1e6:.1f} million tokens sampled in training, "
        f"{minutes:.0f} minutes of training without evaluation."
    )


def figure(comparisons: Mapping[int, Compared]) -> Figure:
    """A row per group size: rates, differences, reward, groups that all fail."""
    drawing = Figure(figsize=(17, 3.6 * len(comparisons)), layout="constrained")
    grid = drawing.subplots(len(comparisons), 4, squeeze=False)
    for axes, (size, comparison) in zip(grid, comparisons.items(), strict=True):
        best = report.best_runs(*comparison)
        report.by_rate(axes[0], *comparison)
        report.forest(axes[1], *comparison)
        report.curves(axes[2], best, "reward")
        report.curves(axes[3], best, "groups/all_fail")
        metric, control = comparison.experiment.metric, comparison.experiment.control
        titles = [f"{metric} by learning rate", f"minus {control}, best rates"]
        titles += ["reward in training", "groups that all fail"]
        for each, title in zip(axes, titles, strict=True):
            each.set_title(f"G = {size}: {title}", fontsize=10)
            each.grid(alpha=0.3)
        axes[0].legend(fontsize=7, ncols=2)
    return drawing


def _table(section: Section) -> str:
    head, *rows = section.rows
    return common.table(head, rows)


def run() -> Result:
    return result(find())


if __name__ == "__main__":
    common.command(NAME, run)
