"""The first recipes against NumPy written from the papers, and what becomes of masked samples."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo.advantages import (
    chain,
    compute,
    divide_by_group_std,
    evaluate,
    mask_truncated,
    mask_zero_variance,
    sign,
    subtract_group_mean,
    sum_rewards,
    transform,
)
from jaxgrpo.core.errors import InputError

NAN = np.nan


def grpo_oracle(rewards, mask, eps=1e-6, ddof=1, divide=True):
    """Group-normalised advantages of one [P, G] reward in float64, group by group."""
    out = np.zeros(np.shape(rewards))
    for group, (row, keep) in enumerate(zip(rewards, mask, strict=True)):
        scored = np.asarray(row, np.float64)[keep]
        if len(scored) < 2 or scored.max() == scored.min():
            continue
        scale = scored.std(ddof=ddof) + eps if divide else 1.0
        out[group, keep] = (scored - scored.mean()) / scale
    return out


def advantages(recipe, rewards, options=None, **fields):
    """The values of `evaluate`, jitted: one small program instead of thirty."""
    run = jax.jit(lambda rewards, fields: evaluate(recipe, rewards, options=options, **fields)[0])
    return np.asarray(run(jax.tree.map(jnp.asarray, rewards, is_leaf=is_rows), fields))


def is_rows(node):
    return isinstance(node, (list, tuple))


@pytest.mark.parametrize("ddof", [0, 1])
def test_grpo_and_dr_grpo_are_the_papers_formulas(ddof):
    with jax.enable_x64(True):
        rollouts = laws.make_rollouts(np.float64)
        rewards = {name: np.asarray(leaf) for name, leaf in rollouts.rewards.items()}
        total = rewards["correct"] + 0.2 * rewards["style"]
        mask = np.isfinite(total)
        weights = {"correct": 1.0, "style": 0.2}
        options = {"eps": 1e-3, "ddof": ddof, "weights": weights}
        normalised = advantages("grpo", rewards, options=options)
        centred = advantages("dr_grpo", rewards, options={"weights": weights})
    np.testing.assert_allclose(normalised, grpo_oracle(total, mask, 1e-3, ddof), atol=1e-12)
    np.testing.assert_allclose(centred, grpo_oracle(total, mask, divide=False), atol=1e-12)


def test_only_equal_rewards_are_flat_and_eps_bounds_what_noise_becomes():
    with jax.enable_x64(True):
        equal = advantages("grpo", [[0.3, 0.3, 0.3, 0.3]])
        differ = advantages("grpo", [[0.1 + 0.2, 0.3, 0.3, 0.3]])
    assert (equal == 0).all()
    assert 0 < np.abs(differ).max() < 1e-9  # 0.1 + 0.2 is 3e-17 too much; eps is 1e-6


def test_an_unscored_sample_does_not_move_the_baseline():
    value = advantages("dr_grpo", [[NAN, 1.0, 0.0, 1.0]])
    np.testing.assert_allclose(value[0], [0, 1 / 3, -2 / 3, 1 / 3], rtol=1e-6)
    _, mask = evaluate("dr_grpo", [[NAN, 1.0, np.inf, 1.0], [NAN, NAN, NAN, -np.inf]])
    assert mask.tolist() == [[False, True, False, True], [False] * 4]


def test_one_scored_sample_gives_zero_and_stays_unmasked():
    for recipe in ("grpo", "dr_grpo"):
        value, mask = evaluate(recipe, [[NAN, 1.0, NAN]])
        assert value.tolist() == [[0, 0, 0]]
        assert mask.tolist() == [[False, True, False]]


def test_a_mask_for_plain_arrays_counts_as_unscored():
    value, mask = evaluate("dr_grpo", [[5.0, 1.0, 0.0, 1.0]], mask=[[False, True, True, True]])
    np.testing.assert_allclose(value[0], [0, 1 / 3, -2 / 3, 1 / 3], rtol=1e-6)
    assert mask.tolist() == [[False, True, True, True]]


def test_a_mask_leaves_samples_out_where_no_reward_counts():
    weightless, mask = {"weights": {"reward": 0.0}}, [[True, False]]
    fields = {"token_mask": [[[1], [1]]], "trainer_logp": [[[-2.0], [-1.0]]]}
    fields["teacher_logp"] = [[[-1.0], [-3.0]]]
    value, live = evaluate("opd", [[1.0, 0.0]], mask=mask, options=weightless, **fields)
    assert value.tolist() == [[[1.0], [0.0]]]
    assert live.tolist() == [[[True], [False]]]
    weightless_sum = {"use": "sum_rewards", "reward": 0.0}
    value, live = evaluate([weightless_sum], [[1.0, 0.0]], mask=mask)
    assert (value.tolist(), live.tolist()) == ([[0.0, 0.0]], mask)


def test_a_huge_group_keeps_its_digits():
    rewards = 1000 + np.random.default_rng(0).normal(size=(1, 200_000)).astype(np.float32)
    oracle = grpo_oracle(rewards, np.ones_like(rewards, bool))
    np.testing.assert_allclose(advantages("grpo", rewards), oracle, atol=1e-3)


def test_the_standard_deviation_is_that_of_the_values_it_gets():
    rewards = [[3.0, 5.0, 10.0, NAN]]
    alone = advantages(chain(sum_rewards(), divide_by_group_std()), rewards)
    centred = advantages("grpo", rewards)
    std = np.std([3.0, 5.0, 10.0], ddof=1) + 1e-6
    np.testing.assert_allclose(alone[0], np.array([3, 5, 10, 0]) / std, rtol=1e-6)
    np.testing.assert_allclose(centred[0], np.array([-3, -1, 4, 0]) / std, rtol=1e-6)


def test_truncated_samples_leave_statistics_only_before_the_baseline():
    rewards, truncated = [[0.0, 0.0, 1.0, 1.0]], [[False, False, False, True]]
    before = chain(sum_rewards(), mask_truncated(), subtract_group_mean())
    after = chain(sum_rewards(), subtract_group_mean(), mask_truncated())
    early = advantages(before, rewards, truncated=truncated)
    late, mask = evaluate(after, rewards, truncated=truncated)
    np.testing.assert_allclose(early[0], [-1 / 3, -1 / 3, 2 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(late[0], [-0.5, -0.5, 0.5, 0], rtol=1e-6)
    assert mask.tolist() == [[True, True, True, False]]


@pytest.mark.full
def test_zero_variance_groups_leave_the_mask_wherever_the_step_stands():
    rewards = [[0.1, 0.1, 0.1], [0.0, 1.0, NAN], [NAN, NAN, 1.0]]
    first = chain(sum_rewards(), mask_zero_variance(), subtract_group_mean())
    last = chain(sum_rewards(), subtract_group_mean(), mask_zero_variance())
    for composite in (first, last):
        value, mask = evaluate(composite, rewards)
        assert mask.tolist() == [[False] * 3, [True, True, False], [False] * 3]
        np.testing.assert_allclose(value[1], [-0.5, 0.5, 0])
    rollouts = laws.make_rollouts()
    _, _, metrics = compute(chain(sum_rewards(), mask_zero_variance()), rollouts)
    # Of 8 prompts 0 and 2 are flat, 7 has one sample; 6 has none and is no group.
    assert metrics["mask_zero_variance/masked_groups"].result() == pytest.approx(3 / 7)


def test_sign_keeps_flat_groups_alive():
    value, mask = evaluate("sign", [[0.0, 0.0], [1.0, 1.0], [1.0, NAN]])
    assert value.tolist() == [[-1, -1], [1, 1], [1, 0]]
    assert mask.tolist() == [[True, True], [True, True], [True, False]]


def test_sign_refuses_rewards_that_are_not_binary():
    with pytest.raises(InputError, match=r"rewards in \{0, 1\} but got 0.5: give threshold"):
        evaluate("sign", [[0.0, 0.5]])
    value, mask = jax.jit(lambda rewards: evaluate("sign", rewards))(jnp.array([[0.0, 0.5, 1.0]]))
    assert value.tolist() == [[-1, 0, 1]]  # nothing can be raised under jit: masked and counted
    assert mask.tolist() == [[True, False, True]]
    assert advantages("sign", [[0.0, 0.5, 1.2]], options={"threshold": 0.5}).tolist() == [
        [-1, 1, 1]
    ]


def test_sign_counts_what_it_refused():
    rollouts = laws.make_rollouts()
    run = jax.jit(lambda rollouts: compute(chain(sum_rewards(), sign()), rollouts))
    total = np.asarray(rollouts.rewards["correct"] + rollouts.rewards["style"])
    scored = total[np.isfinite(total)]
    expected = (~np.isin(scored, [0, 1])).mean()
    assert expected > 0.9
    assert run(rollouts)[2]["sign/refused"].result() == pytest.approx(expected)


@transform
def stretch(signal, rollouts):
    return dataclasses.replace(signal, value=signal.value * jnp.arange(1.0, 5.0)[None])


@transform
def drop_first(signal, rollouts):
    return dataclasses.replace(signal, mask=signal.mask.at[:, 0].set(False))


@pytest.mark.full
@pytest.mark.parametrize("step", [stretch, drop_first])
def test_a_deviation_is_that_of_the_values_which_the_step_before_it_left(step):
    rewards = np.random.default_rng(1).normal(size=(3, 4))
    with jax.enable_x64(True):
        normaliser = chain(subtract_group_mean(), step, divide_by_group_std(eps=0.0))
        value, mask = evaluate(normaliser, rewards)
        changed = rewards - rewards.mean(1, keepdims=True)
        changed = changed * np.arange(1, 5) if step is stretch else changed[:, 1:]
        expected = changed / changed.std(1, ddof=1, keepdims=True)
        np.testing.assert_allclose(
            value[mask].reshape(expected.shape), expected, rtol=0, atol=1e-12
        )
