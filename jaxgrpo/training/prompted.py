"""The prompts that replace the rows' own for scores: columns of the data, or texts of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.config import own_code
from jaxgrpo.config.keys import RolloutKeys, ScoreKeys
from jaxgrpo.core.errors import InputError, explaining_own_code
from jaxgrpo.core.scores import prompt_field
from jaxgrpo.core.types import Rollouts
from jaxgrpo.data import prompts
from jaxgrpo.data.chat import Chat, for_rewards
from jaxgrpo.data.sources import Row
from jaxgrpo.data.tasks.demonstrated import show_answer
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.rewards.builtin import completion_text
from jaxgrpo.rollout.texts import decode_texts
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.teachers import check_positions, read_choices


class PromptFunction(NamedTuple):
    """Own code that writes the other prompt of each group, or of each of its samples."""

    where: str  # opens messages
    field: str  # `scores.prompt_field`
    function: Callable[..., Any]
    """(row, completions of the group, and, if it takes them, its rewards by name) -> text, or a
    list of a text or None for each sample"""
    rows: Sequence[Row]
    chat: Chat
    limit: int  # tokens of a prompt
    width: int  # S', of the field
    samples: int  # of a group
    limit_key: str = "rollout.max_prompt_tokens"
    by_sample: bool = False  # whether it returns lists

    @property
    def no_prompts(self) -> np.ndarray:
        """The field of no group."""
        return np.empty((0, *[self.samples] * self.by_sample, self.width), np.int32)

    def fields(self, rollouts: Rollouts, ids: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """The tokens of the prompts, int32 [P, S'] or [P, G, S'], -1 behind the last:
        `judging.AddFields`.

        Raises: InputError as `encode`.
        """
        texts, count = decode_texts(self.chat.tokenizer, ids), self.samples
        encoded: list[np.ndarray] = []
        row = np.asarray(rollouts.row)
        for place, index in enumerate(row.tolist()):
            scores = {name: values[place].tolist() for name, values in rollouts.rewards.items()}
            encoded += self.encode(index, texts[place * count : (place + 1) * count], scores)
        return {
            self.field: _padded(encoded, self.width).reshape(len(row), *self.no_prompts.shape[1:])
        }

    def try_out(self, rewards: Sequence[str]) -> PromptFunction:
        """The same, once it was called on row 0 with empty completions, all of them failures."""
        failures = {name: [0.0] * self.samples for name in rewards}
        by_sample = isinstance(self.call(0, [""] * self.samples, failures), list)
        function = self._replace(by_sample=by_sample)
        function.encode(0, [""] * self.samples, failures)
        return function

    def call(self, index: int, completions: list[str], rewards: dict[str, list[float]]) -> Any:
        """What the function returns for a group of a row."""
        takes_rewards = len(inspect.signature(self.function).parameters) > 2
        arguments = dict(self.rows[index]), completions, rewards
        with explaining_own_code(f"{self.where}: {prompts.name_row(self.rows, index)}"):
            return self.function(*arguments[: 2 + takes_rewards])

    def encode(
        self, index: int, completions: list[str], rewards: dict[str, list[float]]
    ) -> list[np.ndarray]:
        """The tokens of the prompt for a group of a row, or of those of its samples.

        Raises: InputError with the row where the function fails, or returns something else than
          texts of 1 to `limit` tokens.
        """
        where = f"{self.where}: {prompts.name_row(self.rows, index)}"
        returned = self.call(index, completions, rewards)
        texts = returned if self.by_sample else [returned]
        if self.by_sample and (not isinstance(returned, list) or len(texts) != self.samples):
            size = f" of {len(returned)}" if isinstance(returned, list) else ""
            name = f"{type(returned).__name__}{size}"
            raise InputError(f"{where}: it returned a {name}: return one entry for each sample")
        for text in texts:
            if not isinstance(text, (str, list)) and not (text is None and self.by_sample):
                name = f"a {type(text).__name__}"
                raise InputError(f"{where}: it returned {name}: return the other prompt as a text")
            if isinstance(text, str) and not text.strip():
                raise InputError(
                    f"{where}: it returned an empty text: return the other prompt as a text"
                )
        rows = [{**self.rows[index], "prompt": text} for text in texts if text is not None]
        encode = prompts.encode_texts  # samples may get the same prompt
        encoded = iter(_encode(rows, self.chat, where, encode) if rows else ())
        all_ids = [np.empty(0, np.int32) if text is None else next(encoded) for text in texts]
        if (longest := max(map(len, all_ids))) > self.limit:
            raise InputError(
                f"{where}: the text has {longest} tokens, and {self.limit_key} = "
                f"{self.limit}: return a shorter text, or set that to {longest} or more"
            )
        return all_ids


def successful_sibling(
    row: Row, completions: list[str], rewards: dict[str, list[float]]
) -> list[Any]:
    """For each sample the prompt with an answer that another sample of its group was right with:
    above 0.5 by the first reward. None where there is no such sample. An answer has the text that
    a prompt begins it with, and its thoughts.

    Name it as `prompt = "jaxgrpo.training.prompted:successful_sibling"`, or write your own.
    Source: SDPO, arXiv 2601.20802, whose text is another.
    """
    scores = next(iter(rewards.values()))
    right = [place for place, score in enumerate(scores) if score > 0.5]
    _, answers = for_rewards([row["prompt"]] * len(completions), completions)
    prompts_shown: list[Any] = []
    for place in range(len(completions)):
        sibling = next((sample for sample in right if sample != place), None)
        shown = None if sibling is None else completion_text(answers[sibling])
        prompts_shown.append(None if shown is None else show_answer(row["prompt"], shown))
    return prompts_shown


def read_prompts(
    entries: Sequence[ScoreKeys],
    rollout: RolloutKeys,
    run_inputs: Inputs,
    policy_model: Callable[[str], Model],
    rewards: Sequence[str],
) -> tuple[dict[str, np.ndarray], list[PromptFunction]]:
    """The prompts that replace the rows' own for scores: the tokens of columns, int32 [rows, S'] by
    `scores.prompt_field`, -1 behind the last; and functions, each tried out once. With the columns
    those of `teachers.read_choices`.

    Args:
      policy_model: the model that scores, by the policy of an entry.
      rewards: names of the run's.

    Raises: InputError where a column or a function is not there, a prompt cannot be written out, or
      the model that scores has no positions for the longest.
    """
    columns = read_choices(entries, run_inputs.prompts.rows)
    functions: dict[str, PromptFunction] = {}
    rows, chat, mesh = run_inputs.prompts.rows, run_inputs.chat, run_inputs.pretrained.mesh
    for index, entry in enumerate(entries):
        if (prompt := entry.prompt) is None:
            continue
        where, longest = f'scores[{index}].prompt = "{prompt}"', rollout.max_prompt_tokens
        limits = [score.max_prompt_tokens for score in entries if score.prompt == prompt]
        limit_key = "its max_prompt_tokens" if any(limits) else "rollout.max_prompt_tokens"
        longest = max(limit or longest for limit in limits)
        field = prompt_field(own_code.short_name(prompt))
        if own_code.is_reference(prompt):
            function = own_code.load(prompt)
            width = sharding.rounded_up(mesh, longest, "sequence")
            writer = PromptFunction(
                where, field, function, rows, chat, longest, width, rollout.group_size, limit_key
            )
            functions[field] = writer.try_out(rewards)
        elif prompt not in rows[0]:
            columns_text = ", ".join(sorted(rows[0]))
            raise InputError(f"{where}: the data have no such column; they have {columns_text}")
        else:
            encoded = _encode(_with_column(rows, prompt, where), chat, where, prompts.encode)
            longest = max(map(len, encoded))
            columns[field] = _padded(encoded, sharding.rounded_up(mesh, longest, "sequence"))
        for policy in entry.policies.values() or (entry.policy,):
            config = policy_model(policy).config
            check_positions(policy, config, longest, rollout.max_completion_tokens)
    return columns, [*functions.values()]


def _with_column(rows: Sequence[Row], column: str, where: str) -> list[Row]:
    """The rows with a column as the prompt. Raises: InputError with a row that has none there."""
    names = (f"{where}: {prompts.name_row(rows, place)}" for place in range(len(rows)))
    return [
        {**row, "prompt": prompts.read_prompt(name, row, column)}
        for name, row in zip(names, rows, strict=True)
    ]


def _encode(
    rows: Sequence[Row],
    chat: Chat,
    where: str,
    encode: Callable[[Sequence[Row], Chat], list[np.ndarray]],
) -> list[np.ndarray]:
    try:
        return encode(rows, chat)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _padded(encoded: Sequence[np.ndarray], width: int) -> np.ndarray:
    tokens: Any = np.full((len(encoded), width), -1, np.int32)
    for place, ids in enumerate(encoded):
        tokens[place, : len(ids)] = ids
    return tokens
