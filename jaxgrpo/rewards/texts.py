"""Completions as rewards see them: a text, or one message where the prompt is a conversation."""

from __future__ import annotations

from typing import Any

END_OF_THOUGHT = "</think>"


def as_completion(prompt: Any, text: str) -> Any:
    """A sampled text in the form of its prompt: a text, or a list of one assistant message.

    >>> as_completion("1+1=", "2")
    '2'
    >>> as_completion([{"role": "user", "content": "1+1="}], "2")
    [{'role': 'assistant', 'content': '2'}]
    """
    return [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text


def text_of(completion: Any) -> str:
    """The text of a completion in either form; of several messages the last one's.

    >>> text_of("2"), text_of([{"role": "assistant", "content": "2"}])
    ('2', '2')
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def after_thought(text: str) -> str:
    """What follows the last </think>; the whole text where there is none."""
    return text.rpartition(END_OF_THOUGHT)[2]
