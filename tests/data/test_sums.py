"""The task of sums behind four examples: which problems, which split, how answers are judged."""

import itertools

import pytest

from jaxgrpo.data import tasks
from jaxgrpo.data.tasks import sums
from jaxgrpo.data.tasks.base import character_tokenizer


def pairs(rows):
    return [(row["first"], row["second"]) for row in rows]


def test_every_sum_but_the_examples_is_in_one_split():
    train, test = (pairs(tasks.load(f"task:sums:{split}")) for split in ("train", "test"))
    every = set(itertools.product(range(1, 21), repeat=2)) - set(sums.EXAMPLES)
    assert sorted(train + test) == sorted(every)
    assert (len(train), len(test)) == (296, 100)


def test_rows_say_the_problem_last_and_its_answer():
    for row in tasks.load("task:sums:train", 50, seed=3):
        *examples, problem = row["prompt"].split("\n")
        for line in examples:
            left, right = line.split("=")
            assert sum(map(int, left.split("+"))) == int(right)
        assert problem == f"{row['first']}+{row['second']}="
        assert int(row["answer"]) == row["first"] + row["second"]
        assert row["level"] == 1 + len(f"{row['first']}{row['second']}") - 2


def test_a_seed_decides_the_order_and_laps_repeat_nothing_early():
    assert tasks.load("task:sums:test", seed=1) == tasks.load("task:sums:test", seed=1)
    assert tasks.load("task:sums:test", seed=1) != tasks.load("task:sums:test", seed=2)
    twice = pairs(tasks.load("task:sums:test", 200))
    assert sorted(twice[:100]) == sorted(twice[100:])


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"no split 'dev': take train or test"):
        tasks.load("task:sums:dev")


def test_the_corpus_is_half_right_and_its_tokenizer_reads_it():
    corpus = sums.corpus()
    assert sum(text.probability for text in corpus) == pytest.approx(1)
    answers = {row["prompt"]: row["answer"] for row in tasks.load("task:sums:train")}
    right = sum(text.probability for text in corpus if text.solution == answers[text.prompt])
    assert right == pytest.approx(0.5)
    tokenizer = character_tokenizer(sums.sums.alphabet)
    text = corpus[0].prompt + corpus[0].solution
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
