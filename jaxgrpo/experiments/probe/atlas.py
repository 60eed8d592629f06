"""`jaxgrpo probe --methods`: what updates different methods would make of the same samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from jaxgrpo.config.contenders import make_contenders
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError
from jaxgrpo.training.records.console import show_table
from jaxgrpo.training.records.logbook import Clock
from jaxgrpo.training.records.report import blocks
from jaxgrpo.training.records.report.maps import NOTE, Map, draw_map
from jaxgrpo.training.setup import setup
from jaxgrpo.training.stored_policy import NO_REWARD
from jaxgrpo.update.atlas import Atlas, Atlases

TITLE = "cosines of updates, and lengths beside the first"


def probe_atlas(config: Config, methods: Sequence[str], **objects: Any) -> Atlas:
    """How alike the updates are that methods would make of the samples of a run's first step.

    Args:
      methods: recipes by name, and changes of the loss, as "dr_grpo+loss.reduction=constant".
      objects: Python objects instead of what the config names, as of `setup`.

    Raises: InputError before anything is sampled, where one cannot be built, or nothing judges.
    """
    if len(methods) < 2:
        raise InputError("--methods: give two or more, as grpo,sign,dr_grpo")
    if config.rewards[0].use == NO_REWARD and objects.get("rewards") is None:
        raise InputError("nothing judges the samples; give --reward, as math")
    run = setup(config, **objects)
    try:
        contenders = make_contenders(config, run.rewards, methods, "--methods")
        atlases = Atlases(run.blueprint, contenders)
        live_groups = functools.partial(run.live_groups, run.learner)
        clock = Clock(lambda phase: None)
        _, collected = run.collect(run.sync(run.learner), 0, run.stream, live_groups, clock)
        return atlases.draw(run.learner, collected.rollouts)
    finally:
        run.inputs.close()


def as_numbers(atlas: Atlas) -> dict[str, Any]:
    """ "methods" [M], "cosines" [M][M] and "norms" [M], lengths beside that of the first; None
    where an update of 0 leaves them undefined."""
    first = atlas.norms[0]
    cosines = [[None if value != value else float(value) for value in row] for row in atlas.cosines]
    norms = [float(norm / first) if first else None for norm in atlas.norms]
    return {"methods": list(atlas.names), "cosines": cosines, "norms": norms}


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    """Prints the atlas as a table."""
    names = numbers["methods"]
    rows = [["", *names, "length"]]
    for name, cosines, norm in zip(names, numbers["cosines"], numbers["norms"], strict=True):
        rows.append([name, *(blocks.number(cosine, ".3f") for cosine in cosines)])
        rows[-1].append(blocks.number(norm))
    show_table(console, rows, title=TITLE)


def render(numbers: Mapping[str, Any]) -> str:
    """The atlas as an HTML page."""
    cosines = np.array(numbers["cosines"], float)
    norms = np.array([np.nan if norm is None else norm for norm in numbers["norms"]])
    svg = draw_map("Updates of methods", Map(numbers["methods"], cosines, norms))
    body = f"<h1>Atlas</h1>\n{blocks.figure('Updates of methods', svg, NOTE.format(step=1))}"
    return blocks.document(f"atlas of {numbers['model']}", body)
