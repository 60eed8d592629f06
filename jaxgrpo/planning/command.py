"""`jaxgrpo plan`: whether a run compiles and fits on chips that are not here."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgrpo.planning.topologies import Topology, quiet

if TYPE_CHECKING:
    from rich.console import Console

    from jaxgrpo.config.files import Config
    from jaxgrpo.planning.programs import Run

NO_FIT = 1
"""The exit code of a plan that does not fit."""


def main(
    config: str,
    topology: str | None = None,
    slices: int | None = None,
    json_out: str | None = None,
    dump: str | None = None,
    search: bool = False,
    overrides: Any = (),
) -> int:
    """Compiles a run's programs for a topology, and prints what they take.

    Args:
      config: a TOML file, or a shipped config's name.
      topology, slices: as "v5e:4x4", "h100:8x8", and how many of it; by default the config's.
        Where its mesh is for another number of devices, a mesh is chosen.
      json_out: a file for the numbers.
      dump: a folder for the text of the compiled programs.
      search: compiles the fastest meshes by formula too.
      overrides: "table.key=value" of the config.

    Raises: InputError where the config, the model, the mesh and the topology do not fit together.
    """
    quiet(os.environ)  # before JAX looks for devices
    from rich.console import Console

    from jaxgrpo.config import files
    from jaxgrpo.planning import advice, plan, report

    console = Console(highlight=False)
    read, began = files.load(config, overrides), time.monotonic()
    chips = _topology(read, topology, slices)
    is_other = topology is not None or slices is not None
    read, run, changes = _run_on(console, read, chips, chooses=is_other)
    forecast = plan.by_formula(run, chips)
    report.show_formula(console, forecast)
    found = forecast if forecast.problem else plan.plan(run, chips, dump=dump, telling=_telling)
    report.show_compiled(console, found)
    if not found.fits:
        with _telling("looking for what fits"):
            remedies = advice.remedies(read, chips, began if forecast.problem else time.monotonic())
        report.show_remedies(console, [one.behind(changes) for one in remedies])
    if search:
        for candidate, other in advice.search(read, chips, _telling):
            console.rule(candidate.behind(changes).overrides)
            report.show_formula(console, other)
            report.show_compiled(console, other)
    if json_out is not None:
        report.write(found, str(Path(json_out)), changes)
    return 0 if found.fits else NO_FIT


def _topology(config: Config, name: str | None, slices: int | None) -> Topology:
    """The topology that is named, by default the config's."""
    from jaxgrpo.core.errors import InputError
    from jaxgrpo.planning import topologies

    devices = name or config.plan.topology
    if devices is None:
        raise InputError(
            "plan.topology: missing; give --topology, as v5e:4x4, or plan.topology in the config"
        )
    return topologies.topology(devices, slices or (1 if name else config.plan.slices))


def _run_on(
    console: Console, config: Config, topology: Topology, chooses: bool
) -> tuple[Config, Run, dict[str, Any]]:
    """A config and its run on the devices of a topology, and what had to change of it.

    Args:
      chooses: whether it may change the mesh.

    Raises: InputError where the run cannot be built there.
    """
    from jaxgrpo.core.errors import InputError
    from jaxgrpo.planning import advice, plan, report

    try:
        return config, plan.built(config, topology), {}
    except InputError:
        if not chooses:
            raise
    with _telling("looking for a mesh"):
        nearest = advice.for_devices(config, topology)
    report.show_changes(console, nearest, config, topology)
    changed = advice.changed(config, nearest.changes)
    return changed, plan.built(changed, topology), nearest.changes


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Says on stderr what is done, at its beginning and every few seconds."""
    from rich.console import Console

    from jaxgrpo.training.console import telling

    # On a terminal too: no bar is seen there.
    console = Console(stderr=True, highlight=False, force_terminal=False)
    console.print(what, soft_wrap=True)
    with telling(console, what):
        yield
