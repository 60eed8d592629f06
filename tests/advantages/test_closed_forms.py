"""Advantages against what can be proved of them, by enumerating every group.

p is the success rate of a prompt, q = 1 - p, and the gradient of an update is (1/G) sum_i A_i g_i
with g_i the gradient of sample i's log-probability. Where rewards are in {0, 1} its expectation is
a weight times grad p.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import numpy as np
import pytest

from jaxgrpo.advantages import (
    contrastive_pairs,
    divide_by_group_mean,
    evaluate,
    max_minus_second,
    sum_rewards,
)

SIZES = range(1, 9)
RATES = (0.02, 0.3, 0.5, 0.9)
BY_N = {"eps": 0.0, "ddof": 0}
RECIPES = {
    "dr_grpo": "dr_grpo",
    "std": ("grpo", BY_N),
    "std, n - 1": ("grpo", {"eps": 0.0}),
    "rloo": "rloo",
    "reinforce": "reinforce",
    "reinforce - 0.3": ("reinforce", {"baseline": 0.3}),
    "sign": "sign",
    "cost 0.25": ("asymmetric", {"cost": 0.25}),
    "conditional_sign": "conditional_sign",
    "maxrl": "maxrl",
    "by mean": [sum_rewards(), divide_by_group_mean()],
    "best": [sum_rewards(), max_minus_second()],
    "pairs": [sum_rewards(), contrastive_pairs()],
    **{f"pass@{k}": ("passk", {"k": k}) for k in (1, 2, 3, 5, 7)},
}


def every(groups, recipes=RECIPES):
    """The advantages of all recipes on groups, in float64, by one compiled program."""

    def run(rewards):
        values = {}
        for name, spec in recipes.items():
            recipe, options = spec if isinstance(spec, tuple) else (spec, None)
            values[name] = evaluate(recipe, rewards, options=options)[0]
        return values

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(run)(jax.numpy.asarray(groups, float)))


@functools.cache
def all_groups():
    """Every group of {0, 1}^G for G from 1 to 8, shorter ones filled up with unscored samples."""
    rows = [list(bits) for size in SIZES for bits in itertools.product([0.0, 1.0], repeat=size)]
    groups = np.array([row + [np.nan] * (8 - len(row)) for row in rows])
    return groups, np.isfinite(groups).sum(1), every(groups)


def weight(name, size, p, only=None):
    """E[(1/G) sum_i A_i (r_i - p) / (p q)]: the weight on grad p, of groups with so many wins."""
    groups, number, values = all_groups()
    rewards = groups[number == size, :size]
    wins = rewards.sum(1)
    chance = p**wins * (1 - p) ** (size - wins)
    counted = np.ones(len(wins), bool) if only is None else only(wins)
    score = values[name][number == size, :size] * (rewards - p) / (p * (1 - p))
    return (chance * counted * score.mean(1)).sum()


def std_weight(size, p):
    """E over N of sqrt(N (G - N)) / (G p q)."""
    q = 1 - p
    roots = [
        math.comb(size, n) * p**n * q ** (size - n) * math.sqrt(n * (size - n))
        for n in range(size + 1)
    ]
    return sum(roots) / (size * p * q)


CLOSED_FORMS = {
    "dr_grpo": lambda size, p: 1 - 1 / size,
    "std": std_weight,
    "std, n - 1": lambda size, p: std_weight(size, p) * math.sqrt(1 - 1 / size),
    "rloo": lambda size, p: float(size > 1),
    "reinforce": lambda size, p: 1.0,
    "reinforce - 0.3": lambda size, p: 1.0,
    "sign": lambda size, p: 2.0,
    "cost 0.25": lambda size, p: 1.25,
    "conditional_sign": lambda size, p: 1 - 1 / size + (1 - p) ** (size - 1) + p ** (size - 1),
    "maxrl": lambda size, p: (1 - (1 - p) ** (size - 1)) / p,
    "by mean": lambda size, p: (1 - (1 - p) ** size) / p,
    "best": lambda size, p: float(size > 1) * (1 - p) ** (size - 1),
    "pairs": lambda size, p: 1 - 1 / size,
    **{
        f"pass@{k}": lambda size, p, k=k: float(size > k) * k * (1 - p) ** (k - 1)
        for k in (1, 2, 3, 5, 7)
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_expected_gradient_has_the_weight_of_the_closed_form(name):
    cases = list(itertools.product(SIZES, RATES))
    measured = [weight(name, size, p) for size, p in cases]
    expected = [CLOSED_FORMS[name](size, p) for size, p in cases]
    np.testing.assert_allclose(measured, expected, rtol=1e-10, atol=1e-12)


def test_std_has_no_difficulty_bias_in_groups_of_two_and_three():
    weights = [[weight("std", size, p) for p in RATES] for size in (2, 3)]
    np.testing.assert_allclose(weights, [[1.0] * 4, [math.sqrt(2)] * 4], rtol=1e-12)


def test_sign_splits_by_the_kind_of_group():
    for size, p in itertools.product(SIZES, RATES):
        q = 1 - p
        fail = weight("sign", size, p, lambda wins: wins == 0)
        mixed = weight("sign", size, p, lambda wins: (wins > 0) & (wins < size))  # noqa: B023
        won = weight("sign", size, p, lambda wins: wins == size)  # noqa: B023
        flat = [q ** (size - 1), p ** (size - 1)]
        np.testing.assert_allclose([fail, won, mixed], [*flat, 2 - sum(flat)], 1e-10, 1e-12)


def test_maxrl_sums_the_gradients_of_pass_at_k_over_k():
    for size, p in itertools.product(SIZES, RATES):
        gradients = [(1 - p) ** (k - 1) for k in range(1, size + 1)]
        without, all_of_them = sum(gradients[:-1]), sum(gradients)
        np.testing.assert_allclose(weight("maxrl", size, p), without, 1e-10, 1e-12)
        np.testing.assert_allclose(weight("by mean", size, p), all_of_them, 1e-10, 1e-12)


def test_pairs_are_the_centred_rewards_group_by_group():
    _, _, values = all_groups()
    np.testing.assert_allclose(values["pairs"], values["dr_grpo"], atol=1e-15)


def test_leave_one_out_is_n_over_n_minus_one_times_centred():
    _, number, values = all_groups()
    factor = (number / np.maximum(number - 1, 1))[:, None]
    np.testing.assert_allclose(values["rloo"], factor * values["dr_grpo"], atol=1e-15)
    np.testing.assert_allclose(values["pass@1"], values["rloo"], atol=1e-15)


def test_normalised_advantages_are_roots_of_the_odds():
    """A = sqrt((G - N) / N) for a success, -sqrt(N / (G - N)) for a failure; 1 of G is largest."""
    groups, number, values = all_groups()
    wins = np.nansum(groups, 1)
    mixed = (wins > 0) & (wins < number)
    odds = np.sqrt((number - wins)[mixed] / wins[mixed])[:, None]
    expected = np.where(groups[mixed] == 1, odds, -1 / odds)
    expected[np.isnan(groups[mixed])] = 0
    np.testing.assert_allclose(values["std"][mixed], expected, rtol=1e-12)
    single_success = np.eye(1, 64)
    top = every(single_success, {"n": ("grpo", BY_N), "n - 1": ("grpo", {"eps": 0.0})})
    largest = [np.abs(top["n"]).max(), np.abs(top["n - 1"]).max()]
    np.testing.assert_allclose(largest, [math.sqrt(63), 63 / math.sqrt(64)], rtol=1e-12)


def pass_at_k(rewards, k):
    """The share of subsets of k samples with a success, by listing them."""
    subsets = list(itertools.combinations(rewards, k))
    return sum(max(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_advantages_are_the_estimate_less_itself_without_the_sample(k):
    groups, number, values = all_groups()
    rewards = groups[number == 7, :7]
    for row, advantage in zip(rewards, values[f"pass@{k}"][number == 7, :7], strict=True):
        without = [pass_at_k(np.delete(row, sample), k) for sample in range(7)]
        np.testing.assert_allclose(
            advantage, 7 * (pass_at_k(row, k) - np.array(without)), atol=1e-12
        )


class Softmax:
    """All samples of size G from a softmax policy over K answers, with exact gradients."""

    def __init__(self, rewards, size, seed=0):
        answers = len(rewards)
        logits = np.random.default_rng(seed).normal(size=answers)
        self.policy = np.exp(logits) / np.exp(logits).sum()
        self.score = np.eye(answers) - self.policy  # [K, K]: grad log pi(y)
        drawn = np.array(list(itertools.product(range(answers), repeat=size)))
        self.chance = self.policy[drawn].prod(1)
        self.gradients = self.score[drawn]  # [groups, G, K]
        self.rewards = np.asarray(rewards, float)[drawn]
        self.values = np.asarray(rewards, float)

    def update(self, advantage, where=1.0):
        """E[(1/G) sum_i A_i g_i 1{where}], [K]."""
        mean = (advantage[..., None] * self.gradients).mean(1)
        return ((self.chance * where)[:, None] * mean).sum(0)

    def slope(self, statistic):
        """The gradient of the expectation of a statistic of the group: no baseline, no trick."""
        total = statistic[:, None] * self.gradients.sum(1)
        return (self.chance[:, None] * total).sum(0)

    def reward_slope(self):
        return (self.policy * self.values) @ self.score


def test_equation_8_all_fail_groups_descend_the_failure_of_pass_at_g():
    policy = Softmax([0, 0, 1, 0, 1, 0], size=4)
    advantage = every(policy.rewards, {"asymmetric": ("asymmetric", {"cost": 0.7})})["asymmetric"]
    all_fail = (policy.rewards == 0).all(1)
    pass_at_g = policy.slope(policy.rewards.max(1))
    np.testing.assert_allclose(policy.update(advantage, all_fail), 0.7 / 4 * pass_at_g, atol=1e-15)


def test_centring_adds_up_success_minus_failure_over_pairs():
    policy = Softmax([0, 1, 1, 0], size=4)
    pairs = every(policy.rewards, {"pairs": [sum_rewards(), contrastive_pairs()]})["pairs"]
    for rewards, gradients, advantage in zip(policy.rewards, policy.gradients, pairs, strict=True):
        wins, losses = gradients[rewards == 1], gradients[rewards == 0]
        listed = sum((win - loss for win in wins for loss in losses), np.zeros(4)) / 4
        np.testing.assert_allclose(advantage @ gradients, listed, atol=1e-14)


def test_rewards_that_are_no_successes_have_the_gradients_of_mean_and_maximum():
    policy = Softmax([0.3, -1.0, 2.0, 0.7, 0.7], size=4)
    values = every(policy.rewards, {name: RECIPES[name] for name in ("rloo", "dr_grpo", "best")})
    mean = policy.reward_slope()
    np.testing.assert_allclose(policy.update(values["rloo"]), mean, atol=1e-15)
    np.testing.assert_allclose(policy.update(values["dr_grpo"]), 0.75 * mean, atol=1e-15)
    best = policy.slope(policy.rewards.max(1)) / 4
    np.testing.assert_allclose(policy.update(values["best"]), best, atol=1e-15)
