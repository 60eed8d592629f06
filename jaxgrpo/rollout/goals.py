"""Goals: tokens that each sample of a prompt begins with, drawn by stated shares.

The prompt of a group stays one, so that its keys and values are computed once. A goal comes after
it and is no part of what a sample says: it is not trained on, and rewards do not see it. The group
then holds samples under different conditions, and differs more often.

Source: RC-GRPO, arXiv 2602.03025, which trains on trajectories with such tokens first, and asks for
the good ones when the model is used. There the token is in the prompt.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Prompts, Stream
from jaxgrpo.rewards.calling import sample_draws

WHERE = "rollout.goals"

Select = Callable[[Stream, int], tuple[Stream, Prompts]]
"""As `rollout.judging.Select`."""


class Goals(NamedTuple):
    """The goals of a run. The first is what evaluations ask for."""

    names: tuple[str, ...]  # in metrics
    shares: tuple[float, ...]  # which add up to 1
    tokens: np.ndarray  # [n, F] int32, -1 behind the last token of each
    seed: int

    @property
    def first(self) -> np.ndarray:
        """The tokens of the first goal, [F]."""
        return self.tokens[0]

    def draw(self, ordinal: Any, group_size: int) -> np.ndarray:
        """Which goal each sample has, [P, G] int: a draw from (seed, ordinal, sample) alone."""
        uniform = sample_draws(self.seed, WHERE, 0, np.asarray(ordinal), group_size)
        goals = np.searchsorted(np.cumsum(self.shares), uniform, side="right")
        return np.minimum(goals, len(self.shares) - 1)  # in spite of rounding

    def prefixes(self, ordinal: Any, group_size: int) -> np.ndarray:
        """The tokens that each sample begins with, [P, G, F] int32."""
        return self.tokens[self.draw(ordinal, group_size)]


def make_goals(
    shares: Mapping[str, Any] | None, tokenizer: Any, max_completion_tokens: int, seed: int
) -> Goals | None:
    """The goals of a config: text -> share; None: none.

    Args:
      seed: of the run.

    Raises: InputError where a share is no positive number, or a text has no token or leaves none.
    """
    if not shares:
        return None
    for text, share in shares.items():
        if type(share) not in (int, float) or not 0 < share < float("inf"):
            raise InputError(
                f"{WHERE}: {text!r} = {share!r}: expected how often it is drawn, a number above 0, "
                'as { "<|high_reward|>" = 0.5, "<|low_reward|>" = 0.5 }'
            )
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in shares]
    for text, tokens in zip(shares, ids, strict=True):
        if not 0 < len(tokens) < max_completion_tokens:
            raise InputError(
                f"{WHERE}: {text!r} is {len(tokens)} tokens: it takes one or more, and fewer than "
                f"rollout.max_completion_tokens = {max_completion_tokens}, which count it"
            )
    width, total = max(map(len, ids)), sum(shares.values())
    padded = np.array([[*tokens, *[-1] * (width - len(tokens))] for tokens in ids], np.int32)
    return Goals(_names(list(shares)), tuple(s / total for s in shares.values()), padded, seed)


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    """The letters of each text; its number where they do not tell it from the others, and the
    numbers of all where one is the letters of another.

    >>> _names(["<high>", "<low>", "+"]), _names(["<1>", "<0>", "<-1>"])
    (('high', 'low', '2'), ('0', '1', '2'))
    """
    letters = [re.sub(r"\W+", "_", text).strip("_") for text in texts]
    numbers = tuple(map(str, range(len(texts))))
    names = tuple(
        name if name and letters.count(name) == 1 else number
        for name, number in zip(letters, numbers, strict=True)
    )
    return names if len({*names}) == len(names) else numbers


def with_goals(select: Select, goals: Goals, group_size: int) -> Select:
    """`select`, whose prompts have a goal for each sample."""

    def selected(stream: Stream, step: int) -> tuple[Stream, Prompts]:
        stream, prompts = select(stream, step)
        prefixes: Any = goals.prefixes(prompts.ordinal, group_size)
        return stream, dataclasses.replace(prompts, forced_prefix=prefixes)

    return selected


def goal_metrics(
    goals: Goals,
    ordinal: np.ndarray,
    reward: np.ndarray,
    scored: np.ndarray,
    advantage: np.ndarray,
) -> dict[str, float]:
    """Of each goal its share of the samples, their mean reward and their mean advantage.

    A group's mean is a baseline of all its goals together: under one of them the mean advantage
    need not be 0.

    Shapes: ordinal [P]; reward, the weighted sum, whether it was scored, and advantage [P, G].
    """
    drawn = goals.draw(ordinal, advantage.shape[1])
    metrics: dict[str, float] = {}
    for number, name in enumerate(goals.names):
        has_goal = drawn == number
        metrics[f"goals/{name}/share"] = float(has_goal.mean())
        entries = ("reward", reward, has_goal & scored), ("advantage", advantage, has_goal)
        for key, values, mask in entries:
            metrics[f"goals/{name}/{key}"] = float(values[mask].mean()) if mask.any() else np.nan
    return metrics
