"""Several rewards, lengths, weights of groups and their recipes, against what the papers say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluating import all_values, scores, values

from jaxgrpo.advantages import build, chain, combine, compute, dvao, evaluate, subtract_group_mean
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts, Signal

NAN = np.nan
WEIGHTS = {"a": 0.7, "b": 0.2, "c": 1.3}


def make_rewards(num_groups=40, size=6, seed=0):
    """Three float64 rewards, some flat in some groups; group 0 flat in all."""
    random = np.random.default_rng(seed)
    rewards = {
        "a": random.integers(0, 2, (num_groups, size)).astype(float),
        "b": random.normal(size=(num_groups, size)),
        "c": random.exponential(size=(num_groups, size)),
    }
    for index, name in enumerate(rewards):
        rewards[name][index + 1 : index + 5] = 0.1 + index
        rewards[name][0] = 0.1
    return rewards


def test_dvao_is_the_papers_mixture_and_a_shrunken_normalised_sum():
    rewards = make_rewards()
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
    summed_rewards = np.sum([WEIGHTS[name] * reward for name, reward in rewards.items()], 0)
    deviation = summed_rewards.std(1, keepdims=True)
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
    last_group = {name: reward[-1:] for name, reward in make_rewards(size=size).items()}
    groups = {name: [] for name in last_group}
    for name in last_group:
        for sample in range(size):
            for sign in (step, -step):
                moved = {key: reward.copy() for key, reward in last_group.items()}
                moved[name][0, sample] += sign
                for key, reward in moved.items():
                    groups[key].append(reward[0])
    with jax.enable_x64(True):
        options = {"eps": 0.0, "weights": WEIGHTS}
        moved = values("dvao", {name: np.array(rows) for name, rows in groups.items()}, options)
        advantage = values("dvao", last_group, options)[0]
    moved = moved.reshape(len(last_group), size, 2, size)
    slope = (moved[:, :, 0] - moved[:, :, 1]) / (2 * step)
    spread = sum(WEIGHTS[name] * reward.std() for name, reward in last_group.items())
    for index, (name, reward) in enumerate(last_group.items()):
        score = scores(reward)[0][0]
        closed = WEIGHTS[name] / spread * (1 - 1 / size - advantage * score / size)
        np.testing.assert_allclose(np.diag(slope[index]), closed, rtol=1e-7)


def test_one_scale_for_all_changes_nothing_and_one_for_one_its_share_under_dvao_only():
    rewards = {name: reward[6:] for name, reward in make_rewards().items()}
    scaled = {name: 100 * reward for name, reward in rewards.items()}
    rescaled = {**rewards, "b": 7 * rewards["b"]}
    plain = {"eps": 0.0, "weights": WEIGHTS}
    heavier = {"eps": 0.0, "weights": {**WEIGHTS, "b": 7 * WEIGHTS["b"]}}
    methods = [("dvao", plain), ("gdpo", plain), ("dvao", heavier)]
    with jax.enable_x64(True):
        unscaled, gdpo, more = all_values(methods, rewards)
        together = all_values(methods, scaled)
        dvao_of_one, gdpo_of_one, _ = all_values(methods, rescaled)
    for left, right in zip(together, (unscaled, gdpo, more), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-12)
    np.testing.assert_allclose(dvao_of_one, more, atol=1e-12)
    assert np.abs(dvao_of_one - unscaled).max() > 0.1
    np.testing.assert_allclose(gdpo_of_one, gdpo, atol=1e-12)


def test_a_reward_that_is_flat_in_a_group_has_no_share_in_it():
    varied = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32)
    flat = np.repeat(np.random.default_rng(1).normal(size=(30, 1)), 7, 1).astype(np.float32)
    assert (flat.std(1) > 0).any()  # the trap
    rewards = {"a": varied, "b": 1000 * flat, "c": flat}
    together, alone, neither = all_values(
        [
            ("dvao", {"weights": {"a": 1, "b": 1, "c": 0}}),
            ("dvao", {"weights": {"a": 1, "b": 0, "c": 0}}),
            ("dvao", {"eps": 0.0, "weights": {"a": 0, "b": 1, "c": 1}}),
        ],
        rewards,
    )
    np.testing.assert_array_equal(together, alone)
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
    metrics = jax.jit(lambda batch: compute(chain(dvao(a=1.0, b=2.0)), batch)[2])(rollouts)
    # Deviations 1 : 3 and 3 : 1, b weighing double; the flat group has no shares.
    assert metrics["dvao/share_a"].result() == pytest.approx((1 / 7 + 3 / 5) / 2)
    assert metrics["dvao/share_b"].result() == pytest.approx((6 / 7 + 2 / 5) / 2)


def test_with_one_reward_the_methods_are_those_for_one():
    white = {"use": "whiten_batch", "eps": 1e-4, "eps_in": "std"}
    whitened = [{"use": "sum_rewards"}, *_GRPO, white]
    methods = [
        ("grpo", {"eps": 1e-4, "ddof": 0}),
        ("dvao", {"eps": 1e-4}),
        (whitened, None),
        ("gdpo", None),
    ]
    with jax.enable_x64(True):
        normalised, by_stds, white, apart = all_values(methods, make_rewards()["b"])
    np.testing.assert_allclose(by_stds, normalised, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(apart, white)


_GRPO = [{"use": "subtract_group_mean"}, {"use": "divide_by_group_std", "eps": 1e-4}]


def test_gdpo_tells_apart_what_the_normalised_sum_confounds():
    """Rewards (1, 0) and (1, 1) against (0, 0): half as much, and all."""
    rewards = {"a": [[0.0, 1.0], [0.0, 1.0]], "b": [[0.0, 0.0], [0.0, 1.0]]}
    root = np.sqrt(0.5)
    steps = build("gdpo", {"eps": 0.0}).steps[:-1]
    before = chain(*(step for _, step in steps))
    methods = [("grpo", {"eps": 0.0}), (before, None), ("gdpo", {"eps": 0.0})]
    collapsed, before, after = all_values(methods, rewards)
    np.testing.assert_allclose(collapsed, [[-root, root]] * 2, rtol=1e-6)
    np.testing.assert_allclose(before, [[-root, root], [-2 * root, 2 * root]], rtol=1e-6)
    np.testing.assert_allclose(after[1], 2 * after[0], rtol=1e-6)


def trl_gdpo(rewards, weights, eps=1e-4):
    """TRL's normalize_then_sum with everything scored, then whitening over samples."""
    parts = [weights[name] * scores(reward, 1, eps)[0] for name, reward in rewards.items()]
    before = np.sum(parts, 0)
    return (before - before.mean()) / (before.std(ddof=1) + eps), before


def test_gdpo_has_trls_numbers():
    rewards = make_rewards()
    with jax.enable_x64(True):
        ours = values("gdpo", rewards, {"weights": WEIGHTS})
    np.testing.assert_allclose(ours, trl_gdpo(rewards, WEIGHTS)[0], atol=1e-11)
    assert (ours[0] == 0).all()


def test_gdpo_counts_samples_where_verl_counts_tokens():
    rewards = make_rewards()
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


def test_combine_makes_one_signal_and_cannot_invent_a_sample():
    def ratio(streams, rollouts):
        a, b = streams["a"], streams["b"]
        divisor = jnp.where(b.mask, b.value, 1)
        return Signal(value=a.value / divisor, mask=jnp.ones_like(a.mask))

    rewards = {"a": [[1.0, 2.0, NAN, 3.0]], "b": [[2.0, 0.0, NAN, NAN]]}
    value, mask = evaluate(chain(combine(ratio)), rewards)
    # 2 / 0 is not finite, nothing scored the third, and the function takes 3 as it is.
    assert mask.tolist() == [[True, False, False, True]]
    assert value.tolist() == [[0.5, 0, 0, 3]]
    assert combine(ratio).name == "ratio"
    assert combine(ratio, name="own").name == "own"
    assert combine(ratio, needs=("rubric",)).needs == {"rubric"}


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


@pytest.mark.slow
def test_a_reward_may_have_the_name_of_an_option_where_weights_are_a_table():
    rewards = {"eps": [[1.0, 0.0, 0.0]], "style": [[0.0, 0.5, 1.0]]}
    renamed = {"correct": rewards["eps"], "style": rewards["style"]}
    by_option_name = evaluate("dvao", rewards, options={"weights": {"eps": 2.0, "style": 1.0}})
    by_plain_name = evaluate("dvao", renamed, options={"weights": {"correct": 2.0, "style": 1.0}})
    np.testing.assert_array_equal(by_option_name[0], by_plain_name[0])
    assert evaluate(chain(dvao()), rewards)[1].all()  # nobody weighs it
    with pytest.raises(InputError, match=r"dvao: a reward has the name eps.*recipe dvao"):
        evaluate(chain(dvao(eps=2.0, style=1.0)), rewards)


def test_rlcr_teaches_calibration_where_all_are_right_and_names_what_it_needs():
    rewards = {"accuracy": [[1.0, 1.0]], "brier": [[1.0, 0.75]], "format": [[1.0, 1.0]]}
    np.testing.assert_allclose(values("rlcr", rewards), [[0.0625, -0.0625]])
    with pytest.raises(InputError, match="weight 'brier' has no reward of that name"):
        evaluate("rlcr", {"accuracy": [[1.0, 0.0]]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dvao(eps=-0.1), "dvao: eps = -0.1, expected 0 or more"),
        (lambda: dvao(a=float("nan")), "weight a = nan, expected 0 or more"),
        (lambda: dvao(a=-0.5), "weight a = -0.5, expected 0 or more: negate"),
        (
            lambda: evaluate("dvao", {"a": [[0.0, 1.0]]}, options={"weights": {"b": 1.0}}),
            "dvao: weight 'b' has no reward of that name",
        ),
        (
            lambda: evaluate(chain(combine(lambda *streams: streams[0], "own")), [[1.0]]),
            "own returned dict, expected a Signal",
        ),
        (
            lambda: evaluate(
                chain(combine(lambda s, r: Signal(value=jnp.ones(3), mask=jnp.ones(3) > 0), "own")),
                [[1.0]],
            ),
            r"own returned values of shape \(3,\), expected \[P, G\] = \(1, 1\)",
        ),
        (
            lambda: chain(subtract_group_mean(), dvao()),
            "dvao takes the reward streams",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
