"""Parts with memory, against loops written from the papers and enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo import advantages as adv
from jaxgrpo.advantages import chain, sum_rewards
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts

NAN = np.nan


def make_rollouts(rewards, row=None, step=0, **fields):
    """Rollouts of plain rewards [P, G]; without `row` each prompt is a row of its own."""
    rewards = jnp.asarray(rewards, jnp.result_type(float))
    row = np.arange(len(rewards)) if row is None else row
    empty = dict.fromkeys(Rollouts.__dataclass_fields__)
    columns = {
        "rewards": {"reward": rewards},
        "row": jnp.asarray(row, jnp.int32),
        "step": jnp.int32(step),
        "fields": {name: jnp.asarray(value, rewards.dtype) for name, value in fields.items()},
    }
    return Rollouts(**{**empty, **columns})


def through(part, batches, num_rows=8):
    """The values after each batch, and the states; one program for batches of one shape."""
    transform = chain(sum_rewards(), part)
    step = jax.jit(lambda rollouts, state: adv.compute(transform, rollouts, state))
    state = transform.init(adv.spec_of(batches[0], num_rows=num_rows))
    values, states = [], [state[part.name]]
    for batch in batches:
        signal, state, _ = step(batch, state)
        values.append(np.asarray(jnp.where(signal.mask, signal.value, jnp.nan)))
        states.append(jax.tree.map(np.asarray, state[part.name]))
    return values, states


def visit_by_visit(batches, num_rows, initial=0.5, count=8.0):
    """SPO's tracker in float64, one prompt after the other: advantages and alpha, beta."""
    alpha = np.full(num_rows, count * initial)
    beta = count - alpha
    out = []
    for rewards, row, rho in batches:
        before = alpha / (alpha + beta)
        out.append(rewards - before[row][:, None])
        for p, group in enumerate(rewards):
            scored = group[np.isfinite(group)]
            if len(scored):
                alpha[row[p]] = rho[p] * alpha[row[p]] + scored.sum()
                beta[row[p]] = rho[p] * beta[row[p]] + (1 - scored).sum()
    return out, alpha, beta


@pytest.mark.parametrize("drifting", [False, True], ids=["fixed", "by drift"])
def test_the_tracker_is_a_loop_over_prompts_with_duplicates_in_their_order(drifting):
    random = np.random.default_rng(0)
    batches, expected = [], []
    for _ in range(4):
        rewards = random.integers(0, 2, (12, 2)).astype(float)
        rewards[random.random((12, 2)) < 0.2] = NAN
        rewards[3] = NAN  # no visit
        row = random.integers(0, 6, 12)
        drift = random.exponential(0.02, 12)
        rho = np.clip(2.0 ** (-drift / 0.06), 0.875, 0.96) if drifting else np.full(12, 0.9)
        batches.append((rewards, row, drift))
        expected.append((rewards, row, rho))
    with jax.enable_x64(True):
        options: dict[str, Any] = {"drift": "drift"} if drifting else {"keep": 0.9}
        part = adv.subtract_tracked_success(**options)
        rollouts = [make_rollouts(rewards, row, drift=drift) for rewards, row, drift in batches]
        values, states = through(part, rollouts)
    oracle, alpha, beta = visit_by_visit(expected, 8)
    for value, right in zip(values, oracle, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-12)
    met = states[-1]["alpha"] + states[-1]["beta"] > 0
    assert met.tolist() == [True] * 6 + [False] * 2  # rows 6 and 7 were never drawn
    np.testing.assert_allclose(states[-1]["alpha"][met], alpha[met], rtol=1e-12)
    np.testing.assert_allclose(states[-1]["beta"][met], beta[met], rtol=1e-12)


def test_a_visit_moves_the_estimate_by_the_papers_identity_and_the_memory_is_bounded():
    """v <- v + (r - v) / (rho N + 1), N <- rho N + 1 <= max(N_0, 1 / (1 - rho)) = 25."""
    random = np.random.default_rng(1)
    rewards = random.integers(0, 2, (60, 1, 1)).astype(float)
    part = adv.subtract_tracked_success(keep=0.96, count=8.0)
    _, states = through(part, [make_rollouts(batch, [2]) for batch in rewards])
    estimate, number = 0.5, 8.0
    for reward, state in zip(rewards[:, 0, 0], states[1:], strict=True):
        estimate += (reward - estimate) / (0.96 * number + 1)
        number = 0.96 * number + 1
        alpha, beta = state["alpha"][2], state["beta"][2]
        np.testing.assert_allclose(alpha / (alpha + beta), estimate, rtol=1e-5)
        np.testing.assert_allclose(alpha + beta, number, rtol=1e-5)
        assert 0 < estimate < 1
        assert number <= 25
    assert number > 20


def test_both_visits_of_a_batch_count_and_both_are_judged_by_what_was_before():
    """From 4 : 4, rho 0.5: success makes it 3 : 2, then failure 1.5 : 2."""
    part = adv.subtract_tracked_success(keep=0.5)
    values, states = through(part, [make_rollouts([[1.0], [1.0], [0.0]], [3, 5, 3])])
    assert values[0].tolist() == [[0.5], [0.5], [-0.5]]
    assert (states[1]["alpha"][3], states[1]["beta"][3]) == (1.5, 2.0)
    assert (states[1]["alpha"][5], states[1]["beta"][5]) == (3.0, 2.0)


def test_the_metrics_say_how_far_the_rewards_have_moved_from_what_is_tracked():
    """v = 0.5 everywhere; groups of mean 1, 0.75 and 0; the fourth is no visit."""
    rewards = [[1.0, 1.0, NAN, NAN], [1.0, 1.0, 0.0, 1.0], [0.0] * 4, [NAN] * 4]
    rollouts, part = make_rollouts(rewards), adv.subtract_tracked_success(keep=0.9)
    transform = chain(sum_rewards(), part)
    state = transform.init(adv.spec_of(rollouts, num_rows=4))
    _, state, first = adv.compute(transform, rollouts, state)
    gaps = np.array([0.5, 0.25, -0.5])
    assert measured(first, "lag") == pytest.approx(gaps.mean())
    assert measured(first, "error") == pytest.approx(np.abs(gaps).mean())
    _, _, second = adv.compute(transform, rollouts, state)
    # N = 8 and rho 0.9: v moves by n gap / (0.9 N + n), and the gap shrinks by it.
    rest = gaps * (1 - np.array([2, 4, 4]) / (7.2 + np.array([2, 4, 4])))
    assert measured(second, "lag") == pytest.approx(rest.mean())
    assert measured(second, "error") == pytest.approx(np.abs(rest).mean())


def measured(metrics, name):
    (metric,) = (value for key, value in metrics.items() if key.endswith(f"/{name}"))
    return float(metric.total / metric.weight)


def test_a_group_forgets_once_and_what_could_not_be_scored_is_no_failure():
    part = adv.subtract_tracked_success(keep=0.5)
    batch = make_rollouts([[1.0, 1.0, 0.0, NAN], [NAN, NAN, NAN, NAN]], [0, 1])
    values, states = through(part, [batch])
    assert (states[1]["alpha"][0], states[1]["beta"][0]) == (4.0, 3.0)
    assert (states[1]["alpha"][1], states[1]["beta"][1]) == (0.0, 0.0)
    np.testing.assert_array_equal(values[0][0], [0.5, 0.5, -0.5, NAN])


def test_right_samples_of_earlier_steps_say_nothing_of_the_policy():
    batch = make_rollouts([[1.0, 0.0, 1.0]], replayed=[[0, 0, 1]])
    _, states = through(adv.subtract_tracked_success(keep=1.0), [batch])
    assert (states[-1]["alpha"][0], states[-1]["beta"][0]) == (4 + 1, 4 + 1)
    _, states = through(adv.mask_difficulty_band(), [batch])
    assert (states[-1]["successes"][0], states[-1]["samples"][0]) == (1, 2)


def test_replayed_samples_do_not_move_what_is_remembered_of_a_policy():
    batch = make_rollouts([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]], replayed=[[0, 0, 0, 1]] * 2)
    fresh = make_rollouts([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    for part in (adv.smooth_standardise(), adv.ema_baseline()):
        _, states = through(part, [batch])
        _, fresh_states = through(part, [fresh])
        for name, numbers in fresh_states[-1].items():
            np.testing.assert_allclose(states[-1][name], numbers, rtol=1e-6, err_msg=name)
    assert states[-1]["mean"] == pytest.approx(0.5)
    two_replayed = make_rollouts([[0.0, 1.0, 1.0]], replayed=[[0, 1, 1]])
    _, states = through(adv.smooth_standardise(), [two_replayed])
    assert states[-1]["visits"][0] == 0


def test_a_rows_first_estimate_may_be_a_column_of_the_data():
    part = adv.subtract_tracked_success(initial="rate", keep=1.0)
    batch = make_rollouts([[1.0], [0.0], [1.0]], [0, 1, 2], rate=[0.25, 0.75, NAN])
    values, states = through(part, [batch, batch])
    np.testing.assert_allclose(values[0][:, 0], [0.75, -0.75, 0.5])
    np.testing.assert_allclose(states[1]["alpha"][:3], [3.0, 6.0, 5.0])
    np.testing.assert_allclose(values[1][:, 0], [1 - 3 / 9, -6 / 9, 1 - 5 / 9], rtol=1e-6)
    assert part.needs == {"rate"}


def test_a_drift_that_was_not_measured_keeps_the_most():
    part = adv.subtract_tracked_success(drift="moved", low=0.5, high=0.75)
    batch = make_rollouts([[1.0]] * 3, [0, 1, 2], moved=[NAN, 9.0, 0.0])
    _, states = through(part, [batch])
    np.testing.assert_allclose(states[1]["alpha"][:3], [4.0, 3.0, 4.0])


@pytest.mark.full
@pytest.mark.parametrize("make", [adv.subtract_tracked_success, adv.ema_baseline])
def test_the_baseline_leaves_the_expected_gradient_that_of_the_success_rate(make):
    """Every pair of actions of a softmax policy, weighted by its probability."""
    logits = jnp.array([0.3, -1.0, 0.8, 0.1])
    reward = np.array([1.0, 0.0, 0.0, 1.0])
    past = make_rollouts([[1.0, 1.0]], [0])
    pairs = list(itertools.product(range(4), repeat=2))
    part = make()
    probability = np.asarray(jax.nn.softmax(logits))
    slopes = np.asarray(jax.jacobian(jax.nn.log_softmax)(logits))
    expected = np.asarray(jax.grad(lambda z: (jax.nn.softmax(z) * reward).sum())(logits))
    transform = chain(sum_rewards(), part)

    def advantage(rewards):
        state = transform.init(adv.spec_of(past, num_rows=1))
        _, state, _ = adv.compute(transform, past, state)
        return adv.compute(transform, make_rollouts(rewards[None], [0]), state)[0].value[0]

    values = jax.jit(jax.vmap(advantage))(jnp.asarray([reward[list(pair)] for pair in pairs]))
    total = np.zeros(4)
    for pair, value in zip(pairs, np.asarray(values), strict=True):
        chance = probability[list(pair)].prod()
        total += chance * sum(a * slopes[i] for a, i in zip(value, pair, strict=True)) / 2
    np.testing.assert_allclose(total, expected, atol=1e-6)
    assert np.abs(expected).max() > 0.05


def test_spo_whitens_over_the_batch_and_moves_zeros_too():
    """Four prompts at v = 0.5, rewards 1 1 0 0.5: less their mean 0.125 over their deviation."""
    spo = jax.jit(lambda rewards: adv.evaluate("spo", rewards)[0])
    rewards = np.array([[1.0], [1.0], [0.0], [0.5], [NAN], [NAN], [NAN]], np.float32)
    raw = rewards[:4] - 0.5
    value = spo(rewards)
    np.testing.assert_allclose(value[:4], (raw - raw.mean()) / raw.std(), rtol=1e-5)
    assert float(value[3, 0]) < 0
    for flat in ([1.0] * 3 + [NAN] * 4, [0.1] + [NAN] * 6, [0.1] * 7, [NAN] * 7):
        assert not np.asarray(spo(np.array(flat, np.float32)[:, None])).any()


def test_the_ema_weighs_batches_by_their_age_from_the_first_on():
    """Means 1, 0, 0.5 with decay 0.5: baselines initial, 1, 1/3, then (1/4 + 0 + 1/2) / (7/4)."""
    batches = [[[1.0, 1.0]], [[0.0, NAN]], [[0.0, 1.0]], [[NAN, NAN]], [[0.0, 0.0]]]
    values, states = through(
        adv.ema_baseline(decay=0.5, initial=0.25), [make_rollouts(batch) for batch in batches]
    )
    after_three = (0.25 * 1 + 0.5 * 0 + 1 * 0.5) / 1.75
    np.testing.assert_allclose(values[0], [[0.75, 0.75]])
    np.testing.assert_allclose(values[1], [[-1.0, NAN]])
    np.testing.assert_allclose(values[2], [[-1 / 3, 2 / 3]], rtol=1e-6)
    np.testing.assert_allclose(values[4], [[-after_three] * 2], rtol=1e-6)
    assert states[4] == states[3]  # nothing was scored in the fourth batch


def test_the_running_scale_is_the_deviation_of_earlier_values_and_forgets_their_units():
    """With decay near 1, of all values seen; each batch divided by that of the ones before."""
    random = np.random.default_rng(2)
    batches = random.normal(3.0, 2.0, (4, 5, 3))
    with jax.enable_x64(True):
        part = adv.divide_by_running_scale(decay=1 - 1e-12, eps=0.0)
        values, _ = through(part, [make_rollouts(batch) for batch in batches])
        scaled, _ = through(part, [make_rollouts(100 * batch) for batch in batches])
    for index, value in enumerate(values):
        earlier = batches[: max(index, 1)]  # the first is divided by its own
        np.testing.assert_allclose(value, batches[index] / earlier.std(), rtol=1e-9)
        np.testing.assert_allclose(scaled[index], value, rtol=1e-9)


def test_a_scale_of_nothing_divides_by_one():
    flat = np.full((7, 1), 0.1, np.float32)
    values, states = through(
        adv.divide_by_running_scale(), [make_rollouts(flat), make_rollouts(flat)]
    )
    np.testing.assert_array_equal(values, [flat, flat])
    assert float(states[-1]["variance"]) == 0


def test_the_band_masks_by_what_was_seen_before_this_batch():
    """A row that only fails leaves after its fourth sample: 0.5 / (n + 1) < 0.125 for n > 3."""
    part = adv.mask_difficulty_band()
    batch = make_rollouts([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [NAN, 0.0]], [0, 1, 2, 3])
    values, states = through(part, [batch] * 4)
    live_groups = [np.isfinite(value).any(1).tolist() for value in values]
    assert live_groups[0] == live_groups[1] == [True, True, True, True]
    assert live_groups[2] == [False, False, True, True]  # after 4 failures, 4 successes
    assert live_groups[3] == [
        False,
        False,
        True,
        True,
    ]  # 3 failures: 0.5 / 4 = 0.125 is in the band
    np.testing.assert_array_equal(states[-1]["samples"][:4], [8, 8, 8, 4])
    np.testing.assert_array_equal(states[-1]["successes"][:4], [0, 8, 4, 0])


def test_duplicates_of_a_row_all_count_and_old_counts_fade_once_per_batch():
    part = adv.mask_difficulty_band(keep=0.5)
    batch = make_rollouts([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [4, 4, 2])
    _, states = through(part, [batch, batch])
    np.testing.assert_array_equal(states[1]["samples"][[2, 4, 5]], [2, 4, 0])
    np.testing.assert_array_equal(states[2]["samples"][[2, 4, 5]], [3, 6, 0])
    np.testing.assert_array_equal(states[2]["successes"][[2, 4, 5]], [0, 4.5, 0])


def test_the_whole_band_masks_nothing_and_an_empty_one_everything():
    random = np.random.default_rng(3)
    batches = [make_rollouts(random.integers(0, 2, (4, 3)).astype(float)) for _ in range(3)]
    plain = [np.asarray(batch.rewards["reward"]) for batch in batches]
    widest, _ = through(adv.mask_difficulty_band(low=0.0, high=1.0), batches)
    np.testing.assert_array_equal(widest, plain)
    none, _ = through(adv.mask_difficulty_band(low=0.9, high=0.9), batches[:1])
    assert np.isnan(none[0]).all()


@pytest.mark.parametrize("make", [adv.subtract_tracked_success, adv.mask_difficulty_band])
def test_rows_of_a_stream_are_refused_with_the_remedy(make):
    with pytest.raises(InputError, match=f"{make().name} remembers every row.*ema_baseline"):
        adv.compute(chain(sum_rewards(), make()), make_rollouts([[1.0]]))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (adv.ema_baseline, {"decay": 1.0}, "decay = 1.0, expected 0 or more and below 1"),
        (adv.divide_by_running_scale, {"initial": 0.0}, "initial = 0.0, expected above 0"),
        (adv.subtract_tracked_success, {"keep": 1.5}, r"keep = 1.5, expected a number in \[0, 1\]"),
        (adv.subtract_tracked_success, {"low": 0.99}, "low = 0.99, high = 0.96"),
        (adv.subtract_tracked_success, {"count": 0.0}, "count = 0.0, expected above 0"),
        (adv.subtract_tracked_success, {"initial": 2.0}, "initial = 2.0, expected a rate"),
        (adv.mask_difficulty_band, {"low": 0.9}, "low = 0.9, high = 0.875"),
        (adv.mask_difficulty_band, {"prior": (0.0, 1.0)}, "prior = .*two counts above 0"),
    ],
)
def test_an_option_out_of_range_is_refused_when_the_part_is_made(make, options, message):
    with pytest.raises(InputError, match=message):
        make(**options)


def test_groups_of_which_each_is_no_visit_are_refused():
    message = "rollout.group_size = 1: smooth_standardise compares the samples of a group"
    with pytest.raises(InputError, match=message):
        adv.evaluate("dcpo_smooth", [[1.0], [0.0]])


def test_a_field_of_another_shape_is_refused():
    part = adv.subtract_tracked_success(drift="moved")
    with pytest.raises(InputError, match=r"moved has shape \(1, 1\), expected \[P\] = \(1,\)"):
        through(part, [make_rollouts([[1.0]], moved=[[1.0]])])


def smoothed_by_the_papers_code(batches, num_rows):
    """DCPO's advantages, row by row, with its recursion of mean and deviation over visits."""
    times, means, stds = np.zeros(num_rows), np.zeros(num_rows), np.zeros(num_rows)
    out = []
    for rewards, rows in batches:
        values = np.zeros_like(rewards)
        for group, row in enumerate(rows):
            new_mean, new_std = rewards[group].mean(), rewards[group].std(ddof=1)
            old, number = times[row], times[row] + 1
            mean, std = new_mean, new_std
            if old:
                mean = (means[row] * old + new_mean) / number
                squares = old * stds[row] ** 2 + new_std**2
                std = np.sqrt((squares + old / number * (new_mean - means[row]) ** 2) / number)
            current = (rewards[group] - new_mean) / new_std if new_std > 0 else 0 * rewards[group]
            overall = (rewards[group] - mean) / std if std > 0 else 0 * rewards[group]
            mixed = overall / number + (1 - 1 / number) * current
            mirror = current / number + (1 - 1 / number) * overall
            values[group] = np.where(abs(mixed) < abs(mirror), mixed, mirror)
            times[row], means[row], stds[row] = number, mean, std
        out.append(values)
    return out


def test_smooth_standardisation_is_that_of_the_papers_code():
    random = np.random.default_rng(2)
    batches = [
        (random.integers(0, 2, (4, 5)).astype(float), random.permutation(6)[:4]) for _ in range(6)
    ]
    batches[3][0][:2] = [[1.0], [0.0]]  # flat groups of rows that were not always so
    with jax.enable_x64(True):
        rollouts = [make_rollouts(rewards, row) for rewards, row in batches]
        values, states = through(adv.smooth_standardise(eps=0.0), rollouts, num_rows=6)
    for value, want in zip(values, smoothed_by_the_papers_code(batches, 6), strict=True):
        np.testing.assert_allclose(value, want, atol=1e-12)
    assert (values[3][:2] != 0).any()
    assert states[-1]["visits"].sum() == 24


def test_two_groups_of_a_row_at_once_are_remembered_as_one_after_the_other():
    random = np.random.default_rng(3)
    groups = random.normal(size=(3, 4))
    with jax.enable_x64(True):
        first = make_rollouts(random.normal(size=(1, 4)), [0])
        together = through(
            adv.smooth_standardise(), [first, make_rollouts(groups, [0, 2, 0])], num_rows=3
        )[1][-1]
        turns = zip(groups, [0, 2, 0], strict=True)
        apart = [make_rollouts(group[None], [row]) for group, row in turns]
        in_turn = through(adv.smooth_standardise(), [first, *apart], num_rows=3)[1][-1]
    for name, numbers in in_turn.items():
        np.testing.assert_allclose(together[name], numbers, atol=1e-12)


def test_a_row_that_was_always_flat_teaches_nothing_and_one_sample_is_no_visit():
    flat = make_rollouts([[0.1, 0.1, 0.1], [0.3, NAN, NAN]])
    values, states = through(adv.smooth_standardise(), [flat] * 3)
    for value in values:
        assert (value[0] == 0).all()
        assert value[1, 0] == 0
    assert states[-1]["visits"][:2].tolist() == [3, 0]
    assert states[-1]["squares"][0] == 0
