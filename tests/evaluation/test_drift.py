"""How far the policy is from reference and base, as the metrics of a step tell it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from engines import make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.metrics import finalise
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.preparing import Preparer

REWARDS = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
TEMPERATURE = 0.8


def prepared(recipe, objective, anchor, compact=True):
    """Metrics of a step whose frozen policy is another model, and what that model says."""
    blueprint = make_blueprint(
        tiny.UNIFORM,
        (4, 4, 6, 5),
        100,
        temperature=TEMPERATURE,
        chain=advantages.build(recipe),
        objective=objective,
        compact=compact,
    )
    learner = first_learner(blueprint, tiny.params(), 8, ("reward",))
    assert set(learner.frozen) == ({anchor} if anchor else set())
    frozen_params = tiny.params(seed=7)
    learner = dataclasses.replace(learner, frozen=dict.fromkeys(learner.frozen, frozen_params))
    rollouts = tiny.rollouts(REWARDS)
    _, result = Preparer(blueprint).prepare(learner, rollouts)
    theirs = tiny.whole_logps(tiny.UNIFORM, frozen_params, rollouts, TEMPERATURE)
    gaps = np.asarray(rollouts.behavior_logp - theirs, float).sum(-1)
    return finalise(jax.device_get(result.metrics)), gaps


PLAIN = losses.Objective(losses.clip(), losses.token_mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "penalties", "anchor"),
    [
        ("alpha_dpg", (), "base"),  # scored for the chain
        pytest.param(  # scored for the loss
            "grpo", (losses.k2(0.1),), "reference", marks=pytest.mark.full
        ),
    ],
)
def test_it_is_the_mean_over_completions_of_the_log_ratio_of_what_was_sampled(
    recipe, penalties, anchor
):
    metrics, gaps = prepared(recipe, PLAIN._replace(penalties=penalties), anchor)
    assert metrics[f"kl_to_{anchor}_estimated"] == pytest.approx(gaps.mean(), rel=1e-4)


@pytest.mark.slow
def test_where_penalties_spare_the_dead_nothing_is_told_of_the_live_alone():
    objective = PLAIN._replace(penalties=(losses.k2(0.1),), penalties_on="live")
    metrics, _ = prepared("grpo", objective, "reference")
    assert np.isnan(metrics["kl_to_reference_estimated"])
    # Kept in the batch, the dead are scored, and all are told of.
    metrics, gaps = prepared("grpo", objective, "reference", compact=False)
    assert metrics["kl_to_reference_estimated"] == pytest.approx(gaps.mean(), rel=1e-4)


@pytest.mark.slow
def test_it_costs_no_pass_where_the_method_asks_for_none():
    metrics, _ = prepared("grpo", PLAIN, None)
    assert not [name for name in metrics if name.startswith("kl_to")]
    assert metrics["completions/repetition"] == 0
    # One lucky success of four; the group with two of them is not rare.
    assert 0 < metrics["advantage/rare_success_mass"] == metrics["advantage/lucky_share"]
    assert metrics["rare_success/relative_length"] > 0
