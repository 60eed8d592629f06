"""Sections of a report: a title, sentences and a table, for the terminal, Markdown and HTML.

And its charts, for HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from rich.console import Console

from jaxgrpo.training.records.console import show_table
from jaxgrpo.training.records.report import charts, html


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
            cells = ([cell.replace("|", r"\|") for cell in row] for row in (head, rule, *body))
            lines += [f"| {' | '.join(row)} |" for row in cells] + [""]
        return "\n".join(lines)


def chart(title: str, note: str, draw: Callable[[Axes], None], left_margin: float = 0.14) -> str:
    """A chart in HTML, with a note below it.

    Args:
      left_margin: the share of its width that is kept for the labels of its rows.
    """
    with mpl.rc_context(charts.STYLE):
        figure, axes = charts.blank(title)
        figure.subplots_adjust(left=max(0.14, left_margin))
        draw(axes)
        charts.legend_below(axes)
        return html.figure(title, charts.as_svg(figure), note)
