"""What ends a sample beside an end token: strings in its text, confidence that has gone; and text
that interrupts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError

MARGIN = 4  # tokens decoded in front, since the first of a text may be written without its space


class StopStrings:
    """Strings that end a sample: the token that completes the first one is its last.

    The text is that of the drawn tokens with special tokens in it. The string stays in the text.

    Args:
      tokenizer: whose `decode` writes the text.
      strings: at least one, none empty.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]):
        self.tokenizer: Any = tokenizer
        self.strings: tuple[str, ...] = tuple(strings)
        self.bytes: int = max(len(text.encode()) for text in strings)  # no token has less than one

    def end(self, tokens: np.ndarray, num_searched: int, fewest: int = 0) -> int | None:
        """The number of tokens [n] after which the sample ends; None: it goes on.

        Args:
          num_searched: of the tokens, those that an earlier call has looked at and found no end in.
          fewest: tokens that a sample has at least.
        """
        begin = max(0, num_searched - self.bytes - MARGIN)
        if not self._is_in(tokens[begin:]):
            return None
        for count in range(max(num_searched + 1, fewest), len(tokens) + 1):
            if self._is_in(tokens[begin:count]):
                return count
        return None

    def _is_in(self, tokens: np.ndarray) -> bool:
        text = self.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)


class EarlyStop(NamedTuple):
    """Ends a sample once the mean confidence of its last tokens is too low.

    The confidence of a token is that of `jaxgrpo.models.logprobs.token_confidence`, at the
    temperature of sampling. A sample shorter than the window goes on; one that is ended here has no
    end token and counts as truncated.

    Source: Fu et al. 2025 (DeepConf), arXiv 2508.15260: windows of 2048 tokens, the 20 likeliest
      tokens. There the threshold is a percentile of the least window's confidence in 16 samples of
      the same prompt that are drawn first; here it is given.
    """

    confidence: float  # nats
    window: int = 2048  # tokens
    tokens: int = 20  # the likeliest, of whose log-probs the confidence is the mean


class Interruption(NamedTuple):
    """Text that is forced into a sample that has not ended after so many tokens; then it goes on.

    It is no choice of the policy: its tokens have token_mask False.
    Source: ScaleRL, arXiv 2510.13786, which ends thoughts so in place of a penalty on length.
    """

    after: int  # tokens of the sample
    text: tuple[int, ...]  # tokens

    @property
    def end(self) -> int:
        """The tokens of a sample with its text."""
        return self.after + len(self.text)


def make_interruption(
    keys: Mapping[str, Any] | None, tokenizer: Any, max_completion_tokens: int
) -> Interruption | None:
    """The interruption that `rollout.interrupt` describes; None: none.

    Raises: InputError where it is no number of tokens and a text, or leaves no token to draw.
    """
    if keys is None:
        return None
    where = f"rollout.interrupt = {dict(keys)!r}"
    expected = "{ after = 1000, text = 'So the answer is ' }"
    after, text = keys.get("after"), keys.get("text")
    if keys.keys() != {"after", "text"} or type(after) is not int or not isinstance(text, str):
        raise InputError(f"{where}: expected {expected}, a number of tokens and a text")
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if after < 1 or not ids or after + len(ids) >= max_completion_tokens:
        raise InputError(
            f"{where}: {after} tokens and {len(ids)} of the text, expected 1 or more of each, and "
            f"fewer than rollout.max_completion_tokens = {max_completion_tokens} together"
        )
    return Interruption(after, ids)
