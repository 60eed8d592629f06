"""Where thoughts end, and the tokens of reference answers that follow them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxgrpo.advantages.registry import plain_rollouts
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.scores import REACHED
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT, read_answers

MERGES = [(".", "#"), ("#", "A"), ("=", "4"), ("8", ".")]
ROWS = [{"prompt": "p", "answer": answer} for answer in ("42", "7", "123")]


@functools.cache
def tokenizer() -> Any:
    """Tokens are bytes, and a few pairs of them; <end> is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: place for place, text in enumerate([*alphabet, *map("".join, MERGES)])}
    backend = Tokenizer(models.BPE(vocabulary, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def encode(text):
    return tokenizer()(text)["input_ids"]


def answers(prefix="#A=", limit=None, rows=ROWS):
    return read_answers(tokenizer(), rows, prefix, [tokenizer().eos_token_id], limit)


def token_bytes(ids):
    """The bytes of each token, by the table of the byte-level alphabet."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    table = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}
    return [bytes(table[c] for c in text) for text in tokenizer().convert_ids_to_tokens(ids)]


@pytest.mark.parametrize("prefix", ["#A=", "#", "A", "é", " ", ".#A"])
def test_a_thought_ends_before_the_first_token_that_holds_some_of_the_prefix(prefix):
    random, prefixed = np.random.default_rng(0), 0
    row_answers = answers(prefix)
    for _ in range(100):
        text = "".join(random.choice([*"8.#A=4 éx", "#A=", ".#A", "漢"], random.integers(0, 12)))
        ids = encode(text)[: random.integers(0, 20)]  # some end within a letter
        each = token_bytes(ids)
        place = b"".join(each).find(prefix.encode())
        prefixed += place >= 0
        ends = np.cumsum([len(piece) for piece in each])
        want = len(ids) if place < 0 else int((ends <= place).sum())
        assert row_answers.thought(ids) == want
        assert row_answers.thought([*ids, tokenizer().eos_token_id]) == want
    assert 10 < prefixed < 95


def test_without_a_prefix_the_thought_is_all_but_the_end_token():
    row_answers, ids = answers(""), encode("8.#A=4")
    assert row_answers.thought(ids) == len(ids)
    assert row_answers.thought([*ids, tokenizer().eos_token_id]) == len(ids)
    assert row_answers.thought([tokenizer().eos_token_id]) == row_answers.thought([]) == 0


def test_an_answer_is_tokenised_as_it_follows_the_prefix():
    row_answers = answers("#A=")
    texts = [tokenizer().decode(ids) for ids in row_answers.forced]
    assert texts == ["#A=42", "#A=7", "#A=123"]
    # The token "=4" holds the first digit; "7" and "123" are tokens of their own.
    written = [tokenizer().convert_ids_to_tokens(ids) for ids in row_answers.forced]
    assert written[:2] == [["#A", "=4", "2"], ["#A", "=", "7"]]
    assert row_answers.counts.tolist() == [2, 1, 3]
    assert answers("").counts.tolist() == [2, 1, 3]


def test_fields_hold_each_row_and_each_samples_thought():
    row_answers = answers("#A=", limit=2)
    assert row_answers.num_cut == 1
    texts = ["88#A=1", "x", "", "#A=", "4#A", "éé#A=#A="]
    cut = [[False, False, False], [True, False, False]]
    mask = np.ones((2, 3, 9), bool)
    mask[1, 2, :2] = False  # an environment has said two tokens first
    arrays = {"row": np.array([2, 1]), "truncated": cut, "token_mask": mask}
    rollouts, _ = plain_rollouts(np.zeros((2, 3)), **arrays)
    fields = row_answers.fields(rollouts, [encode(text) for text in texts])
    assert fields[THOUGHT].tolist() == [[2, 1, 0], [0, 2, 2 + 4]]
    assert fields[MASK].tolist() == [[True, True], [True, False]]
    assert fields[REACHED].tolist() == [[True, False, False], [False, False, True]]
    plain = answers("").fields(rollouts, [encode(text) for text in texts])
    assert plain[REACHED].tolist() == [[True, True, True], [False, True, True]]
    expected = [encode("#A=12"), [*encode("#A=7"), -1]]
    assert fields[FORCED].tolist() == expected


def test_numbers_are_answers_and_what_is_none_is_refused_with_its_row():
    assert answers("", rows=[{"answer": 7}, {"answer": "x"}]).counts.tolist() == [1, 1]
    for wrong in ("", None, ["4"], True):
        rows = [*ROWS, {"answer": wrong}, {"answer": ""}]
        with pytest.raises(InputError, match=r"2 of 5 rows hold no answer \(the first is row 3, "):
            answers(rows=rows)
    with pytest.raises(InputError, match=r'data\.answer = "": .* name the column'):
        answers(rows=[{"prompt": "p"}])
