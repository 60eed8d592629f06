"""The program of a worker that compares mathematical answers. Started as a file, never imported.

It needs math-verify and nothing of jaxgrpo, so that no JAX is loaded in it. Reads lines of JSON,
[gold, completion, seconds], and writes the score of each: 1.0, 0.0 or null.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
from typing import Any

MEMORY = 4 * 2**30  # bytes: 9^(9^9) must not take the trainer's
LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\fbox|\\\(|\\\[|\\begin\{")


def main() -> None:
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        grade = make_grader()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print("{}", file=answers)
    for line in sys.stdin:
        gold, completion, seconds = json.loads(line)
        # Ends this process even if its parent was killed and cannot.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        score = grade(gold, completion)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(score), file=answers)


def make_grader() -> Any:
    """The function (gold, completion) -> 1.0, 0.0, or None if the gold answer cannot be read."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def read(text: str) -> list[Any]:
        return parse(text, extraction_config=kinds, parsing_timeout=None)  # type: ignore[arg-type]

    def grade(gold: str, completion: str) -> float | None:
        # Bare LaTeX, as data sets write it, is read as such only between signs of mathematics.
        right = [] if LATEX.search(gold) else read(f"${gold}$")
        right = right or read(gold)
        if not right:
            return None
        return float(verify(right, read(completion), timeout_seconds=None))  # type: ignore[arg-type]

    return grade


if __name__ == "__main__":
    main()
