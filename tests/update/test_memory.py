"""A run whose chain and prompt policy remember: broken off and resumed, it is the same run."""

from __future__ import annotations

import json

import by_hand
import jax
import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.config.methods import make_policy
from jaxgrpo.data import tasks
from jaxgrpo.models import sharding
from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import parameter_hash
from jaxgrpo.training.setup import setup

pytestmark = pytest.mark.slow

OWN = '''\
"""A user's transform with memory: divides by the largest value seen so far."""

import dataclasses

import jax.numpy as jnp

from jaxgrpo import AdvantageTransform


def divide_by_largest(start=1.0):
    def update(signal, state, rollouts):
        value = dataclasses.replace(signal, value=signal.value / state)
        return value, jnp.maximum(state, jnp.abs(signal.value).max()), {}

    return AdvantageTransform("divide_by_largest", lambda spec: jnp.float32(start), update)
'''


POLICY = """
from jaxgrpo.rollout.selection import sequential


def every_other(start=0):
    def select(state, cursor, n):
        return (cursor + start + 2 * np.arange(n)).astype(np.int32)

    return sequential()._replace(name="every_other", select=select)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """The folder of own.py and twelve rows, and a config of six steps that uses them."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "own.py").write_text(OWN)
    rows = tasks.load("task:arithmetic:train", count=12)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {
        "data": {"path": str(folder / "rows.jsonl")},
        "rewards": [{"use": "arithmetic"}, {"use": f"{small_run.__file__}:digits"}],
        "advantage": [
            {"use": "sum_rewards", "arithmetic": 1.0, "digits": 0.3},
            {"use": f"{folder}/own.py:divide_by_largest", "start": 0.25},
            {"use": "ema_baseline", "decay": 0.8},
            {"use": "subtract_tracked_success", "initial": 0.0},
        ],
        "rollout.prompts": {
            "use": "spo_priority",
            "decay": 0.2,
            "reward": "digits",
            "success": 0.9,
        },
        "train.steps": 6,
        "checkpoint.every": 2,
    }
    return folder, changes


@pytest.fixture(scope="module")
def straight(workspace):
    """Learner and stream in which a loop by hand ends, which nothing interrupts."""
    folder, changes = workspace
    run = setup(small_run.config(folder / "straight", **changes))
    return by_hand.take_steps(run, changes["train.steps"])[:2]


@pytest.fixture(scope="module")
def resumed(workspace):
    """A run that died after its third step, one step behind its last checkpoint, and went on."""
    folder, changes = workspace
    return resuming.died_and_resumed(small_run.config(folder / "r", **changes), step=3)


def memory(learner, stream):
    """Everything that is remembered beside parameters and the optimizer's state."""
    parts = (learner.advantage_state, stream.prompt_policy_state, stream.cursor, learner.step)
    return jax.tree.map(np.asarray, sharding.to_host(parts))


@pytest.mark.full
def test_the_state_is_that_of_the_uninterrupted_loop_bit_for_bit(straight, resumed):
    before, after = memory(*straight), memory(resumed.learner, resumed.stream)
    resuming.assert_same_bits(before, after)
    assert parameter_hash(straight[0].trainable) == resumed.summary["parameter_hash"]


@pytest.mark.full
def test_there_was_something_to_remember(resumed):
    chain, policy, cursor, _ = memory(resumed.learner, resumed.stream)
    assert chain["divide_by_largest"] > 0.25
    assert chain["ema_baseline"]["weight"] > 2
    assert (chain["subtract_tracked_success"]["alpha"] != 0).sum() > 6
    assert len(set(policy["rate"].tolist())) > 4
    lines = small_run.metrics(resumed.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[0]["prompts/eligible"] == 1
    assert lines[-1]["prompts/eligible"] < 1
    assert lines[-1]["prompts/skipped"] == cursor - 6 * 8 > 0


def test_own_code_may_choose_the_prompts(workspace):
    folder, changes = workspace
    (folder / "policy.py").write_text(f"import numpy as np\n{POLICY}")
    use = {"use": f"{folder}/policy.py:every_other", "start": 1}
    config = small_run.config(folder / "x", **{**changes, "rollout.prompts": use})
    policy = make_policy(config.rollout.prompts, [])
    assert policy.select(policy.init(12, 0), 4, 3).tolist() == [5, 7, 9]
    assert folder / "policy.py" in config.own_files


@pytest.mark.full
def test_the_policy_and_own_code_may_not_change_on_the_way(workspace, resumed):
    folder, changes = workspace
    sequential = {**changes, "rollout.prompts": {"use": "sequential"}}
    with pytest.raises(ValueError, match=r'rollout\.prompts\.use: "spo_priority" -> "sequential"'):
        loop.train(small_run.config(folder / "r", **sequential), resume="auto")
    assert (folder / "r" / "code" / "own.py").read_text() == OWN
