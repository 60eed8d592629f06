"""The prompts that replace the rows' own for scores: columns of the data, or texts of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.config import own_code
from jaxgrpo.config.keys import RolloutKeys, ScoreKeys
from jaxgrpo.core.errors import InputError, explaining_own_code
from jaxgrpo.core.scores import prompt_field
from jaxgrpo.data import prompts
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.sources import Row
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Model
from jaxgrpo.rollout.judging import decode_texts
from jaxgrpo.training.inputs import Inputs
from jaxgrpo.training.teachers import check_positions


class PromptFunction(NamedTuple):
    """Own code that writes the other prompt of each group."""

    where: str  # opens messages
    field: str  # `scores.prompt_field`
    function: Callable[[Row, list[str]], str]  # (row, completions of the group) -> text
    rows: Sequence[Row]
    chat: Chat
    limit: int  # tokens of a prompt
    width: int  # S', of the field

    def fields(self, row: np.ndarray, ids: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """The tokens of the prompts, int32 [P, S'], -1 behind the last: `judging.AddFields`.

        Raises: InputError as `encode`.
        """
        texts = decode_texts(self.chat.tokenizer, ids)
        samples = len(texts) // len(row)
        groups = [texts[first : first + samples] for first in range(0, len(texts), samples)]
        encoded = [self.encode(int(index), group) for index, group in zip(row, groups, strict=True)]
        return {self.field: _padded(encoded, self.width)}

    def encode(self, index: int, completions: list[str]) -> np.ndarray:
        """The tokens of the prompt for a group of a row.

        Raises: InputError with the row where the function fails, or returns something else than a
          text of 1 to `limit` tokens.
        """
        where = f"{self.where}: {prompts.name_row(self.rows, index)}"
        with explaining_own_code(where):
            text = self.function(dict(self.rows[index]), completions)
        if not isinstance(text, str) or not text.strip():
            name = "an empty text" if isinstance(text, str) else f"a {type(text).__name__}"
            raise InputError(f"{where}: it returned {name}: return the other prompt as a text")
        (ids,) = _encode([{**self.rows[index], "prompt": text}], self.chat, where)
        if len(ids) > self.limit:
            raise InputError(
                f"{where}: the text has {len(ids)} tokens, and rollout.max_prompt_tokens = "
                f"{self.limit}: return a shorter text, or set that to {len(ids)} or more"
            )
        return ids


def read_prompts(
    entries: Sequence[ScoreKeys],
    rollout: RolloutKeys,
    run_inputs: Inputs,
    policy_model: Callable[[str], Model],
) -> tuple[dict[str, np.ndarray], list[PromptFunction]]:
    """The prompts that replace the rows' own for scores: the tokens of columns, int32 [rows, S'] by
    `scores.prompt_field`, -1 behind the last; and functions, each called once on row 0 with empty
    completions.

    Args:
      policy_model: the model that scores, by the policy of an entry.

    Raises: InputError where a column or a function is not there, a prompt cannot be written out, or
      the model that scores has no positions for the longest.
    """
    columns: dict[str, np.ndarray] = {}
    functions: dict[str, PromptFunction] = {}
    rows, chat, mesh = run_inputs.prompts.rows, run_inputs.chat, run_inputs.pretrained.mesh
    for index, entry in enumerate(entries):
        if (prompt := entry.prompt) is None:
            continue
        where, longest = f'scores[{index}].prompt = "{prompt}"', rollout.max_prompt_tokens
        field = prompt_field(own_code.short_name(prompt))
        if own_code.is_reference(prompt):
            function = own_code.load(prompt)
            width = sharding.rounded_up(mesh, longest, "sequence")
            functions[field] = PromptFunction(where, field, function, rows, chat, longest, width)
            functions[field].encode(0, [""] * rollout.group_size)
        elif prompt not in rows[0]:
            columns_text = ", ".join(sorted(rows[0]))
            raise InputError(f"{where}: the data have no such column; they have {columns_text}")
        else:
            encoded = _encode([{**row, "prompt": row[prompt]} for row in rows], chat, where)
            longest = max(map(len, encoded))
            columns[field] = _padded(encoded, sharding.rounded_up(mesh, longest, "sequence"))
        config = policy_model(entry.policy).config
        check_positions(entry.policy, config, longest, rollout.max_completion_tokens)
    return columns, [*functions.values()]


def _encode(rows: Sequence[Row], chat: Chat, where: str) -> list[np.ndarray]:
    try:
        return prompts.encode(rows, chat)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _padded(encoded: Sequence[np.ndarray], width: int) -> np.ndarray:
    tokens: Any = np.full((len(encoded), width), -1, np.int32)
    for place, ids in enumerate(encoded):
        tokens[place, : len(ids)] = ids
    return tokens
