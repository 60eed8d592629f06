"""X3b: the headline, 73.8 against 28.4, at small size: rate, group, ways to fail, the optimizer.

python -m docs.experiments.x3b_headline

Does the runs of four comparisons in runs/x3b, derived from x3b_headline.toml: an hour and a half
of processor time; finished runs are not repeated. The simulation beside them takes a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import common, escape, formats, trained, x3_advantages
from docs.experiments.common import Check, Result
from docs.experiments.trained import Compared
from jaxgrpo.cli import make_base
from jaxgrpo.config.files import write_toml
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import report, results
from jaxgrpo.experiments.compare.results import Estimate

NAME = "x3b_headline"
FOLDER = Path("runs/x3b")
FILE = common.FOLDER / f"{NAME}.toml"
SAMPLES = 8  # of a step, whatever the size of a group


class Cell(NamedTuple):
    """One comparison: a size of groups and a number of formats that do not count."""

    size: int
    wrong_formats: int

    @property
    def name(self) -> str:
        return f"g{self.size}_formats{self.wrong_formats}"

    @property
    def title(self) -> str:
        number = "one wrong format" if self.wrong_formats == 1 else "five wrong formats"
        return f"G = {self.size}, {number}"


HEADLINE = Cell(4, 1)
CELLS = (HEADLINE, Cell(2, 1), Cell(8, 1), Cell(4, 5))
FEWER = {"learning_rates": [1e-4, 2e-4, 3e-4, 1e-3], "seeds": [7, 8, 9, 10, 11]}
"""What the cells beside the headline take of its rates and seeds, so that all fit into an hour."""

SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
ADAM_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def cell_file(cell: Cell, folder: Path = FOLDER) -> Path:
    """The experiment file of a cell, written: FILE but for what the cell is, and fewer runs."""
    tables = tomllib.loads(FILE.read_text())
    settings = tables["set"]
    tables["dir"] = str((folder / cell.name).resolve())
    settings["rewards"] = [{"use": f"{common.FOLDER / 'formats.py'}:marked"}]
    settings["model"]["path"] = str((folder / f"base{cell.wrong_formats}").resolve())
    settings["rollout"] = {"prompts_per_step": SAMPLES // cell.size, "group_size": cell.size}
    if cell != HEADLINE:
        tables |= FEWER
    file = folder / f"{cell.name}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(write_toml(tables))
    return file


def find() -> dict[Cell, Compared]:
    """Cell -> its comparison. Makes the bases, and takes the runs, that are missing."""
    for wrong_formats in sorted({cell.wrong_formats for cell in CELLS}):
        base = FOLDER / f"base{wrong_formats}"
        if not (base / "config.json").exists():
            make_base.make_base(base, formats.task(wrong_formats))
    files = {cell: cell_file(cell) for cell in CELLS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a process each: a run keeps one core busy
        list(pool.map(_compare, files.values()))
    return {cell: trained.read(experiments.load(file)) for cell, file in files.items()}


def _compare(file: Path) -> None:
    subprocess.run([sys.executable, "-m", "jaxgrpo", "compare", str(file)], check=True)


def result(comparisons: Mapping[Cell, Compared]) -> Result:
    """What the page reports about them."""
    checks: list[Check] = []
    parts = {"gaps": gaps_table(comparisons), "cost": trained.cost(comparisons.values())}
    for cell, comparison in comparisons.items():
        experiment, _ = comparison
        parts[f"rates_{cell.name}"] = x3_advantages.rates_table(comparison)
        head, *rows = report.format_rows(experiment, results.at_best(*comparison), own_rates=True)
        parts[f"best_{cell.name}"] = common.table(head, rows)
        every_run = trained.complete(comparison)
        checks.append(every_run._replace(claim=f"{cell.title}: {every_run.claim}"))
    checks += list(_claims(comparisons[HEADLINE]))
    parts["simulated"] = simulated_table()
    return Result(parts, checks, lambda: figure(comparisons))


def _claims(headline: Compared) -> Iterator[Check]:
    """What the intervals carry; each was seen elsewhere before these runs were taken."""
    rate, skipping = largest_gap(headline, "grpo_skip")
    yield Check(
        f"at the rate {rate:g} sign leads grpo by over 20 points if flat batches are skipped",
        _text(skipping), skipping.low > 0.2,
    )  # fmt: skip
    stepping = gap(headline, "grpo", at_one(headline, rate))
    yield Check(
        "there the optimizer that steps on flat batches takes half of that lead away or more",
        _text(stepping), stepping.value < 0.5 * skipping.value,
    )  # fmt: skip
    (tuned,) = [row for row in results.at_best(*headline) if row.arm == "sign"]
    assert tuned.difference is not None
    yield Check(
        "with rates chosen for each, sign is not shown to be better than grpo",
        _text(tuned.difference), tuned.difference.low <= 0,
    )  # fmt: skip


def gap(comparison: Compared, control: str, rates: Mapping[str, float]) -> Estimate:
    """Sign minus another arm, each at its rate, over the seeds that judge."""
    experiment, outcomes = comparison
    sign, against = (
        results.arm_values(experiment, outcomes, arm, experiment.metric)[
            experiment.rates(arm).index(rates[arm])
        ]
        for arm in ("sign", control)
    )
    return results.estimate_difference(sign - against, experiment.metric)


def at_one(comparison: Compared, rate: float) -> dict[str, float]:
    """The same rate for every arm."""
    return dict.fromkeys(comparison.experiment.arms, rate)


def largest_gap(comparison: Compared, control: str) -> tuple[float, Estimate]:
    """The rate at which sign leads by most, and by how much."""
    rates = comparison.experiment.learning_rates
    gaps = {rate: gap(comparison, control, at_one(comparison, rate)) for rate in rates}
    return max(gaps.items(), key=lambda item: item[1].value)


def gaps_table(comparisons: Mapping[Cell, Compared]) -> str:
    """In each cell: the largest lead of sign at one rate for both, and at chosen rates."""
    rows = []
    for cell, comparison in comparisons.items():
        experiment, outcomes = comparison
        best = results.best_rates(experiment, outcomes)
        for control in experiment.arms:
            if control == "sign":
                continue
            rate, lead = largest_gap(comparison, control)
            tuned = gap(comparison, control, best)
            rows.append([cell.title, control, f"{rate:g}", _text(lead), _text(tuned)])
    head = ["", "sign minus", "rate", "largest lead at one rate", "at the rate chosen for each"]
    return common.table(head, rows)


def _text(estimate: Estimate) -> str:
    value, low, high = estimate
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def simulated_table() -> str:
    """The largest lead of sign over grpo at one rate of the simulation, and at the best rates."""
    rows = []
    for optimizer, rates in _optimizers():
        for size in (2, 4, 8):
            for wrong_formats in (1, 5):
                values = {
                    arm: np.array([
                        escape.final_success(arm, size, wrong_formats, optimizer, rate)
                        for rate in rates
                    ])
                    for arm in escape.ADVANTAGES
                }  # fmt: skip
                lead = values["sign"] - values["grpo"]
                place = int(lead.argmax())
                best = values["sign"].max() - values["grpo"].max()
                cells = [f"{values[arm][place]:.3f}" for arm in escape.ADVANTAGES]
                rows.append(
                    [optimizer.name, size, wrong_formats, f"{rates[place]:g}", *cells,
                     f"{lead[place]:+.3f}", f"{best:+.3f}"]
                )  # fmt: skip
    head = ["optimizer", "G", "wrong formats", "rate", *escape.ADVANTAGES]
    return common.table([*head, "sign − grpo", "at the best rates"], rows)


def _optimizers() -> Iterator[tuple[escape.Optimizer, tuple[float, ...]]]:
    yield escape.SGD, SGD_RATES
    yield escape.STEPPING, ADAM_RATES
    yield escape.SKIPPING, ADAM_RATES


def figure(comparisons: Mapping[Cell, Compared]) -> Figure:
    """A chart of each cell: the metric of every arm by rate."""
    drawing, grid = common.panels(len(comparisons), 4.6 * len(comparisons), 4.2, sharey=True)
    for axes, (cell, comparison) in zip(np.ravel(grid), comparisons.items(), strict=True):
        report.by_rate(axes, *comparison)
        axes.set_title(cell.title, fontsize=10)
    np.ravel(grid)[0].legend(fontsize=7, ncols=2)
    return drawing


def run() -> Result:
    return result(find())


if __name__ == "__main__":
    common.command(NAME, run)
