"""What the charts of a comparison may show: no band that says nothing, none beyond what can be."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pictures import legends, pictures

from jaxgrpo.experiments.compare import report, results
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcome
from jaxgrpo.training.records.report import charts

STEPS = 6


def compared(seeds: int, arms: tuple[str, ...] = ("control", "arm")):
    """(experiment, outcomes): shares and rewards of 0 and 1 whose seeds differ much."""
    experiment = Experiment(
        base="none", dir="none", arms={arm: {} for arm in arms}, control="control",
        learning_rates=(0.1,), own_rates={}, seeds=tuple(range(seeds)), metric="eval/pass@1",
    )  # fmt: skip

    def outcome(place: int, seed: int) -> Outcome:
        share = np.linspace(0, 1, STEPS) if (place + seed) % 2 else np.ones(STEPS)
        over_steps: dict[str, Any] = dict.fromkeys(results.OVER_STEPS, share)
        passes = np.array([0.5, 0.75])
        numbers = {"eval/pass@1": float((place + seed) % 2) * 0.2 + 0.8}
        return Outcome(None, numbers, over_steps, passes, passes, {})  # pyright: ignore

    outcomes = {
        (arm, 0.1): {seed: outcome(place, seed) for seed in range(seeds)}
        for place, arm in enumerate(arms)
    }
    return experiment, outcomes


def heights(axes) -> np.ndarray:
    """Every height that a band or a bar of the chart reaches."""
    paths = [path for shown in axes.collections for path in shown.get_paths()]
    return np.concatenate([path.vertices[:, 1] for path in paths])


@pytest.mark.parametrize("seeds", [2, 4, 5, 7])
@pytest.mark.parametrize("name", report.CURVES)
def test_no_band_leaves_what_was_measured(seeds, name):
    experiment, outcomes = compared(seeds)
    axes = Figure().add_subplot()
    report.curves(axes, report.best_runs(experiment, outcomes), name)
    assert len(axes.collections) == 2, "a band for each arm"
    assert (heights(axes).min(), heights(axes).max()) == (0, 1)


@pytest.mark.parametrize(("seeds", "few"), [(2, True), (4, True), (5, False), (7, False)])
def test_few_seeds_are_shown_by_their_lowest_and_highest(seeds, few):
    experiment, outcomes = compared(seeds)
    axes = Figure().add_subplot()
    report.by_rate(axes, experiment, outcomes)
    low, high = heights(axes).min(), heights(axes).max()
    assert ((low, high) == (0.8, 1.0)) == few
    assert high <= 1
    figures = "".join(report._figures(experiment, outcomes))
    assert ("lowest and highest seed" in figures) == few
    assert ("95%" in figures) != few


def test_no_two_of_nine_arms_look_alike():
    experiment, outcomes = compared(2, ("control", "_arm", *(f"arm_{place}" for place in range(7))))
    runs = report.best_runs(experiment, outcomes)
    points = {arm: np.ones((2, 2)) for arm in runs}
    draw = {
        "rates": lambda axes: report.by_rate(axes, experiment, outcomes),
        "passes": lambda axes: report.passes(axes, runs),
        "curves": lambda axes: report.curves(axes, runs, "reward"),
        "distance": lambda axes: report.distance(axes, points),
    }
    for name, chart in draw.items():
        axes = Figure().add_subplot()
        chart(axes)
        handles, labels = axes.get_legend_handles_labels()
        lines = [getattr(handle, "lines", [handle])[0] for handle in handles]
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
        assert len(looks) == len(labels) >= 9, name


@pytest.mark.parametrize("seeds", [2, 7])
def test_no_interval_of_a_table_leaves_the_metrics_range(seeds):
    experiment, outcomes = compared(seeds)
    for row in results.at_best(experiment, outcomes):
        assert 0 <= row.metric.low < row.metric.value < row.metric.high <= 1
        if row.difference is not None:
            assert -1 <= row.difference.low <= row.difference.high <= 1
    values = np.array([0.1, 2.0])
    assert results.estimate(values, "entropy").low == 0
    assert results.estimate(values, "reward").low < 0, "its range is not known"


def test_no_legend_lies_in_a_chart():
    arms = ("control", *(f"an arm with a name of some length {i}" for i in range(5)))
    drawn = pictures("".join(report._figures(*compared(2, arms))))
    named_at_its_lines = 1  # the chart of differences
    counts = [(1, 0)] * 7
    counts[named_at_its_lines] = (0, 0)
    assert [legends(svg) for svg in drawn] == counts


@pytest.mark.parametrize(
    "names",
    [("a", "b"), ("mean", "longest", "mean of those that ended"), ("x" * 90, "y"), "abcdefghijkl"],
)
def test_a_legend_covers_neither_curves_nor_labels_and_ends_in_the_picture(names):
    with mpl.rc_context(charts.STYLE):
        figure, axes = charts.blank("title")
        before = axes.get_position().height * figure.get_figheight()
        for name in names:
            axes.plot([1, 2], [0, 1], label=name)
        charts.legend_below(axes)
        renderer = FigureCanvasAgg(figure).get_renderer()
        (legend,) = figure.legends
        chart, names_at = axes.get_tightbbox(renderer), legend.get_window_extent(renderer)
        assert chart is not None
        assert names_at.y1 <= chart.y0
        assert min(names_at.x0, names_at.y0) >= 0
        height = axes.get_position().height * figure.get_figheight()
        assert height == pytest.approx(before), "the chart is as large as it was"
