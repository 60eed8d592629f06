"""Rows from files and tasks, and what is said about bad ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxgrpo.errors import InputError
from jaxgrpo.io.data import encode_prompts, load_rows


@pytest.fixture
def write(tmp_path):
    def to_file(*lines, name="rows.jsonl"):
        file = tmp_path / name
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        file.write_text(text, encoding="utf-8")
        return file

    return to_file


def characters(begin: bool = False) -> PreTrainedTokenizerFast:
    """One token per character: "a" is 1, "b" is 2, ...; "<s>" is 0."""
    vocabulary = {"<s>": 0} | {chr(ord("a") + i): i + 1 for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_a_file_gives_its_columns_and_the_two_names_rewards_know(write):
    file = write(
        {"question": "1+1", "gold": "2", "level": 3},
        "",
        {"question": "ü", "gold": None, "level": 4},
    )
    rows = load_rows(file, prompt="question", answer="gold")
    assert rows == [
        {"question": "1+1", "gold": "2", "level": 3, "prompt": "1+1", "answer": "2"},
        {"question": "ü", "gold": None, "level": 4, "prompt": "ü", "answer": None},
    ]


def test_an_empty_answer_column_asks_for_none(write):
    assert load_rows(write({"prompt": "x"}), answer="") == [{"prompt": "x"}]


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "x", "answer": "y"}\r\n')
    assert load_rows(file) == [{"prompt": "x", "answer": "y"}]


def test_a_task_gives_rows_with_prompt_answer_and_level():
    rows = load_rows("task:arithmetic:test")
    assert {"prompt", "answer", "level"} <= rows[0].keys()
    assert rows == load_rows("task:arithmetic:test")


GOOD = {"prompt": "x", "answer": "y"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((GOOD, '{"prompt": "x"'), r"rows.jsonl, line 2: not JSON \(Expecting ',' delimiter\)"),
        ((GOOD, "", "[1, 2]"), r"line 3: a JSON list: write an object"),
        (({"a": 1, "b": 2},), r"line 1: no column 'prompt'; columns there: a, b; set data.prompt"),
        (
            (GOOD, {"prompt": "x"}),
            r"line 2: no column 'answer'; columns there: prompt; set data.an",
        ),
        (
            ({"prompt": ["x"], "answer": 1},),
            r"line 1: column 'prompt' holds list where a prompt is",
        ),
        (("", ""), r"rows.jsonl' holds no rows"),
    ],
)
def test_a_bad_line_is_named_with_its_number(write, lines, message):
    with pytest.raises(InputError, match=message):
        load_rows(write(*lines))


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=r"line 2: not JSON \(bytes that are no UTF-8\)"):
        load_rows(file)


def test_a_source_that_is_none_is_refused(tmp_path, write):
    with pytest.raises(InputError, match=r"no.jsonl' does not exist \(looked for .*no.jsonl\)"):
        load_rows(tmp_path / "no.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        load_rows(tmp_path / "folder.jsonl")
    with pytest.raises(InputError, match="no source of rows: give task:NAME:SPLIT"):
        load_rows(write(GOOD, name="rows.csv"))
    with pytest.raises(InputError, match="arithmetic"):
        load_rows("task:arithmetics:train")


def test_prompts_become_the_tokens_the_tokenizer_gives():
    rows = [{"prompt": "abc"}, {"prompt": "z"}]
    plain = encode_prompts(rows, characters(), 3)
    assert [tokens.tolist() for tokens in plain] == [[1, 2, 3], [26]]
    assert all(tokens.dtype == np.int32 for tokens in plain)
    begun = encode_prompts(rows, characters(begin=True), 4)
    assert [tokens.tolist() for tokens in begun] == [[0, 1, 2, 3], [0, 26]]


def test_prompts_that_are_too_long_are_counted_and_the_longest_named():
    rows = [{"prompt": text} for text in ("abc", "abcd", "a", "abcdef")]
    message = (
        r"2 of 4 prompts are longer than rollout.max_prompt_tokens = 3 "
        r"\(the longest, row 3, has 6 tokens\): set it to 6"
    )
    with pytest.raises(InputError, match=message):
        encode_prompts(rows, characters(), 3)


@pytest.mark.parametrize("begin", [False, True])
def test_an_empty_prompt_is_refused(begin):
    rows = [{"prompt": "abc"}, {"prompt": ""}]
    with pytest.raises(InputError, match=r"1 of 2 prompts are empty .*the first is row 1, ''"):
        encode_prompts(rows, characters(begin), 8)
