"""`consensus`: the majority's answer, group by group, however groups are cut into calls."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
import small_run

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.tasks import tasks
from jaxgrpo.rewards import Reward, RewardError, build, call_rewards
from jaxgrpo.rewards.consensus import AGREEMENT
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.loop import train


def called(texts, groups, extract="gsm8k_answer"):
    rewards = [Reward("consensus", build("consensus", extract=extract))]
    count = len(texts)
    scores, log = call_rewards(rewards, [""] * count, texts, [[1]] * count, {}, group_ids=groups)
    return scores["consensus"].tolist(), log.numbers()


def test_it_is_the_indicator_of_the_majority_of_each_group():
    draw = random.Random(0)
    texts = [draw.choice(["so 1", "so 2", "3", "none", "#### 2"]) for _ in range(400)]
    groups = [place // 8 for place in range(400)]
    scores, metrics = called(texts, groups)
    agreement = []
    for group in range(50):
        answers = [text.split(" ")[-1] for text in texts[8 * group : 8 * group + 8]]
        votes = collections.Counter(answer for answer in answers if answer != "none")
        # max takes the first of several: the answer that was given first.
        winner = max(votes, key=votes.__getitem__)
        expected = [float(answer == winner) for answer in answers]
        assert scores[8 * group : 8 * group + 8] == expected
        agreement.append(votes[winner] / 8)
    assert metrics[AGREEMENT] == pytest.approx(np.mean(agreement))


def test_without_any_answer_nobody_is_paid_and_nobody_agrees():
    assert called(["none", "no number"], [0, 0]) == ([0.0, 0.0], {AGREEMENT: 0.0})


@pytest.mark.parametrize("task", tasks.values(), ids=lambda task: task.name)
def test_texts_without_an_answer_do_not_vote_for_having_none(task):
    """Else a policy that ends at once would earn all there is."""
    assert called([""] * 3, [0] * 3, task.name) == ([0.0] * 3, {AGREEMENT: 0.0})


def test_equal_answers_of_different_prompts_do_not_vote_together():
    assert called(["1", "2", "2", "1", "1", "2"], [0, 0, 0, 1, 1, 1])[0] == [0, 1, 1, 1, 1, 0]


@pytest.mark.slow
def test_a_way_to_read_answers_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(RewardError, match=r"rewards\.consensus: .*did you mean 'arithmetic'"):
        build("consensus", extract="aritmetic")
    with pytest.raises(InputError, match="keep_samples: count = 9, but a group has 4 samples"):
        train(small_run.config(tmp_path / "run", recipe={"use": "ttrl", "count": 9}))


@pytest.mark.full
@pytest.mark.slow
def test_a_run_votes_over_all_samples_and_trains_on_the_first(tmp_path):
    """Groups judged as they end, or all at once: the same. What the others answered has no weight
    but in the vote: the update is that of a run whose other samples are scored 0."""
    changes = {
        "rewards": [{"use": "consensus", "extract": "arithmetic"}],
        "recipe": {"use": "ttrl", "count": 2},
        "run.samples_every": 1,
    }
    runs = [
        train(small_run.config(tmp_path / name, **changes, **{"rollout.overlap_rewards": early}))
        for name, early in (("early", True), ("late", False))
    ]
    assert parameter_hash(runs[0].learner.trainable) == parameter_hash(runs[1].learner.trainable)
    rows = runs[0].samples
    assert {row["advantage"] for row in rows if row["sample"] >= 2} == {0.0}
    assert {row["rewards"]["consensus"] for row in rows} == {0.0, 1.0}
    lines = small_run.metrics(runs[0].path)
    assert all(0 < line[AGREEMENT] <= 1 for line in lines)
