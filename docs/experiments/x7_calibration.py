"""X7: a reward for calibration beside one for the answer alone, where the chance is known.

python -m docs.experiments.x7_calibration

Does the 14 runs of configs/experiments/x7_calibration.toml in runs/, under ten minutes on two
cores; finished runs are not repeated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result
from docs.experiments.trained import Compared, complete, cost, take
from jaxgrpo.data import tasks
from jaxgrpo.experiments.compare import report

NAME = "x7_calibration"
TASK, BASE = "hidden", Path("runs/hidden-base")
NUMBERS = ("accuracy", "pass@1", "ece", "brier", "auroc", "confidence/mean")
LEVELS = tuple(f"accuracy/level_{level}" for level in (1, 2, 3))


def best_possible() -> dict[str, float]:
    """What a model has that adds, guesses the likeliest digits and states its chance.

        accuracy = mean p,   Brier score = mean p (1 - p)

    AUROC from how often each p comes, and is right. Over the rows of the held-out split.
    """
    chance = np.array([row["chance"] for row in tasks.load("task:hidden:test")])
    right, wrong = chance / chance.sum(), (1 - chance) / (1 - chance).sum()
    above = (chance[:, None] > chance) + (chance[:, None] == chance) / 2
    accuracy, brier = float(chance.mean()), float((chance * (1 - chance)).mean())
    return {"pass@1": accuracy, "brier": brier, "auroc": float(right @ above @ wrong)}


def checks(comparison: Compared) -> list[Check]:
    rlcr, plain = (
        {name: comparison.mean(arm, f"eval/{name}") for name in NUMBERS}
        for arm in ("rlcr", "dr_grpo")
    )
    gap = rlcr["pass@1"] - plain["pass@1"]
    lowest = best_possible()["brier"]
    return [
        complete(comparison),
        Check("rlcr: error of calibration (ECE) below .05", f"{rlcr['ece']:.3f}",
              rlcr["ece"] < 0.05),
        Check("rlcr: AUROC above .7", f"{rlcr['auroc']:.3f}", rlcr["auroc"] > 0.7),
        Check("rlcr: Brier score within .03 of the lowest possible",
              f"{rlcr['brier']:.3f}, {lowest:.3f}", rlcr["brier"] < lowest + 0.03),
        Check("dr_grpo on the answer: ECE above .25", f"{plain['ece']:.3f}", plain["ece"] > 0.25),
        Check("pass@1 of the two within .02", f"{gap:+.3f}", abs(gap) < 0.02),
    ]  # fmt: skip


def figure(comparison: Compared) -> Figure:
    """Error of calibration, Brier score and AUROC by arms and seeds; the reward in training."""
    drawing, (*bars, curve) = common.panels(4, 13, 3.2)
    arms = list(comparison.experiment.arms)
    for axes, name in zip(bars, ("ece", "brier", "auroc"), strict=True):
        axes.axhline(comparison.mean(arms[0], f"base/{name}"), color="k", ls=":", label="base")
        for place, arm in enumerate(arms):
            values = comparison.values(arm, f"eval/{name}")
            colour = report.colour(place)
            axes.plot(np.full(len(values), place), values, "o", color=colour, alpha=0.4, ms=4)
            axes.plot(place, values.mean(), "_", color=colour, ms=24)
        axes.set_xticks(range(len(arms)), arms)
        axes.set(title=name, xlim=(-0.6, len(arms) - 0.4), ylim=(0, None))
    bars[0].legend(fontsize=8)
    report.curves(curve, report.best_runs(*comparison), "entropy_estimated")
    curve.set(title="entropy, nats per token", xlabel="step")
    curve.legend(fontsize=8)
    return drawing


def result(comparison: Compared) -> Result:
    best = [[name, value] for name, value in best_possible().items()]
    answer = comparison.section("eval/ece")
    parts = {
        "answer": "\n\n".join(answer.text),
        "numbers": comparison.table(NUMBERS),
        "levels": comparison.table(LEVELS),
        "best": common.table(["on the same rows", "best possible"], best),
        "cost": cost([comparison]),
    }
    return Result(parts, checks(comparison), lambda: figure(comparison))


def run() -> Result:
    return result(take(NAME, TASK, BASE))


if __name__ == "__main__":
    common.command(NAME, run)
