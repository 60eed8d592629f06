"""`jaxgrpo diff`: two runs side by side, by their configs, their metrics and their curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from jaxgrpo.config.files import entries
from jaxgrpo.config.own_code import short_name
from jaxgrpo.config.reading import printed_entry
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place, write_atomically
from jaxgrpo.evaluation.intervals import without_ends
from jaxgrpo.experiments.sections import Section
from jaxgrpo.training import fingerprints
from jaxgrpo.training.records.console import Document, show_whole, terminal_table
from jaxgrpo.training.records.reading import read_bytes
from jaxgrpo.training.records.report import blocks, html
from jaxgrpo.training.records.report.record import (
    Record,
    accuracy_first,
    natural,
    read_run,
    visible,
)

ABSENT = "–"
PAGE, PICTURE = (".html", ".htm"), (".png",)


def diff(runs: Sequence[str], out: str | None = None, as_json: bool = False) -> int | Document:
    """Prints in what two runs differ, and draws their curves where asked. Returns the exit code.

    Args:
      runs: two run folders, of runs at any stage.
      out: a page or a picture with the curves of both over each other, .html or .png.

    Raises: InputError if one is no run, both are the same, or `out` cannot be written.
    """
    names = _names(runs)
    suffix = _suffix(out)
    folders = list(map(storage.place_as_named, runs))
    records = dict(zip(names, map(read_run, folders), strict=True))
    keys = differing_keys(
        {
            name: _keys(record.config, folder)
            for (name, record), folder in zip(records.items(), folders, strict=True)
        }
    )
    sections = _config_section(names, keys), _metrics_section(records)
    console = Console(highlight=False)
    if not as_json:
        _show(console, *sections)
    if out is not None and suffix in PICTURE:
        from jaxgrpo.training.records.report import charts

        write_atomically(Path(out), charts.picture(records))
    elif out is not None:
        write_atomically(Path(out), render(records, sections))
    if out is not None:
        console.print(f"written: {out}", markup=False, soft_wrap=True)
    return Document(_numbers(records, keys)) if as_json else 0


def differing_keys(by_run: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Every key whose value is not the same in all runs -> its values to print, as JSON."""
    all_keys = dict.fromkeys(key for keys in by_run.values() for key in keys)
    rows = {key: [keys.get(key, ABSENT) for keys in by_run.values()] for key in all_keys}
    return {
        key: list(map(printed_entry, values)) for key, values in rows.items() if len({*values}) > 1
    }


def render(records: Mapping[str, Record], sections: Sequence[Section]) -> str:
    """The HTML page."""
    from jaxgrpo.training.records.report import charts

    figures = [
        blocks.figure(panel.title, svg, panel.note) for panel, svg in charts.draw_together(records)
    ]
    config, metrics = (section.html() for section in sections)
    title = " and ".join(records)
    body = [
        f"<h1>{blocks.text(title)}</h1>",
        config,
        f'<h2>Charts</h2>\n<div class="charts">{"".join(figures)}</div>',
        metrics,
    ]
    return blocks.document(title, "\n".join(body))


def _names(runs: Sequence[str]) -> list[str]:
    """What to call the runs: by their folders, or by what was given where these are the same."""
    paths = [run if storage.is_url(run) else str(storage.place(run).resolve()) for run in runs]
    if paths[0] == paths[1]:
        raise InputError(f"diff {' '.join(runs)}: this is one run twice; give two run folders")
    names = [path.rstrip("/").rpartition("/")[2] for path in paths]
    return names if names[0] != names[1] else list(runs)


def _suffix(out: str | None) -> str:
    """The suffix of the file to write. Raises: InputError if it is none that can be written."""
    if out is None:
        return ""
    suffix = Path(out).suffix.lower()
    if suffix not in (*PAGE, *PICTURE):
        raise InputError(f"--out {out}: name a file that ends in .html or .png")
    html.check_writable(out)
    html.check_can_draw(f"{out} needs", "leave --out out")
    return suffix


def _keys(config: Mapping[str, object], folder: Place) -> dict[str, str]:
    """The keys of a run's config in one style, and what its own code was; without its folder."""
    tables = dict(config)
    rewards = tables.get("rewards")
    if isinstance(rewards, list):
        tables["rewards"] = [
            {**entry, "name": entry.get("name") or short_name(str(entry.get("use", "")))}
            for entry in rewards
        ]
    keys = entries(tables)
    keys.pop("run.dir", None)
    for file in sorted((folder / "code").glob("*"), key=lambda file: file.name):
        if (content := read_bytes(file)) is not None:  # no folder, as of compiled files
            keys[f"code/{file.name}"] = f"crc32 {fingerprints.checksum([content])}"
    return keys


def _config_section(names: Sequence[str], keys: Mapping[str, Sequence[str]]) -> Section:
    if not keys:
        return Section("Configs", ["Both runs have the same config and the same own code."])
    rows = [["key", *names], *([key, *values] for key, values in keys.items())]
    return Section("In what the configs differ", rows=rows)


def _last_numbers(records: Mapping[str, Record]) -> dict[str, list[float | None]]:
    """metric -> the last number of each run, and how much the second one's is more."""
    metrics = {name for record in records.values() for name in record.names()}
    numbers = {}
    for name in sorted(without_ends(metrics), key=_evaluation_first):
        first, second = (record.last(name) for record in records.values())
        change = None if first is None or second is None else second - first
        if (first, second) != (None, None):
            numbers[name] = [first, second, change]
    return numbers


def _metrics_section(records: Mapping[str, Record]) -> Section:
    rows = [["", *records, "difference"]]
    rows.append(["finished steps", *(str(record.step) for record in records.values()), ""])
    for name, numbers in _last_numbers(records).items():
        forms = zip(numbers, (".4g", ".4g", "+.4g"), strict=True)
        rows.append(
            [name, *(ABSENT if number is None else f"{number:{form}}" for number, form in forms)]
        )
    return Section("The last number of each metric", rows=rows)


def _numbers(records: Mapping[str, Record], keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What `diff` prints, for --json; lists are in the order of the runs."""

    def value(text: str, is_code: bool) -> Any:
        return None if text == ABSENT else text if is_code else json.loads(text)

    return {
        "runs": list(records),
        "config": {
            key: [value(text, key.startswith("code/")) for text in values]
            for key, values in keys.items()
        },
        "steps": [record.step for record in records.values()],
        "metrics": {
            name: {"last": last, "difference": change}
            for name, (*last, change) in _last_numbers(records).items()
        },
    }


def _evaluation_first(name: str) -> tuple[object, ...]:
    inner = name.removeprefix("eval/")
    return (inner == name, *(accuracy_first(inner) if inner != name else (natural(name),)))


def _show(console: Console, config: Section, metrics: Section) -> None:
    """Prints both; a long value of a key is broken into lines, and none is cut."""
    console.print(Text(config.title, style="bold"))
    for line in config.text:
        console.print(line)
    if config.rows:
        head, *body = config.rows
        table = Table(*(Column(Text(visible(name)), overflow="fold") for name in head))
        for row in body:
            table.add_row(*(Text(visible(cell)) for cell in row))
        console.print(table)
    rows = [[Text(visible(cell)) for cell in row] for row in metrics.rows]
    show_whole(console, terminal_table(rows, no_wrap=True, title=metrics.title))
