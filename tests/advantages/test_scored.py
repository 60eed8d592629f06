"""Parts that read scores of tokens, against loops written from the papers."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import chain, sum_rewards
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts

P, G, T, STRIDE = 3, 4, 12, 3
RANDOM = np.random.default_rng(0)
NAN = np.nan


def rollouts(lengths, ranks, rewards):
    empty = dict.fromkeys(Rollouts.__dataclass_fields__)
    tokens = np.arange(T) < lengths[..., None]
    fields = {"effective_rank": jnp.asarray(np.where(tokens, ranks, NAN))}
    columns = {
        "rewards": {"reward": jnp.asarray(rewards)},
        "token_mask": jnp.asarray(tokens),
        "step": jnp.int32(0),
        "fields": fields,
    }
    return Rollouts(**{**empty, **columns})


def draw_batch():
    """Lengths, ranks at each stride and at the end, rewards."""
    lengths = RANDOM.integers(1, T + 1, (P, G))
    number = np.arange(1, T + 1)
    is_point = (number % STRIDE == 0) | (number == lengths[..., None])
    ranks = np.where(is_point, RANDOM.uniform(1, 9, (P, G, T)), 0)
    return lengths, ranks, RANDOM.normal(size=(P, G))


def movement(ranks):
    """Rank, velocity and acceleration of one sample, from the ranks of its strides; NaN: none."""
    changes = [m - np.mean(ranks[:j]) for j, m in enumerate(ranks) if j]
    turns = [later - earlier for earlier, later in itertools.pairwise(changes)]
    return [ranks[-1], np.mean(changes) if changes else NAN, np.mean(turns) if turns else NAN]


def oracle(batches, kappa, gain, decay):
    """The values after each batch, sample by sample."""
    means, after = np.zeros(0), []
    for lengths, ranks, rewards in batches:
        measured = np.array(
            [
                [movement([m for m in ranks[p, g, : lengths[p, g]] if m]) for g in range(G)]
                for p in range(P)
            ]
        )
        values = rewards.copy()
        for place in np.ndindex(P, G) if means.size else ():
            deviation = np.clip((measured[place] - means) / np.abs(means), -5, 5)
            rank, velocity, acceleration = np.nan_to_num(deviation)
            share = 1 / (1 + np.exp(-gain * acceleration))
            bonus = max(share * np.tanh(rank) + (1 - share) * np.tanh(velocity), 0)
            values[place] += min(bonus, abs(rewards[place]) / kappa)
        batch_means = np.nanmean(measured.reshape(-1, 3), axis=0)
        means = batch_means if not means.size else decay * means + (1 - decay) * batch_means
        after.append(values)
    return after


@pytest.mark.full
def test_ranks_shape_advantages_as_a_loop_over_the_samples_does():
    batches = [draw_batch() for _ in range(4)]
    part = adv.shape_by_effective_rank(kappa=3.0, gain=2.0, decay=0.25)
    transform = chain(sum_rewards(), part)
    state, values = None, []
    for batch in batches:
        batch_rollouts = rollouts(*batch)
        state = transform.init(adv.spec_of(batch_rollouts)) if state is None else state
        signal, state, metrics = adv.compute(transform, batch_rollouts, state)
        values.append(np.asarray(signal.value))
    for actual, expected in zip(values, oracle(batches, 3.0, 2.0, 0.25), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert (values[0] == batches[0][2].astype(np.float32)).all()  # there is no mean yet
    assert any((actual != batch[2]).any() for actual, batch in zip(values, batches, strict=True))
    assert {"rank", "velocity", "acceleration", "bonus"} == {
        name.rpartition("/")[2] for name in metrics if "shape_by" in name
    }


@pytest.mark.slow
def test_a_bonus_changes_no_sign_and_leaves_flat_groups_at_0():
    transform = chain(sum_rewards(), adv.subtract_group_mean(), adv.shape_by_effective_rank(1.0))
    lengths, ranks, _ = draw_batch()
    rewards = np.array([[1.0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])
    first = rollouts(lengths, ranks, rewards)
    state = transform.init(adv.spec_of(first))
    _, state, _ = adv.compute(transform, first, state)
    faster = rollouts(lengths, 3 * ranks, rewards)
    signal, _, _ = adv.compute(transform, faster, state)
    centred = rewards - rewards.mean(1, keepdims=True)
    value = np.asarray(signal.value)
    assert (value[0] == 0).all()
    assert (np.sign(value) * np.sign(centred) >= 0).all()
    assert (value >= centred - 1e-6).all()
    assert (value > centred + 1e-3).any()


@pytest.mark.slow
def test_a_batch_that_measures_nothing_moves_no_mean():
    """Short samples have no velocity and no acceleration: they say nothing about the means."""
    transform = chain(sum_rewards(), adv.shape_by_effective_rank(decay=0.25))
    lengths, rewards = np.full((P, G), T), np.ones((P, G))
    long = np.zeros((P, G, T))
    long[..., [2, 5, 8]] = 1.0, 2.0, 4.0  # rank 4, velocity 1.75, acceleration 1.5
    short = np.where(np.arange(T) < 3, long, 0)
    state, means = transform.init(adv.spec_of(rollouts(lengths, long, rewards))), []
    for ranks in (short, long, short, 2 * long):
        _, state, _ = adv.compute(transform, rollouts(lengths, ranks, rewards), state)
        means.append(np.asarray(state["shape_by_effective_rank"]["means"]))
    np.testing.assert_allclose(means[0], [1, 0, 0])
    np.testing.assert_allclose(means[1], [0.25 + 0.75 * 4, 1.75, 1.5], rtol=1e-6)
    np.testing.assert_allclose(means[2][1:], [1.75, 1.5], rtol=1e-6)
    np.testing.assert_allclose(means[3][1:], [1.75 * 1.75, 1.75 * 1.5], rtol=1e-6)


def test_the_mean_of_a_score_is_a_reward():
    score = np.array([[[1.0, 2.0, NAN], [4.0, NAN, NAN]]])
    tokens = np.array([[[1, 1, 0], [0, 0, 0]]])
    steps = [adv.score_mean("teacher_logp", sign=2.0, name="likely"), adv.sum_rewards()]
    value, mask = adv.evaluate(steps, [[1.0, 1.0]], teacher_logp=score, token_mask=tokens)
    assert value.tolist() == [[4.0, 0.0]]
    assert mask.tolist() == [[True, False]]  # without a token there is no mean
    with pytest.raises(InputError, match="stream 'reward' exists already"):
        adv.evaluate(
            [adv.score_mean("teacher_logp", name="reward"), adv.sum_rewards()],
            [[1.0, 1.0]],
            teacher_logp=score,
            token_mask=tokens,
        )


@pytest.mark.full
def test_only_the_tokens_of_the_highest_entropy_keep_an_advantage():
    tokens = np.array([[[1, 1, 1, 0], [1, 1, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]]], bool)
    entropy = np.where(tokens, RANDOM.permutation(16).reshape(2, 2, 4), 99.0)
    fields: dict[str, Any] = {"token_mask": tokens, "token_entropy": entropy}
    rewards = [[1.0, 0.0], [3.0, 3.0]]  # a flat group, whose tokens are compared too
    top = np.sort(entropy[tokens])[-3:]  # of ten tokens
    centred = np.array([[0.5, -0.5], [0.0, 0.0]])[..., None]
    for denominator in ("keep", "shrink"):
        part = adv.keep_top_entropy(0.3, denominator=denominator)
        steps = [adv.sum_rewards(), adv.subtract_group_mean(), part]
        value, mask = adv.evaluate(steps, rewards, **fields)
        is_top = tokens & np.isin(entropy, top)
        np.testing.assert_array_equal(value, np.where(is_top, centred, 0))
        np.testing.assert_array_equal(mask, tokens if denominator == "keep" else is_top)


def token_baseline(returns, logp, collision, tokens):
    """verl's optimal token baseline of one group, token by token."""
    energy = np.cumsum((1 - 2 * np.exp(logp) + collision) * tokens, axis=1)
    out = np.zeros_like(logp)
    for t in range(logp.shape[1]):
        longer = tokens[:, t]
        if longer.sum() > 1:
            mean = (returns[:, t] * energy[:, t])[longer].sum() / energy[longer, t].sum()
            out[longer, t] = returns[longer, t] - mean
    return out


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_sample_without_a_teacher_learns_from_rewards_or_leaves(share):
    logp = {"trainer_logp": [[[-2.0, -1.0], [-1.0, -1.0]]]}
    logp["teacher_logp"] = [[[-1.0, -1.0], [np.nan, np.nan]]]
    options = {"share": share, "eps": 0.0, "ddof": 0}
    value, mask = adv.evaluate(
        "sdpo", [[0.0, 1.0]], options=options, token_mask=np.ones((1, 2, 2), bool), **logp
    )[:2]
    expected = {1.0: [[1, 0], [0, 0]], 0.5: [[0, -0.5], [0.5, 0.5]]}[share]
    np.testing.assert_allclose(value[0], expected, atol=1e-6)
    assert mask[0].tolist() == [[True] * 2, [share < 1] * 2]


@pytest.mark.full
@pytest.mark.parametrize("to_go", [False, True])
def test_the_token_baseline_weighs_samples_by_their_gradients_so_far(to_go):
    tokens = np.arange(T) < RANDOM.integers(2, T + 1, (P, G, 1))
    logits = 2 * RANDOM.normal(size=(P, G, T, 7))
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    logp, collision = np.log(shares[..., 0]), (shares**2).sum(-1)
    rewards = RANDOM.normal(size=(P, G))
    rewards[1] = 0.1
    returns = np.where(tokens, rewards[..., None], 0)
    steps = [adv.sum_rewards(), adv.subtract_optimal_token_baseline()]
    if to_go:
        left = tokens.sum(-1, keepdims=True) - 1 - np.arange(T)
        returns = np.where(tokens, rewards[..., None] * 0.9 ** np.maximum(left, 0), 0)
        steps[1:1] = [adv.to_tokens("last"), adv.reward_to_go(0.9)]
    fields: dict[str, Any] = {
        "trainer_logp": logp,
        "token_collision": collision,
        "token_mask": tokens,
    }
    value, mask = adv.evaluate(steps, rewards, **fields)
    np.testing.assert_array_equal(mask, tokens)
    for p in range(P):
        want = token_baseline(returns[p], logp[p], collision[p], tokens[p])
        np.testing.assert_allclose(value[p], want, atol=2e-6)
    if not to_go:
        assert (np.asarray(value)[1] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kappa": 0.5}, "kappa = 0.5, expected a number from 1 on"),
        ({"decay": 1.0}, r"decay = 1.0, expected a share in \[0, 1\)"),
        ({"scale": -1.0}, "scale = -1.0"),
    ],
)
def test_options_that_make_no_bonus_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        adv.shape_by_effective_rank(**options)
