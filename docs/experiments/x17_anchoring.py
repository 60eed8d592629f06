"""X17: how far a policy goes from its base for what it gains, by penalty and beta.

python -m docs.experiments.x17_anchoring

Does the 45 runs of x17_anchoring.toml in runs/, about ten minutes on two cores; finished runs are
not repeated.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result
from docs.experiments.three_formats import TASK
from docs.experiments.trained import Compared, complete, cost, section_table, take
from jaxgrpo.experiments.compare import numbers, report

NAME = "x17_anchoring"
FILE, BASE = common.FOLDER / f"{NAME}.toml", Path("runs/formats/base")
FAMILIES = {
    "k2": ("none", "k2_001", "k2_01", "k2_03"),
    "forward_kl_k3": ("none", "forward_001", "forward_01", "forward_03"),
    "k1_in_reward": ("none", "return_01", "return_03"),
}
"""Penalty -> arms by rising beta."""


def checks(comparison: Compared) -> list[Check]:
    criteria = [complete(comparison)]
    for name, arms in FAMILIES.items():
        distances = [comparison.mean(arm, numbers.DISTANCE) for arm in arms]
        falls = all(left > right for left, right in itertools.pairwise(distances))
        measured = ", ".join(f"{distance:.3f}" for distance in distances)
        criteria.append(Check(f"{name}: a larger beta keeps the policy nearer", measured, falls))
    return criteria


def figure(comparison: Compared) -> Figure:
    """Gain by distance, each penalty a line over its betas."""
    drawing, (left, right) = common.panels(2, 11, 3.8)
    points = numbers.distances(comparison.experiment, report.best_runs(*comparison))
    for name, arms in FAMILIES.items():
        means = np.array([points[arm].mean(1) for arm in arms])
        left.plot(*means.T, "o-", ms=4, lw=1, label=name)
    left.set(xlabel="KL from the base, nats per completion", ylabel="gain of pass@1")
    left.set(title="by penalty, smaller betas to the right")
    left.legend(fontsize=8)
    report.distance(right, points)
    right.set(title="by seed")
    right.legend(fontsize=7)
    return drawing


def result(comparison: Compared) -> Result:
    parts = {
        "distance": section_table(comparison.section("Gain and distance")),
        "numbers": comparison.table(("pass@1", "pass@16", "format_entropy")),
        "cost": cost([comparison]),
    }
    return Result(parts, checks(comparison), lambda: figure(comparison))


def run() -> Result:
    return result(take(FILE, TASK, BASE))


if __name__ == "__main__":
    common.command(NAME, run)
