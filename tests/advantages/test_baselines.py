"""Baselines and scales against NumPy."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import base, compute
from jaxgrpo.core.errors import InputError

SUM = adv.sum_rewards(correct=1.0, style=0.2)
CHAINS = {
    "loo": [SUM, adv.subtract_leave_one_out_mean()],
    "median": [SUM, adv.subtract_group_median()],
    "opo": [SUM, adv.subtract_length_weighted_mean()],
    "by mean": [adv.sum_rewards(correct=0.0, style=1.0), adv.divide_by_group_mean(0.1)],
    "best": [SUM, adv.max_minus_second()],
    "pairs": [SUM, adv.contrastive_pairs()],
    "constant": [SUM, adv.subtract_constant(lambda step: 0.1 * step.astype(jnp.float64))],
    "raw std": [SUM, adv.divide_by_batch_std(1e-4), adv.subtract_group_mean()],
    "centred std": [SUM, adv.subtract_group_mean(), adv.divide_by_batch_std(0.1, 0)],
    "live std": [
        SUM,
        adv.subtract_group_mean(),
        adv.divide_by_batch_std(0.1, 0, include_flat=False),
    ],
    "white": [SUM, adv.whiten_batch(0.1, 0, keep="nothing")],
    "white tokens": [
        SUM,
        adv.subtract_group_mean(),
        adv.to_tokens(),
        adv.whiten_batch(0.1, 1, "std", keep="zero_groups"),
    ],
    "live tokens": [
        SUM,
        adv.subtract_group_mean(),
        adv.to_tokens(),
        adv.whiten_batch(0.1, 1, include_flat=False),
    ],
    "clip": [SUM, adv.clip_advantage(low=-0.3, high=0.5)],
    "limit": [SUM, adv.clip_advantage(limit=0.25)],
}


@pytest.fixture(scope="module")
def outcome():
    """(rollouts, chain name -> (signal, state, metrics)) in float64, by one compiled program."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        rollouts = laws.make_rollouts(np.float64)
        transforms = {name: adv.chain(*steps) for name, steps in CHAINS.items()}
        run = jax.jit(
            lambda batch: {
                name: compute(transform, batch) for name, transform in transforms.items()
            }
        )
        return rollouts, run(rollouts)


def scored(rollouts):
    """(rewards with 0 where masked, mask), [P, G]."""
    total = sum(
        weight * np.asarray(rollouts.rewards[name])
        for name, weight in (("correct", 1.0), ("style", 0.2))
    )
    return np.nan_to_num(total), np.isfinite(total)


def by_group(rewards, mask, function):
    """function(unmasked rewards, their indices) of each group that is not flat; 0 elsewhere."""
    out = np.zeros_like(rewards)
    for group in range(len(rewards)):
        keep = np.flatnonzero(mask[group])
        row = rewards[group, keep]
        if len(row) > 1 and row.max() > row.min():
            out[group, keep] = function(row, (group, keep))
    return out


def best_minus_second(row, place):
    ordered = np.sort(row)
    return np.where(row == ordered[-1], ordered[-1] - ordered[-2], 0)


def pairs_won(row, place):
    return np.sign(row[:, None] - row).sum(1) / len(row)


def mean_of_the_rest(row, place):
    return row - np.array([np.delete(row, sample).mean() for sample in range(len(row))])


@pytest.mark.slow
def test_group_baselines_are_the_papers_formulas(outcome):
    rollouts, values = outcome
    rewards, mask = scored(rollouts)
    length = np.asarray(rollouts.token_mask).sum(-1)
    oracles = {
        "loo": mean_of_the_rest,
        "median": lambda row, place: row - np.median(row),
        "opo": lambda row, place: row - np.average(row, weights=length[place]),
        "best": best_minus_second,
        "pairs": pairs_won,
    }
    for name, oracle in oracles.items():
        expected = by_group(rewards, mask, oracle)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(
            values[name][0].value, expected, rtol=0, atol=1e-12, err_msg=name
        )


@pytest.mark.slow
def test_the_group_mean_divides_only_where_it_is_positive(outcome):
    rollouts, values = outcome
    rewards = np.asarray(rollouts.rewards["style"])
    number = np.maximum(np.isfinite(rewards).sum(1, keepdims=True), 1)
    rewards = np.nan_to_num(rewards)
    mean = rewards.sum(1, keepdims=True) / number
    assert (mean < 0).any()
    assert (mean > 0).any()
    expected = np.where(mean > 0, rewards / np.where(mean > 0, mean + 0.1, 1), 0)
    np.testing.assert_allclose(values["by mean"][0].value, expected, atol=1e-12)


def test_the_deviation_of_the_batch_is_that_of_the_values_it_gets(outcome):
    rollouts, values = outcome
    rewards, mask = scored(rollouts)
    centred = by_group(rewards, mask, lambda row, place: row - row.mean())
    live = mask & (centred != 0).any(1, keepdims=True)
    assert live.sum() < mask.sum() - 5
    expected = {
        "raw std": centred / (rewards[mask].std(ddof=1) + 1e-4),
        "centred std": centred / (centred[mask].std() + 0.1),
        "live std": centred / (centred[live].std() + 0.1),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[name][0].value, value, atol=1e-12, err_msg=name)
    metric = values["live std"][2]["divide_by_batch_std/std"]
    assert metric.result() == pytest.approx(centred[live].std())


def test_whitening_counts_samples_or_tokens_and_keeps_what_it_is_told(outcome):
    rollouts, values = outcome
    rewards, mask = scored(rollouts)
    white = (rewards - rewards[mask].mean()) / np.sqrt(rewards[mask].var() + 0.1)
    np.testing.assert_allclose(values["white"][0].value, np.where(mask, white, 0), atol=1e-12)

    centred = by_group(rewards, mask, lambda row, place: row - row.mean())
    tokens = np.asarray(rollouts.token_mask) & mask[..., None]
    live = tokens & (centred != 0).any(1)[:, None, None]
    wide = np.broadcast_to(centred[..., None], tokens.shape)
    every = (wide - wide[tokens].mean()) / (wide[tokens].std(ddof=1) + 0.1)
    np.testing.assert_allclose(
        values["white tokens"][0].value, np.where(live, every, 0), atol=1e-12
    )
    some = (wide - wide[live].mean()) / np.sqrt(wide[live].var(ddof=1) + 0.1)
    np.testing.assert_allclose(values["live tokens"][0].value, np.where(live, some, 0), atol=1e-12)


def test_whitening_leaves_exact_zeros_at_0_unless_told_otherwise():
    rewards = jnp.array([[-1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    run = jax.jit(
        lambda rewards: {
            keep: adv.evaluate([SUM_ALL, adv.whiten_batch(keep=keep)], rewards)[0]
            for keep in ("zeros", "zero_groups", "nothing")
        }
    )
    zero = jax.tree.map(lambda value: (np.asarray(value) == 0).tolist(), run(rewards))
    assert zero["zeros"] == [[False, True, False], [True] * 3]
    assert zero["zero_groups"] == [[False] * 3, [True] * 3]
    assert zero["nothing"] == [[False] * 3, [False] * 3]
    for value in run(jnp.full((2, 3), 0.1)).values():  # a flat batch
        assert (np.asarray(value) == 0).all()


SUM_ALL = adv.sum_rewards()


def test_constants_and_clipping(outcome):
    rollouts, values = outcome
    rewards, mask = scored(rollouts)
    for name, expected in {
        "constant": rewards - 0.1 * 3,  # the step of the laws' rollouts is 3
        "clip": np.clip(rewards, -0.3, 0.5),
        "limit": np.clip(rewards, -0.25, 0.25),
    }.items():
        np.testing.assert_allclose(
            values[name][0].value, np.where(mask, expected, 0), atol=1e-12, err_msg=name
        )
    signs = np.sign(values["limit"][0].value)
    np.testing.assert_array_equal(signs, np.where(mask, np.sign(rewards), 0))
    share = (np.abs(rewards) > 0.25)[mask].mean()
    assert values["limit"][2]["clip_advantage/clipped"].result() == pytest.approx(share)


def test_bounds_of_a_schedule_never_flip_a_sign():
    wrong = adv.clip_advantage(low=lambda step: 1.0, high=lambda step: -1.0)
    value, _ = adv.evaluate([SUM_ALL, wrong], [[-2.0, 3.0]])
    assert value.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("size", [31, 32, 33, 64])
def test_the_median_is_the_same_counted_and_sorted(size):
    random = np.random.default_rng(size)
    rewards = random.integers(-3, 4, (20, size)).astype(np.float32)
    rewards[random.random((20, size)) < 0.4] = np.nan
    rewards[0], rewards[1, 1:] = np.nan, np.nan
    value, mask = jax.jit(
        lambda rewards: adv.evaluate([SUM_ALL, adv.subtract_group_median()], rewards)
    )(rewards)
    expected = by_group(
        np.nan_to_num(rewards), np.asarray(mask), lambda row, place: row - np.median(row)
    )
    np.testing.assert_array_equal(value, expected)


def test_conditional_sign_centres_mixed_groups_and_signs_flat_ones():
    rewards = [[1.0, 0.0, 0.0, np.nan], [0.0] * 4, [1.0, 1.0, 1.0, np.nan], [0.0] + [np.nan] * 3]
    value, _ = adv.evaluate("conditional_sign", rewards)
    expected = [[2 / 3, -1 / 3, -1 / 3, 0], [-1] * 4, [1, 1, 1, 0], [-1, 0, 0, 0]]
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_asymmetric_is_r_less_cost_times_one_less_r():
    value, _ = adv.evaluate("asymmetric", [[1.0, 0.0, 0.0]], options={"cost": 0.25})
    assert value.tolist() == [[1, -0.25, -0.25]]
    with pytest.raises(InputError, match="asymmetric takes rewards in"):
        adv.evaluate("asymmetric", [[0.5, 0.0]])


def test_pass_at_k_says_nothing_of_groups_of_k_or_fewer():
    rewards = np.array([[1.0, 0, 0, 0], [1, 0, 0, np.nan], [1, 0, np.nan, np.nan], [np.nan] * 4])
    transform = adv.chain(SUM_ALL, adv.leave_one_out_pass_at_k(2))
    rollouts = dataclasses.replace(laws.make_rollouts(), rewards={"r": jnp.asarray(rewards)})
    signal, _, metrics = jax.jit(lambda batch: compute(transform, batch))(rollouts)
    np.testing.assert_allclose(signal.value[0], [2, -2 / 3, -2 / 3, -2 / 3], rtol=1e-6)
    np.testing.assert_allclose(signal.value[1], [2, -1, -1, 0], rtol=1e-6)
    assert (np.asarray(signal.value)[2:] == 0).all()
    assert metrics["leave_one_out_pass_at_k/too_few"].result() == pytest.approx(1 / 3)
    with pytest.raises(InputError, match=r"group_size = 4: .*k=4.* more than k"):
        adv.evaluate("passk", [[1.0, 0, 0, 0]], options={"k": 4})


REFUSED = {
    "ddof = 2": lambda: adv.whiten_batch(ddof=2),
    "batch_std: ddof = 3": lambda: adv.divide_by_batch_std(ddof=3),
    "eps_in = 'variants'": lambda: adv.whiten_batch(eps_in="variants"),
    "keep = 'all'": lambda: adv.whiten_batch(keep="all"),
    "singleton = 'keep'": lambda: adv.subtract_group_mean(singleton="keep"),
    "cost = -1": lambda: adv.asymmetric(cost=-1),
    "k = 0": lambda: adv.leave_one_out_pass_at_k(0),
    "cost = nan": lambda: adv.asymmetric(cost=np.nan),
    "low = 0.5, expected a number not above 0": lambda: adv.clip_advantage(low=0.5),
    "high = -1, expected a number not below 0": lambda: adv.clip_advantage(high=-1),
    "low = nan, expected": lambda: adv.clip_advantage(low=np.nan),
    "eps = -1.0, expected 0 or more": lambda: adv.divide_by_running_scale(eps=-1.0),
    "limit, or low": lambda: adv.clip_advantage(),
    "limit = -1": lambda: adv.clip_advantage(-1),
    "limit, or low, high": lambda: adv.clip_advantage(limit=1.0, low=-1.0),
    "baseline = 'mean'": lambda: adv.build("reinforce_pp", {"baseline": "mean"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_options_are_refused_where_they_are_given(message):
    with pytest.raises(InputError, match=message):
        REFUSED[message]()


@pytest.mark.full
def test_flat_groups_are_normalised_as_if_virtual_rewards_were_in_them():
    """NumPy on the group with the virtual rewards behind it; mixed groups are GRPO's."""
    rewards = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, np.nan, np.nan, np.nan]])
    value, mask = adv.evaluate("avspo", rewards, options={"count": 3, "top": 2.0})
    grpo, _ = adv.evaluate("grpo", rewards[:1])
    np.testing.assert_array_equal(value[0], grpo[0])
    virtual = 2.0 * np.array([3, 2, 1]) / 4
    for row in (1, 2, 3):
        real = rewards[row][~np.isnan(rewards[row])]
        together = np.concatenate([real, virtual])
        expected = (real - together.mean()) / (together.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(value[row][: len(real)], expected, rtol=1e-5)
    assert not mask[3, 1:].any()
    assert (np.asarray(value)[3, 1:] == 0).all()
    with pytest.raises(InputError, match="count = 0, expected a whole number of at least 1"):
        adv.normalise_with_virtual_rewards(count=0)


def test_numbers_of_samples_and_turns_are_whole():
    expected = "expected a whole number of at least 1"
    for make, name in (
        (adv.leave_one_out_pass_at_k, "leave_one_out_pass_at_k: k"),
        (adv.normalise_with_virtual_rewards, "normalise_with_virtual_rewards: count"),
        (adv.keep_samples, "keep_samples: count"),
        (adv.keep_turns, "keep_turns: first"),
    ):
        with pytest.raises(InputError, match=f"^{name} = 0, {expected}"):
            make(0)
    for number in (2.5, 2.0, "2", True):  # that a config may hold
        with pytest.raises(InputError, match=f"^mine: k = {number!r}, {expected}"):
            base.check_whole("mine", k=number)
    base.check_whole("mine", k=np.int64(2), count=None)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 4])
def test_with_std_pass_at_k_is_normalised_over_all_subsets(k):
    """Every subset of k of 5 samples is a group that is worth its best: GRPO over subsets."""
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1] * 5, [0] * 5]
    transform = adv.chain(SUM_ALL, adv.leave_one_out_pass_at_k(k, std=True))
    value, _ = adv.evaluate(transform, np.array(rows, np.float32))
    for group, row in zip(np.asarray(value), rows, strict=True):
        subsets = [*itertools.combinations(range(5), k)]
        worth = np.array([max(row[g] for g in subset) for subset in subsets], float)
        score = (worth - worth.mean()) / worth.std() if worth.std() > 0 else 0 * worth
        for sample in range(5):
            mine = [place for place, subset in enumerate(subsets) if sample in subset]
            assert group[sample] == pytest.approx(score[mine].mean(), abs=1e-5)
