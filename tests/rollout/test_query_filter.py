"""DRO's query filter: scripted ranks over several rounds against plain Python."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import ConfigError
from jaxgrpo.core.types import Rollouts
from jaxgrpo.rollout.policies import build_policy, query_filter
from jaxgrpo.rollout.selection import row_of

ROWS, SEED, G, J, N = 30, 7, 3, 10, 6


def groups(row, step, ranks, mask=None, logp=None):
    """Rollouts of groups of these rows, with ranks [P, G, J] of their answers' tokens."""
    empty = dict.fromkeys(Rollouts.__dataclass_fields__)
    ranks = np.asarray(ranks, np.float32)
    mask = np.ones((len(ranks), ranks.shape[2]), bool) if mask is None else np.asarray(mask)
    fields = {"answer_rank": ranks, "answer_mask": mask}
    if logp is not None:
        fields["answer_logp"] = np.asarray(logp, np.float32)
    changes = {"row": np.asarray(row, np.int32), "step": np.asarray(step, np.int32)}
    return Rollouts(**{**empty, **changes, "fields": fields})


def eligible(policy, state, n=1):
    return np.flatnonzero(policy.chance(state, n)).tolist()


def test_a_row_is_dropped_if_no_thought_brings_its_worst_tokens_below_k():
    """Of 10 tokens the worst 3 count; padding does not."""
    policy = query_filter(top_k=4.0, share=0.3)
    worst = lambda *three: [[0.0] * 7 + [float(rank) for rank in three]]  # noqa: E731
    ranks = np.zeros((5, 2, J))
    ranks[0] = np.concatenate([worst(4, 4, 4), worst(3, 4, 5)])  # means 4 and 4
    ranks[1] = np.concatenate([worst(90, 90, 90), worst(3, 4, 4)])  # 11/3 by the second thought
    ranks[2] = np.concatenate([worst(12, 0, 0), worst(0, 0, 12)])  # 4, wherever the token is
    ranks[3] = np.concatenate([worst(0, 0, 11), worst(99, 99, 99)])
    ranks[4] = 1e4  # beyond its answer of four tokens, of which the worst two count: 3.5
    ranks[4, :, :4] = [7, 0, 0, 0]
    mask = np.ones((5, J), bool)
    mask[4, 4:] = False
    state = policy.observe(policy.init(6, 0), groups([0, 1, 2, 3, 4], 0, ranks, mask))
    np.testing.assert_allclose(state["rank"], [4, 11 / 3, 4, 11 / 3, 3.5, np.nan], rtol=1e-6)
    assert eligible(policy, state) == [1, 3, 4, 5]


def test_of_the_rows_that_pass_those_of_the_lowest_spread_are_dropped_too():
    policy = query_filter(top_k=4.0, share=1.0, drop=0.4)
    assert policy.needs == {"answer_rank", "answer_mask", "answer_logp"}
    spreads = [0.5, 0.1, 0.3, 0.2, 9.0]
    logp = np.zeros((5, 2, 3))
    logp[:, 0, 1] = -2 * np.array(spreads)  # a deviation of `spreads` at one token
    logp[:, 0, 2] = -100.0  # padding
    ranks = np.zeros((5, 2, 3))
    ranks[4] = 5.0  # too hard, however much it varies
    mask = np.broadcast_to(np.arange(3) < 2, (5, 3))
    state = policy.observe(policy.init(6, 0), groups(np.arange(5), 0, ranks, mask, logp))
    np.testing.assert_allclose(state["spread"], [*spreads, 0.0], rtol=1e-6)
    assert eligible(policy, state) == [0, 2, 3, 5]  # of four rows 1.6, so one
    everything = policy.observe(state, groups([5, 5], 0, ranks[:2], mask[:2], logp[:2]))
    assert eligible(policy, everything) == [0, 2, 3]  # of five rows two


def splitmix(value):
    """One step of SplitMix64 (Steele 2014), in whole numbers of Python."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


class Oracle:
    """The filter with sets and dicts, row by row."""

    def __init__(self, top_k, share, every, carry):
        self.top_k, self.share, self.every, self.carry = top_k, share, every, carry
        self.judged, self.carried, self.round = {}, set(), 0

    def stays(self, row):
        return row in self.carried or self.judged.get(row, -1) < self.top_k

    def observe(self, rows, step, ranks):
        if step // self.every > self.round:
            self.round = step // self.every
            members = [r for r in range(ROWS) if r in self.carried or self.judged.get(r, 1e9) < 1e9]
            members = [row for row in members if self.stays(row)]
            start = splitmix(SEED ^ 0x5851F42D4C957F2D)
            number = {
                row: splitmix((start + (self.round * ROWS + row) * 0x9E3779B97F4A7C15) % 2**64)
                for row in members
            }
            members.sort(key=lambda row: number[row] >> 11)
            self.carried = set(members[: math.floor(self.carry * len(members) + 0.5)])
            self.judged = {}
        for row, group in zip(rows, ranks, strict=True):
            count = math.ceil(round(self.share * J, 6))
            self.judged[row] = min(sum(sorted(sample)[-count:]) / count for sample in group)


def scripted(step, rows):
    """A third of the rows is hard, a third in every second round."""
    rng = np.random.default_rng(100 + step)
    hard = np.where(rows % 3 == 0, 9, np.where(rows % 3 == 1, 1 + 8 * (step // 12 % 2), 1))
    return rng.poisson(hard[:, None, None], (len(rows), G, J))


def run(policy, state, cursor, steps):
    """States, cursors and rows of some steps."""
    for step in steps:
        ordinals = policy.select(state, cursor, N)
        cursor, rows = int(ordinals.max()) + 1, row_of(ordinals, ROWS, SEED)
        ranks = scripted(step, rows)
        state = policy.observe(state, groups(rows, step, ranks))
        yield state, cursor, rows, ranks


def test_the_rows_that_stay_over_several_rounds_are_those_of_an_oracle():
    options = {"top_k": 5.0, "share": 0.25, "every": 12, "carry": 0.2}
    policy, oracle = build_policy({"use": "query_filter", **options}, {"r": 1.0}), Oracle(**options)
    dropped, carried = [], []
    for step, (state, _, rows, ranks) in enumerate(
        run(policy, policy.init(ROWS, SEED), 0, range(60))
    ):
        before = [row for row in range(ROWS) if oracle.stays(row)]
        assert len(before) >= N
        assert set(rows.tolist()) <= set(before)
        oracle.observe(rows.tolist(), step, ranks.tolist())
        stays = [row for row in range(ROWS) if oracle.stays(row)]
        if len(stays) >= N:
            assert eligible(policy, state, N) == stays, step
        assert np.flatnonzero(state["carried"]).tolist() == sorted(oracle.carried)
        assert int(state["round"]) == step // 12
        dropped.append(ROWS - len(stays))
        carried.append([row for row in oracle.carried if oracle.judged.get(row, 0) >= 5])
    assert max(dropped) > 8
    assert min(dropped[1:]) == 0  # a round begins with all rows
    assert any(carried)  # a row that fails and stays, since it was carried over


def test_a_choice_depends_on_state_and_cursor_alone_and_state_keeps_its_form():
    policy = query_filter(top_k=5.0, share=0.25, every=5, carry=0.5)
    state = policy.init(ROWS, SEED)
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    states = [*run(policy, state, 0, range(20))]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), states[-1][0]) == form
    saved, cursor = jax.tree.map(np.copy, states[8][0]), states[8][1]
    for (left, *_), (right, *_) in zip(
        states[9:], run(query_filter(5.0, 0.25, 5, 0.5), saved, cursor, range(9, 20)), strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, left, right)


def test_if_too_few_rows_are_left_the_least_hard_come_back_and_without_rounds_verdicts_stay():
    policy = query_filter(top_k=1.0, share=1.0, every=0)
    ranks = np.broadcast_to(np.array([5.0, 2.0, 9.0, 3.0])[:, None, None], (4, G, J))
    state = policy.observe(policy.init(4, SEED), groups(np.arange(4), 1000, ranks))
    assert eligible(policy, state, 2) == [1, 3]
    assert set(row_of(policy.select(state, 0, 2), 4, SEED).tolist()) == {1, 3}


@pytest.mark.parametrize(
    "spec",
    [{"top_k": 0}, {"share": 0.0}, {"share": 1.5}, {"every": -1}, {"carry": 2.0}, {"drop": 1.0}],
)
def test_numbers_that_mean_nothing_are_refused(spec):
    with pytest.raises(ConfigError, match=r"query_filter: top_k = .* expected top_k > 0"):
        configs.from_dict({"rollout": {"prompts": {"use": "query_filter", **spec}}})
