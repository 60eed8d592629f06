"""What experiments that train have in common: a base, a comparison, and tables of its runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from docs.experiments import common
from docs.experiments.common import Check
from jaxgrpo.cli import make_base
from jaxgrpo.data.tasks import Task
from jaxgrpo.experiments import compare
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import report, results
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcome, Outcomes
from jaxgrpo.experiments.sections import Section


class Compared(NamedTuple):
    """One finished comparison."""

    experiment: Experiment
    outcomes: Outcomes

    @property
    def runs(self) -> list[Outcome]:
        return [run for by_seed in self.outcomes.values() for run in by_seed.values()]

    def values(self, arm: str, metric: str) -> np.ndarray:
        """A number of results.csv at the arm's first rate, by seeds, [n]."""
        return results.arm_values(*self, arm, metric)[0]

    def mean(self, arm: str, metric: str) -> float:
        return float(self.values(arm, metric).mean())

    def cell(self, arm: str, metric: str) -> str:
        """The mean over seeds with its 95% interval."""
        value, low, high = results.estimate(self.values(arm, metric), metric)
        return f"{value:.3f} ({low:.3f} to {high:.3f})"

    def table(self, metrics: Sequence[str], training: Sequence[str] = ()) -> str:
        """Numbers of the evaluations of the base and of every arm, and of its training."""
        arms = list(self.experiment.arms)
        base = [f"{self.mean(arms[0], f'base/{metric}'):.3f}" for metric in metrics]
        names = [*(f"eval/{name}" for name in metrics), *training]
        rows = [[arm, *(self.cell(arm, name) for name in names)] for arm in arms]
        head = ["arm", *metrics, *(f"{name} in training" for name in training)]
        return common.table(head, [["base", *base, *["–"] * len(training)], *rows])

    def section(self, title: str) -> Section:
        """A section of the comparison's report."""
        return next(part for part in report.sections(*self) if part.title.startswith(title))


def take(file: str | Path, task: str | Task, base: Path) -> Compared:
    """A comparison; makes the task's base, and takes the runs, that are missing.

    Args:
      file: of the comparison, or the name of a shipped one.
      task: a built-in one's name, or a task whose rows go into files beside the base.
    """
    prepare(task, base)
    compare.compare(file)
    return read(experiments.load(file))


def prepare(task: str | Task, base: Path, steps: int | None = None) -> None:
    """Makes the base, and files SPLIT.jsonl beside it of a task that is not built in."""
    if not (base / "config.json").exists():
        make_base.make_base(base, task, steps=steps)
    if isinstance(task, Task):
        write_rows(task, base.parent)


def write_rows(task: Task, folder: Path) -> None:
    """SPLIT.jsonl for each split of a task."""
    for split, count in task.splits.items():
        lines = [json.dumps(row) for row in task.rows(split, count, 0)]
        (folder / f"{split}.jsonl").write_text("\n".join([*lines, ""]))


def read(experiment: Experiment) -> Compared:
    """A comparison whose runs are all finished."""
    return Compared(experiment, results.read_all(experiments.make_cases(experiment)))


def complete(comparison: Compared) -> Check:
    """That every run has a result."""
    experiment, runs = comparison.experiment, comparison.runs
    finite = all(np.isfinite(run.numbers[experiment.metric]) for run in runs)
    case_count = experiment.number_of_runs
    measured = f"{len(runs)} of {case_count}"
    return Check("every run has a result", measured, finite and len(runs) == case_count)


def section_table(section: Section) -> str:
    head, *rows = section.rows
    return common.table(head, rows)


class Totals(NamedTuple):
    """What the runs of several comparisons took."""

    runs: int
    tokens: float  # sampled in training
    minutes: float  # of training, without evaluation


def total_cost(comparisons: Iterable[Compared]) -> Totals:
    """Summed over all finished runs."""
    runs = [run for comparison in comparisons for run in comparison.runs]
    tokens, seconds = (
        sum(run.numbers[name] for run in runs) for name in ("tokens", "time/seconds")
    )
    return Totals(len(runs), tokens, seconds / 60)


def cost(comparisons: Iterable[Compared]) -> str:
    """What all of it took."""
    runs, tokens, minutes = total_cost(comparisons)
    return (
        f"{runs} runs, {tokens / 1e6:.1f} million tokens sampled in training, "
        f"{minutes:.0f} minutes of training without evaluation."
    )
