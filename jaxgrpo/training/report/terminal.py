"""The report in the terminal; and a step's best and worst completion while a run goes on.

What a model wrote is shown as text: no markup, no escape sequence in it acts on the terminal.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxgrpo.training.report.record import Record, is_number, shown, total_reward, visible

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 24  # of a sparkline
METRICS = (
    "reward",
    "live_groups",
    "groups/all_fail",
    "groups/all_pass",
    "entropy",
    "kl",
    "grad_norm",
    "completions/mean_length",
    "completions/clipped_ratio",
    "time/step",
)


def show(console: Console, record: Record) -> None:
    """Where the run stands, its warnings, evaluations and curves."""
    of = f" of {record.steps}" if record.steps else ""
    console.print(Text(f"{record.name}: {record.status}, step {record.step}{of}", style="bold"))
    for alarm in record.warnings:
        console.print(warning(alarm.step, alarm.text))
    if record.evaluations:
        console.print(_evaluations(record))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "first", "now"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column(f"to step {record.step}", no_wrap=True)
    for metric in METRICS:
        _, values = record.series(metric)
        if values:
            table.add_row(metric, f"{values[0]:.3g}", f"{values[-1]:.3g}", sparkline(values))
    if table.row_count:
        console.print(table)


def warning(step: int, text: str) -> Text:
    """One warning as a line."""
    return Text.assemble((f"warning at step {step}: ", "bold yellow"), visible(text))


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """A curve in one line; more values than `width` are taken together.

    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    """
    if len(values) > width:
        edges = [round(place * len(values) / width) for place in range(width + 1)]
        pieces = [values[a:b] for a, b in itertools.pairwise(edges)]
        values = [sum(piece) / len(piece) for piece in pieces]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def best_and_worst(rows: Sequence[Mapping[str, Any]], weights: Mapping[str, float]) -> list[Text]:
    """What to print of a step's sample rows: the sample with most reward and the one with least.

    One alone where all rewards are equal, and a line where none is scored.
    """
    scored = [(total, row) for row in rows if (total := total_reward(row, weights)) is not None]
    if not scored:
        return [Text("no completion of this step could be scored", style="yellow")]
    (high, best), (low, worst) = (
        choose(scored, key=lambda entry: entry[0]) for choose in (max, min)
    )
    if high == low:
        return [excerpt(f"all {len(scored)} scored the same, {high:.3g}", best)]
    return [excerpt(f"best, {high:.3g}", best), excerpt(f"worst, {low:.3g}", worst)]


def excerpt(title: str, row: Mapping[str, Any]) -> Text:
    """A sample in a few lines: the end of its prompt, the start and end of its completion."""
    prompt, completion = visible(shown(row["prompt"])), visible(shown(row["completion"]))
    text = Text.assemble((f"  {title}: ", "bold"), (_end(prompt), "dim"))
    for line in _few(completion):
        text.append(f"\n    {line}", "default")
    return text


def _end(text: str, length: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"…{flat[-length:]}"


def _few(text: str, width: int = 100) -> list[str]:
    """It in lines of at most `width` characters: the first two and the last, if there are more."""
    lines = [piece for line in text.split("\n") for piece in textwrap.wrap(line, width)]
    if len(lines) <= 4:
        return lines or ["(empty)"]
    return [*lines[:2], f"… {len(lines) - 3} lines …", lines[-1]]


def _evaluations(record: Record) -> Table:
    (first, base), (last, now) = record.evaluations[0], record.evaluations[-1]
    table = Table(title="evaluation")
    for name in ("", f"step {first}", f"step {last}"):
        table.add_column(name, justify="right" if name else "left")
    names = [name for name in now if name in base]
    for name in sorted(names, key=lambda name: ("accuracy" not in name, name)):
        values = [f"{value:.3f}" if is_number(value) else "–" for value in (base[name], now[name])]
        table.add_row(Text(name), *values)
    return table
