"""However samples are laid out, packed, shared, split or left out, the gradient is the same.

In float64, so that equal means equal: 1e-9 of each leaf's norm.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import CLIPPED, make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.metrics import finalise
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import param_layout
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

REWARDS = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
ONE_ROW = 10  # tokens of a micro-batch: the longest prompt and completion
WHOLE = 100  # the whole step at once

_programs: dict = {}


def blueprint(
    recipe: str, beta: float, tokens: int, compact: bool = True, config=WIDE, objective=None
):
    penalties = (losses.k2(beta),) if beta else ()
    return make_blueprint(
        config,
        (4, 4, 6, 5),
        tokens,
        temperature=0.8,
        chain=advantages.build(recipe),
        objective=objective or CLIPPED._replace(penalties=penalties),
        compact=compact,
    )


def built(recipe: str, beta: float, tokens: int, compact: bool = True, objective=None):
    """The functions of a step; methods share the update, which knows no recipe."""

    def share(name, make):
        key = (name, beta, tokens, objective) if name == "update" else object()
        return _programs.setdefault(key, make())

    step_blueprint = blueprint(recipe, beta, tokens, compact, objective=objective)
    return step_blueprint, build_steps(step_blueprint, share)


@functools.cache
def updated(recipe: str, beta: float, tokens: int, compact: bool = True, objective=None):
    """(gradient, loss, micro-batches, live samples) of one step."""
    with jax.enable_x64(True):
        step_blueprint, steps = built(recipe, beta, tokens, compact, objective)
        learner = first_learner(step_blueprint, tiny.params(WIDE), 8, ("reward",))
        frozen = {name: tiny.params(WIDE, seed=3) for name in learner.frozen}
        learner = dataclasses.replace(learner, frozen=frozen)
        before = jax.tree.map(np.asarray, learner.trainable)
        learner, prepared = steps.prepare(learner, tiny.rollouts(REWARDS))
        learner, metrics = steps.update(learner, prepared.batches)
        moved = jax.tree.map(lambda old, new: old - np.asarray(new), before, learner.trainable)
        assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {np.dtype("float64")}
        loss = finalise(metrics)["loss"]
        return moved, loss, int(prepared.batches[0].num_live), int(prepared.live.sum())


@functools.cache
def plain(recipe: str, beta: float):
    """(gradient, loss) without packing and sharing: one causal pass per sample."""
    with jax.enable_x64(True):
        step_blueprint, steps = built(recipe, beta, WHOLE)
        preparer = steps.prepare.__self__
        learner = first_learner(step_blueprint, tiny.params(WIDE), 8, ("reward",))
        frozen = {name: tiny.params(WIDE, seed=3) for name in learner.frozen}
        learner = dataclasses.replace(learner, frozen=frozen)
        rollouts = tiny.rollouts(REWARDS)
        rollouts, _ = preparer.with_fields(learner, rollouts, step_blueprint.chain.needs)
        _, (advantage, mask, counted), *_ = preparer.judge(
            learner.advantage_state, rollouts, rollouts
        )
        weight = preparer.weigh(counted, mask, np.arange(len(REWARDS)))
        fields = {
            f"{name}_logp": tiny.whole_logps(WIDE, params, rollouts, 0.8)
            for name, params in frozen.items()
        }
        one_each = jnp.ones(mask.shape, jnp.int32)

        def loss(params):
            logp = tiny.whole_logps(WIDE, params, rollouts, 0.8)
            tokens = losses.Tokens(
                logp=logp,
                proximal_logp=rollouts.behavior_logp,
                advantage=advantage,
                mask=mask,
                segment=one_each,
                fields=fields,
            )
            objective = step_blueprint.objective
            value, _ = losses.token_loss(objective.surrogate, objective.penalties, tokens)
            return jnp.where(mask, weight * value, 0).sum()

        value, gradient = jax.jit(jax.value_and_grad(loss))(learner.trainable)
        return jax.tree.map(np.asarray, gradient), float(value)


def assert_equal(left, right):
    assert left[1] == pytest.approx(right[1], rel=1e-6)
    for a, b in zip(jax.tree.leaves(left[0]), jax.tree.leaves(right[0]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-9 * np.linalg.norm(b)
    assert any(leaf.any() for leaf in jax.tree.leaves(left[0]))


RECIPES = ["grpo", "sign", "alpha_dpg"]
BETAS = [0.0, pytest.param(0.05, marks=pytest.mark.full)]


@pytest.mark.full
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        ("grpo", (WHOLE, ONE_ROW)),
        *(pytest.param(name, (WHOLE, 50, 25, ONE_ROW), marks=pytest.mark.full) for name in RECIPES),
    ],
)
def test_packed_samples_with_shared_prompts_make_the_gradient_of_samples_alone(recipe, sizes, beta):
    numbers = []
    for tokens in sizes:
        packed = updated(recipe, beta, tokens)
        assert_equal(packed, plain(recipe, beta))
        numbers.append(packed[2])
    assert numbers[0] == 1
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 7


@pytest.mark.full
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "recipe", [RECIPES[0], *(pytest.param(name, marks=pytest.mark.full) for name in RECIPES[1:])]
)
def test_leaving_out_the_dead_changes_no_gradient(recipe, beta):
    compact, complete = (updated(recipe, beta, 25, leave_out) for leave_out in (True, False))
    assert_equal(compact, complete)
    # With a penalty on all tokens nothing is saved. sign gives every sample an advantage.
    saves = recipe != "sign" and not beta
    assert (compact[2] < complete[2]) == (compact[3] < 16) == saves


OBJECTIVES = {
    "clip with a KL": (losses.clip(), (losses.forward_kl_k3(0.1),)),
    "cispo with a bonus": (losses.cispo(), (losses.entropy_bonus(0.3),)),
    "both": (losses.sapo(), (losses.k2(0.1), losses.adaptive_entropy(target=3.0, coefficient=0.2))),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [name if name == "both" else pytest.param(name, marks=pytest.mark.full) for name in OBJECTIVES],
)
def test_a_gradient_taken_with_the_log_probs_is_that_of_a_second_pass(name):
    surrogate, penalties = OBJECTIVES[name]
    once = losses.Objective(surrogate, losses.token_mean(), penalties)
    twice = once._replace(surrogate=surrogate._replace(per_token=False))
    assert once.per_token
    assert not twice.per_token
    first, second = (updated("sign", 0.0, 25, objective=objective) for objective in (once, twice))
    assert_equal(first, second)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 1, 2), pytest.param((1, 1, 1, 4), marks=pytest.mark.full)],
    ids=["context 2", "context 4"],
)
def test_the_sequence_may_be_split_over_devices(sizes):
    """Prompts and completions of 8 tokens, so that they divide."""
    moved = []
    for mesh in (sizes, (1, 1, 1, 1)):
        step_blueprint = make_blueprint(
            tiny.UNIFORM,
            (4, 4, 8, 8),
            32,
            mesh=mesh,
            temperature=0.8,
            chain=advantages.build("sign"),
        )
        steps, layout = (
            build_steps(step_blueprint),
            param_layout(step_blueprint.model, step_blueprint.mesh),
        )
        params = jax.device_put(tiny.params(), layout)
        learner = first_learner(step_blueprint, params, 8, ("reward",))
        before = jax.tree.map(np.asarray, learner.trainable)
        rollouts = tiny.rollouts(REWARDS, steps=8, width=8)
        learner, prepared = steps.prepare(learner, put_prompts(step_blueprint.mesh, rollouts))
        learner, _ = steps.update(learner, prepared.batches)
        moved.append(jax.tree.map(lambda new, old: new - old, learner.trainable, before))
    for a, b in zip(*map(jax.tree.leaves, moved), strict=True):
        assert np.linalg.norm(a - np.asarray(b)) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.full
def test_a_token_of_one_completion_reaches_no_other():
    """Bit for bit: neither through a shared row, nor through the prompt's keys."""
    step_blueprint = blueprint("sign", 0.05, 50, config=tiny.UNIFORM)
    steps = build_steps(step_blueprint)
    learner = first_learner(step_blueprint, tiny.params(), 8, ("reward",))
    rollouts = tiny.rollouts(REWARDS)
    p, g, t = 3, 1, 1
    assert rollouts.token_mask[p, g].sum() > 2
    tokens = rollouts.completion_tokens
    changed = tokens.at[p, g, t].set(2 + (tokens[p, g, t] - 1) % (tiny.VOCAB - 2))
    assert changed[p, g, t] != tokens[p, g, t]
    logps = []
    for completions in (tokens, changed):
        variant = dataclasses.replace(rollouts, completion_tokens=completions)
        learner, prepared = steps.prepare(learner, variant)
        (batch,) = prepared.batches
        logps.append((np.asarray(batch.fields["reference_logp"]), batch))
    (before, batch), (after, _) = logps
    assert batch.segment.max() == 2  # rows are shared
    different = before != after
    touched = np.asarray(batch.targets != logps[1][1].targets)
    k, d, r, q = (int(index[0]) for index in np.nonzero(touched))
    reached = np.zeros_like(different)
    segment = np.asarray(batch.segment)[k, d, r]
    reached[k, d, r] = (segment == segment[q]) & (np.arange(len(segment)) >= q)
    assert different[reached].all()
    assert not different[~reached].any()
    assert jnp.asarray(reached).sum() == rollouts.token_mask[p, g].sum() - t
