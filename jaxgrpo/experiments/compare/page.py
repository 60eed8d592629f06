"""The report of a comparison as one HTML file with its charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from jaxgrpo.experiments.compare import analysis, statistics
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcome, Outcomes, values_of
from jaxgrpo.experiments.compare.sections import Section, difference_rows, runs
from jaxgrpo.training.report import charts, html

BANDS = 1000  # resamples of the seeds, for the band of a curve
CURVES = {
    "reward": ("Reward in training", "Mean over the samples of a step."),
    "groups/all_fail": ("Groups that all fail", "The share of groups without a success."),
    "live_groups": ("Live groups", "The share of groups that can move the parameters."),
    "entropy": ("Entropy", "Nats per token."),
}


def render(
    experiment: Experiment,
    outcomes: Outcomes,
    found: Sequence[Section],
    differences: Mapping[str, Mapping[str, str]],
) -> str:
    """The whole page."""
    name = experiment.source.stem if experiment.source else experiment.dir
    arms = f"{', '.join(experiment.arms)} · {len(experiment.seeds)} seeds"
    about = html.text(f"{arms} · control {experiment.control}")
    body = [
        f'<h1>{html.text(name)}</h1>\n<div class="muted">{about}</div>',
        _section(found[0]),
        f'<h2>Charts</h2>\n<div class="charts">{"".join(_figures(experiment, outcomes))}</div>',
        *map(_section, found[1:]),
        "<h2>In what the arms differ</h2>",
        html.table(difference_rows(differences)),
    ]
    return html.document(name, "\n".join(body))


def _section(section: Section) -> str:
    text = "".join(f"<p>{html.text(line)}</p>" for line in section.text)
    table = html.table(section.rows) if section.rows else ""
    return f"<h2>{html.text(section.title)}</h2>\n{text}{table}"


def _figures(experiment: Experiment, outcomes: Outcomes) -> list[str]:
    best = {
        row.arm: runs(experiment, outcomes, row.arm, row.rate)
        for row in analysis.at_best(experiment, outcomes)
    }
    drawn = [
        _figure(
            "By learning rate",
            f"{experiment.metric}, mean and 95% bootstrap interval over seeds.",
            lambda axes: by_rate(axes, experiment, outcomes),
        ),
        _figure(
            f"Minus {experiment.control}",
            "At each arm's best rate; by seeds, with the 95% bootstrap interval.",
            lambda axes: forest(axes, experiment, outcomes),
            left=min(0.5, 0.04 + 0.017 * max(map(len, experiment.arms))),
        ),
        _figure(
            "pass@k",
            "Dotted: the base. Each arm at its best rate, means over seeds.",
            lambda axes: passes(axes, best),
        ),
    ]
    for name, (title, note) in CURVES.items():
        note += " Running means at each arm's best rate; bands: 95% bootstrap over seeds."
        drawn.append(_figure(title, note, lambda axes, name=name: curves(axes, best, name)))
    return drawn


def _figure(title: str, note: str, draw: Callable[[Axes], None], left: float = 0.14) -> str:
    """A chart, `left` the share of its width that is kept for the labels of its rows."""
    with mpl.rc_context(charts.STYLE):
        figure, axes = charts.blank(title)
        figure.subplots_adjust(left=max(0.14, left))
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", ncols=2)
        return html.figure(title, charts.as_svg(figure), note)


def by_rate(axes: Axes, experiment: Experiment, outcomes: Outcomes) -> None:
    """The metric over learning rates, one line per arm."""
    rates = sorted({rate for arm in experiment.arms for rate in experiment.rates(arm)})
    for place, arm in enumerate(experiment.arms):
        found = [analysis.estimate(row) for row in
                 values_of(experiment, outcomes, arm, experiment.metric)]  # fmt: skip
        where = np.array([rates.index(rate) for rate in experiment.rates(arm)])
        shift = 0.03 * (place - len(experiment.arms) / 2)
        middle = np.array([one.value for one in found])
        ends = np.array([[one.value - one.low, one.high - one.value] for one in found]).T
        axes.errorbar(
            where + shift, middle, yerr=np.nan_to_num(np.maximum(ends, 0)), color=colour(place),
            label=arm, marker="o", markersize=3, linewidth=1.2, capsize=2,
        )  # fmt: skip
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])


def forest(axes: Axes, experiment: Experiment, outcomes: Outcomes) -> None:
    """Differences from the control, with intervals and every seed."""
    table = analysis.at_best(experiment, outcomes)
    chosen = {row.arm: experiment.rates(row.arm).index(row.rate) for row in table}
    by_seed = {
        arm: values_of(experiment, outcomes, arm, experiment.metric)[place]
        for arm, place in chosen.items()
    }
    others = [row for row in table if row.difference is not None]
    for place, row in enumerate(others):
        value, low, high = row.difference or (np.nan,) * 3
        tone = colour(list(experiment.arms).index(row.arm))
        axes.plot([low, high], [place, place], color=tone, linewidth=2)
        axes.plot([value], [place], "o", color=tone)
        seeds = by_seed[row.arm] - by_seed[experiment.control]
        axes.plot(seeds, np.full(len(seeds), place + 0.22), "|", color=tone, alpha=0.6)
    axes.axvline(0, color="#6b7280", linewidth=0.8)
    axes.set_yticks(range(len(others)), [row.arm for row in others])
    axes.set_ylim(len(others) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def passes(axes: Axes, best: Mapping[str, Sequence[Outcome]]) -> None:
    """pass@k of the base and of every arm."""
    for place, (arm, found) in enumerate(best.items()):
        base = np.mean([run.base_pass for run in found], axis=0)
        k = np.arange(1, len(base) + 1)
        if place == 0:
            axes.plot(k, base, ":", color="#111827", linewidth=1.6, label="base")
        trained = np.mean([run.trained_pass for run in found], axis=0)
        axes.plot(k, trained, color=colour(place), linewidth=1.4, label=arm)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def curves(axes: Axes, best: Mapping[str, Sequence[Outcome]], name: str) -> None:
    """A metric of training over steps, running means, with bands over seeds."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    for place, (arm, found) in enumerate(best.items()):
        values = np.array([smoothed(run.curves[name]) for run in found])
        steps = np.arange(1, values.shape[1] + 1)
        axes.plot(steps, values.mean(0), color=colour(place), linewidth=1.4, label=arm)
        if len(values) > 1:
            low, high = statistics.band(values, BANDS)
            axes.fill_between(steps, low, high, color=colour(place), alpha=0.15, linewidth=0)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of the last twentieth of all steps, of fewer at the start; NaN counts as nothing."""
    width = max(1, len(values) // 20)
    known = np.isfinite(values)
    total = np.cumsum(np.insert(np.where(known, values, 0.0), 0, 0.0))
    count = np.cumsum(np.insert(known.astype(float), 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - width, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[end] - total[start]) / (count[end] - count[start])


def colour(place: int) -> str:
    """Of the arm at this place."""
    return charts.COLOURS[place % len(charts.COLOURS)]
