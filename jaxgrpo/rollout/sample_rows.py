"""The samples of a step as rows of samples/step_N.jsonl: texts, rewards, and the turns of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxgrpo.core.types import Rollouts
from jaxgrpo.data.sources import Mixture
from jaxgrpo.models import sharding
from jaxgrpo.rewards.calling import SPOKEN, RewardLog
from jaxgrpo.rollout.dialogue import FORK, REWARD, TURN
from jaxgrpo.rollout.prefixes import PREFIX, Prefixes
from jaxgrpo.rollout.texts import completion_ids, completion_spans, decode_texts


def sample_rows(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    rollouts: Rollouts,
    advantage: Array,
    number: int,
    log: RewardLog,
    mixture: Mixture | None = None,
    prefixes: Prefixes | None = None,
) -> Iterator[dict[str, Any]]:
    """The samples of a step as rows of samples/step_N.jsonl, in order. Called by every process.

    Args:
      rows: of the data set.
      advantage: [P, G].
      number: of the step, which is the number of steps finished with it.
      log: what rewards logged besides their scores, and what was said in conversations.
      mixture: of several sources, whose names then stand in the rows.
      prefixes: that prompts begin with, which then stand in the rows.
    """
    host: Rollouts = sharding.to_host(rollouts)
    advantage = sharding.to_host(advantage)
    groups, samples, steps = host.token_mask.shape
    flat_mask = host.token_mask.reshape(-1, steps)
    ids = completion_ids(host.completion_tokens.reshape(-1, steps), flat_mask)
    spans = completion_spans(flat_mask)
    texts = decode_texts(tokenizer, ids)
    sources = mixture and [
        mixture.names[number] for number in mixture.source_numbers(np.asarray(host.row))
    ]
    for p, g in np.ndindex(groups, samples):
        index = p * samples + g
        turns = turn_entries(tokenizer, host, (p, g), spans[index]) if TURN in host.fields else []
        yield {
            "step": number,
            "ordinal": int(host.ordinal[p]),
            "row": int(host.row[p]),
            "sample": g,
            "prompt": rows[int(host.row[p])]["prompt"],
            "completion": texts[index],
            "completion_ids": ids[index],
            "logps": host.behavior_logp[p, g, spans[index]],
            "rewards": {name: float(value[p, g]) for name, value in host.rewards.items()},
            "advantage": float(advantage[p, g]),
            "truncated": bool(host.truncated[p, g]),
            **({"source": sources[p]} if sources else {}),
            **({"prefix": prefixes.texts[int(host.fields[PREFIX][p])]} if prefixes else {}),
            **({"turns": turns} if turns else {}),
            **_logged(log, index),
        }


def _logged(log: RewardLog, index: int) -> dict[str, Any]:
    """The entries of a sample that are from its rewards and its conversation."""
    extra = {column: values[index] for column, values in log.extra.items()}
    spoken = {name: values[index] for name, values in log.columns.get(SPOKEN, {}).items()}
    # None: the rollouts waited for this step, and what was said in them is not known.
    talk = {name: value for name, value in spoken.items() if value not in (None, "")}
    return talk | ({"extra": extra} if extra else {})


def turn_entries(
    tokenizer: Any, rollouts: Rollouts, place: tuple[int, int], span: slice
) -> list[dict[str, Any]]:
    """The turns of a sample, whose tokens follow one another in its completion_ids.

    Returns: of each turn the `text` that the policy drew, special tokens and all, in how many
      `tokens`; what answers it, `reply`, in `reply_tokens`, which are masked; its `reward`; and,
      where conversations may be rewritten, whether that is the reply, `forked`.

    Args:
      rollouts: host arrays, with the field "turn".
      place: of the sample, in [P, G].
      span: of the sample's completion.
    """
    tokens, mask, turn = (
        array[place][span]
        for array in (rollouts.completion_tokens, rollouts.token_mask, rollouts.fields[TURN])
    )
    rewards = rollouts.fields[REWARD][place] if REWARD in rollouts.fields else None
    forks = rollouts.fields[FORK][place][span] if FORK in rollouts.fields else None
    entries = []
    for number in range(int(turn.max(initial=-1)) + 1):
        drawn, reply = (tokens[(turn == number) & part].tolist() for part in (mask, ~mask))
        text, reply_text = tokenizer.batch_decode(
            [drawn, reply], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        entries.append(
            {
                "text": text if drawn else "",
                "tokens": len(drawn),
                "reply": reply_text if reply else "",
                "reply_tokens": len(reply),
                "reward": None if rewards is None else float(rewards[number]),
                **({} if forks is None else {"forked": len({*forks[turn == number].tolist()}) > 1}),
            }
        )
    return entries
