"""The report of a run as one HTML page, and the blocks that such pages are made of.

A page loads nothing and runs nothing. Every text that a model, a data set or a user wrote goes
through `text`. Should one ever slip by, the page's own policy still forbids scripts, connections
and any image that is not in the file.
"""

from __future__ import annotations

import base64
import datetime
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxgrpo.config.own_code import installed, short_name
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place
from jaxgrpo.evaluation.intervals import is_end
from jaxgrpo.training.records import console
from jaxgrpo.training.records.folder import is_number, write_atomically
from jaxgrpo.training.records.report.record import (
    UNDER_WAY,
    Record,
    accuracy_first,
    mean_advantage,
    read_run,
    shown,
    total_reward,
    visible,
    with_interval,
)

NAME = "report.html"
MAX_SAMPLES = 40
MAX_CHARACTERS = 1500  # of a prompt or completion

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
CSS = """
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1f2933; background: #f4f6f8;
  margin: 0 auto; max-width: 1320px; padding: 20px 24px; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 26px 0 8px; }
.muted { color: #5b6770; } .status { font-size: 12px; border-radius: 9px; padding: 2px 9px;
  background: #dde5ec; vertical-align: 3px; margin-left: 8px; font-weight: normal; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 14px; }
.tile, figure, .box { background: #fff; border: 1px solid #dfe4e9; border-radius: 8px; }
.tile { padding: 8px 16px 9px; min-width: 120px; } .tile b { font-size: 20px; display: block; }
.tile span { font-size: 12px; color: #5b6770; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 10px; }
figure { margin: 0; padding: 6px 6px 8px; } figure img { width: 100%; display: block; }
figcaption { font-size: 12px; color: #5b6770; padding: 0 6px; }
.box { padding: 4px 14px; overflow-x: auto; } ul.box { list-style: none; margin: 0; }
ul.box li { padding: 5px 0; border-top: 1px solid #eceff2; } ul.box li:first-child { border: 0; }
.holds { color: #a4410a; font-weight: 600; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 12px 5px 0; vertical-align: top;
  border-top: 1px solid #eceff2; } tr:first-child th { border-top: 0; color: #5b6770; }
td.n, th.n { text-align: right; white-space: nowrap; width: 1%; padding-left: 22px;
  font-variant-numeric: tabular-nums; }
.fit { display: inline-block; max-width: 100%; } .fit table { width: auto; }
.fit .n { width: auto; } .fit th { vertical-align: bottom; }
.fit th.n { white-space: normal; }
tr.group td { border-top: 2px solid #cfd6dd; }
pre { margin: 0; font: 12px/1.4 "DejaVu Sans Mono", ui-monospace, monospace;
  display: inline-block; max-width: 100%; max-height: 12em; vertical-align: middle;
  white-space: pre-wrap; overflow-wrap: anywhere; overflow-y: auto; unicode-bidi: plaintext; }
td.prompt { width: 32%; } td.good { color: #23724b; } td.bad { color: #a23b3b; }
"""


def check_can_draw(who: str, instead: str) -> None:
    """Raises: InputError where matplotlib is missing: what needs it, and what to do instead."""
    if not installed("matplotlib"):
        raise InputError(f"{who} matplotlib: pip install matplotlib, or {instead}")


def check_writable(*names: str | None) -> list[Path]:
    """The files that are given. Raises: InputError if one cannot be written."""
    outs = [Path(name) for name in names if name]
    for out in outs:
        if out.is_dir():
            raise InputError(f"{out}: is a folder; give the name of a file to write")
        if not out.parent.is_dir():
            raise InputError(f"{out}: there is no folder {out.parent}; make it first")
    return outs


def write_report(folder: Place, status: str | None = None) -> Place:
    """Writes report.html into a run folder, whole or not at all, and returns its path.

    Args:
      status: of the run, where the caller knows; None looks at the folder.
    Raises: InputError where the folder holds no run, cannot be written, or matplotlib is missing.
    """
    check_can_draw(f"{NAME} needs", f"print the report with `jaxgrpo report {folder} --text`")
    page = render(read_run(folder, status))
    target = folder / NAME
    try:
        write_atomically(target, page)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{target} cannot be written ({reason}): free space or permissions there, or "
            f"print the report with `jaxgrpo report {folder} --text`"
        ) from error
    return target


def report(run: str | Path, text: bool = False, as_json: bool = False) -> int | console.Document:
    """The command: writes report.html, or prints a summary. Returns the exit code."""
    screen = Console(highlight=False)
    folder = storage.place(run) if storage.is_url(run) else Path(run)
    if as_json:
        return console.Document(console.summarize(read_run(folder)))
    if text:
        console.show(screen, read_run(folder))
    else:
        screen.print(str(write_report(folder)), markup=False, soft_wrap=True)
    return 0


def render(record: Record) -> str:
    """The whole page."""
    sections = (_header, _warnings, _evaluation, _charts, _samples)
    return document(record.name, "\n".join(section(record) for section in sections))


def _number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None else f"{value:{form}}"


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}"


def _nothing(why: str) -> str:
    return f'<div class="box muted"><p>{why}</p></div>'


def _header(record: Record) -> str:
    config = record.config
    model = Path(str(config.get("model", {}).get("path", "?"))).name
    method = config.get("recipe") or "own chain of advantages"
    rollout = config.get("rollout", {})
    prompts, samples = (rollout.get(key, "?") for key in ("prompts_per_step", "group_size"))
    facts = [
        f"step {record.step} of {record.steps or '?'}",
        f"model {model}",
        str(method),
        f"{prompts} prompts x {samples} samples",
        f"written {datetime.datetime.now().strftime('%Y-%m-%d %H:%M')}",
    ]
    if record.status == UNDER_WAY:
        facts.append("load the page again for the latest")
    return (
        f'<h1>{text(record.name)}<span class="status">{text(record.status)}</span></h1>\n'
        f'<div class="muted">{text(" · ".join(facts))}</div>\n{tiles(_tiles(record))}'
    )


def _tiles(record: Record) -> dict[str, str]:
    """The numbers to look at first."""
    tiles = {"reward": _number(record.last("reward"))}
    measured = [(step, v["accuracy"]) for step, v in record.evaluations if "accuracy" in v]
    if measured:
        (first, first_accuracy), (_, last_accuracy) = measured[0], measured[-1]
        since = f"step {first}" if first else "base"
        tiles[f"accuracy, {since} → now"] = f"{first_accuracy:.3f} → {last_accuracy:.3f}"
    mixed = record.last("groups/mixed")
    if mixed is not None:
        tiles["mixed groups"] = f"{mixed:.0%}"
    timing_keys = ("num_tokens", "time/step")
    timed = [
        line for line in record.lines if all(is_number(line.get(name)) for name in timing_keys)
    ]
    if timed:
        seconds = [line["time/step"] for line in timed]
        tiles["seconds per step, median"] = _number(statistics.median_high(seconds))
        spent, tokens = sum(seconds), sum(line["num_tokens"] for line in timed)
        tiles["sampled tokens per second"] = f"{tokens / spent:,.0f}" if spent else "–"
    tiles["warnings"] = str(len(record.warnings))
    return tiles


def _warnings(record: Record) -> str:
    if not record.warnings:
        return _section("Warnings", _nothing("None so far."))
    items = []
    latest = {alarm.name: place for place, alarm in enumerate(record.warnings)}
    for place, alarm in enumerate(record.warnings):
        holds = alarm.name in record.active and latest[alarm.name] == place
        state = '<span class="holds">holds</span>' if holds else '<span class="muted">over</span>'
        items.append(f"<li>step {alarm.step}, {state}: {text(alarm.text)}</li>")
    return _section("Warnings", f'<ul class="box">{"".join(items)}</ul>')


def _evaluation(record: Record) -> str:
    """Each metric of the first and the last evaluation, with its interval."""
    if not record.evaluations:
        return ""
    (first, base), (last, now) = record.evaluations[0], record.evaluations[-1]
    rows = [["", f"step {first}", f"step {last}", "change"]]
    names = (name for name in base.keys() | now.keys() if not is_end(name))
    for name in sorted(names, key=accuracy_first):
        change = _number(now[name] - base[name], "+.3f") if name in base.keys() & now else "–"
        rows.append([name, with_interval(base, name), with_interval(now, name), change])
    return _section("Evaluation, with 95% intervals over prompts", table(rows))


def _charts(record: Record) -> str:
    from jaxgrpo.training.records.report import charts

    figures = [figure(panel.title, svg, panel.note) for panel, svg in charts.draw(record)]
    if not figures:
        return _section("Charts", _nothing("No step is finished yet."))
    return _section("Charts", f'<div class="charts">{"".join(figures)}</div>')


def _samples(record: Record) -> str:
    if not record.samples:
        return ""
    rows = _strongest_first(record.samples)[:MAX_SAMPLES]
    rewards = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    head = "".join(f'<th class="n">{text(name)}</th>' for name in [*rewards, "advantage"])
    body = "".join(_sample_rows(rows, rewards, weights(record)))
    more = len(record.samples) - len(rows)
    selection = f", {len(rows)} of {len(record.samples)}, strongest groups first" if more else ""
    lines = f"<table><tr><th>prompt</th><th>completion</th>{head}</tr>{body}</table>"
    title = f"Samples of step {record.samples[0]['step']}{selection}"
    note = '<p class="muted">Of any step: jaxgrpo samples RUN --step N --sort reward</p>'
    return _section(title, f'<div class="box">{lines}</div>{note}')


def _strongest_first(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Whole groups, those with the largest advantage first: the step learnt most from them."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["ordinal"], []).append(row)

    def strength(group: Sequence[Mapping[str, Any]]) -> float:
        return max(abs(mean_advantage(row["advantage"]) or 0.0) for row in group)

    return [row for group in sorted(groups.values(), key=strength, reverse=True) for row in group]


def weights(record: Record) -> dict[str, float]:
    """Reward name -> its weight in the config."""
    entries = record.config.get("rewards", [])
    return {
        str(entry.get("name") or short_name(str(entry.get("use", "")))): entry.get("weight", 1.0)
        for entry in entries
    }


def _sample_rows(
    rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], weigh: Mapping[str, float]
) -> Iterable[str]:
    """One row of the table per sample; a prompt is shown once, with the first of its samples."""
    last_ordinal = None
    for row in rows:
        opens_group = row["ordinal"] != last_ordinal
        last_ordinal = row["ordinal"]
        prompt = f"<pre>{_long(row['prompt'])}</pre>" if opens_group else ""
        cut = ' <span class="muted">(cut at the limit)</span>' if row["truncated"] else ""
        total = total_reward(row, weigh)
        numbers = [
            f'<td class="n">{_number(value) if is_number(value) else "not scored"}</td>'
            for value in (row["rewards"].get(name) for name in rewards)
        ]
        group = ' class="group"' if opens_group else ""
        yield (
            f'<tr{group}><td class="prompt">{prompt}</td>'
            f"<td><pre>{_long(row['completion'])}</pre>{cut}</td>{''.join(numbers)}"
            f"{_advantage(row['advantage'], total)}</tr>"
        )


def _advantage(value: Any, total: float | None) -> str:
    mean = mean_advantage(value)
    if mean is None:
        return '<td class="n">–</td>'
    tone = "good" if mean > 0 else "bad" if mean < 0 else "muted"
    title = "" if total is None else f' title="weighted reward {total:.3g}"'
    return f'<td class="n {tone}"{title}>{f"{mean:+.2f}" if mean else "0"}</td>'


def _long(value: Any) -> str:
    full_text = shown(value)
    excess = len(full_text) - MAX_CHARACTERS
    return text(
        f"{full_text[:MAX_CHARACTERS]}… ({excess:,} more characters)" if excess > 0 else full_text
    )


def document(title: str, body: str) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{text(title)} - jaxgrpo</title>\n'
        f"<style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def text(value: Any) -> str:
    """As text between tags or in quotes, whatever it holds."""
    return html.escape(visible(str(value)), quote=True)


def tiles(values: Mapping[str, str]) -> str:
    """Label -> number, side by side."""
    blocks = "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(label)}</span></div>'
        for label, value in values.items()
    )
    return f'<div class="tiles">{blocks}</div>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells as texts; the first row is the head, every column but the first holds numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        kind = [""] + [' class="n"'] * (len(cells) - 1)
        return "".join(
            f"<{tag}{k}>{text(cell)}</{tag}>" for k, cell in zip(kind, cells, strict=True)
        )

    head, *body = rows
    lines = [f"<tr>{line(head, 'th')}</tr>", *(f"<tr>{line(row, 'td')}</tr>" for row in body)]
    return f'<div class="box fit"><table>{"".join(lines)}</table></div>'


def figure(title: str, svg: str, note: str) -> str:
    """A chart, drawn as an image that can run nothing."""
    data = base64.b64encode(svg.encode()).decode("ascii")
    return (
        f'<figure><img alt="{text(title)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text(note)}</figcaption></figure>"
    )
