"""The algebra: streams, order, levels, state, metrics, schedules, and the errors that teach it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from jaxgrpo.advantages import (
    AdvantageTransform,
    build,
    chain,
    combine,
    compute,
    divide_by_group_std,
    evaluate,
    mask_truncated,
    per_reward,
    sign,
    spec_of,
    start,
    stream,
    subtract_group_mean,
    sum_rewards,
    to_tokens,
    transform,
)
from jaxgrpo.advantages.chains import trace_shapes
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean
from jaxgrpo.core.types import Signal

NAN = np.nan
SPEC = spec_of(laws.make_rollouts())


@transform
def shift(signal, rollouts):
    """Leaves 1 in masked entries too; the chain has to clear them."""
    return dataclasses.replace(signal, value=signal.value + 1)


def refuses(message: str):
    return pytest.raises(InputError, match=re.escape(message))


def test_rewards_start_as_streams_with_unscored_entries_masked():
    streams = start(laws.make_rollouts())
    assert list(streams) == ["correct", "style"]
    assert not streams["correct"].mask[4, 0]
    assert streams["style"].mask[4, 0]
    assert streams["correct"].value[4, 0] == 0


def test_masked_values_are_zeroed_after_each_step():
    value, mask = evaluate(chain(sum_rewards(), shift, subtract_group_mean()), [[NAN, 0.0, 1.0]])
    np.testing.assert_allclose(value, [[0, -0.5, 0.5]])
    assert mask.tolist() == [[False, True, True]]
    assert evaluate(chain(sum_rewards(), shift), [[NAN, 0.0, 1.0]])[0].tolist() == [[0, 1, 2]]


def test_no_step_can_bring_a_sample_back():
    @transform
    def unmask(signal, rollouts):
        return Signal(value=signal.value + 5, mask=jnp.ones_like(signal.mask))

    value, mask = evaluate(chain(unmask, to_tokens()), [[NAN, 1.0]], token_mask=[[[True]] * 2])
    assert mask.tolist() == [[[False], [True]]]
    assert value.tolist() == [[[0], [6]]]


def test_the_only_stream_needs_no_sum():
    value, _ = evaluate(chain(subtract_group_mean()), [[0.0, 1.0]])
    assert value.tolist() == [[-0.5, 0.5]]
    assert evaluate(subtract_group_mean(), [[0.0, 1.0]])[0].tolist() == [[-0.5, 0.5]]
    assert evaluate(chain(per_reward(shift)), [[0.0, 1.0]])[0].tolist() == [[1, 2]]


def test_several_streams_without_a_sum_are_an_error():
    message = "2 reward streams (correct, style) and no step that makes one signal of them: put sum"
    for composite in (chain(subtract_group_mean()), chain(per_reward(shift))):
        with refuses(message):
            compute(composite, laws.make_rollouts())
    with refuses(message):  # known before anything is traced
        chain(per_reward(shift), shift).init(SPEC)


def test_a_step_on_streams_behind_the_sum_is_an_error_of_the_order():
    with refuses("per_reward_shift takes the reward streams, but sum_rewards before it has one"):
        chain(sum_rewards(), per_reward(shift))
    with refuses("sum_rewards takes the reward streams, but shift before it has one signal: put"):
        chain(shift, sum_rewards())
    with refuses("chain() has no steps"):
        chain()


def test_a_misplaced_step_says_which_step_to_move():
    token_mask = jnp.ones((1, 2, 3), bool)
    for step in (subtract_group_mean(), divide_by_group_std(), sign(), to_tokens()):
        composite = chain(sum_rewards(), to_tokens(), step)
        with refuses(
            "needs sequence-level values [P, G] but got shape (1, 2, 3): put it before to"
        ):
            evaluate(composite, [[0.0, 1.0]], token_mask=token_mask)
    spread = to_tokens()._replace(name="spread")
    with refuses(
        "sign needs sequence-level values [P, G] but got shape (1, 2, 3): put it before sp"
    ):
        evaluate(chain(sum_rewards(), spread, sign()), [[0.0, 1.0]], token_mask=token_mask)
    token_step = shift._replace(name="discount", levels=(3,))
    with refuses("discount needs token-level values [P, G, T] but got shape (1, 2): put it after"):
        evaluate(chain(sum_rewards(), token_step), [[0.0, 1.0]])


def test_levels_are_checked_under_jit_at_trace_time():
    run = jax.jit(lambda rollouts: compute(chain(sum_rewards(), to_tokens(), sign()), rollouts))
    with refuses("put it before to_tokens()"):
        run.trace(laws.make_rollouts())


def forgets(signal, rollouts) -> Any:
    return signal.value


def test_own_functions_must_return_a_signal_of_fitting_shape():
    rewards = [[0.0, 1.0]]
    with refuses("forgot returned ArrayImpl, expected a Signal: return dataclasses.replace"):
        evaluate(chain(transform(forgets, name="forgot")), rewards)
    for shape, message in [((2, 2), "turned values (1, 2) into (2, 2)"), ((1,), "into (1,)")]:
        bad = Signal(value=jnp.zeros(shape), mask=jnp.ones(shape, bool))
        with refuses(message):
            evaluate(chain(transform(lambda *_, bad=bad: bad, name="bad")), rewards)
    odd = Signal(value=jnp.zeros((1, 2, 3)), mask=jnp.ones((1, 2), bool))
    with refuses("odd returned value (1, 2, 3) and mask (1, 2): they must have the same shape"):
        evaluate(chain(transform(lambda *_: odd, name="odd")), rewards)


@pytest.mark.parametrize(
    ("value", "mask", "message"),
    [
        (0.0, jnp.ones((1, 2), bool), "odd returned the value 0.0, expected an array [P, G]"),
        (jnp.ones((1, 2)), True, "odd returned the mask True, expected an array [P, G]"),
    ],
)
def test_own_functions_must_return_arrays(value, mask, message):
    odd = Signal(value=value, mask=mask)
    with refuses(message):
        evaluate(chain(transform(lambda *_: odd, name="odd")), [[0.0, 1.0]])
    with refuses(message):
        evaluate(chain(combine(lambda *_: odd, name="odd")), [[0.0, 1.0]])


def test_a_mask_of_numbers_is_true_above_0():
    odd = Signal(value=jnp.ones((1, 4)), mask=jnp.array([[1.0, 0.0, -1.0, NAN]]))
    for step in (transform(lambda *_: odd), combine(lambda *_: odd)):
        assert evaluate(chain(step), [[0.0] * 4])[1].tolist() == [[True, False, False, False]]


def test_a_table_of_arrays_is_no_signal_and_a_text_no_set_of_fields():
    function: Any = lambda signal, _: {"value": signal.value, "mask": signal.mask}  # noqa: E731
    table = transform(function, name="table")
    with refuses("table returned dict, expected a Signal"):
        evaluate(chain(sum_rewards(), table), [[0.0, 1.0]])
    with refuses("mine: needs = 'row', expected names of fields"):
        chain(shift._replace(name="mine", needs="row"))
    assert chain(shift._replace(needs=["row"])).needs == {"row"}
    with refuses("turned(rollouts, signal): write (signal, rollouts), the signal first"):
        build([turned])


def turned(rollouts, signal):
    return signal


def test_a_state_that_changes_its_form_is_refused_on_shapes():
    for first, update, message in [
        (0, lambda state: state + 0.5, "counts: its state is int32[] at first and float32[] after"),
        (jnp.zeros(2), lambda state: state[:1], "its state is float32[2] at first and float32[1]"),
        (0.0, lambda state: {"a": state}, "at first and {a: float32[]} after an update: return"),
    ]:
        step = AdvantageTransform(
            "counts", lambda _, x=first: x, lambda s, state, _, f=update: (s, f(state), {})
        )
        with refuses(message):
            trace_shapes(chain(sum_rewards(), step), SPEC)
    fine = step._replace(init=lambda _: 0.0, update=lambda s, state, _: (s, 0.9 * state + 1, {}))
    trace_shapes(chain(sum_rewards(), fine), SPEC)


def test_a_metric_may_be_a_plain_number():
    def update(signal, state, rollouts):
        return signal, state, {"size": 3, "sum": signal.value.sum()}

    step = AdvantageTransform("mine", lambda spec: (), update)
    _, _, metrics = compute(chain(sum_rewards(), step), laws.make_rollouts())
    assert metrics["mine/size"].result() == 3
    assert np.isfinite(metrics["mine/sum"].result())
    for reported, message in [
        ({"a": jnp.ones(2)}, "mine: metric a has shape (2,)"),
        (3, "mine repo"),
    ]:
        wrong = step._replace(update=lambda s, state, _, r=reported: (s, state, r))
        with refuses(message):
            compute(chain(sum_rewards(), wrong), laws.make_rollouts())


def test_a_missing_field_names_the_step_and_the_nearest_one():
    step = shift._replace(name="scale", needs=frozenset({"difficultly"}))
    with refuses("scale needs the field 'difficultly': did you mean 'difficulty'?"):
        compute(chain(sum_rewards(), step), laws.make_rollouts())
    fine = shift._replace(needs=frozenset({"difficulty", "correct"}))
    composite = chain(sum_rewards(), fine)
    assert composite.needs == {"difficulty", "correct"}
    compute(composite, laws.make_rollouts())


def reads_a_reward(signal, rollouts):
    return dataclasses.replace(signal, value=rollouts.rewards["corect"])


def test_a_reward_that_is_not_there_is_named_with_the_nearest():
    with refuses("reads the reward 'corect': did you mean 'correct'? Known: "):
        compute(chain(sum_rewards(), reads_a_reward), laws.make_rollouts())
    step = combine(lambda streams, rollouts: streams["stile"], "mixed")
    with refuses("reads the reward 'stile': did you mean 'style'?"):
        compute(chain(step), laws.make_rollouts())


def test_what_plain_arrays_lack_is_asked_for():
    with refuses("mask_truncated reads truncated, which was not given: pass truncated=..."):
        evaluate(chain(sum_rewards(), mask_truncated()), [[0.0, 1.0]])
    with refuses("to_tokens reads token_mask"):
        evaluate(chain(sum_rewards(), to_tokens()), [[0.0, 1.0]])


def test_state_is_keyed_by_step_name_and_carried():
    rollouts = laws.make_rollouts()
    composite = chain(sum_rewards(), laws.running_mean(), shift, laws.running_mean())
    assert [key for key, _ in composite.steps] == [
        "sum_rewards",
        "running_mean",
        "shift",
        "running_mean_2",
    ]
    first, state, _ = compute(composite, rollouts)
    total = start(rollouts)
    scored = total["correct"].mask & total["style"].mask
    expected = (total["correct"].value + total["style"].value)[scored].mean()
    assert float(state["running_mean"]["count"]) == int(scored.sum())
    second, _, _ = compute(chain(sum_rewards(), laws.running_mean()), rollouts, {
        "sum_rewards": (), "running_mean": state["running_mean"],
    })  # fmt: skip
    plain, _, _ = compute(chain(sum_rewards()), rollouts)
    np.testing.assert_allclose(first.value, jnp.where(scored, plain.value + 1, 0), atol=1e-6)
    np.testing.assert_allclose(
        second.value, jnp.where(scored, plain.value - expected, 0), atol=1e-5
    )


def test_state_of_another_chain_is_refused():
    composite = chain(sum_rewards(), laws.running_mean())
    for wrong in ({"sum_rewards": ()}, (), {**composite.init(SPEC), "sign": ()}):
        with refuses("has the steps ['sum_rewards', 'running_mean'] but was given state of"):
            compute(composite, laws.make_rollouts(), wrong)
    inner = per_reward(laws.running_mean())
    state = chain(inner, sum_rewards()).init(SPEC._replace(rewards=("other",)))
    with refuses("per_reward has state for the streams ['other'] but got ['correct', 'style']"):
        compute(chain(inner, sum_rewards()), laws.make_rollouts(), state)


def test_metrics_bear_the_name_of_their_step():
    def init(spec):
        return ()

    def update(signal, state, rollouts):
        return signal, state, {"size": Mean(total=signal.value.sum(), weight=jnp.ones(()))}

    size = AdvantageTransform("size", init, update)
    rollouts = laws.make_rollouts()
    composite = chain(sum_rewards(), size, chain(size, name="inner"), mask_truncated())
    _, _, metrics = compute(composite, rollouts)
    assert set(metrics) == {"size/size", "inner/size/size", "mask_truncated/masked"}
    _, _, split = compute(chain(per_reward(size), sum_rewards()), rollouts)
    assert set(split) == {f"per_reward_size/{name}/size/size" for name in ("correct", "style")}


@pytest.mark.slow
def test_chains_nest_and_order_is_inherited():
    rollouts = laws.make_rollouts()
    nested, _, _ = compute(chain(build("grpo"), to_tokens()), rollouts)
    plain, _, _ = compute(build("grpo"), rollouts)
    shared = nested.mask & plain.mask[..., None]
    np.testing.assert_array_equal(nested.value, jnp.where(shared, plain.value[..., None], 0))
    assert not chain(shift).ordered
    assert chain(chain(shift, shift._replace(name="spo", ordered=True))).ordered


def test_a_number_may_be_a_function_of_the_step():
    scheduled = chain(sum_rewards(reward=lambda step: step.astype(jnp.float32)), sign(_half))
    value, _ = evaluate(scheduled, [[0.1, 0.2]], step=4)
    assert value.tolist() == [[-1, 1]]
    eps = chain(subtract_group_mean(), divide_by_group_std(eps=lambda step: 1.0 / (1 + step)))
    value, _ = evaluate(eps, [[0.0, 2.0]], step=jnp.float32(3))
    np.testing.assert_allclose(value, [[-1 / (2**0.5 + 0.25), 1 / (2**0.5 + 0.25)]], rtol=1e-6)


def _half(step):
    return step.astype(jnp.float32) / 8


def test_weights_sum_streams_and_one_unscored_stream_masks_the_sample():
    rewards = {"correct": [[1.0, 0.0, 1.0]], "format": [[0.5, 1.0, NAN]]}
    value, mask = evaluate(chain(sum_rewards(correct=1.0, format=0.2)), rewards)
    np.testing.assert_allclose(value, [[1.1, 0.2, 0]])
    assert mask.tolist() == [[True, True, False]]
    value, mask = evaluate(chain(sum_rewards(correct=2.0, format=0.0)), rewards)
    assert (value.tolist(), mask.tolist()) == ([[2, 0, 2]], [[True] * 3])  # weight 0: not read
    np.testing.assert_allclose(evaluate(chain(sum_rewards()), rewards)[0], [[1.5, 1, 0]])


def test_every_reward_needs_a_weight_once_one_has_it():
    composite = chain(sum_rewards(corect=1.0, style=1.0))
    with refuses("weight 'corect' has no reward of that name: did you mean 'correct'?"):
        composite.init(SPEC)
    with refuses(
        "reward 'style' has no weight: name every reward (weight 0 leaves it out) or none"
    ):
        compute(chain(sum_rewards(correct=1.0)), laws.make_rollouts())


def test_normalising_per_reward_and_then_summing_is_another_method_than_the_reverse():
    rewards = {"a": [[0.0, 1.0, 1.0, 0.0]], "b": [[0.0, 0.0, 10.0, 10.0]]}
    normalise = chain(subtract_group_mean(), divide_by_group_std(eps=0.0, ddof=0))
    gdpo, _ = evaluate(chain(per_reward(normalise), sum_rewards()), rewards)
    np.testing.assert_allclose(gdpo, [[-2, 0, 2, 0]], atol=1e-6)
    total = np.array([0.0, 1.0, 11.0, 10.0])
    grpo, _ = evaluate("grpo", rewards, options={"eps": 0.0, "ddof": 0})
    np.testing.assert_allclose(grpo[0], (total - total.mean()) / total.std(), rtol=1e-6)
    with refuses("per_reward(sum_rewards) needs a transform of one signal"):
        per_reward(sum_rewards())


def test_a_computed_stream_counts_like_a_reward():
    length = stream("length", lambda rollouts: rollouts.fields["length"], needs=("length",))
    composite = chain(length, sum_rewards(reward=1.0, length=-0.1))
    value, mask = evaluate(composite, [[1.0, 1.0, 0.0]], length=[[2.0, 4.0, NAN]])
    np.testing.assert_allclose(value, [[0.8, 0.6, 0]])
    assert mask.tolist() == [[True, True, False]]
    assert set(composite.init(SPEC._replace(rewards=("reward",)))) == {
        "stream_length",
        "sum_rewards",
    }
    with refuses("stream 'reward' exists already"):
        evaluate(chain(stream("reward", lambda rollouts: jnp.zeros(2)), sum_rewards()), [[1.0]])
    with refuses("stream 'x' has shape (2,), expected [P, G] = (1, 1)"):
        evaluate(chain(stream("x", lambda rollouts: jnp.zeros(2)), sum_rewards()), [[1.0]])


def test_tokens_take_the_value_of_their_sample_everywhere_or_at_the_last_one():
    token_mask = [[[True, False, True, False], [False] * 4, [True] * 4]]
    inputs = {"rewards": [[3.0, 1.0, 2.0]], "token_mask": token_mask}
    everywhere, mask = evaluate(chain(sum_rewards(), to_tokens()), **inputs)
    last, last_mask = evaluate(chain(sum_rewards(), to_tokens(place="last")), **inputs)
    assert everywhere.tolist() == [[[3, 0, 3, 0], [0] * 4, [2] * 4]]
    assert last.tolist() == [[[0, 0, 3, 0], [0] * 4, [0, 0, 0, 2]]]
    assert mask.tolist() == last_mask.tolist() == token_mask
    with refuses("to_tokens: place = 'first', expected one of all, last"):
        to_tokens(place="first")


def test_rewards_of_odd_shapes_are_refused():
    with refuses("reward 'reward' has shape (2,), expected [P, G]"):
        evaluate("grpo", [0.0, 1.0])
    with refuses("rewards differ in shape"):
        evaluate("grpo", {"a": [[0.0, 1.0]], "b": [[0.0]]})
    with refuses("rollouts.rewards is empty"):
        evaluate("grpo", {})
    with refuses("mask has shape (2,), expected that of reward 'reward', (1, 2)"):
        evaluate("grpo", [[0.0, 1.0]], mask=[True, False])
    with refuses("ddof = 2, expected 0"):
        divide_by_group_std(ddof=2)


def test_whole_numbers_and_truth_values_are_rewards():
    for rewards in ([[1, 0, 0, 1]], [[True, False, False, True]]):
        value, _ = evaluate("dr_grpo", rewards)
        assert value.dtype == jnp.float32
        assert value.tolist() == [[0.5, -0.5, -0.5, 0.5]]


def test_ranks_and_truth_values_of_an_own_step_are_values_like_any_other():
    def rank(signal, rollouts):
        return dataclasses.replace(signal, value=jnp.argsort(jnp.argsort(signal.value)))

    def passed(signal, rollouts):
        return dataclasses.replace(signal, value=signal.value > 0.25, mask=signal.mask.astype(int))

    rewards = [[0.3, 0.1, 0.4, 0.2]]
    for step, expected in ((rank, [0.5, -1.5, 1.5, -0.5]), (passed, [0.5, -0.5, 0.5, -0.5])):
        value, mask = evaluate(chain(sum_rewards(), step, subtract_group_mean()), rewards)
        assert value.dtype == jnp.float32
        assert mask.dtype == bool
        np.testing.assert_allclose(value, [expected], rtol=1e-6)


def test_a_computed_stream_of_whole_numbers_is_normalised_like_any_other():
    lengths = stream("length", lambda rollouts: -rollouts.token_mask.sum(-1))
    short = stream("short", lambda rollouts: rollouts.token_mask.sum(-1) < 3)
    normalise = per_reward(chain(subtract_group_mean(), divide_by_group_std(eps=0.0, ddof=0)))
    weights = {"reward": 0.0, "length": 1.0, "short": 0.0}
    token_mask = [[[1, 1, 1], [1, 1, 0], [1, 0, 0]]]
    composite = chain(lengths, short, normalise, sum_rewards(**weights))
    value, _ = evaluate(composite, [[0.0] * 3], token_mask=token_mask)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, [[-(1.5**0.5), 0, 1.5**0.5]], rtol=1e-6)
    centred = chain(short, per_reward(subtract_group_mean()), sum_rewards(reward=0.0, short=1.0))
    value, _ = evaluate(centred, [[0.0] * 3], token_mask=token_mask)
    np.testing.assert_allclose(value, [[-2 / 3, 1 / 3, 1 / 3]], rtol=1e-6)


def test_a_computed_stream_does_not_bring_back_what_was_left_out():
    length = stream("length", lambda rollouts: rollouts.fields["length"], needs=("length",))
    composite = chain(length, sum_rewards(reward=0.0, length=1.0), subtract_group_mean())
    value, mask = evaluate(
        composite, [[0.0, 0, 0]], [[True, True, False]], length=[[2.0, 4.0, 99.0]]
    )
    assert mask.tolist() == [[True, True, False]]
    assert value.tolist() == [[-1.0, 1.0, 0.0]]


def test_a_chain_is_traced_on_shapes_with_the_columns_that_it_reads():
    def weighs(signal, rollouts):
        weight = rollouts.fields["weights"].sum(-1)
        return dataclasses.replace(signal, value=signal.value * weight[:, None])

    def too_long(signal, rollouts):
        value = jnp.concatenate([rollouts.behavior_logp, signal.value[..., None]], -1)
        return Signal(value=value, mask=value < 0)

    needs = frozenset({"weights"})
    composite = chain(sum_rewards(), transform(weighs)._replace(needs=needs))
    trace_shapes(composite, SPEC, {"weights": np.ones((99, 3))})  # of the rows of the data
    with pytest.raises(InputError, match=r"weighs \(.*test_chain.py:weighs, line \d+: "):
        trace_shapes(composite, SPEC, {"weights": np.ones((99, 3, 2))})
    with pytest.raises(InputError, match="weighs needs the field 'weights'"):
        trace_shapes(composite, SPEC)
    with pytest.raises(InputError, match=r"ends with values of shape .*expected \[P, G\] or "):
        trace_shapes(chain(sum_rewards(), too_long), SPEC)
