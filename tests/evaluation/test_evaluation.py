"""The numbers of an evaluation, by hand."""

import functools
import itertools
import math
import sys
from decimal import Decimal

import numpy as np
import pytest
import tiny
from engines import cpu_mesh

from jaxgrpo.evaluation.evaluate import Answers, Questions, batch_size, summarise
from jaxgrpo.evaluation.intervals import bootstrap, read_interval
from jaxgrpo.rewards import Reward, RewardError
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.capacity import fitting_slots


def answers(scores, texts=None):
    scores = np.asarray(scores, np.float32)
    shape = scores.shape
    texts = texts or [["x"] * shape[1]] * shape[0]
    mask = np.ones((*shape, 2), bool)
    zero = np.zeros((*shape, 2))
    return Answers(zero.astype(int), mask, zero, scores < 0, scores, texts)


def questions(count, extract=None, **columns):
    rows = [{"prompt": "p", **{k: v[i] for k, v in columns.items()}} for i in range(count)]
    scorer = Reward("scorer", lambda completions: [0.0] * len(completions))
    return Questions(rows, [], scorer, extract)


@pytest.mark.parametrize("bins", [1, 3, 8])
def test_batches_are_as_few_as_may_be_and_the_last_is_filled_up_with_few(bins):
    for count, most in itertools.product(range(1, 60), range(1, 30)):
        size, largest = batch_size(count, most, bins), -(-most // bins) * bins
        batches = math.ceil(count / size)
        assert size % bins == 0
        assert size <= largest
        assert batches == math.ceil(count / largest)
        assert size * batches - count < batches * bins


def test_slots_for_many_prompts_have_room_beside_the_samples_of_a_batch_and_not_of_all():
    settings, mesh = SamplingSettings(1024, 1.0, (tiny.END,), tiny.PAD), cpu_mesh(1)
    slots = functools.partial(fitting_slots, tiny.model(), settings, mesh)
    assert slots(10**7, 2, 64, 2**26) == 1
    assert slots(10**7, 2, 64, 2**26, rounds=4) == slots(1000, 2, 64, 2**26, rounds=4) == 64
    assert slots(10**7, 2, 64, 2**23, rounds=4) < 64


def test_accuracy_is_greedy_and_split_by_level_and_source():
    labelled = questions(4, level=[1, 1, 2, 2], source=["a", "b", "a", "b"])
    metrics = summarise(answers([[1], [1], [0], [1]]), answers([[1, 0]] * 4), labelled, 2)
    assert metrics["accuracy"] == 0.75
    assert metrics["accuracy/level_1"] == 1
    assert metrics["accuracy/level_2"] == 0.5
    assert metrics["accuracy/source_a"] == 0.5
    assert metrics["accuracy/source_b"] == 1


def test_rows_that_lack_a_level_have_no_accuracy_of_their_own():
    some = questions(3, level=[1, None, 1], source=[None] * 3)
    metrics = summarise(answers([[1], [1], [0]]), answers([[1, 0]] * 3), some, 2)
    assert metrics["accuracy/level_1"] == 0.5
    named = [name for name in metrics if name.startswith(("accuracy/level", "accuracy/source"))]
    assert named == ["accuracy/level_1"]


@pytest.mark.slow
def test_pass_at_k_and_flat_groups_are_unbiased_from_the_counts():
    metrics = summarise(answers([[0], [0]]), answers([[1, 0, 0, 0], [1, 1, 1, 1]]), questions(2), 2)
    assert metrics["pass@1"] == pytest.approx((0.25 + 1) / 2)
    assert metrics["pass@4"] == 1
    # Two of four with one success agree with probability C(3,2)/C(4,2) = 1/2.
    assert metrics["flat_groups"] == pytest.approx((0.5 + 1) / 2)
    assert "flat_groups" not in summarise(
        answers([[0]]), answers([[0, 1]]), questions(1), group_size=3
    )


def test_majorities_appear_only_where_answers_can_be_extracted():
    greedy, sampled = answers([[1]]), answers([[1, 0, 0, 0]], [["a", "b", "b", "b"]])
    assert "maj@4" not in summarise(greedy, sampled, questions(1), 2)
    assert summarise(greedy, sampled, questions(1, extract=str), 2)["maj@4"] == 0


@pytest.mark.parametrize("extract", [float, Decimal])
def test_not_a_number_is_no_answer_and_does_not_vote(extract):
    sampled = answers([[0, 1, 0, 0]], [["nan", "1", "2", "3"]])
    metrics = summarise(answers([[1]]), sampled, questions(1, extract=extract), 2)
    assert (metrics["maj@4"], metrics["distinct_answers"]) == (1, 3)


@pytest.mark.parametrize(
    ("extract", "problem"),
    [
        (lambda text: text.split()[-1], "raised IndexError: list index out of range"),
        (lambda text: [text], "raised TypeError: unhashable type: 'list'"),
        (lambda text: sys.exit(1), "raised SystemExit: 1"),
    ],
    ids=["raises", "list", "exits"],
)
def test_what_reads_answers_and_fails_is_named_with_a_completion(extract, problem):
    """As a reward that fails: a run saves the step that it evaluates."""
    sampled = answers([[1, 0]], [["", ""]])
    message = rf"<lambda>, which reads the answer of a completion, {problem}.*completion is '': ret"
    with pytest.raises(RewardError, match=message):
        summarise(answers([[1]]), sampled, questions(1, extract=extract), 2)


def test_half_a_surrogate_pair_in_a_label_is_written_in_escapes():
    """No tracker takes it, and JSON can hold it."""
    labelled = questions(1, source=["a\udcff"])
    metrics = summarise(answers([[1]]), answers([[1, 0]]), labelled, 2)
    assert metrics["accuracy/source_a\\udcff"] == 1


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
    assert bootstrap(np.ones(5)).tolist() == [1, 1]


def test_where_no_prompt_or_every_one_is_solved_the_interval_knows_how_few_they_are():
    metrics = summarise(answers([[1]] * 20), answers([[0, 0]] * 20), questions(20), 2)
    reach = 1 - 0.025 ** (1 / 20)  # (1 - m)^P = .025
    assert [metrics["accuracy/low"], metrics["accuracy/high"]] == pytest.approx([1 - reach, 1])
    assert [metrics["pass@1/low"], metrics["pass@1/high"]] == pytest.approx([0, reach])


def test_what_a_scorer_could_not_score_is_no_success_and_is_counted():
    metrics = summarise(answers([[np.nan]]), answers([[np.nan, 1]]), questions(1), 2)
    assert metrics["accuracy"] == 0
    assert metrics["pass@1"] == 0.5
    assert metrics["unscored"] == 0.5


def rescored(shape, **values):
    return {name: np.broadcast_to(value, shape) for name, value in values.items()}


@pytest.mark.slow
def test_a_second_pass_adds_votes_by_confidence_and_the_kl_to_the_base():
    texts = [["7", "8", "8", "8"], ["1", "2", "3", "4"]]
    sampled = answers([[1, 0, 0, 0], [0, 1, 0, 0]], texts)
    # Two tokens each; the sure one of the first prompt is right, that of the second wrong.
    sure = np.array([[9.0, 1, 1, 1], [9, 1, 1, 1]])[..., None]
    gaps = np.array([[0.5, -0.5, 1, 1], [0, 0, 0, 4]])[..., None]
    more = rescored((2, 4, 2), confidence=sure, kl=0.75, clamped=0.25, logp_gap=gaps)
    metrics = summarise(
        answers([[1], [1]]), sampled._replace(rescored=more), questions(2, extract=str), 2
    )
    assert metrics["maj@4"] == 0
    for name in ("mean", "least", "bottom", "tail"):
        assert metrics[f"deepconf@4/{name}"] == 0.5
        # Of 2 right and 6 wrong: one right one is above all but one tie, the other ties with five.
        assert metrics[f"deepconf/{name}/auroc"] == pytest.approx((5.5 + 2.5) / 12)
    assert metrics["kl_to_base"] == metrics["kl_to_base/low"] == pytest.approx(1.5)
    assert metrics["kl_to_base_estimated"] == pytest.approx((2 * 0.5 + 2 * 1) / 2)
    assert metrics["kl_to_base_clamped"] == 0.25


def test_nothing_of_a_second_pass_is_said_without_one():
    sampled = answers([[1, 0, 0, 0]], [["1", "2", "2", ""]])
    metrics = summarise(answers([[1]]), sampled, questions(1, extract=lambda t: t or None), 2)
    assert not [name for name in metrics if "deepconf" in name or "kl_to" in name]
    assert not [name for name in metrics if name.startswith(("brier", "format", "confidence"))]
    assert metrics["distinct_answers"] == 2
    assert metrics["distinct_completions"] == 1  # the tokens are all the same


def test_the_distance_at_one_prompt_has_no_interval():
    """Without width it would say that the distance is known; that of a share is Hoeffding's."""
    more = rescored((1, 2, 2), kl=0.75, clamped=0.0, logp_gap=0.5)
    sampled = answers([[1, 0]])._replace(rescored=more)
    metrics = summarise(answers([[1]]), sampled, questions(1), 3)
    assert metrics["kl_to_base"] == 1.5
    assert read_interval(metrics, "kl_to_base") is None
    assert read_interval(metrics, "pass@1") == pytest.approx((0, 1), abs=0.2)
