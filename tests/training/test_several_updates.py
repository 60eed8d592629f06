"""A run with several updates per step, muon and moments in bfloat16: logged, saved and resumed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resuming
import small_run

from jaxgrpo.models import sharding
from jaxgrpo.training import loop
from jaxgrpo.training.checkpoints import parameter_hash

pytestmark = pytest.mark.slow

CHANGES = {
    "train.num_iterations": 2,
    "train.minibatches": 2,
    "optimizer": {
        "use": "muon",
        "learning_rate": 0.02,
        "schedule": "linear",
        "state_dtype": "bfloat16",
    },
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of three steps that nothing interrupts."""
    return loop.train(small_run.config(tmp_path_factory.mktemp("straight") / "r", **CHANGES))


@pytest.mark.full
def test_a_run_that_died_and_went_on_is_the_same_run_bit_for_bit(straight, tmp_path):
    resumed = resuming.died_and_resumed(small_run.config(tmp_path / "r", **CHANGES), step=3)
    assert parameter_hash(resumed.learner.trainable) == parameter_hash(straight.learner.trainable)
    states = (sharding.to_host(run.learner.opt_state) for run in (straight, resumed))
    resuming.assert_same_bits(*(jax.tree.map(np.asarray, state) for state in states))
    moments = [leaf for leaf in jax.tree.leaves(resumed.learner.opt_state) if leaf.ndim > 1]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("bfloat16")}


@pytest.mark.full
def test_the_rate_falls_with_every_update_and_ratios_leave_one(straight):
    lines = small_run.metrics(straight.path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    # The rate of the last update, 0.02 (1 - n / 12), whether a sample of it was live or not.
    assert lines[-1]["learning_rate"] == pytest.approx(0.02 / 12, rel=1e-5)
    assert all(line["ratio_max"] > 1.001 for line in lines)
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-3 for line in lines)


@pytest.mark.full
def test_a_run_whose_loss_sees_groups_trains_all_samples(tmp_path):
    changes = {
        **CHANGES,
        "recipe": "dr_grpo",
        "loss.surrogate": {"use": "gvpo", "beta": 0.5},
        "loss.reduction": {"use": "sequence_sum"},
        "train.steps": 1,
    }
    run = loop.train(small_run.config(tmp_path / "r", **changes))
    (line,) = small_run.metrics(run.path)
    assert line["live_samples"] == 1
    assert line["loss"] > 0  # squares, which one step does not bring to 0
    assert line["ratio_max"] > 1.001
