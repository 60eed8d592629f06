"""`flip`: the stated share of 0/1 rewards is flipped; what is drawn depends on its place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jaxgrpo.rewards import Reward, RewardError, RewardLog, flipped

LOG = RewardLog({}, {"own": (3.0, 2)}, {}, {})
NEVER: Any = len
"""A reward's function that is not called."""


def turn(value, flip=0.07, seed=0, step=0, ordinal=None, name="right"):
    ordinal = np.arange(len(value)) if ordinal is None else ordinal
    scores, log = flipped({name: value}, LOG, [Reward(name, NEVER, flip=flip)], seed, step, ordinal)
    return scores[name], log


@pytest.mark.parametrize("flip", [0.07, 0.5])
def test_the_stated_share_is_flipped_and_reported(flip):
    value = np.random.default_rng(0).integers(0, 2, (2000, 8)).astype(np.float32)
    noisy, log = turn(value, flip)
    share = (noisy != value).mean()
    assert share == pytest.approx(flip, abs=4 * math.sqrt(flip * (1 - flip) / value.size))
    np.testing.assert_array_equal(noisy[noisy != value], 1 - value[noisy != value])
    assert log.numbers() == pytest.approx({"own": 1.5, "rewards/right/flipped": share})
    assert noisy.dtype == np.float32


def test_a_sample_meets_the_same_noise_whatever_stands_beside_it():
    zero = np.zeros((50, 4), np.float32)
    full_batch, _ = turn(zero, 0.3)
    part, _ = turn(zero[:5], 0.3, ordinal=np.arange(20, 25))
    np.testing.assert_array_equal(part, full_batch[20:25])
    smaller, _ = turn(zero[:, :2], 0.3)
    np.testing.assert_array_equal(smaller, full_batch[:, :2])
    changes: list[dict[str, Any]] = [{"seed": 1}, {"step": 1}, {"name": "else"}]
    for change in changes:
        assert (turn(zero, 0.3, **change)[0] != full_batch).any()


def test_what_is_unscored_stays_so_and_other_rewards_are_left_alone():
    value = np.array([[np.nan, 1.0, np.nan, 0.0]], np.float32)
    rewards = [Reward("a", NEVER, flip=0.5), Reward("b", NEVER)]
    scores, log = flipped({"a": value, "b": value}, LOG, rewards, 0, 0, np.arange(1))
    np.testing.assert_array_equal(np.isnan(scores["a"]), np.isnan(value))
    assert scores["b"] is value
    assert "rewards/b/flipped" not in log.metrics
    assert log.metrics["rewards/a/flipped"][1] == 2


def test_a_reward_that_is_not_0_or_1_is_refused():
    with pytest.raises(RewardError, match=r"rewards\.right gave 0\.5, and flip = 0\.07"):
        turn(np.array([[0.0, 0.5]], np.float32))
