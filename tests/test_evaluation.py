"""The numbers of an evaluation, by hand."""

import numpy as np
import pytest

from jaxgrpo.evaluation import Answers, Questions, bootstrap, majority, summarise


def answers(scores, texts=None):
    scores = np.asarray(scores, np.float32)
    shape = scores.shape
    texts = texts or [["x"] * shape[1]] * shape[0]
    mask = np.ones((*shape, 2), bool)
    zero = np.zeros((*shape, 2))
    return Answers(zero.astype(int), mask, zero, scores < 0, scores, texts)


def questions(count, extract=None, **columns):
    rows = [{"prompt": "p", **{k: v[i] for k, v in columns.items()}} for i in range(count)]
    return Questions(rows, [], lambda completions: [0.0] * len(completions), extract)


def test_accuracy_is_greedy_and_split_by_level_and_source():
    asked = questions(4, level=[1, 1, 2, 2], source=["a", "b", "a", "b"])
    metrics = summarise(answers([[1], [1], [0], [1]]), answers([[1, 0]] * 4), asked, 2)
    assert metrics["accuracy"] == 0.75
    assert metrics["accuracy/level_1"] == 1
    assert metrics["accuracy/level_2"] == 0.5
    assert metrics["accuracy/source_a"] == 0.5
    assert metrics["accuracy/source_b"] == 1


def test_pass_at_k_and_flat_groups_are_unbiased_from_the_counts():
    metrics = summarise(answers([[0], [0]]), answers([[1, 0, 0, 0], [1, 1, 1, 1]]), questions(2), 2)
    assert metrics["pass@1"] == pytest.approx((0.25 + 1) / 2)
    assert metrics["pass@4"] == 1
    # Two of four with one success agree with probability C(3,2)/C(4,2) = 1/2.
    assert metrics["flat_groups"] == pytest.approx((0.5 + 1) / 2)
    assert "flat_groups" not in summarise(
        answers([[0]]), answers([[0, 1]]), questions(1), group_size=3
    )


def test_a_majority_is_of_answers_not_of_texts_and_silence_does_not_vote():
    texts = [["7", "7 ", "8", ""], ["", "", "", ""], ["1", "2", "2", "1"]]
    success = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]], bool)
    extract = lambda text: text.strip() or None  # noqa: E731
    np.testing.assert_array_equal(majority(texts, success, extract, 4), [1, 0, 1])
    # Blocks of two: (7, 7) right, (8, -) wrong; a tie goes to the first.
    np.testing.assert_array_equal(majority(texts, success, extract, 2), [0.5, 0, 0.5])


def test_majorities_appear_only_where_answers_can_be_extracted():
    greedy, sampled = answers([[1]]), answers([[1, 0, 0, 0]], [["a", "b", "b", "b"]])
    assert "maj@4" not in summarise(greedy, sampled, questions(1), 2)
    assert summarise(greedy, sampled, questions(1, extract=str), 2)["maj@4"] == 0


def test_intervals_hold_the_mean_and_narrow_with_the_square_root_of_the_prompts():
    rng = np.random.default_rng(1)
    widths = []
    for count in (100, 1600):
        values = (rng.random(count) < 0.3).astype(float)
        low, high = bootstrap(values)
        assert low < values.mean() < high
        widths.append(high - low)
        expected = 2 * 1.96 * np.sqrt(values.mean() * (1 - values.mean()) / count)
        assert high - low == pytest.approx(expected, rel=0.15)
    assert bootstrap(np.ones(5)) == (1, 1)


def test_what_a_scorer_could_not_score_is_no_success_and_is_counted():
    metrics = summarise(answers([[np.nan]]), answers([[np.nan, 1]]), questions(1), 2)
    assert metrics["accuracy"] == 0
    assert metrics["pass@1"] == 0.5
    assert metrics["unscored"] == 0.5
