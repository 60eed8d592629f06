"""`jaxgrpo plan`: whether a run compiles and fits on chips that are not here."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxgrpo.core.errors import InputError
from jaxgrpo.planning.topologies import Topology, quiet

if TYPE_CHECKING:
    from rich.console import Console

    from jaxgrpo.config.keys import PlanKeys
    from jaxgrpo.planning.advice import Search
    from jaxgrpo.planning.plan import Plan
    from jaxgrpo.planning.programs import Run
    from jaxgrpo.training.records.console import Document

NO_FIT = 1
"""The exit code of a plan that does not fit."""


def main(
    config: str,
    topology: str | None = None,
    slices: int | None = None,
    as_json: bool = False,
    dump: str | None = None,
    search: bool = False,
    formula: bool = False,
    overrides: Any = (),
) -> int | Document:
    """Compiles a run's programs for a topology, and prints what they take.

    Args:
      config: a TOML file, or a shipped config's name.
      topology, slices: as "v5e:4x4", "h100:8x8", and how many of it; by default the config's.
        Where its mesh is for another number of devices, or does not fit these, one is chosen.
      as_json: returns the numbers in place of the tables.
      dump: a folder for the text of the compiled programs.
      search: compiles the fastest meshes by formula too.
      formula: compiles nothing.
      overrides: "table.key=value" of the config.

    Raises: InputError where the config, the model, the mesh and the topology do not fit together.
    """
    quiet(os.environ)  # before JAX looks for devices
    from rich.console import Console

    from jaxgrpo.config import files
    from jaxgrpo.planning import advice, report
    from jaxgrpo.training.records.console import Document

    if formula and (dump or search):
        raise InputError("--formula compiles nothing: leave out --dump and --search, or --formula")
    console = Console(highlight=False, quiet=as_json)
    settings, began = files.load(config, overrides), time.monotonic()
    chips = _topology(settings.plan, topology, slices, formula)
    near = advice.Search(settings, chips)
    fitting, run, changes = _run_on(console, near, chooses=bool(topology or slices))
    run_plan = _plan(console, run, chips, formula, dump)
    remedies = []
    if not run_plan.fits:
        with _telling("looking for what fits"):
            began = time.monotonic() if run_plan.planned else began
            remedies = [candidate.behind(changes) for candidate in fitting.remedies(began)]
        in_time = time.monotonic() < began + advice.SECONDS
        report.show_remedies(console, remedies, in_time)
    searched = list(_search(console, fitting, changes)) if search else []
    extras = {"remedies": [remedy._asdict() for remedy in remedies], "searched": searched}
    code = 0 if run_plan.fits else NO_FIT
    return Document({**report.plan_numbers(run_plan, changes), **extras}, code) if as_json else code


def _plan(console: Console, run: Run, chips: Topology, formula: bool, dump: str | None) -> Plan:
    """Prints and gives the plan of a run: by formula, and then, unless `formula`, as compiled."""
    from jaxgrpo.data import storage
    from jaxgrpo.planning import plan, report

    if dump is not None:
        storage.refuse_unwritable(storage.on_host(dump, "a program"), "programs")
    run_plan = plan.by_formula(run, chips, 1.0 if formula else plan.TOO_MUCH)
    report.show_formula(console, run_plan)
    if not (formula or run_plan.problem):
        finished = functools.partial(report.show_program, console)
        run_plan = plan.plan(run, chips, dump=dump, telling=_telling, finished=finished)
    report.show_compiled(console, run_plan)
    return run_plan


def _search(console: Console, fitting: Search, changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compiles the fastest meshes, prints what they take and gives the numbers."""
    from jaxgrpo.planning import report

    for candidate, run_plan in fitting.fastest(_telling):
        candidate = candidate.behind(changes)
        console.rule()
        console.print(f"--set {candidate.overrides}", markup=False, soft_wrap=True)
        report.show_formula(console, run_plan)
        report.show_compiled(console, run_plan)
        yield report.plan_numbers(run_plan, candidate.changes)


def _topology(keys: PlanKeys, name: str | None, slices: int | None, formula: bool) -> Topology:
    """The topology that is named, by default the config's; for formulas no compiler is needed."""
    from jaxgrpo.planning import topologies

    devices = name or keys.topology
    if devices is None:
        raise InputError(
            "plan.topology: missing; give --topology, as v5e:4x4, or plan.topology in the config"
        )
    number = (1 if name else keys.slices) if slices is None else slices
    slices_words = f"plan.slices = {number}" if slices is None else f"--slices {number}"
    where = None if name else f'plan.topology = "{devices}", {slices_words}'
    try:
        return topologies.topology(devices, number, where)
    except InputError:
        if not formula:
            raise
        return topologies.not_compiled_for(devices, number, where)


def _run_on(console: Console, search: Search, chooses: bool) -> tuple[Search, Run, dict[str, Any]]:
    """The run of a config on the devices of a topology, and what had to change of the config.

    Args:
      search: round the config on the topology.
      chooses: whether it may change the mesh, so that there is a run and it fits by formula.

    Returns: the search round the config that is run, the run, and the changes.

    Raises: InputError where the run cannot be built there.
    """
    from jaxgrpo.planning import programs, report

    config, devices = search.config, search.topology.devices
    try:
        run = programs.build_run(config, devices)
        if not chooses or search.fits(run):
            return search, run, {}
    except InputError:
        if not chooses:
            raise
    with _telling("looking for a mesh"):
        nearest = search.nearest()
    if not nearest.changes:  # none fits
        return search, programs.build_run(config, devices), {}
    mesh, prompts = config.mesh, config.rollout.prompts_per_step
    report.show_changes(console, nearest, mesh, prompts, len(devices))
    changed = search.changed(nearest.changes)
    run = programs.build_run(changed, devices)
    return search._replace(config=changed), run, nearest.changes


@contextlib.contextmanager
def _telling(activity: str) -> Iterator[None]:
    """Says on stderr what is done, at its beginning and every few seconds."""
    from rich.console import Console

    from jaxgrpo.training.records.console import telling

    # On a terminal too: no bar is seen there.
    console = Console(stderr=True, highlight=False, force_terminal=False)
    console.print(activity, soft_wrap=True)
    with telling(console, activity):
        yield
