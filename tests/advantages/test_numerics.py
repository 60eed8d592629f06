"""What no number may break: flat groups, missing and huge rewards, groups of thousands."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import stats
from jaxgrpo.core.errors import InputError
from jaxgrpo.update.diagnostics import group_metrics


def relative_chains():
    """Every recipe that compares the samples of a group, and every part that does, as chains."""
    return {
        label: transform
        for label, transform in laws.chains().items()
        if transform.relative and (label.startswith("recipe ") or transform.steps[-1][1].relative)
    }


def alike(rollouts, samples):
    """Rollouts of which the samples of a prompt are all the same, all policies agree, and no known
    answer is trained."""
    size = laws.G

    def repeat(leaf):
        if leaf.shape[:2] != (laws.P, size):
            return leaf
        return jnp.broadcast_to(leaf[:, :1], leaf.shape)

    same = jax.tree.map(repeat, rollouts)
    policies = ("reference_logp", "base_logp", "trainer_logp", "teacher_logp")
    fields = same.fields | {name: same.behavior_logp for name in policies if name in same.fields}
    # Known answers are trained in flat groups too.
    fields["answered"] = jnp.zeros_like(same.token_mask)
    return dataclasses.replace(same, rewards=samples, fields=fields)


@pytest.mark.full
def test_a_group_of_equal_samples_gives_exactly_zero_in_all_that_is_relative(monkeypatch):
    """420 float32 constants, sizes 6 to 12, beside mixed groups, by one program."""
    sizes, number, mixed = range(6, 13), 60, 40
    monkeypatch.setattr(laws, "P", number * len(sizes) + mixed)
    monkeypatch.setattr(laws, "G", max(sizes))
    monkeypatch.setattr(laws, "MISSING", set())
    random = np.random.default_rng(0)
    rewards = {}
    present = np.arange(laws.G) < np.append(np.repeat(sizes, number), [laws.G] * mixed)[:, None]
    for name in ("correct", "style"):
        constant = random.uniform(-1, 1, (laws.P, 1)).astype(np.float32)
        group = np.repeat(constant, laws.G, 1)
        group[-mixed:] = random.normal(size=(mixed, laws.G))
        rewards[name] = np.where(present, group, np.nan).astype(np.float32)
    rewards["correct"][: number // 2] = random.integers(0, 2, (number // 2, 1))
    rewards["correct"][: number // 2][~present[: number // 2]] = np.nan
    rewards["correct"][-mixed:] = np.eye(laws.G, dtype=np.float32)[np.arange(mixed) % laws.G]
    total = rewards["correct"] + np.float32(0.2) * rewards["style"]
    noise = np.nanstd(total[:-mixed], 1, ddof=1)
    assert (noise > 0).mean() > 0.2  # the trap: their deviation is not 0

    transforms = relative_chains()
    assert {"recipe grpo 0", "recipe like_verl 2", "divide_by_group_std 0"} <= transforms.keys()
    rollouts = alike(laws.make_rollouts(), jax.tree.map(jnp.asarray, rewards))

    @jax.jit
    def run(rollouts):
        return {
            name: laws.run(transform, rollouts)[0].value for name, transform in transforms.items()
        }

    values = run(rollouts)
    for name, value in values.items():
        assert (np.asarray(value)[:-mixed] == 0).all(), name
    for name in ("grpo 0", "rloo 0", "passk 0", "lite_ppo 0", "like_verl 2", "reinforce_pp 1"):
        name = f"recipe {name}"
        assert (np.asarray(values[name])[-mixed:].reshape(mixed, -1) != 0).any(1).all(), name


@pytest.mark.full
@pytest.mark.slow
def test_totals_that_differ_by_rounding_alone_are_flat():
    """0.1 + 0.6 is 0.7 + 6e-8 in float32: with eps 1e-8 that was an advantage of -1."""
    weights = {"first": 0.1, "second": 0.6, "third": 0.7}
    pairs, third = np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 0.0]])
    rewards = {name: jnp.asarray(pairs, jnp.float32) for name in ("first", "second")}
    rewards["third"] = jnp.asarray(third, jnp.float32)
    recipe_options = {
        name: {} for name in ("dr_grpo", "rloo", "dvao", "passk", "maxrl", "like_trl")
    }
    recipe_options["grpo"] = {"eps": 1e-8}
    for name, options in recipe_options.items():
        value, _ = adv.evaluate(name, rewards, options={"weights": weights, **options})
        assert (np.asarray(value) == 0).all(), name
    metrics = group_metrics(rewards, weights)
    assert metrics["frac_reward_zero_std"].result() == 1
    apart = rewards | {"third": rewards["third"] * 1.00001}
    value, _ = adv.evaluate("grpo", apart, options={"weights": weights, "eps": 0.0})
    np.testing.assert_allclose(value[0], [-(0.5**0.5), 0.5**0.5], rtol=1e-6)


def test_weighted_sums_are_flat_where_their_exact_totals_are():
    """Weights of two decimals, so that whole numbers say which of 2000 groups of 3 are flat."""

    @jax.jit
    def flat(*terms):
        mask = jnp.ones(terms[0].shape, bool)
        sums = stats.added(terms, mask), functools.reduce(operator.add, terms)
        return [stats.is_flat(total, mask)[:, 0] for total in sums]

    random = np.random.default_rng(0)
    trapped = 0
    for number in (2, 3, 5) * 4:
        weights = random.integers(-100, 101, number)
        rewards = random.integers(0, 2, (number, 2000, 3))
        totals = np.tensordot(weights, rewards, 1)
        exact = (totals == totals[:, :1]).all(1)
        products = [
            np.float32(w / 100) * r.astype(np.float32)
            for w, r in zip(weights, rewards, strict=True)
        ]
        ours, plain = flat(*map(jnp.asarray, products))
        np.testing.assert_array_equal(ours, exact)
        trapped += (exact & ~np.asarray(plain)).sum()
    assert trapped > 0  # the trap: plain sums of them differ


@pytest.mark.full
def test_a_sum_changes_no_totals_but_those_that_rounding_sets_apart():
    random = np.random.default_rng(0)
    terms = [jnp.asarray(random.normal(size=(50, 6)), jnp.float32) for _ in range(3)]
    everything = jnp.ones((50, 6), bool)
    np.testing.assert_array_equal(stats.added(terms, everything), sum(terms[1:], terms[0]))
    # A huge entry says nothing about the others, and one term is never touched.
    beside = [jnp.array([[1e8, 0.0, 1.0]]), jnp.array([[1e8, 0.0, 1e-5]])]
    assert stats.added(beside, everything[:1, :3]).tolist() == [
        [2e8, 0.0, float(jnp.float32(1.00001))]
    ]
    alone = jnp.array([[1e8, 1e8 + 8, 1e-30]])
    assert stats.added([alone], everything[:1, :3]) is alone
    # Far less than their terms, and so 0 up to rounding.
    cancelled = [jnp.array([[0.7, 0.0]]), jnp.array([[-0.1, 0.0]]), jnp.array([[-0.6, 0.0]])]
    assert (sum(cancelled[1:], cancelled[0])[0, 0] != 0).item()
    assert stats.added(cancelled, everything[:1, :2]).tolist() == [[0.0, 0.0]]


@pytest.mark.full
def test_large_rewards_that_differ_by_little_are_centred_first():
    """1e8 and 1e8 + 8 are neighbours in float32, and their mean lies between them."""
    rewards = jnp.asarray([[1e8, 1e8 + 8, 1e8, 1e8]], jnp.float32)
    unit = np.array([[-0.5, 1.5, -0.5, -0.5]])
    values = {
        "grpo": unit,
        "dr_grpo": 4 * unit,
        "rloo": 4 * unit * 4 / 3,
        "lite_ppo": unit,  # up to its eps of 1e-4
        "scale_rl": unit,
    }
    for name, expected in values.items():
        np.testing.assert_allclose(
            adv.evaluate(name, rewards)[0], expected, rtol=3e-5, err_msg=name
        )
    steps = [{"use": "sum_rewards"}, {"use": "whiten_batch"}]
    np.testing.assert_allclose(adv.evaluate(steps, rewards)[0], unit, rtol=1e-6)
    low = adv.evaluate("dr_grpo", -rewards)[0]
    np.testing.assert_allclose(low, -4 * unit, rtol=1e-6)


@pytest.mark.slow
def test_means_by_length_and_of_trees_are_centred_first_too():
    rewards = jnp.asarray([[1e8, 1e8 + 8, 1e8, 1e8]], jnp.float32)
    ancestors = np.array([[[0, 1], [0, 2], [0, 3], [0, 4]]])  # only the root is shared
    fields: dict[str, Any] = {"token_mask": np.ones((1, 4, 2), bool), "ancestors": ancestors}
    fields["token_depth"] = np.ones((1, 4, 2), int)
    centred = np.array([[-2.0, 6, -2, -2]])
    for part, expected in (
        (adv.subtract_length_weighted_mean(), centred),
        (adv.tree_subgroup(), centred),
        (adv.tree_process(), 2 * np.stack([centred] * 2, -1)),
    ):
        read = {name: fields[name] for name in fields if name in (*part.needs, "token_mask")}
        value, _ = adv.evaluate(part, rewards, **read)
        np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=part.name)


def test_nothing_breaks_on_nan_inf_huge_or_missing_rewards():
    """Finite in every recipe that needs but rewards; what is not finite is not scored."""
    rows = [
        [np.nan, 1.0, 0.0, np.inf],
        [np.nan, np.nan, 1.0, -np.inf],
        [np.nan] * 4,
        [1e30, -1e30, 1e30, 0.0],
        [1e30] * 4,
        [1e-30, 0.0, 0.0, 1e-30],
    ]
    rewards = jnp.asarray(np.array(rows, np.float32))
    tokens = jnp.ones((6, 4, 2), bool)
    names = ("rloo", "maxrl", "passk", "lite_ppo", "like_trl", "like_verl", "grpo", "reinforce_pp")

    @jax.jit
    def run(rewards):
        return {name: adv.evaluate(name, rewards, token_mask=tokens) for name in names}

    for name, (value, mask) in run(rewards).items():
        value, mask = np.asarray(value), np.asarray(mask)
        assert np.isfinite(value).all(), name
        assert (value[~mask] == 0).all(), name
        sample = mask if mask.ndim == 2 else mask.all(-1)
        np.testing.assert_array_equal(sample, np.isfinite(rows))
        if name != "reinforce_pp":
            assert (value[[2, 4]] == 0).all(), name  # none scored, flat
        if name not in ("reinforce_pp", "like_verl"):
            assert (value[1] == 0).all(), name  # one scored
    np.testing.assert_allclose(
        run(rewards)["rloo"][0][3], np.array([1, -5 / 3, 1, -1 / 3]) * 1e30, rtol=1e-6
    )


def test_a_reward_whose_square_is_infinite_is_refused_instead_of_advantages_of_zero():
    with pytest.raises(InputError, match=r"'reward' holds 1e\+30 in size: its square does not fit"):
        adv.evaluate("grpo", [[1e30, 0.0, jnp.inf, jnp.nan]])
    assert adv.evaluate("grpo", [[1e14, 0.0]])[0].all()


@pytest.mark.parametrize(
    "rewards",
    [
        [[1e39, 0.0]],
        np.array([[-1e300, 0.0]]),
        np.array([[3_000_000_000, 0]]),
        np.array([[2**40, 1]], np.uint64),
        [[np.int64(2**40), 0]],
        [np.array([1e39, 0.0])],
    ],
)
def test_a_number_that_its_array_cannot_hold_is_refused_instead_of_infinite_or_negative(rewards):
    message = r"'reward'.*(holds numbers|out of bounds)"
    with jax.enable_x64(False), pytest.raises(InputError, match=message):
        adv.evaluate("dr_grpo", rewards)
    assert adv.evaluate("dr_grpo", np.array([[3, 1]]))[0].tolist() == [[1, -1]]


def test_groups_of_thousands_keep_their_digits():
    random = np.random.default_rng(3)
    rewards = (100 + random.normal(size=(2, 4096))).astype(np.float32)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean(1, keepdims=True)
    wins = (rewards > 102).astype(np.float32)
    values = jax.jit(
        lambda rewards, wins: {
            "grpo": adv.evaluate("grpo", rewards)[0],
            "rloo": adv.evaluate("rloo", rewards)[0],
            "lite_ppo": adv.evaluate("lite_ppo", rewards)[0],
            "median": adv.evaluate([adv.sum_rewards(), adv.subtract_group_median()], rewards)[0],
            "passk": adv.evaluate("passk", wins, options={"k": 64})[0],
        }
    )(rewards, wins)
    expected = {
        "grpo": centred / (exact.std(1, ddof=1, keepdims=True) + 1e-6),
        "rloo": centred * 4096 / 4095,
        "lite_ppo": centred / (exact.std(ddof=1) + 1e-4),
        "median": exact - np.median(exact, 1, keepdims=True),
        "passk": pass_at_64(wins.astype(np.float64)),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=2e-5, atol=3e-5, err_msg=name)


def pass_at_64(wins, k=64):
    """n (U - U without the sample), in float64 and with logarithms of factorials."""
    number, losses = wins.shape[1], (1 - wins).sum(1, keepdims=True)

    def fail(losses, number):
        steps = np.arange(k)
        return np.exp(np.log((losses[..., None] - steps) / (number - steps)).sum(-1))

    without = fail(losses - (1 - wins), number - 1)
    return number * (without - fail(losses, number))


@pytest.mark.full
def test_a_deviation_that_underflows_divides_nothing_by_zero():
    tiny = [[1e-30, 2e-30, 3e-30]]
    turns = {"turn": np.zeros((1, 3, 1), int), "turn_reward": np.zeros((1, 3, 1))}
    turns |= {"state_hash": np.zeros((1, 3, 1), int), "token_mask": np.ones((1, 3, 1), bool)}
    fields: dict[str, Any] = {"tree_normalise": {"tree": [[0, 0, 0]]}, "turn_normalise": turns}
    for step in ("divide_by_group_std", "divide_by_batch_std", "whiten_batch", *fields):
        chain = [{"use": "sum_rewards"}, {"use": step, "eps": 0.0}]
        value, _ = adv.evaluate(chain, tiny, **fields.get(step, {}))
        assert (np.asarray(value) == 0).all(), step
