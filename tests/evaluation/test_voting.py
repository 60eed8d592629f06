"""Votes among samples, by hand and against a plain count."""

from collections import Counter

import numpy as np
import pytest

from jaxgrpo.evaluation.voting import confidence_metrics, confidences, vote, votes


def test_a_majority_is_of_answers_and_silence_does_not_vote():
    answers = [["7", "7", "8", None], [None] * 4, ["1", "2", "2", "1"]]
    success = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]], bool)
    np.testing.assert_array_equal(vote(answers, success, 4), [1, 0, 1])
    # Blocks of two: (7, 7) right, (8, -) wrong; a tie goes to the first.
    np.testing.assert_array_equal(vote(answers, success, 2), [0.5, 0, 0.5])


def random_votes(seed, prompts=40, samples=16):
    rng = np.random.default_rng(seed)
    names = np.array([None, "a", "b", "c"], object)
    drawn = rng.integers(0, 4, (prompts, samples))
    return names[drawn].tolist(), drawn == 1, rng.gamma(2, 1, (prompts, samples))


@pytest.mark.parametrize("voter_share", [0.1, 0.9, 1.0])
def test_equal_weights_are_the_majority_vote_whatever_is_kept(voter_share):
    answers, success, _ = random_votes(0)
    counted = []
    for row, right in zip(answers, success, strict=True):
        blocks = []
        for begin in range(0, 16, 4):
            block = row[begin : begin + 4]
            ballots = Counter(answer for answer in block if answer is not None)
            majority = ballots.most_common(1)[0][0] if ballots else None
            blocks.append(majority is not None and right[begin + block.index(majority)])
        counted.append(np.mean(blocks))
    np.testing.assert_array_equal(vote(answers, success, 4), counted)
    same = np.full(success.shape, 0.3)
    np.testing.assert_array_equal(vote(answers, success, 4, same, voter_share), counted)


def test_a_sure_minority_outweighs_an_unsure_majority():
    answers, success = [["7", "8", "8", "9"]], np.array([[True, False, False, False]])
    assert vote(answers, success, 4, np.array([[5.0, 2, 2, 1]])) == [1]
    assert vote(answers, success, 4, np.array([[5.0, 3, 3, 1]])) == [0]


def test_only_the_most_confident_share_of_those_who_answer_votes():
    answers, success = [["7", "8", "8", "8", None]], np.array([[True, False, False, False, True]])
    weight = np.array([[3.0, 2.0, 2.5, 2.75, 99.0]])
    assert vote(answers, success, 5, weight, voter_share=1.0) == [0]
    # The upper tenth of four voters is the surest alone; the silent one takes nobody's place.
    assert vote(answers, success, 5, weight, voter_share=0.1) == [1]


def test_a_filter_of_the_votes_is_what_a_plain_sort_keeps():
    answers, success, weight = random_votes(1)
    expected = []
    for row, right, sure in zip(answers, success, weight, strict=True):
        voters = [i for i in range(16) if row[i] is not None]
        least = np.percentile(sure[voters], 75)
        totals: dict[str, float] = {}
        for i in voters:
            if sure[i] >= least:
                totals[row[i]] = totals.get(row[i], 0) + sure[i]
        best = max(totals.values())
        expected.append(next(right[i] for i in voters if totals.get(row[i]) == best))
    np.testing.assert_array_equal(vote(answers, success, 16, weight, 0.25), expected)


@pytest.mark.slow
def test_every_summary_of_confidence_has_its_own_vote_at_every_size():
    answers, success, _ = random_votes(2, prompts=3)
    rng = np.random.default_rng(3)
    mask = np.arange(6) < rng.integers(0, 7, (3, 16, 1))
    traces = confidences(rng.gamma(2, 1, (3, 16, 6)), mask, 2)
    names = ("mean", "least", "bottom", "tail")
    assert {name: value.shape for name, value in traces.items()} == dict.fromkeys(names, (3, 16))
    shares = votes(answers, success, [4, 16], 0.9, traces)
    assert set(shares) == {
        *("maj@4", "maj@16"),
        *(f"deepconf@{k}/{name}" for k in (4, 16) for name in names),
    }
    np.testing.assert_array_equal(
        shares["deepconf@4/least"], vote(answers, success, 4, traces["least"], 0.9)
    )
    assert set(votes(answers, success, [4], 0.9, {})) == {"maj@4"}


def test_auroc_tells_how_well_confidence_knows_right_from_wrong():
    success, scored = np.array([[True, False], [True, False]]), np.ones((2, 2), bool)
    trace = {"least": np.array([[0.9, 0.1], [0.4, 0.4]])}
    assert confidence_metrics(success, scored, trace) == {
        "deepconf/least/auroc": pytest.approx((1 + 1 + 1 + 0.5) / 4)
    }
