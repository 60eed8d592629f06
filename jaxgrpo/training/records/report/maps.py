"""The map of an atlas: how alike the updates of several methods are, as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np

from jaxgrpo.training.records.reading import is_number
from jaxgrpo.training.records.report import charts
from jaxgrpo.training.records.report.record import Record
from jaxgrpo.update.atlas import RUN

NORM, COSINE = "atlas/norm/", "atlas/cosine/"
"""Prefixes of the metrics of an atlas, before the names of one method, and of two."""

NOTE = (
    "Cosines between the updates that each method would make of the same samples of step {step}; "
    "beside a name the length of its update, that of the first being 1."
)


class Map(NamedTuple):
    """Methods, the cosines of their updates, and their lengths beside that of the first."""

    names: Sequence[str]
    cosines: np.ndarray  # [M, M]; NaN: undefined
    norms: np.ndarray  # [M]; NaN: not finite


def latest(record: Record) -> tuple[int, Map] | None:
    """The newest atlas of a run, and its step; None where there is none."""
    for line in reversed(record.lines):
        if any(name.startswith(NORM) for name in line):
            return int(line["step"]), from_metrics(line)
    return None


def from_metrics(metrics: Mapping[str, Any]) -> Map:
    """The map of the metrics of an atlas."""
    names = [name.removeprefix(NORM) for name in metrics if name.startswith(NORM)]
    names.sort(key=lambda name: name != RUN)  # it comes first
    cosines = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(cosines, 1.0)
    for row, first in enumerate(names):
        for column, second in enumerate(names):
            for pair in (f"{first}/{second}", f"{second}/{first}"):
                if is_number(value := metrics.get(f"{COSINE}{pair}")):
                    cosines[row, column] = value
    norms = (metrics[f"{NORM}{name}"] for name in names)  # null: it was not finite
    return Map(names, cosines, np.array([v if is_number(v) else np.nan for v in norms]))


def draw_map(atlas: Map) -> str:
    """The map as SVG: a cell for each pair, blue where updates agree and red where they oppose."""
    with mpl.rc_context({**charts.STYLE, "axes.grid": False}):
        figure, axes = charts.blank("Updates of methods")
        size = 1.4 + 0.42 * len(atlas.names)
        figure.set_size_inches(max(4.2, size + 1.4), size)
        figure.subplots_adjust(left=0.34, bottom=0.9 / size)
        axes.imshow(atlas.cosines, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
        names = [name if len(name) <= charts.LINE // 2 else f"{name[:24]}…" for name in atlas.names]
        lengths = [f"{name}  {norm:.2f}" for name, norm in zip(names, atlas.norms, strict=True)]
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_yticks(range(len(names)), lengths)
        for (row, column), cosine in np.ndenumerate(atlas.cosines):
            colour = "white" if abs(cosine) > 0.6 else "#1f2933"
            label = "–" if np.isnan(cosine) else f"{cosine:.2f}"
            axes.text(column, row, label, ha="center", va="center", color=colour, fontsize=8)
        return charts.as_svg(figure)
