"""`jaxgrpo plan`: whether a run compiles and fits on chips that are not here."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from jaxgrpo.planning.topologies import quiet

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
      json_out: a file for the numbers.
      dump: a folder for the text of the compiled programs.
      search: compiles the fastest meshes by formula too.
      overrides: "table.key=value" of the config.

    Raises: InputError where the config, the model, the mesh and the topology do not fit together.
    """
    quiet(os.environ)  # before JAX looks for devices
    from rich.console import Console

    from jaxgrpo.config import files
    from jaxgrpo.core.errors import InputError
    from jaxgrpo.planning import advice, plan, report, topologies

    console = Console(highlight=False)
    read = files.load(config, overrides)
    asked = topology or read.plan.topology
    if asked is None:
        raise InputError(
            "plan.topology: missing; give --topology, as v5e:4x4, or plan.topology in the config"
        )
    chips = topologies.topology(asked, slices or (1 if topology else read.plan.slices))
    began = time.monotonic()
    run = plan.built(read, chips)
    in_vain = plan.peak_of(plan.parts_of(run)) > advice.TOO_MUCH * chips.chip.memory
    found = plan.by_formula(run, chips) if in_vain else plan.plan(run, chips, dump=dump)
    report.show(console, found)
    if not found.fits:
        report.show_remedies(console, advice.remedies(read, chips), time.monotonic() - began)
    if search:
        for candidate, other in advice.search(read, chips):
            console.rule(candidate.overrides)
            report.show(console, other)
    if json_out is not None:
        report.write(found, str(Path(json_out)))
    return 0 if found.fits else NO_FIT
