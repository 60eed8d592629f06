"""The built-in rewards by name."""

from __future__ import annotations

from typing import Any

from jaxgrpo.names import find
from jaxgrpo.rewards.protocol import RewardError, RewardFunction, bind, options_of
from jaxgrpo.tasks import tasks

rewards: dict[str, RewardFunction] = {task.name: task.score for task in tasks.values()}


def build(use: str | RewardFunction, **options: Any) -> RewardFunction:
    """The built-in reward of that name, or the function itself, with its options fixed.

    Raises: InputError on an unknown name, with the nearest; RewardError on an unknown option.
    >>> build("arithmetic")(completions=["3+4=7 1+1=2 27"], answer=["27"])
    [1.0]
    """
    if not isinstance(use, str):
        return bind(getattr(use, "__name__", type(use).__name__), use, options)
    function = find("reward", use, rewards)
    # Built-in rewards take every keyword, as TRL's do; a misspelt option must not vanish in them.
    known = options_of(function)
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = ", ".join(known) or "none"
        raise RewardError(f"rewards.{use}: no option {unknown[0]!r}: it takes {takes}")
    return bind(use, function, options)
