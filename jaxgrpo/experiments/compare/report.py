"""The report of a comparison: sections for terminal, Markdown and HTML, and the charts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from jaxgrpo.evaluation.evaluate import powers
from jaxgrpo.evaluation.intervals import student_interval
from jaxgrpo.experiments.compare import numbers, results
from jaxgrpo.experiments.compare.exchanges import DRAWN, EXACT, seeds_needed
from jaxgrpo.experiments.compare.experiment import SPARE, Experiment
from jaxgrpo.experiments.compare.results import Estimate, Outcome, Outcomes, Table, arm_values
from jaxgrpo.experiments.sections import Section, chart
from jaxgrpo.training.records.report import charts, html

CURVES = {
    "reward": ("Reward in training", "Mean over the samples of a step."),
    "groups/all_fail": ("Groups that all fail", "The share of groups without a success."),
    "live_groups": ("Live groups", "The share of groups that can move the parameters."),
    "entropy_estimated": ("Entropy", "Nats per token, over all tokens that were sampled."),
}
MARKERS = ("o", "^", "s")
"""Points of arms beyond the number of colours have other forms."""
GROUPS = dict(zip(numbers.GROUPS, ("all fail", "all pass", "mixed", "live"), strict=True))
NONE = "–"
"""What a table shows where there is no number."""
NO_P = (
    "No p: its learning rates are not the control's, and the best of them is chosen on the seeds "
    "it is judged on. Take tuning_seeds, or the same rates."
)


def markdown(report_sections: Sequence[Section]) -> str:
    """tables.md: the same bytes for the same runs, so without the sections that are timed."""
    return "\n".join(section.markdown() for section in report_sections if not section.timed)


def render(
    experiment: Experiment,
    outcomes: Outcomes,
    report_sections: Sequence[Section],
    differences: Section,
) -> str:
    """The whole HTML page."""
    name = experiment.source.stem if experiment.source else experiment.dir
    arms = f"{', '.join(experiment.arms)} · {_count(len(experiment.seeds), 'seed')}"
    about = html.text(f"{arms} · control {experiment.control}")
    body = [
        f'<h1>{html.text(name)}</h1>\n<div class="muted">{about}</div>',
        report_sections[0].html(),
        f'<h2>Charts</h2>\n<div class="charts">{"".join(_figures(experiment, outcomes))}</div>',
        *(section.html() for section in (*report_sections[1:], differences)),
    ]
    return html.document(name, "\n".join(body))


def sections(experiment: Experiment, outcomes: Outcomes) -> list[Section]:
    """Everything, the answer first."""
    best = results.at_best(experiment, outcomes)
    runs_by_arm = best_runs(experiment, outcomes)
    rates = dict.fromkeys(rate for _, rate in outcomes)
    best_rows = format_rows(experiment, best, own_rates=True)
    rows_by_rate = {
        rate: format_rows(experiment, results.at_rate(experiment, outcomes, rate))
        for rate in rates
        if experiment.judge_rates == "all"
    }
    return [
        _answer(experiment, best),
        Section("What can be seen", [describe_detectable(experiment)]),
        Section("At each arm's best learning rate", [_how_chosen(experiment)], best_rows),
        *_tuning_section(experiment, outcomes),
        *_mixed(outcomes),
        *(Section(f"At learning rate {rate:g}", rows=rows) for rate, rows in rows_by_rate.items()),
        _pass_section(experiment, runs_by_arm),
        _groups_section(runs_by_arm),
        *_distance_section(experiment.metric, numbers.distances(experiment, runs_by_arm)),
        *_warnings(outcomes),
        _cost_section(runs_by_arm),
    ]


def difference_section(differing: Mapping[str, Mapping[str, str]]) -> Section:
    """The keys whose values differ between arms, one per row."""
    arms = list(next(iter(differing.values()), {}))
    rows = [["key", *arms], *([key, *values.values()] for key, values in differing.items())]
    return Section("In what the arms differ", rows=rows)


def best_runs(experiment: Experiment, outcomes: Outcomes) -> dict[str, list[Outcome]]:
    """The outcomes of each arm at its best rate, of the seeds that count."""
    return {
        row.arm: [outcomes[row.arm, row.rate][seed] for seed in experiment.seeds]
        for row in results.at_best(experiment, outcomes)
    }


def describe_detectable(experiment: Experiment) -> str:
    """What the number of seeds allows to be seen at all."""
    least_p, corrected_p, needed_seeds = results.detectable(experiment)
    seeds, tested = len(experiment.seeds), results.testable(experiment)
    untested = [arm for arm in experiment.tested if arm not in tested]
    no_p_text = "".join(f"{arm}: {NO_P} " for arm in untested).strip()
    if not tested:
        return no_p_text
    text = (
        f"{_count(seeds, 'seed')}: an exchange of labels gives no p below {least_p:.2g}, and none "
        f"below {corrected_p:.2g} corrected for {_count(len(tested), 'comparison')} "
        f"({', '.join(tested)} with {experiment.control})."
    )
    if corrected_p > experiment.level:
        more_seeds = f"take {needed_seeds} seeds or more"
        if needed_seeds is None:
            more_seeds = f"more seeds are judged by {DRAWN} drawn exchanges; set level higher"
        text += (
            f" At the level {experiment.level:g} no difference can be shown, however large: "
            f"{more_seeds}, or name fewer arms in `tests` before looking."
        )
    return f"{text} {no_p_text}".strip()


def format_rows(experiment: Experiment, table: Table, own_rates: bool = False) -> list[list[str]]:
    """A table of arms as texts."""
    metric = experiment.metric
    head = ["arm", *["rate"] * own_rates, metric, "95% interval"]
    head += [f"minus {experiment.control}", "95% interval", "p", "corrected p"]
    rows = [head]
    for row in table:
        p = [NONE if value is None else f"{value:.2g}" for value in (row.p, row.corrected)]
        pairs = *_pair(row.metric, ".3f"), *_pair(row.difference, "+.3f")
        rows.append([row.arm, *[f"{row.rate:g}"] * own_rates, *pairs, *p])
    return rows


def _pair(estimate: Estimate | None, form: str) -> tuple[str, str]:
    if estimate is None:
        return NONE, NONE
    value, low, high = (format(number, form) for number in estimate)
    return value, f"{low} to {high}" if np.isfinite(estimate.low) else NONE


def _answer(experiment: Experiment, best: Table) -> Section:
    """One sentence per comparison, the same one for gains, losses and neither."""
    text = []
    for row in best:
        if row.arm not in experiment.tested or row.difference is None:
            continue
        value, interval = _pair(row.difference, "+.3f")
        differs = f"{experiment.metric} differs by {value}"
        differs += f" (95% interval {interval})" if interval != NONE else ""
        opening = f"{row.arm} against {experiment.control}"
        if row.corrected is None:
            text.append(f"{opening}: not tested. {differs}. {NO_P}")
        else:
            word = results.standing(experiment, row)
            text.append(f"{opening}: {word}. {differs}, corrected p = {row.corrected:.2g}.")
    seeds = _count(len(experiment.seeds), "seed")
    return Section(f"{experiment.metric}, each arm at its best learning rate, {seeds}", text)


def _how_chosen(experiment: Experiment) -> str:
    means = f"the {'highest' if experiment.better == 'higher' else 'lowest'} mean"
    basis = (
        "very seeds shown, so that means are a little too good, the more so the more rates an arm "
        "has; the test makes the choice again in every exchange of labels, where an arm has the "
        "control's rates. Then p is exact if two arms are alike at every rate; of arms with equal "
        "means a noisier one is called better too often (at .05 with 3 and 5 times the noise: in "
        f".08 and .11 of comparisons). {_seeds_apart(experiment)}"
    )
    if max(len(experiment.rates(arm)) for arm in experiment.arms) == 1:
        basis = "seeds shown; no arm has a choice."
    if experiment.tuning_seeds:
        seeds = ", ".join(map(str, experiment.tuning_seeds))
        basis = f"tuning seeds {seeds}, which count nowhere else."
    drawn = len(experiment.seeds) > EXACT
    kind = f"{DRAWN} drawn exchanges" if drawn else "exact"
    return (
        f"Rates are those of {means} over the {basis} Intervals: Student's t over seeds, which "
        "takes them as normal; skewed ones are missed more often; cut where the metric's range "
        f"ends. p: exchange of labels within seeds, two-sided, {kind}; corrected by Holm within a "
        "table."
    )


def _tuning_section(experiment: Experiment, outcomes: Outcomes) -> list[Section]:
    """The metric at each rate over the tuning seeds, if there are such seeds."""
    means = numbers.tuning(experiment, outcomes)
    if not means:
        return []
    rates = sorted({rate for by_rate in means.values() for rate in by_rate})
    rows = [["arm", *(f"{rate:g}" for rate in rates)]]
    for arm, by_rate in means.items():
        rows.append([arm, *(f"{by_rate[rate]:.3f}" if rate in by_rate else NONE for rate in rates)])
    seeds = _count(len(experiment.tuning_seeds), "tuning seed")
    return [Section(f"{experiment.metric} by learning rate, {seeds}", rows=rows)]


def _seeds_apart(experiment: Experiment) -> str:
    """What to do for rates that are chosen on seeds of their own."""
    needed_seeds = seeds_needed(len(experiment.tested), experiment.level)
    if needed_seeds is None:
        return "Give tuning_seeds."
    enough = needed_seeds + SPARE
    return f"Give tuning_seeds, or {enough} seeds or more, of which some are then set apart."


def _pass_section(experiment: Experiment, runs_by_arm: Mapping[str, list[Outcome]]) -> Section:
    """pass@k before and after, and where the trained model falls below the base."""
    passes_by_arm = numbers.passes(runs_by_arm, experiment.level)
    samples = len(next(iter(passes_by_arm.values()))["base"])
    sizes = powers(4, samples)
    rows = [["arm", *(f"pass@{k}, base → trained" for k in sizes), "below the base from k"]]
    needed_seeds = seeds_needed(1, experiment.level)
    takes = "no number of seeds does" if needed_seeds is None else f"takes {needed_seeds} seeds"
    for arm, arm_passes in passes_by_arm.items():
        below = arm_passes["below_the_base_from"] or f"none shown up to {samples}"
        means = [
            f"{arm_passes['base'][k - 1]:.3f} → {arm_passes['trained'][k - 1]:.3f}" for k in sizes
        ]
        rows.append([arm, *means, str(below)])
    text = (
        "Means over seeds and prompts, unbiased. The last column: the smallest k at which the "
        "trained model is shown to solve less than the base: the 95% interval over seeds of the "
        "difference lies wholly below 0, and p, corrected for all k, is at most "
        f"{experiment.level:g} (which {takes}). "
        "Both are drawn again, so that means alone cross by chance."
    )
    return Section("pass@k before and after", [text], rows)


def _groups_section(runs_by_arm: Mapping[str, list[Outcome]]) -> Section:
    """Shares of flat and live groups at the start and at the end of training."""
    rows = [["arm", *(f"{label}, first and last tenth" for label in GROUPS.values())]]
    for arm, shares in numbers.groups(runs_by_arm).items():
        rows.append(
            [arm, *(f"{_share(ends['first'])}, {_share(ends['last'])}" for ends in shares.values())]
        )
    return Section("Groups in training", ["Shares of groups, means over seeds and steps."], rows)


def _distance_section(metric: str, points: Mapping[str, np.ndarray]) -> list[Section]:
    """What each arm gained for the distance it went from the base, if that is measured."""
    gained = f"gain of {metric}"
    rows = [["arm", gained, "95% interval", numbers.DISTANCE, "95% interval", "gain per nat"]]
    for arm, (distances, gains) in points.items():
        gain = results.estimate_difference(gains, metric)
        distance = results.estimate(distances, numbers.DISTANCE)
        per_nat = f"{gain.value / distance.value:.3f}" if distance.value > 0 else NONE
        rows.append([arm, *_pair(gain, "+.3f"), *_pair(distance, ".3f"), per_nat])
    text = "From the base to the trained model. Distances are in nats per completion."
    return [Section("Gain and distance from the base", [text], rows)] if points else []


def _mixed(outcomes: Outcomes) -> list[Section]:
    """That runs do not belong together, if they do not."""
    signs = results.mixtures(outcomes)
    if not signs:
        return []
    text = (
        "Something changed between runs that no config shows, the base's weights or own code, and "
        "differences between arms may come from it. Remove the runs from before and compare again."
    )
    return [Section("Runs that do not belong together", [*signs, text])]


def _warnings(outcomes: Outcomes) -> list[Section]:
    """The warnings of the runs, which are not printed while the runs are taken."""
    rows = [["arm", "rate", "warning", "in runs"]]
    for warning in numbers.warnings(outcomes):
        among = f"{warning['in_runs']} of {warning['runs']}"
        rows.append([warning["arm"], f"{warning['learning_rate']:g}", warning["warning"], among])
    text = "`jaxgrpo report RUN --text` says more of each; docs/metrics.md what they mean."
    return [Section("Warnings", [text], rows)] if len(rows) > 1 else []


def _cost_section(runs_by_arm: Mapping[str, list[Outcome]]) -> Section:
    rows = [["arm", "tokens sampled per run", "seconds per run"]]
    for arm, cost in numbers.costs(runs_by_arm).items():
        rows.append([arm, f"{cost['tokens']:,.0f}", f"{cost['seconds']:.1f}"])
    text = (
        "Of training, without evaluation. The first run of a shape also compiles its programs; see "
        "results.csv for each run."
    )
    return Section("Cost", [text], rows, timed=True)


def _share(value: float) -> str:
    return f"{value:.3f}" if np.isfinite(value) else NONE


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _figures(experiment: Experiment, outcomes: Outcomes) -> list[str]:
    runs_by_arm = best_runs(experiment, outcomes)
    left_margin = min(0.5, 0.04 + 0.017 * max(map(len, experiment.arms)))
    few = _are_few(len(experiment.seeds))
    bar = "lowest and highest seed" if few else "95% interval over seeds"
    seeds_note = " over the tuning seeds" if experiment.judge_rates == "best" else ""
    rates_note = f"{experiment.metric}, mean and {bar}{seeds_note}."
    minus_note = f"At each arm's best rate; by seeds, with the {bar}."
    passes_note = "Dotted: the base. Each arm at its best rate, means over seeds."
    comparison = experiment, outcomes
    minus = f"Minus {experiment.control}"
    figures = [
        chart("By learning rate", rates_note, lambda axes: by_rate(axes, *comparison)),
        chart(minus, minus_note, lambda axes: forest(axes, *comparison), left_margin),
        chart("pass@k", passes_note, lambda axes: passes(axes, runs_by_arm)),
    ]
    for name, (title, note) in CURVES.items():
        note += f" Running means at each arm's best rate; bands: {bar}."
        draw = functools.partial(curves, runs_by_arm=runs_by_arm, name=name)
        figures.append(chart(title, note, draw))
    if points := numbers.distances(experiment, runs_by_arm):
        note = f"By {numbers.DISTANCE}, at each arm's best rate: a point per seed; large: the mean."
        figures.append(chart("Gain by distance", note, lambda axes: distance(axes, points)))
    return figures


def by_rate(axes: Axes, experiment: Experiment, outcomes: Outcomes) -> None:
    """The metric over learning rates, one line per arm."""
    rates = sorted({rate for _, rate in outcomes})
    for place, arm in enumerate(experiment.arms):
        seeds = experiment.tuning_seeds if experiment.judge_rates == "best" else experiment.seeds
        values = arm_values(experiment, outcomes, arm, experiment.metric, seeds)
        estimates = [
            _chart_estimate(results.estimate(row, experiment.metric), row) for row in values
        ]
        middle, low, high = np.array(estimates).T
        ends = np.array([middle - low, high - middle])
        positions = np.array([rates.index(rate) for rate in experiment.rates(arm)])
        shift = 0.03 * (place - len(experiment.arms) / 2)
        axes.errorbar(
            positions + shift, middle, yerr=np.nan_to_num(np.maximum(ends, 0)), marker="o",
            markersize=3, linewidth=1.2, capsize=2, linestyle=dashes(place), **look(arm, place),
        )  # fmt: skip
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])


def forest(axes: Axes, experiment: Experiment, outcomes: Outcomes) -> None:
    """Differences from the control, with intervals and every seed."""
    by_seed = {
        arm: np.array([run.numbers[experiment.metric] for run in runs])
        for arm, runs in best_runs(experiment, outcomes).items()
    }
    compared_arms = [arm for arm in experiment.arms if arm != experiment.control]
    for place, arm in enumerate(compared_arms):
        difference = by_seed[arm] - by_seed[experiment.control]
        interval = results.estimate_difference(difference, experiment.metric)
        value, low, high = _chart_estimate(interval, difference)
        tone = colour(list(experiment.arms).index(arm))
        axes.plot([low, high], [place, place], color=tone, linewidth=2)
        axes.plot([value], [place], "o", color=tone)
        axes.plot(difference, np.full(len(difference), place + 0.22), "|", color=tone, alpha=0.6)
    axes.axvline(0, color="#6b7280", linewidth=0.8)
    axes.set_yticks(range(len(compared_arms)), compared_arms)
    axes.set_ylim(len(compared_arms) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def passes(axes: Axes, runs_by_arm: Mapping[str, Sequence[Outcome]]) -> None:
    """pass@k of the base and of every arm."""
    for place, (arm, runs) in enumerate(runs_by_arm.items()):
        base = np.mean([run.base_pass for run in runs], axis=0)
        k = np.arange(1, len(base) + 1)
        if place == 0:
            axes.plot(k, base, ":", color="#111827", linewidth=1.6, label="base")
        trained = np.mean([run.trained_pass for run in runs], axis=0)
        axes.plot(k, trained, dashes(place), linewidth=1.4, **look(arm, place))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def distance(axes: Axes, points: Mapping[str, np.ndarray]) -> None:
    """The gain over the distance from the base, as `numbers.distances` has them: seeds, means."""
    for place, (arm, pairs) in enumerate(points.items()):
        axes.plot(*pairs, marker(place), color=colour(place), alpha=0.4, markersize=3)
        axes.plot(*pairs.mean(1, keepdims=True), marker(place), **look(arm, place))


def curves(axes: Axes, runs_by_arm: Mapping[str, Sequence[Outcome]], name: str) -> None:
    """A metric of training over steps, running means, with bands over seeds.

    A band ends where the metric's range does: at the lowest and highest value of any step.
    """
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    all_values = np.concatenate([run.curves[name] for runs in runs_by_arm.values() for run in runs])
    bounds = np.nanmin(all_values, initial=np.inf), np.nanmax(all_values, initial=-np.inf)
    for place, (arm, runs) in enumerate(runs_by_arm.items()):
        values = np.array([smooth(run.curves[name]) for run in runs])
        steps = np.arange(1, values.shape[1] + 1)
        axes.plot(steps, values.mean(0), dashes(place), linewidth=1.4, **look(arm, place))
        if len(values) > 1:
            few = _are_few(len(values))
            band = _ends(values) if few else np.clip(student_interval(values), *bounds)
            axes.fill_between(steps, *band, color=colour(place), alpha=0.15, linewidth=0)


def _are_few(seeds: int) -> bool:
    """Whether there are so few that an interval over them says nothing: of 2 it is 13 times as wide
    as they differ."""
    return seeds < results.FEW


def _chart_estimate(estimate: Estimate, values: np.ndarray) -> Estimate:
    """What a chart shows of values by seeds: of few their lowest and highest."""
    low, high = map(float, _ends(values))
    return Estimate(estimate.value, low, high) if _are_few(len(values)) else estimate


def _ends(values: np.ndarray) -> np.ndarray:
    """Of values [n, ...] the lowest and the highest, [2, ...]."""
    return np.stack([values.min(0), values.max(0)])


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the last twentieth of all steps, of fewer at the start; NaN counts as nothing."""
    width = max(1, len(values) // 20)
    finite = np.isfinite(values)
    sums = np.cumsum([np.where(finite, values, 0.0), finite], axis=1)
    total, count = np.insert(sums, 0, 0.0, axis=1)
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - width, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[end] - total[start]) / (count[end] - count[start])


def look(arm: str, place: int) -> dict[str, Any]:
    """The colour and the name of an arm in a legend."""
    return {"color": colour(place), "label": charts.plain_label(arm)}


def colour(place: int) -> str:
    """Of the arm at this place."""
    return charts.COLOURS[place % len(charts.COLOURS)]


def dashes(place: int) -> str:
    """The line of the arm at this place: arms of one colour have different ones."""
    return charts.DASHES[place // len(charts.COLOURS) % len(charts.DASHES)]


def marker(place: int) -> str:
    """The point of the arm at this place: arms of one colour have different ones."""
    return MARKERS[place // len(charts.COLOURS) % len(MARKERS)]
