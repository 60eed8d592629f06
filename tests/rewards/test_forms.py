"""The rewards of form: the tags of a completion and its length."""

import time

import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks import tasks
from jaxgrpo.rewards import build, has_format, overlong_penalty, stated_confidence
from jaxgrpo.rewards.reasoning import read_answer


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1),
        ("<think>1 < 2</think> <answer>2</answer>", 1),
        ("<answer>b</answer>", 0),
        ("<think>a</think>b", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("well <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> bye", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("</think>a<think><answer>b</answer>", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("<think>a</think><answer>\n</answer>", 0),
        ("<Think>a</Think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_thoughts_then_an_answer_each_in_its_tags(text, score):
    assert has_format([text]) == [score]
    assert has_format([[{"role": "assistant", "content": text}]]) == [score]


READERS = {
    **{task.name: task.extract_answer for task in tasks.values()},
    "confidence": stated_confidence,
    "reasoning_gym": read_answer,
}


@pytest.mark.parametrize("piece", ["<answer>", "<confidence>", "<answer> ", "1", "1 ", " "])
def test_no_text_of_a_model_that_repeats_itself_takes_long(piece):
    text = piece * (100_000 // len(piece)) + "."
    for name, read in READERS.items():
        began = time.process_time()
        read(text)
        assert time.process_time() - began < 1, name


def test_the_last_pair_of_tags_counts_and_an_open_one_behind_it_does_not():
    text = "<confidence>0.1</confidence> <confidence>0.2</confidence> <confidence>0.3"
    assert stated_confidence(text) == 0.2
    assert read_answer(text.replace("confidence", "answer")) == "0.2"


@pytest.mark.parametrize(
    ("text", "score"), [("A: 7", 1), ("so\nA: 7", 1), ("A: 7.", 0), ("A: ", 0), ("", 0)]
)
def test_a_pattern_has_to_match_the_whole_text(text, score):
    assert build("format", pattern=r"(.*\n)?A: [0-9]+")(completions=[text]) == [score]


def test_the_penalty_is_that_of_dapo():
    lengths = np.arange(1, 130)
    ids = [[7] * n for n in lengths]
    expected = np.where(
        lengths <= 80, 0, np.where(lengths <= 100, (80 - lengths) / 20, -1)
    )  # equation 13, L_max 100, L_cache 20
    np.testing.assert_allclose(overlong_penalty(ids, max_tokens=100, cache=20), expected)
    np.testing.assert_allclose(overlong_penalty(ids, max_tokens=100), expected)
    np.testing.assert_allclose(
        overlong_penalty(ids, max_tokens=100, cache=0), np.where(lengths <= 100, 0, -1)
    )


def test_length_counts_tokens_and_never_characters():
    texts = ["x" * 9000, ""]
    scores = overlong_penalty(completions=texts, completion_ids=[[1], [1] * 9], max_tokens=8)
    assert scores == [0.0, -1.0]


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("length", {"max_tokens": 0}, r"rewards\.length: max_tokens = 0: expected a whole number"),
        ("length", {"cache": -1}, "cache = -1: expected a whole number"),
        ("length", {"cache": 0.5}, r"cache = 0\.5"),
        ("length", {"max_tokens": 8, "cache": 9}, "cache = 9: more than max_tokens = 8"),
        ("length", {"max_token": 8}, "no option 'max_token': it takes max_tokens, cache"),
        ("format", {"pattern": "("}, "pattern = '\\(': is no regular expression"),
        ("format", {"pattern": 3}, "pattern = 3: expected a regular expression"),
    ],
)
def test_options_out_of_range_are_refused(use, options, message):
    with pytest.raises(InputError, match=message):
        build(use, **options)


def test_a_length_without_its_limit_says_so():
    with pytest.raises(InputError, match="max_tokens is missing"):
        overlong_penalty([[1]])
