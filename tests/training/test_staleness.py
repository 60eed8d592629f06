"""`rollout.staleness`: each step trains on samples of the parameters of some steps before."""

from __future__ import annotations

import collections

import by_hand
import jax
import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow
STEPS, LAG = 5, 2
CHANGES = {
    "loss.surrogate": {"use": "cispo"},
    "rollout.prompts": {"use": "spo_priority"},
    "train.steps": STEPS,
    "checkpoint.every": 2,
}
STALE = {**CHANGES, "rollout.staleness": LAG}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A loop with a queue of its own round a run that knows no lag."""
    run = setup(small_run.config(tmp_path_factory.mktemp("straight"), **CHANGES))
    learner, stream, queue = run.learner, run.stream, collections.deque()
    for _ in range(STEPS):
        while len(queue) <= LAG:
            stream, collected = by_hand.collect(run, learner, stream)
            queue.append(collected.rollouts)
        learner, prepared = run.prepare(learner, queue.popleft())
        learner, _ = run.update(learner, prepared.batches)
    return learner, stream, queue


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that died after its third step, one step behind its last checkpoint, and went on."""
    return resuming.died_and_resumed(
        small_run.config(tmp_path_factory.mktemp("stale") / "r", **STALE), step=3
    )


@pytest.mark.full
def test_a_resumed_run_ends_as_a_loop_with_a_queue_bit_for_bit(straight, resumed):
    learner, stream, queue = straight
    assert resumed.summary["parameter_hash"] == parameter_hash(learner.trainable)
    waiting = tuple(sharding.to_host(rollouts) for rollouts in queue)
    resuming.assert_same_bits(waiting, resumed.stream.waiting.ahead)
    resuming.assert_same_bits(stream.prompt_policy_state, resumed.stream.prompt_policy_state)
    assert int(stream.cursor) == int(resumed.stream.cursor)


def test_the_lag_grows_to_its_bound_and_stays_there(resumed):
    lines = small_run.metrics(resumed.path)
    assert [line["sampling/staleness"] for line in lines] == [0, 1, 2, 2, 2]
    # Prompts are drawn for the steps ahead too.
    assert lines[-1]["prompts/skipped"] == int(resumed.stream.cursor) - (STEPS + LAG) * 8


def test_all_tokens_that_are_drawn_are_counted_in_the_step_that_draws_them(resumed):
    """Step 1 draws three batches, all others one; two batches wait at the end."""
    lines = small_run.metrics(resumed.path)
    waiting = sum(rollouts.token_mask.sum() for rollouts in resumed.stream.waiting.ahead)
    trained = sum(round(line["completions/mean_length"] * 8 * 4) for line in lines)
    assert sum(line["num_tokens"] for line in lines) == waiting + trained
    assert lines[0]["num_tokens"] > 2 * max(line["num_tokens"] for line in lines[1:])


def test_the_ratio_to_the_sampler_is_1_only_for_samples_of_the_newest_parameters(resumed):
    lines = small_run.metrics(resumed.path)
    assert lines[0]["policy_kl"] < 1e-9
    assert all(line["policy_kl"] > 1e-7 for line in lines[1:])


@pytest.mark.full
def test_what_waits_is_the_same_with_flat_groups_replaced(tmp_path):
    """Refill and lag together: a group waits for its step, and leftover groups for the next one."""
    changes = {**STALE, "rollout.refill": {"factor": 3.0}, "train.steps": 4}
    run = setup(small_run.config(tmp_path / "r", **changes))
    shapes = jax.tree.map(np.shape, run.stream)
    learner, stream, steps = by_hand.take_steps(run, 4)
    assert jax.tree.map(np.shape, stream) == shapes
    trained = [sharding.to_host(collected.rollouts.ordinal) for _, collected in steps]
    waiting = [rollouts.ordinal for rollouts in stream.waiting.ahead]
    ordinals = np.concatenate(trained + waiting)
    assert len(set(ordinals.tolist())) == len(ordinals) == 8 * (4 + LAG)
    assert int(learner.step) == 4


def test_a_step_that_is_older_than_the_lag_is_an_error(tmp_path):
    run = setup(small_run.config(tmp_path / "r", **STALE))
    params = run.sync(run.learner)
    stream, _ = run.collect(params, 0, run.stream)
    with pytest.raises(ValueError, match=r"of step 8 were drawn 7 steps before, and .* = 2"):
        run.collect(params, 7, stream)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.surrogate": {"use": "reinforce"}}, "= 2: reinforce .* samples of older parameters"),
        ({"loss.proximal": "trainer"}, '= 2: cispo with loss.proximal = "trainer" takes samples'),
        ({"train.steps": 3}, "= 2: each of train.steps = 3 steps would train on"),
    ],
)
def test_a_lag_that_a_method_cannot_bear_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=f"rollout.staleness {message}"):
        setup(small_run.config(tmp_path / "r", **{**STALE, **changes}))


@pytest.mark.full
def test_weights_of_the_trainer_over_the_sampler_bear_it(tmp_path):
    weights = {"use": "truncated_importance"}
    changes = {"loss.surrogate": {"use": "reinforce"}, "loss.mismatch": weights}
    run = setup(small_run.config(tmp_path / "r", **{**STALE, **changes}))
    assert len(run.stream.waiting.ahead) == LAG
