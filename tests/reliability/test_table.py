"""The table of the twenty is made of what tests report, and keeps what was measured before."""

from __future__ import annotations

import re

import pytest
import reliability_table as table
from reliability_table import Row

CASE = (
    '<testcase classname="tests.a.test_b" name="test_c" time="{}"><properties>{}</properties>{}'
    "</testcase>"
)
EIGHT = '<property name="fault" value="8"/>'
FILES = frozenset({"a/b"})
THREE = '<property name="tries" value="3"/>'


def report(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_tries_of_a_fault_are_added_and_a_failing_test_has_lost_one():
    cases = [
        CASE.format(2.5, EIGHT + THREE + THREE, ""),
        CASE.format(1, EIGHT, ""),
        CASE.format(1, EIGHT + THREE, '<failure message="assert 1&#10;more"/>'),
        CASE.format(1, EIGHT, "<error/>"),
        CASE.format(9, EIGHT, '<skipped message="no bubblewrap"/>'),
        CASE.format(4, EIGHT + '<property name="fault" value="9"/>', ""),
        CASE.format(5, "", ""),
    ]
    rows, notes = table.read_report(report(*cases))
    assert rows == {8: Row(11, 2, 9.5, FILES, skipped=1), 9: Row(1, 0, 4.0, FILES)}
    assert notes == [
        "failed (row 8): tests.a.test_b::test_c: assert 1",
        "failed (row 8): tests.a.test_b::test_c: no reason",
        "skipped (row 8): tests.a.test_b::test_c: no bubblewrap",
    ]


def test_a_row_says_how_many_tests_were_skipped_and_a_fault_of_skipped_ones_has_none():
    (line,) = table.lines({8: Row(3, 0, 1, FILES, 2), 9: Row(0, 0, 0, skipped=1)}, "day").values()
    assert "| a/b | 3, 2 tests skipped | 3 | 0 |" in line


PASSED = report(CASE.format(1, EIGHT, ""))


@pytest.mark.parametrize(
    ("text", "code", "says", "is_written"),
    [
        (PASSED, 0, "has 1 new rows", True),
        (PASSED, 1, "has 1 new rows", True),
        (PASSED, 2, "pytest ended with 2 before all tests had run", False),
        (None, 4, "pytest ended with 4 and reported nothing", False),
        (report(CASE.format(1, EIGHT, "<skipped/>")), 0, "nothing was tried of 8", False),
    ],
)
def test_it_says_what_it_did(text, code, says, is_written, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"{table.BEGIN}\n{table.END}\n")
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "run_tests", lambda numbers, jobs: (text, code))
    assert table.main(["8"]) == code
    assert says in capsys.readouterr().out
    assert ("| 8 |" in page.read_text()) == is_written


def test_a_number_that_is_none_of_the_twenty_is_refused(capsys):
    with pytest.raises(SystemExit):
        table.main(["21"])
    assert "there is no fault 21: give numbers from 1 to 20" in capsys.readouterr().err


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
    for file in (repository / "tests").rglob("test_*.py"):
        numbers = re.findall(r"mark\.fault\((\d+)\)", file.read_text("utf-8"))
        if numbers:  # no other command runs those that are marked full too
            assert file.relative_to(repository / "tests").parts[0] in table.FOLDERS
        marks |= {int(number) for number in numbers}
    assert marks == table.TWENTY.keys()
