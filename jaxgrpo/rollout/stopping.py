"""What ends a sample beside an end token: strings in its text, confidence that has gone; and text
that interrupts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError

SPLIT = 3  # bytes of a character that may stand before its last, or behind its first
MARGIN = SPLIT + 1  # tokens decoded in front: these, and a first one, written without its space
UNREADABLE = "\ufffd"  # how tokenizers write bytes that are no text


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

        The first n where the text of the first n tokens holds a string, looked for at once or piece
        by piece.

        Args:
          num_searched: of the tokens, those that an earlier call has looked at and found no end in.
          fewest: tokens that a sample has at least. A string that is complete before ends it there.
        """
        first, total, width = max(num_searched + 1, fewest), len(tokens), self.bytes + MARGIN
        # A string that is complete before `fewest` may be unreadable until a character ends.
        begin = max(0, num_searched - width) if num_searched >= fewest + SPLIT else 0
        unsearched = first
        for count in range(total, max(first, total - SPLIT) - 1, -1):
            if (is_in := self._look(tokens, begin, count)) is not None:
                unsearched = first if is_in else count + 1
                break
        for count in range(unsearched, total + 1):
            # What the last token completes is in the last tokens; only the first texts are longer.
            if count > first + SPLIT:
                begin = max(begin, count - width)
            # Behind bytes that are no text the last tokens may hold a string that the text lacks.
            if self._look(tokens, begin, count) and self._is_in(tokens[:count]):
                return count
        return None

    def _look(self, tokens: np.ndarray, begin: int, end: int) -> bool | None:
        """Whether tokens[begin:end] hold a string, False: nor do the first of them; None: they do
        not, and the first of them may, since bytes that are no text stand among them.

        Llama 2's tokenizer, and others that write bytes by ByteFallback, make UNREADABLE of all
        bytes in a row if they are no text together. Where the tokens begin within a character, its
        last bytes are left out.
        """
        for lead in range(SPLIT + 1 if begin else 1):
            text = self._text(tokens[begin + lead : end])
            if any(string in text for string in self.strings):
                return True
            if UNREADABLE not in text:
                return False
        return None

    def _is_in(self, tokens: np.ndarray) -> bool:
        text = self._text(tokens)
        return any(string in text for string in self.strings)

    def _text(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)


class EarlyStop(NamedTuple):
    """Ends a sample once the mean confidence of its last tokens is too low.

    The confidence of a token is that of `jaxgrpo.models.logprobs.token_confidence`, at the
    temperature of sampling. A sample shorter than the window goes on; one that is ended here has no
    end token and counts as truncated.

        W[t] < s,   s = confidence,   or for each prompt
                    s = percentile of min W over the first `warmup` samples, which are not ended

    W[t] is the mean of the window of drawn tokens that ends with t. With a percentile greedy
    samples are not ended: their confidence is that of another temperature.

    Source: Fu et al. 2025 (DeepConf), arXiv 2508.15260: windows of 2048 tokens, the 20 likeliest
      tokens, 16 first samples; percentile 10 for its top 90%, 90 for its top 10%.
    """

    confidence: float | None = None  # nats
    window: int = 2048  # tokens
    tokens: int = 20  # the likeliest, of whose log-probs the confidence is the mean
    percentile: float | None = None  # instead of `confidence`; above 0 and below 100
    warmup: int = 16  # samples of each prompt

    def threshold(self, confidences: Sequence[np.ndarray]) -> float:
        """s [nats] of a prompt, from the confidences [n] of the tokens of its first samples.

        A sample shorter than the window has one window, of all its tokens. The percentile is
        lowered by `ROUNDING`.
        """
        assert self.percentile is not None
        least = []
        for confidence in confidences:
            window = min(self.window, len(confidence))
            sums = np.cumsum(np.append(0.0, confidence))
            least.append((sums[window:] - sums[:-window]).min() / window)
        return float(np.percentile(least, self.percentile)) * (1 - ROUNDING)


ROUNDING = 1e-4
"""Share of a threshold, so that rounding does not end a sample equal to one that was drawn first"""


def early_stop_problems(
    where: str, keys: Mapping[str, Any], group_size: int | None, longest: int | None
) -> Iterator[str]:
    """What is wrong with `rollout.early_stop`, which `where` shows.

    Args:
      group_size, longest: of the config, in samples and in tokens of one, where they are right.
    """
    expected = (
        "expected { confidence = 8.0 } or { percentile = 10, warmup = 16 }, either with window = "
        "2048 and tokens = 20, which may be left out, as warmup may"
    )
    if unknown := sorted(keys.keys() - set(EarlyStop._fields)):
        yield f"rollout.early_stop.{unknown[0]}: unknown key; {expected}"
    elif ("confidence" in keys) == ("percentile" in keys):
        yield f"{where}: {expected}; one of confidence and percentile is needed, and not both"
    elif "warmup" in keys and "percentile" not in keys:
        yield f"{where}: {expected}; nothing reads warmup without percentile"
    allowed = {"confidence": (-math.inf, math.inf), "percentile": (0, 100)}
    texts = {"confidence": "a finite number of nats", "percentile": "above 0 and below 100"}
    for name, (low, high) in allowed.items():
        value = keys.get(name, 1)
        if type(value) not in (int, float) or not low < value < high:
            yield f"{where}: {expected}; {name} is {texts[name]}"
    counts = {name: keys.get(name, 1) for name in ("window", "tokens", "warmup")}
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            yield f"{where}: {expected}; {name} is a whole number of 1 or more"
    window = keys.get("window", EarlyStop().window)
    if type(window) is int and longest is not None and window >= longest:
        yield (
            f"{where}: no sample ends before it has window = {window} tokens, and "
            f"rollout.max_completion_tokens = {longest}: set window lower"
        )
    warmup = keys.get("warmup", EarlyStop().warmup)
    is_right = "percentile" in keys and type(warmup) is int
    if is_right and group_size is not None and warmup >= group_size:
        yield (
            f"{where}: {warmup} samples are drawn first, and rollout.group_size = {group_size} "
            "leaves none that could be ended; set warmup lower"
        )


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
