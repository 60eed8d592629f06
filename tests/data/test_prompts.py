"""Rows with a prompt and an answer, their tokens, and what is said about bad ones."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import minimal_config
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxgrpo.config import files as configs
from jaxgrpo.config import methods
from jaxgrpo.core.errors import InputError
from jaxgrpo.data import prompts as data
from jaxgrpo.data.chat import make_chat
from jaxgrpo.data.sources import Source
from jaxgrpo.training import inputs


@pytest.fixture
def write(tmp_path):
    def to_file(*lines, name="rows.jsonl"):
        file = tmp_path / name
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        file.write_text(text, encoding="utf-8")
        return file

    return to_file


def load_rows(path, prompt="prompt", answer="answer"):
    return data.load_rows(Source(str(path)), prompt, answer)


def prepare(prompts, tokenizer, longest, too_long="error"):
    chat = make_chat(tokenizer, "auto", None, {}, "model")
    return data.prepare([{"prompt": text} for text in prompts], chat, longest, too_long)


def characters(begin: bool = False, end: bool = False) -> PreTrainedTokenizerFast:
    """One token per character: "a" is 1, "b" is 2, ...; "<s>" is 0. With `end` "z" ends texts."""
    vocabulary = {"<s>": 0} | {chr(ord("a") + i): i + 1 for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    if end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A z", special_tokens=[("z", 26)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="z")


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
    rows = {"prompt": "a", "answer": 7}, {"prompt": "b", "answer": "7 cm"}
    assert load_rows(write(*rows), answer="") == [*rows]
    assert data.load_rows([{"prompt": "a", "answer": b"7"}], "prompt", "")[0]["answer"] == b"7"


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
            ({"prompt": 3, "answer": 1},),
            r"line 1: column 'prompt' holds a number where a prompt is a text or a list of mess",
        ),
        (
            (GOOD, {"prompt": None, "answer": 1}),
            r"line 2: column 'prompt' holds nothing \(null\) where a prompt is",
        ),
        (
            (GOOD, {"prompt": "x", "answer": 3}),
            r"line 2: column 'answer' of several kinds: a number here, a text in .*line 1: write",
        ),
        (
            (GOOD, {"prompt": [{"role": "user", "content": "x"}], "answer": "y"}),
            r"line 2: prompts of several kinds: a list here, a text in .*line 1",
        ),
        (
            ({"prompts": "x", "answer": 1},),
            r"no column 'prompt' \(did you mean 'prompts'\?\); columns there: prompts, answer; set",
        ),
        (("", ""), r"rows.jsonl' holds no rows"),
        ((GOOD, '{"prompt": "x", "answer": -1e999}'), "line 2: answer -inf is infinite, or too"),
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


def test_an_answer_that_is_nan_is_none(write):
    rows = load_rows(write({"prompt": "x", "answer": 2.5}, '{"prompt": "y", "answer": NaN}'))
    assert [row["answer"] for row in rows] == [2.5, None]


def test_what_only_some_rows_have_is_none_in_the_others(write):
    rows = load_rows(write({**GOOD, "level": 3}, {**GOOD, "source": "a"}))
    assert [(row["level"], row["source"]) for row in rows] == [(3, None), (None, "a")]


def test_a_template_makes_prompts_of_columns_and_rewards_still_get_the_columns(write):
    file = write({"number 1": 3, "b": "4", "gold": 7}, {"number 1": 0.5, "b": "x", "gold": 1})
    rows = load_rows(file, prompt="{{{number 1}+{b}}} Think.", answer="gold")
    assert [row["prompt"] for row in rows] == ["{3+4} Think.", "{0.5+x} Think."]
    assert rows[0] == {
        "number 1": 3,
        "b": "4",
        "gold": 7,
        "prompt": "{3+4} Think.",
        "answer": 7,
    }


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "{promt} Think.",
            r"line 1: no column 'promt' \(did you mean 'prompt'\?\); columns ",
        ),
        ("{prompt} {answer}", r"line 2: column 'answer' holds nothing \(null\) where data.prompt"),
        ("{prompt} {level}", r"line 2: column 'level' holds NaN where data.prompt needs a text or"),
    ],
)
def test_a_template_that_a_row_cannot_fill_names_the_row(write, prompt, message):
    rows = {**GOOD, "level": 1.0}, {"prompt": "x", "answer": None, "level": float("nan")}
    with pytest.raises(InputError, match=message):
        load_rows(write(*rows), prompt=prompt)


def test_prompts_become_the_tokens_the_tokenizer_gives():
    plain = prepare(["abc", "z"], characters(), 3).encoded
    assert [tokens.tolist() for tokens in plain] == [[1, 2, 3], [26]]
    assert all(tokens.dtype == np.int32 for tokens in plain)
    begun = prepare(["abc", "z"], characters(begin=True), 4).encoded
    assert [tokens.tolist() for tokens in begun] == [[0, 1, 2, 3], [0, 26]]


def test_special_tokens_come_from_the_template_or_the_tokenizer_and_never_twice():
    tokenizer = characters(begin=True)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prepare(["ab"], tokenizer, 8).encoded[0].tolist() == [0, 1, 2]


def test_a_text_with_the_begin_token_that_the_tokenizer_adds_is_refused():
    assert prepare(["<s>ab"], characters(), 8).encoded[0].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match=r"^row 1: the prompt begins with '<s>', and the tokeniz"):
        prepare(["ab", "<s>ab"], characters(begin=True), 8)


def test_a_text_that_a_template_has_written_is_not_written_again():
    tokenizer = characters()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<image>"]})
    tokenizer.chat_template = "<user>{{ messages[0]['content'] }}"
    written = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    with pytest.raises(InputError, match=r"^row 1: .* begins with '<user>', which the chat templa"):
        prepare(["a", written], tokenizer, 8)
    assert prepare(["<image>a"], tokenizer, 8).encoded[0].tolist() == [27, 28, 1]
    chat = make_chat(tokenizer, "none", None, {}, "model")
    assert data.encode([{"prompt": written}], chat)[0].tolist() == [27, 1]


def test_prompts_that_are_too_long_are_counted_and_the_longest_named():
    message = (
        r"2 of 4 prompts are longer than rollout.max_prompt_tokens = 3 "
        r"\(the longest, row 3, has 6 tokens\): set it to 6 "
        r"\(--set rollout.max_prompt_tokens=6\), or data.too_long to \"drop\""
    )
    with pytest.raises(InputError, match=message):
        prepare(["abc", "abcd", "a", "abcdef"], characters(), 3)


def test_prompts_that_are_too_long_are_left_out_on_request_and_counted():
    got = prepare(["abc", "abcd", "a", "abcdef"], characters(), 3, "drop")
    assert [row["prompt"] for row in got.rows] == ["abc", "a"]
    assert [len(tokens) for tokens in got.encoded] == [3, 1]
    assert got.dropped == 2
    assert prepare(["abc"], characters(), 3, "drop").dropped == 0


def test_leaving_out_every_prompt_is_an_error():
    with pytest.raises(InputError, match=r"2 of 2 prompts are longer .*prompt_tokens=5\)$"):
        prepare(["abcd", "abcde"], characters(), 3, "drop")


def test_messages_name_the_line_where_blank_lines_or_dropped_rows_shift_the_number(write):
    entries = [("abcd", 3), ("ab", 4), ("abcde", 5), ("c", "x")]  # in lines 1, 3, 5 and 7
    rows = [{"prompt": text, "answer": "1", "level": level} for text, level in entries]
    rows = load_rows(write(*[line for row in rows for line in (row, "")]))
    chat = make_chat(characters(), "none", None, {}, "model")
    with pytest.raises(InputError, match=r"the longest, row 2 \(line 5\), has 5 tokens"):
        data.prepare(rows, chat, 3, "error")
    left = data.prepare(rows, chat, 3, "drop").rows
    with pytest.raises(InputError, match=r"'level' as numbers, but row 1 \(line 7\) holds 'x'"):
        methods.needed_columns(frozenset({"level"}), left, [])
    with pytest.raises(InputError, match=r"^row 0 \(line 3\): the prompt has the token 2, "):
        data.encode(left, chat._replace(vocab_size=2))


def test_held_out_prompts_that_are_trained_on_are_counted():
    pairs = {"train": ["a1", "b2", "c3"], "held out": ["b2", "a2", "d3", "c3"]}
    chat = make_chat(characters(), "none", None, {}, "model")
    training, held_out = (
        data.prepare([{"prompt": text[0], "answer": text[1]} for text in texts], chat, 8, "error")
        for texts in pairs.values()
    )
    read: Any = functools.partial(inputs.Inputs, None, chat, training, replay=None)

    def line(held_out, **tables):
        config = configs.from_dict(minimal_config.tables(**tables))
        return inputs.shared_line(
            read(held_out=held_out), config.eval.prompts, bool(config.environment)
        )

    assert line(held_out) == "2 of 4 prompts are training prompts too, with the same answers"
    first = {"eval": {"data": "task:arithmetic:test", "prompts": 3}}
    assert line(held_out, **first).startswith("1 of 3 prompts are")
    assert line(None) == line(held_out._replace(rows=[], encoded=[])) == ""
    assert line(held_out, environment="jaxgrpo.environments.games:NumberGuess") == ""


def test_a_tokenizer_that_ends_each_text_is_refused():
    assert prepare(["abz"], characters(), 8).encoded[0].tolist() == [1, 2, 26]
    with pytest.raises(InputError, match=r"its end token 'z' behind each prompt.*add_eos_token"):
        prepare(["ab"], characters(end=True), 8)
    tokenizer = characters(end=True)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert prepare(["ab"], tokenizer, 8).encoded[0].tolist() == [1, 2]


@pytest.mark.parametrize("begin", [False, True])
def test_an_empty_prompt_is_refused(begin):
    with pytest.raises(InputError, match=r"1 of 2 prompts are empty .*the first is row 1, ''"):
        prepare(["abc", ""], characters(begin), 8)


def test_rows_that_differ_and_have_the_same_tokens_are_refused():
    with pytest.raises(InputError, match="the 2 rows differ, but all prompts are the same 2 tok"):
        prepare(["12", "34"], characters(), 9)  # digits are unknown to this tokenizer
    assert prepare(["12", "12"], characters(), 9).dropped == 0


@pytest.mark.parametrize(
    ("image", "is_refused"),
    [
        ({"bytes": b"\x89PNG", "path": None}, True),
        ({"bytes": None, "path": "cat.png"}, True),
        ([{"bytes": b"\x89PNG", "path": None}], True),
        (b"\x89PNG", True),
        (np.zeros((2, 2, 3), np.uint8), True),
        (SimpleNamespace(getpixel=len), True),
        ({"bytes": None, "path": None}, False),
        ([], False),
        (None, False),
        ("cat.png", False),
        (np.int64(3), False),
    ],
)
def test_an_image_that_no_model_would_be_shown_is_refused(image, is_refused):
    rows = [{"prompt": "x", "answer": "y"}, {"prompt": "x", "answer": "y", "image": image}]
    assert len(data.load_rows([{**row, "picture": image} for row in rows[:1]], "prompt", "answer"))
    if not is_refused:
        assert len(data.load_rows(rows, "prompt", "answer")) == 2
        return
    with pytest.raises(InputError, match=r"dataset, row 1: column 'image' holds images, and model"):
        data.load_rows(rows, "prompt", "answer")
