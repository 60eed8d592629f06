"""X5: prompts that are too hard but for a shortcut: what is learnt, and what it does elsewhere.

python -m docs.experiments.x5_shortcut

Does the 54 runs of x5_shortcut.toml in runs/, about ten minutes on two cores; finished runs are not
repeated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result
from docs.experiments.shortcut import TASK
from docs.experiments.trained import Compared, complete, cost, take
from jaxgrpo.experiments.compare import report

NAME = "x5_shortcut"
FILE, BASE = common.FOLDER / f"{NAME}.toml", Path("runs/shortcut/base")
COPIES = "eval/format/copies"
SHARES = {"grpo_0": 0.0, "grpo_1": 0.01, "grpo": 0.03, "grpo_10": 0.1}
"""Arm -> the share of hard rows in which the copy is right."""


def weight(size: int, rate: float) -> float:
    """E sqrt(N (G - N)) / (G p q), N ~ Bin(G, p): what division by the deviation multiplies by."""
    successes = np.arange(size + 1)
    chance = np.array([1.0])
    for _ in range(size):
        chance = np.convolve(chance, (1 - rate, rate))
    terms = chance * np.sqrt(successes * (size - successes))
    return float(terms.sum() / (size * rate * (1 - rate)))


def checks(comparison: Compared) -> list[Check]:
    base = comparison.mean("grpo", "base/format/copies")
    copies = {arm: comparison.mean(arm, COPIES) for arm in comparison.experiment.arms}
    dropped = comparison.mean("grpo", "base/pass@1") - comparison.mean("grpo", "eval/pass@1")
    return [
        complete(comparison),
        Check("without a shortcut that pays, copies stay as they were", f"{copies['grpo_0']:.3f}",
              abs(copies["grpo_0"] - base) < 0.02),
        Check("at a share of .03 more than 30% of easy answers are copies",
              f"{base:.3f} → {copies['grpo']:.3f}", copies["grpo"] > 0.3),
        Check("and easy problems lose more than .25 of pass@1", f"{dropped:.3f}", dropped > 0.25),
        Check("band: copies stay within .02 of the base", f"{copies['band']:.3f}",
              abs(copies["band"] - base) < 0.02),
    ]  # fmt: skip


def figure(comparison: Compared) -> Figure:
    """Copies on easy problems by share and by method, and the reward in training."""
    drawing, (left, middle, right) = common.panels(3, 13, 3.4)
    experiment = comparison.experiment
    best = report.best_runs(*comparison)
    for axes, arms in ((left, list(SHARES)), (middle, [*experiment.arms])):
        for place, arm in enumerate(arms):
            values = comparison.values(arm, COPIES)
            colour = report.colour(list(experiment.arms).index(arm))
            axes.plot(np.full(len(values), place), values, "o", color=colour, alpha=0.4, ms=4)
            axes.plot(place, values.mean(), "_", color=colour, ms=20)
        axes.axhline(comparison.mean(arms[0], "base/format/copies"), color="k", ls=":")
        axes.set(ylim=(-0.02, 1.02), ylabel="share of copies")
    left.set_xticks(range(len(SHARES)), [str(share) for share in SHARES.values()])
    left.set(title="copies on easy problems, grpo", xlabel="share of hard rows where copies pay")
    middle.set_xticks(range(len(experiment.arms)), experiment.arms, rotation=60, fontsize=8)
    middle.set(title="by method; dotted: the base")
    methods = {arm: runs for arm, runs in best.items() if arm == "grpo" or arm not in SHARES}
    report.curves(right, methods, "reward")
    right.set(title="reward in training, share 0.03", xlabel="step")
    right.legend(fontsize=7)
    return drawing


def result(comparison: Compared) -> Result:
    answer = comparison.section(comparison.experiment.metric)
    weights = [
        [size, *(weight(size, rate) / weight(size, 0.5) for rate in (0.02, 0.1))]
        for size in (8, 16, 32, 64)
    ]
    parts = {
        "answer": "\n\n".join(answer.text),
        "numbers": comparison.table(
            ("format/copies", "pass@1", "kl_to_base"), ("reward", "live_groups")
        ),
        "weights": common.table(("G", "p = .02", "p = .1"), weights),
        "cost": cost([comparison]),
    }
    return Result(parts, checks(comparison), lambda: figure(comparison))


def run() -> Result:
    return result(take(FILE, TASK, BASE))


if __name__ == "__main__":
    common.command(NAME, run)
