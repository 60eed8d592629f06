"""Several rewards, lengths, weights of groups and their recipes, against what the papers say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.advantages import (
    build,
    chain,
    clip_advantage,
    combine,
    compute,
    dvao,
    evaluate,
    mask_low_variance,
    overlong_penalty,
    shrink_rare_success,
    subtract_group_mean,
    sum_rewards,
    weight_by_absolute_advantage,
    weight_by_learnability,
)
from jaxgrpo.errors import InputError
from jaxgrpo.types import Rollouts, Signal

NAN = np.nan
WEIGHTS = {"a": 0.7, "b": 0.2, "c": 1.3}


def values(recipe, rewards, options=None, **fields):
    """The advantages of one recipe or chain, jitted."""
    return all_values([(recipe, options)], rewards, **fields)[0]


def all_values(wholes, rewards, **fields):
    """The advantages of (recipe or chain, options) each, in one jitted program."""

    @jax.jit
    def run(rewards, fields):
        return [evaluate(one, rewards, options=more, **fields)[0] for one, more in wholes]

    given = jax.tree.map(jnp.asarray, rewards, is_leaf=lambda node: isinstance(node, list))
    found = run(given, {name: jnp.asarray(field) for name, field in fields.items()})
    return [np.asarray(value) for value in found]


def rewards_of(num_groups=40, size=6, seed=0):
    """Three float64 rewards, some flat in some groups; group 0 flat in all."""
    random = np.random.default_rng(seed)
    made = {
        "a": random.integers(0, 2, (num_groups, size)).astype(float),
        "b": random.normal(size=(num_groups, size)),
        "c": random.exponential(size=(num_groups, size)),
    }
    for index, name in enumerate(made):
        made[name][index + 1 : index + 5] = 0.1 + index
        made[name][0] = 0.1
    return made


def scores(reward, ddof=0, eps=0.0):
    """(reward - mean) / (std + eps) of each group, 0 in flat ones, in NumPy."""
    flat = reward.max(1, keepdims=True) == reward.min(1, keepdims=True)
    std = reward.std(1, ddof=ddof, keepdims=True)
    centred = reward - reward.mean(1, keepdims=True)
    return np.where(flat, 0, centred / np.where(flat, 1, std + eps)), np.where(flat, 0, std)


def test_dvao_is_the_papers_mixture_and_a_shrunken_normalised_sum():
    rewards = rewards_of()
    with jax.enable_x64(True):
        options = {"eps": 0.0, "weights": WEIGHTS}
        ours, summed = all_values([("dvao", options), ("grpo", {**options, "ddof": 0})], rewards)
    parts = {name: scores(reward) for name, reward in rewards.items()}
    total = sum(WEIGHTS[name] * std for name, (_, std) in parts.items())
    live = total > 0
    share = {
        name: WEIGHTS[name] * std / np.where(live, total, 1) for name, (_, std) in parts.items()
    }
    mixture = sum(share[name] * score for name, (score, _) in parts.items())
    np.testing.assert_allclose(ours, mixture, atol=1e-12)
    deviation = sum(WEIGHTS[name] * reward for name, reward in rewards.items()).std(1)[:, None]
    np.testing.assert_allclose(ours, deviation / np.where(live, total, 1) * summed, atol=1e-12)
    assert (np.abs(ours) <= np.abs(summed) + 1e-12).all()
    assert np.abs(ours).mean() < 0.9 * np.abs(summed).mean()
    assert (ours[0] == 0).all()


def test_dvao_reaches_the_normalised_sum_where_rewards_move_together():
    base = np.random.default_rng(0).normal(size=(20, 5))
    rewards = {"a": base, "b": 3 * base + 1, "c": 0.5 * base}
    with jax.enable_x64(True):
        ours = values("dvao", rewards, {"eps": 0.0, "weights": WEIGHTS})
        opposed = values("dvao", {**rewards, "b": -base}, {"eps": 0.0, "weights": WEIGHTS})
    np.testing.assert_allclose(ours, scores(base)[0], atol=1e-12)
    assert (np.abs(opposed) < np.abs(ours)).all()


def test_dvao_is_as_sensitive_to_each_reward_as_the_closed_form_says():
    """dA_j / dr_kj = (w_k / S)(1 - 1/G - A_j z_kj / G), by central differences."""
    size, step = 5, 1e-6
    one = {name: reward[-1:] for name, reward in rewards_of(size=size).items()}
    groups = {name: [] for name in one}
    for name in one:
        for sample in range(size):
            for sign in (step, -step):
                moved = {key: reward.copy() for key, reward in one.items()}
                moved[name][0, sample] += sign
                for key, reward in moved.items():
                    groups[key].append(reward[0])
    with jax.enable_x64(True):
        options = {"eps": 0.0, "weights": WEIGHTS}
        moved = values("dvao", {name: np.array(rows) for name, rows in groups.items()}, options)
        here = values("dvao", one, options)[0]
    moved = moved.reshape(len(one), size, 2, size)
    slope = (moved[:, :, 0] - moved[:, :, 1]) / (2 * step)
    spread = sum(WEIGHTS[name] * reward.std() for name, reward in one.items())
    for index, (name, reward) in enumerate(one.items()):
        score = scores(reward)[0][0]
        closed = WEIGHTS[name] / spread * (1 - 1 / size - here * score / size)
        np.testing.assert_allclose(np.diag(slope[index]), closed, rtol=1e-7)


def test_one_scale_for_all_changes_nothing_and_one_for_one_its_share_under_dvao_only():
    rewards = {name: reward[6:] for name, reward in rewards_of().items()}
    scaled = {name: 100 * reward for name, reward in rewards.items()}
    one = {**rewards, "b": 7 * rewards["b"]}
    plain = {"eps": 0.0, "weights": WEIGHTS}
    heavier = {"eps": 0.0, "weights": {**WEIGHTS, "b": 7 * WEIGHTS["b"]}}
    methods = [("dvao", plain), ("gdpo", plain), ("dvao", heavier)]
    with jax.enable_x64(True):
        here, gdpo, more = all_values(methods, rewards)
        together = all_values(methods, scaled)
        dvao_of_one, gdpo_of_one, _ = all_values(methods, one)
    for left, right in zip(together, (here, gdpo, more), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-12)
    np.testing.assert_allclose(dvao_of_one, more, atol=1e-12)
    assert np.abs(dvao_of_one - here).max() > 0.1
    np.testing.assert_allclose(gdpo_of_one, gdpo, atol=1e-12)


def test_a_reward_that_is_flat_in_a_group_has_no_share_in_it():
    varied = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32)
    flat = np.repeat(np.random.default_rng(1).normal(size=(30, 1)), 7, 1).astype(np.float32)
    assert (flat.std(1) > 0).any()  # the trap
    rewards = {"a": varied, "b": 1000 * flat, "c": flat}
    both, alone, neither = all_values(
        [
            ("dvao", {"weights": {"a": 1, "b": 1, "c": 0}}),
            ("dvao", {"weights": {"a": 1, "b": 0, "c": 0}}),
            ("dvao", {"eps": 0.0, "weights": {"a": 0, "b": 1, "c": 1}}),
        ],
        rewards,
    )
    np.testing.assert_array_equal(both, alone)
    assert (neither == 0).all()


def test_dvao_reports_the_shares():
    rewards = {"a": [[0.0, 1.0], [0.0, 3.0], [1.0, 1.0]], "b": [[0.0, 3.0], [0.0, 1.0], [2.0, 2.0]]}
    rollouts = Rollouts(
        **{
            **dict.fromkeys(Rollouts.__dataclass_fields__),  # type: ignore[arg-type]
            "rewards": {name: jnp.asarray(reward) for name, reward in rewards.items()},
            "fields": {},
            "step": jnp.int32(0),
        }
    )
    metrics = jax.jit(lambda given: compute(chain(dvao(a=1.0, b=2.0)), given)[2])(rollouts)
    # Deviations 1 : 3 and 3 : 1, b weighing double; the flat group has no shares.
    assert metrics["dvao/share_a"].result() == pytest.approx((1 / 7 + 3 / 5) / 2)
    assert metrics["dvao/share_b"].result() == pytest.approx((6 / 7 + 2 / 5) / 2)


def test_with_one_reward_the_methods_are_those_for_one():
    whitened = [{"use": "sum_rewards"}, *_GRPO, {"use": "whiten_batch"}]
    wholes = [
        ("grpo", {"eps": 1e-4, "ddof": 0}),
        ("dvao", {"eps": 1e-4}),
        (whitened, None),
        ("gdpo", None),
    ]
    with jax.enable_x64(True):
        normalised, by_stds, white, apart = all_values(wholes, rewards_of()["b"])
    np.testing.assert_allclose(by_stds, normalised, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(apart, white)


_GRPO = [{"use": "subtract_group_mean"}, {"use": "divide_by_group_std", "eps": 1e-4}]


def test_gdpo_tells_apart_what_the_normalised_sum_confounds():
    """Rewards (1, 0) and (1, 1) against (0, 0): half as much, and all."""
    rewards = {"a": [[0.0, 1.0], [0.0, 1.0]], "b": [[0.0, 0.0], [0.0, 1.0]]}
    root = np.sqrt(0.5)
    steps = build("gdpo", {"eps": 0.0}).steps[:-1]
    before = chain(*(step for _, step in steps))
    wholes = [("grpo", {"eps": 0.0}), (before, None), ("gdpo", {"eps": 0.0})]
    collapsed, before, after = all_values(wholes, rewards)
    np.testing.assert_allclose(collapsed, [[-root, root]] * 2, rtol=1e-6)
    np.testing.assert_allclose(before, [[-root, root], [-2 * root, 2 * root]], rtol=1e-6)
    np.testing.assert_allclose(after[1], 2 * after[0], rtol=1e-6)


def trl_gdpo(rewards, weights, eps=1e-4):
    """TRL's normalize_then_sum with everything scored, then whitening over samples."""
    before = sum(
        weights[name]
        * (reward - reward.mean(1, keepdims=True))
        / (reward.std(1, ddof=1, keepdims=True) + eps)
        for name, reward in rewards.items()
    )
    return (before - before.mean()) / (before.std(ddof=1) + eps), before


def test_gdpo_has_trls_numbers():
    rewards = rewards_of()
    with jax.enable_x64(True):
        ours = values("gdpo", rewards, {"weights": WEIGHTS})
    np.testing.assert_allclose(ours, trl_gdpo(rewards, WEIGHTS)[0], atol=1e-11)
    assert (ours[0] == 0).all()


def test_gdpo_counts_samples_where_verl_counts_tokens():
    rewards = rewards_of()
    _, before = trl_gdpo(rewards, WEIGHTS, 1e-6)

    def verl(length):
        mean = (length * before).sum() / length.sum()
        variance = (length * (before - mean) ** 2).sum() / (length.sum() - 1)
        return (before - mean) / np.sqrt(variance + 1e-8)

    with jax.enable_x64(True):
        ours = values("gdpo", rewards, {"eps": 1e-6, "weights": WEIGHTS})
    np.testing.assert_allclose(ours, verl(np.ones_like(before)), atol=1e-5)
    tenfold = np.where(before < 0, 10, 1)  # what is worse than its group is ten times as long
    assert (ours[0] == 0).all()
    assert (verl(tenfold)[0] > 0.5).all()  # a flat group, and a push upwards


def test_decoupled_clipping_cuts_each_reward_before_the_sum():
    lucky = np.eye(1, 16).astype(np.float64)  # 1 of 16: (G - 1) / sqrt(G) = 3.75 before the cut
    steady = np.arange(16.0)[None] % 2
    with jax.enable_x64(True):
        options = {"eps": 0.0, "clip": 1.5, "weights": {"a": 1.0, "b": 1.0}}
        steps = build("gdpo", options).steps[:-1]
        value = values(chain(*(step for _, step in steps)), {"a": lucky, "b": steady})
    rare, often = scores(lucky, ddof=1)[0], scores(steady, ddof=1)[0]
    np.testing.assert_allclose(value, np.clip(rare, -1.5, 1.5) + often, atol=1e-12)
    assert rare.max() == pytest.approx(3.75)


def test_one_success_of_many_is_bounded_and_cutting_it_flips_no_sign():
    for size in (2, 64):
        lucky = np.eye(1, size)
        with jax.enable_x64(True):
            cut = chain(build("grpo", {"eps": 0.0}), clip_advantage(0.5, 2.0))
            wholes = [("grpo", {"eps": 0.0, "ddof": ddof}) for ddof in (0, 1)]
            by_n, by_less, clipped = all_values([*wholes, (cut, None)], lucky)
        assert by_n.max() == pytest.approx(np.sqrt(size - 1), rel=1e-12)
        assert by_less.max() == pytest.approx((size - 1) / np.sqrt(size), rel=1e-12)
        assert clipped.max() == pytest.approx(min(2.0, by_less.max()))
        assert (np.sign(clipped) == np.sign(by_less)).all()


def test_rare_successes_shrink_and_failures_without_one_stay():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4]
    signs = chain(build("sign"), shrink_rare_success(2, reward="reward", threshold=1.0))
    two, four = (chain(build("dr_grpo"), shrink_rare_success(count)) for count in (2, 4))
    plain, two, four, signs = all_values(
        [(whole, None) for whole in ("dr_grpo", two, four, signs)], rewards
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
        wholes = [(chain(sum_rewards(), part), None) for part in parts]
        value, doubled, until_the_end = (
            found[0] for found in all_values(wholes, np.ones((1, 25)), token_mask=tokens)
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
        wholes = (
            grpo,
            chain(grpo, weight_by_absolute_advantage()),
            chain(grpo, weight_by_learnability(reward="reward")),
            chain(dr_grpo, weight_by_learnability()),
            chain(dr_grpo, weight_by_learnability(reward="reward")),
            chain(grpo, weight_by_absolute_advantage(normalise=True)),
        )
        normalised, sizes, variances, here, there, mean_one = all_values(
            [(whole, None) for whole in wholes], rewards
        )
    spread = np.sqrt(rate * (1 - rate))[:, None]
    np.testing.assert_allclose(sizes, 2 * spread * normalised, atol=1e-12)
    np.testing.assert_allclose(variances, spread**2 * normalised, atol=1e-12)
    np.testing.assert_allclose(here, there, atol=1e-12)  # a baseline leaves the variance
    np.testing.assert_allclose(mean_one, spread / spread.mean() * normalised, atol=1e-12)


def test_weights_that_are_all_zero_stay_zero():
    wholes = (
        chain(build("dr_grpo"), weight_by_absolute_advantage(normalise=True)),
        chain(sum_rewards(), weight_by_learnability(normalise=True)),
    )
    for value in all_values([(whole, None) for whole in wholes], [[0.1] * 7, [0.7] * 7]):
        assert (value == 0).all()


def test_combine_makes_one_signal_and_cannot_invent_a_sample():
    def product(streams, rollouts):
        a, b = streams["a"], streams["b"]
        return Signal(value=a.value / b.value, mask=jnp.ones_like(a.mask))

    rewards = {"a": [[1.0, 2.0, NAN, 3.0]], "b": [[2.0, 0.0, NAN, NAN]]}
    value, mask = evaluate(chain(combine(product)), rewards)
    assert mask.tolist() == [[True, False, False, False]]  # 2 / 0, unscored, 3 / 0
    assert value.tolist() == [[0.5, 0, 0, 0]]
    assert combine(product).name == "product"
    assert combine(product, name="ratio").name == "ratio"
    assert combine(product, needs=("rubric",)).needs == {"rubric"}


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


def test_rlcr_pays_the_most_for_the_confidence_that_is_the_chance_of_being_right():
    """One group holds every confidence twice, once right and once wrong."""
    grid = np.linspace(0, 1, 11)
    confidence = np.concatenate([grid, grid])
    right = np.repeat([1.0, 0.0], 11)
    rewards = {
        "accuracy": right[None],
        "brier": 1 - (right - confidence)[None] ** 2,
        "format": np.ones((1, 22)),
    }
    with jax.enable_x64(True):
        advantage = values("rlcr", rewards)[0]
    best = []
    for index, chance in enumerate(grid):
        expected = chance * advantage[:11] + (1 - chance) * advantage[11:]
        assert expected.argmax() == index
        best.append(expected.max())
    # Each reward weighs a half, and the baseline is the same for all.
    np.testing.assert_allclose(np.array(best) - best[0], grid**2 / 2, atol=1e-12)


def test_rlcr_teaches_calibration_where_all_are_right_and_names_what_it_needs():
    rewards = {"accuracy": [[1.0, 1.0]], "brier": [[1.0, 0.75]], "format": [[1.0, 1.0]]}
    np.testing.assert_allclose(values("rlcr", rewards), [[0.0625, -0.0625]])
    with pytest.raises(InputError, match="weight 'brier' has no reward of that name"):
        evaluate("rlcr", {"accuracy": [[1.0, 0.0]]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dvao(a=-0.5), "weight a = -0.5 is negative, expected 0 or more: negate"),
        (
            lambda: evaluate("dvao", {"a": [[0.0, 1.0]]}, options={"weights": {"b": 1.0}}),
            "dvao: weight 'b' has no reward of that name",
        ),
        (
            lambda: evaluate(chain(combine(lambda streams, rollouts: 1.0, "own")), [[1.0]]),
            "own returned float, expected a Signal",
        ),
        (
            lambda: evaluate(
                chain(combine(lambda s, r: Signal(value=jnp.ones(3), mask=jnp.ones(3)), "own")),
                [[1.0]],
            ),
            r"own returned value \(3,\) and mask \(3,\), expected \[P, G\] = \(1, 1\)",
        ),
        (lambda: shrink_rare_success(0), "count = 0, expected more than 0 successes"),
        (lambda: overlong_penalty(0), "buffer = 0, expected from 1 to limit tokens"),
        (lambda: overlong_penalty(9, 8), "buffer = 9, expected from 1 to limit = 8 tokens"),
        (lambda: overlong_penalty(1, 0), "limit = 0, expected at least 1 token"),
        (
            lambda: evaluate("dapo", [[1.0]], options={"buffer": 5}, token_mask=np.ones((1, 1, 4))),
            "buffer = 5, expected from 1 to limit = 4",
        ),
        (
            lambda: chain(subtract_group_mean(), dvao()),
            "dvao takes the reward streams",
        ),
        (
            lambda: evaluate(chain(sum_rewards(), mask_low_variance(0.1, field="x")), [[1.0, 0.0]]),
            "mask_low_variance needs the field 'x'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
