"""The charts of a report as SVG texts, drawn by matplotlib from a run's record."""

from __future__ import annotations

import fnmatch
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxgrpo.evaluation.intervals import without_ends
from jaxgrpo.training.records.report.record import Record, natural, reward_sum, visible

MAX_POINTS = 300
"""Points of a curve; a longer run is shown by the means of as many stretches of steps."""

HIGHEST = 1e100
"""What is larger is drawn as this: matplotlib multiplies and adds what it draws."""

COLOURS = ("#2563a8", "#d9822b", "#3a9a6b", "#b04a78", "#7c6fb0", "#6b7280")
DASHES = ("-", "--", ":")
"""Curves beyond the number of colours are dashed."""

Style = tuple[str, str]
"""The colour and the dashes of a curve"""

COLUMNS = 3  # charts side by side in a picture

LINE = 52
"""Characters of a legend's line."""

FAIL, MIXED, PASS = "#d98c8c", "#7da7d0", "#8cc4a0"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jaxgrpo",  # the same chart is the same bytes
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3ad",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.75,
    "legend.borderpad": 0.2,
    "legend.columnspacing": 1.2,
    "legend.handlelength": 2.6,  # its dashes can be seen
    "legend.fontsize": 8,
}


class Curve(NamedTuple):
    """A metric over the steps, and the band of its interval where it has one."""

    steps: np.ndarray  # [n]
    values: np.ndarray  # [n]
    band: tuple[np.ndarray, np.ndarray] | None = None  # low and high [n]


class Panel(NamedTuple):
    """One chart: metrics by the names of their curves. A "*" takes every metric that fits, but for
    the ends of intervals: those are a curve's band."""

    title: str
    curves: dict[str, str]  # metric -> label
    note: str  # what to look for
    kind: str = "lines"  # or "stack", "points"
    share: bool = False  # from 0 to 1
    log: bool = False
    colours: Sequence[str] = COLOURS


PANELS = (
    Panel(
        "Reward",
        {"reward": "weighted sum", "rewards/*/mean": "*"},
        "Mean over the completions of a step.",
    ),
    Panel(
        "Evaluation",
        {"eval/accuracy": "accuracy", "eval/pass@*": "pass@*"},
        "On held-out prompts: greedy accuracy and unbiased pass@k; bands are 95% intervals.",
        kind="points",
        share=True,
    ),
    Panel(
        "Groups",
        {"groups/all_fail": "all fail", "groups/mixed": "mixed", "groups/all_pass": "all pass"},
        "Where all samples of a group get the same reward, what is relative to the group is 0.",
        kind="stack",
        share=True,
        colours=(FAIL, MIXED, PASS),
    ),
    Panel(
        "Live",
        {"live_groups": "groups", "live_samples": "samples", "live_tokens": "tokens"},
        "The share that can move the parameters; a penalty such as KL acts on all.",
        share=True,
    ),
    Panel(
        "Entropy",
        {"entropy_estimated": "all tokens, estimated", "entropy": "live samples, exact"},
        "Nats per token; falls as the policy makes up its mind.",
    ),
    Panel("KL", {"kl": "to the reference"}, "Nats per token, by k3; by full_kl exact."),
    Panel(
        "Distance from the base",
        {"eval/kl_to_base": "exact", "eval/kl_to_base_estimated": "estimated"},
        "On held-out prompts: nats per completion, with 95% intervals.",
        kind="points",
    ),
    Panel(
        "Lengths",
        {
            "completions/mean_length": "mean",
            "completions/max_length": "longest",
            "completions/mean_terminated_length": "mean of those that ended",
        },
        "Tokens of a completion.",
    ),
    Panel(
        "Cut, unscored, repeated",
        {
            "completions/clipped_ratio": "cut at the limit",
            "rewards/*/unscored": "unscored by *",
            "completions/repetition": "repeated 4-grams",
        },
        "Shares that should be near 0.",
        share=True,
    ),
    Panel(
        "Identical groups",
        {"groups/identical": "share of groups"},
        "All completions are the same, token by token: rises as the policy makes up its mind.",
        share=True,
    ),
    Panel("Gradient norm", {"grad_norm": "norm"}, "Of the whole batch, before clipping.", log=True),
    Panel(
        "Sampler against trainer",
        {"sampling/sampling_logp_difference/mean": "mean", "policy_kl": "KL"},
        "Nats per token between the policy that sampled and the one that is updated.",
        log=True,
    ),
    Panel(
        "Updates of methods beside the run's",
        {"atlas/cosine/run/*": "*"},
        "Cosines: 1 is the same direction, 0 nothing in common.",
        kind="points",
    ),
    Panel(
        "Seconds per step",
        {f"time/{phase}": phase for phase in ("sample", "reward", "prepare", "update")},
        "The first step compiles; its bar may end above the frame.",
        kind="stack",
    ),
    Panel(
        "Loss",
        {"loss": "loss"},
        "No measure of success: near 0 by construction where the advantages of a group sum to 0.",
    ),
)


def draw(record: Record) -> list[tuple[Panel, str]]:
    """(panel, SVG) of every panel that has a curve."""
    panel_curves = [(panel, _curves(panel, record)) for panel in PANELS]
    with mpl.rc_context(STYLE):
        return [(panel, _svg(panel, curves)) for panel, curves in panel_curves if curves]


def draw_together(records: Mapping[str, Record]) -> list[tuple[Panel, str]]:
    """As `draw`, with the curves of several runs over each other.

    Args:
      records: by the names of the runs.
    """
    drawn = []
    with mpl.rc_context(STYLE):
        for panel, curves, styles in _together(records):
            figure, axes = blank(panel.title)
            _fill(axes, panel, curves, styles)
            legend_below(axes)
            drawn.append((panel, as_svg(figure)))
    return drawn


def picture(records: Mapping[str, Record]) -> bytes:
    """The charts of `draw_together` as one PNG."""
    shown = list(_together(records))
    rows = -(-len(shown) // COLUMNS)
    content = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * COLUMNS, 3.4 * max(rows, 1)), layout="constrained")
        FigureCanvasAgg(figure)
        for place, (panel, curves, styles) in enumerate(shown, start=1):
            axes = figure.add_subplot(rows, COLUMNS, place)
            axes.set_title(panel.title)
            _fill(axes, panel, curves, styles)
            handles, labels = axes.get_legend_handles_labels()
            labels = list(map(_shorten, labels))
            below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1)}
            axes.legend(handles, labels, ncols=_columns(labels), **below)
        figure.savefig(content, format="png", dpi=120, metadata={"Software": None})
    return content.getvalue()


def _together(
    records: Mapping[str, Record],
) -> Iterator[tuple[Panel, dict[str, Curve], list[Style]]]:
    """Each panel that some run has a curve for: a colour for a run, or for a metric if there are
    several, whose dashes then are the run's."""
    for panel in PANELS:
        by_run = {run: _curves(panel, record) for run, record in records.items()}
        metrics = list(dict.fromkeys(label for curves in by_run.values() for label in curves))
        curves, styles = {}, []
        for number, (run, measured) in enumerate(by_run.items()):
            for label, curve in measured.items():
                alone = len(metrics) == 1
                place = number if alone else metrics.index(label)
                curves[plain_label(run) if alone else f"{label}, {plain_label(run)}"] = curve
                dashes = "-" if alone else DASHES[number % len(DASHES)]
                styles.append((COLOURS[place % len(COLOURS)], dashes))
        if curves:
            yield panel, curves, styles


def _curves(panel: Panel, record: Record) -> dict[str, Curve]:
    """Every curve by its label, in the order of the panel."""
    measured = without_ends(record.names())
    labels: dict[str, str] = {}
    for pattern, label in panel.curves.items():
        prefix, _, suffix = pattern.partition("*")
        for name in sorted(fnmatch.filter(measured, pattern), key=natural):
            labels[name] = plain_label(
                label.replace("*", name.removeprefix(prefix).removesuffix(suffix))
            )
    has_weight = any(weight != 1 for weight in reward_sum(record.config).weights.values())
    if "reward" in labels and len(labels) == 2 and not has_weight:
        del labels[next(name for name in labels if name != "reward")]  # both are the same
    curves = {label: _curve(record, name) for name, label in labels.items()}
    return {label: curve for label, curve in curves.items() if curve.values.size}


def _curve(record: Record, name: str) -> Curve:
    steps, values = record.series(name)
    ends = [record.series(f"{name}{end}") for end in ("/low", "/high")]

    def thin(heights: list[float]) -> tuple[np.ndarray, np.ndarray]:
        return _thin(np.asarray(steps, float), np.clip(heights, -HIGHEST, HIGHEST))

    if not values or any(end_steps != steps for end_steps, _ in ends):
        return Curve(*thin(values))
    low, high = (thin(end)[1] for _, end in ends)
    return Curve(*thin(values), (low, high))


def plain_label(label: str) -> str:
    """A label that matplotlib neither reads as mathematics nor hides for a leading "_"."""
    label = visible(label).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(values) <= MAX_POINTS:
        return steps, values
    edges = np.linspace(0, len(values), MAX_POINTS + 1).astype(int)[:-1]
    sizes = np.diff(np.append(edges, len(values)))
    return np.add.reduceat(steps, edges) / sizes, np.add.reduceat(values, edges) / sizes


def _svg(panel: Panel, curves: dict[str, Curve]) -> str:
    figure, axes = blank(panel.title)
    count = len(panel.colours)
    places = [divmod(place, count) for place in range(len(curves))]
    styles = [(panel.colours[place], DASHES[lap % len(DASHES)]) for lap, place in places]
    _fill(axes, panel, curves, None if panel.kind == "stack" else styles)
    legend_below(axes)
    return as_svg(figure)


def _fill(
    axes: Axes, panel: Panel, curves: dict[str, Curve], styles: Sequence[Style] | None
) -> None:
    """Draws the curves, as areas over each other where they have no styles."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # no factor beside the title
    if styles is None:
        _stack(axes, panel, curves)
    else:
        _lines(axes, panel, curves, styles)
    if panel.share:
        axes.set_ylim(-0.02, 1.02)


def blank(title: str) -> tuple[Figure, Axes]:
    """A chart with nothing in it yet."""
    figure = Figure(figsize=(4.2, 2.5))
    # Fixed margins: to fit them to the labels takes as long again as all the rest.
    figure.subplots_adjust(left=0.14, right=0.98, top=0.9, bottom=0.1)
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def legend_below(axes: Axes) -> None:
    """The names of the curves in rows below the chart, which becomes taller; none for one curve."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    labels = list(map(_shorten, labels))
    columns = _columns(labels)
    lines = 0.06 + 0.16 * -(-len(labels) // columns)  # inches
    width, old_height = figure.get_size_inches()
    height = old_height + lines
    place = axes.get_position()
    bottom, top = (place.y0 * old_height + lines) / height, (place.y1 * old_height + lines) / height
    figure.set_size_inches(width, height)
    figure.subplots_adjust(bottom=bottom, top=top)
    figure.legend(handles, labels, loc="lower center", ncols=columns, borderaxespad=0.2)


def _shorten(label: str) -> str:
    return label if len(label) <= LINE else f"{label[: LINE - 1]}…"


def _columns(labels: Sequence[str]) -> int:
    """Names of a legend that stand side by side."""
    return min(len(labels), max(1, (LINE + 7) // (max(map(len, labels)) + 7)))


def as_svg(figure: Figure) -> str:
    """The same text for the same chart."""
    text = io.StringIO()
    options: dict[str, Any] = {"transparent": True, "metadata": {"Date": None, "Creator": None}}
    with warnings.catch_warnings():
        # Text stays text: who reads it has the letters, also where matplotlib's font lacks them.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(text, format="svg", **options)
    return text.getvalue()


def _lines(axes: Axes, panel: Panel, curves: dict[str, Curve], styles: Sequence[Style]) -> None:
    """Each curve over its band; a long one faint, with its running mean on top."""
    for (label, (steps, values, band)), (colour, dashes) in zip(
        curves.items(), styles, strict=True
    ):
        if band is not None and len(values) > 1:
            axes.fill_between(steps, *band, color=colour, alpha=0.13, linewidth=0)
        elif band is not None:
            axes.vlines(steps, *band, color=colour, alpha=0.5)
        smooth = panel.kind != "points" and len(values) >= 40
        if smooth:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            values = _running_mean(values, len(values) // 20)
        marker = "o" if panel.kind == "points" or len(values) == 1 else None
        axes.plot(
            *(steps, values, dashes),
            color=colour, label=label, linewidth=1.6, marker=marker, markersize=3.5,
        )  # fmt: skip
    if panel.log and all((curve.values > 0).all() for curve in curves.values()):
        axes.set_yscale("log")
    if panel.kind == "stack":
        _end_above_the_usual(axes, np.concatenate([curve.values for curve in curves.values()]))


def _stack(axes: Axes, panel: Panel, curves: dict[str, Curve]) -> None:
    steps = next(iter(curves.values())).steps
    heights = [np.interp(steps, curve.steps, curve.values) for curve in curves.values()]
    if len(steps) == 1:  # an area needs two points
        steps, heights = np.append(steps, steps + 1), [np.repeat(height, 2) for height in heights]
    axes.stackplot(
        steps, *heights, labels=list(curves), colors=panel.colours[: len(heights)], alpha=0.9
    )
    axes.set_xlim(steps[0], steps[-1])
    _end_above_the_usual(axes, np.sum(heights, axis=0))


def _end_above_the_usual(axes: Axes, heights: np.ndarray) -> None:
    """Leaves the top of single high values out, such as that of a first step that compiles."""
    usual = float(np.quantile(heights, 0.9))
    if heights.max() > 3 * usual > 0:
        axes.set_ylim(0, 1.5 * usual)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the last `width` values, of fewer at the start."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - max(width, 1), 0)
    return (total[end] - total[start]) / (end - start)
