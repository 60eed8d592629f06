"""Prompt policies with memory: what they leave out, that they end, and that they repeat."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxgrpo.config import files as configs
from jaxgrpo.config import own_code
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.core.types import REPLAYED, Rollouts
from jaxgrpo.rollout.drift import DRIFT, Drift
from jaxgrpo.rollout.policies import (
    build_policy,
    difficulty_band,
    no_positive_resampling,
    policies,
    spo_priority,
)
from jaxgrpo.rollout.selection import PromptPolicy, row_of, sequential

NAN = np.nan
ROWS, SEED = 20, 5


def groups(row, **rewards):
    """Rollouts of groups of these rows, with named rewards [P, G]."""
    empty = {**dict.fromkeys(Rollouts.__dataclass_fields__), "fields": {}}
    named = {name: np.asarray(value, np.float32) for name, value in rewards.items()}
    return Rollouts(**{**empty, "row": np.asarray(row, np.int32), "rewards": named})


def knowing(policy, rates, seed=SEED):
    """The state of a policy that knows these rates, NaN where it knows none."""
    state = policy.init(len(rates), seed)
    return {**state, "rate": np.asarray(rates, np.float32)}


def drawn(policy, state, n, steps, cursor=0):
    """The ordinals of some steps, observed by nobody."""
    selected = []
    for _ in range(steps):
        ordinals = policy.select(state, cursor, n)
        assert ordinals.shape == (n,)
        assert ordinals.dtype == np.int32
        assert (np.diff(ordinals) > 0).all()
        assert ordinals[0] >= cursor
        selected.append(ordinals)
        cursor = int(ordinals.max()) + 1
    return np.concatenate(selected)


@pytest.mark.parametrize("make", [no_positive_resampling, difficulty_band])
def test_without_knowledge_every_row_comes_as_in_the_plain_stream(make):
    policy = make()
    ordinals = drawn(policy, policy.init(ROWS, SEED), 5, steps=8)
    np.testing.assert_array_equal(ordinals, np.arange(40))


def row_chances(policy):
    """The chances of a policy that has them."""
    assert policy.chance is not None
    return policy.chance


def test_a_solved_row_leaves_later_epochs_and_the_others_keep_their_order():
    policy = no_positive_resampling(threshold=0.75)
    state = policy.init(ROWS, SEED)
    half = [[1.0, 1.0, 0.0, 0.0]]
    state = policy.observe(state, groups([3, 7, 8], score=[*half, [1, 1, 1, 0], [NAN] * 4]))
    ordinals = drawn(policy, state, 19, steps=2)
    eligible = [i for i in range(40) if row_of(i, ROWS, SEED) != 7]
    assert ordinals.tolist() == eligible
    assert row_chances(policy)(state, 4).tolist() == [float(row != 7) for row in range(ROWS)]


def test_the_rate_of_a_group_is_of_scored_samples_and_the_weighted_sum_judges():
    """correct + 0.2 style at 0.5 or more; a reward of weight 0 is not read."""
    rewards = {
        "correct": [[1.0, 0.0, NAN, 0.0], [0.4, 0.4, 0.0, 0.0]],
        "style": [[0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, NAN]],
        "length": [[NAN] * 4, [NAN] * 4],
    }
    weights = {"correct": 1.0, "style": 0.2, "length": 0.0}
    policy = no_positive_resampling(weights=weights)
    state = policy.observe(policy.init(3, 0), groups([2, 0], **rewards))
    np.testing.assert_allclose(state["rate"], [1 / 3, NAN, 1 / 3], rtol=1e-6)
    policy = no_positive_resampling(reward="style", success=1.0)
    state = policy.observe(policy.init(3, 0), groups([2, 0], **rewards))
    np.testing.assert_allclose(state["rate"], [2 / 3, NAN, 3 / 4], rtol=1e-6)
    with pytest.raises(InputError, match="no reward 'stile'; did you mean 'style'"):
        no_positive_resampling(reward="stile").observe(state, groups([2, 0], **rewards))


def test_a_reward_or_rate_at_the_threshold_has_reached_it():
    """0.9 as float32 is less than 0.9."""
    policy = no_positive_resampling(threshold=0.9, success=0.9)
    state = policy.observe(policy.init(2, 0), groups([1], r=[[0.9] * 9 + [0.8]]))
    assert row_chances(policy)(state, 1).tolist() == [1, 0]


def test_rates_are_a_running_mean_and_a_row_drawn_twice_is_seen_twice():
    policy = difficulty_band(decay=0.5)
    state = policy.observe(policy.init(3, 0), groups([1, 1, 0], r=[[1, 0], [1, 1], [0, 0]]))
    np.testing.assert_allclose(state["rate"], [0.0, 0.75, NAN])
    after = policy.observe(state, groups([1], r=[[0, 0]]))
    np.testing.assert_allclose(after["rate"], [0.0, 0.375, NAN])
    np.testing.assert_allclose(state["rate"], [0.0, 0.75, NAN])  # pure: the old state stays


def test_where_the_chain_sums_what_scored_a_sample_the_rate_is_of_that_sum():
    sums, words = [[1, 0, NAN], [NAN, NAN, NAN]], [[NAN, NAN, NAN], [0.5, 1, NAN]]
    weights = {"sums": 1.0, "words": 0.6, "length": 0.0}
    rewards = {"sums": sums, "words": words, "length": np.ones((2, 3))}
    for add_scored, rates in ((True, [0.5, 0.5, NAN]), (False, [NAN, NAN, NAN])):
        policy = build_policy({"use": "difficulty_band"}, weights, sum_scored=add_scored)
        state = policy.observe(policy.init(3, 0), groups([0, 1], **rewards))
        np.testing.assert_allclose(state["rate"], rates)


def test_right_samples_of_earlier_steps_are_in_no_rate():
    replayed = {REPLAYED: np.array([[False, False, True], [False, False, True]])}
    group = groups([2, 0], r=[[0, 1, 1], [NAN, NAN, 1]])
    policy = difficulty_band()
    state = policy.observe(policy.init(3, 0), dataclasses.replace(group, fields=replayed))
    np.testing.assert_allclose(state["rate"], [NAN, NAN, 0.5])


def test_when_too_few_rows_are_left_the_least_solved_come_back():
    policy = no_positive_resampling(threshold=0.9)
    rates = np.full(10, 1.0)
    rates[[2, 5, 6]] = [0.1, 0.95, 0.9]  # 2 is eligible; 6, then 5 are the least solved
    state = knowing(policy, rates)
    rows = row_of(drawn(policy, state, 3, steps=4), 10, SEED)
    assert set(rows.tolist()) == {2, 5, 6}
    everything = row_of(drawn(policy, knowing(policy, np.ones(10)), 4, steps=1), 10, SEED)
    assert set(everything.tolist()) <= {0, 1, 2, 3}
    assert len(drawn(policy, knowing(policy, np.ones(2)), 5, steps=3)) == 15


def test_outside_the_band_the_nearest_come_back():
    policy = difficulty_band(low=0.2, high=0.8)
    state = knowing(policy, [0.0, 0.15, 0.5, 0.9, 1.0, NAN])
    assert row_chances(policy)(state, 2).tolist() == [0, 0, 1, 0, 0, 1]
    assert row_chances(policy)(state, 4).tolist() == [0, 1, 1, 1, 0, 1]
    assert row_chances(policy)(state, 100).tolist() == [1] * 6


def test_uncertain_rows_come_in_proportion_to_their_weight():
    policy = spo_priority()
    state = knowing(policy, [0.5] * 10 + [0.0] * 10)
    rows = row_of(drawn(policy, state, 50, steps=40), ROWS, SEED)
    certain = (rows >= 10).mean()
    expected = 0.05 / (0.55 + 0.05)
    assert abs(certain - expected) < 4 * np.sqrt(expected * (1 - expected) / len(rows))
    np.testing.assert_allclose(row_chances(policy)(state, 5)[[0, 10]], [1.0, 0.05 / 0.55])
    assert (row_chances(policy)(policy.init(4, 0), 2) == 1).all()


def test_no_row_starves_though_all_but_one_are_unlikely():
    policy = spo_priority(floor=1e-9)
    state = knowing(policy, [0.5] + [0.0] * 49)
    rows = row_of(drawn(policy, state, 30, steps=3), 50, SEED)
    assert len(rows) == 90
    visits = np.bincount(rows, minlength=50)
    assert visits.argmax() == 0
    assert 3 < visits[0] < 15
    assert (visits > 0).sum() > 30  # the walk ended, and took what it had passed over


@pytest.mark.parametrize("name", sorted(policies.keys() - {"sequential", "query_filter"}))
def test_a_choice_depends_on_state_and_cursor_alone_and_state_keeps_its_form(name):
    """Ten steps at once, and again from a copy of the state after five."""
    policy, again = (build_policy({"use": name, "decay": 0.3}) for _ in range(2))
    random = np.random.default_rng(0)
    outcomes = random.random((10, 4, 6)) < random.random((10, 4, 1))
    state, cursor, selected = policy.init(ROWS, SEED), 0, []
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    for step, outcome in enumerate(outcomes):
        if step == 5:
            saved = jax.tree.map(np.copy, state), cursor
        ordinals = policy.select(state, cursor, 4)
        cursor = int(ordinals.max()) + 1
        state = policy.observe(state, groups(row_of(ordinals, ROWS, SEED), r=outcome))
        selected.append(ordinals.tolist())
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == form
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state))
    assert cursor > 40  # some were left out
    repeated, cursor = saved
    for outcome, before in zip(outcomes[5:], selected[5:], strict=True):
        ordinals = again.select(repeated, cursor, 4)
        assert ordinals.tolist() == before
        cursor = int(ordinals.max()) + 1
        repeated = again.observe(repeated, groups(row_of(ordinals, ROWS, SEED), r=outcome))
    np.testing.assert_array_equal(repeated["rate"], state["rate"])


def test_the_draws_of_a_seed_never_change():
    """Written down once: a resumed run goes on as it began, on any machine."""
    policy = spo_priority()
    state = knowing(policy, [0.5, 0.0, 0.1, 0.9, 1.0, 0.5, 0.3, 0.0], seed=0)
    assert drawn(policy, state, 8, steps=1).tolist() == EXPECTED
    assert drawn(policy, knowing(policy, state["rate"], seed=1), 8, steps=1).tolist() != EXPECTED


EXPECTED = [0, 1, 3, 5, 6, 8, 11, 14]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"use": "spo_prority"},
            "unknown prompt policy 'spo_prority': did you mean 'spo_priority'",
        ),
        ({"use": "sequential", "threshold": 1}, "sequential: unknown option 'threshold'"),
        ({"use": "difficulty_band", "lo": 0.1}, "unknown option 'lo': did you mean 'low'"),
        ({"use": "difficulty_band", "low": 0.9}, "low = 0.9, high = 0.875"),
        ({"use": "no_positive_resampling", "threshold": 0.0}, "threshold = 0.0, expected in"),
        ({"use": "spo_priority", "decay": 1.0}, "decay = 1.0, expected 0 or more and below 1"),
        ({"use": "spo_priority", "floor": 0.0}, "no row may starve"),
        ({"use": "spo_priority", "reward": "digit"}, "none of the rewards: did you mean 'digits'"),
    ],
)
def test_a_config_refuses_what_no_policy_takes(spec, message):
    rewards = [{"use": "arithmetic"}, {"use": "x:y", "name": "digits"}]
    with pytest.raises(ConfigError, match=rf"rollout\.prompts: .*{message}"):
        configs.from_dict({"rewards": rewards, "rollout": {"prompts": spec}})


def test_own_code_may_choose_the_prompts():
    def backwards(start: int = 100) -> PromptPolicy:
        return sequential()._replace(name="backwards", init=lambda rows, seed: {"at": start})

    assert build_policy({"use": backwards, "start": 7}, {"r": 1.0}).init(3, 0) == {"at": 7}
    with pytest.raises(InputError, match="returned int, expected a PromptPolicy"):
        build_policy({"use": lambda: 3})


def test_the_prompt_policy_of_the_examples_lets_solved_rows_rest(repository):
    policy = own_code.load(f"{repository}/examples/own_prompts.py:rest_when_solved")(steps=2)
    state, rows_by_step = policy.init(3, 0), []
    for cursor in range(0, 12, 2):
        ordinals = policy.select(state, cursor, 2)
        row = row_of(ordinals, 3, 0)
        rows_by_step.append(sorted(row.tolist()))
        right = [[1.0, float(number == 0)] for number in row]  # row 0 is always solved
        state = policy.observe(state, groups(row, arithmetic=right))
    solved = [0 in rows for rows in rows_by_step]
    assert any(solved)
    first = solved.index(True)
    assert solved[first + 1 : first + 3] == [False, False]
    everything = {**state, "rest": np.ones(3, np.int32)}
    assert len(policy.select(everything, 0, 2)) == 2  # all rest, and a step needs its prompts


def drawn_behind(prompt, logp, **fields):
    """A group of two samples of row 1, each of two tokens of these log-probs, behind a prompt."""
    tokens = np.array([[[7, 8], [9, 6]]], np.int32)
    arrays = {
        "prompt_tokens": np.pad(np.array([prompt], np.int32), ((0, 0), (0, 3 - len(prompt)))),
        "prompt_mask": np.arange(3)[None] < len(prompt),
        "completion_tokens": tokens,
        "token_mask": tokens > 0,
        "behavior_logp": np.broadcast_to(np.reshape(np.float32(logp), (1, -1, 1)), tokens.shape),
        "truncated": np.zeros((1, 2), bool),
        "fields": fields,
    }
    return dataclasses.replace(groups([1], r=[[1, 0]]), **arrays)


@pytest.mark.parametrize(
    ("logp", "fields"),
    [(-5 / 8, {}), ([-5 / 8, -3.0], {REPLAYED: np.array([[False, True]])})],
    ids=["another prompt", "a sample of an earlier step"],
)
def test_the_drift_is_the_policys_alone(logp, fields):
    """Log-probs of this policy are -1/8 of the prompt's first token: it has not moved at all."""

    def rank(params, rollouts):
        return rollouts.token_mask * (rollouts.prompt_tokens[:, :1, None] / np.float32(-8))

    policy = Drift(sequential(), 2, 3, rank).watch()
    assert policy.bring is not None
    state = policy.init(ROWS, SEED)
    assert np.isnan(policy.bring(state, {}, drawn_behind([5, 6], logp))[DRIFT]).all()
    state = policy.observe(state, drawn_behind([5, 6], logp, **fields))
    assert policy.bring(state, {}, drawn_behind([4], -0.5))[DRIFT].tolist() == [0.0]
