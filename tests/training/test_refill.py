"""Runs whose flat groups are replaced: full steps, a spent budget, resumed bit for bit."""

from __future__ import annotations

import itertools
import json
import zlib

import by_hand
import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.models import sharding
from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

STEPS = 6

OWN = '''\
"""Takes the stream as it comes, and counts how often each row was seen."""

import numpy as np

from jaxgrpo.models.sharding import to_host
from jaxgrpo.rollout.selection import sequential


def counted():
    def observe(state, rollouts):
        seen = state["seen"].copy()
        np.add.at(seen, to_host(rollouts.row), 1)
        return {"seen": seen}

    init = lambda num_rows, seed: {"seen": np.zeros(num_rows, np.int32)}
    return sequential()._replace(name="counted", init=init, observe=observe)
'''


def halves(prompts, completions, **columns):
    """Every second sample is right where the prompt's checksum is even; else all are wrong."""
    return some(prompts, 2)


def few(prompts, completions, **columns):
    return some(prompts, 16)


def always(prompts, completions, **columns):
    return [1.0] * len(completions)


def parity(prompts, completions, **columns):
    return [float(len(completion) % 2) for completion in completions]


def some(prompts, share):
    live = [zlib.crc32(prompt.encode()) % share == 0 for prompt in prompts]
    return [float(is_live and place % 2) for place, is_live in enumerate(live)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with the policy, and a config that uses it."""
    folder = tmp_path_factory.mktemp("refill")
    (folder / "own.py").write_text(OWN)
    changes = {
        "rewards": [{"use": f"{__file__}:halves"}],
        "rollout.refill": {"factor": 5.0},
        "rollout.prompts": {"use": f"{folder}/own.py:counted"},
        "train.steps": STEPS,
        "checkpoint.every": 2,
        "run.samples_every": 1,
    }
    return folder, changes


@pytest.fixture(scope="module")
def straight(workspace):
    """The end of a loop by hand, and what each step began with and trained on."""
    folder, changes = workspace
    run = setup(small_run.config(folder / "straight", **changes))
    learner, stream, steps = by_hand.take_steps(run, STEPS)
    trained = [
        (before.waiting.leftover, sharding.to_host(collected.rollouts))
        for before, collected in steps
    ]
    return learner, stream, trained


@pytest.fixture(scope="module")
def resumed(workspace):
    """A run that died after its third step, one step behind its last checkpoint, and went on."""
    folder, changes = workspace
    return resuming.died_and_resumed(small_run.config(folder / "r", **changes), step=3)


@pytest.mark.full
def test_a_resumed_run_ends_as_the_uninterrupted_loop_bit_for_bit(straight, resumed):
    learner, stream, _ = straight
    resuming.assert_same_bits(stream, resumed.stream)
    assert parameter_hash(learner.trainable) == resumed.summary["parameter_hash"]


def test_every_step_trains_on_live_groups_alone_and_its_samples_show_these(resumed):
    lines = small_run.metrics(resumed.path)
    assert len(lines) == STEPS
    for line in lines:
        assert line["refill/shortfall"] == 0
        assert line["live_groups"] == line["groups/mixed"] == 1
        assert line["reward"] == 0.5
        assert line["refill/reward"] < 0.5
        assert line["refill/frac_reward_zero_std"] > 0 == line["frac_reward_zero_std"]
    for before, line in itertools.pairwise(lines):
        assert line["refill/older"] == before["refill/leftover"] / 8
    assert any(line["refill/leftover"] for line in lines[:-1])
    for number in range(1, STEPS + 1):
        file = resumed.path / "samples" / f"step_{number}.jsonl"
        rows = [json.loads(text) for text in file.read_text().splitlines()]
        ordinals = [row["ordinal"] for row in rows]
        assert ordinals == sorted(ordinals)
        assert len(set(ordinals)) == 8
        assert {row["advantage"] != 0 for row in rows} == {True}


def test_each_group_is_trained_on_left_over_or_discarded_once(resumed):
    lines = small_run.metrics(resumed.path)
    names = ("refill/groups", "refill/discarded_groups", "refill/leftover")
    generated, discarded, leftover = (np.array([line[name] for line in lines]) for name in names)
    waiting = np.concatenate([[0], leftover[:-1]])
    np.testing.assert_array_equal(waiting + generated, 8 + discarded + leftover)
    assert int(resumed.stream.cursor) == generated.sum()


def test_the_prompt_policy_sees_every_generated_group_once(resumed):
    visits = resumed.stream.prompt_policy_state["seen"]
    generated = sum(line["refill/groups"] for line in small_run.metrics(resumed.path))
    assert visits.sum() == generated < len(visits)  # within one epoch no row comes twice
    assert visits.max() == 1


def test_older_groups_come_first_with_the_log_probs_of_the_policy_that_sampled_them(straight):
    _, _, steps = straight
    older = 0
    for number, (left, rollouts) in enumerate(steps):
        count = int((left.ordinal >= 0).sum())
        np.testing.assert_array_equal(rollouts.ordinal[:count], left.ordinal[:count])
        np.testing.assert_array_equal(rollouts.behavior_logp[:count], left.behavior_logp[:count])
        assert (rollouts.policy_version[:count] == number - 1).all()
        assert (rollouts.policy_version[count:] == number).all()
        older += count
    assert older > 0


@pytest.mark.full
def test_groups_of_successes_are_live_where_the_method_tells_them_apart(tmp_path):
    parts = [{"use": "sum_rewards", "always": 1.0, "parity": 0.0}]
    parts += [{"use": "darling", "field": "parity"}, {"use": "subtract_group_mean"}]
    named = [{"use": f"{__file__}:{name}", "name": name} for name in ("always", "parity")]
    changes = {
        "advantage": parts,
        "rewards": [{**named[0]}, {**named[1], "weight": 0.0}],
        "rollout.refill": {"factor": 2.0},
        "train.steps": 2,
    }
    finished = loop.train(small_run.config(tmp_path / "r", **changes))
    lines = small_run.metrics(finished.path)
    for line in lines:
        assert line["refill/frac_reward_zero_std"] == 1
        assert line["live_groups"] == 1 - line["refill/shortfall"] / 8
    assert max(line["live_groups"] for line in lines) > 0
    assert max(line["refill/discarded_groups"] for line in lines) > 0


@pytest.mark.full
def test_a_spent_budget_is_logged_and_the_step_is_taken_on_what_there_is(workspace):
    folder, changes = workspace
    scarce = {"rewards": [{"use": f"{__file__}:few"}], "train.steps": 2}
    finished = loop.train(small_run.config(folder / "spent", **{**changes, **scarce}))
    lines = small_run.metrics(finished.path)
    for line in lines:
        live = 8 - line["refill/shortfall"]
        assert line["refill/groups"] == 5 * 8
        assert line["refill/discarded_groups"] == 4 * 8
        assert line["live_groups"] == line["groups/mixed"] == live / 8
        assert line["skipped_updates/no_live_sample"] == (live == 0)
        assert (line["grad_norm"] > 0) == (live > 0)
    assert [line["refill/shortfall"] == 8 for line in lines] == [True, False]
