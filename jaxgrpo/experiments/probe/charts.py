"""The charts of a probe's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from jaxgrpo.experiments.probe.measure import PER
from jaxgrpo.training.report import html
from jaxgrpo.training.report.charts import COLOURS, FAIL, MIXED, PASS, STYLE, as_svg, blank

Found = Mapping[str, Any]
"""The numbers of a probe, in the structure of its JSON"""


def figures(found: Found, interval: str) -> Iterator[str]:
    """Each chart, as HTML; `interval` is how its intervals are called."""
    drawn: Sequence[tuple[str, Callable[[Axes, Found], None], str]] = (
        (
            "Prompts by success rate",
            _histogram,
            "At the ends all samples agree: a baseline of the group learns nothing there.",
        ),
        (
            "Flat groups",
            _flat,
            "Measured, and what they were if all prompts were equally hard; the bar is the "
            f"gap's {interval}.",
        ),
        (
            f"Live groups per {PER} samples",
            _live,
            "At the same number of samples: small groups are more, each with less to compare.",
        ),
        ("pass@k", _passes, f"With its {interval}."),
    )
    with mpl.rc_context(STYLE):
        for name, draw, note in drawn:
            figure, axes = blank(name)
            draw(axes, found)
            yield html.figure(name, as_svg(figure), note)


def _histogram(axes: Axes, found: Found) -> None:
    counts = np.asarray(found["success"]["histogram"], float)
    last = len(counts) - 1
    places = np.arange(last + 1) / last
    colours = [FAIL, *[MIXED] * (last - 1), PASS]
    axes.bar(places, counts / max(counts.sum(), 1), width=0.8 / (last + 1), color=colours)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _flat(axes: Axes, found: Found) -> None:
    measured, iid = _of_groups(found, "measured"), _of_groups(found, "iid")
    around = np.abs(_of_groups(found, "ci").T - (measured - iid))
    known = np.isfinite(around).all(0)
    places = _place_groups(axes, found)
    axes.bar(places - 0.2, measured, 0.38, color=COLOURS[0], label="measured")
    axes.bar(places + 0.2, iid, 0.38, color=COLOURS[1], label="i.i.d.")
    bars: dict[str, Any] = {"fmt": "none", "ecolor": "#1f2933", "capsize": 3}
    axes.errorbar(places[known] - 0.2, measured[known], around[:, known], **bars)
    axes.set_ylim(0, 1.02)
    axes.legend(ncols=2)


def _live(axes: Axes, found: Found) -> None:
    heights = _of_groups(found, f"live_groups_per_{PER}_samples")
    bars = axes.bar(_place_groups(axes, found), heights, 0.6, color=MIXED)
    labels = [f"{height:.0f}" if np.isfinite(height) else "–" for height in heights]
    axes.bar_label(bars, labels, fontsize=8)
    axes.margins(y=0.15)


def _passes(axes: Axes, found: Found) -> None:
    passes = found["pass_at"]
    low, high = np.array([one["ci"] for one in passes.values()], float).T
    places = np.arange(len(passes))
    value = [one["value"] for one in passes.values()]
    axes.plot(places, value, "o-", color=COLOURS[0], markersize=3.5)
    axes.fill_between(places, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.set_xticks(places, [str(k) for k in passes])
    axes.set_ylim(-0.02, 1.02)


def _of_groups(found: Found, key: str) -> np.ndarray:
    return np.array([group[key] for group in found["degeneracy"].values()], float)


def _place_groups(axes: Axes, found: Found) -> np.ndarray:
    """One place per group size on the x-axis, labelled."""
    places = np.arange(len(found["degeneracy"]))
    axes.set_xticks(places, [f"G = {size}" for size in found["degeneracy"]])
    return places
