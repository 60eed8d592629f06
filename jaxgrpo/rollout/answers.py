"""Reference answers behind thoughts: the tokens that a pass of the policy is to judge (R3).

A thought is a sample's completion up to the first place where its text holds the prefix, without
it; else all of it but its end token. Behind the thought follow the tokens of the prefix and of the
data's answer, without special tokens. A token in which the prefix begins is not of the thought.
"""

from __future__ import annotations

import bisect
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import REACHED
from jaxgrpo.core.types import Rollouts
from jaxgrpo.data.prompts import name_row, token_ids
from jaxgrpo.data.written import text_of_value

FORCED = "forced_answer"
"""Field [P, L] int32: the prefix's and the answer's tokens, -1 behind the last."""

THOUGHT = "thought_tokens"
"""Field [P, G] int32: tokens of each sample's completion that are its thought."""

MASK = "answer_mask"
"""Field [P, J] bool: the answer's tokens, the last ones of those in `FORCED`."""


def answer_end_tokens(tokenizer: Any, stop_tokens: Sequence[int]) -> list[int]:
    """The token that ends a written answer as it ends a sample: the tokenizer's own, if it ends
    samples, else the first that does; [] where none does."""
    token = tokenizer.eos_token_id
    return [token] if token in stop_tokens else [*stop_tokens[:1]]


class Answers(NamedTuple):
    """The reference answers of a run's rows."""

    tokenizer: Any
    prefix: str  # "": none, and the whole completion is the thought
    ends: Collection[int]  # tokens that end a sample
    forced: Sequence[np.ndarray]  # of each row, int32: the tokens of prefix and answer
    counts: np.ndarray  # [rows] int, how many of them are the answer's
    num_cut: int  # answers of which the limit leaves only the first tokens

    @property
    def longest(self) -> int:
        """L, the tokens of the longest prefix and answer."""
        return max(map(len, self.forced))

    def fields(self, rollouts: Rollouts, ids: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """FORCED, THOUGHT and MASK of samples, and REACHED [P, G]: whether one wrote the prefix, if
        there is one, and ended by itself.

        Words of an environment that a sample begins with, before any token of its own, are of its
        thought.

        Args:
          rollouts: host arrays, of which row, truncated and token_mask are read.
          ids: tokens of the P x G completions, from the first that was drawn on.
        """
        arrays = rollouts.row, rollouts.truncated, rollouts.token_mask
        row, truncated, mask = map(np.asarray, arrays)
        begins = np.argmax(mask, axis=-1).astype(np.int32)  # of those tokens
        forced = np.full((len(row), self.longest), -1, np.int32)
        for place, index in enumerate(row):
            forced[place, : len(self.forced[index])] = self.forced[index]
        thoughts, texts = (
            np.array([count(tokens) for tokens in ids], np.int32).reshape(truncated.shape)
            for count in (self.thought, self.text_tokens)
        )
        is_token = np.arange(self.counts.max()) < self.counts[row][:, None]
        reached = ((thoughts < texts) | (not self.prefix)) & ~truncated
        return {FORCED: forced, THOUGHT: begins + thoughts, MASK: is_token, REACHED: reached}

    def text_tokens(self, ids: Sequence[int]) -> int:
        """The number of tokens of a completion without the one that ended it."""
        return len(ids) - (len(ids) > 0 and ids[-1] in self.ends)

    def thought(self, ids: Sequence[int]) -> int:
        """The number of tokens of a completion that are its thought.

        About 2 + log2(tokens) texts are written for a completion that holds the prefix.
        """
        length = self.text_tokens(ids)
        if not self.prefix or self.prefix not in self._text(ids[:length]):
            return length

        def is_in(count: int) -> bool:
            return self.prefix in self._text(ids[:count])

        count = bisect.bisect_left(range(length), True, key=is_in)
        begin = self._text(ids[:count]).find(self.prefix)
        while len(self._text(ids[:count])) > begin:
            count -= 1
        return count

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def read_answers(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    prefix: str = "",
    ends: Collection[int] = (),
    limit: int | None = None,
    reader: str = "the method scores the reference answer of each row (answer_logp)",
) -> Answers:
    """The answers of rows, each tokenised as it follows the prefix.

    A token of both prefix and answer is one of the answer's.

    Args:
      ends: tokens that end a sample.
      limit: of an answer's tokens, the first so many are read; None: all.
      reader: who needs the answers, for messages.

    Raises: InputError if there is no column of answers, or a row has none.
    """
    if "answer" not in rows[0]:
        raise InputError(f'data.answer = "": {reader}; name the column that holds it')
    texts = [_answer_text(row["answer"]) for row in rows]
    written = token_ids(tokenizer, [prefix + (text or "") for text in texts], "answer")
    opening = token_ids(tokenizer, [prefix], "data.answer_prefix")[0]
    begins = [_common(opening, ids) for ids in written]
    sizes = [len(ids) - begin for ids, begin in zip(written, begins, strict=True)]
    odd = [place for place, text in enumerate(texts) if not text or not sizes[place]]
    if odd:
        raise InputError(
            f"data.answer: {len(odd)} of {len(rows)} rows hold no answer (the first is "
            f"{name_row(rows, odd[0])}, {rows[odd[0]]['answer']!r}), and {reader}: write a text or "
            "a number, or take the rows out"
        )
    counts = np.minimum(sizes, max(sizes) if limit is None else limit)
    ends_at = np.add(begins, counts)
    forced = [np.asarray(ids[:end], np.int32) for ids, end in zip(written, ends_at, strict=True)]
    return Answers(tokenizer, prefix, ends, forced, counts, int((counts < sizes).sum()))


def _answer_text(answer: Any) -> str | None:
    """An answer as text; None if it is none."""
    is_number = isinstance(answer, numbers.Number) and not isinstance(answer, bool)
    return text_of_value(answer) if is_number or isinstance(answer, str) else None


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    equal = [left_id == right_id for left_id, right_id in zip(left, right, strict=False)]
    return [*equal, False].index(False)
