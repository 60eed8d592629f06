"""The report of a comparison as one HTML file with its charts.

The report of a comparison as titled texts and tables, before it becomes Markdown or HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from jaxgrpo.experiments.compare import results, statistics
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcome, Outcomes, values_of
from jaxgrpo.experiments.compare.statistics import Estimate, Row, Table
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
        for row in statistics.at_best(experiment, outcomes)
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
        found = [statistics.estimate(row) for row in
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
    table = statistics.at_best(experiment, outcomes)
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


NO_P = (
    "No p: its learning rates are not the control's, and the best of them is chosen on the seeds "
    "it is judged on. Take tuning_seeds, or the same rates."
)


class Section(NamedTuple):
    """A title, sentences, and a table whose first row is its head."""

    title: str
    text: list[str]
    rows: list[list[str]]
    timed: bool = False  # it tells of the clock, and so is not the same twice


def sections(experiment: Experiment, outcomes: Outcomes) -> list[Section]:
    """Everything, the answer first."""
    best = statistics.at_best(experiment, outcomes)
    chosen = {row.arm: runs(experiment, outcomes, row.arm, row.rate) for row in best}
    rates = dict.fromkeys(rate for arm in experiment.arms for rate in experiment.rates(arm))
    tables = [
        Section(
            f"At learning rate {rate:g}",
            [],
            rows_of(experiment, statistics.at_rate(experiment, outcomes, rate)),
        )
        for rate in rates
    ]
    return [
        _answer(experiment, best),
        Section("What can be seen", [said_detectable(experiment)], []),
        Section(
            "At each arm's best learning rate",
            [_how_chosen(experiment)],
            rows_of(experiment, best, own_rates=True),
        ),
        *_mixed(outcomes),
        *tables,
        _pass_section(experiment, chosen),
        _groups_section(chosen),
        *_warnings(outcomes),
        _cost_section(chosen),
    ]


def runs(experiment: Experiment, outcomes: Outcomes, arm: str, rate: float) -> list[Outcome]:
    """The outcomes of an arm at a rate, of the seeds that count."""
    return [outcomes[arm, rate][seed] for seed in experiment.seeds]


def markdown(found: Sequence[Section]) -> str:
    """tables.md: the same bytes for the same runs, so without what the clock says."""
    lines = []
    for section in found:
        if section.timed:
            continue
        lines += [f"## {section.title}", ""]
        lines += [line for text in section.text for line in (text, "")]
        if section.rows:
            head, *body = section.rows
            rule = ["---", *["---:"] * (len(head) - 1)]
            lines += [f"| {' | '.join(row)} |" for row in (head, rule, *body)] + [""]
    return "\n".join(lines)


def difference_rows(differing: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """Keys that differ between arms, one per row."""
    arms = list(next(iter(differing.values()), {}))
    return [["key", *arms], *([key, *values.values()] for key, values in differing.items())]


def said_detectable(experiment: Experiment) -> str:
    """What the number of seeds allows to be seen at all."""
    least, corrected, needed = statistics.detectable(experiment)
    seeds, tested = len(experiment.seeds), statistics.testable(experiment)
    without = [arm for arm in experiment.tested if arm not in tested]
    untold = "".join(f"{arm}: {NO_P} " for arm in without).strip()
    if not tested:
        return untold
    text = (
        f"{seeds} seeds: an exchange of labels gives no p below {least:.2g}, and none below "
        f"{corrected:.2g} corrected for {_count(len(tested), 'comparison')} "
        f"({', '.join(tested)} with {experiment.control})."
    )
    if corrected > experiment.level:
        text += (
            f" At the level {experiment.level:g} no difference can be shown, however large: take "
            f"{needed} seeds or more, or name fewer arms in `tests` before looking."
        )
    return f"{text} {untold}".strip()


def rows_of(experiment: Experiment, table: Table, own_rates: bool = False) -> list[list[str]]:
    """A table of arms as texts."""
    metric = experiment.metric
    head = ["arm", *(["rate"] if own_rates else []), metric, "95% interval"]
    head += [f"minus {experiment.control}", "95% interval", "p", "corrected p"]
    return [head, *(_cells(row, own_rates) for row in table)]


def _cells(row: Row, own_rates: bool) -> list[str]:
    difference = ["–", "–"] if row.difference is None else _pair(row.difference, "+.3f")
    p = ["–" if value is None else f"{value:.2g}" for value in (row.p, row.corrected)]
    rate = [f"{row.rate:g}"] if own_rates else []
    return [row.arm, *rate, *_pair(row.metric, ".3f"), *difference, *p]


def _pair(found: Estimate, form: str) -> list[str]:
    if not np.isfinite(found.low):
        return [format(found.value, form), "–"]
    return [format(found.value, form), f"{found.low:{form}} to {found.high:{form}}"]


def _answer(experiment: Experiment, best: Table) -> Section:
    """One sentence per comparison, the same one for gains, losses and neither."""
    text = []
    for row in best:
        if row.arm not in experiment.tested or row.difference is None:
            continue
        low, high = row.difference.low, row.difference.high
        differs = (
            f"{experiment.metric} differs by {row.difference.value:+.3f} (95% interval {low:+.3f} "
            f"to {high:+.3f})"
        )
        opening = f"{row.arm} against {experiment.control}"
        if row.corrected is None:
            text.append(f"{opening}: not tested. {differs}. {NO_P}")
        else:
            word, _ = statistics.standing(experiment, row)
            text.append(f"{opening}: {word}. {differs}, corrected p = {row.corrected:.2g}.")
    seeds = _count(len(experiment.seeds), "seed")
    title = f"{experiment.metric}, each arm at its best learning rate, {seeds}"
    return Section(title, text, [])


def _how_chosen(experiment: Experiment) -> str:
    means = f"the {'highest' if experiment.better == 'higher' else 'lowest'} mean"
    if experiment.tuning_seeds:
        seeds = ", ".join(map(str, experiment.tuning_seeds))
        chosen = (
            f"Rates are those of {means} over the tuning seeds {seeds}, which count nowhere else."
        )
    else:
        chosen = (
            f"Rates are those of {means} over the very seeds shown, so that means are a little too "
            "good, the more so the more rates an arm has; the test makes the choice again in every "
            "exchange of labels, where an arm has the control's rates."
        )
    how = "exact"
    if len(experiment.seeds) > statistics.EXACT:
        how = f"{statistics.DRAWN} drawn exchanges"
    return (
        f"{chosen} Intervals: percentile bootstrap over seeds, too narrow where seeds are few. p: "
        f"exchange of labels within seeds, two-sided, {how}; corrected by Holm within a table."
    )


def _pass_section(experiment: Experiment, chosen: dict[str, list[Outcome]]) -> Section:
    """pass@k before and after, and where the trained model falls below the base."""
    samples = min(len(run.base_pass) for found in chosen.values() for run in found)
    sizes = [4**power for power in range(20) if 4**power <= samples]
    rows = [["arm", *(f"pass@{k}, base → trained" for k in sizes), "below the base from k"]]
    for arm, found in chosen.items():
        base = np.array([run.base_pass[:samples] for run in found])
        trained = np.array([run.trained_pass[:samples] for run in found])
        k = statistics.crossing(base, trained, experiment.level)
        one, other = base.mean(0), trained.mean(0)
        rows.append(
            [
                arm,
                *(f"{one[k - 1]:.3f} → {other[k - 1]:.3f}" for k in sizes),
                f"none shown up to {samples}" if k is None else str(k),
            ]
        )
    text = (
        "Means over seeds and prompts, unbiased. The last column: the smallest k at which the "
        "trained model is shown to solve less than the base: the 95% interval over seeds of the "
        "difference lies wholly below 0, and p, corrected for all k, is at most "
        f"{experiment.level:g} (which takes {statistics.seeds_needed(1, experiment.level)} seeds). "
        "Both are drawn anew, so that means alone cross by chance."
    )
    return Section("pass@k before and after", [text], rows)


def _groups_section(chosen: dict[str, list[Outcome]]) -> Section:
    """What the groups were like on the way."""
    names = {
        "groups/all_fail": "all fail",
        "groups/all_pass": "all pass",
        "groups/mixed": "mixed",
        "live_groups": "live",
    }
    head = ["arm", *(f"{label}, first and last tenth" for label in names.values())]
    rows = [head]
    for arm, found in chosen.items():
        cells = []
        for name in names:
            curve = np.mean([run.curves[name] for run in found], axis=0)
            part = max(1, len(curve) // 10)
            cells.append(f"{curve[:part].mean():.3f}, {curve[-part:].mean():.3f}")
        rows.append([arm, *cells])
    return Section("Groups in training", ["Shares of groups, means over seeds and steps."], rows)


def _mixed(outcomes: Outcomes) -> list[Section]:
    """That runs do not belong together, if they do not."""
    said = results.mixtures(outcomes)
    if not said:
        return []
    text = (
        "Something changed between runs that no config shows, the base's weights or own code, and "
        "differences between arms may come from it. Remove the runs from before and compare again."
    )
    return [Section("Runs that do not belong together", [*said, text], [])]


def _warnings(outcomes: Outcomes) -> list[Section]:
    """What runs warned of, which nobody saw while they were taken."""
    rows = [["arm", "rate", "warning", "in runs"]]
    for (arm, rate), by_seed in outcomes.items():
        names = sorted({name for run in by_seed.values() for name, n in run.warnings.items() if n})
        for name in names:
            count = sum(bool(run.warnings.get(name)) for run in by_seed.values())
            rows.append([arm, f"{rate:g}", name, f"{count} of {len(by_seed)}"])
    text = "`jaxgrpo report RUN --text` says more of each; docs/metrics.md what they mean."
    return [Section("Warnings", [text], rows)] if len(rows) > 1 else []


def _cost_section(chosen: dict[str, list[Outcome]]) -> Section:
    rows = [["arm", "tokens sampled per run", "seconds per run"]]
    for arm, found in chosen.items():
        tokens, seconds = (
            np.mean([run.numbers[name] for run in found]) for name in ("tokens", "time/seconds")
        )
        rows.append([arm, f"{tokens:,.0f}", f"{seconds:.1f}"])
    text = (
        "Of training, without evaluation. The first run of a shape also compiles its programs; see "
        "results.csv for each run."
    )
    return Section("Cost", [text], rows, timed=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
