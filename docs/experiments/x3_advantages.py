"""X3: six advantages by three learning rates by nine seeds, with groups of 2 and of 4.

python -m docs.experiments.x3_advantages

Does the 324 runs of configs/experiments/x3_g2.toml and x3_g4.toml in runs/, about half an hour
on two cores; finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Group size -> its comparison. Makes the base, and takes the runs, that are missing."""
    if not (BASE / "config.json").exists():
        make_base.make_base(BASE)
    found = {}
    for size in SIZES:
        compare.compare(f"x3_g{size}")
        found[size] = read(experiments.load(f"x3_g{size}"))
    return found


def read(experiment: Experiment) -> Compared:
    """A comparison whose runs are all finished."""
    return Compared(experiment, results.read_all(experiments.make_cases(experiment)))


def result(found: Mapping[int, Compared]) -> Result:
    """What the page reports about them."""
    parts: dict[str, str] = {}
    checks: list[Check] = []
    for size, one in found.items():
        by_title = {section.title: section for section in report.sections(*one)}
        answer, seen, best = list(by_title.values())[:3]
        passes, groups = by_title["pass@k before and after"], by_title["Groups in training"]
        parts |= {
            f"answer_{size}": "\n\n".join([*answer.text, *seen.text]),
            f"best_{size}": _table(best),
            f"rates_{size}": rates_table(one),
            f"passes_{size}": _table(passes),
            f"groups_{size}": _table(groups),
            f"ends_{size}": ends_table(one),
        }
        checks += checks_of(size, one)
    parts["cost"] = cost(found)
    return Result(parts, checks, lambda: figure(found))


def checks_of(size: int, one: Compared) -> list[Check]:
    """That everything is there. Which arm is better is not a criterion."""
    experiment, outcomes = one
    runs = [outcome for by_seed in outcomes.values() for outcome in by_seed.values()]
    wanted = len(experiments.make_cases(experiment))
    finite = all(np.isfinite(run.numbers[experiment.metric]) for run in runs)
    (sign,) = [row for row in results.at_best(*one) if row.arm == "sign"]
    assert sign.difference is not None
    said = f"{sign.difference.value:+.4f}, corrected p = {sign.corrected:.2g}"
    interval = np.isfinite([*sign.difference, sign.corrected or np.nan]).all()
    base = {run.case.seed: run.numbers["base/pass@1"] for run in runs}
    same = all(run.numbers["base/pass@1"] == base[run.case.seed] for run in runs)
    return [
        Check(f"G = {size}: every run has a result", f"{len(runs)} of {wanted}",
              finite and len(runs) == wanted),
        Check(f"G = {size}: arms start from the same base, on the same samples, in each seed",
              f"{len(base)} seeds", same),
        Check(f"G = {size}: sign minus grpo has an interval and p", said, bool(interval)),
    ]  # fmt: skip


def rates_table(one: Compared) -> str:
    """The metric of every arm at every rate, with its interval."""
    experiment, outcomes = one
    rows = []
    for arm in experiment.arms:
        values = results.arm_values(experiment, outcomes, arm, experiment.metric)
        cells = [results.estimate(row, experiment.metric) for row in values]
        rows.append([arm, *(f"{c.value:.3f} ({c.low:.3f} to {c.high:.3f})" for c in cells)])
    head = [experiment.metric, *(f"rate {rate:g}" for rate in experiment.learning_rates)]
    return common.table(head, rows)


def ends_table(one: Compared) -> str:
    """Greedy accuracy and entropy of every arm at its best rate, means over seeds."""
    rows = []
    for arm, runs in report.best_runs(*one).items():
        before, after = (
            np.mean([run.numbers[f"{when}/accuracy"] for run in runs]) for when in ("base", "eval")
        )
        # Of samples in live groups: a step without any has none.
        entropy = np.array([run.curves["entropy"] for run in runs])
        tenth = max(1, entropy.shape[1] // 10)
        first, last = np.nanmean(entropy[:, :tenth]), np.nanmean(entropy[:, -tenth:])
        rows.append([arm, f"{before:.3f} → {after:.3f}", f"{first:.3f}, {last:.3f}"])
    head = ["arm", "greedy accuracy, base → trained", "entropy, first and last tenth"]
    return common.table(head, rows)


def cost(found: Mapping[int, Compared]) -> str:
    """What all of it took."""
    runs = [run for one in found.values() for by in one.outcomes.values() for run in by.values()]
    tokens, seconds = (
        sum(run.numbers[name] for run in runs) for name in ("tokens", "time/seconds")
    )
    return (
        f"{len(runs)} runs, {tokens / 1e6:.1f} million tokens sampled in training, "
        f"{seconds / 60:.0f} minutes of training without evaluation."
    )


def figure(found: Mapping[int, Compared]) -> Figure:
    """A row per group size: rates, differences, reward, groups that all fail."""
    drawing = Figure(figsize=(17, 3.6 * len(found)), layout="constrained")
    grid = drawing.subplots(len(found), 4, squeeze=False)
    for axes, (size, one) in zip(grid, found.items(), strict=True):
        best = report.best_runs(*one)
        report.by_rate(axes[0], *one)
        report.forest(axes[1], *one)
        report.curves(axes[2], best, "reward")
        report.curves(axes[3], best, "groups/all_fail")
        metric, control = one.experiment.metric, one.experiment.control
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
