"""A comparison as numbers: what the tables of `report` show, and what `compare --json` prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrpo.evaluation.intervals import finite_mean
from jaxgrpo.experiments.compare import results
from jaxgrpo.experiments.compare.experiment import Case, Experiment, differences
from jaxgrpo.experiments.compare.results import Estimate, Outcome, Outcomes, Row, Table

GROUPS = ("groups/all_fail", "groups/all_pass", "groups/mixed", "live_groups")
"""Shares of groups that are shown at the start and at the end of training."""

DISTANCE = "eval/kl_to_base"
"""The metric of how far a policy has gone from the base."""

RunsByArm = Mapping[str, Sequence[Outcome]]
"""arm -> its runs at its best rate, of the seeds that count"""


def describe_plan(
    experiment: Experiment, cases: Sequence[Case], finished: Collection[Path]
) -> dict[str, Any]:
    """What will be run, in what the arms differ, and which differences the seeds can show.

    Args:
      finished: the folders of the finished runs.
    """
    names, tested = ("p", "corrected_p", "seeds"), results.testable(experiment)
    smallest = dict(zip(names, results.detectable(experiment), strict=True))
    return {
        "dir": experiment.dir,
        "runs": experiment.number_of_runs,
        "finished": len(finished),
        "metric": experiment.metric,
        "better": experiment.better,
        "control": experiment.control,
        "learning_rates": {arm: experiment.rates(arm) for arm in experiment.arms},
        "seeds": experiment.seeds,
        "tuning_seeds": experiment.tuning_seeds,
        "tested": tested,
        "smallest": smallest | {"level": experiment.level} if tested else None,
        "differences": {
            key: {arm: None if text == "–" else json.loads(text) for arm, text in values.items()}
            for key, values in differences(cases).items()
        },
    }


def describe_result(
    experiment: Experiment, outcomes: Outcomes, runs_by_arm: RunsByArm
) -> dict[str, Any]:
    """What the finished runs say."""
    rates = sorted({rate for _, rate in outcomes})
    at_every_rate = experiment.judge_rates == "all"
    tables = {rate: results.at_rate(experiment, outcomes, rate) for rate in rates if at_every_rate}
    return {
        "best": _rows(experiment, results.at_best(experiment, outcomes)),
        "tuning": tuning(experiment, outcomes),
        "by_learning_rate": [row for table in tables.values() for row in _rows(experiment, table)],
        "mixtures": results.mixtures(outcomes),
        "pass_at": passes(runs_by_arm, experiment.level),
        "groups": groups(runs_by_arm),
        "warnings": warnings(outcomes),
        "distance": distances(experiment, runs_by_arm),
        "cost": costs(runs_by_arm),
    }


def tuning(experiment: Experiment, outcomes: Outcomes) -> dict[str, dict[float, float]]:
    """arm -> learning rate -> mean of the metric over the tuning seeds; {} without such seeds."""
    seeds, metric = experiment.tuning_seeds, experiment.metric
    means = {}
    for arm in experiment.arms if seeds else ():
        values = results.arm_values(experiment, outcomes, arm, metric, seeds)
        means[arm] = dict(zip(experiment.rates(arm), values.mean(1).tolist(), strict=True))
    return means


def passes(runs_by_arm: RunsByArm, level: float) -> dict[str, dict[str, Any]]:
    """arm -> pass@1, pass@2, ... of the base and the trained model, means over seeds, and the
    smallest k from which the trained model is shown at a level to be below the base (None: it is
    not)."""
    samples = min(len(run.base_pass) for runs in runs_by_arm.values() for run in runs)
    numbers = {}
    for arm, runs in runs_by_arm.items():
        base = np.array([run.base_pass[:samples] for run in runs])
        trained = np.array([run.trained_pass[:samples] for run in runs])
        numbers[arm] = {
            "base": base.mean(0),
            "trained": trained.mean(0),
            "below_the_base_from": results.crossing(base, trained, level),
        }
    return numbers


def groups(runs_by_arm: RunsByArm) -> dict[str, dict[str, dict[str, float]]]:
    """arm -> share of groups -> its means over the first and the last tenth of the steps; NaN where
    none of these steps has it, as where no sample could be scored."""
    numbers = {}
    for arm, runs in runs_by_arm.items():
        curves = {name: np.array([run.curves[name] for run in runs]) for name in GROUPS}
        part = max(1, len(runs[0].curves[GROUPS[0]]) // 10)
        numbers[arm] = {
            name: {"first": finite_mean(shares[:, :part]), "last": finite_mean(shares[:, -part:])}
            for name, shares in curves.items()
        }
    return numbers


def warnings(outcomes: Outcomes) -> list[dict[str, Any]]:
    """In how many runs of each arm and rate each warning came."""
    rows = []
    for (arm, rate), by_seed in outcomes.items():
        counts = Counter(name for run in by_seed.values() for name, n in run.warnings.items() if n)
        place = {"arm": arm, "learning_rate": rate}
        for name in sorted(counts):
            rows.append({**place, "warning": name, "in_runs": counts[name], "runs": len(by_seed)})
    return rows


def distances(experiment: Experiment, runs_by_arm: RunsByArm) -> dict[str, np.ndarray]:
    """arm -> (KL(policy || base) of a completion in nats, gain of the metric from the base to the
    trained model, above 0 if it is better) by runs, [2, n]; {} unless all runs have both, and for
    metrics of training."""
    if not experiment.metric.startswith("eval/"):
        return {}
    names = DISTANCE, experiment.metric, experiment.metric.replace("eval/", "base/", 1)
    points = {}
    for arm, runs in runs_by_arm.items():
        rows = np.array([[run.numbers.get(name, np.nan) for name in names] for run in runs]).T
        points[arm] = np.array([rows[0], experiment.direction * (rows[1] - rows[2])])
    return points if np.isfinite([*points.values()]).all() else {}


def costs(runs_by_arm: RunsByArm) -> dict[str, dict[str, float]]:
    """arm -> tokens sampled and seconds of training of a run, means over seeds."""
    return {
        arm: {
            "tokens": float(np.mean([run.numbers["tokens"] for run in runs])),
            "seconds": float(np.mean([run.numbers["time/seconds"] for run in runs])),
        }
        for arm, runs in runs_by_arm.items()
    }


def _rows(experiment: Experiment, table: Table) -> list[dict[str, Any]]:
    return [_row(experiment, row) for row in table]


def _row(experiment: Experiment, row: Row) -> dict[str, Any]:
    tested = row.difference is not None and row.corrected is not None
    return {
        "arm": row.arm,
        "learning_rate": row.rate,
        "estimate": row.metric._asdict(),
        "minus_control": _estimate(row.difference),
        "p": row.p,
        "corrected_p": row.corrected,
        "standing": results.standing(experiment, row) if tested else None,
    }


def _estimate(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate._asdict()
