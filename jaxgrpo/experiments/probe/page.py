"""A probe as one HTML file: what it found, in charts and tables, and the advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from jaxgrpo.experiments.probe.measure import PER
from jaxgrpo.experiments.probe.terminal import number, others, span, title
from jaxgrpo.training.report import charts, html


def render(found: Mapping[str, Any]) -> str:
    """The whole page, of what `probing.main` puts together."""
    success = found["success"]
    tiles = {
        "success rate": number(success["rate"]),
        "prompts that never succeed": number(success["at_zero"], ".0%"),
        "prompts that always succeed": number(success["at_one"], ".0%"),
        **{f"pass@{k}": number(one["value"]) for k, one in _last(found["pass_at"])},
        **{f"live groups of {g}": _live(group) for g, group in _last(found["degeneracy"])},
    }
    figures = "".join(_figures(found))
    rest = [["", "value"], *([name, value] for name, value in others(found))]
    body = (
        f'<h1>Probe</h1>\n<div class="muted">{html.text(title(found))}</div>\n{html.tiles(tiles)}\n'
        f"<h2>Advice</h2>\n{_advice(found)}\n"
        f'<h2>Charts</h2>\n<div class="charts">{figures}</div>\n'
        f"<h2>Groups</h2>\n{html.table(_group_rows(found))}\n"
        f"<h2>pass@k</h2>\n{html.table(_pass_rows(found))}\n"
        f"<h2>Samples</h2>\n{html.table(rest)}"
    )
    return html.document(f"probe of {found['model']}", body)


def _last(numbers: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(numbers.items())[-1:]


def _live(group: Mapping[str, float]) -> str:
    return number(1 - group["measured"], ".0%")


def _advice(found: Mapping[str, Any]) -> str:
    lines = (
        f"<li><b>{html.text(one['about'])}:</b> {html.text(one['says'])}"
        f'<div class="muted">because {html.text(one["why"])} '
        f"({html.text(', '.join(one['numbers']))})</div></li>"
        for one in found["advice"]
    )
    return f'<ul class="box">{"".join(lines)}</ul>'


def _interval(found: Mapping[str, Any]) -> str:
    return f"{found['level'] * 100:g}% interval"


def _group_rows(found: Mapping[str, Any]) -> list[list[str]]:
    step = found["prompts_per_step"]
    columns = {
        "flat": ("measured", ".3f"),
        "all fail": ("all_fail", ".3f"),
        "all pass": ("all_pass", ".3f"),
        "i.i.d.": ("iid", ".3f"),
        "gap": ("gap", ".3f"),
        _interval(found): ("ci", ""),
        f"live groups per step of {step} prompts": ("live_groups", ".1f"),
        "live tokens per step": ("live_tokens", ".0f"),
        f"live groups per {PER} samples": (f"live_groups_per_{PER}_samples", ".0f"),
        "lucky single successes, of live groups": ("lucky", ".3f"),
    }
    rows = [["G", *columns]]
    for size, group in found["degeneracy"].items():
        cells = [
            span(group[name]) if name == "ci" else number(group[name], form)
            for name, form in columns.values()
        ]
        rows.append([str(size), *cells])
    return rows


def _pass_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "value", _interval(found)]]
    for k, one in found["pass_at"].items():
        rows.append([f"pass@{k}", number(one["value"]), span(one["ci"])])
    return rows


def _figures(found: Mapping[str, Any]) -> list[str]:
    drawn = []
    with mpl.rc_context(charts.STYLE):
        for name, draw, note in (
            (
                "Prompts by success rate",
                _draw_histogram,
                "At the ends all samples agree: a baseline of the group learns nothing there.",
            ),
            (
                "Flat groups",
                _draw_flat,
                f"Measured, and what they were if all prompts were equally hard; the bar is the "
                f"gap's {_interval(found)}.",
            ),
            (
                f"Live groups per {PER} samples",
                _draw_live,
                "At the same number of samples: small groups are more, each with less to compare.",
            ),
            ("pass@k", _draw_passes, f"With its {_interval(found)}."),
        ):
            figure, axes = charts.blank(name)
            draw(axes, found)
            drawn.append(html.figure(name, charts.as_svg(figure), note))
    return drawn


def _draw_histogram(axes: Axes, found: Mapping[str, Any]) -> None:
    counts = np.asarray(found["success"]["histogram"], float)
    share = counts / max(counts.sum(), 1)
    places = np.arange(len(counts)) / (len(counts) - 1)
    colours = [charts.FAIL, *[charts.MIXED] * (len(counts) - 2), charts.PASS]
    axes.bar(places, share, width=0.8 / len(counts), color=colours)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _draw_flat(axes: Axes, found: Mapping[str, Any]) -> None:
    groups = found["degeneracy"]
    places = np.arange(len(groups))
    measured, iid = (
        np.array([group[name] for group in groups.values()], float) for name in ("measured", "iid")
    )
    ends = np.array([group["ci"] for group in groups.values()], float)
    gap = measured - iid
    around = np.abs(ends.T - gap) * np.isfinite(ends.T)
    blue, orange = charts.COLOURS[:2]
    known = np.isfinite(around).all(0)
    axes.bar(places - 0.2, measured, 0.38, color=blue, label="measured")
    axes.bar(places + 0.2, iid, 0.38, color=orange, label="i.i.d.")
    axes.errorbar(
        places[known] - 0.2,
        measured[known],
        around[:, known],
        fmt="none",
        ecolor="#1f2933",
        capsize=3,
    )
    axes.set_xticks(places, [f"G = {size}" for size in groups])
    axes.set_ylim(0, 1.02)
    axes.legend(ncols=2)


def _draw_live(axes: Axes, found: Mapping[str, Any]) -> None:
    groups = found["degeneracy"]
    heights = [group[f"live_groups_per_{PER}_samples"] for group in groups.values()]
    bars = axes.bar(np.arange(len(groups)), heights, 0.6, color=charts.MIXED)
    axes.bar_label(bars, [number(height, ".0f") for height in heights], fontsize=8)
    axes.set_xticks(np.arange(len(groups)), [f"G = {size}" for size in groups])
    axes.margins(y=0.15)


def _draw_passes(axes: Axes, found: Mapping[str, Any]) -> None:
    passes = found["pass_at"]
    value = np.array([one["value"] for one in passes.values()], float)
    low, high = np.array([one["ci"] for one in passes.values()], float).T
    places = np.arange(len(passes))
    colour = charts.COLOURS[0]
    axes.plot(places, value, "o-", color=colour, markersize=3.5)
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xticks(places, [str(k) for k in passes])
    axes.set_ylim(-0.02, 1.02)
