"""The reference becomes the policy: what a reset leaves, when it comes, and that runs resume."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from jax.experimental.compilation_cache import compilation_cache

from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.training import loop, setup
from jaxgrpo.training import resets as resetting
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.processes import process
from jaxgrpo.training.resets import Resets, is_better
from jaxgrpo.update.optimizer import current_rate

pytestmark = pytest.mark.slow

K2 = {"use": "k2", "beta": 0.05}


def set_up_run(folder, **changes) -> setup.Setup:
    return setup.setup(small_run.config(folder, **changes))


@pytest.fixture(autouse=True, scope="module")
def no_programs_from_the_cache():
    """The passes of reference and base, read back from the compile cache, may wait for ever."""
    for used in (False, True):
        jax.config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()  # which has looked at the setting once and for all
        if not used:
            yield


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A run with a reference and a base that has made two steps, its learner and stream."""
    names = ("sum_rewards", "to_tokens")
    run = set_up_run(
        tmp_path_factory.mktemp("warm") / "r",
        advantage=[
            *({"use": name} for name in names),
            {"use": "kl_in_reward", "beta": 0.0, "reference": "base"},
        ],
        **{"loss.kl": K2, "optimizer.schedule": "linear", "optimizer.warmup_steps": 2},
    )
    learner, stream, _ = by_hand.take_steps(run, 2)
    return run, learner, stream


def moments(learner) -> list[np.ndarray]:
    sizes = {leaf.shape for leaf in jax.tree.leaves(learner.trainable)}
    return [np.asarray(m) for m in jax.tree.leaves(learner.opt_state) if m.shape in sizes]


def reset(run: setup.Setup, learner):
    fresh = functools.partial(resetting.fresh_parts, run.blueprint.optimizer)
    return resetting.reset_reference(learner, fresh)


def test_a_reset_makes_the_policy_the_reference_and_forgets_gradients_alone(warm):
    run, learner, _ = warm
    before = jax.tree.map(np.asarray, learner)
    assert parameter_hash(learner.frozen["reference"]) != parameter_hash(learner.trainable)
    after = reset(run, learner)
    policy = parameter_hash(before.trainable)
    assert parameter_hash(after.trainable) == parameter_hash(after.frozen["reference"]) == policy
    assert parameter_hash(after.frozen["base"]) == parameter_hash(before.frozen["base"])
    assert any(np.any(moment) for moment in moments(before))
    assert not any(np.any(moment) for moment in moments(after))
    assert float(current_rate(after.opt_state)) == float(current_rate(learner.opt_state)) > 0
    unchanged = ("step", "advantage_state")
    for name in unchanged:
        jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))


def test_a_reset_writes_over_what_it_replaces_and_nothing_else(warm):
    """A device that holds reference and moments once need not have room for them twice."""
    run, warm_learner, _ = warm
    learner = jax.tree.map(jnp.copy, warm_learner)
    keys = dataclasses.replace(run.config.reference, reset_every=1)
    after, resets = resetting.make_resetter(keys, 0, run.blueprint)(learner, Resets(), 1, {})
    assert resets.count == 1
    replaced = learner.frozen["reference"], learner.opt_state
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(replaced))
    stays = learner.trainable, learner.frozen["base"], learner.objective_state, learner.step
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(stays))
    expected = reset(run, warm_learner)
    for leaf, right_leaf in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, right_leaf)


@pytest.mark.full
def test_the_kl_is_zero_right_after_and_the_next_update_finds_its_own_reference(warm):
    run, learner, stream = warm
    copy = jax.tree.map(lambda leaf: leaf + 0 if isinstance(leaf, jax.Array) else leaf, learner)
    after = reset(run, copy)
    reference = parameter_hash(after.frozen["reference"])
    after, _, _, metrics = by_hand.take_step(run, after, stream)
    # Scoring and update are two programs: their log-probs differ by rounding, 1e-6 nats at most.
    assert float(metrics["kl"].result()) < 0.5e-12
    assert parameter_hash(after.frozen["reference"]) == reference  # not donated with the policy
    assert parameter_hash(after.trainable) != reference


def test_before_the_first_update_a_reset_changes_nothing(tmp_path):
    run = set_up_run(tmp_path / "r", **{"loss.kl": K2})
    after = reset(run, run.learner)
    jax.tree.map(np.testing.assert_array_equal, run.learner, after)
    no_reference = set_up_run(tmp_path / "s")
    with pytest.raises(InputError, match="no reference policy"):
        reset(no_reference, no_reference.learner)


def resets(values: list[dict[str, float]], folder, **keys: Any) -> list[int]:
    """The steps after which the reference is reset, given the metrics of each step."""
    changes: dict[str, Any] = {f"reference.{name}": value for name, value in keys.items()}
    if "reset_patience" in keys:
        changes |= {"eval.data": "task:arithmetic:test", "eval.every": 1}
    config = small_run.config(folder, **{"loss.kl": K2}, **changes)
    names = ("kl", "add_kl_return/kl")
    state, due = resetting.Resets(), []
    for number, line in enumerate(values, start=1):
        state = resetting.see(config.reference, state, line)
        if resetting.is_due(config.reference, state, number, line, names):
            due.append(number)
            state = state._replace(count=state.count + 1, last=number, stale=0)
    return due


def test_it_is_due_by_steps_by_kl_and_by_evaluations_that_stall(tmp_path):
    nan = float("nan")
    decide = functools.partial(resets, folder=tmp_path)
    assert decide([{}] * 7, reset_every=3) == [3, 6]
    kls = [{"kl": kl} for kl in (0.1, 0.3, nan, 0.2, 0.21)]
    assert decide(kls, reset_kl_above=0.2) == [2, 5]
    assert decide([{"add_kl_return/kl": 0.3}], reset_kl_above=0.2) == [1]
    with pytest.raises(InputError, match=r"reset_kl_above: no step reports kl or"):
        decide([{}], reset_kl_above=0.2)
    # Counted again from each reset, whatever brought it.
    assert decide([{"kl": kl} for kl in (0, 1, 0, 0, 0)], reset_kl_above=0.2, reset_every=3) == [
        *(2, 5),
    ]
    lines = [{"eval/accuracy": a} for a in (0.1, 0.3, 0.2)] + [{}] * 3
    lines += [{"eval/accuracy": a} for a in (0.3, 0.3, 0.1, 0.4, 0.3, 0.3)]
    assert decide(lines, reset_patience=2) == [7, 9, 12]
    # What is not finite is no evaluation, neither a best one nor one without a best.
    lines = [{"eval/accuracy": a} for a in (nan, 0.1, nan, 0.2, nan, 0.1, -np.inf, np.inf, 0.2)]
    assert decide(lines, reset_patience=2) == [9]
    # Nor is one without the metric, as the accuracy of a format that no sample has.
    lines = [{"eval/auroc": 0.4}, {"eval/accuracy": 0.5}] + [{"eval/auroc": 0.4}] * 2
    assert decide(lines, reset_patience=2, reset_metric="eval/auroc") == [4]


def test_what_is_not_finite_is_never_the_best_and_does_not_stay_it():
    nan, inf = float("nan"), float("inf")
    assert [is_better(value, None) for value in (0.1, nan, inf, -inf)] == [True] + [False] * 3
    assert [is_better(value, 0.2) for value in (0.1, 0.2, 0.3, nan, inf)] == [
        *(False, False, True, False, False),
    ]
    assert is_better(0.1, nan)  # of a run that was begun before this was so


@pytest.mark.full
def test_a_run_that_stops_round_a_reset_ends_as_one_that_does_not(tmp_path, monkeypatch):
    """The base is never right on these prompts, so each second evaluation brings a reset."""
    changes = {
        "loss.kl": {"use": "k1_in_reward", "beta": 0.05},
        "reference.reset_patience": 2,
        "eval.data": "task:arithmetic:test",
        "eval.every": 1,
        "eval.prompts": 2,
        "eval.samples": 1,
        "train.steps": 5,
        "checkpoint.every": 1,
    }
    straight = loop.train(small_run.config(tmp_path / "straight", **changes))
    for stop in (2, 3):  # right behind a reset, and with one evaluation counted
        monkeypatch.setattr(process, "stop_requested", lambda number, at=stop: number == at)
        with pytest.raises(process.StopRequested):
            loop.train(small_run.config(tmp_path / "r", **changes), resume="auto")
    monkeypatch.setattr(process, "stop_requested", lambda number: False)
    resumed = loop.train(small_run.config(tmp_path / "r", **changes), resume="auto")
    assert small_run.metrics(tmp_path / "r") == small_run.metrics(tmp_path / "straight")
    assert resumed.summary["parameter_hash"] == straight.summary["parameter_hash"]
    reference = resumed.learner.frozen["reference"]
    assert parameter_hash(reference) == parameter_hash(straight.learner.frozen["reference"])
    lines = [line for line in straight.metrics if line["step"]]
    assert [line["reference/resets"] for line in lines] == [0, 1, 1, 2, 2]
    apart = [line["add_kl_return/kl"] > 0 for line in lines]
    assert apart == [False, True, False, True, False]


def test_resets_of_what_is_not_there_are_refused(tmp_path):
    def problem(**changes) -> str:
        with pytest.raises(ConfigError) as caught:
            small_run.config(tmp_path, **changes)
        (message,) = caught.value.problems
        return message

    every = {"reference.reset_every": 3}
    assert "reference.reset_every: there is no reference" in problem(**every)
    kl = {"use": "k1_in_reward", "target_validity": 0.9, "reward": "arithmetic"}
    assert "measures from the base" in problem(**every, **{"loss.kl": kl})
    patience = {"reference.reset_patience": 3, "loss.kl": K2}
    assert "reset_patience: nothing is evaluated between" in problem(**patience)
    metric = {"reference.reset_metric": "eval/pass_at_4", **every, "loss.kl": K2}
    assert 'reset_metric = "eval/pass_at_4": nothing reads it; set reference.reset' in problem(
        **metric
    )


def test_a_chain_of_ones_own_may_read_the_reference_that_is_reset(tmp_path):
    def resetter(reference):
        kl = {"use": "add_kl_return", "beta": 0.1, "reference": reference}
        changes = {"advantage": [{"use": "sum_rewards"}, kl], "reference.reset_every": 3}
        run = set_up_run(tmp_path, **changes)
        return resetting.make_resetter(run.config.reference, run.config.eval.every, run.blueprint)

    assert callable(resetter("reference"))
    with pytest.raises(InputError, match="nothing in the run reads the reference's log-probs"):
        resetter("base")


def brings_a_reset(line, folder, **changes) -> bool:
    """Whether a step whose metrics are `line` brings a reset where its KL is above 0.2."""
    run = set_up_run(folder, **{"reference.reset_kl_above": 0.2}, **changes)
    reset = resetting.make_resetter(run.config.reference, run.config.eval.every, run.blueprint)
    return reset(run.learner, resetting.Resets(), 1, line)[1].count == 1


def test_a_kl_counts_under_whatever_name_the_reference_is_read(tmp_path):
    score = {"name": "far_logp", "policy": "reference"}
    chain = [{"use": "sum_rewards"}, {"use": "add_kl_return", "beta": 0.1, "reference": "far"}]
    changes: dict[str, Any] = {"scores": [score], "advantage": chain}
    assert brings_a_reset({"kl": 0.1, "add_kl_return/kl": 0.3}, tmp_path, **changes)
    score = {"name": "far_top", "policy": "reference", "quantity": "likeliest"}
    kl = {"use": "top_k_divergence", "beta": 0.1, "score": "far_top", "k": 2}
    assert brings_a_reset({"kl": 0.3}, tmp_path, scores=[score], **{"loss.kl": kl})
    answers = {"recipe": {"use": "dro_r3", "scorer": "reference"}}
    with pytest.raises(InputError, match=r"reset_kl_above = 0\.2: what reads the ref"):
        brings_a_reset({}, tmp_path, **answers)


@pytest.mark.full
def test_only_a_kl_measured_from_the_reference_brings_a_reset(tmp_path):
    def decided(line, *chain, **changes) -> bool:
        parts = [{"use": "sum_rewards"}, *chain]
        return brings_a_reset(line, tmp_path, advantage=parts, **changes)

    base = {"use": "add_kl_return", "beta": 0.1, "reference": "base"}
    reference = {**base, "reference": "reference"}
    apart = {"add_kl_return/kl": 0.3, "add_kl_return_2/kl": 0.1}
    assert not decided(apart, base, reference)
    assert decided(apart, reference, base)
    assert not decided(apart | {"kl": 0.1}, base, **{"loss.kl": K2})
    assert decided(apart | {"kl": 0.3}, base, **{"loss.kl": K2})
    with pytest.raises(InputError, match="no step reports add_kl_return_2/kl; let"):
        decided({"add_kl_return/kl": 0.3}, base, reference)


def test_the_evaluation_behind_the_last_step_counts_only_where_a_longer_run_has_it(tmp_path):
    changes = {"loss.kl": K2, "eval.data": "task:arithmetic:test", "eval.every": 2}
    run = set_up_run(tmp_path, **changes, **{"reference.reset_patience": 3})
    reset = resetting.make_resetter(run.config.reference, run.config.eval.every, run.blueprint)
    state = resetting.Resets(best=1.0)
    for number, stale in ((2, 1), (3, 1), (4, 2)):  # trained to 3, then to 4
        _, state = reset(run.learner, state, number, {"eval/accuracy": 0.5})
        assert state.stale == stale
