"""The built-in rewards by name."""

from __future__ import annotations

import difflib
from typing import Any

from jaxgrpo.errors import InputError
from jaxgrpo.rewards.protocol import RewardFunction, bind
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
    if use not in rewards:
        near = difflib.get_close_matches(use, rewards, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(rewards)}"
        raise InputError(
            f"reward {use!r} is not built in: {hint} (your own is named path/file.py:function or "
            "package.module:function)"
        )
    return bind(use, rewards[use], options)
