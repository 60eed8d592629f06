"""What a task is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Worked(NamedTuple):
    """One text of a warm start, and the probability that a draw from the corpus is this one."""

    prompt: str
    solution: str
    probability: float


class Task(NamedTuple):
    """A generated, verifiable task. Nothing in it is random but by the seed of `rows`."""

    name: str
    alphabet: str  # every character of its prompts and solutions: one token each
    levels: tuple[int, ...]  # values of the column "level", easiest first
    splits: Mapping[str, int]  # split -> rows taken where no count is given
    rows: Callable[[str, int, int], list[dict[str, Any]]]  # (split, count, seed)
    corpus: Callable[[], list[Worked]]  # of the supervised warm start; holds no test problem
    answer_of: Callable[[str], str]  # completion -> the answer that it ends with
    score: Callable[..., list[float]]  # (completions, answer, **columns), 1.0 iff right
