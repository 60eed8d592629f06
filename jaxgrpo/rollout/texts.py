"""Samples as rewards read them: texts and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.data.chat import Message, for_rewards
from jaxgrpo.rewards.calling import RewardLog, call_rewards
from jaxgrpo.rewards.protocol import Reward, TrainerState


def decode_texts(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    """Texts of token ids, without special tokens, and with every space that was sampled, but for
    the first where a tokenizer leaves that out of texts, as Llama 2's does."""
    if not ids:  # a process without a group; transformers takes [] for one empty text
        return []
    # Stop strings are looked for in the text as it was sampled.
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def completion_spans(mask: Any) -> list[slice]:
    """From the first token sampled to the last, of [N, T] completions: a goal before it is left
    out, forced text behind it is not."""
    end = np.where(mask.any(-1), mask.shape[-1] - np.argmax(mask[:, ::-1], axis=-1), 0)
    return list(map(slice, np.argmax(mask, axis=-1).tolist(), end.tolist()))


def completion_ids(tokens: Any, mask: Any) -> list[list[int]]:
    """Token ids of [N, T] completions, in their `completion_spans`."""
    return [row[span].tolist() for row, span in zip(tokens, completion_spans(mask), strict=True)]


class Texts(NamedTuple):
    """Samples as rewards read them, N entries each."""

    prompts: Sequence[Any]  # texts or messages, as the samples began with them
    completions: Sequence[str]
    ids: Sequence[Sequence[int]]
    groups: Sequence[int]  # which prompt each is a sample of
    messages: Sequence[list[Message]] = ()
    """what the completions are instead, where samples were answered and prompts are messages"""


def call_on_texts(
    rewards: Sequence[Reward],
    texts: Texts,
    columns: Mapping[str, Sequence[Any]],
    state: TrainerState | None,
    living: Mapping[str, Sequence[Any]] = {},
) -> tuple[dict[str, np.ndarray], RewardLog]:
    """Calls rewards on samples.

    Args:
      columns: name -> N entries, those of the data set beside the prompt, and others.
      living: as in `call_rewards`.

    Returns: as `call_rewards`. Raises: RewardError as it does.
    """
    prompts, completions = for_rewards(texts.prompts, texts.completions, texts.messages)
    return call_rewards(
        rewards,
        prompts,
        completions,
        texts.ids,
        columns,
        group_ids=texts.groups,
        trainer_state=state,
        living=living,
    )


def among_all(
    scores: Mapping[str, np.ndarray], places: np.ndarray, count: int
) -> dict[str, np.ndarray]:
    """Scores of some of `count` samples, at their places among all; NaN: not scored."""
    table = {name: np.full(count, np.nan, np.float32) for name in scores}
    for name, values in scores.items():
        table[name][places] = values
    return table
