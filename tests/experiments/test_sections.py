"""Tables of reports in consoles of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jaxgrpo.experiments.sections import Section

HEADS = ["G", "flat", "all fail", "all pass", "i.i.d.", "gap", "99% interval", "live", "tokens"]
NUMBERS = ["16", "0.101", "0.202", "0.303", "0.404", "0.505", "-0.606 to 0.707", "8.8", "9909"]


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_no_number_and_no_head_is_cut_at_any_width(width):
    console = Console(file=(screen := io.StringIO()), width=width)
    Section("groups", rows=[HEADS, NUMBERS]).show(console)
    lines = screen.getvalue().splitlines()
    for cell in (*HEADS, *NUMBERS):
        assert any(cell in line for line in lines)
    assert any("flat" in line and "0.101" in line for line in lines) == (width < 100)


def test_a_bar_in_a_cell_begins_no_column_in_markdown():
    rows = [["key", "a"], ["rewards", '"^(yes|no)$"']]
    lines = Section("differences", rows=rows).markdown().splitlines()
    assert lines[2:5] == ["| key | a |", "| --- | ---: |", r'| rewards | "^(yes\|no)$" |']


def test_brackets_and_colons_of_a_cell_are_no_markup():
    console = Console(file=(screen := io.StringIO()), width=200)
    cells = ['"[a-z]+"', '"[/answer]"', "runs/a[b]:smile:"]
    Section("of [b]", rows=[["[key]", "[/]", "x", "y"], ["pattern", *cells]]).show(console)
    text = screen.getvalue()
    for cell in (*cells, "of [b]", "[key]", "[/]"):
        assert cell in text
