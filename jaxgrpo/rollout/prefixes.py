"""Fast weights: texts that prompts begin with, drawn the more often the more rows they win.

Each prompt of a step begins with one text of a population, drawn by weights from (seed, ordinal).
Every few steps the weights become the numbers of rows that each text wins.

    rate[k, row]  success rate of the row's latest group with text k
    a row tells   if it has two rates or more and they are not all equal
    wins[k]       rows that tell and whose highest rate is rate[k, row]
    p(k)          wins[k] / sum over all texts

Until each text was used for a row that tells, the weights stay as they are; at first they are
equal. Texts with wins are the Pareto set. A text without any is not drawn, and comes back if later
rates of the others fall below its own.

Source: FST, arXiv 2605.12484, whose fast step is GEPA, arXiv 2507.19457. There a model that reads
failures writes new texts, all are measured on the same rows at once, rows count where all are
equal, and a text is left out if others win all that it wins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.core.types import Params, Rollouts
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.prompts import PromptData, encode
from jaxgrpo.models import sharding
from jaxgrpo.rewards.calling import sample_draws
from jaxgrpo.rollout.policies import SuccessJudge, Weights
from jaxgrpo.rollout.selection import PromptPolicy, with_memory

WHERE = "rollout.prefixes"
PREFIX = "prefix"
"""Field [P] int32: the number of the text that the prompt begins with."""

EXPECTED = (
    '{ texts = ["", "Think first. "], every = 20 }, different texts and a number of steps; reward '
    "and success may say what a success is, as for prompt policies"
)


class Prefixes(NamedTuple):
    """The population of a run; what it has won is in the state of the prompt policy."""

    texts: Sequence[str]
    encoded: Sequence[Sequence[np.ndarray]]  # by text and row, the tokens of a prompt with it
    every: int  # steps between two changes of the weights
    judge: SuccessJudge
    seed: int

    def draw(self, wins: np.ndarray, ordinal: Any) -> np.ndarray:
        """The text of each prompt, int32 [P], by weights [n]."""
        uniform = sample_draws(self.seed, WHERE, 0, np.asarray(ordinal), 1)[:, 0]
        # Whole numbers, so that rounding leads to no text without wins.
        places = np.floor(uniform * wins.sum())
        return np.searchsorted(np.cumsum(wins), places, side="right").astype(np.int32)

    def watch(self, policy: PromptPolicy) -> PromptPolicy:
        """`policy`, whose state holds the rates and wins of the population too."""

        def init(num_rows: int) -> dict[str, Any]:
            rate = np.full((len(self.texts), num_rows), np.nan, np.float32)
            return {"rate": rate, "wins": np.ones(len(self.texts), np.int32)}

        def observe(state: dict[str, Any], rollouts: Rollouts) -> dict[str, Any]:
            row, prefix, step, rewards = sharding.to_host(
                (rollouts.row, rollouts.fields[PREFIX], rollouts.step, dict(rollouts.rewards))
            )
            rate, wins = state["rate"].copy(), state["wins"]
            for place, new_rate in enumerate(self.judge.rates(rewards)):
                if np.isfinite(new_rate):
                    rate[prefix[place], row[place]] = new_rate
            if (int(step) + 1) % self.every == 0:
                wins = count_wins(rate, wins)
            return {"rate": rate, "wins": wins}

        def bring(state: dict[str, Any], params: Params, rollouts: Rollouts) -> dict[str, Any]:
            return {PREFIX: self.draw(state["wins"], rollouts.ordinal)}

        return with_memory(policy, init, observe, bring)

    def tokens(self, state: Any, ordinal: np.ndarray, row: np.ndarray) -> list[np.ndarray]:
        """The prompts of rows, each with the text of its draw."""
        prefix = self.draw(state["wins"], ordinal)
        return [self.encoded[text][index] for text, index in zip(prefix, row, strict=True)]


def count_wins(rate: np.ndarray, wins: np.ndarray) -> np.ndarray:
    """The rows that each text wins, int32 [n]; those before if a text was used for none that tells.

    Args:
      rate: [n, rows], NaN where a row was not sampled with a text.
      wins: [n], those before.

    >>> rate = np.array([[1.0, 0.5, 0.0, np.nan], [0.5, 0.5, 0.5, 0.25], [1.0, 0.5, 0.0, np.nan]])
    >>> count_wins(rate, np.ones(3, np.int32)).tolist()
    [1, 1, 1]
    >>> count_wins(rate[:, 1:2], np.array([3, 2, 1])).tolist()  # a row that does not tell
    [3, 2, 1]
    """
    is_measured = np.isfinite(rate)
    high = np.where(is_measured, rate, -np.inf).max(0)
    tells = high > np.where(is_measured, rate, np.inf).min(0)
    if not (is_measured & tells).any(1).all():
        return wins
    return ((rate == high) & tells).sum(1).astype(np.int32)


def make_prefixes(
    keys: Mapping[str, Any] | None,
    prompts: PromptData,
    chat: Chat,
    max_prompt_tokens: int,
    weights: Weights | None,
    seed: int,
    sum_scored: bool = False,
) -> Prefixes | None:
    """The population that `rollout.prefixes` describes; None: none.

    Args:
      max_prompt_tokens: the longest prompt with its text, in tokens.
      weights: of the rewards.
      seed: of the run.
      sum_scored: as in `jaxgrpo.rollout.policies.build_policy`.

    Raises: InputError where it is no population, its success cannot be judged, or a prompt with
      a text cannot be written out or is too long.
    """
    if keys is None:
        return None
    check(keys, weights or {})
    texts, reward, success = keys["texts"], keys.get("reward"), keys.get("success", 0.5)
    encoded = [_encode_with(text, prompts, chat, max_prompt_tokens) for text in texts]
    judge = SuccessJudge(WHERE, 0.0, reward, success, weights, sum_scored=sum_scored)
    return Prefixes(texts, encoded, keys["every"], judge, seed)


def check(keys: Mapping[str, Any], rewards: Collection[str]) -> None:
    """Raises: InputError where `rollout.prefixes` is no population, or reads no reward of a run."""
    texts, every, reward = keys.get("texts"), keys.get("every"), keys.get("reward")
    is_list = isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
    success = keys.get("success", 0.5)
    if (
        keys.keys() - {"texts", "every", "reward", "success"}
        or not (texts and is_list and len(set(texts)) == len(texts))
        or type(every) is not int
        or every < 1
        or type(success) not in (int, float)
    ):
        raise InputError(f"{WHERE} = {dict(keys)!r}: expected {EXPECTED}")
    if reward is not None and reward not in rewards:
        hint = suggest(str(reward), rewards)
        raise InputError(f"{WHERE}.reward = {reward!r} is none of the rewards: {hint}")


def _encode_with(
    text: str, prompts: PromptData, chat: Chat, max_prompt_tokens: int
) -> Sequence[np.ndarray]:
    """The tokens of each row's prompt with a text."""
    if not text:
        return prompts.encoded
    where = f"{WHERE}, {text!r}"
    try:
        rows = [{**row, "prompt": put_before(row["prompt"], text)} for row in prompts.rows]
        encoded = encode(rows, chat)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    lengths = [len(ids) for ids in encoded if len(ids) > max_prompt_tokens]
    if lengths:
        raise InputError(
            f"{where}: {len(lengths)} of {len(encoded)} prompts with it are longer than "
            f"rollout.max_prompt_tokens = {max_prompt_tokens} (the longest has {max(lengths)} "
            f"tokens): set it to {max(lengths)}, or shorten the text"
        )
    return encoded


def put_before(prompt: Any, text: str) -> Any:
    """A prompt with a text in front; in a conversation, in front of the first message of the user.

    Raises: InputError where the user says nothing.

    >>> put_before("2+2=", "Add: ")
    'Add: 2+2='
    >>> put_before([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "T ")[1]
    {'role': 'user', 'content': 'T U'}
    """
    if isinstance(prompt, str):
        return text + prompt
    for place, message in enumerate(prompt):
        if message["role"] == "user":
            begun = {**message, "content": text + message["content"]}
            return [*prompt[:place], begun, *prompt[place + 1 :]]
    raise InputError("a conversation has no message of the user to put it in front of")
