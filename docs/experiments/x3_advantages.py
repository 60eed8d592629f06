"""X3: six advantages by three learning rates by nine seeds, with groups of 2 and of 4.

python -m docs.experiments.x3_advantages

Does the 324 runs of configs/experiments/x3_g2.toml and x3_g4.toml in runs/, about half an hour
on two cores; finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result
from docs.experiments.trained import Compared, complete, cost, section_table, take
from jaxgrpo.experiments.compare import report, results

NAME = "x3_advantages"
SIZES = (2, 4)
BASE = Path("runs/base")


def find() -> dict[int, Compared]:
    """Group size -> its comparison. Makes the base, and takes the runs, that are missing."""
    return {size: take(f"x3_g{size}", "arithmetic", BASE) for size in SIZES}


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
            f"best_{size}": section_table(best),
            f"rates_{size}": rates_table(comparison),
            f"passes_{size}": section_table(passes),
            f"groups_{size}": section_table(groups),
            f"ends_{size}": ends_table(comparison),
        }
        checks += check_comparison(size, comparison)
    parts["cost"] = cost(comparisons.values())
    return Result(parts, checks, lambda: figure(comparisons))


def check_comparison(size: int, comparison: Compared) -> list[Check]:
    """That everything is there. Which arm is better is not a criterion."""
    runs = comparison.runs
    every_run = complete(comparison)
    (sign,) = [row for row in results.at_best(*comparison) if row.arm == "sign"]
    assert sign.difference is not None
    difference = f"{sign.difference.value:+.4f}, corrected p = {sign.corrected:.2g}"
    interval = np.isfinite([*sign.difference, sign.corrected or np.nan]).all()
    base = {run.case.seed: run.numbers["base/pass@1"] for run in runs}
    same_base = all(run.numbers["base/pass@1"] == base[run.case.seed] for run in runs)
    return [
        every_run._replace(claim=f"G = {size}: {every_run.claim}"),
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


def run() -> Result:
    return result(find())


if __name__ == "__main__":
    common.command(NAME, run)
