"""Which rewards judge groups that have ended while others decode, and that it changes nothing."""

import dataclasses
import time

import by_hand
import numpy as np
import pytest
import small_run

from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

MANY = {
    "rollout.prompts_per_step": 24,
    "rollout.slots": 4,
    "rollout.segment_tokens": 2,
    "rollout.max_completion_tokens": 12,
    "train.steps": 1,
}
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(24)]


def collected(folder, *rewards, overlap=True):
    """What a step collects, and when its sampling ended."""
    changes = {**MANY, "rollout.overlap_rewards": overlap}
    run = setup(small_run.config(folder, **changes), rewards=rewards, dataset=ROWS)
    ended = []

    def draw(params, prompts, key):
        drawing = run.collector.source.draw(params, prompts, key)

        def rollouts():
            ended.append(time.monotonic())
            return drawing.rollouts()

        return drawing._replace(rollouts=rollouts)

    collector = dataclasses.replace(run.collector, source=run.collector.source._replace(draw=draw))
    _, collection = by_hand.collect(run._replace(collector=collector), run.learner, run.stream)
    return collection, ended[0]


@pytest.mark.full
def test_a_reward_that_waits_hides_behind_decoding_and_changes_nothing(tmp_path):
    calls = []

    def waits(completions, log_extra, log_metric, **_):
        began = time.monotonic()
        time.sleep(0.02)
        calls.append((began, len(completions)))
        log_extra("text", completions)
        log_metric("calls", 1)
        return [float(len(text)) for text in completions]

    waits.per_sample = True
    sequential, _ = collected(tmp_path / "whole", waits, overlap=False)
    assert [count for _, count in calls] == [24 * 4]
    calls.clear()
    overlapped, ended = collected(tmp_path / "parts", waits)
    assert sum(count for _, count in calls) == 24 * 4
    assert sum(began < ended for began, _ in calls) >= 2
    np.testing.assert_array_equal(
        overlapped.rollouts.rewards["waits"], sequential.rollouts.rewards["waits"]
    )
    assert overlapped.reward_log.extra == sequential.reward_log.extra
    assert overlapped.reward_log.numbers() == sequential.reward_log.numbers()
    # What is logged counts once per completion, in parts or not: rounds of a step add up.
    for log in (overlapped.reward_log, sequential.reward_log):
        assert [count for _, count in log.metrics.values()] == [24 * 4]


@pytest.mark.full
def test_a_reward_that_compares_samples_gets_the_whole_step_beside_one_that_does_not(tmp_path):
    calls = []

    def centred(completions, log_extra, **_):
        calls.append(len(completions))
        lengths = np.array([len(text) for text in completions])
        log_extra("text", completions)
        return lengths - lengths.mean()

    def each(completions, log_extra, **_):
        log_extra("text", completions)
        return [float(len(text)) for text in completions]

    each.per_sample = True
    overlapped, _ = collected(tmp_path / "parts", centred, each)
    assert calls == [24 * 4]
    lengths = np.asarray(overlapped.rollouts.rewards["each"])
    np.testing.assert_allclose(
        overlapped.rollouts.rewards["centred"], lengths - lengths.mean(), rtol=0, atol=1e-5
    )
    texts = overlapped.reward_log.extra["each/text"]
    assert texts == overlapped.reward_log.extra["centred/text"]
    assert [len(text) for text in texts] == lengths.ravel().tolist()


def test_a_reward_that_fails_ends_the_step_before_its_last_sample(tmp_path):
    def breaks(completions, **_):
        raise OSError("no grader here")

    breaks.per_sample = True
    with pytest.raises(RewardError, match=r"breaks raised OSError .*no grader here"):
        collected(tmp_path / "r", breaks)
