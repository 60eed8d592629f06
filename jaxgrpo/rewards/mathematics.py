"""Answers of general mathematics, compared by the math-verify library in processes of its own."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxgrpo.core.errors import InputError
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.rewards.texts import after_thought, text_of
from jaxgrpo.rewards.workers import WorkerError, Workers

PROGRAM = Path(__file__).with_name("math_program.py")
NEEDED = (
    "math needs the library math-verify, which is not installed: "
    'pip install "jaxgrpo[math]" (or math-verify by itself)'
)


def math_answer(
    completions: Sequence[Any],
    answer: Sequence[Any],
    time_limit: float = 5.0,
    workers: int = 4,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion's answer is mathematically the gold one, else 0.0.

    The last `\\boxed{...}` is the answer, where there is one; boxes that stand close together are
    one set. Else it is LaTeX between signs of mathematics, or a plain number. `\\frac{1}{2}`, `0.5`
    and `2/4` are equal; so are sets in another order, and expressions that simplify to the same.
    Only what follows a `</think>` is read, where there is one. A completion without an answer
    gets 0.

    Each is judged in a process that does nothing else, since some answers never end: `9^{9^{9^9}}`.
    One that takes too long, or ends its process, leaves its sample unscored; the process is
    replaced. Their shares are the metrics `math/timed_out` and `math/crashed`.

    Args:
      completions: texts, or messages.
      answer: the gold answers as the data set writes them: bare LaTeX, a number, a solution with
        `\\boxed{...}`, or one that ends with `#### 72`.
      time_limit: seconds for one completion.
      workers: processes at most, and never more than the machine has cores.

    Returns: one score each; None where the gold answer cannot be read, or nobody could judge.
    Raises: RewardError where math-verify is not installed.
    Source: github.com/huggingface/Math-Verify. Its own time limits work in a main thread alone,
    and do not end a process that is lost in one long operation on numbers.
    """
    del columns
    questions = [
        [_gold(gold), after_thought(text_of(completion)), time_limit]
        for completion, gold in zip(completions, answer, strict=True)
    ]
    if not questions:
        return []
    try:
        answers = _workers(min(workers, os.cpu_count() or 1), time_limit).ask(questions)
    except WorkerError as error:
        missing = "No module named 'math_verify'" in str(error)
        raise RewardError(NEEDED if missing else f"math: no worker could start: {error}") from error
    if log_metric is not None:
        for problem in ("timed out", "crashed"):
            share = sum(one.problem == problem for one in answers) / len(answers)
            log_metric(f"math/{problem.replace(' ', '_')}", share)
    return [one.value for one in answers]


def check_math(time_limit: Any = 5.0, workers: Any = 4) -> None:
    """Raises: InputError where an option is out of range, or math-verify is not installed."""
    number = isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if not number or not math.isfinite(time_limit) or time_limit <= 0:
        raise InputError(f"time_limit = {time_limit!r}: expected seconds above 0")
    if type(workers) is not int or workers < 1:
        raise InputError(f"workers = {workers!r}: expected a whole number of processes, >= 1")
    if importlib.util.find_spec("math_verify") is None:
        raise InputError(NEEDED)


def _gold(answer: Any) -> str:
    """The gold answer as a text; of a solution in GSM8K's form what follows its mark."""
    return "" if answer is None else str(answer).rpartition("####")[2].strip()


@functools.cache
def _workers(count: int, time_limit: float) -> Workers:
    # -P: the program's folder is not searched for modules, so that none of ours hides another.
    return Workers([sys.executable, "-P", str(PROGRAM)], count, time_limit)
