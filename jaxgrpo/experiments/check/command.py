"""`jaxgrpo check METHOD`: what a method climbs, as text, as a figure and as JSON."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxgrpo.config import own_code
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.storage import write_atomically
from jaxgrpo.experiments.check import targets
from jaxgrpo.experiments.check.laws import LAWS, broken
from jaxgrpo.experiments.check.method import read_method
from jaxgrpo.experiments.check.verdict import EXACT, Report, Row, check, main_rows
from jaxgrpo.training.processes.backend import start_backend
from jaxgrpo.training.records.console import Document, show_table
from jaxgrpo.training.records.report.html import check_can_draw, check_writable

PICTURES = (".png", ".svg")


def main(method: str, *, as_json: bool | str = False, figure: str | None = None) -> int | Document:
    """The command: prints what was found out, and writes it where asked. Returns the exit code.

    Args:
      method: of `read_method`.
      as_json: True: a document on stdout instead; a text: the file to write it to.
      figure: the file of a picture, .png or .svg.

    Raises: InputError that says why a method cannot be checked, or a file cannot be written.
    """
    file = as_json if isinstance(as_json, str) else None
    check_writable(file, figure, inputs=[method, own_code.named_file(method)])
    if figure is not None and Path(figure).suffix.lower() not in PICTURES:
        raise InputError(f"--figure {figure}: name a file that ends with .png or .svg")
    if figure is not None:
        check_can_draw("--figure needs", "leave it out")
    start_backend()
    report = check(read_method(method))
    document = Document(report.numbers())
    console = Console(highlight=False)
    if as_json is not True:
        show(console, report)
    if figure is not None:
        write_atomically(Path(figure), draw(report, Path(figure).suffix[1:].lower()))
    if file is not None:
        write_atomically(Path(file), document.text())
    for name in (file, figure):
        if name is not None:
            console.print(f"written: {name}", markup=False, soft_wrap=True)
    return document if as_json is True else 0


def describe(report: Report) -> list[str]:
    """What a report says, in sentences."""
    skipped = max(row.skipped for row in report.rows)
    return [
        _climbs(report),
        *([_skipped(skipped)] if skipped else []),
        f"cosine with the gradient of the mean reward: {report.cosine:.3f}",
        f"noise: the variance of one group's update is {_number(report.noise)} times the square of "
        "its mean",
        _flat_groups(report.flat_groups),
        *describe_penalty(report.penalty),
    ]


def show(console: Console, report: Report) -> None:
    """Prints a report."""
    for line in describe(report):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    show_table(console, _table(report), text=(0, 1))
    for name in broken(report.laws):
        console.print(f"breaks: {name}: {LAWS[name]}", markup=False, soft_wrap=True)
    for name in LAWS:
        if report.laws[name] is None:
            console.print(f"not judged: {name}: the chain takes a single size here", markup=False)
    kept_laws = [name for name in LAWS if report.laws[name]]
    console.print(f"keeps: {', '.join(kept_laws)}", markup=False, soft_wrap=True)


def scale_text(report: Report) -> str:
    """The multiples of the target's gradient in the update.

    Exactly the gradient is "1"; the same on every prompt "0.5 to 0.83, by group size"; else by
    prompt.
    """
    low, high = report.scale
    if high - low < EXACT * max(EXACT, abs(low), abs(high)):
        return _number(high)
    by = "by prompt" if report.bias > EXACT else "by group size"
    return f"{_number(low)} to {_number(high)}, {by}"


def draw(report: Report, suffix: str) -> bytes:
    """The picture: the weight of a prompt by its success rate, and the cosine in each setting.

    Args:
      suffix: "png" or "svg".
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from jaxgrpo.training.records.report import charts

    content = io.BytesIO()
    with mpl.rc_context(charts.STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        (FigureCanvasAgg if suffix == "png" else FigureCanvasSVG)(figure)
        left, right = figure.subplots(1, 2)
        _draw_weights(left, report)
        _draw_cosines(right, report.rows)
        title = textwrap.fill(f"{report.name}: {_climbs(report)}", 100)
        figure.suptitle(title, fontsize=10)
        metadata = {"Software": None} if suffix == "png" else {"Date": None, "Creator": None}
        figure.savefig(content, format=suffix, dpi=120, metadata=metadata)
    return content.getvalue()


def _draw_weights(axes: Any, report: Report) -> None:
    rows = main_rows(report.rows)
    for row in rows:
        order = np.argsort(row.rate)
        label = f"{row.game}, G = {row.group_size}"
        dashes = "o-" if row.game == "bandit" else "s--"
        axes.plot(row.rate[order], row.scale[targets.MEAN][order], dashes, ms=4, label=label)
    rate, size = np.linspace(0.04, 0.98, 200), max(row.group_size for row in rows)
    curves = {
        "mean reward": np.ones_like(rate),
        f"pass@{size}": size * (1 - rate) ** (size - 1),
        "log success": 1 / rate,
    }
    for name, dashes in zip(curves, ("-", "--", ":"), strict=True):
        axes.plot(rate, curves[name], dashes, color="#9aa3ad", lw=1.2, label=f"gradient of {name}")
    highest = max(float(row.scale[targets.MEAN].max()) for row in rows)
    lowest = min(float(row.scale[targets.MEAN].min()) for row in rows)
    axes.set_ylim(min(0.0, 1.15 * lowest), 1.25 * max(highest, 1.0))
    axes.set(xlabel="success rate of the prompt", ylabel="times the gradient of its mean reward")
    axes.set_title("How much a prompt weighs")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _draw_cosines(axes: Any, rows: Sequence[Row]) -> None:
    names = [_setting(row) for row in rows]
    axes.barh(range(len(rows)), [row.cosine for row in rows], color="#4c78a8", height=0.7)
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(min(0.0, *(1.05 * row.cosine for row in rows)), 1.05)
    axes.axvline(1, color="#9aa3ad", lw=0.8)
    axes.set_title("Cosine with ∇ mean reward")


def _setting(row: Row) -> str:
    stale = ", stale" if row.staleness else ""
    return f"{row.game}, {row.rewards}, G = {row.group_size}{stale}"


def _climbs(report: Report) -> str:
    bias = "" if report.bias < EXACT else f", off by {report.bias:.0%} of the update's length"
    scale = scale_text(report)
    times = "" if scale == "1" else f", times {scale}"
    if report.climbs == "nothing":
        return "climbs nothing: the expected update is 0"
    if report.climbs == "other" and report.cosine < 0:
        return f"climbs none of the targets: it descends the mean reward{times}"
    if report.climbs == "other":
        return f"climbs none of the targets: beside the mean reward{times}{bias}"
    if report.climbs == "divergence":
        return f"descends a divergence, nearest {report.target}{times}{bias}"
    return f"climbs the {report.target}{times}{bias}"


def _skipped(chance: float) -> str:
    return (
        f"not a number: the update of up to {chance:.0%} of the groups, as where a deviation of 0 "
        "divides; a run skips each step with one of them, and so does what is said here"
    )


def _flat_groups(flat: dict[str, float | None]) -> str:
    ends = []
    for name in ("all_fail", "all_pass"):
        value = flat[name]
        says = "left out" if value is None else f"advantage {_number(value)}"
        ends.append(f"{name.replace('_', ' ')}: {'not a number' if value == np.inf else says}")
    return f"flat groups: {'; '.join(ends)}; {flat['share'] or 0:.0%} of the update comes from them"


def describe_penalty(penalty: dict[str, Any] | None) -> list[str]:
    """What is said of `Report.penalty`."""
    if penalty is None:
        return []
    what = penalty["climbs"]
    if what == "nothing":
        return [f"penalty {penalty['penalties']}: does nothing in the first update"]
    sign, backwards = "climbs" if what == targets.ENTROPY else "descends", penalty["backwards"]
    if what == "other":
        way = "minus " if backwards else ""
        what = f"none of the targets, nearest to {way}{penalty['nearest']}"
    elif backwards:
        sign = "the wrong way: it descends" if sign == "climbs" else "the wrong way: it climbs"
    return [
        f"penalty {penalty['penalties']}: {sign} {what}; cosine with the gradient of "
        f"{targets.REVERSE} {penalty['cosine']:.3f}"
    ]


def _table(report: Report) -> list[list[str]]:
    head = ["game", "rewards", "G", "stale", "cosine", "times", "off by", "noise"]
    rows = [head]
    for row in report.rows:
        scale = row.scale[report.target]
        ends = _number(float(scale.min())), _number(float(scale.max()))
        times = ends[0] if ends[0] == ends[1] else " to ".join(ends)
        rows.append(
            [
                *(row.game, row.rewards, str(row.group_size), "yes" if row.staleness else "no"),
                *(f"{row.cosine:.4f}", times, f"{row.bias[report.target]:.1%}"),
                _number(row.noise),
            ]
        )
    return rows


def _number(value: float | None) -> str:
    """Three digits; what is 0 but for rounding is 0.

    >>> _number(1e-15), _number(0.70710678), _number(2.0)
    ('0', '0.707', '2')
    """
    assert value is not None
    return "0" if abs(value) < EXACT else f"{value:.3g}"
