"""What to generate next: the prompt stream, and the policy that reads from it.

The stream has no end. Ordinal i stands for one row: each epoch visits every row once, in an order
drawn from (seed, epoch) alone, so that a run resumes from its cursor and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.types import Prompts, Rollouts


class PromptPolicy(NamedTuple):
    """Which prompts to sample next. On the host, pure, the same on every process; state is saved.

    State is a tree of numpy arrays whose structure, shapes and dtypes do not change.
    """

    name: str
    init: Callable[[int, int], Any]  # (num_rows, seed) -> state
    select: Callable[[Any, int, int], np.ndarray]
    """(state, cursor, n) -> int32 [n], ordinals to sample; the cursor is the next unused one"""
    observe: Callable[[Any, Rollouts], Any]
    """(state, rollouts of all groups generated, also of those left out of the update) -> state"""
    chance: Callable[[Any, int], np.ndarray] | None = None
    """(state, n) -> [rows] in [0, 1]: how likely `select` takes each; None: it leaves none out"""


def sequential() -> PromptPolicy:
    """Takes the next n ordinals: every row once per epoch. Remembers nothing."""
    return PromptPolicy(
        name="sequential",
        init=lambda num_rows, seed: {},
        select=lambda state, cursor, n: np.arange(cursor, cursor + n, dtype=np.int32),
        observe=lambda state, rollouts: state,
    )


@functools.lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the rows, [num_rows], from the raw words of a counter-based generator.

    `Generator.permutation` may change between NumPy releases; these words may not.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    words = np.random.Philox(key=key).random_raw(num_rows)
    order = np.argsort(words, kind="stable").astype(np.int32)
    order.flags.writeable = False  # the cache hands the same array to everyone
    return order


def row_of(ordinal: int | np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """The row of the data set that an ordinal of the stream stands for.

        row = order(seed, ordinal // num_rows)[ordinal % num_rows]

    Shapes: ordinal [...] -> int32 [...].
    Raises: ValueError on a negative ordinal or an empty data set.
    >>> sorted(row_of(np.arange(4, 8), num_rows=4, seed=0).tolist())  # the second epoch
    [0, 1, 2, 3]
    """
    ordinals = np.asarray(ordinal)
    if num_rows < 1 or (ordinals < 0).any():
        raise ValueError(
            f"row_of got num_rows = {num_rows} and ordinals from {ordinals.min(initial=0)}: "
            "it needs at least one row and no negative ordinal"
        )
    rows = np.empty(ordinals.shape, np.int32)
    for epoch in np.unique(ordinals // num_rows):
        here = ordinals // num_rows == epoch
        rows[here] = _epoch_order(num_rows, seed, int(epoch))[ordinals[here] % num_rows]
    return rows


def make_prompts(
    ordinals: np.ndarray,
    tokens: Sequence[np.ndarray],
    *,
    seed: int,
    step: int,
    max_prompt_tokens: int,
) -> Prompts:
    """The prompts of one step as host arrays, right-padded with 0 to `max_prompt_tokens`.

    Args:
      ordinals: places in the stream, int32 [P].
      tokens: the prompt of each row of the data set, int32 [length <= max_prompt_tokens].
      seed: the run's; it orders the rows.
      step: finished steps.
    Raises: ValueError where a prompt is longer; `encode_prompts` says so before the run begins.
    """
    rows = row_of(ordinals, len(tokens), seed)
    return pad_prompts([tokens[row] for row in rows], max_prompt_tokens, ordinals, rows, step)


def pad_prompts(
    tokens: Sequence[np.ndarray], width: int, ordinal: Any, row: Any, step: int
) -> Prompts:
    """Prompts of token lists, right-padded with 0 to `width`.

    Raises: ValueError where one is longer.
    """
    padded = np.zeros((len(tokens), width), np.int32)
    length = np.array([len(ids) for ids in tokens])
    if length.max(initial=0) > width:
        raise ValueError(f"a prompt has {length.max()} tokens, more than the {width} there are")
    for place, ids in enumerate(tokens):
        padded[place, : len(ids)] = ids
    return host_prompts(padded, np.arange(width) < length[:, None], ordinal, row, step)


def host_prompts(tokens: Any, mask: Any, ordinal: Any, row: Any, step: int) -> Prompts:
    """Prompts of NumPy arrays: they go to the devices with the jitted call."""
    arrays: dict[str, Any] = {
        "prompt_tokens": np.asarray(tokens, np.int32),
        "prompt_mask": np.asarray(mask, bool),
        "ordinal": np.asarray(ordinal, np.int32),
        "row": np.asarray(row, np.int32),
        "step": np.asarray(step, np.int32),
    }
    return Prompts(**arrays)
