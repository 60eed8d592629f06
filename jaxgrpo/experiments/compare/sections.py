"""The report of a comparison as titled texts and tables, before it becomes Markdown or HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxgrpo.experiments.compare import analysis, results, statistics
from jaxgrpo.experiments.compare.analysis import Estimate, Row, Table
from jaxgrpo.experiments.compare.experiment import Experiment
from jaxgrpo.experiments.compare.results import Outcome, Outcomes

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
    best = analysis.at_best(experiment, outcomes)
    chosen = {row.arm: runs(experiment, outcomes, row.arm, row.rate) for row in best}
    rates = dict.fromkeys(rate for arm in experiment.arms for rate in experiment.rates(arm))
    tables = [
        Section(
            f"At learning rate {rate:g}",
            [],
            rows_of(experiment, analysis.at_rate(experiment, outcomes, rate)),
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
    least, corrected, needed = analysis.detectable(experiment)
    seeds, tested = len(experiment.seeds), analysis.testable(experiment)
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
            word, _ = analysis.standing(experiment, row)
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
