"""Sections of a report: a title, sentences and a table, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from jaxgrpo.training.records.report import html

MAX_WIDTH = 1000
"""Columns of a table that is not cut."""


class Section(NamedTuple):
    """A title, sentences, and a table whose first row is its head."""

    title: str
    text: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    timed: bool = False  # its numbers come from the clock: they differ between equal runs

    def show(self, console: Console) -> None:
        """Prints it."""
        if self.rows:
            show_table(console, self.rows, title=self.title)
        elif self.text:
            console.print(self.title, style="bold", markup=False)
        for text in self.text:
            console.print(text, markup=False)

    def html(self) -> str:
        """With a heading of the second level."""
        text = "".join(f"<p>{html.text(line)}</p>" for line in self.text)
        table = html.table(self.rows) if self.rows else ""
        return f"<h2>{html.text(self.title)}</h2>\n{text}{table}"

    def markdown(self) -> str:
        """With a heading of the second level, and an empty line at the end."""
        lines = [f"## {self.title}", "", *(line for text in self.text for line in (text, ""))]
        if self.rows:
            head, *body = self.rows
            rule = ["---", *["---:"] * (len(head) - 1)]
            lines += [f"| {' | '.join(row)} |" for row in (head, rule, *body)] + [""]
        return "\n".join(lines)


def show_table(console: Console, rows: Sequence[Sequence[RenderableType]], **options: Any) -> None:
    """Prints rows with every cell whole; where they are too wide for the console, as columns."""
    table = terminal_table(rows, no_wrap=True, **options)
    if _width(console, table) > console.width:
        table = terminal_table(list(zip(*rows, strict=True)), no_wrap=True, **options)
    show_whole(console, table)


def show_whole(console: Console, table: Table) -> None:
    """Prints a table as wide as its cells are: a terminal breaks longer lines, and cuts none."""
    width = console.width
    console.width = max(_width(console, table), width)
    console.print(table)
    console.width = width


def _width(console: Console, table: Table) -> int:
    free = console.options.update(max_width=MAX_WIDTH)
    return Measurement.get(console, free, table).maximum


def terminal_table(
    rows: Sequence[Sequence[RenderableType]], no_wrap: bool = False, **options: Any
) -> Table:
    """Rows for the terminal; the first one is the head, every column but the first is numbers.

    Args:
      no_wrap: every cell stays in one line.
      options: of `rich.table.Table`.
    """
    table = Table(title_justify="left", **options)
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if place else "left", no_wrap=no_wrap)
    for row in rows[1:]:
        table.add_row(*row)
    return table
