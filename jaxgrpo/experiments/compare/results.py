"""What the finished runs of a comparison say, as numbers."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.experiments.compare.experiment import Case, Experiment
from jaxgrpo.training.folder import read_metrics
from jaxgrpo.update import diagnostics

OVER_STEPS = (
    *("reward", "entropy", "live_groups"),
    *("groups/all_fail", "groups/all_pass", "groups/mixed"),
)
"""Metrics of training that are compared by their curves, and by their means over all steps."""


SHOWN = 8  # runs that a message names
SAME = 1e-6  # evaluations that differ by less differ by rounding


class Outcome(NamedTuple):
    """One finished run."""

    case: Case
    numbers: dict[str, float]  # what results.csv says of it
    curves: dict[str, np.ndarray]  # of OVER_STEPS, one value per step; NaN where there is none
    base_pass: np.ndarray  # [n] pass@1 ... pass@n of the base
    trained_pass: np.ndarray  # [n]
    warnings: dict[str, int]  # what the run warned of, and how often


Outcomes = Mapping[tuple[str, float], Mapping[int, Outcome]]
"""(arm, learning rate) -> seed -> outcome"""


def read_all(cases: Sequence[Case]) -> Outcomes:
    """Every outcome. All runs must be finished."""
    found: dict[tuple[str, float], dict[int, Outcome]] = {}
    for case in cases:
        found.setdefault((case.arm, case.rate), {})[case.seed] = read(case)
    return found


def read(case: Case) -> Outcome:
    """The numbers of a run:

    base/NAME, eval/NAME   the evaluations before and after training
    reward, entropy, ...   means over the steps, of OVER_STEPS
    tokens                 sampled in training
    time/seconds           spent in training, without evaluation
    """
    lines = read_metrics(case.path)
    numbers: dict[str, float] = {}
    for line, prefix in ((lines[0], "base/"), (lines[-1], "eval/")):
        numbers |= {
            prefix + name.removeprefix("eval/"): float(value)
            for name, value in line.items()
            if name.startswith("eval/") and value is not None
        }
    steps = [line for line in lines if "reward" in line]
    curves = {name: _column(steps, name) for name in OVER_STEPS}
    numbers |= {name: float(np.nanmean(c)) for name, c in curves.items() if np.isfinite(c).any()}
    numbers["tokens"] = float(np.nansum(_column(steps, "num_tokens")))
    numbers["time/seconds"] = float(np.nansum(_column(steps, "time/step")))
    base_pass, trained_pass = (_pass_at(case, step) for step in (0, case.config.train.steps))
    summary = json.loads((case.path / "summary.json").read_text(encoding="utf-8"))
    return Outcome(case, numbers, curves, base_pass, trained_pass, summary["warnings"])


def check_metric(experiment: Experiment, case: Case) -> None:
    """Refuses a metric that a finished run does not know, before the others are taken."""
    outcome = read(case)
    if experiment.metric in read_metrics(case.path)[-1]:
        check_complete(experiment, {(case.arm, case.rate): {case.seed: outcome}})
    elif experiment.metric not in outcome.numbers:
        known = suggest(experiment.metric, outcome.numbers)
        raise InputError(f"metric = {experiment.metric!r}: no such number; {known}")


def check_complete(experiment: Experiment, outcomes: Outcomes) -> None:
    """Refuses a metric that has no value in some runs, and so cannot be compared."""
    lacking = [
        f"arm {arm}, learning rate {rate:g}, seed {seed}"
        for (arm, rate), by_seed in outcomes.items()
        for seed, outcome in by_seed.items()
        if experiment.metric not in outcome.numbers
    ]
    if lacking:
        more = f"\n  and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        raise InputError(
            f"metric = {experiment.metric!r}: it has no value (null in metrics.jsonl) in\n  "
            + "\n  ".join(lacking[:SHOWN])
            + f"{more}\nname another metric, one that results.csv has for every run; finished runs "
            "are kept, no run is taken twice"
        )


def mixtures(outcomes: Outcomes) -> list[str]:
    """What says that the runs are not those of one base and one code: sentences, none if all are.

    Of one seed every run evaluates the same base on the same prompts with the same keys. Runs that
    name the same own files were to have the same copies of them.
    """
    runs = [run for by_seed in outcomes.values() for run in by_seed.values()]
    said = []
    for seed in dict.fromkeys(run.case.seed for run in runs):
        bases = [_base_of(run) for run in runs if run.case.seed == seed]
        common = set.intersection(*map(set, bases))
        other = sorted(
            name
            for name in common
            if not np.allclose([base[name] for base in bases], bases[0][name], rtol=0, atol=SAME)
        )
        if other:
            said.append(f"Seed {seed}: runs begin at different bases ({', '.join(other)} differ).")
    copies: dict[tuple[Path, ...], set[frozenset[bytes]]] = {}
    for run in runs:
        copies.setdefault(run.case.config.own_files, set()).add(_code_of(run.case))
    for files, found in copies.items():
        if len(found) > 1:
            said.append(f"Runs with {len(found)} states of {', '.join(map(str, files))}.")
    return said


def has_other_code(case: Case) -> bool:
    """Whether a run was taken with own files that have changed since."""
    files = case.config.own_files
    present = {file.read_bytes() for file in files if file.is_file()}
    return bool(files) and present != _code_of(case)


def _code_of(case: Case) -> frozenset[bytes]:
    """The contents of the own files that a run was taken with."""
    return frozenset(file.read_bytes() for file in (case.path / "code").glob("*"))


def _base_of(run: Outcome) -> dict[str, float]:
    return {name: value for name, value in run.numbers.items() if name.startswith("base/")}


def values_of(experiment: Experiment, outcomes: Outcomes, arm: str, metric: str) -> np.ndarray:
    """A metric of an arm, [L, n]: its learning rates by the seeds that count."""
    return _table(outcomes, arm, experiment.rates(arm), experiment.seeds, metric)


def tuning_values(experiment: Experiment, outcomes: Outcomes, arm: str) -> np.ndarray:
    """The metric on the seeds that rates are chosen by, [L, t]."""
    seeds = experiment.tuning_seeds or experiment.seeds
    return _table(outcomes, arm, experiment.rates(arm), seeds, experiment.metric)


def csv_text(experiment: Experiment, outcomes: Outcomes) -> str:
    """results.csv: arm, lr, seed, metric, value. Tuning seeds are in it too."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["arm", "lr", "seed", "metric", "value"])
    for arm in experiment.arms:
        for rate in experiment.rates(arm):
            for seed, outcome in sorted(outcomes[arm, rate].items()):
                for name in sorted(outcome.numbers):
                    writer.writerow([arm, repr(rate), seed, name, repr(outcome.numbers[name])])
    return text.getvalue()


def _table(
    outcomes: Outcomes, arm: str, rates: Sequence[float], seeds: Sequence[int], metric: str
) -> np.ndarray:
    rows = [[outcomes[arm, rate][seed].numbers for seed in seeds] for rate in rates]
    return np.array([[numbers[metric] for numbers in row] for row in rows])


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A metric of every step; NaN where a step has none."""
    return np.array([np.nan if line.get(name) is None else line[name] for line in lines], float)


def _pass_at(case: Case, step: int) -> np.ndarray:
    """Unbiased pass@1 ... pass@n, means over prompts, [n]."""
    file = case.path / "successes" / f"step_{step}.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    return _pass_table(found["samples"])[found["correct"]].mean(0)


@functools.cache
def _pass_table(samples: int) -> np.ndarray:
    """pass@k of a prompt with c successes, [n + 1, n] for c = 0 ... n and k = 1 ... n."""
    correct = jnp.arange(samples + 1)
    every = jnp.full(correct.shape, samples)
    columns = [diagnostics.pass_at_k(correct, every, k) for k in range(1, samples + 1)]
    return np.stack([np.asarray(column, float) for column in columns], axis=1)
