"""The numbers of a probe from samples that can be counted by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxgrpo.evaluation.evaluate import Answers, Questions
from jaxgrpo.experiments.probe.advice import advise
from jaxgrpo.experiments.probe.measure import measure
from jaxgrpo.rewards import Reward

NAN = np.nan


def answers(scores, texts=None, lengths=None, truncated=None, apart: Any = 0.0) -> Answers:
    """Samples whose first token tells their texts apart; the trainer's log-probs are `apart`."""
    scores = np.asarray(scores, np.float32)
    shape = scores.shape
    texts = [["a"] * shape[1]] * shape[0] if texts is None else texts
    lengths = np.ones(shape, int) if lengths is None else np.asarray(lengths)
    mask = np.arange(lengths.max()) < lengths[..., None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[..., 0] = [[abs(hash(text)) % 10**9 for text in row] for row in texts]
    return Answers(
        tokens=tokens,
        mask=mask,
        logp=np.zeros(mask.shape, np.float32),
        truncated=np.zeros(shape, bool) if truncated is None else np.asarray(truncated),
        scores=scores,
        texts=texts,
        rescored={"logp": np.broadcast_to(np.float32(apart), mask.shape)},
    )


def questions(extract=None, **formats: str) -> Questions:
    return Questions([], [], Reward("scorer", lambda **_: []), extract, formats)


def test_samples_that_are_not_scored_are_left_out_of_every_count():
    numbers = measure(
        answers([[1, 0, 0.4, 0.6], [0, 0, 0, NAN], [1, 1, NAN, NAN], [NAN] * 4]),
        questions(),
        prompts_per_step=4,
    )
    success = numbers["success"]
    assert success["rate"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert (success["at_zero"], success["at_one"]) == pytest.approx((1 / 3, 1 / 3))
    assert success["histogram"].tolist() == [1, 0, 1, 0, 1]
    assert success["unscored"] == pytest.approx(7 / 16)
    # pass@4 and groups of 4 know of the first prompt alone, groups of 2 of the first three.
    assert numbers["pass_at"][4]["value"] == 1
    assert numbers["pass_at"][2]["value"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    pairs, fours = (numbers["degeneracy"][size] for size in (2, 4))
    assert pairs["measured"] == pytest.approx((1 / 3 + 1 + 1) / 3)
    assert pairs["live_groups"] == pytest.approx(4 * (2 / 3) / 3)
    assert fours["measured"] == 0
    assert np.isnan([fours["iid"], fours["gap"], *fours["ci"]]).all()
    assert list(numbers["degeneracy"]) == [2, 4]


def test_a_rate_between_two_counts_stands_at_the_nearer_and_never_at_an_end():
    numbers = measure(
        answers([[1, 1, 1, 1, 1, 1, 0, NAN], [0, 0, 0, 0, 0, 0, 1, NAN]]),
        questions(),
        prompts_per_step=1,
    )
    assert numbers["success"]["histogram"].tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 0]


def test_live_tokens_are_those_of_mixed_groups():
    lengths = np.array([[1, 5, 2, 8], [3, 3, 3, 3]])
    scores = np.array([[1, 0, 0, 1], [1, 1, 1, 1]])
    numbers = measure(answers(scores, lengths=lengths), questions(), prompts_per_step=10)
    pairs = [
        lengths[0][[*pair]].sum() * (scores[0][pair[0]] != scores[0][pair[1]])
        for pair in itertools.combinations(range(4), 2)
    ]
    tokens = 10 * (np.mean(pairs) + 0) / 2
    assert numbers["degeneracy"][2]["live_tokens"] == pytest.approx(tokens)
    assert numbers["format"]["mean_tokens_right"] == pytest.approx((1 + 8 + 12) / 6)
    assert numbers["format"]["mean_tokens_wrong"] == pytest.approx(7 / 2)


def test_diversity_and_format_are_counted_over_texts():
    tagged = "<think>t</think><answer>7</answer>"
    texts = [["7", "7 ", "so 7", "8"], ["", " ", tagged, tagged]]

    def extract(text):
        return next((c for c in text if c.isdigit()), None)

    numbers = measure(
        answers(np.zeros((2, 4)), texts, truncated=[[True, False, False, False], [False] * 4]),
        questions(extract, seven="7"),
        prompts_per_step=1,
    )
    assert numbers["diversity"] == pytest.approx(
        {
            "distinct_completions": (4 + 3) / 2,
            "same_completion": (0 + 1 / 6) / 2,
            "distinct_answers": (2 + 1) / 2,
            "same_answer": (3 / 6 + 1) / 2,
        }
    )
    shares = {"cut": 1 / 8, "blank": 2 / 8, "tags": 2 / 8, "answered": 6 / 8}
    assert {name: numbers["format"][name] for name in shares} == pytest.approx(shares)
    assert np.isnan(numbers["format"]["mean_tokens_right"])
    assert numbers["format"]["formats"]["format/seven"] == pytest.approx(5 / 8)


def test_the_accuracy_of_a_format_is_of_its_samples_that_were_scored():
    texts = [["7", "7", "8", "8"]]
    scored = answers([[1, NAN, NAN, NAN]], texts)
    formats = measure(scored, questions(seven="7"), prompts_per_step=1)["format"]["formats"]
    assert formats["format/seven"] == formats["format/other"] == 0.5
    assert formats["format/seven/accuracy"] == 1, "of the one that was scored"
    assert "format/other/accuracy" not in formats


def test_agreement_is_measured_over_sampled_tokens():
    lengths = np.array([[1, 3], [2, 2]])
    apart = np.array([[[0.5, 9, 9], [0.5] * 3], [[-0.1, -0.1, 9], [-0.1, -0.1, 9]]])
    sampled = answers(np.zeros((2, 2)), lengths=lengths, apart=apart)
    numbers = measure(sampled, questions(), prompts_per_step=1)["agreement"]
    k3 = (4 * (np.exp(0.5) - 1.5) + 4 * (np.exp(-0.1) - 0.9)) / 8
    assert numbers == pytest.approx({"mean": 0.3, "max": 0.5, "kl": k3, "tokens": 8}, abs=1e-6)
    broken = answers(np.zeros((2, 2)), apart=NAN)
    assert np.isnan(measure(broken, questions(), prompts_per_step=1)["agreement"]["max"])


@pytest.mark.slow
def test_confidences_are_judged_where_they_are_stated_and_scored():
    def say(confidence):
        return f"<answer>1</answer><confidence>{confidence}</confidence>"

    texts = [[say(0.9), say(0.6), say("high")], [say(0.2), "no idea", say(1)]]
    numbers = measure(answers([[1, 0, 1], [0, 1, NAN]], texts), questions(), prompts_per_step=1)
    stated = numbers["calibration"]
    assert stated["stated"] == pytest.approx(4 / 6)
    assert stated["mean"] == pytest.approx((0.9 + 0.6 + 0.2 + 1) / 4)
    assert stated["brier"] == pytest.approx((0.1**2 + 0.6**2 + 0.2**2) / 3, abs=1e-6)
    assert stated["ece"] == pytest.approx((0.1 + 0.6 + 0.2) / 3, abs=1e-6)
    assert stated["auroc"] == 1


@pytest.mark.slow
def test_an_interval_reaches_what_the_gap_can_be():
    """Equal prompts at a half and groups of 8 that were never seen to agree: not below 0."""
    scores = np.tile([1, 0] * 8, (30, 1))
    scores[:15, 0] = 0  # so that prompts differ, if hardly
    numbers = measure(answers(scores), questions(), prompts_per_step=1)
    group = numbers["degeneracy"][16]
    assert group["measured"] == 0
    assert group["gap"] < 0 <= group["ci"][1]
    everyone = measure(answers(np.ones((5, 4))), questions(), prompts_per_step=1)
    assert np.isnan(everyone["degeneracy"][2]["ci"]).all()


@pytest.mark.slow
def test_without_a_scored_sample_nothing_is_known():
    numbers = measure(answers(np.full((3, 4), NAN)), questions(), prompts_per_step=8)
    assert numbers["success"]["unscored"] == 1
    assert numbers["success"]["histogram"].tolist() == [0] * 5
    undefined = [numbers["success"]["rate"], numbers["pass_at"][1]["value"]]
    undefined += [numbers["degeneracy"][2][name] for name in ("measured", "live_groups", "lucky")]
    assert np.isnan(undefined).all()
    advice = advise(numbers)
    assert [item.numbers for item in advice] == [("success.unscored",)]
