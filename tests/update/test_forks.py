"""Samples whose conversations were rewritten: the update is that of a plain pass over each of them.

In float64, so that equal means equal. The oracle has a row for each rewritten conversation.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.evaluation.rescoring import make_rescorer
from jaxgrpo.models import sequences, sharding
from jaxgrpo.models.api import ModelConfig, params_per_layer
from jaxgrpo.models.attention import Kernel
from jaxgrpo.models.kernels import splash
from jaxgrpo.rollout.dialogue import FORK
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.packing import abstract_batch
from jaxgrpo.update.step import build_steps

REWARDS = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]], np.float32)
STEPS, WIDTH = 14, 6
ROW, WHOLE = 20, 300  # tokens of a micro-batch

OBJECTIVES = {
    "clip": losses.Objective(losses.clip(), losses.token_mean(), (losses.k2(0.05),)),
    "gspo": losses.Objective(losses.gspo(), losses.sequence_mean()),
}


def forked():
    """Rollouts in which most conversations are rewritten once or twice, at any place."""
    rollouts, rng = tiny.rollouts(REWARDS, steps=STEPS, width=WIDTH), np.random.default_rng(5)
    fork, mask = np.zeros((*REWARDS.shape, STEPS), np.int32), np.asarray(rollouts.token_mask).copy()
    for place in np.ndindex(REWARDS.shape):
        begins = rng.choice(np.arange(1, STEPS - 3), rng.integers(0, 3), replace=False)
        for begin in begins.tolist():
            fork[place][begin:] += 1
            mask[place][begin : begin + rng.integers(1, 4)] = False
        mask[place][-1] |= not mask[place].any()
    logp = np.where(mask, rng.normal(-2, 0.3, mask.shape), 0).astype(np.float32)
    tokens = rng.integers(2, tiny.VOCAB, mask.shape).astype(np.int32)
    arrays = {"token_mask": mask, "behavior_logp": logp, "completion_tokens": tokens}
    changed = dataclasses.replace(rollouts, **arrays, fields={FORK: fork})
    return jax.tree.map(jnp.asarray, changed)


def flat_rows(rollouts):
    """(tokens [N, W], mask, and of each token of the samples its row and its place there)."""
    host = jax.tree.map(np.asarray, rollouts)
    fork, rows, where = host.fields[FORK], [], np.zeros((2, *host.token_mask.shape), int)
    for place in np.ndindex(REWARDS.shape):
        prompt = host.prompt_tokens[place[0]][host.prompt_mask[place[0]]].tolist()
        for number in range(fork[place].max() + 1):
            at = np.flatnonzero(fork[place] == number)
            row = [*(prompt if number == 0 else []), *host.completion_tokens[place][at].tolist()]
            where[0][place][at], where[1][place][at] = len(rows), np.arange(len(at))
            where[1][place][at] += len(row) - len(at)
            rows.append(row)
    width = max(map(len, rows))
    mask = np.arange(width) < np.asarray([[len(row)] for row in rows])
    tokens = np.asarray([row + [0] * (width - len(row)) for row in rows], np.int32)
    return jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(where)


def plain_logp(model, params, rollouts):
    tokens, mask, (row, place) = flat_rows(rollouts)
    logp = sequences.token_logp(model, params, tokens, mask)[row, place]
    return jnp.where(rollouts.token_mask, logp, 0)


def blueprint(config: ModelConfig, objective, tokens: int, axes=(1, 1)):
    return make_blueprint(
        config,
        (4, 3, WIDTH, STEPS),
        tokens,
        mesh=(axes[0], 1, 1, axes[1]),
        geometry_options={"has_forks": True},
        chain=advantages.build("dr_grpo"),
        objective=objective,
    )


@functools.cache
def updated(name: str, tokens: int, config=tiny.UNIFORM, axes=(1, 1)):
    """(gradient, plain gradient, batch, micro-batches) of one step."""
    config = dataclasses.replace(config, dtype="float64")
    with jax.enable_x64(True):
        run = blueprint(config, OBJECTIVES[name], tokens, axes)
        steps = build_steps(run)
        preparer, rollouts = steps.prepare.__self__, forked()
        learner = first_learner(run, tiny.params(config), 8, ("reward",))
        anchor = tiny.params(config, seed=3)
        learner = dataclasses.replace(learner, frozen=dict.fromkeys(learner.frozen, anchor))
        _, (advantage, mask, counted), *_ = preparer.judge(
            learner.advantage_state, rollouts, rollouts
        )
        weight = preparer.weigh(counted, mask, np.arange(len(REWARDS)))
        segment = jnp.broadcast_to(jnp.arange(1, 4)[:, None], mask.shape)
        fields = {"reference_logp": plain_logp(run.model, anchor, rollouts)}
        before = jax.tree.map(np.asarray, learner.trainable)

        def loss(params):
            logp, old = plain_logp(run.model, params, rollouts), rollouts.behavior_logp
            judged = {"advantage": advantage, "mask": mask, "segment": segment, "fields": fields}
            tokens = losses.Tokens(logp=logp, proximal_logp=old, **judged)
            value, _ = losses.token_loss(run.objective.surrogate, run.objective.penalties, tokens)
            return jnp.where(mask, weight * value, 0).sum()

        gradient = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(before))
        learner, prepared = steps.prepare(learner, put_prompts(run.mesh, rollouts))
        (batch,) = prepared.batches
        learner, _ = steps.update(learner, prepared.batches)
        moved = jax.tree.map(lambda old, new: old - np.asarray(new), before, learner.trainable)
        return moved, gradient, batch, int(batch.num_live)


def assert_equal(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.linalg.norm(a - b) <= 1e-9 * np.linalg.norm(b)
    assert any(leaf.any() for leaf in jax.tree.leaves(left))


CASES = [
    ("clip", WHOLE),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("clip", ROW), ("gspo", 60))),
]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_the_gradient_is_that_of_a_plain_pass_over_each_rewritten_conversation(name, tokens):
    moved, plain, _, number = updated(name, tokens)
    assert_equal(moved, plain)
    assert (number == 1) == (tokens == WHOLE)


@pytest.mark.full
def test_windows_see_no_further_than_the_rewritten_conversation():
    moved, plain, *_ = updated("clip", 60, tiny.LOCAL_GLOBAL)
    assert_equal(moved, plain)


@pytest.mark.full
def test_two_bins_make_the_same():
    moved, plain, *_ = updated("clip", 60, axes=(2, 1))
    assert_equal(moved, plain)


@pytest.mark.full
def test_the_batch_is_the_one_that_is_planned_for():
    _, _, batch, _ = updated("clip", WHOLE)
    run = blueprint(tiny.UNIFORM, OBJECTIVES["clip"], WHOLE)
    planned = abstract_batch(run.geometry, run.objective.needs)
    kinds = [{str(k): v.shape for k, v in jax.tree.leaves_with_path(b)} for b in (batch, planned)]
    assert kinds[0] == kinds[1]
    assert batch.fields[FORK].dtype == planned.fields[FORK].dtype


@pytest.mark.full
@pytest.mark.slow
def test_an_evaluation_scores_each_rewritten_conversation():
    rollouts, mesh = forked(), sharding.make_mesh(devices=jax.devices()[:1])
    model = tiny.model()
    rescore = make_rescorer(model, mesh, temperature=1.0, quantities={"logp"}, tokens=60)
    assert rescore is not None
    expected = plain_logp(model, tiny.params(), rollouts)
    values = rescore(params_per_layer(model.config, tiny.params()), rollouts)["logp"]
    np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.slow
def test_the_kernel_of_a_tpu_scores_each_rewritten_conversation():
    """Interpreted; with rows that it cannot mask it gives NaN."""
    causal, rows = (
        functools.partial(f, interpret=True) for f in (splash.causal, splash.rows_with_prefix)
    )
    run = blueprint(tiny.UNIFORM, OBJECTIVES["clip"], 60)
    run = run._replace(kernel=Kernel("splash", causal, rows))
    rollouts, preparer = forked(), build_steps(run).prepare.__self__
    learner = first_learner(run, tiny.params(), 8, ("reward",))
    lengths = sharding.to_host(preparer.measure(rollouts))
    sizes = rollouts, lengths, run.geometry
    logp = preparer.score_samples(learner, {"trainer_logp"}, *sizes)["trainer_logp"]
    logp = jnp.where(rollouts.token_mask, logp, 0)
    np.testing.assert_allclose(logp, plain_logp(run.model, tiny.params(), rollouts), atol=1e-5)
