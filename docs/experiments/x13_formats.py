"""X13: which of three formats a policy keeps, trained and in two flows of its shares.

python -m docs.experiments.x13_formats

Does the 21 runs of x13_formats.toml in runs/, about ten minutes on two cores; finished runs are not
repeated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common
from docs.experiments.common import Check, Result
from docs.experiments.three_formats import FORMATS, TASK
from docs.experiments.trained import Compared, complete, cost, section_table, take
from jaxgrpo.evaluation.diversity import COLLAPSED, SHARE, find_collapse
from jaxgrpo.experiments.compare.results import Outcome
from jaxgrpo.training.records.reading import read_metrics

NAME = "x13_formats"
FILE, BASE = common.FOLDER / f"{NAME}.toml", Path("runs/formats/base")
NAMES = tuple(FORMATS)
START = np.array([form.share for form in FORMATS.values()])
SUCCESS = np.array([form.success for form in FORMATS.values()])
SEEDS, SIZE = 100, 8  # of the simulation; groups as in the runs
CASES = tuple(itertools.product((1, 32), (1.0, 10.0)))  # groups of a step, rate of the logits
LONGEST = 4000  # steps


def natural_flow(share: np.ndarray) -> np.ndarray:
    """s_f D_f with D_f = p_f - sum_j s_j p_j: the replicator, of the natural gradient; [..., F]."""
    return share * _lead(share)


def softmax_flow(share: np.ndarray) -> np.ndarray:
    """s_f (s_f D_f - sum_j s_j^2 D_j): of the plain gradient with respect to logits; [..., F]."""
    pull = share * _lead(share)
    return share * (pull - (share * pull).sum(-1, keepdims=True))


def _lead(share: np.ndarray) -> np.ndarray:
    return SUCCESS - (share * SUCCESS).sum(-1, keepdims=True)


def follow(flow, steps: int, rate: float) -> np.ndarray:
    """Shares over Euler steps of a flow, [steps + 1, F]."""
    shares = [START]
    for _ in range(steps):
        share = np.clip(shares[-1] + rate * flow(shares[-1]), 0, None)
        shares.append(share / share.sum())
    return np.array(shares)


def simulate(groups: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(winner, step of its collapse) of SEEDS policies of three logits under sampled gradients.

    Each step draws `groups` groups of SIZE, with A = r - mean of the group, and adds rate times the
    mean of A grad log s to the logits. The winner is -1 where LONGEST steps leave several formats.
    """
    random = np.random.default_rng(0)
    logits = np.tile(np.log(START), (SEEDS, 1))
    winner, step = np.full(SEEDS, -1), np.full(SEEDS, LONGEST)
    for number in range(1, LONGEST + 1):
        share = np.exp(logits - logits.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        ended = (share.max(1) >= COLLAPSED) & (winner < 0)
        winner[ended], step[ended] = share.argmax(1)[ended], number - 1
        if (winner >= 0).all():
            break
        uniform = random.random((SEEDS, groups * SIZE, 1))
        drawn = (uniform > share.cumsum(1)[:, None, :-1]).sum(-1)
        reward = (random.random(drawn.shape) < SUCCESS[drawn]).reshape(SEEDS, groups, SIZE)
        advantage = (reward - reward.mean(-1, keepdims=True)).reshape(drawn.shape)
        onehot = drawn[..., None] == np.arange(len(NAMES))
        # The advantages of a group add up to 0: the mean of grad log s over it drops out.
        logits += rate * (advantage[..., None] * onehot).mean(1)
    return winner, step


def simulated_rows() -> list[list[object]]:
    rows = []
    for groups, rate in CASES:
        winner, step = simulate(groups, rate)
        won = Counter(winner.tolist())
        median = int(np.median(step[winner >= 0])) if (winner >= 0).any() else "–"
        rows.append(
            [groups, f"{rate:g}", *(won[place] for place in range(len(NAMES))), won[-1], median]
        )
    return rows


def shares(run: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """(steps, shares [E, F]) of the evaluations of a run."""
    lines = [line for line in read_metrics(run.case.path) if SHARE + NAMES[0] in line]
    steps = np.array([line["step"] for line in lines])
    return steps, np.array([[line[SHARE + name] for name in NAMES] for line in lines])


def runs_at(comparison: Compared, arm: str) -> list[Outcome]:
    """The runs of an arm, which has a single rate."""
    (rate,) = comparison.experiment.rates(arm)
    return list(comparison.outcomes[arm, rate].values())


def collapse_steps(comparison: Compared, arm: str) -> list[int]:
    """Of the runs of an arm that have collapsed."""
    ends = (find_collapse(read_metrics(run.case.path)) for run in runs_at(comparison, arm))
    return [end["step"] for end in ends if end]


def collapse_rows(comparison: Compared) -> list[list[object]]:
    rows = []
    for arm in comparison.experiment.arms:
        largest = Counter(int(shares(run)[1][-1].argmax()) for run in runs_at(comparison, arm))
        steps = collapse_steps(comparison, arm)
        median = int(np.median(steps)) if steps else "–"
        rows.append([arm, *(largest[place] for place in range(len(NAMES))), len(steps), median])
    return rows


def checks(comparison: Compared) -> list[Check]:
    ends = [len(collapse_steps(comparison, arm)) for arm in comparison.experiment.arms]
    flows = [follow(flow, LONGEST, 1.0)[-1] for flow in (natural_flow, softmax_flow)]
    best = SUCCESS.argmax()
    return [
        complete(comparison),
        Check("both exact flows end at the most accurate format",
              ", ".join(f"{end[best]:.3f}" for end in flows),
              all(end[best] > COLLAPSED for end in flows)),
        Check("runs that collapse: no more with a penalty than without",
              ", ".join(map(str, ends)), ends[0] >= ends[1] >= ends[2]),
    ]  # fmt: skip


def figure(comparison: Compared) -> Figure:
    """Shares over steps by arm, and the two flows."""
    arms = list(comparison.experiment.arms)
    drawing, axes = common.panels(len(arms) + 1, 13, 3.2)
    for panel, arm in zip(axes, arms, strict=False):
        for run in runs_at(comparison, arm):
            steps, values = shares(run)
            for place, name in enumerate(NAMES):
                label = name if run.case.seed == comparison.experiment.seeds[0] else None
                panel.plot(steps, values[:, place], color=f"C{place}", alpha=0.5, label=label)
        panel.set(title=f"shares, {arm}", xlabel="step", ylim=(-0.02, 1.02))
    axes[0].legend(fontsize=8)
    for flow, style in ((natural_flow, "-"), (softmax_flow, "--")):
        for place, values in enumerate(follow(flow, 150, 1.0).T):
            axes[-1].plot(values, style, color=f"C{place}")
    axes[-1].set(title="flows: natural, plain (dashed)", xlabel="time", ylim=(-0.02, 1.02))
    return drawing


def result(comparison: Compared) -> Result:
    measured = [f"format/{name}" for name in NAMES]
    wins = [f"{name} wins" for name in NAMES]
    parts = {
        "answer": "\n\n".join(comparison.section(comparison.experiment.metric).text),
        "numbers": comparison.table((*measured, "format_entropy", "pass@1")),
        "collapse": common.table(
            ["arm", *(f"{name} is largest" for name in NAMES), "runs that collapse", "median step"],
            collapse_rows(comparison),
        ),
        "distance": section_table(comparison.section("Gain and distance")),
        "simulated": common.table(
            ["groups a step", "rate", *wins, "several are left", "median step"], simulated_rows()
        ),
        "cost": cost([comparison]),
    }
    return Result(parts, checks(comparison), lambda: figure(comparison))


def run() -> Result:
    return result(take(FILE, TASK, BASE))


if __name__ == "__main__":
    common.command(NAME, run)
