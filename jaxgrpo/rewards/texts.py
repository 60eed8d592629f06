"""The text of a completion: a text, or a list of messages where the prompt is a conversation."""

from __future__ import annotations

from typing import Any

END_OF_THOUGHT = "</think>"


def text_of(completion: Any) -> str:
    """The text of a completion in either form; of several messages the last one's.

    >>> text_of("2"), text_of([{"role": "assistant", "content": "2"}])
    ('2', '2')
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def after_thought(text: str) -> str:
    """What follows the last </think>; the whole text where there is none."""
    return text.rpartition(END_OF_THOUGHT)[2]
