"""`jaxgrpo plasticity A B`: how well a trained model still learns something else.

Config B is trained twice with each seed, in runs as those of `jaxgrpo compare`: from the trained
model A and from the base that A was trained from.

    area(run) = area below the metric over steps / steps, by trapezoids
    ratio     = mean over seeds of area(from A) / mean over seeds of area(from the base)

Source: FST, arXiv 2605.12484, which trains on a second task from a checkpoint and from the base.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.data import storage
from jaxgrpo.evaluation.intervals import ratio_interval
from jaxgrpo.experiments.compare import command
from jaxgrpo.experiments.compare.experiment import MOST_SEEDS, Case, Experiment, make_cases
from jaxgrpo.models.hf import folders
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import Document, show_table
from jaxgrpo.training.records.reading import is_number, read_metrics
from jaxgrpo.training.stored_policy import is_run, read_run
from jaxgrpo.training.teachers import compare_tokens

SEEDS = 5
ARMS = ("trained", "base")

ModelName = dict[str, str]
"""Keys of a config that name a model."""


def main(
    trained: str,
    task: str,
    seeds: int = SEEDS,
    metric: str = "reward",
    folder: str | None = None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> int | Document:
    """The command: takes the runs that are not finished and prints the ratio.

    Args:
      trained: the folder of a run, or of a model whose base is B's model.path.
      task: config B.
      seeds: how many, from 0.
      metric: of metrics.jsonl.
      folder: for the runs; None: B's run.dir with -plasticity behind it.
      overrides: of B, as in `config.files.load`.

    Returns: the exit code, or with `as_json` the numbers.
    Raises: InputError where there is no such run, model or metric, or tokenizers differ.
    """
    config, console = configs.load(task, overrides), Console(highlight=False)
    if not 1 <= seeds <= MOST_SEEDS:
        raise InputError(f"--seeds {seeds}: expected a number of seeds, 1 to {MOST_SEEDS}")
    revision = {"model.revision": config.model.revision} if config.model.revision else {}
    models = find_models(trained, {"model.path": config.model.path, **revision})
    home = folder or f"{config.run.dir.rstrip('/')}-plasticity"
    experiment = Experiment(
        base=task,
        dir=str(storage.on_host(home, "the runs of plasticity")),
        arms=dict(zip(ARMS, models, strict=True)),
        control="base",
        learning_rates=(config.optimizer.learning_rate,),
        seeds=tuple(range(seeds)),
        metric=metric,
    )
    tables = configs.to_tables(config)
    tables["model"].pop("revision", None)  # each arm has that of its own model
    del tables["tracking"]
    cases = make_cases(experiment, tables)
    finished_paths = command.find_finished(console, experiment, cases)
    again = f"the same command continues, in {experiment.dir}"
    check = functools.partial(_check_area, metric)
    finished = command.take_all(console, experiment, cases, finished_paths, again, check=check)
    if as_json and process.is_main():
        return Document(describe(experiment, finished))
    if process.is_main():
        show(console, describe(experiment, finished))
    return 0


def find_models(trained: str, task_model: ModelName) -> tuple[ModelName, ModelName]:
    """What names the trained model, and what names its base.

    Args:
      task_model: what B names; the base of a model folder that is no run.

    Raises: InputError where there is no such run or model, a run is not finished or began from
      adapters, or the two have different tokenizers.
    """
    path, base = trained, task_model
    if is_run(trained):
        place, config = read_run(trained)
        if config.lora.path is not None:
            raise InputError(
                f"{trained}: began from the adapters {config.lora.path}, so that model.path is not "
                "its base: merge them into a folder that B names, and give RUN/model in place of it"
            )
        path, base = str(storage.place(place / "model")), {"model.path": config.model.path}
        if config.model.revision:
            base["model.revision"] = config.model.revision
    if not (storage.is_url(path) or os.path.isdir(os.path.expanduser(path))):
        problem = "the run has no model yet" if path != trained else "no run and no model folder"
        raise InputError(f"plasticity {trained}: {problem}; give one that has been trained")
    path = path if storage.is_url(path) else os.path.abspath(os.path.expanduser(path))
    if path == base["model.path"]:
        raise InputError(f"plasticity {trained}: is the base itself, which B's model.path names")
    homes = (
        folders.find_folder(path, None, False),
        folders.find_folder(base["model.path"], base.get("model.revision"), False),
    )
    if difference := compare_tokens(*map(folders.read_tokenizer, homes)):
        raise InputError(
            f"plasticity {trained}: its tokenizer is another than that of its base, "
            f"{base['model.path']}: {difference}. Their rewards could not be compared"
        )
    return {"model.path": path}, base


def area(lines: Sequence[Mapping[str, Any]], metric: str, where: str = "") -> float:
    """The area below a metric over steps, divided by the steps: its mean height.

    Args:
      lines: of metrics.jsonl.
      where: the run, for messages.

    Raises: InputError where it has fewer than two values.

    >>> area([{"step": 0, "x": 0.0}, {"step": 1, "x": 1.0}, {"step": 3, "x": 1.0}], "x")
    0.8333333333333334
    """
    points = [(line["step"], line[metric]) for line in lines if is_number(line.get(metric))]
    if len(points) < 2:
        hint = suggest(metric, sorted({name for line in lines for name in line}))
        raise InputError(
            f"{where}: {len(points)} values of {metric!r}, and an area takes 2: {hint}; for an "
            "evaluation set eval.every"
        )
    step, value = np.array(points, float).T
    return float((np.diff(step) * (value[1:] + value[:-1])).sum() / 2 / (step[-1] - step[0]))


def run_area(run: Path, metric: str) -> float:
    """`area` of a finished run."""
    return area(read_metrics(run), metric, str(run))


def _check_area(metric: str, case: Case) -> None:
    run_area(case.path, metric)


def describe(experiment: Experiment, cases: Sequence[Case]) -> dict[str, Any]:
    """What the finished runs say.

    Raises: InputError where the base's area is not above 0.
    """
    areas: dict[str, np.ndarray] = {}
    for arm in ARMS:
        runs = [case for case in cases if case.arm == arm]
        areas[arm] = np.array([run_area(run.path, experiment.metric) for run in runs])
    trained, base = (areas[arm] for arm in ARMS)
    if not base.mean() > 0:
        raise InputError(
            f"--metric {experiment.metric}: the base's area is {base.mean():.3g}, and a ratio "
            "takes one above 0; take another metric, as eval/pass@1, or train longer"
        )
    low, high = ratio_interval(trained, base)
    return {
        "metric": experiment.metric,
        "ratio": float(trained.mean() / base.mean()),
        "low": low,
        "high": high,
        "seeds": list(experiment.seeds),
        "dir": experiment.dir,
        **{
            arm: {"model": experiment.arms[arm]["model.path"], "areas": values.tolist()}
            for arm, values in areas.items()
        },
    }


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    """Prints the areas and their ratio."""
    rows = [["from", "model", "mean area", *(f"seed {seed}" for seed in numbers["seeds"])]]
    for arm in ARMS:
        areas = numbers[arm]["areas"]
        cells = [f"{value:.3f}" for value in (np.mean(areas), *areas)]
        rows.append([arm, numbers[arm]["model"], *cells])
    show_table(console, rows, text=(0, 1), title=f"{numbers['metric']} over steps")
    ratio, low, high = (numbers[name] for name in ("ratio", "low", "high"))
    interval = f" (95% {low:.3f} to {high:.3f} over seeds)" if np.isfinite(low) else ""
    verdict = "no difference shown"
    if high < 1 or low > 1:
        verdict = f"the trained model learns {'less' if high < 1 else 'more'} than its base"
    console.print(f"plasticity {ratio:.3f}{interval}: {verdict}", markup=False, soft_wrap=True)
