"""The reward `reasoning_gym`: the package's own scorers, in child processes with a limit.

A scorer reads what a model wrote: some evaluate it as Python, others go through every way to read
it. So a row is made again where it is scored, in processes that do nothing else, and what its
scorer could run is taken away from it (data/tasks/reasoning_program.py).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks.reasoning import ENVIRONMENT, NAME, NEEDED, PROGRAM
from jaxgrpo.rewards.builtin import after_thought, completion_text, last_tagged
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.rewards.workers import WorkerError, check_options, find_workers

TIME_LIMIT, BATCH_LIMIT, WORKERS = 5.0, 20.0, 4
_ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)


def read_answer(completion: str) -> str | None:
    r"""What stands in the last pair of answer tags, else the last line; None where both are empty.

    Only what follows a `</think>` is read, if there is one, and nothing of a text that begins with
    `<think>` and has none.

    >>> read_answer("so <answer>7</answer>, or\n<answer> 8 </answer>!"), read_answer("7 + 1\n= 8\n")
    ('8', '= 8')
    """
    text = after_thought(completion)
    tagged = last_tagged(_ANSWER, text, "</answer>")
    return (text.strip().rpartition("\n")[2] if tagged is None else tagged).strip() or None


def reasoning_gym(
    completions: Sequence[Any],
    entry: Sequence[str | None],
    time_limit: float = TIME_LIMIT,
    workers: int = WORKERS,
    batch_limit: float = BATCH_LIMIT,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """What the row's generator gives for the answer: 1.0 if it is right, less or 0.0 if not.

    The answer stands between the last <answer> and </answer>, as the package reads it, or is the
    last line where there are no such tags. Thoughts, ended by `</think>` or not, are not read.

    A completion on which the scorer takes too long is not scored; their share is the metric
    `reasoning_gym/unscored`. One that the scorer cannot read gets what there is for no answer.

    Args:
      completions: texts, or messages.
      entry: the column of the rows of task:reasoning_gym; None in rows of other sources, which are
        not scored.
      time_limit: seconds of processor time for one completion.
      workers: processes at most, and never more than the machine has cores.
      batch_limit: seconds of a call for the completions that get no score in time.

    Returns: one score each, by the generator's own scale; None if there is none.
    Raises: RewardError if reasoning-gym is not installed.
    Source: github.com/open-thought/reasoning-gym. Scorers that run an answer as Python get literals
    and plain mathematics alone, and give the rest what they give for no answer.
    """
    del columns
    texts = [read_answer(completion_text(completion)) for completion in completions]
    pairs = list(zip(entry, texts, strict=True))
    questions = [[json.loads(place), text] for place, text in pairs if place is not None]
    environment = tuple(ENVIRONMENT.items())
    try:
        ask = find_workers(PROGRAM, workers, time_limit, batch_limit, environment).ask
        answers = ask(questions)
    except WorkerError as error:
        raise RewardError(f"{NAME}: no worker could start: {error}") from error
    if log_metric is not None and answers:
        unscored = sum(answer.problem is not None for answer in answers)
        log_metric(f"{NAME}/unscored", unscored / len(answers))
    values = iter([answer.value for answer in answers])
    return [None if place is None else next(values) for place in entry]


def check_reasoning(
    time_limit: Any = TIME_LIMIT, workers: Any = WORKERS, batch_limit: Any = BATCH_LIMIT
) -> None:
    """Raises: InputError if an option is out of range, or reasoning-gym is not installed."""
    check_options(time_limit, batch_limit, workers)
    if importlib.util.find_spec(NAME) is None:
        raise InputError(f"{NAME} {NEEDED}")
