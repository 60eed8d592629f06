"""The reward `math`: answers that are compared as mathematics, in child processes with a limit."""

from __future__ import annotations

import functools
import importlib.util
import numbers
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.written import text_of_value
from jaxgrpo.rewards.builtin import after_thought, completion_text
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.rewards.workers import Answer, WorkerError, check_options, find_workers

PROGRAM = Path(__file__).with_name("math_program.py")
NEEDED = (
    "math needs the library math-verify, which is not installed: "
    'pip install "jaxgrpo[math]" (or math-verify by itself)'
)

TIME_LIMIT = 5.0  # seconds of processor time for one completion
BATCH_LIMIT = 20.0  # seconds of a call for completions that get no score
WORKERS = 4
UNREAD_NAMED = 5  # gold answers that warnings name
_named: set[str] = set()
_readable: set[str] = set()  # gold answers


def math_answer(
    completions: Sequence[Any],
    answer: Sequence[Any],
    time_limit: float = TIME_LIMIT,
    workers: int = WORKERS,
    batch_limit: float = BATCH_LIMIT,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 if the completion's answer is mathematically the gold one, else 0.0.

    The last `\\boxed{...}` is the answer, if there is one; boxes that stand close together are
    one set. Else it is LaTeX between signs of mathematics, or a plain number. `\\frac{1}{2}`, `0.5`
    and `2/4` are equal; so are sets in another order, and expressions that simplify to the same.
    Only what follows a `</think>` is read, and of that what stands in the last `<answer>` tags. A
    completion without an answer, with a box that cannot be read or a `<think>` that does not end,
    gets 0. Unicode (`2√3`, `3½`, `10⁻⁵`), mixed numbers, repeating decimals and units in words are
    read in gold answers and completions alike. A solved inequality is an interval: `x > 3`, and not
    `2x > 6`, which may be the question's. A gold letter from A to J is compared with the letter in
    the last box or tags, or behind `answer is`.

    A gold answer that cannot be read as a whole, or that does not equal itself in a box, leaves its
    samples unscored; a warning names the first few, and `math/unread` is their share.

    Each is judged in a process that does nothing else, since some answers never end: `9^{9^{9^9}}`.
    One that takes too long, or ends its process, leaves its sample unscored and is not judged
    again: `math/timed_out`, `math/crashed`. Completions that take more than half a second are
    judged last, as long as those without a score have not taken the batch limit together.

    Args:
      completions: texts, or messages.
      answer: the gold answers as the data set writes them: bare LaTeX, a number, a solution with
        `\\boxed{...}`, or one that ends with `#### 72`.
      time_limit: seconds of processor time for one completion.
      workers: processes at most, and never more than the machine has cores.
      batch_limit: seconds of a call for the completions that get no score in time. Beyond it
        each has a tenth of a second, so that a batch ends however many of them hang.

    Returns: one score each; None if the gold answer is not read, or no process gave an answer.
    Raises: RewardError if math-verify is not installed.
    Source: github.com/huggingface/Math-Verify, whose time limits end no long operation on numbers.
    """
    del columns
    golds = [_gold(gold) for gold in answer]
    texts = [after_thought(completion_text(completion)) for completion in completions]
    ask = functools.partial(_ask, workers=workers, limits=(time_limit, batch_limit))
    answers = _judge(list(zip(golds, texts, strict=True)), ask) if texts else []
    if answers:
        _report(answer, answers, log_metric)
    return [judged.value for judged in answers]


def math_reading(gold: Any) -> str | None:
    """How `math_answer` reads a gold answer, in sympy's words; None if it does not.

    Raises: RewardError if math-verify is not installed.
    """
    (reading,) = _ask([[_gold(gold), None]], WORKERS, (TIME_LIMIT, BATCH_LIMIT))
    return reading.value


def _judge(
    pairs: Sequence[tuple[str, str]], ask: Callable[[Sequence[Any]], list[Answer]]
) -> list[Answer]:
    """The score of each gold answer and completion; `Answer(None)` if the former is not read.

    Gold answers are read first: one that hangs would do so with each of its completions.
    """
    golds = [gold for gold in dict.fromkeys(gold for gold, _ in pairs) if gold not in _readable]
    readings = dict(zip(golds, ask([[gold, None] for gold in golds]), strict=True))
    _readable.update(gold for gold, reading in readings.items() if reading.value is not None)
    # A worker that was ended from outside is no fault of the gold answer.
    crashed = {gold: reading for gold, reading in readings.items() if reading.problem == "crashed"}
    unread = dict.fromkeys(golds, Answer(None)) | crashed
    scores = iter(ask([pair for pair in pairs if pair[0] in _readable]))
    return [next(scores) if gold in _readable else unread[gold] for gold, _ in pairs]


def _ask(questions: Sequence[Any], workers: int, limits: tuple[float, float]) -> list[Answer]:
    try:
        return find_workers(PROGRAM, workers, *limits).ask(questions)
    except WorkerError as error:
        missing = "No module named 'math_verify'" in str(error)
        raise RewardError(NEEDED if missing else f"math: no worker could start: {error}") from error


def _report(
    golds: Sequence[Any],
    answers: Sequence[Answer],
    log_metric: Callable[[str, float], None] | None,
) -> None:
    """Logs the shares that have no score, and warns of gold answers that are not read."""
    unread_answer = Answer(None)
    pairs = zip(golds, answers, strict=True)
    unread = [gold for gold, judged in pairs if judged == unread_answer and gold is not None]
    if log_metric is not None:
        problems = [judged.problem for judged in answers]
        log_metric("math/timed_out", problems.count("timed out") / len(answers))
        log_metric("math/crashed", problems.count("crashed") / len(answers))
        log_metric("math/unread", len(unread) / len(answers))
    for gold in dict.fromkeys(map(repr, unread)):
        if gold not in _named and len(_named) < UNREAD_NAMED:
            _named.add(gold)
            warnings.warn(
                f"math: the gold answer {gold} cannot be read as a whole in time, or does not "
                "equal itself in \\boxed{}: its samples are not scored (math/unread is their "
                "share); write it as LaTeX, or take the row out",
                stacklevel=3,
            )


def check_math(
    time_limit: Any = TIME_LIMIT, workers: Any = WORKERS, batch_limit: Any = BATCH_LIMIT
) -> None:
    """Raises: InputError if an option is out of range, or math-verify is not installed."""
    check_options(time_limit, batch_limit, workers)
    if importlib.util.find_spec("math_verify") is None:
        raise InputError(NEEDED)


def _gold(answer: Any) -> str:
    """The gold answer as a text; of a solution in GSM8K's form what follows its mark.

    "" for what is neither a text nor a number: a list written as Python writes it is an interval.
    """
    if isinstance(answer, bool) or not isinstance(answer, (str, numbers.Number)):
        return ""
    return text_of_value(answer).rpartition("####")[2].strip()
