"""`jaxgrpo compare EXPERIMENT.toml`: every run, then tables, charts and a CSV file."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxgrpo.core.errors import InputError
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import results, running
from jaxgrpo.experiments.compare.experiment import Case, Experiment
from jaxgrpo.experiments.compare.sections import (
    Section,
    difference_rows,
    markdown,
    said_detectable,
    sections,
)
from jaxgrpo.training import process
from jaxgrpo.training.folder import write_atomically
from jaxgrpo.training.report.writing import check_can_draw


def compare(path: str | Path, dry_run: bool = False) -> int:
    """Takes the runs that are not finished and writes what all of them say. Returns the exit code.

        DIR/experiment.toml   the file, as it was
        DIR/differences.md    the keys in which the arms' configs differ
        DIR/runs/ARM/lr_RATE/seed_SEED   each run, as `jaxgrpo train` leaves it
        DIR/results.csv       arm, lr, seed, metric, value
        DIR/tables.md         the same bytes for the same runs
        DIR/report.html

    Args:
      path: the file, or a shipped experiment's name.
      dry_run: only checks the file, the configs and what `dir` holds, and shows the plan; models,
        data and own files are looked at when runs begin.
    Raises: InputError with all problems before the first run, and before anything is written.
    """
    console = Console(highlight=False)
    experiment = experiments.load(path)
    cases = experiments.cases_of(experiment)
    check_can_draw("report.html needs", "read results.csv")
    differing = experiments.differences(cases)
    _show_plan(console, experiment, cases, differing)
    finished, waiting = running.split(cases)
    _warn_of_code(console, finished, waiting)
    if dry_run:
        return 0
    if process.is_main():
        _begin(experiment, differing)
    line = process.start(cases[0].config.mesh.platform)
    say = console.print if process.is_main() else lambda text: None
    say(line)
    check = functools.partial(results.check_metric, experiment)
    running.take_all(finished, waiting, say, check, f"go on with: jaxgrpo compare {path}")
    if process.is_main():
        _finish(console, experiment, cases, differing)
    return 0


def _show_plan(
    console: Console,
    experiment: Experiment,
    cases: Sequence[Case],
    differing: Mapping[str, Mapping[str, str]],
) -> None:
    """What will be run, in what the arms differ, and what can be seen at all."""
    seeds = len(experiment.seeds) + len(experiment.tuning_seeds)
    console.print(
        f"{len(cases)} runs: {len(experiment.arms)} arms at their learning rates, {seeds} seeds; "
        f"{experiment.metric}, control {experiment.control}",
        markup=False,
    )
    console.print(_rich("the arms differ in this, and in nothing else", difference_rows(differing)))
    console.print(said_detectable(experiment), markup=False)


def _warn_of_code(console: Console, finished: Sequence[Case], waiting: Sequence[Case]) -> None:
    """Before further runs are taken with own files that have changed since the finished ones."""
    other = [case for case in finished if waiting and results.has_other_code(case)]
    if other:
        console.print(
            f"warning: own code has changed since {len(other)} of {len(finished)} finished runs "
            f"were taken, first {other[0].path}; remove these runs to take them anew",
            markup=False,
        )


def _begin(experiment: Experiment, differing: Mapping[str, Mapping[str, str]]) -> None:
    folder = Path(experiment.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "experiment.toml"
        if experiment.source and not (kept.exists() and kept.samefile(experiment.source)):
            shutil.copyfile(experiment.source, kept)
        section = Section("In what the arms differ", [], difference_rows(differing))
        write_atomically(folder / "differences.md", markdown([section]))
    except OSError as error:
        raise InputError(
            f"dir = {folder} cannot be written ({error.strerror}): set it to a folder that can"
        ) from error


def _finish(
    console: Console,
    experiment: Experiment,
    cases: Sequence[Case],
    differing: Mapping[str, Mapping[str, str]],
) -> None:
    from jaxgrpo.experiments.compare import page

    outcomes = results.read_all(cases)
    folder = Path(experiment.dir)
    write_atomically(folder / "results.csv", results.csv_text(experiment, outcomes))
    results.check_complete(experiment, outcomes)
    found = sections(experiment, outcomes)
    write_atomically(folder / "tables.md", markdown(found))
    write_atomically(folder / "report.html", page.render(experiment, outcomes, found, differing))
    for section in filter(_is_short, found):
        if section.rows:
            console.print(_rich(section.title, section.rows))
        elif section.text:
            console.print(section.title, style="bold", markup=False)
        for text in section.text:
            console.print(text, markup=False)
    console.print(f"{folder}: report.html, tables.md, results.csv", markup=False, soft_wrap=True)


def _is_short(section: Section) -> bool:
    """Whether it is shown in the terminal; the tables of each learning rate are in the files."""
    return not section.title.startswith("At learning rate")


def _rich(title: str, rows: Sequence[Sequence[str]]) -> Table:
    head, *body = rows
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left")
    for row in body:
        table.add_row(*row)
    return table
