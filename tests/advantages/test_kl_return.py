"""KL-control as a return: its gradient by enumeration, its baseline, and beta found from rates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.advantages.chains import at_tokens
from jaxgrpo.advantages.registry import plain_rollouts
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import RolloutSpec

pytestmark = pytest.mark.usefixtures("float64")

LENGTH = 2
SEQUENCES = np.array(list(itertools.product(range(2), repeat=LENGTH)))  # [4, 2]
PREFIX = np.stack([np.zeros(4, int), 1 + SEQUENCES[:, 0]], 1)
RANDOM = np.random.default_rng(0)


def token_logps(table):
    """[4, 2]: log-probs of every sequence under logits [3, 2] of a policy with full memory."""
    logp = jax.nn.log_softmax(table)[PREFIX]
    return jnp.take_along_axis(logp, jnp.asarray(SEQUENCES)[..., None], -1)[..., 0]


def run(steps, rewards, num_rows=None, **fields):
    rollouts, spec = plain_rollouts(rewards, **fields)
    transform = adv.chain(adv.sum_rewards(), *steps)
    state = transform.init(spec._replace(num_rows=num_rows or spec.num_rows))
    signal, state, metrics = jax.jit(transform.update)(adv.start(rollouts), state, rollouts)
    return signal, state, {name.rpartition("/")[2]: m.result() for name, m in metrics.items()}


@pytest.mark.slow
def test_its_expected_gradient_is_that_of_kl_control_and_the_baseline_is_free():
    """Over all groups of two samples: E v - beta KL(policy || reference) has that gradient."""
    policy, reference = (jnp.asarray(RANDOM.normal(size=(3, 2))) for _ in range(2))
    reward, beta = jnp.asarray(RANDOM.normal(size=4)), 0.7
    groups = np.array(list(itertools.product(range(4), repeat=2)))  # [16, 2]
    logp = token_logps(policy)

    def objective(table):
        logp = token_logps(table).sum(-1)
        distance = logp - token_logps(reference).sum(-1)
        return (jnp.exp(logp) * (reward - beta * distance)).sum()

    def estimate(table, advantage):
        chance = jnp.exp(logp.sum(-1))[groups].prod(-1)
        return (chance[:, None, None] * advantage * token_logps(table)[groups]).sum() / 2

    signal, _, _ = run(
        [adv.add_kl_return(beta)],
        reward[groups],
        token_mask=np.ones((16, 2, LENGTH), bool),
        trainer_logp=logp[groups],
        reference_logp=token_logps(reference)[groups],
    )
    gradient = jax.grad(estimate)(policy, signal.value)
    np.testing.assert_allclose(gradient, jax.grad(objective)(policy), rtol=0, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tail", ["add_kl_return", "kl_in_reward"])
def test_behind_each_baseline_reward_and_kl_are_scaled_alike(tail, size):
    """Over all groups, answers of one token and of two: (1 - 1/G) of the gradient, or all of it."""
    table, reference = (jnp.asarray(RANDOM.normal(size=(3, 2))) for _ in range(2))
    reward, beta = jnp.asarray(RANDOM.normal(size=3)), 0.7
    mask = np.array([[1, 0], [1, 1], [1, 1]], bool)  # 0 ends; 1 is followed by 0 or 1
    groups = np.array(list(itertools.product(range(3), repeat=size)))

    def logps(table):
        return jnp.where(mask, token_logps(table)[np.array([0, 2, 3])], 0)

    def objective(table):
        chance = jnp.exp(logps(table).sum(-1))
        return (chance * (reward - beta * (logps(table) - logps(reference)).sum(-1))).sum()

    def estimate(table, advantage):
        chance = jnp.exp(logps(table).sum(-1))[groups].prod(-1)
        return (
            jax.lax.stop_gradient(chance) * (advantage * logps(table)[groups]).sum((1, 2))
        ).sum()

    parts = {
        "add_kl_return": [adv.add_kl_return(beta)],
        "kl_in_reward": [adv.to_tokens("last"), adv.kl_in_reward(beta), adv.reward_to_go()],
    }[tail]
    fields = {"trainer_logp": logps(table)[groups], "reference_logp": logps(reference)[groups]}
    turns = {"turn": np.zeros((*groups.shape, 2), int), "turn_reward": np.zeros((*groups.shape, 1))}
    turns["state_hash"] = np.arange(groups.size).reshape(*groups.shape, 1)  # no two turns meet
    full_gradient = jax.grad(objective)(table)
    # One turn is a whole sample: its part is Dr. GRPO's baseline, on tokens already.
    by_turn = [[adv.turn_returns()], [adv.turn_normalise(std=False)]]
    for baseline, share in (
        ([], 1),
        ([adv.subtract_leave_one_out_mean()], 1),
        ([adv.subtract_group_mean()], 1 - 1 / size),
        ([adv.chain(adv.mask_truncated(), adv.subtract_group_mean())], 1 - 1 / size),
        *((part, 1 - 1 / size) for part in by_turn if tail == "add_kl_return"),
    ):
        truncated = np.zeros(groups.shape, bool)
        rollout_fields = {"token_mask": mask[groups], "truncated": truncated, **fields, **turns}
        signal, _, _ = run([*baseline, *parts], reward[groups], **rollout_fields)
        gradient = jax.grad(estimate)(table, signal.value) / size
        np.testing.assert_allclose(gradient, share * full_gradient, rtol=0, atol=1e-9)
        nested, _, _ = run([*baseline, adv.chain(*parts)], reward[groups], **rollout_fields)
        np.testing.assert_array_equal(nested.value, signal.value)


def every_group(size, answers=4):
    """Groups of answers [N, G] whatever their order, and how many orders each has."""
    groups = list(itertools.combinations_with_replacement(range(answers), size))
    counts = [[group.count(answer) for answer in range(answers)] for group in groups]
    orders = [math.factorial(size) / math.prod(map(math.factorial, each)) for each in counts]
    return np.array(groups), np.array(orders)


@pytest.mark.parametrize("size", [2, 4, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", ["rloo", "dr_grpo"])
@pytest.mark.parametrize("aim", ["beta", "validity"])
def test_the_exact_gradient_comes_to_rest_at_the_tilted_base(aim, recipe, size):
    """Ascent on its expectation over all groups, from the base: no noise, no approximation."""
    base, valid = np.array([0.25, 0.15, 0.10, 0.50]), np.array([1.0, 1.0, 1.0, 0.0])
    groups, orders = every_group(size)
    steps = {
        "beta": [adv.add_kl_return(0.5)],
        "validity": [adv.add_kl_return_for_validity(0.9, base_rate="rate")],
    }[aim]
    transform = adv.extend(adv.build(recipe), *steps)
    rollout_fields = {
        "token_mask": np.ones((*groups.shape, 1), bool),
        "rate": np.full(len(groups), 0.5),
    }
    rollout_fields |= {"row": np.zeros(len(groups), np.int32)}
    anchor = jnp.asarray(np.log(base))[groups][..., None]

    @jax.jit
    def ascend(logits):
        logp = jax.nn.log_softmax(logits)
        logps = {"trainer_logp": logp[groups][..., None], "behavior_logp": logp[groups][..., None]}
        logps |= {"reference_logp": anchor, "base_logp": anchor}
        rollouts, _ = plain_rollouts(valid[groups], **rollout_fields, **logps)
        state = transform.init(adv.spec_of(rollouts, num_rows=1))
        value = adv.compute(transform, rollouts, state)[0].value[..., 0]
        pushed = jnp.eye(4)[groups] - jnp.exp(logp)[None, None]
        chance = orders * jnp.exp(logp[groups].sum(1))
        return logits + 4 * (chance[:, None] * (value[..., None] * pushed).mean(1)).sum(0)

    logits = jax.lax.fori_loop(0, 400, lambda _, logits: ascend(logits), jnp.log(base))
    expected = base * np.exp(valid / 0.5) if aim == "beta" else base * np.where(valid > 0, 9, 1)
    np.testing.assert_allclose(jax.nn.softmax(logits), expected / expected.sum(), atol=1e-6)


def test_a_sample_pays_for_what_is_to_come_less_what_the_others_pay_there():
    mask = np.array([[[1, 1, 0], [1, 0, 0], [1, 1, 1]]], bool)
    distance = np.array([[[0.1, 0.2, 9.0], [0.5, 9.0, 9.0], [1.0, 2.0, 4.0]]])
    wide, _, _ = run(
        [adv.add_kl_return(2.0)],
        [[1.0, 2.0, 3.0]],
        token_mask=mask,
        trainer_logp=distance,
        reference_logp=0 * distance,
    )
    paid = -2 * np.array([[0.3, 0.2, 0.0], [0.5, 0.0, 0.0], [7.0, 6.0, 4.0]])
    baseline = -np.array([[7.5, 12.0, 0.0], [7.3, 0.0, 0.0], [0.8, 0.4, 0.0]])
    expected = np.where(mask[0], np.array([[1.0], [2.0], [3.0]]) + paid - baseline, 0)
    np.testing.assert_allclose(wide.value[0], expected, rtol=0, atol=1e-12)
    assert (wide.mask == mask).all()


@pytest.mark.full
@pytest.mark.slow
def test_values_of_tokens_stay_and_the_kl_comes_on_top():
    rollouts = laws.make_rollouts(np.float64)
    start = adv.chain(adv.sum_rewards(), adv.to_tokens(), adv.hicra())
    before, _, _ = adv.compute(start, rollouts)
    after, _, _ = adv.compute(adv.extend(start, adv.add_kl_return(0.3)), rollouts)

    def nothing(signal, rollouts):
        return dataclasses.replace(signal, value=jnp.zeros_like(signal.value))

    alone = adv.chain(adv.sum_rewards(), nothing, adv.add_kl_return(0.3))
    charged, _, _ = adv.compute(alone, rollouts)
    np.testing.assert_allclose(after.value, before.value + charged.value, rtol=0, atol=1e-12)
    assert (after.mask == before.mask).all()


def test_with_rloo_nothing_is_pushed_at_the_tilted_base():
    base = np.array([0.25, 0.15, 0.10, 0.50])
    valid, beta = np.array([1.0, 1.0, 1.0, 0.0]), 0.5
    tilted = base * np.exp(valid / beta)
    logp = np.log(np.stack([tilted / tilted.sum(), base]))[:, None, :, None]
    rollout_fields = {"token_mask": np.ones((1, 4, 1), bool), "reference_logp": logp[1]}
    steps = [adv.subtract_leave_one_out_mean(), adv.add_kl_return(beta)]
    signal, _, _ = run(steps, valid[None], trainer_logp=logp[0], **rollout_fields)
    np.testing.assert_allclose(signal.value, 0, rtol=0, atol=1e-12)


def test_beta_is_the_one_that_leads_the_rows_met_to_the_target():
    """Two rows of base rates 1/2 and 1/4, one that never succeeds, and one that was never met."""
    rewards = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], float)
    zero = np.zeros((3, 4, 1))
    logps = dict.fromkeys(("trainer_logp", "base_logp", "behavior_logp"), zero)
    rollout_fields = {"row": np.array([2, 0, 1]), "token_mask": np.ones((3, 4, 1), bool), **logps}
    step = adv.add_kl_return_for_validity(0.8)
    _, state, metrics = run([step], rewards, num_rows=4, **rollout_fields)
    tilted = [r / (r + (1 - r) * np.exp(-1 / metrics["beta"])) for r in (0.5, 0.25)]
    assert np.mean(tilted) == pytest.approx(0.8)
    assert metrics["base_rate"] == pytest.approx(0.25)
    assert metrics["rows_left_out"] == pytest.approx(1 / 3)
    tracked = state["add_kl_return_for_validity"]
    np.testing.assert_array_equal(tracked["count"], [4, 4, 4, 0])
    np.testing.assert_array_equal(tracked["total"], [1, 0, 2, 0])


def test_the_base_rate_is_right_in_expectation_whatever_the_policy_became():
    """One group with every answer as often as a policy of rate .9 draws it."""
    base, policy = np.array([0.3, 0.2, 0.5]), np.array([0.6, 0.3, 0.1])
    answer = np.repeat([0, 1, 2], [6, 3, 1])[None]
    logp = {"behavior_logp": np.log(policy), "base_logp": np.log(base), "trainer_logp": policy}
    answer_logps = {name: value[answer][..., None] for name, value in logp.items()}
    _, _, metrics = run(
        [adv.add_kl_return_for_validity(0.8)],
        (answer < 2).astype(float),
        token_mask=np.ones((1, 10, 1), bool),
        **answer_logps,
    )
    assert metrics["base_rate"] == pytest.approx(0.5)
    assert metrics["beta"] == pytest.approx(1 / np.log(4))


def test_a_base_that_is_there_already_or_never_succeeds_gives_the_highest_beta():
    zero = np.zeros((1, 4, 1))
    logps = dict.fromkeys(("trainer_logp", "base_logp", "behavior_logp"), zero)
    for rewards in ([[1.0, 1.0, 1.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]):
        signal, _, metrics = run(
            [adv.add_kl_return_for_validity(0.6, max_beta=7.0)],
            rewards,
            token_mask=np.ones((1, 4, 1), bool),
            **logps,
        )
        assert metrics["beta"] == 7.0
        assert np.isfinite(np.asarray(signal.value)).all()


@pytest.mark.full
@pytest.mark.slow
def test_a_field_gives_the_base_rates_where_it_is_named():
    rollouts = laws.make_rollouts(np.float64)
    step = adv.add_kl_return_for_validity(0.95, base_rate="difficulty")
    transform = adv.chain(adv.sum_rewards(), step)
    state = transform.init(adv.spec_of(rollouts, num_rows=laws.ROWS))
    _, state, _ = adv.compute(transform, rollouts, state)
    tracked = state["add_kl_return_for_validity"]
    rows, rates = np.asarray(rollouts.row), np.asarray(rollouts.fields["difficulty"])
    mean = [rates[rows == row].mean() for row in range(laws.ROWS)]
    np.testing.assert_allclose(tracked["total"] / tracked["count"], mean)


def test_streams_several_rewards_and_wrong_options_are_refused():
    step = adv.add_kl_return_for_validity(0.9)
    spec = RolloutSpec(
        num_prompts=1, group_size=2, max_prompt_tokens=1, max_completion_tokens=1, num_rows=3
    )
    with pytest.raises(InputError, match="a stream whose rows do not return"):
        step.init(spec._replace(num_rows=None))
    with pytest.raises(InputError, match=r"2 rewards.*reward=\.\.\."):
        step.init(spec._replace(rewards=("a", "b")))
    by_rate = adv.add_kl_return_for_validity(0.9, base_rate="rate")
    assert by_rate.init(spec._replace(rewards=("a", "b"))).keys() == {"total", "count"}
    for wrong, message in (
        (lambda: adv.add_kl_return(-0.1), "beta = -0.1, expected 0 or more"),
        (lambda: adv.add_kl_return_for_validity(1.0), "expected a"),
        (lambda: adv.add_kl_return_for_validity(0.9, max_beta=0.0), "expected a"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()


def test_a_base_rate_that_was_not_measured_counts_as_not_met():
    logp = jnp.zeros((2, 2, LENGTH))
    fields = {
        "token_mask": logp == 0,
        "base_logp": logp,
        "behavior_logp": logp,
        "trainer_logp": logp,
    }
    step = adv.add_kl_return_for_validity(0.9, base_rate="rate")
    _, state, metrics = run([step], np.eye(2), rate=np.array([np.nan, 0.2]), **fields)
    state = state["add_kl_return_for_validity"]
    assert state["count"].tolist() == [0, 1]
    assert state["total"].tolist() == [0, 0.2]
    np.testing.assert_allclose(metrics["base_rate"], 0.2)
    assert metrics["rows_left_out"] == 0


@pytest.mark.full
def test_the_kl_is_scaled_alike_behind_every_baseline_that_holds_the_sample_itself():
    """What samples pay behind each is what they pay behind the group's mean, 1 - 1/n of all."""
    size, mask = 4, np.array([[1, 1], [1, 0], [1, 1], [1, 1]], bool)[None]
    names = ("trainer_logp", "reference_logp", "token_collision")
    fields = dict(zip(names, RANDOM.normal(size=(3, 1, size, 2)), strict=True))
    # No two leaves meet but at the prompt.
    leaves = {"tree": np.arange(size)[None], "token_depth": np.tile([0, 1], (1, size, 1))}
    leaves["ancestors"] = np.stack([np.zeros(size, int), np.arange(size)], -1)[None]
    rollouts, spec = plain_rollouts([[1.0, 0.0, 0.5, 2.0]], token_mask=mask, **fields, **leaves)

    def paid(*steps):
        chains = adv.chain(*steps), adv.chain(*steps, adv.add_kl_return(2.0))
        signals = (adv.compute(chain, rollouts, chain.init(spec))[0] for chain in chains)
        before, after = (at_tokens(signal, rollouts.token_mask)[0] for signal in signals)
        return after - before

    expected = paid(adv.sum_rewards(), adv.subtract_group_mean())
    everything = paid(adv.sum_rewards(), adv.subtract_leave_one_out_mean())
    np.testing.assert_allclose(expected, (1 - 1 / size) * everything, rtol=0, atol=1e-12)
    np.testing.assert_allclose(paid(adv.dvao()), expected, rtol=0, atol=1e-12)
    for part in (
        adv.normalise_with_virtual_rewards(),
        adv.subtract_length_weighted_mean(),
        adv.subtract_optimal_token_baseline(),
        *(adv.tree_normalise(), adv.tree_process(), adv.tree_subgroup()),
    ):
        after = paid(adv.sum_rewards(), part)
        np.testing.assert_allclose(after, expected, rtol=0, atol=1e-12, err_msg=part.name)


ALONE = {
    "raw": (adv.subtract_group_mean(singleton="raw"), 1),
    "lengths": (adv.subtract_length_weighted_mean(singleton="raw"), 1),
    "turns": (adv.turn_normalise(std=False), 1),
    "virtual": (adv.normalise_with_virtual_rewards(count=4), 4 / 5),
    "zero": (adv.subtract_group_mean(), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["add_kl_return", "kl_in_reward"])
@pytest.mark.parametrize("name", ALONE)
def test_a_sample_that_is_alone_pays_as_much_of_the_kl_as_is_left_of_its_reward(name, tail):
    """By enumeration of all samples of groups of one: the KL's gradient, by that share."""
    part, share = ALONE[name]
    policy, reference = (jnp.asarray(RANDOM.normal(size=(3, 2))) for _ in range(2))
    reward, beta, logp = jnp.asarray(RANDOM.normal(size=4)), 0.7, token_logps(policy)
    fields = {"token_mask": np.ones((4, 1, LENGTH), bool), "trainer_logp": logp[:, None]}
    fields["reference_logp"] = token_logps(reference)[:, None]
    if name == "turns":  # both tokens are a turn, and no state recurs
        fields["turn"] = np.tile([0, 1], (4, 1, 1))
        fields |= {"turn_reward": np.zeros((4, 1, 2)), "state_hash": fields["turn"]}
    to_tokens = [] if name == "turns" else [adv.to_tokens("last")]
    tails = {
        "add_kl_return": lambda beta: [adv.add_kl_return(beta)],
        "kl_in_reward": lambda beta: [*to_tokens, adv.kl_in_reward(beta), adv.reward_to_go()],
    }
    charged, free = (
        run([part, *tails[tail](price)], reward[:, None], **fields)[0].value[:, 0]
        for price in (beta, 0.0)
    )

    def objective(table):
        logp = token_logps(table).sum(-1)
        return -beta * (jnp.exp(logp) * (logp - token_logps(reference).sum(-1))).sum()

    def estimate(table):
        chance = jnp.exp(logp.sum(-1))
        return (chance[:, None] * (charged - free) * token_logps(table)).sum()

    exact = share * jax.grad(objective)(policy)
    np.testing.assert_allclose(jax.grad(estimate)(policy), exact, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_single_live_sample_of_avspo_and_of_verls_centring_pays_its_kl():
    logps = {"trainer_logp": np.full((1, 2, 1), -1.0), "reference_logp": np.full((1, 2, 1), -4.0)}
    fields: Any = {"token_mask": np.ones((1, 2, 1), bool), **logps}
    kl = adv.add_kl_return(0.5)
    for recipe, options, reward, share in (
        ("avspo", {}, (1 - 0.6) / (np.std([1, 0.8, 0.6, 0.4, 0.2], ddof=1) + 1e-6), 4 / 5),
        ("like_verl", {"norm_adv_by_std_in_grpo": False}, 1.0, 1),
    ):
        chain = adv.extend(adv.build(recipe, options), kl)
        value, mask = adv.evaluate(chain, [[1.0, np.nan]], **fields)
        assert value[0, 0, 0] == pytest.approx(reward - share * 0.5 * 3, abs=1e-9)
        assert mask[0, :, 0].tolist() == [True, False]
