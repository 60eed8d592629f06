"""X6: R3 in place of the exact answer, with three weights, with and without DRO's query filter.

python -m docs.experiments.x6_reflection

Does the 24 runs of x6_reflection.toml in runs/, a quarter of an hour; finished runs are not
repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common, trained
from docs.experiments.common import Check, Result
from jaxgrpo import advantages
from jaxgrpo.config.files import Config
from jaxgrpo.data.tasks.report import report
from jaxgrpo.evaluation.agreement import spearman
from jaxgrpo.experiments import compare
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import results
from jaxgrpo.experiments.compare.results import Outcome, Outcomes
from jaxgrpo.models import sharding
from jaxgrpo.rollout.selection import sequential
from jaxgrpo.training.collecting.source import make_answer_scorer
from jaxgrpo.training.records.reading import read_metrics
from jaxgrpo.training.setup import setup

NAME = "x6_reflection"
FILE, BASE = common.FOLDER / f"{NAME}.toml", Path("runs/x6/base")
TASK = report._replace(splits={"train": 256})  # few rows, so that the filter sees each again
STEPS = 300  # of the base's warm start: it fails most problems
KINDS = ("uniform", "sigma", "var")
TARGET = 0.8  # greedy accuracy
BATCHES = 8  # steps of the base that the rewards are compared on


def correlations(config: Config, batches: int) -> dict[str, np.ndarray]:
    """Weights of R3 -> Spearman's correlation of R3 with the exact answer in each group of the base
    that has both right and wrong samples."""
    run = setup(config)
    blueprint, answers = run.blueprint, run.collector.source.answers
    assert answers is not None
    reader = sequential()._replace(needs=frozenset(("answer_logp",)))
    mesh = blueprint.samples_on
    sizes = mesh, blueprint.geometry, blueprint.sampling.temperature
    model = run.inputs.pretrained.model_on(mesh)
    score = make_answer_scorer(reader, answers.longest, model, *sizes)
    values_by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
    params, stream = run.sync(run.learner), run.stream
    for _ in range(batches):
        stream, collected = run.collect(params, 0, stream)
        rollouts = sharding.to_host(collected.rollouts)
        right = rollouts.rewards["report"]
        fields = {**rollouts.fields, **score(params, rollouts)}
        fields = {name: fields[name] for name in ("answer_logp", "answer_mask")}
        for kind, values in values_by_kind.items():
            chain = [
                advantages.reasoning_reflection(kind=kind, drop=0.0),
                advantages.sum_rewards(),
            ]
            r3 = advantages.evaluate(chain, np.zeros_like(right), **fields)[0]
            for group, truth in zip(np.asarray(r3), right, strict=True):
                if truth.min() < truth.max() and group.min() < group.max():
                    values.append(spearman(group, truth))
    return {kind: np.array(values) for kind, values in values_by_kind.items()}


class Curve(NamedTuple):
    """A run by its evaluations."""

    steps: np.ndarray
    tokens: np.ndarray  # that updates were of, until then
    accuracy: np.ndarray


def read_curve(outcome: Outcome) -> Curve:
    lines, tokens, points = read_metrics(outcome.case.path), 0.0, []
    for line in lines:
        tokens += line.get("live_tokens", 0.0) * line.get("num_tokens", 0.0)
        if "eval/accuracy" in line:
            points.append((line["step"], tokens, line["eval/accuracy"]))
    return Curve(*np.array(points, float).T)


def crossing(curve: Curve, at: np.ndarray) -> float:
    """Where on the axis `at` the accuracy first reaches TARGET, by interpolation; NaN: nowhere."""
    reached = np.flatnonzero(curve.accuracy >= TARGET)
    if not reached.size or not reached[0]:
        return np.nan if not reached.size else float(at[0])
    pair = slice(reached[0] - 1, reached[0] + 1)
    return float(np.interp(TARGET, curve.accuracy[pair], at[pair]))


def curves_table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """When each arm reaches TARGET, medians over the seeds that do."""
    rows = []
    for arm, runs in curves.items():
        steps = np.array([crossing(curve, curve.steps) for curve in runs])
        tokens = np.array([crossing(curve, curve.tokens) for curve in runs])
        count = int(np.isfinite(steps).sum())
        shown = [np.nanmedian(steps), np.nanmedian(tokens) / 1e3] if count else ["–", "–"]
        last = np.mean([curve.accuracy[-1] for curve in runs])
        rows.append([arm, f"{count} of {len(runs)}", *shown, last])
    head = ["arm", f"seeds that reach {TARGET:g}", "steps", "thousand updated tokens", "accuracy"]
    return common.table(head, rows)


def result(outcomes: Outcomes, ranked: Mapping[str, np.ndarray]) -> Result:
    """What the page reports."""
    curves = {
        arm: [read_curve(run) for run in by_seed.values()] for (arm, _), by_seed in outcomes.items()
    }
    rows = [[kind, values.mean(), len(values)] for kind, values in ranked.items()]
    parts = {
        "ranked": common.table(["weights", "Spearman with the exact answer", "groups"], rows),
        "curves": curves_table(curves),
    }
    gain = ranked["var"] - ranked["uniform"]
    numbers = [curve.accuracy for runs in curves.values() for curve in runs]
    checks = [
        Check("var ranks the base's samples better than uniform", f"{gain.mean():+.3f}",
              bool(gain.mean() > 0)),
        Check("every run has finite evaluations", f"{len(numbers)} runs",
              all(np.isfinite(values).all() for values in numbers)),
    ]  # fmt: skip
    return Result(parts, checks, lambda: figure(curves))


def figure(curves: Mapping[str, Sequence[Curve]]) -> Figure:
    """Accuracy by step and by updated tokens, means over seeds."""
    drawing, axes = common.panels(2, 11, 4)
    for arm, runs in curves.items():
        accuracy = np.mean([curve.accuracy for curve in runs], axis=0)
        style = "--" if arm.endswith("filter") else "-"
        for each, name in zip(axes, ("steps", "tokens"), strict=True):
            at = np.mean([getattr(curve, name) for curve in runs], axis=0)
            each.plot(at, accuracy, style, label=arm)
            each.set_xlabel(f"updated {name}" if name == "tokens" else name)
            each.axhline(TARGET, color="grey", linewidth=0.5)
    axes[0].set_ylabel("greedy accuracy, held out")
    axes[0].legend(fontsize=7, ncols=2)
    return drawing


def measure(experiment: str | Path, batches: int = BATCHES) -> Result:
    """Takes the runs that are missing.

    Args:
      experiment: of `jaxgrpo compare`, with an arm "var".
      batches: steps of the base that the rewards are compared on.
    """
    compare.compare(str(experiment))
    cases = experiments.make_cases(experiments.load(experiment))
    (config, *_) = [case.config for case in cases if case.arm == "var"]
    return result(results.read_all(cases), correlations(config, batches))


def run() -> Result:
    trained.prepare(TASK, BASE, STEPS)
    return measure(FILE)


if __name__ == "__main__":
    common.command(NAME, run)
