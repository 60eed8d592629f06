"""Which groups of a round are live: those to which the recipe itself gives an advantage."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.types import Learner
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import param_layout
from jaxgrpo.update.preparing import Preparer

P, G, T = 4, 4, 5
NAN = np.nan
WEIGHTS = {"a": 0.6, "b": 0.3}
FLAT = np.ones((P, G))
MEAN = advantages.subtract_group_mean()


def build_preparer(recipe, tail=()) -> Preparer:
    return Preparer(
        make_blueprint(
            tiny.UNIFORM,
            (P, G, 6, T),
            25,
            chain=advantages.extend(recipe, *tail),
            recipe=recipe,
            objective=losses.Objective(losses.build_surrogate("reinforce"), losses.constant(T)),
        )
    )


def rewarded_rollouts(rewards, **changes):
    named = rewards if isinstance(rewards, dict) else {"reward": rewards}
    rollouts = tiny.rollouts(next(iter(named.values())), T)
    values = {"rewards": {name: jnp.float32(value) for name, value in named.items()}, **changes}
    return jax.tree.map(jnp.asarray, dataclasses.replace(rollouts, **values))


def judge(recipe, rewards: Any = FLAT, tail=(), **changes) -> list[bool]:
    """The live groups of rollouts with these rewards [P, G], or {name: rewards}; without a pass."""
    preparer, rollouts = build_preparer(recipe, tail), rewarded_rollouts(rewards, **changes)
    nothing: Any = dict.fromkeys(field.name for field in dataclasses.fields(Learner))
    first = preparer.blueprint.chain.init(advantages.spec_of(rollouts))
    learner = Learner(**{**nothing, "advantage_state": first})
    return preparer.live_groups(learner, rollouts).tolist()


def test_groups_that_differ_in_their_rewards_are_live_and_unscored_samples_say_nothing():
    rewards = [[0.1] * 4, [0, 1, 0, 0], [NAN, 1, 1, 1], [NAN, NAN, NAN, 1]]
    assert judge(advantages.build("grpo"), np.array(rewards)) == [False, True, False, False]


def test_a_group_of_successes_is_live_by_its_classes_and_flat_where_these_are_of_one_size():
    kinds = np.array([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]], np.int32)
    steps = (advantages.sum_rewards(), advantages.darling("kind"), MEAN)
    live = judge(advantages.chain(*steps), fields={"kind": kinds})
    assert live == [True, False, False, False]


def test_rewards_whose_sums_are_equal_are_live_where_each_is_normalised_by_itself():
    a = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    b = np.array([[0, 2, 0, 2], [2, 2, 2, 2], [1, 1, 1, 1], [NAN] * 4])
    recipes = {name: advantages.build(name, {"weights": WEIGHTS}) for name in ("grpo", "gdpo")}
    assert judge(recipes["grpo"], {"a": a, "b": b}) == [False] * P
    assert judge(recipes["gdpo"], {"a": a, "b": b}) == [True, False, False, False]


def test_a_truncated_success_leaves_a_group_flat_only_in_front_of_the_baseline():
    rewards = np.array([[1, 0, 0, 0]] * P)
    truncated = np.zeros((P, G), bool)
    truncated[0, 0] = truncated[1, 1] = True
    truncated[2] = True
    masks, total = advantages.mask_truncated(), advantages.sum_rewards()
    before = judge(advantages.chain(total, masks, MEAN), rewards, truncated=truncated)
    assert before == [False, True, False, True]
    behind = judge(advantages.chain(total, MEAN, masks), rewards, truncated=truncated)
    assert behind == [True, True, False, True]


def test_a_group_whose_samples_have_no_token_is_flat():
    rewards = np.array([[1, 0, 0, 0]] * P)
    tokens = np.array(tiny.rollouts(rewards, T).token_mask)
    tokens[1] = False
    live = judge(advantages.build("dr_grpo"), rewards, token_mask=tokens)
    assert live == [True, False, True, True]


def test_what_loss_kl_and_loss_mismatch_add_is_not_asked():
    tail = (advantages.add_kl_return(0.1), advantages.masked_importance())
    rewards = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]])
    recipe = advantages.build("rloo")
    assert judge(recipe, rewards, tail) == [True, False, False, True]


@pytest.mark.full
@pytest.mark.slow
def test_where_a_recipe_reads_a_pass_groups_are_judged_behind_it_and_trained_on_as_judged():
    forced = np.array([[5, 6], [7, 8], [9, 10], [11, 12]], np.int32)
    thoughts = np.array([[0, 1, 2, 3], [0, 0, 0, 0], [1, 2, 3, 0], [0, 0, 0, 0]], np.int32)
    fields = {FORCED: forced, THOUGHT: thoughts, MASK: np.ones((P, 2), bool)}
    rollouts = rewarded_rollouts(FLAT, fields=fields, token_mask=np.ones((P, G, T), bool))
    preparer = build_preparer(advantages.build("dro_r3", {"drop": 0.0, "weights": {"reward": 0.0}}))
    params = jax.device_put(
        tiny.params(), param_layout(preparer.blueprint.model, preparer.blueprint.mesh)
    )
    learner = first_learner(preparer.blueprint, params, 8, ("reward",))
    live = preparer.live_groups(learner, rollouts)
    assert live.tolist() == [True, False, True, False]
    _, prepared = preparer.prepare(learner, rollouts)
    np.testing.assert_array_equal(prepared.live.any(-1), live)
