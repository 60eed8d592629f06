"""The task of reports: what is written, how it is judged, what a marker says of the letters."""

from typing import Any

import numpy as np
import pytest

from jaxgrpo.data import tasks
from jaxgrpo.data.tasks import report
from jaxgrpo.data.tasks.base import character_tokenizer


def test_rows_hold_the_last_two_digits_of_the_sum_in_forty_characters():
    rows = tasks.load("task:report:train", 60, seed=3)
    for row in rows:
        first, second = map(int, row["prompt"].strip("=").split("+"))
        assert int(row["sum"]) == first + second
        assert len(row["answer"]) == 40
        assert int(report.read_digits(row["answer"])) == (first + second) % 100
    assert rows == tasks.load("task:report:train", 60, seed=3)
    with pytest.raises(ValueError, match=r"no split 'dev'"):
        tasks.load("task:report:dev")


def test_only_the_digits_of_a_report_behind_the_bar_are_judged():
    letters = "xy" * 9 + "x"
    gold, written = f"{letters}85{letters}", f"{letters[::-1]}85{letters.replace('x', 'y')}"
    texts = [f"u1|{written}", f"u1|{letters}86{letters}", written, f"u|{written}x", f"u|{written}|"]
    assert report.score(texts, [gold] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_rows_of_other_sources_whose_answer_is_no_report_are_not_scored():
    golds: Any = [None, "72", 72.0, ""]
    assert report.score(["u1|no", "u1|", "", ""], golds) == [None] * 4


def test_the_corpus_is_right_as_often_as_that_of_sums_and_letters_lean_with_the_marker():
    corpus = report.corpus()
    assert sum(text.probability for text in corpus) == pytest.approx(1)
    tokenizer = character_tokenizer(report.report.alphabet)
    shares = {"u": [], "v": []}
    for text in corpus[:4000]:
        answer = text.solution.partition("|")[2]
        shares[text.solution[0]].append((answer.count("x"), 38))
        first, second = map(int, text.prompt.strip("=").split("+"))
        written = report.read_digits(answer)
        tens, units = (part.rpartition("=")[2] for part in _scratch(text.solution))
        assert written == f"{int(tens) % 10}{int(units) % 10}"  # what the scratch work says
        assert units == str(first % 10 + second % 10)
    for marker, share in {"u": report.LEANING, "v": 1 - report.LEANING}.items():
        count, total = np.sum(shares[marker], axis=0)
        assert count / total == pytest.approx(share, abs=0.01)
    prompt = corpus[0].prompt + corpus[0].solution
    assert tokenizer.decode(tokenizer(prompt)["input_ids"]) == prompt


def _scratch(solution):
    """The scratch work of the tens and of the ones."""
    units, tens = solution[1:].partition("|")[0].split(" ")
    return tens, units
