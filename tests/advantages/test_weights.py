"""Lengths, weights of groups, rare successes, and the recipes of large runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluating import all_values, scores, values

from jaxgrpo.advantages import (
    build,
    chain,
    clip_advantage,
    evaluate,
    overlong_penalty,
    shrink_rare_success,
    sum_rewards,
    weight_by_absolute_advantage,
    weight_by_learnability,
)
from jaxgrpo.core.errors import InputError


def test_one_success_of_many_is_bounded_and_cutting_it_flips_no_sign():
    for size in (2, 64):
        lucky = np.eye(1, size)
        with jax.enable_x64(True):
            cut = chain(build("grpo", {"eps": 0.0}), clip_advantage(low=-0.5, high=2.0))
            methods = [("grpo", {"eps": 0.0, "ddof": ddof}) for ddof in (0, 1)]
            by_n, by_less, clipped = all_values([*methods, (cut, None)], lucky)
        assert by_n.max() == pytest.approx(np.sqrt(size - 1), rel=1e-12)
        assert by_less.max() == pytest.approx((size - 1) / np.sqrt(size), rel=1e-12)
        assert clipped.max() == pytest.approx(min(2.0, by_less.max()))
        assert (np.sign(clipped) == np.sign(by_less)).all()


def test_rare_successes_shrink_and_failures_without_one_stay():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4]
    signs = chain(build("sign"), shrink_rare_success(2, reward="reward", threshold=1.0))
    two, four = (chain(build("dr_grpo"), shrink_rare_success(count)) for count in (2, 4))
    plain, two, four, signs = all_values(
        [(transform, None) for transform in ("dr_grpo", two, four, signs)], rewards
    )
    for shrunk, factor in ((two, [0.5, 1, 1, 1]), (four, [0.25, 0.5, 0.75, 1])):
        np.testing.assert_allclose(shrunk, plain * np.array(factor)[:, None], rtol=1e-6)
    assert signs.tolist() == [[0.5, -0.5, -0.5, -0.5], [1, 1, -1, -1], [1, 1, 1, -1], [-1] * 4]


def test_the_overlong_penalty_is_in_tokens_and_continuous_at_both_ends():
    length = np.arange(25)
    tokens = np.arange(24) < length[None, :, None]

    limit, buffer = 20, 8
    oracle = np.where(
        length <= limit - buffer,
        0,
        np.where(length <= limit, (limit - buffer - length) / buffer, -1),
    )
    with jax.enable_x64(True):
        parts = (
            overlong_penalty(buffer, limit),
            overlong_penalty(buffer, limit, penalty=2.0),
            overlong_penalty(buffer),
        )
        methods = [(chain(sum_rewards(), part), None) for part in parts]
        value, doubled, until_the_end = (
            first_value[0]
            for first_value in all_values(methods, np.ones((1, 25)), token_mask=tokens)
        )
    np.testing.assert_allclose(value, 1 + oracle)
    np.testing.assert_allclose(doubled, 1 + 2 * oracle)
    assert value[12] == 1  # the last length without a penalty
    assert value[13] == 1 - 1 / 8  # a token more costs 1 / buffer
    assert value[19] == 1 / 8
    assert value[20] == value[24] == 0
    assert np.abs(np.diff(value)).max() == 1 / 8  # no step larger than one token's
    np.testing.assert_allclose(until_the_end[16:], 1 - np.arange(9) / 8)


def test_a_groups_weight_is_the_closed_form_of_its_success_rate():
    rate = np.arange(9) / 8
    rewards = (np.arange(8) < np.arange(9)[:, None]).astype(float)
    with jax.enable_x64(True):
        options = {"eps": 0.0, "ddof": 0}
        grpo, dr_grpo = build("grpo", options), build("dr_grpo")
        transforms = (
            grpo,
            chain(grpo, weight_by_absolute_advantage()),
            chain(grpo, weight_by_learnability(reward="reward")),
            chain(dr_grpo, weight_by_learnability()),
            chain(dr_grpo, weight_by_learnability(reward="reward")),
            chain(grpo, weight_by_absolute_advantage(normalise=True)),
        )
        normalised, sizes, variances, shifted_left, shifted_right, mean_one = all_values(
            [(transform, None) for transform in transforms], rewards
        )
    spread = np.sqrt(rate * (1 - rate))[:, None]
    np.testing.assert_allclose(sizes, 2 * spread * normalised, atol=1e-12)
    np.testing.assert_allclose(variances, spread**2 * normalised, atol=1e-12)
    np.testing.assert_allclose(
        shifted_left, shifted_right, atol=1e-12
    )  # a baseline leaves the variance
    np.testing.assert_allclose(mean_one, spread / spread.mean() * normalised, atol=1e-12)


def test_weights_that_are_all_zero_stay_zero():
    transforms = (
        chain(build("dr_grpo"), weight_by_absolute_advantage(normalise=True)),
        chain(sum_rewards(), weight_by_learnability(normalise=True)),
    )
    for value in all_values(
        [(transform, None) for transform in transforms], [[0.1] * 7, [0.7] * 7]
    ):
        assert (value == 0).all()


def test_dapo_judges_groups_before_lengths_are_paid_for():
    rewards = [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    tokens = np.arange(10) < np.array([[2, 4, 8, 10], [2, 10, 2, 10]])[..., None]
    options = {"buffer": 4, "eps": 0.0, "ddof": 0}

    @jax.jit
    def run(rewards, tokens):
        paid = evaluate("dapo", rewards, options=options, token_mask=tokens)
        return paid, evaluate("dapo", rewards)[0], evaluate("grpo", rewards)[0]

    (value, mask), plain, grpo = run(jnp.array(rewards), tokens)
    assert mask.tolist() == [[False] * 4, [True] * 4]  # failures of different length
    expected = scores(np.array([[0.0, -1.0, 1.0, 0.0]]))[0]
    np.testing.assert_allclose(value[1:], expected, atol=1e-6)
    np.testing.assert_allclose(plain, grpo)


def test_scale_rl_divides_by_the_deviation_of_the_groups_that_stay():
    rewards = np.random.default_rng(0).integers(0, 2, (50, 4)).astype(float)
    with jax.enable_x64(True):
        ours = values("scale_rl", rewards, {"eps": 1e-3})
    live = rewards.std(1) > 0
    assert 0 < (~live).sum() < 20
    centred = rewards - rewards.mean(1, keepdims=True)
    expected = centred / (centred[live].std(ddof=1) + 1e-3)
    np.testing.assert_allclose(ours[live], expected[live], atol=1e-12)
    assert (ours[~live] == 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shrink_rare_success(0), "count = 0, expected more than 0 successes"),
        (lambda: overlong_penalty(0), "buffer = 0, expected from 1 to limit tokens"),
        (lambda: overlong_penalty(9, 8), "buffer = 9, expected from 1 to limit = 8 tokens"),
        (lambda: overlong_penalty(1, penalty=-1), "penalty = -1, expected 0 or more"),
        (lambda: overlong_penalty(1, penalty=np.nan), "penalty = nan, expected 0 or more"),
        (lambda: build("dapo", {"penalty": 0.5}), "dapo: limit and penalty .* give buffer too"),
        (lambda: overlong_penalty(1, 0), "limit = 0, expected at least 1 token"),
        (
            lambda: evaluate("dapo", [[1.0]], options={"buffer": 5}, token_mask=np.ones((1, 1, 4))),
            "buffer = 5, expected from 1 to limit = 4",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
