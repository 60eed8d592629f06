"""Token-level parts against recursions in NumPy and gradients by enumeration."""

from __future__ import annotations

import itertools
from typing import Any

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
    gae,
    hicra,
    kl_in_reward,
    reward_to_go,
    subtract_group_mean,
    sum_rewards,
    to_tokens,
)
from jaxgrpo.advantages.registry import plain_rollouts
from jaxgrpo.advantages.tokens import sum_behind
from jaxgrpo.core.errors import InputError

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
P, G, T = 3, 4, 7
MASK = RANDOM.random((P, G, T)) < 0.7
MASK[0, 0] = False  # a sample without tokens
REWARD = RANDOM.normal(size=(P, G))
LOGP = {name: -RANDOM.exponential(size=(P, G, T)) for name in ("trainer_logp", "reference_logp")}


def run(steps, rewards, **fields):
    """Values of a chain behind `sum_rewards`, jitted."""
    transform = chain(sum_rewards(), *steps)
    fields = jax.tree.map(jnp.asarray, fields)
    compiled = jax.jit(lambda rewards, fields: evaluate(transform, rewards, **fields)[0])
    return np.asarray(compiled(jnp.asarray(rewards), fields))


def backwards(value, mask, decay):
    """a[t] = value[t] + decay a[next unmasked], token by token."""
    out = np.zeros(value.shape)
    for place in np.ndindex(*value.shape[:2]):
        later = 0.0
        for t in reversed(np.flatnonzero(mask[place])):
            later = value[place][t] + decay * later
            out[place][t] = later
    return out


def at_last(reward, mask):
    value = np.zeros(mask.shape)
    for place in np.ndindex(*mask.shape[:2]):
        value[place][np.flatnonzero(mask[place])[-1:]] = reward[place]
    return value


def test_planning_tokens_are_scaled_by_exactly_one_plus_or_minus_alpha():
    planning = [[[True, False, True]] * 3]
    tokens = np.array([[[True, True, True], [True, True, True], [True, True, False]]])
    steps = (subtract_group_mean(), to_tokens(), hicra(alpha=0.25))
    value = run(steps, [[2.0, 0.0, 1.0]], planning=planning, token_mask=tokens)
    assert value.tolist() == [[[1.25, 1, 1.25], [-0.75, -1, -0.75], [0, 0, 0]]]
    alike = run(steps, [[1.0, 1.0, 1.0]], planning=planning, token_mask=tokens)
    assert (alike == 0).all()
    off = run((*steps[:2], hicra(alpha=0.0)), REWARD, planning=MASK, token_mask=MASK)
    assert (off == run(steps[:2], REWARD, token_mask=MASK)).all()


def test_grams_mark_every_token_of_an_unbroken_occurrence():
    tokens = [[[5, 1, 2, 1, 2], [1, 2, 3, 1, 1], [1, 5, 2, 9, 9]]]
    sampled = np.ones((1, 3, 5), bool)
    sampled[0, 1, 1] = False  # the 2 of "1 2" was not chosen by the policy
    value = run(
        (to_tokens(), hicra(alpha=0.5, grams=[[1, 2], [9, 9, 9, 9, 9, 9], [3]])),
        [[1.0, 1.0, 1.0]],
        completion_tokens=tokens,
        token_mask=sampled,
    )
    planned = [[0, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0] * 5]
    np.testing.assert_array_equal(value[0], (1 + 0.5 * np.array(planned)) * sampled[0])


def test_a_placebo_of_as_many_tokens_has_as_much_mass():
    """Which tokens plan changes nothing in total: the contrast with a placebo is fair."""
    plan = MASK & (RANDOM.random(MASK.shape) < 0.4)
    placebo = np.zeros_like(plan)
    for place in np.ndindex(P, G):
        number = plan[place].sum()
        placebo[place][RANDOM.permutation(np.flatnonzero(MASK[place]))[:number]] = True
    assert (plan != placebo).any()
    steps = (subtract_group_mean(), to_tokens(), hicra())
    ours = run(steps, REWARD, planning=plan, token_mask=MASK)
    theirs = run(steps, REWARD, planning=placebo, token_mask=MASK)
    np.testing.assert_allclose(np.abs(ours).sum(-1), np.abs(theirs).sum(-1), rtol=1e-12)
    plain = run(steps[:2], REWARD, token_mask=MASK)
    np.testing.assert_array_equal(ours[~plan], plain[~plan])


def test_the_built_in_placebo_raises_as_many_other_tokens_of_each_sample():
    plan = MASK & (RANDOM.random(MASK.shape) < 0.4)
    steps = (subtract_group_mean(), to_tokens())
    plain = run(steps, REWARD, token_mask=MASK)
    ours = run((*steps, hicra()), REWARD, planning=plan, token_mask=MASK)
    values = [
        run((*steps, hicra(placebo=seed)), REWARD, planning=plan, token_mask=MASK)
        for seed in (0, 0, 1)
    ]
    for value in values:
        raised = (value != plain) & MASK
        np.testing.assert_array_equal(raised.sum(-1), ((ours != plain) & MASK).sum(-1))
    np.testing.assert_array_equal(values[0], values[1])
    assert (values[0] != values[2]).any()
    assert (values[0] != ours).any()


@pytest.mark.slow
def test_entropies_of_planning_and_of_the_rest_and_of_the_grams_are_reported():
    tokens = np.array([[[1, 2, 5], [1, 2, 3]]])
    entropy = np.array([[[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]])
    rollouts, spec = plain_rollouts(
        [[1.0, 0.0]],
        completion_tokens=tokens,
        token_mask=np.array([[[1, 1, 1], [1, 1, 0]]], bool),
        token_entropy=entropy,
    )
    grams = [[1, 2], [5], [3], [9] * 9]
    method = chain(sum_rewards(), to_tokens(), hicra(grams=grams, entropies=True))
    _, _, metrics = compute(method, rollouts, method.init(spec))
    measured = {name.split("/")[1]: float(metric.result()) for name, metric in metrics.items()}
    assert measured["planning_entropy"] == pytest.approx((1 + 2 + 4 + 8 + 16) / 5)
    assert np.isnan(measured["execution_entropy"])  # every token plans
    shares = np.array([2, 1]) / 3  # the masked 3 does not count, nor what is longer than a sample
    assert measured["semantic_entropy"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert hicra(grams=grams, entropies=True).needs == {"token_entropy"}


def test_hicra_refuses_what_would_praise_failures_or_name_no_tokens():
    with pytest.raises(InputError, match="alpha = 1, expected 0 <= alpha < 1"):
        hicra(alpha=1)
    with pytest.raises(InputError, match="give one of them"):
        hicra(field="planning", grams=[[1]])
    for grams in ([[]], [[1, -2]]):
        with pytest.raises(InputError, match=r"grams\[0\] = .*expected a list of token ids"):
            hicra(grams=grams)
    with pytest.raises(InputError, match="grams is empty"):
        hicra(grams=[])
    with pytest.raises(InputError, match=r"hicra needs token-level values.*after to_tokens\(\)"):
        evaluate(chain(sum_rewards(), hicra()), [[1.0]], planning=[[[True]]])


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 1025])
def test_sums_behind_a_token_are_cumulative_sums_and_exact_for_a_single_reward(length):
    value = RANDOM.normal(size=(2, 3, length))
    expected = np.cumsum(value[..., ::-1], -1)[..., ::-1]
    np.testing.assert_allclose(sum_behind(jnp.asarray(value)), expected, rtol=0, atol=1e-12)
    place = RANDOM.integers(0, length, (2, 3, 1))
    single = np.where(np.arange(length) == place, np.float32(0.1), np.float32(0))
    expected = np.where(np.arange(length) <= place, np.float32(0.1), np.float32(0))
    np.testing.assert_array_equal(sum_behind(jnp.asarray(single)), expected)


def test_a_reward_at_the_last_token_comes_back_at_every_token():
    broadcast = run((to_tokens(),), REWARD, token_mask=MASK)
    there_and_back = run((to_tokens(place="last"), reward_to_go()), REWARD, token_mask=MASK)
    np.testing.assert_array_equal(broadcast, there_and_back)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_rewards_to_go_pass_over_masked_tokens(gamma):
    steps = (to_tokens(place="last"), kl_in_reward(0.3), reward_to_go(gamma))
    value = run(steps, REWARD, token_mask=MASK, **LOGP)
    tokens = at_last(REWARD, MASK) - 0.3 * (LOGP["trainer_logp"] - LOGP["reference_logp"])
    np.testing.assert_allclose(value, backwards(tokens, MASK, gamma), rtol=0, atol=1e-12)


def gae_oracle(reward, estimate, mask, gamma, lam):
    out = np.zeros(reward.shape)
    for place in np.ndindex(*reward.shape[:2]):
        after, ahead = 0.0, 0.0
        for t in reversed(np.flatnonzero(mask[place])):
            after = reward[place][t] + gamma * ahead - estimate[place][t] + gamma * lam * after
            ahead = estimate[place][t]
            out[place][t] = after
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.7), (1.0, 1.0), (0.9, 1.0), (0.8, 0.0)])
def test_gae_is_its_recursion_and_with_lam_1_the_return_less_the_estimate(gamma, lam):
    estimate = RANDOM.normal(size=(P, G, T))
    unread = np.where(MASK, estimate, np.nan)
    steps = (to_tokens(place="last"), gae(gamma, lam, field="critic"))
    value = run(steps, REWARD, token_mask=MASK, critic=unread)
    reward = at_last(REWARD, MASK)
    expected = gae_oracle(reward, estimate, MASK, gamma, lam)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
    if lam == 1:
        limit = (backwards(reward, MASK, gamma) - estimate) * MASK
        np.testing.assert_allclose(value, limit, rtol=0, atol=1e-12)


VOCABULARY, LENGTH = 3, 3
SEQUENCES = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIX = np.stack(
    [np.zeros(27, int), 1 + SEQUENCES[:, 0], 4 + 3 * SEQUENCES[:, 0] + SEQUENCES[:, 1]], -1
)  # [27, 3]: the state, one of 1 + 3 + 9, in which each token is chosen


def token_logps(table):
    """[27, 3]: log-probs of every sequence under logits [13, 3] of a policy with full memory."""
    return jnp.take_along_axis(
        jax.nn.log_softmax(table)[PREFIX], jnp.asarray(SEQUENCES)[..., None], -1
    )[..., 0]


def test_kl_in_reward_with_rewards_to_go_is_the_gradient_of_the_kl():
    """By enumeration of all sequences: E[R] - beta KL(policy || reference) has that gradient."""
    policy, reference = (jnp.asarray(RANDOM.normal(size=(13, 3))) for _ in range(2))
    reward, beta = jnp.asarray(RANDOM.normal(size=27)), 0.7
    steps = (to_tokens(place="last"), kl_in_reward(beta), reward_to_go())

    def objective(table):
        logp = token_logps(table).sum(-1)
        distance = logp - token_logps(reference).sum(-1)
        return (jnp.exp(logp) * (reward - beta * distance)).sum()

    def surrogate(table, advantage):
        logp = token_logps(table)
        chance = jax.lax.stop_gradient(jnp.exp(logp.sum(-1, keepdims=True)))
        return (chance * advantage * logp).sum()

    def advantages(*steps):
        return run(
            steps,
            reward[None],
            token_mask=np.ones((1, 27, LENGTH), bool),
            trainer_logp=token_logps(policy)[None],
            reference_logp=token_logps(reference)[None],
        )[0]

    slope = jax.jit(jax.grad(surrogate))
    expected = jax.jit(jax.grad(objective))(policy)
    to_go = advantages(*steps)
    np.testing.assert_allclose(slope(policy, to_go), expected, rtol=0, atol=1e-9)
    # The whole sum at every token (k1 of the sequence in its reward) is as exact, only noisier.
    totals = np.broadcast_to(to_go[:, :1], to_go.shape)
    np.testing.assert_allclose(slope(policy, totals), expected, rtol=0, atol=1e-9)
    # Without the sum behind it, a token is not charged for the states that it leads to.
    alone = advantages(to_tokens(), kl_in_reward(beta))
    assert np.abs(np.asarray(slope(policy, alone) - expected)).max() > 1e-2


def test_kl_behind_the_normalisation_has_one_beta_for_all_groups():
    rewards = REWARD * np.array([[1.0], [10.0], [0.0]])
    before = (subtract_group_mean(), divide_by_group_std(), to_tokens(place="last"))
    scored = MASK.any(-1)
    masks = {"mask": scored, "token_mask": MASK}
    plain = run((*before, reward_to_go()), rewards, **masks)
    charged = run((*before, kl_in_reward(0.1), reward_to_go()), rewards, **masks, **LOGP)
    distance = LOGP["trainer_logp"] - LOGP["reference_logp"]
    # Of every gradient behind a mean that holds the sample itself.
    left = 1 - 1 / scored.sum(1)[:, None, None]
    expected = -0.1 * left * backwards(distance, MASK, 1.0)
    np.testing.assert_allclose(charged - plain, expected, rtol=0, atol=1e-12)


def test_kl_in_reward_reads_the_sampler_where_told_and_counts_what_it_clamps():
    wild = LOGP["reference_logp"].copy()
    place = tuple(np.argwhere(MASK)[0])
    wild[place] = -np.inf
    value = run(
        (to_tokens(), kl_in_reward(1.0, "base", policy="behavior")),
        0 * REWARD,
        token_mask=MASK,
        behavior_logp=LOGP["trainer_logp"],
        base_logp=wild,
    )
    expected = np.where(MASK, wild - LOGP["trainer_logp"], 0)
    expected[place] = -20
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


def test_the_wrong_options_and_levels_are_refused():
    for wrong in (
        lambda: kl_in_reward(-0.1),
        lambda: kl_in_reward(0.1, policy="sampler"),
        lambda: reward_to_go(1.5),
        lambda: gae(lam=-1),
    ):
        with pytest.raises(InputError, match="expected"):
            wrong()
    for step in (kl_in_reward(0.1), reward_to_go(), gae()):
        fields: dict[str, Any] = dict.fromkeys(step.needs, LOGP["trainer_logp"])
        with pytest.raises(InputError, match=r"token-level values.*after to_tokens\(\)"):
            evaluate(chain(sum_rewards(), step), REWARD, **fields)


def test_metrics_say_how_much_was_planned_and_charged():
    rollouts = laws.make_rollouts(np.float64)
    tail = (to_tokens(place="last"), kl_in_reward(0.1), hicra())
    compiled = jax.jit(lambda rollouts: compute(chain(sum_rewards(), *tail), rollouts)[2])
    metrics = {name: metric.result() for name, metric in compiled(rollouts).items()}
    total = np.asarray(rollouts.rewards["correct"] + rollouts.rewards["style"])
    mask = np.asarray(rollouts.token_mask) & np.isfinite(total)[..., None]
    logp = np.asarray(rollouts.behavior_logp)  # trainer 0.95, reference 0.9 of it
    assert metrics["kl_in_reward/kl"] == pytest.approx(0.05 * logp[mask].mean())
    assert metrics["kl_in_reward/log_ratio_clamped"] == 0
    planning = np.asarray(rollouts.fields["planning"])
    assert metrics["hicra/planning"] == pytest.approx(planning[mask].mean())
