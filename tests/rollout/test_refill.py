"""Dynamic sampling on rollouts made by hand: who is used, left over and discarded, and the log."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.types import Stream, Waiting
from jaxgrpo.rewards.calling import RewardLog
from jaxgrpo.rollout.refill import Verdict, fill, max_rounds, no_groups, plan
from jaxgrpo.update.diagnostics import weighted_sum
from jaxgrpo.update.packing import Geometry

NAN = np.nan
FLAT, LIVE = [1.0, 1.0], [0.0, 1.0]
GEOMETRY = Geometry(3, 2, 6, 5, 1, 15)


def test_live_groups_are_used_oldest_first_and_the_rest_of_them_is_left_over():
    used, leftover, discarded, shortfall = plan(np.array([1, 0, 1, 1, 0, 1], bool), need=2)
    assert used.tolist() == [0, 2]
    assert leftover.tolist() == [3, 5]
    assert discarded.tolist() == [1, 4]
    assert shortfall == 0


def test_flat_groups_fill_what_is_missing_and_stand_last():
    used, leftover, discarded, shortfall = plan(np.array([0, 1, 0, 0, 1], bool), need=4)
    assert used.tolist() == [1, 4, 0, 2]
    assert leftover.tolist() == []
    assert discarded.tolist() == [3]
    assert shortfall == 2


def test_every_group_is_used_left_over_or_discarded_and_the_used_are_as_many_as_needed():
    rng = np.random.default_rng(0)
    for _ in range(200):
        need = int(rng.integers(1, 9))
        live = rng.random(need + int(rng.integers(0, 30))) < rng.random()
        planned = plan(live, need)
        everyone = np.concatenate(planned[:3])
        assert sorted(everyone.tolist()) == list(range(len(live)))
        assert len(planned.used) == need
        assert live[planned.used].sum() == need - planned.shortfall == min(need, live.sum())
        assert live[planned.leftover].all()
        assert not live[planned.discarded].any()
        assert not (planned.shortfall and len(planned.leftover))


def test_a_budget_is_counted_in_whole_rounds():
    assert [max_rounds(factor) for factor in (1.0, 1.9, 2.0, 3.5)] == [1, 1, 2, 3]


def filled(step, rounds, waiting=None, factor=9, reverse=False):
    """What is left over and what `fill` returns for rounds of rewards [3, 2], and unused rounds.

    Live are groups whose first reward is 0, or the others. Ordinals are 100 * step + the number of
    the group in that step.
    """
    left = list(rounds)

    def generate(stream):
        number = len(rounds) - len(left)
        rollouts = tiny.rollouts(np.array(left.pop(0)), seed=number)
        rollouts = dataclasses.replace(rollouts, ordinal=100 * step + 3 * number + np.arange(3))
        versions = np.full((3, 2), step, np.int32)
        rollouts = dataclasses.replace(rollouts, step=np.int32(step), policy_version=versions)
        rollouts = dataclasses.replace(rollouts, ordinal=rollouts.ordinal.astype(np.int32))
        columns = {"reward": {"letters": [f"{number}.{place}" for place in range(6)]}}
        return stream, rollouts, RewardLog(columns, {"length": (6.0, 3)}, {"reward": number}, {})

    def judge(rollouts):
        total, scored = map(np.asarray, weighted_sum(rollouts.rewards, None))
        return Verdict((total[:, 0] != 0) == reverse, total, scored)

    stream, used, reward_log, metrics = fill(stream_with(waiting), generate, judge, factor)
    leftover: Any = stream.waiting.leftover
    return leftover, used, reward_log, finalise(metrics), left


def stream_with(leftover=None):
    leftover = no_groups(GEOMETRY, ("reward",), {}) if leftover is None else leftover
    waiting = Waiting(leftover)
    return Stream(cursor=None, key=None, prompt_policy_state=None, waiting=waiting)  # type: ignore[arg-type]


@pytest.mark.slow
def test_rounds_go_on_until_the_step_is_full_and_the_rest_opens_the_next_step():
    rounds = [[FLAT, LIVE, FLAT], [FLAT, FLAT, LIVE], [LIVE, LIVE, LIVE], [LIVE] * 3]
    leftover, used, reward_log, metrics, left = filled(7, rounds)
    assert len(left) == 1
    assert used.ordinal.tolist() == [701, 705, 706]
    assert metrics["refill/groups"] == 9
    assert metrics["refill/discarded_groups"] == 4
    assert (metrics["refill/shortfall"], metrics["refill/leftover"]) == (0, 2)
    assert metrics["refill/older"] == 0
    assert metrics["refill/frac_reward_zero_std"] == pytest.approx(4 / 9)
    assert metrics["refill/reward"] == pytest.approx((4 * 1 + 5 * 0.5) / 9)
    assert reward_log.metrics == {"length": (18.0, 9)}
    assert reward_log.failed == {"reward": 3}
    assert reward_log.extra["letters"] == ["0.2", "0.3", "1.4", "1.5", "2.0", "2.1"]

    assert leftover.ordinal.tolist() == [707, 708, -1]
    after, used, reward_log, metrics, _ = filled(8, [[LIVE, FLAT, LIVE]], leftover)
    assert used.ordinal.tolist() == [707, 708, 800]
    assert used.policy_version[:, 0].tolist() == [7, 7, 8]
    assert used.step == 8
    assert metrics["refill/older"] == pytest.approx(2 / 3)
    assert metrics["refill/groups"] == 3
    assert reward_log.extra["letters"] == [None] * 4 + ["0.0", "0.1"]
    assert after.ordinal.tolist() == [802, -1, -1]
    third = tiny.rollouts(np.array(rounds[2]), seed=2)
    for name in ("completion_tokens", "token_mask", "behavior_logp", "prompt_tokens"):
        np.testing.assert_array_equal(getattr(used, name)[:2], getattr(third, name)[1:])


@pytest.mark.slow
def test_where_the_budget_is_spent_flat_groups_fill_the_step_and_the_shortfall_is_logged():
    rounds = [[FLAT, LIVE, FLAT], [FLAT, FLAT, FLAT], [LIVE] * 3]
    leftover, used, _, metrics, left = filled(0, rounds, factor=2)
    assert len(left) == 1
    assert used.ordinal.tolist() == [1, 0, 2]
    assert metrics["refill/shortfall"] == 2
    assert metrics["refill/discarded_groups"] == 3
    second = tiny.rollouts(np.array(rounds[1]), seed=1)
    assert metrics["refill/discarded_tokens"] == second.token_mask.sum()
    first = tiny.rollouts(np.array(rounds[0]), seed=0)
    assert metrics["num_tokens"] == first.token_mask.sum() + second.token_mask.sum()
    assert (leftover.ordinal == -1).all()


def test_groups_of_equal_rewards_may_be_live_and_are_counted_as_equal_all_the_same():
    unscored = [1.0, NAN]
    rounds = [[FLAT, LIVE, unscored]]
    _, used, _, metrics, _ = filled(0, rounds, factor=1, reverse=True)
    assert used.ordinal.tolist() == [0, 2, 1]
    assert metrics["refill/shortfall"] == 1
    assert metrics["refill/frac_reward_zero_std"] == pytest.approx(2 / 3)
    _, used, _, metrics, _ = filled(0, [[[NAN, NAN], LIVE, FLAT]], factor=1)
    assert metrics["refill/frac_reward_zero_std"] == pytest.approx(1 / 2)


def test_what_is_left_over_keeps_its_shapes_and_dtypes_so_that_a_checkpoint_restores_it():
    def described(groups):
        named = jax.tree.leaves_with_path(groups)
        return [(jax.tree_util.keystr(path), leaf.dtype, leaf.shape) for path, leaf in named]

    for rounds in ([[LIVE] * 3], [[FLAT, LIVE, LIVE], [LIVE] * 3], [[FLAT] * 3]):
        after, *_ = filled(3, rounds, factor=len(rounds))
        assert described(after) == described(stream_with().waiting.leftover)
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(after))


def test_rollouts_that_do_not_fit_the_room_are_refused_by_name():
    room = no_groups(GEOMETRY, ("other",), {})
    with pytest.raises(ValueError, match=r"rollout.refill: .*\.rewards\['other'\].*no_groups"):
        filled(0, [[LIVE] * 3], room)
