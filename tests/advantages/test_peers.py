"""Parity with verl and TRL: what their own functions returned (golden/make.py), and their traps."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.advantages import evaluate
from jaxgrpo.core.errors import InputError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "peers.json").read_text())
VERL = {
    "verl grpo": {"adv_estimator": "grpo"},
    "verl grpo_vectorized": {"adv_estimator": "grpo_vectorized"},
    "verl grpo centred": {"norm_adv_by_std_in_grpo": False},
    "verl grpo_passk": {"adv_estimator": "grpo_passk"},
    "verl rloo": {"adv_estimator": "rloo"},
    "verl rloo_vectorized": {"adv_estimator": "rloo_vectorized"},
    "verl opo": {"adv_estimator": "opo"},
}
TRL = {f"trl {scale}": {"scale_rewards": scale} for scale in ("group", "batch", "none")}
RECIPES = {
    **{name: ("like_verl", options) for name, options in VERL.items()},
    **{name: ("like_trl", options) for name, options in TRL.items()},
    "verl rloo ": ("rloo", {}),
    "trl none ": ("dr_grpo", {}),
    "trl batch ": ("lite_ppo", {}),
    "verl grpo_passk ": ("passk", {}),
    "verl grpo ": ("grpo", {}),
}
"""Golden column -> the recipe that has its numbers; also of ours (with a blank)."""


NOISY = ("grpo_vectorized", "reinforce_plus_plus_baseline", "gdpo")
"""Of verl, not 0 on a flat group of 0.15: by rounding to float32, and by the batch's mean."""


def array(rows):
    return np.array(rows, float)  # null, not scored, becomes NaN


def every(recipes, rewards, **fields):
    """Name -> advantages, by one compiled program that keeps the dtype."""

    def run(rewards, fields):
        return {
            name: evaluate(recipe, rewards, options=options, **fields)[0]
            for name, (recipe, options) in recipes.items()
        }

    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, (rewards, fields))
        return jax.tree.map(np.asarray, jax.jit(run)(*arrays))


def test_the_table_of_golden_values_is_met():
    """Each row is a batch of its own, as "batch" asks: all rows under vmap, filled up with NaN."""
    rows = GOLDEN["table"]
    rewards = np.full((len(rows), 1, 4), np.nan)
    for index, row in enumerate(rows):
        rewards[index, 0, : len(row["rewards"])] = row["rewards"]

    def run(rewards):
        tokens = jnp.ones((1, 4, 1), bool)
        return {
            name: evaluate(recipe, rewards, options=options, token_mask=tokens)[0]
            for name, (recipe, options) in RECIPES.items()
        }

    with jax.enable_x64(True):
        values = jax.jit(jax.vmap(run))(jnp.asarray(rewards))
    for name, value in values.items():
        for index, row in enumerate(rows):
            single = len(row["rewards"]) == 1
            if name.strip() not in row or (name.endswith(" ") and single):
                continue  # of a single sample ours say 0, and grpo_passk raises in verl
            got = np.asarray(value)[index, 0, : len(row["rewards"])]
            np.testing.assert_allclose(got, row[name.strip()], atol=2e-7, err_msg=f"{name} {row}")


def test_the_table_is_that_of_the_papers_formulas():
    """The golden values by hand, so that a wrong table does not prove itself."""
    first, third = GOLDEN["table"][0], GOLDEN["table"][2]
    np.testing.assert_allclose(first["trl group"], [1.4997] + [-0.4999] * 3, atol=1e-6)
    np.testing.assert_allclose(first["verl grpo"], [1.499997] + [-0.499999] * 3, atol=1e-9)
    np.testing.assert_allclose(first["verl grpo_passk"], [1.999996, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(third["verl rloo"], [-13 / 30, 0.5, -1 / 30, -1 / 30], atol=1e-9)
    np.testing.assert_allclose(GOLDEN["table"][5]["verl grpo"], [1], atol=1e-6)


def test_maxrl_is_that_of_prime_and_skyrl():
    rows = [[1.0, 0, 0, 0], [1, 1, 1, 0], [0.2, 0.9, 0.5, 0.5], [0, 0, 0, 0], [1, 1, 1, 1]]
    recipes = {"prime": ("maxrl", {}), "sky": ("maxrl", {"eps": 1e-6})}
    values = every(recipes, np.array(rows))
    third = [-0.619048, 0.714286, -0.047619, -0.047619]
    prime = [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], third, [0] * 4, [0] * 4]
    np.testing.assert_allclose(values["prime"], prime, atol=1e-6)
    mean = np.mean(rows, 1, keepdims=True)
    np.testing.assert_allclose(values["sky"], (rows - mean) / (mean + 1e-6), atol=1e-12)


def batch(name):
    case = GOLDEN[name]
    streams = {key: array(case[key]) for key in ("correct", "style")}
    weights = dict(zip(streams, case["weights"], strict=True))
    return case, streams, weights


def test_verl_s_batches_are_met_but_for_flat_groups():
    case, streams, weights = batch("batch")
    length = np.array(case["length"])
    recipes = {
        name: ("like_verl", {"adv_estimator": name, "weights": weights})
        for name in case["verl"]
        if not name.endswith("centred")
    }
    options = {"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": False, "weights": weights}
    recipes["grpo_passk centred"] = ("like_verl", options)
    mask = np.arange(length.max()) < length[..., None]
    values = every(recipes, streams, token_mask=mask)
    total = np.sum([weights[name] * stream for name, stream in streams.items()], axis=0)
    flat = total.max(1) == total.min(1)
    assert flat.tolist() == [False, True, False, False, False, False]
    for name, value in values.items():
        expected = array(case["verl"][name])
        if value.ndim == 3:
            assert (value[~mask] == 0).all()
            np.testing.assert_array_equal(value, value[..., :1] * mask)
            value = value[..., 0]
        if name in NOISY:
            assert np.abs(expected[flat]).min() > 1e-3
        if name != "reinforce_plus_plus":  # it has no groups
            assert (value[flat] == 0).all()
            expected[flat] = 0
        np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["batch", "partly"])
def test_trl_s_batches_are_met_also_where_rewards_are_missing(name):
    case, streams, weights = batch(name)
    recipes = {}
    for key in case["trl"]:
        order, scale = key.split()
        options = {"scale_rewards": scale, "multi_objective_aggregation": order}
        recipes[key] = ("like_trl", {**options, "weights": weights})
    values = every(recipes, streams)
    for key, value in values.items():
        np.testing.assert_allclose(value, array(case["trl"][key]), atol=1e-6, err_msg=key)
        assert (value[1] == 0).all()  # flat in every reward


def test_a_reward_that_is_missing_of_several_counts_0_in_trl_and_masks_the_sample_here():
    rewards = {"a": np.array([[1.0, 0.0, np.nan]]), "b": np.array([[0.0, 0.5, 0.5]])}
    recipes = {"trl": ("like_trl", {"scale_rewards": "none"}), "ours": ("dr_grpo", {})}
    values = every(recipes, rewards)
    np.testing.assert_allclose(values["trl"], [[1 / 3, -1 / 6, -1 / 6]], atol=1e-12)
    np.testing.assert_allclose(values["ours"], [[0.25, -0.25, 0]], atol=1e-12)


def test_single_samples_keep_their_reward_only_where_verl_says_so():
    rewards = [[0.7, np.nan, np.nan]]
    tokens = np.ones((1, 3, 2), bool)
    raw = {"grpo": 0.7 / (1 + 1e-6), "rloo": 0.7, "opo": 0.7, "rloo_vectorized": 0, "grpo_passk": 0}
    recipes = {name: ("like_verl", {"adv_estimator": name}) for name in raw}
    values = every(recipes, np.array(rewards), token_mask=tokens)
    for name, expected in raw.items():
        np.testing.assert_allclose(values[name], [[expected, 0, 0]], atol=1e-12, err_msg=name)


def test_options_that_the_peers_do_not_have_are_refused():
    with pytest.raises(InputError, match="like_trl option scale_rewards 'groups': did you mean"):
        evaluate("like_trl", [[1.0, 0.0]], options={"scale_rewards": "groups"})
    with pytest.raises(InputError, match="multi_objective_aggregation 'sum'"):
        evaluate("like_trl", [[1.0, 0.0]], options={"multi_objective_aggregation": "sum"})
    with pytest.raises(InputError, match="adv_estimator 'gae'"):
        evaluate("like_verl", [[1.0, 0.0]], options={"adv_estimator": "gae"})


def test_the_peers_make_noise_of_equal_float32_rewards_and_we_do_not():
    """Up to 0.15 (verl) and 0.002 (TRL) where it should be 0: what their functions returned."""
    assert GOLDEN["flat_noise"]["verl grpo"] > 0.05
    assert GOLDEN["flat_noise"]["trl group"] > 5e-4
    seven = np.full((1, 7), 0.1, np.float32)
    std = seven.std(ddof=1)
    assert std > 0  # the trap: a test by the deviation finds a group that is not flat
    recipes = {name: (name, {}) for name in ("like_verl", "like_trl", "grpo")}
    for value in every(recipes, seven).values():
        assert value.dtype == np.float32
        assert (value == 0).all()


def nemo(rewards):
    """NeMo-RL's leave-one-out mean and deviation: (advantage, deviation), by its formula."""
    rewards = np.asarray(rewards, float)
    number = len(rewards)
    leave_one_out = (rewards.sum() - rewards) / (number - 1)
    squares = (np.square(rewards).sum() - np.square(rewards)) / (number - 1)
    variance = (squares - leave_one_out**2) * (number - 1) / (number - 2)
    std = np.sqrt(np.maximum(variance, 0))
    advantage = rewards - leave_one_out
    return np.where(std > 0, advantage / (std + 1e-6), advantage), std


def test_a_leave_one_out_deviation_unbalances_the_group_and_loses_the_winner():
    advantage, std = nemo([1.0, 0, 0, 0])
    np.testing.assert_allclose(advantage, [1] + [-0.577349] * 3, atol=1e-6)
    assert advantage.sum() < -0.7
    assert (std != 0).tolist() == [False, True, True, True]  # its filter drops the one success
    names = ("grpo", "rloo", "dr_grpo", "maxrl", "lite_ppo", "like_trl", "like_verl")
    for value in every({name: (name, {}) for name in names}, np.array([[1.0, 0, 0, 0]])).values():
        assert abs(value.sum()) < 1e-12
        assert value[0, 0] > 0
        assert (value[0, 1:] < 0).all()
