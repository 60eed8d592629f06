"""Tasks of reasoning-gym: rows that never overlap, its own scores, and answers that are held."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import time

import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks import reasoning, reasoning_program
from jaxgrpo.rewards import build
from jaxgrpo.rewards.reasoning import read_answer, reasoning_gym
from jaxgrpo.rewards.workers import find_workers

REASON = "reasoning-gym is in the extra envs, which `make test-all` installs"
gym = pytest.importorskip("reasoning_gym", reason=REASON)

from reasoning_gym.factory import DATASETS  # noqa: E402  # pyright: ignore[reportMissingImports]
from reasoning_gym.utils import extract_answer  # noqa: E402  # pyright: ignore[reportMissingImports]

WORDS = """
    base_conversion basic_arithmetic binary_alternation calendar_arithmetic caesar_cipher chain_sum
    count_bits decimal_chain_sum dice fraction_simplification gcd gsm_symbolic lcm leg_counting
    letter_counting number_filtering prime_factorization products spell_backward time_intervals
"""
TWENTY = WORDS.split()


def draw(name, split="train", count=3, seed=0, **options):
    """Rows made in this process, as (place, question, answer or "")."""
    rows = reasoning_program.rows(name, json.dumps(options), seed, split, count, 60.0)
    return [([name, options, seed, index], text, gold or "") for index, text, gold in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", TWENTY)
def test_an_oracle_answer_scores_one_and_a_wrong_one_less(name):
    for place, _, answer in draw(name):
        assert reasoning_program.score(place, answer) == 1
        for wrong in (None, "", "no idea", "[1, 2]", f"7{answer}"):
            assert reasoning_program.score(place, wrong) < 1


def test_answers_are_those_of_the_questions():
    for place, question, answer in draw("chain_sum", count=20):
        expression = question.rpartition(": ")[2].rstrip("= ")
        assert int(answer) == eval(expression, {})
        assert reasoning_program.score(place, str(eval(expression, {}) + 1)) < 1
    for _, question, answer in draw("gcd", count=20):
        numbers = map(int, re.findall(r"\d+", question.partition(":")[2]))
        assert int(answer) == math.gcd(*numbers)


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "spell_backward"])
def test_no_question_is_in_both_splits_whatever_the_seeds(name):
    train, test = (
        {question for seed in (0, 1, 2) for _, question, _ in draw(name, split, 100, seed)}
        for split in ("train", "test")
    )
    assert len(train) > 150
    assert not train & test


def test_seeds_give_other_rows_and_not_those_beside_them():
    first, second = ({q for _, q, _ in draw("chain_sum", "train", 100, seed)} for seed in (0, 1))
    assert not first & second


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["isomorphic_strings", "polynomial_multiplication", "ransom_note"])
def test_rows_are_the_same_in_every_process(name, monkeypatch):
    """Their questions go through sets, whose order a process draws by itself."""
    read = []
    for number in "12":
        monkeypatch.setenv("PYTHONHASHSEED", number)
        reasoning._ask.cache_clear()
        read.append(tasks.load(f"task:reasoning_gym:{name}:test?size=4"))
    assert read[0] == read[1]
    rows = read[0]
    answers = [row["answer"] for row in rows]
    if name != "isomorphic_strings":
        assert reasoning_gym(answers, [row["entry"] for row in rows]) == [1.0] * 4


@pytest.mark.slow
def test_a_name_with_options_gives_rows_that_the_reward_scores():
    spec = "task:reasoning_gym:chain_sum:train?min_terms=2&max_terms=2&size=5&seed=3"
    rows = tasks.load(spec)
    assert len(rows) == 5
    assert rows[0].keys() == {"prompt", "answer", "entry"}
    assert all(len(re.findall(r" [+-] ", row["prompt"])) == 1 for row in rows)
    texts = [f"<think>a\n7</think>\nso <answer> {row['answer']} </answer>." for row in rows]
    numbers = {}
    reward = build("reasoning_gym")
    scores = reward(
        completions=[*texts, "5\nno"],
        entry=[row["entry"] for row in [*rows, rows[0]]],
        log_metric=numbers.__setitem__,
    )
    assert scores == [1.0] * 5 + [0.0]
    assert numbers == {"reasoning_gym/unscored": 0}


@pytest.mark.full
def test_rows_of_other_sources_are_not_scored():
    (row,) = tasks.load("task:reasoning_gym:chain_sum:test?size=1")
    answers, entries = [row["answer"], "7", row["answer"]], [row["entry"], None, row["entry"]]
    assert reasoning_gym(answers, entries) == [1.0, None, 1.0]
    assert reasoning_gym(["7"], [None]) == [None]


@pytest.mark.parametrize(
    "text",
    ["<answer>7</answer>", "a<answer> 7\n</answer>b<answer>\n 8 9 </answer>", "<answer></answer>",
     "<answer>1<answer>2</answer>"],
)  # fmt: skip
def test_tags_are_read_as_the_package_reads_them(text):
    assert read_answer(text) == (extract_answer(text) or None)


def test_tags_in_a_thought_are_not_the_answer():
    assert read_answer("<think>maybe <answer>7</answer></think>\n8") == "8"
    assert read_answer("<think><answer>7</answer></think>") is None
    assert read_answer("<think>maybe <answer>7</answer>, or") is None
    assert read_answer("<think><answer>7</answer></think><answer>8</answer>") == "8"


def test_without_tags_the_last_line_is_the_answer():
    assert read_answer("first\n\n 7 \n\n") == "7"
    assert read_answer("<think>3\n4</think>") is None
    assert read_answer(" \n") is None


BY_PYTHON = "binary_matrix n_queens spiral_matrix string_insertion"
BY_SYMPY = """
    countdown intermediate_integration polynomial_multiplication puzzle24 simple_integration
"""
HELD = [*BY_PYTHON.split(), *BY_SYMPY.split()]


def test_scorers_that_evaluate_an_answer_are_all_held():
    names = set()
    for name, (kind, _) in DATASETS.items():
        source = inspect.getsource(kind.score_answer)
        if re.search(r"\b(eval|exec|sympify|parse_expr)\((?!entry|metadata)", source):
            names.add(name)
    assert names == set(HELD)


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_an_answer_is_never_run(name, tmp_path):
    file = tmp_path / "written"
    ((place, _, answer),) = draw(name, count=1)
    assert reasoning_program.score(place, answer) == 1
    write = f"open('{file}', 'w').close()"
    ways = [
        write,
        f"exec({write!r})",
        f"[{write}]",
        f"(lambda: {write})()",
        f"x.__class__ or {write}",
    ]
    ways += [f"__import__('os').system('touch {file}')", f"sympify({write!r})", f"1 + {write}"]
    for way in ways:
        assert reasoning_program.score(place, way) < 0.1
        assert not file.exists()


@pytest.mark.full
@pytest.mark.slow
def test_an_answer_that_never_ends_is_not_scored_and_the_others_are():
    ((place, _, answer),) = draw("countdown", count=1)
    entry = json.dumps(place)
    began, numbers = time.monotonic(), {}
    scores = reasoning_gym(
        [answer, "9**9**9**9**9", answer],
        [entry] * 3,
        time_limit=1.0,
        log_metric=numbers.__setitem__,
    )
    assert scores == [1.0, None, 1.0]
    assert numbers["reasoning_gym/unscored"] == pytest.approx(1 / 3)
    assert time.monotonic() - began < 60
    find_workers.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chain_sun:train", "no generator 'chain_sun': did you mean chain_sum or"),
        ("chain_sum:dev", "no split 'dev': take train or test"),
        ("chain_sum", "names no task"),
        ("chain_sum:train?min_term=2", "no option 'min_term': there are size, seed, allow_neg"),
        pytest.param(
            "chain_sum:train?min_terms=0", "min_terms must be positive", marks=pytest.mark.full
        ),
        ("chain_sum:train?size=0", "size = 0: take a whole number >= 1"),
        ("chain_sum:train?size", "write options once each"),
        ("chain_sum:train?allow_negation=False", "a text: write allow_negation=false"),
        pytest.param(
            "composite:train", "Must specify at least one dataset", marks=pytest.mark.full
        ),
        pytest.param("sokoban:train?size=9000", r"made \d+ of 9000 rows", marks=pytest.mark.full),
    ],
)
def test_a_wrong_name_gets_a_line(spec, message, monkeypatch):
    monkeypatch.setattr(reasoning, "SECONDS", 2)
    with pytest.raises(InputError, match=message) as caught:
        tasks.load(f"task:reasoning_gym:{spec}")
    assert "\n" not in str(caught.value)


def test_without_the_package_a_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning._ask.cache_clear()
    with pytest.raises(InputError, match=r'reasoning-gym, which is not.* "jaxgrpo\[envs\]"'):
        tasks.parse("task:reasoning_gym:chain_sum:train")
    with pytest.raises(InputError, match="reasoning-gym, which is not installed"):
        build("reasoning_gym")


LENIENT = {"game_of_life_halting"}  # takes every text but true for false


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"composite"} - LENIENT))
def test_every_generator_makes_rows_and_scores_garbage_below_one(name):
    for place, question, answer in draw(name, "test", 1):
        assert question
        assert not answer or reasoning_program.score(place, answer) == 1
        for text in (
            "[[1,2],[3]]",
            "{}",
            "nothing\n",
            "1/0",
            "-3",
            '{"a": [1]}',
            "(" * 200,
            "a,b,c",
        ):
            assert reasoning_program.score(place, text) < 1
