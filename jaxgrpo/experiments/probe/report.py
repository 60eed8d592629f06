"""The report of a probe, in the terminal and as one HTML file: tables, charts and the advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from jaxgrpo.experiments.probe.advice import value_at
from jaxgrpo.experiments.probe.measure import PER
from jaxgrpo.experiments.sections import Section, chart
from jaxgrpo.training.records.console import LOOK, show_table, show_whole, terminal_table
from jaxgrpo.training.records.report import blocks
from jaxgrpo.training.records.report.charts import COLOURS, FAIL, MIXED, PASS
from jaxgrpo.training.records.report.record import visible

ProbeNumbers = Mapping[str, Any]
"""The numbers of a probe, in the structure of its JSON"""

BAR = 30  # characters of a full bar


class Number(NamedTuple):
    """A number of the groups of one size, and its heads: short in the terminal, long in HTML."""

    key: str
    short: str
    long: str
    form: str = ".3f"


GROUPS = (
    Number("measured", "flat", "flat"),
    Number("all_fail", "fail", "all fail"),
    Number("all_pass", "pass", "all pass"),
    Number("iid", "i.i.d.", "i.i.d."),
    Number("gap", "gap", "gap"),
    Number("ci", "{interval}", "{interval}"),
    Number("live_groups", "live", "live groups per step of {step} prompts", ".1f"),
    Number("live_tokens", "tokens", "live tokens per step", ".0f"),
    Number(f"live_groups_per_{PER}_samples", f"per {PER}", f"live groups per {PER} samples", ".0f"),
    Number("lucky", "lucky", "lucky single successes, of live groups"),
)
NATS = ".2e nats per token"
SAMPLE_NUMBERS = {
    "diversity.distinct_completions": ("different completions per prompt", ".3g"),
    "diversity.same_completion": ("two completions of a prompt are the same", ".1%"),
    "diversity.distinct_answers": ("different answers per prompt", ".3g"),
    "diversity.same_answer": ("two answers of a prompt are the same", ".1%"),
    "format.cut": ("cut at the length limit", ".1%"),
    "format.blank": ("blank", ".1%"),
    "format.tags": ("think and answer tags", ".1%"),
    "format.answered": ("an answer can be read", ".1%"),
    "format.mean_tokens": ("mean length, tokens", ".3g"),
    "format.mean_tokens_right": ("of right ones", ".3g"),
    "format.mean_tokens_wrong": ("of wrong ones", ".3g"),
    "calibration.stated": ("a confidence is stated", ".1%"),
    "calibration.mean": ("mean confidence", ".3g"),
    "calibration.brier": ("Brier score", ".3g"),
    "calibration.ece": ("calibration error, ten bins", ".3g"),
    "calibration.auroc": ("AUROC", ".3g"),
    "agreement.mean": ("sampler against trainer, mean", NATS),
    "agreement.max": ("sampler against trainer, largest", NATS),
    "agreement.kl": ("KL(sampler || trainer)", NATS),
}
"""Path of a number in the probe's JSON -> its label and its format, with a unit if it has one."""


def show(console: Console, numbers: ProbeNumbers) -> None:
    """Prints everything that a probe found, as `command.main` puts it together."""
    groups = (
        "flat groups, of these all fail and all pass, and i.i.d.;\n"
        f"live groups and tokens per step of {numbers['prompts_per_step']} prompts, and per {PER} "
        "samples; of live groups, lucky ones"
    )
    tables = {
        "at least one of k samples is right": pass_rows(numbers),
        groups: group_rows(numbers, "short"),
    }
    console.print(Text(title(numbers), style="bold"))
    show_whole(console, _successes(numbers))
    for name, rows in tables.items():
        show_table(console, rows, title=name, **LOOK)
    sample_texts = [("", ""), *((Text(label), value) for label, value in sample_rows(numbers))]
    show_whole(console, terminal_table(sample_texts, no_wrap=True, show_header=False, **LOOK))
    advice = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for entry in numbers["advice"]:
        advice.add_row(Text(entry["about"], style="bold"), Text(visible(entry["says"])))
        advice.add_row("", Text(f"because {visible(entry['why'])}", style="dim"))
    console.print(Text("what to make of it", style="bold"))
    console.print(advice)


def render(numbers: ProbeNumbers) -> str:
    """The HTML page of what `command.main` puts together."""
    success = numbers["success"]
    size, group = list(numbers["degeneracy"].items())[-1]
    k, estimate = list(numbers["pass_at"].items())[-1]
    tiles = {
        "success rate": number(success["rate"]),
        "prompts that never succeed": number(success["at_zero"], ".0%"),
        "prompts that always succeed": number(success["at_one"], ".0%"),
        f"pass@{k}": number(estimate["value"]),
        f"live groups of {size}": number(1 - group["measured"], ".0%"),
    }
    advice = "".join(
        f"<li><b>{blocks.text(entry['about'])}:</b> {blocks.text(entry['says'])}"
        f'<div class="muted">because {blocks.text(entry["why"])} '
        f"({blocks.text(', '.join(entry['numbers']))})</div></li>"
        for entry in numbers["advice"]
    )
    heading = blocks.text(title(numbers))
    body = [
        f'<h1>Probe</h1>\n<div class="muted">{heading}</div>\n{blocks.tiles(tiles)}',
        f'<h2>Advice</h2>\n<ul class="box">{advice}</ul>',
        f'<h2>Charts</h2>\n<div class="charts">{_figures(numbers)}</div>',
        Section("Groups", rows=group_rows(numbers, "long")).html(),
        Section("pass@k", rows=pass_rows(numbers)).html(),
        Section("Samples", rows=[("", "value"), *sample_rows(numbers)]).html(),
    ]
    return blocks.document(f"probe of {numbers['model']}", "\n".join(body))


def title(numbers: ProbeNumbers) -> str:
    """What was asked."""
    names = {name: visible(str(numbers[name])) for name in ("model", "data", "reward")}
    return (
        f"{names['model']} on {numbers['prompts']} prompts of {names['data']}: "
        f"{numbers['samples']} samples each at temperature {numbers['temperature']:g}, "
        f"judged by {names['reward']}"
    )


def number(value: Any, form: str = ".3f") -> str:
    """A number with its unit, or an interval; a dash if it is not known.

    >>> number(0.25), number((0.125, 0.5)), number(3.0, ".1e nats"), number(float("nan"))
    ('0.250', '0.125 to 0.500', '3.0e+00 nats', '–')
    """
    if isinstance(value, Sequence):
        return "–" if value[0] != value[0] else " to ".join(number(end, form) for end in value)
    spec, _, unit = form.partition(" ")
    return "–" if value is None or value != value else f"{value:{spec}} {unit}".rstrip()


def pass_rows(numbers: ProbeNumbers) -> list[list[str]]:
    """pass@k with its intervals; the first row is the head."""
    passes = numbers["pass_at"].items()
    rows = [
        [f"pass@{k}", number(estimate["value"]), number(estimate["ci"])] for k, estimate in passes
    ]
    return [["", "value", interval(numbers)], *rows]


def group_rows(numbers: ProbeNumbers, heads: str) -> list[list[str]]:
    """The numbers of GROUPS for each group size; the first row is the head, "short" or "long"."""
    names = {"interval": interval(numbers), "step": numbers["prompts_per_step"]}
    rows = [["G", *(getattr(column, heads).format(**names) for column in GROUPS)]]
    for size, group in numbers["degeneracy"].items():
        rows.append([str(size), *(number(group[column.key], column.form) for column in GROUPS)])
    return rows


def sample_rows(numbers: ProbeNumbers) -> Iterator[tuple[str, str]]:
    """(label, number) of everything that has no table of its own."""
    for path, (label, form) in SAMPLE_NUMBERS.items():
        if (value := value_at(numbers, path)) is not None:
            yield label, number(value, form)
    for name, value in numbers["format"].get("formats", {}).items():
        yield visible(name), number(value)


def ranges(samples: int) -> list[range]:
    """Counts of successes that share a bar: none, all, and up to four parts between.

    >>> ranges(16)
    [range(0, 1), range(1, 5), range(5, 9), range(9, 13), range(13, 16), range(16, 17)]
    """
    parts = min(4, samples - 1)
    step = -(-(samples - 1) // parts)
    inner = [range(low, min(low + step, samples)) for low in range(1, samples, step)]
    return [range(1), *inner, range(samples, samples + 1)]


def interval(numbers: ProbeNumbers) -> str:
    """How intervals are called."""
    return f"{numbers['level'] * 100:g}% interval"


def _successes(numbers: ProbeNumbers) -> Table:
    """The histogram of prompts by successes, as bars of characters."""
    success, samples = numbers["success"], numbers["samples"]
    counts = success["histogram"]
    rate = f"mean success rate {number(success['rate'])} ({number(success['ci'])})"
    if success["unscored"]:
        rate += f"; {success['unscored']:.1%} of the samples could not be scored"
    rows = [["successes", "prompts", "share", ""]]
    for span in ranges(samples):
        name = f"{span[0]}" if len(span) == 1 else f"{span[0]} to {span[-1]}"
        prompts = int(sum(counts[k] for k in span))
        share = prompts / max(sum(counts), 1)
        rows.append(
            [f"{name} of {samples}", f"{prompts}", f"{share:.1%}", "█" * round(share * BAR)]
        )
    return terminal_table(rows, text=(0, -1), no_wrap=True, title=rate, **LOOK)


def _figures(numbers: ProbeNumbers) -> str:
    """The charts, as HTML."""
    name = interval(numbers)
    figures = (
        chart(
            "Prompts by success rate",
            "At the ends all samples agree: a baseline of the group learns nothing there.",
            lambda axes: _histogram(axes, numbers),
        ),
        chart(
            "Flat groups",
            "Measured, and what they were if all prompts were equally hard; the bar is the "
            f"gap's {name}.",
            lambda axes: _flat(axes, numbers),
        ),
        chart(
            f"Live groups per {PER} samples",
            "At the same number of samples: small groups are more, each with less to compare.",
            lambda axes: _live(axes, numbers),
        ),
        chart("pass@k", f"With its {name}.", lambda axes: _passes(axes, numbers)),
    )
    return "".join(figures)


def _histogram(axes: Axes, numbers: ProbeNumbers) -> None:
    counts = np.asarray(numbers["success"]["histogram"], float)
    last = len(counts) - 1
    places = np.arange(last + 1) / last
    colours = [FAIL, *[MIXED] * (last - 1), PASS]
    axes.bar(places, counts / max(counts.sum(), 1), width=0.8 / (last + 1), color=colours)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _flat(axes: Axes, numbers: ProbeNumbers) -> None:
    measured, iid = _group_values(numbers, "measured"), _group_values(numbers, "iid")
    reach = np.abs(_group_values(numbers, "ci").T - (measured - iid))
    has_interval = np.isfinite(reach).all(0)
    places = _place_groups(axes, numbers)
    axes.bar(places - 0.2, measured, 0.38, color=COLOURS[0], label="measured")
    axes.bar(places + 0.2, iid, 0.38, color=COLOURS[1], label="i.i.d.")
    bars: dict[str, Any] = {"fmt": "none", "ecolor": "#1f2933", "capsize": 3}
    axes.errorbar(
        places[has_interval] - 0.2, measured[has_interval], reach[:, has_interval], **bars
    )
    axes.set_ylim(0, 1.02)


def _live(axes: Axes, numbers: ProbeNumbers) -> None:
    heights = _group_values(numbers, f"live_groups_per_{PER}_samples")
    bars = axes.bar(_place_groups(axes, numbers), heights, 0.6, color=MIXED)
    labels = [f"{height:.0f}" if np.isfinite(height) else "–" for height in heights]
    axes.bar_label(bars, labels, fontsize=8)
    axes.margins(y=0.15)


def _passes(axes: Axes, numbers: ProbeNumbers) -> None:
    passes = numbers["pass_at"]
    low, high = np.array([estimate["ci"] for estimate in passes.values()], float).T
    places = np.arange(len(passes))
    values = [estimate["value"] for estimate in passes.values()]
    axes.plot(places, values, "o-", color=COLOURS[0], markersize=3.5)
    axes.fill_between(places, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.set_xticks(places, [str(k) for k in passes])
    axes.set_ylim(-0.02, 1.02)


def _group_values(numbers: ProbeNumbers, key: str) -> np.ndarray:
    return np.array([group[key] for group in numbers["degeneracy"].values()], float)


def _place_groups(axes: Axes, numbers: ProbeNumbers) -> np.ndarray:
    """One place per group size on the x-axis, labelled."""
    places = np.arange(len(numbers["degeneracy"]))
    axes.set_xticks(places, [f"G = {size}" for size in numbers["degeneracy"]])
    return places
