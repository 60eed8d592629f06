"""The built-in rewards by name, and a preview of what rewards give before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from jaxgrpo.core.errors import InputError, find
from jaxgrpo.data.chat import for_rewards
from jaxgrpo.data.written import text_of_value
from jaxgrpo.rewards import builtin, confidence, consensus, mathematics, python, reasoning
from jaxgrpo.rewards.calling import RewardLog, call_rewards
from jaxgrpo.rewards.protocol import (
    BuiltIn,
    Reward,
    RewardError,
    RewardFunction,
    TrainerState,
    bind,
    callable_name,
    default_options,
)

rewards: dict[str, BuiltIn] = {
    **confidence.SCORERS,
    "format": builtin.has_format,
    "length": builtin.overlong_penalty,
    "accuracy": confidence.accuracy,
    "brier": confidence.brier,
    "confidence_format": confidence.confidence_format,
    "consensus": consensus.consensus,
    "python": python.python_answer,
    "reasoning_gym": reasoning.reasoning_gym,
}
"""The built-in rewards by the names that a config uses."""

answers: dict[str, Callable[[str], Hashable]] = consensus.EXTRACTORS
"""The answer that a completion gives, for votes. An own reward may have the function as its
attribute `extract`."""

_READINGS: dict[str, Callable[[Any], Any]] = {
    "math": mathematics.math_reading,
    "gsm8k_answer": builtin.gold_number,
}
"""How rewards read a gold answer; None: they do not."""

_CHECKS: dict[str, Callable[..., None]] = {
    "math": mathematics.check_math,
    "format": builtin.check_format,
    "length": builtin.check_length,
    "accuracy": confidence.check_scorer,
    "brier": confidence.check_scorer,
    "consensus": consensus.check_extract,
    "python": python.check_python,
    "reasoning_gym": reasoning.check_reasoning,
}
"""The checks of a reward's options; each takes them by name."""


_TRL = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "format",
    "get_soft_overlong_punishment": "length",
}
"""Rewards that TRL has, and the built-in ones like them."""


@overload
def build(use: str, **options: Any) -> BuiltIn: ...
@overload
def build(use: RewardFunction, **options: Any) -> RewardFunction: ...
def build(use: str | RewardFunction, **options: Any) -> RewardFunction:
    """The built-in reward of that name, or the function itself, with its options fixed.

    Raises: InputError on an unknown name, with the nearest; RewardError on an unknown option, or
    one out of its range.
    >>> build("arithmetic")(completions=["3+4=7 1+1=2 27"], answer=["27"])
    [1.0]
    """
    if not isinstance(use, str):
        return bind(callable_name(use), use, options)
    if hint := _foreign_hint(use):
        raise InputError(f"unknown reward {use!r}: {hint}")
    function = find("reward", use, rewards)
    # Built-in rewards take every keyword, as TRL's do; a misspelt option must not vanish in them.
    bind(use, function, options, strict=True)
    if use in _CHECKS:
        try:
            _CHECKS[use](**options)
        except InputError as error:
            raise RewardError(f"rewards.{use}: {error}") from None
    # All of them: a column may have the name of an option, as time_limit in programming contests.
    return bind(use, function, {**default_options(function), **options})


def _foreign_hint(use: str) -> str:
    """What to write for a reward that TRL names so; "" for another."""
    if use in _TRL:
        is_factory = use.startswith("get_")
        name = "" if is_factory else f", and TRL's is trl.rewards:{use}"
        return f"the built-in one like TRL's is {_TRL[use]!r}{name}"
    if "/" in use and ":" not in use and not use.endswith(".py"):
        return "a reward model is called by a function of your own, path/file.py:my_function"
    return ""


def with_lengths(
    use: Any, options: Mapping[str, Any], max_completion_tokens: int
) -> dict[str, Any]:
    """The options of a reward; the length reward gets the run's limit if it has none of its own.

    >>> with_lengths("length", {"cache": 8}, 64)
    {'max_tokens': 64, 'cache': 8}
    """
    return {"max_tokens": max_completion_tokens, **options} if use == "length" else {**options}


def is_per_sample(function: RewardFunction | None) -> bool:
    """Whether each score depends on its own group alone, whatever else is in the call.

    True of the built-in rewards, and of a function or object whose `per_sample` is True,
    with or without options.
    """
    while function is not None:
        built_in = any(function is reward for reward in rewards.values())
        if built_in or getattr(function, "per_sample", False) is True:
            return True
        function = getattr(function, "func", None)
    return False


def check_rows(function: RewardFunction, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises: InputError with the first row that a built-in reward cannot judge."""
    if getattr(function, "func", function) is python.python_answer:
        python.check_rows(rows)


class Preview(NamedTuple):
    """The scores of a row's gold answer and of the empty text; None: not scored."""

    gold: float | None  # None too if the row has no answer
    empty: float | None
    problem: str | None = None  # what a reward with on_error = "unscored" raised
    reading: str | None = None  # how it reads the gold answer, where it can tell


def preview(
    rewards: Sequence[Reward],
    row: Mapping[str, Any],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[list[int]]], list[str]],
    *,
    trainer_state: TrainerState | None = None,
    check_log: Callable[[RewardLog], Any] | None = None,
) -> dict[str, Preview]:
    """Calls every reward once on two completions: the row's gold answer, and "".

    Args:
      row: has "prompt" and, where the data have answers, "answer".
      encode: the token ids that a sample with this text has, with its end token.
      decode: the texts of samples.
      check_log: refuses what the rewards logged; None: anything may be logged.

    Raises: RewardError as `call_rewards` does, and what `check_log` raises.
    """
    answer = row.get("answer")
    ids = [encode(text) for text in ("" if answer is None else text_of_value(answer), "")]
    prompts, completions = for_rewards([row["prompt"]] * 2, decode(ids))
    scores, log = call_rewards(
        rewards,
        prompts,
        completions,
        ids,
        {name: [value] * 2 for name, value in row.items() if name != "prompt"},
        trainer_state=trainer_state,
    )
    if check_log is not None:
        check_log(log)

    previews = {}
    for name, function, *_ in rewards:
        gold, empty = (None if np.isnan(value) else float(value) for value in scores[name])
        problem = log.messages.get(name)
        reading = None if answer is None else _describe_reading(function, answer)
        previews[name] = Preview(None if answer is None else gold, empty, problem, reading)
    return previews


def _describe_reading(function: RewardFunction, answer: Any) -> str | None:
    """How a reward reads a gold answer, in words; None if it cannot tell."""
    function = getattr(function, "func", function)
    for name, read_gold in _READINGS.items():
        if function is rewards[name]:
            value = read_gold(answer)
            return "nothing" if value is None else str(value)
    return None
