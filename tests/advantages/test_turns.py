"""Advantages of turns against loops in float64, written from the papers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxgrpo.advantages import (
    build,
    evaluate,
    keep_turns,
    mask_truncated_turns,
    sum_rewards,
    to_tokens,
    turn_normalise,
    turn_returns,
)
from jaxgrpo.core.errors import InputError

P, G, K, T = 5, 6, 4, 12


def drawn(seed=0):
    """Samples of 1 to K turns, whose tokens are divided among them, some not drawn."""
    random = np.random.default_rng(seed)
    number: Any = random.integers(1, K + 1, (P, G))
    turn: Any = np.full((P, G, T), -1)
    mask: Any = np.zeros((P, G, T), bool)
    for place in np.ndindex(P, G):
        length = random.integers(number[place] + 2, T + 1)
        cuts = np.sort(random.choice(np.arange(1, length), number[place] - 1, replace=False))
        turn[place][:length] = np.searchsorted(cuts, np.arange(length), side="right")
        firsts = [0, *cuts]
        mask[place][firsts] = True
        mask[place][:length] |= random.random(length) < 0.5
    reward = random.normal(size=(P, G, K)) * (np.arange(K) < number[..., None])
    state = random.integers(0, 3, (P, G, K))
    scored = random.random((P, G)) < 0.8
    total = random.normal(size=(P, G))
    total[1] = 1.0  # a flat group
    return number, turn, mask, reward, state, scored, total


def returns(number, reward, total, gamma):
    out = np.zeros((P, G, K))
    for place in np.ndindex(P, G):
        earned = reward[place][: number[place]].copy()
        earned[-1] += total[place] - earned.sum()
        for k in range(number[place]):
            out[place][k] = sum(gamma ** (j - k) * earned[j] for j in range(k, number[place]))
    return out


def evaluated(part, case):
    _, turn, mask, reward, state, scored, total = case
    fields = {"turn": turn, "turn_reward": reward, "token_mask": mask}
    fields |= {"state_hash": state} if "state_hash" in part.needs else {}
    return evaluate(part, np.where(scored, total, np.nan), **fields)


def assert_tokens(value, case, per_turn):
    """Each drawn token of a scored sample has what its turn has; all others 0."""
    _, turn, mask, _, _, scored, _ = case
    expected = np.zeros((P, G, T))
    for place in np.ndindex(P, G):
        for token in np.flatnonzero(mask[place] & scored[place]):
            expected[place][token] = per_turn[place][turn[place][token]]
    np.testing.assert_allclose(value, expected, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("baseline", ["turn", "none"])
def test_a_turn_gets_what_is_earned_from_it_on(gamma, baseline):
    with jax.enable_x64():
        case = drawn()
        number, _, _, reward, _, scored, total = case
        value, *_ = evaluated(turn_returns(gamma, baseline), case)
        expected = returns(number, reward, total, gamma)
        if baseline == "turn":
            raw = expected.copy()
            for p, k in np.ndindex(P, K):
                members = [g for g in range(G) if scored[p, g] and number[p, g] > k]
                if members:
                    expected[p, members, k] -= raw[p, members, k].mean()
        assert_tokens(value, case, expected)


@pytest.mark.slow
@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("ddof", [0, 1])
def test_turns_are_compared_with_turns_in_the_same_state(std, ddof):
    gamma, weight, eps = 0.9, 0.5, 1e-3
    with jax.enable_x64():
        case = drawn(1)
        number, _, _, reward, state, scored, total = case
        value, *_ = evaluated(turn_normalise(gamma, weight, std, eps, ddof), case)
        r = returns(number, reward, total, gamma)

        def divided(values, value):
            if len(values) < 2 or np.ptp(values) == 0:
                return 0.0
            return (value - np.mean(values)) / (np.std(values, ddof=ddof) + eps if std else 1)

        expected = np.zeros((P, G, K))
        for p in range(P):
            members = [g for g in range(G) if scored[p, g]]
            steps = [(g, k) for g in members for k in range(number[p, g])]
            for g, k in steps:
                alike = [r[p, i, j] for i, j in steps if state[p, i, j] == state[p, g, k]]
                episode = divided(total[p, members], total[p, g])
                expected[p, g, k] = episode + weight * divided(alike, r[p, g, k])
        assert_tokens(value, case, expected)


@pytest.mark.full
def test_without_turns_that_meet_it_is_grpo():
    number, turn, mask, reward, _, scored, total = drawn(2)
    state = np.arange(P * G * K).reshape(P, G, K)
    case = number, turn, mask, reward, state, scored, total
    value, tokens = evaluated(turn_normalise(), case)
    rewards = np.where(scored, total, np.nan)
    plain = np.asarray(evaluate("grpo", rewards, options={"eps": 1e-6})[0])
    np.testing.assert_allclose(value, np.where(tokens, plain[..., None], 0), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("weight", [1.0, 0.1, 0.0])
def test_turns_earn_as_much_as_the_sum_gives_the_environment(weight):
    fields = {"turn": [[[0, 1], [0, 1]]], "turn_reward": [[[1.0, 0.0], [0.0, 0.0]]]}
    fields |= {"token_mask": [[[True] * 2] * 2], "state_hash": [[[7, 8], [7, 8]]]}
    rewards = {"game": [[1.0, 0.0]], "format": [[0.0, 1.0]]}
    weights = {"game": weight, "format": 1.0}
    reads = {name: fields[name] for name in ("turn", "turn_reward", "token_mask")}
    chain = [sum_rewards(**weights), turn_returns(scale=weight)]
    value = np.asarray(evaluate(chain, rewards, **reads)[0])
    # The first sample earns the weight at its first turn, the second 1 at its last.
    expected = np.array([[weight - 1, -1], [1 - weight, 1]]) / 2
    np.testing.assert_allclose(value[0], expected, atol=1e-7)
    options = {"gamma": 1.0, "std": False, "weights": weights, "environment": "game"}
    value = np.asarray(evaluate("gigpo", rewards, options=options, **fields)[0])
    episode = np.array([[weight - 1], [1 - weight]]) / 2
    np.testing.assert_allclose(value[0], episode + expected, atol=1e-7)
    options |= {"weights": {"game": weight}, "environment": None}
    value = np.asarray(evaluate("gigpo", {"game": rewards["game"]}, options=options, **fields)[0])
    np.testing.assert_allclose(value[0], weight * np.array([[1, 0.5], [-1, -0.5]]), atol=1e-7)


def test_an_environment_without_a_weight_is_refused():
    message = "gigpo: environment = 'gane': no reward is called so: did you mean 'game'"
    with pytest.raises(InputError, match=message):
        build("gigpo", {"weights": {"game": 1.0, "format": 0.2}, "environment": "gane"})


def test_of_several_rewards_that_weigh_other_than_1_the_environments_is_named():
    """Else its turns would count in full beside a part of it in the sum."""
    weights = {"game": 0.5, "format": 0.2}
    with pytest.raises(InputError, match="gigpo: turn_reward weighs as its reward does"):
        build("gigpo", {"weights": weights})
    build("gigpo", {"weights": weights, "environment": "game"})
    build("gigpo", {"weights": {"game": 1.0, "format": 0.2}})


@pytest.mark.full
def test_what_answers_a_sample_has_no_value_and_is_not_read():
    case = drawn(3)
    number, turn, mask, reward, state, scored, total = case
    value, tokens = evaluated(turn_returns(), case)
    assert not np.asarray(tokens)[~mask].any()
    changed = np.where(mask, turn, 3)
    again, _ = evaluated(turn_returns(), (number, changed, mask, reward, state, scored, total))
    np.testing.assert_array_equal(value, again)


def test_values_of_tokens_and_unknown_baselines_are_refused():
    with pytest.raises(InputError, match="baseline"):
        turn_returns(baseline="group")
    with pytest.raises(InputError, match="ddof"):
        turn_normalise(ddof=2)
    fields = {"turn": np.zeros((1, 2, 3), int), "turn_reward": np.zeros((1, 2, 1))}
    fields["token_mask"] = np.ones((1, 2, 3), bool)
    with pytest.raises(InputError, match="turn_returns"):
        evaluate([to_tokens(), turn_returns()], np.zeros((1, 2)), **fields)


@pytest.mark.full
@pytest.mark.parametrize("part", ["first", "last", "both", "cut"])
@pytest.mark.parametrize("before", [(), (to_tokens(),), (turn_returns(baseline="none"),)])
def test_turns_that_are_left_out_are_masked_and_nothing_else_changes(part, before):
    number, turn, mask, reward, _, scored, total = drawn(4)
    cut = np.random.default_rng(5).random((P, G, K)) < 0.4
    steps = {
        "first": keep_turns(first=2),
        "last": keep_turns(last=1),
        "both": keep_turns(1, 1),
        "cut": mask_truncated_turns(),
    }
    stays = {
        "first": lambda place, k: k < 2,
        "last": lambda place, k: k == number[place] - 1,
        "both": lambda place, k: k in (0, number[place] - 1),
        "cut": lambda place, k: not cut[place][k],
    }
    fields = {"turn": turn, "turn_reward": reward, "turn_truncated": cut}

    def outcome(*more):
        steps = build([sum_rewards(), *before, *more])
        read = {name: fields[name] for name in steps.needs & fields.keys()}
        return evaluate(steps, np.where(scored, total, np.nan), token_mask=mask, **read)

    unmasked, tokens = outcome(*(() if before else (to_tokens(),)))
    value, left = outcome(steps[part])
    expected = np.array(tokens)
    for place in np.ndindex(P, G):
        for token in np.flatnonzero(expected[place]):
            expected[place][token] = stays[part](place, turn[place][token])
    assert 0 < expected.sum() < np.asarray(tokens).sum()
    np.testing.assert_array_equal(left, expected)
    np.testing.assert_array_equal(value, np.where(expected, unmasked, 0))


def test_numbers_of_turns_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="neither first nor last is given"):
        keep_turns()
    with pytest.raises(InputError, match="keep_turns: last = 0, expected a whole number of at"):
        keep_turns(last=0)


@pytest.mark.full
def test_turns_with_equal_futures_are_equal_whatever_their_past_adds_up_to():
    """Rewards such as 0.1, whose sum in float32 is not the rounded sum of the sample."""
    random, turns = np.random.default_rng(0), 8
    past = random.integers(-9, 10, (1, 16, turns - 1)) / 10
    rewards = np.concatenate([past, np.full((1, 16, 1), -0.1)], -1)
    state = np.arange(16 * turns).reshape(1, 16, turns)
    state[..., -1] = -1  # they all meet at their last turn
    turn = np.broadcast_to(np.arange(turns), (1, 16, turns))
    fields = {"turn": turn, "turn_reward": rewards.astype(np.float32)}
    fields["token_mask"] = np.ones_like(turn, bool)
    total = rewards.sum(-1).astype(np.float32)
    value, _ = evaluate(turn_normalise(), total, state_hash=state, **fields)
    # A turn alone in its state has the episode's part alone; so has a turn of equal futures.
    np.testing.assert_array_equal(value[..., -1], value[..., 0])
    value, _ = evaluate(turn_returns(), total, **fields)
    np.testing.assert_array_equal(value[..., -1], 0)
