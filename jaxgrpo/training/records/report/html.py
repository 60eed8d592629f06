"""The report of a run as one HTML page."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxgrpo.config.own_code import installed
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place, write_atomically
from jaxgrpo.evaluation.intervals import without_ends
from jaxgrpo.training.records import console
from jaxgrpo.training.records.folder import FILES, FOLDERS
from jaxgrpo.training.records.reading import is_number
from jaxgrpo.training.records.report import conversations
from jaxgrpo.training.records.report.blocks import (
    cut_text,
    document,
    figure,
    nothing,
    number,
    section,
    table,
    text,
    tiles,
)
from jaxgrpo.training.records.report.record import (
    UNDER_WAY,
    Record,
    RewardSum,
    accuracy_first,
    mean_advantage,
    read_run,
    reward_sum,
    strongest_first,
    total_reward,
    with_interval,
)

NAME = "report.html"
MAX_SAMPLES = 40


def check_can_draw(who: str, instead: str) -> None:
    """Raises: InputError where matplotlib is missing: what needs it, and what to do instead."""
    if not installed("matplotlib"):
        raise InputError(f"{who} matplotlib: pip install matplotlib, or {instead}")


def is_file(name: Any) -> bool:
    """Whether it is the path of a file that is there."""
    return isinstance(name, str) and Path(name).is_file()


def check_writable(*names: str | None, inputs: Iterable[Any] = ()) -> list[Path]:
    """The files that are given; called before anything long begins.

    Args:
      inputs: what the command reads, as it is called there; only files count.

    Raises: InputError if one cannot be written, or is read.
    """
    outs = [Path(name) for name in names if name]
    for out in outs:
        if out.is_dir():
            raise InputError(f"{out}: is a folder; give the name of a file to write")
        if not out.parent.is_dir():
            raise InputError(f"{out}: there is no folder {out.parent}; make it first")
        if out.is_symlink() or (out.exists() and not out.is_file()):
            kind = "a link" if out.is_symlink() else "no file, as a pipe or a device is"
            raise InputError(f"{out}: is {kind}, and would be replaced; name a file to write")
        if run := _find_run(out):
            raise InputError(f"{out}: is a file of the run {run}; name another to write")
        if not all(map(storage.may_write, filter(Path.exists, (out.parent, out)))):
            raise InputError(f"{out}: cannot be written; see to permissions, or name another file")
        if out.exists() and any(out.samefile(name) for name in filter(is_file, inputs)):
            raise InputError(f"{out}: the command reads this file; name another to write")
    return outs


def _find_run(file: Path) -> Path | None:
    """The folder of the run that has written a file; None: it is no file of a run."""
    file = file.absolute()
    for folder in file.parents if file.exists() else ():
        names = (*FILES, *FOLDERS) if (folder / "metrics.jsonl").is_file() else ()
        if file.relative_to(folder).parts[0] in names:
            return folder
    return None


def write_report(folder: Place, status: str | None = None) -> Place:
    """Writes report.html into a run folder, whole or not at all, and returns its path.

    Args:
      status: of the run, where the caller knows; None looks at the folder.
    Raises: InputError where the folder holds no run, cannot be written, or matplotlib is missing.
    """
    check_can_draw(f"{NAME} needs", f"print the report with `jaxgrpo report {folder} --text`")
    page = render(read_run(folder, status), conversations.read(folder))
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
    folder = storage.place_as_named(run)
    if as_json:
        return console.Document(console.summarize(read_run(folder)))
    if text:
        console.show(screen, read_run(folder))
    else:
        screen.print(str(write_report(folder)), markup=False, soft_wrap=True)
    return 0


def render(record: Record, talks: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page. Args: talks: samples with turns, as `conversations.read` gives them."""
    parts = [part(record) for part in (_header, _warnings, _evaluation, _charts)]
    summing = reward_sum(record.config)
    parts.append(conversations.render(talks, summing) if talks else _samples(record))
    return document(record.name, "\n".join(parts), conversations.SCRIPT if talks else "")


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
    tiles = {"reward": number(record.last("reward"))}
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
        tiles["seconds per step, median"] = number(statistics.median_high(seconds))
        spent, tokens = sum(seconds), sum(line["num_tokens"] for line in timed)
        tiles["sampled tokens per second"] = f"{tokens / spent:,.0f}" if spent else "–"
    tiles["warnings"] = str(len(record.warnings))
    return tiles


def _warnings(record: Record) -> str:
    if not record.warnings:
        return section("Warnings", nothing("None so far."))
    items = []
    latest = {alarm.name: place for place, alarm in enumerate(record.warnings)}
    for place, alarm in enumerate(record.warnings):
        holds = alarm.name in record.active and latest[alarm.name] == place
        state = '<span class="holds">holds</span>' if holds else '<span class="muted">over</span>'
        items.append(f"<li>step {alarm.step}, {state}: {text(alarm.text)}</li>")
    return section("Warnings", f'<ul class="box">{"".join(items)}</ul>')


def _evaluation(record: Record) -> str:
    """Each metric of the first and the last evaluation, with its interval."""
    if not record.evaluations:
        return ""
    (first, base), (last, now) = record.evaluations[0], record.evaluations[-1]
    rows = [["", f"step {first}", f"step {last}", "change"]]
    for name in sorted(without_ends(base.keys() | now.keys()), key=accuracy_first):
        change = number(now[name] - base[name], "+.3f") if name in base.keys() & now else "–"
        rows.append([name, with_interval(base, name), with_interval(now, name), change])
    return section("Evaluation, with 95% intervals over prompts", table(rows))


def _charts(record: Record) -> str:
    from jaxgrpo.training.records.report import charts, maps

    figures = [figure(panel.title, svg, panel.note) for panel, svg in charts.draw(record)]
    if (atlas := maps.latest(record)) is not None:
        step, atlas_map = atlas
        svg = maps.draw_map(atlas_map)
        figures.append(figure("Updates of methods", svg, maps.NOTE.format(step=step)))
    if not figures:
        return section("Charts", nothing("No step is finished yet."))
    return section("Charts", f'<div class="charts">{"".join(figures)}</div>')


def _samples(record: Record) -> str:
    if not record.samples:
        return ""
    rows = strongest_first(record.samples)[:MAX_SAMPLES]
    rewards = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    head = "".join(f'<th class="n">{text(name)}</th>' for name in [*rewards, "advantage"])
    body = "".join(_sample_rows(rows, rewards, reward_sum(record.config)))
    more = len(record.samples) - len(rows)
    selection = f", {len(rows)} of {len(record.samples)}, strongest groups first" if more else ""
    lines = f"<table><tr><th>prompt</th><th>completion</th>{head}</tr>{body}</table>"
    title = f"Samples of step {record.samples[0]['step']}{selection}"
    note = '<p class="muted">Of any step: jaxgrpo samples RUN --step N --sort reward</p>'
    return section(title, f'<div class="box">{lines}</div>{note}')


def _sample_rows(
    rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], summing: RewardSum
) -> Iterable[str]:
    """One row of the table per sample; a prompt is shown once, with the first of its samples."""
    last_ordinal = None
    for row in rows:
        opens_group = row["ordinal"] != last_ordinal
        last_ordinal = row["ordinal"]
        prompt = f"<pre>{cut_text(row['prompt'])}</pre>" if opens_group else ""
        cut = ' <span class="muted">(cut at the limit)</span>' if row["truncated"] else ""
        total = total_reward(row, summing)
        numbers = [
            f'<td class="n">{number(value) if is_number(value) else "not scored"}</td>'
            for value in (row["rewards"].get(name) for name in rewards)
        ]
        group = ' class="group"' if opens_group else ""
        yield (
            f'<tr{group}><td class="prompt">{prompt}</td>'
            f"<td><pre>{cut_text(row['completion'])}</pre>{cut}</td>{''.join(numbers)}"
            f"{_advantage(row['advantage'], total)}</tr>"
        )


def _advantage(value: Any, total: float | None) -> str:
    mean = mean_advantage(value)
    if mean is None:
        return '<td class="n">–</td>'
    tone = "good" if mean > 0 else "bad" if mean < 0 else "muted"
    title = "" if total is None else f' title="weighted reward {total:.3g}"'
    return f'<td class="n {tone}"{title}>{f"{mean:+.2f}" if mean else "0"}</td>'
