"""What each reward says of a row before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.data.chat import for_rewards
from jaxgrpo.rewards.calling import call_rewards
from jaxgrpo.rewards.protocol import RewardFunction, TrainerState


class Preview(NamedTuple):
    """The scores of a row's gold answer and of the empty text; None: not scored."""

    gold: float | None  # None too where the row has no answer
    empty: float | None
    problem: str | None = None  # what the reward raised, where that leaves samples unscored


def preview(
    functions: Mapping[str, RewardFunction],
    row: Mapping[str, Any],
    encode: Callable[[str], list[int]],
    *,
    trainer_state: TrainerState | None = None,
    on_error: Mapping[str, str] | None = None,
) -> dict[str, Preview]:
    """Calls every reward once on two completions: the row's gold answer, and "".

    Args:
      row: has "prompt" and, where the data have answers, "answer".
      encode: the token ids of a text.

    Raises: RewardError as `call_rewards` does.
    """
    answer = row.get("answer")
    texts = ["" if answer is None else str(answer), ""]
    prompts, completions = for_rewards([row["prompt"]] * 2, texts)
    columns = {name: [value] * 2 for name, value in row.items() if name != "prompt"}
    scores, log = call_rewards(
        functions,
        prompts=prompts,
        completions=completions,
        completion_ids=[encode(text) if text else [] for text in texts],
        columns=columns,
        trainer_state=trainer_state,
        on_error=on_error,
    )

    def number(value: Any) -> float | None:
        return None if np.isnan(value) else float(value)

    return {
        name: Preview(
            number(gold) if answer is not None else None, number(empty), log.messages.get(name)
        )
        for name, (gold, empty) in scores.items()
    }
