"""The twenty faults: runs their tests and writes the table of docs/reliability.md.

    python tests/support/reliability_table.py [NUMBER ...]

A test says by the mark `fault(number)` which of the twenty it is about, and by the fixture `tries`
how often it tried; without it a test is one try. A test that fails has lost one. A skipped test has
tried nothing: its row says how many there are, and a fault whose tests were all skipped has no new
row. Rows without new numbers stay as they are on the page: each says when it was measured, and at
which commit. Below the table stand the tests that failed or were skipped, and why.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "reliability.md"
FOLDERS = (
    "planning",  # first what takes long, so that no process has nothing left to do at the end
    "reliability",
    "training",
    "update",
    "experiments",
    "rewards",
    "models",
    "environments",
    "cli",
)
HEAD = (
    "| | fault | promise | tests | tries | survived | lost | seconds | measured |\n"
    "|---:|---|---|---|---:|---:|---:|---:|---|"
)
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""Tags of pytest's report -> what to call them."""
COMPLETE = (0, 1)
"""Exit codes of pytest where all tests ran; 1: some failed."""
BEGIN, END = "<!-- table of the twenty: make test-reliability -->", "<!-- end of the table -->"

TWENTY = {
    1: ("a program that a TPU cannot run", "it is compiled for absent chips, as in a step"),
    2: ("a model too large for a slice", "updates compile for slices, within their memory"),
    3: ("a program that moves too much", "no full logits, no needless collective; donation holds"),
    4: ("too little memory", "said before anything compiles, with what would fit"),
    5: ("a program that a GPU cannot run", "it is compiled for absent GPUs, with its kernels"),
    6: ("a long run", "memory, descriptors, threads and programs stay as many"),
    7: ("1, 2 or 4 processes", "the same steps, each sample judged once"),
    8: ("killed at any moment, also in a save", "continues, and ends bit for bit the same"),
    9: ("stopped between two saves", "continues, and ends bit for bit the same"),
    10: ("continued by other processes or devices", "the same steps"),
    11: ("flipped bits in a checkpoint", "found; the step before is taken"),
    12: ("files removed, cut, linked, locked, replaced", "refused in a line, or the run is whole"),
    13: ("a full disk, wherever it is met", "a line, steps stay, it continues with room"),
    14: ("SIGTERM, SIGHUP, SIGUSR1, Ctrl-C, in any phase", "saves its step, and continues from it"),
    15: ("a process killed, frozen or gone", "all end soon, with the reason"),
    16: ("a process that raises, hangs or holds the lock", "all end in time, with where it was"),
    17: ("rewards that hang, crash, exit or return nonsense", "a line, or unscored; none is lost"),
    18: ("numbers that are not finite", "the update is skipped and counted"),
    19: ("programs of models that attack", "they earn nothing and leave nothing"),
    20: ("wrong configs, data, models, commands", "refused in a message, before anything long"),
}
"""Number -> (fault, promise)."""


class Row(NamedTuple):
    """What was tried of a fault."""

    survived: int
    lost: int
    seconds: float
    files: frozenset[str] = frozenset()
    skipped: int = 0  # tests

    def add(self, more: Row) -> Row:
        """Both together."""
        return Row(
            self.survived + more.survived,
            self.lost + more.lost,
            self.seconds + more.seconds,
            self.files | more.files,
            self.skipped + more.skipped,
        )


class Report(NamedTuple):
    """What pytest says of the tests of faults.

    Attributes:
      rows: number -> its row.
      notes: a line for each test that failed or was skipped.
    """

    rows: dict[int, Row]
    notes: list[str]


def read_report(text: str) -> Report:
    """What a report says that pytest --junitxml writes. Skipped tests are no tries."""
    rows: dict[int, Row] = {}
    notes: list[str] = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        properties = [(item.get("name"), item.get("value", "")) for item in case.iter("property")]
        numbers = sorted({int(value) for name, value in properties if name == "fault"})
        outcomes = [item for item in case if item.tag in OUTCOMES]
        for item in outcomes if numbers else ():
            reason = (item.get("message") or "no reason").splitlines()[0]
            name = f"{case.get('classname')}::{case.get('name')}"
            rows_text = ", ".join(map(str, numbers))
            notes.append(f"{OUTCOMES[item.tag]} (row {rows_text}): {name}: {reason}")
        kinds = {item.tag for item in outcomes}
        file = case.get("classname", "").removeprefix("tests.").replace(".test_", "/")
        tried = [int(value) for name, value in properties if name == "tries"]
        more = Row(0, 0, 0.0, skipped=1)
        if kinds != {"skipped"}:
            survived = sum(tried) if tried or kinds else 1
            more = Row(survived, int(bool(kinds)), float(case.get("time", 0)), frozenset({file}))
        for number in numbers:
            rows[number] = rows[number].add(more) if number in rows else more
    return Report(rows, notes)


def lines(rows: Mapping[int, Row], measured: str) -> dict[int, str]:
    """Number -> its line of the table; of a fault of which something was tried."""
    return {
        number: f"| {number} | {' | '.join(TWENTY[number])} | {', '.join(sorted(row.files))} "
        f"| {row.survived + row.lost}{f', {row.skipped} tests skipped' * bool(row.skipped)} "
        f"| {row.survived} | {row.lost} | {row.seconds:.0f} | {measured} |"
        for number, row in rows.items()
        if row.survived + row.lost
    }


def with_lines(page: str, new_lines: Mapping[int, str]) -> str:
    """The page with these lines of its table, the others as they are."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    old = {int(number): line for line, number in re.findall(r"^(\| (\d+) \|.*)$", table, re.M)}
    merged = {**old, **new_lines}
    body = "\n".join(merged[number] for number in sorted(merged))
    return f"{before}{BEGIN}\n\n{HEAD}\n{body}\n\n{END}{after}"


def run_tests(numbers: Iterable[int], jobs: int) -> tuple[str | None, int]:
    """The report of the tests of these faults, and pytest's exit code. None: it wrote none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-n", str(jobs), "--max-worker-restart", "0", "--dist", "loadfile"]
        options.append("--no-loadscope-reorder")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "fault", f"--junitxml={report}"]
        command += [
            *options,
            *(f"tests/{name}" for name in FOLDERS),
            "--faults",
            *map(str, numbers),
        ]
        environment = {"EXAMPLES": "1000", **os.environ}  # of a format; more in `make test-long`
        code = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
        return report.read_text(encoding="utf-8") if report.exists() else None, code


def commit() -> str:
    """The commit of the checkout, with a + where files have changed since."""
    git = ["git", "-C", str(REPOSITORY)]
    name = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return name.stdout.strip() + "+" * bool(status.stdout.strip())


def main(argv: list[str]) -> int:
    """Runs the tests, prints the table and writes it. Returns 0 where nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="all twenty if none")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    options = parser.parse_args(argv)
    numbers, began = options.numbers or [*TWENTY], time.monotonic()
    if unknown := sorted({*numbers} - TWENTY.keys()):
        parser.error(f"there is no fault {unknown[0]}: give numbers from 1 to {len(TWENTY)}")
    text, code = run_tests(numbers, options.jobs)
    if text is None:
        print(f"pytest ended with {code} and reported nothing: {PAGE} stays as it is")
        return code
    rows, notes = read_report(text)
    measured = f"{datetime.date.today().isoformat()}, {commit()}"
    table = lines({number: row for number, row in rows.items() if number in numbers}, measured)
    print("", HEAD, *(table[number] for number in sorted(table)), *notes, sep="\n")
    print(f"{time.monotonic() - began:.0f} seconds, {options.jobs} processes")
    if missing := ", ".join(str(number) for number in numbers if number not in table):
        print(f"nothing was tried of {missing}: on the page these rows stay as they are")
    if code not in COMPLETE:
        print(f"pytest ended with {code} before all tests had run: {PAGE} stays as it is")
        return code
    PAGE.write_text(with_lines(PAGE.read_text("utf-8"), table), "utf-8")
    print(f"{PAGE} has {len(table)} new rows")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
