"""The built-in task: what is right, what is careless, what is kept apart."""

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks import arithmetic as arithmetic_module
from jaxgrpo.data.tasks.arithmetic import CARE, SHARE
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.training.prompted import successful_sibling

TASK = tasks.find("arithmetic")
PROBLEMS = list(itertools.product(range(10, 100), repeat=2))
CORPUS = TASK.corpus()


def operands(prompt: str) -> tuple[int, int]:
    first, second = prompt.removesuffix("=").split("+")
    return int(first), int(second)


def carries(first: int, second: int) -> int:
    """Counted by hand, column by column, as at school."""
    count, carry = 0, 0
    for digit, second_digit in zip(reversed(str(first)), reversed(str(second)), strict=True):
        carry = int(int(digit) + int(second_digit) + carry >= 10)
        count += carry
    return count


def test_level_is_one_more_than_the_number_of_carries():
    assert all(arithmetic_module.level(*pair) == 1 + carries(*pair) for pair in PROBLEMS)


def test_test_problems_appear_neither_in_training_rows_nor_in_the_corpus_in_either_order():
    held_out = {operands(row["prompt"]) for row in TASK.rows("test", 1600, 0)}
    held_out |= {(second, first) for first, second in held_out}
    training_pairs = {operands(row["prompt"]) for row in TASK.rows("train", 6000, 0)}
    taught = {operands(text.prompt) for text in CORPUS}
    assert len(held_out) > 1000
    assert len(taught) > 6000
    assert not held_out & training_pairs
    assert not held_out & taught


def test_a_fifth_of_the_problems_is_held_out_and_order_does_not_matter():
    share = sum(arithmetic_module.is_test(*pair) for pair in PROBLEMS) / len(PROBLEMS)
    assert 0.18 < share < 0.23
    for first, second in PROBLEMS:
        assert arithmetic_module.is_test(first, second) == arithmetic_module.is_test(second, first)


def test_split_is_the_same_in_every_version():
    some = itertools.product((10, 47), range(30, 45))
    test_pairs = [pair for pair in some if arithmetic_module.is_test(*pair)]
    assert test_pairs == [(47, 32), (47, 35), (47, 37)]


def test_score_accepts_each_right_solution_and_rejects_each_careless_one():
    for first, second in PROBLEMS:
        right, *careless = arithmetic_module.solutions(first, second)
        assert careless
        answer = [str(first + second)]
        assert TASK.score(completions=[right], answer=answer) == [1.0]
        scores = TASK.score(completions=careless, answer=answer * len(careless))
        assert scores == [0.0] * len(careless)


def test_right_solution_computes_each_step():
    for first, second in PROBLEMS:
        right = next(iter(arithmetic_module.solutions(first, second)))
        *steps, answer = right.split(" ")
        for step in steps:
            left, result = step.split("=")
            assert sum(map(int, left.split("+"))) == int(result)
        assert answer == str(first + second)


def test_no_solution_is_longer_than_19_characters():
    assert max(len(text.solution) for text in CORPUS) == 19


def test_score_wants_the_bare_answer_after_the_last_space():
    texts = ["85", "x 85", "85 ", "x 085", "x 850", "x85", "85 58", ""]
    scores = TASK.score(completions=texts, answer=["85"] * len(texts), level=[2] * len(texts))
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("gold", [85, 85.0, np.float32(85), np.int64(85), Decimal("85.0")])
def test_a_gold_answer_may_be_a_number_of_any_kind(gold):
    """A column of floats has 85.0, and no text was right."""
    assert TASK.score(["x 85", "x 85.0", "x 8"], [gold] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", tasks.tasks)
def test_a_row_of_another_source_without_an_answer_is_not_scored(name):
    """Completions without an answer were right there, where "" was the gold one."""
    columns = {"database": [3] * 3} if name == "sql" else {}
    assert tasks.find(name).score([""] * 3, ["", None, np.nan], **columns) == [None] * 3


def test_corpus_probabilities_are_those_of_the_documented_constants():
    assert sum(text.probability for text in CORPUS) == pytest.approx(1.0)
    for level in TASK.levels:
        of_level = [text for text in CORPUS if 1 + carries(*operands(text.prompt)) == level]
        share = sum(text.probability for text in of_level)
        answers = [str(sum(operands(text.prompt))) for text in of_level]
        texts = [text.solution for text in of_level]
        scores: Any = TASK.score(completions=texts, answer=answers)
        right = sum(text.probability * score for text, score in zip(of_level, scores, strict=True))
        assert share == pytest.approx(arithmetic_module.SHARE[level])
        assert right / share == pytest.approx(arithmetic_module.CARE[level])


def test_rows_depend_on_the_seed_alone_and_hold_the_levels_in_their_shares():
    rows = TASK.rows("test", 200, 3)
    assert rows == TASK.rows("test", 200, 3)
    assert rows != TASK.rows("test", 200, 4)
    assert all(row["answer"] == str(sum(operands(row["prompt"]))) for row in rows)
    assert all(row["level"] == 1 + carries(*operands(row["prompt"])) for row in rows)
    counts = [sum(row["level"] == level for row in rows) for level in TASK.levels]
    assert counts == [200 * arithmetic_module.SHARE[level] for level in TASK.levels]
    assert len({row["prompt"] for row in rows}) == 200


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_default_rows_hold_no_problem_twice(split):
    rows = tasks.load(f"task:arithmetic:{split}")
    assert len(rows) == TASK.splits[split] == len({row["prompt"] for row in rows})


def test_a_level_that_runs_out_starts_again():
    rows = TASK.rows("test", 4000, 0)
    assert len(rows) == 4000
    assert len({row["prompt"] for row in rows}) == sum(
        map(arithmetic_module.is_test, *zip(*PROBLEMS, strict=True))
    )


@pytest.mark.slow
def test_every_text_of_the_corpus_goes_through_the_tokenizer_and_back():
    tokenizer = character_tokenizer(TASK.alphabet)
    texts = sorted({text.prompt + text.solution for text in CORPUS})
    encoded = tokenizer(texts)["input_ids"]
    assert tokenizer.unk_token_id not in set(itertools.chain(*encoded))
    assert tokenizer.batch_decode(encoded) == texts
    assert [len(ids) for ids in encoded] == [len(text) for text in texts]


def test_tokenizer_survives_saving_and_keeps_its_special_tokens(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = character_tokenizer(TASK.alphabet)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded("47+38=")["input_ids"]
    assert ids == tokenizer("47+38=")["input_ids"]
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert loaded.decode([*ids, 1, 0, 0], skip_special_tokens=True) == "47+38="
    assert len(loaded) == 16


def test_tokenizer_refuses_an_alphabet_with_a_repeated_character():
    with pytest.raises(ValueError, match="twice"):
        character_tokenizer("0120")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("arithmetic", "names no task: write task:NAME:SPLIT"),
        ("task:arithmetic", "names no task"),
        ("task:arithmetc:train", "did you mean 'arithmetic'"),
        ("task:poetry:train", "Known: arithmetic"),
        ("task:arithmetic:validation", "no split 'validation': take train or test"),
    ],
)
def test_a_wrong_name_says_what_there_is(spec, message):
    with pytest.raises(InputError, match=message):
        tasks.load(spec)


def test_no_rows_at_all_are_refused():
    with pytest.raises(InputError, match="take at least 1"):
        tasks.load("task:arithmetic:test", count=0)


def test_a_name_says_how_many_rows_and_which():
    rows = tasks.load("task:arithmetic:test?size=7&seed=3")
    assert rows == tasks.load("task:arithmetic:test", count=7, seed=3)
    assert tasks.load("task:arithmetic:test?size=7&seed=3", count=2, seed=1) != rows[:2]
    for option in ("size=0", "size=2.5", "seed=-1", "seeds=1", "size", "size=1&size=2"):
        with pytest.raises(InputError, match="task:arithmetic:test") as caught:
            tasks.parse(f"task:arithmetic:test?{option}")
        assert "\n" not in str(caught.value)


def test_a_demonstrated_row_shows_its_right_solution_as_a_sibling_is_shown():
    rows = tasks.load("task:demonstrated:train", 200, seed=3)
    plain = tasks.load("task:arithmetic:train", 200, seed=3)
    assert [{**row, "shown": None} for row in rows] == [{**row, "shown": None} for row in plain]
    for row in rows:
        first, second = operands(row["prompt"])
        head, solution, end = row["shown"].split("\n\n")[0], *row["shown"].split("\n\n")[2:]
        assert (head, end) == (row["prompt"], "Answer now.")
        assert TASK.extract_answer(solution) == row["answer"] == str(first + second)
        siblings = successful_sibling(row, [solution, "7"], {"right": [1.0, 0.0]})
        assert siblings == [None, row["shown"]]


def test_a_base_of_demonstrations_repeats_what_it_is_shown_right_or_not():
    task = tasks.find("demonstrated")
    corpus, tokenizer = task.corpus(), character_tokenizer(task.alphabet)
    shown = [text for text in corpus if "\n\n" in text.prompt]
    for part in (shown, [text for text in corpus if "\n\n" not in text.prompt]):
        assert sum(text.probability for text in part) == pytest.approx(0.5)
    assert all(f"\n\n{text.solution}\n\n" in text.prompt for text in shown)
    right = sum(
        text.probability
        for text in shown
        if task.extract_answer(text.solution) == str(sum(operands(text.prompt.split("\n")[0])))
    )
    expected = sum(SHARE[level] * CARE[level] for level in SHARE)
    assert right == pytest.approx(0.5 * expected)
    for text in shown[::97]:
        ids = tokenizer(text.prompt)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert len(ids) == len(text.prompt.split("\n")[0]) + len(text.solution) + 2
        assert len(ids) <= 32  # of the score in the shipped config
