"""The table of the twenty is made of what tests report, and keeps what was measured before."""

from __future__ import annotations

import re

import reliability_table as table
from reliability_table import Row

CASE = '<testcase classname="tests.a.test_b" time="{}"><properties>{}</properties>{}</testcase>'
EIGHT = '<property name="fault" value="8"/>'
FILES = frozenset({"a/b"})
THREE = '<property name="tries" value="3"/>'


def report(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_tries_of_a_fault_are_added_and_a_failing_test_has_lost_one():
    cases = [
        CASE.format(2.5, EIGHT + THREE + THREE, ""),
        CASE.format(1, EIGHT, ""),
        CASE.format(1, EIGHT + THREE, "<failure/>"),
        CASE.format(1, EIGHT, "<error/>"),
        CASE.format(9, EIGHT, "<skipped/>"),
        CASE.format(4, EIGHT + '<property name="fault" value="9"/>', ""),
        CASE.format(5, "", ""),
    ]
    assert table.read_report(report(*cases)) == {
        8: Row(11, 2, 9.5, FILES),
        9: Row(1, 0, 4.0, FILES),
    }


def test_rows_that_were_not_measured_again_stay():
    page = f"# Page\n\n{table.BEGIN}\n{table.END}\n\nbehind\n"
    first = table.with_lines(
        page, table.lines({9: Row(1, 0, 2), 8: Row(40, 1, 300.4, FILES)}, "day 1")
    )
    row = f"| 8 | {' | '.join(table.TWENTY[8])} | a/b | 41 | 40 | 1 | 300 | day 1 |"
    assert row in first
    assert first.index("| 8 |") < first.index("| 9 |")
    second = table.with_lines(first, table.lines({9: Row(2, 0, 3)}, "day 2"))
    assert row in second
    assert second.count("day 2") == 1
    assert second.startswith("# Page")
    assert second.endswith("behind\n")


def test_every_fault_of_the_page_has_tests_and_every_mark_a_fault(repository):
    assert [*table.TWENTY] == list(range(1, 21))
    marks: set[int] = set()
    for folder in table.FOLDERS:
        for file in (repository / "tests" / folder).glob("test_*.py"):
            numbers = re.findall(r"mark\.fault\((\d+)\)", file.read_text("utf-8"))
            marks |= {int(number) for number in numbers}
    assert marks == table.TWENTY.keys()
