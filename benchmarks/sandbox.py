"""What a judged program costs in each sandbox that this machine has.

    python -m benchmarks.sandbox [COUNT]

COUNT (1000) different programs that pass the three assertions of their row, one call of the reward
`python`; the same with one input and one output; and one program that never ends, whose time limit
is 1 s. No limit: the test of the same name in tests/rewards/test_python.py has one.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.common import describe, report
from jaxgrpo.rewards import python_answer
from jaxgrpo.rewards.python import SANDBOXES, WORKERS

CALLS = {"test_list": ["assert double(3) == 6", "assert double(0) == 0", "assert double(-1) == -2"]}
PAIR = {"inputs": ["3\n"], "outputs": ["6\n"]}
FUNCTION = "def double(value):\n    {number}\n    return value * 2\n"
SCRIPT = "{number}\nprint(int(input()) * 2)\n"
ENDLESS = "while True:\n    {number}\n"


def measure(
    sandbox: str, program: str, row: dict[str, list[str]], count: int, score: float
) -> float:
    """Seconds that so many programs take together, each of which earns `score`."""
    programs = [program.format(number=number) for number in range(count)]
    columns: Any = {name: [value] * count for name, value in row.items()}
    began = time.perf_counter()
    scores = python_answer([""] * count, programs, sandbox, 1.0 if score == 0 else 5.0, **columns)
    seconds = time.perf_counter() - began
    assert scores == [score] * count
    return seconds


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    values: dict[str, Any] = {"programs": count, "workers": min(WORKERS, os.cpu_count() or 1)}
    for name, module in SANDBOXES.items():
        if problem := module.find_problem():
            print(f"{name}: {problem}")
            continue
        measure(name, FUNCTION, CALLS, 4, 1.0)
        cases = (("calls", FUNCTION, CALLS), ("pairs", SCRIPT, PAIR))
        for kind, program, row in cases:
            seconds = measure(name, program, row, count, 1.0)
            values[f"{name}_{kind}_s"] = round(seconds, 2)
            each = seconds / count * 1000
            print(f"{name}: {count} programs, {kind}: {seconds:.1f} s, {each:.1f} ms each")
        seconds = measure(name, ENDLESS, CALLS, 1, 0.0)
        values[f"{name}_endless_s"] = round(seconds, 2)
        print(f"{name}: one that never ends, limit 1 s: {seconds:.2f} s")
    report({**describe(), **values})


if __name__ == "__main__":
    main()
