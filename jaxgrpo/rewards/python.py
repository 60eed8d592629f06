"""The reward `python`: programs that have to pass the tests of their row, in a sandbox."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxgrpo.core.errors import InputError, find
from jaxgrpo.rewards import bubblewrap, monty
from jaxgrpo.rewards.builtin import completion_text
from jaxgrpo.rewards.programs import (
    COLUMNS,
    Pairs,
    Sandbox,
    Tests,
    Verdict,
    complete_program,
    find_program,
    is_same_text,
    read_tests,
)
from jaxgrpo.rewards.protocol import RewardError

SANDBOXES = {"bwrap": bubblewrap, "monty": monty}
TIME_LIMIT = 5.0  # seconds of processor time for a program
WORKERS = 4
PROBLEMS = ("stopped", "unsupported", "broken")
"""Whose shares are logged: they are no answers to the tests."""

NEEDED = (
    "python runs programs in a sandbox alone, and there is none here ({problems}): install "
    'bubblewrap (Debian: apt install bubblewrap), or Monty: pip install "jaxgrpo[sandbox]"'
)


def python_answer(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    sandbox: str | None = None,
    time_limit: float = TIME_LIMIT,
    workers: int = WORKERS,
    partial: bool = False,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 if the program of the completion passes all tests of its row, else 0.0.

    The program is the last block of the completion that is labelled Python, else the last without a
    label, or all of it if it has no blocks.
    The tests of a row are the columns of MBPP (`test_list`, with `test_imports` and
    `test_setup_code`), of HumanEval (`test` and `entry_point`), or `inputs` and `outputs`, texts
    that the program reads and has to print. Names that tests do not define are functions of the
    program; arguments and values are copied, so a test does not see what a function changes.

    The program runs in a sandbox, the tests in another, and only plain values go between them. So
    a program that ends early, replaces what compares, prints what is expected or looks for tests
    has to give the right values all the same. Tests that a prompt shows can be learnt by heart.

    One that runs into a limit, or does not run, gets 0. So does, in Monty, one that needs a part of
    Python that Monty does not have. `python/stopped` and `python/unsupported` are their shares, and
    `python/broken` that of tests which do not run themselves: their samples are not scored.

    Args:
      prompts, completions: texts, or messages.
      sandbox: "bwrap" runs CPython in a process shut in by bubblewrap, "monty" the interpreter
        Monty. None: bubblewrap where it runs, else Monty, with a warning.
      time_limit: seconds of processor time for the tests of a row, and for each of its inputs;
        5 s of wall time more.
      workers: programs at the same time, and never more than the machine has cores.
      partial: the share of tests that pass, as open-r1 and verl have it. A constant may pass some.

    Raises: RewardError without a sandbox, or on a row without tests.
    Source: HumanEval, arXiv 2107.03374, whose own program runs tests and answer in one process.
    """
    runner = choose(sandbox)
    questions = _read(prompts, completions, columns)
    different = list(dict.fromkeys(questions))
    asks = [functools.partial(judge, runner, *pair, time_limit, not partial) for pair in different]
    verdicts = dict(zip(different, _ask(asks, workers), strict=True))
    answers = [verdicts[question] for question in questions]
    if log_metric is not None and answers:
        for problem in PROBLEMS:
            count = sum(answer.problem == problem for answer in answers)
            log_metric(f"python/{problem}", count / len(answers))
    return [_score(answer, partial) for answer in answers]


def _read(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> list[tuple[str, Tests | Pairs]]:
    """The program of each completion, and the tests of its row."""
    questions = []
    for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: columns[name][place] for name in COLUMNS if name in columns}
        try:
            tests = read_tests(row | {"prompt": prompt})
        except InputError as error:
            raise RewardError(f"rewards.python: the row of {prompt!r:.80}: {error}") from None
        program = find_program(completion_text(completion))
        questions.append((complete_program(program, prompt, row.get("entry_point")), tests))
    return questions


def judge(
    sandbox: Sandbox, program: str, tests: Tests | Pairs, seconds: float, stops: bool
) -> Verdict:
    """How a program does in the tests of a row.

    Args:
      seconds: of processor time, for all calls together, and for each pair.
      stops: whether the first test that fails is the last.
    """
    if isinstance(tests, Tests):
        return sandbox.judge(program, tests, seconds, stops)
    passed, problem = 0, ""
    for text, expected in zip(*tests, strict=True):
        printed = sandbox.run(program, text, seconds, False)
        is_passed = not printed.problem and is_same_text(printed.text, expected)
        passed, problem = passed + is_passed, problem or printed.problem
        if stops and not is_passed:
            break
    return Verdict(passed, len(tests.inputs), problem)


@functools.cache
def choose(name: str | None) -> Sandbox:
    """The sandbox of that name; by default bubblewrap where it runs, else Monty, with a warning.

    Raises: InputError where it does not run, or no such sandbox exists.
    """
    modules = SANDBOXES if name is None else {name: find("sandbox", name, SANDBOXES)}
    problems = {key: module.find_problem() for key, module in modules.items()}
    usable = [key for key, problem in problems.items() if problem is None]
    if not usable:
        texts = [f"{key}: {problem}" for key, problem in problems.items()]
        raise InputError(NEEDED.format(problems="; ".join(texts)))
    if name is None and problems["bwrap"] is not None:
        warnings.warn(
            f"python: bubblewrap does not run here ({problems['bwrap']}), so Monty runs programs, "
            'which knows a part of Python; sandbox = "monty" says that this is meant',
            stacklevel=2,
        )
    return modules[usable[0]].make_sandbox()


def check_python(
    sandbox: Any = None, time_limit: Any = TIME_LIMIT, workers: Any = WORKERS, partial: Any = False
) -> None:
    """Raises: InputError if an option is out of range, or there is no sandbox."""
    is_number = isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if not is_number or not math.isfinite(time_limit) or time_limit <= 0:
        raise InputError(f"time_limit = {time_limit!r}: expected seconds above 0")
    if type(workers) is not int or workers < 1:
        raise InputError(f"workers = {workers!r}: expected a whole number of programs, >= 1")
    if not isinstance(partial, bool):
        raise InputError(f"partial = {partial!r}: expected true or false")
    choose(sandbox)


def check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises: InputError with the first row that has no tests, or some that cannot be read."""
    for number, row in enumerate(rows):
        try:
            read_tests(row)
        except InputError as error:
            raise InputError(f"row {number}: rewards.python: {error}") from None


def _ask(questions: Sequence[Callable[[], Verdict]], workers: int) -> list[Verdict]:
    """The verdicts, in order. Interrupted, it leaves those alone that have begun: they end soon."""
    threads = ThreadPoolExecutor(min(workers, os.cpu_count() or 1), "jaxgrpo-python")
    try:
        return [future.result() for future in [threads.submit(ask) for ask in questions]]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _score(verdict: Verdict, partial: bool) -> float | None:
    if verdict.problem == "broken":
        return None
    share = verdict.passed / verdict.total
    return share if partial else float(share == 1)
