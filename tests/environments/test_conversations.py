"""The prompts of a batch: with what environments say first, each written out once."""

from __future__ import annotations

import itertools
from typing import Any

import chatting
import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.calls import hermes
from jaxgrpo.environments.conversations import Conversations
from jaxgrpo.environments.partners import make_kind
from jaxgrpo.rollout.dialogue import ThreadedDialogue, Turns
from jaxgrpo.rollout.selection import pad_prompts


class Says:
    """What its row says; the first sample of a row that has nothing breaks."""

    count = 0

    def reset(self, words, **row):
        Says.count += 1
        if words is None and Says.count == 1:
            raise KeyError("words")
        return words or None


class Noting:
    """A tokenizer that notes what it tokenises."""

    def __init__(self):
        self.texts: list[str] = []

    def __call__(self, text, **options):
        self.texts.append(text)
        return chatting.tokenizer()(text, **options)


def conversations(tokenizer, rows):
    kind = make_kind(Says, {}, (), lambda: hermes, 5.0, "environment")
    chat = chatting.chat(None)._replace(tokenizer=tokenizer)
    return Conversations({"": kind}, chat, chatting.ids("<|end|>"), rows)


def test_samples_of_a_row_that_are_told_the_same_share_the_tokens_of_their_prompt():
    tokenizer: Any = Noting()
    Says.count = 1
    rows = [{"prompt": "Go.", "words": words} for words in (" a", " b", "")]
    talks = conversations(tokenizer, rows)
    places = [(place, place, place) for place in range(3)]
    for written in (["Go. a", "Go. b", "Go."], ["Go. a", "Go. b"]):  # a row's own is remembered
        tokenizer.texts.clear()
        opened = talks.open(places, 4, (1,))
        assert tokenizer.texts == written
        for (ordinal, sample), opening in opened.items():
            text = ("Go. a", "Go. b", "Go.")[ordinal]
            assert chatting.text(opening.tokens) == text
            assert talks.spoken((ordinal, sample)).prompt == text


def test_the_prompt_of_a_sample_that_broke_is_not_that_of_its_row():
    Says.count = 0
    talks = conversations(chatting.tokenizer(), [{"prompt": "", "words": None}])
    talks.open([(0, 0, 0)], 1, (1,))
    assert talks.spoken((0, 0)).problem == "reset raised KeyError: 'words'"
    with pytest.raises(InputError, match="row 0: it has no prompt, and the environment's `reset`"):
        talks.open([(0, 0, 0)], 1, (1,))


class Busy:
    """Says much, and is busy in the second sample that begins."""

    numbers = itertools.count(1)

    def reset(self, **row):
        if next(Busy.numbers) == 2:
            raise ConnectionError("busy")
        return " a task of many words."


def test_a_sample_that_broke_takes_no_word_from_the_prompt_of_its_group():
    """What is common to all was the row's: the task counted as a completion, and ended the run."""
    rows = [{"prompt": "Do"}]
    kind = make_kind(Busy, {}, (), lambda: hermes, 5.0, "environment")
    talks = Conversations({"": kind}, chatting.chat(None), chatting.ids("<|end|>"), rows)
    prompts = pad_prompts([np.asarray(chatting.ids("x"))], 40, np.arange(1), np.arange(1), 0)
    dialogue = ThreadedDialogue(talks, Turns(2, 8), 8, (1,))
    common, begin = dialogue.open(prompts, 3)
    prompt = common.prompt_tokens[common.prompt_mask].tolist()
    assert chatting.text(prompt) == "Do a task of many words."
    assert [len(tokens) for tokens in begin.values()] == [0, 0, 0]
    talked = dialogue.spoken([0], 3)
    assert [talk.prompt for talk in talked] == ["Do a task of many words."] * 3
    problems = sorted(talk.problem for talk in talked)
    assert problems == ["", "", "reset raised ConnectionError: busy"]
    assert dialogue.unscored(1, 3).sum() == 1
