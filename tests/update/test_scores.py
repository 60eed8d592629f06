"""Scores by passes of models against one plain causal pass per sample, in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import cpu_mesh, make_blueprint

from jaxgrpo import advantages, losses
from jaxgrpo.core.scores import SCORES, Score, prompt_field
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import Caller
from jaxgrpo.models.attention import causal
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update.forward import Teacher
from jaxgrpo.update.preparing import Preparer
from jaxgrpo.update.spectrum import effective_rank, ranks_along

pytestmark = pytest.mark.slow

WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
LARGER = dataclasses.replace(WIDE, hidden_size=48, num_layers=3, head_dim=12)
P, G, WIDTH, STEPS = 4, 4, 6, 5
TEACHER = "models/teacher"
ADDED = {
    "teacher_logp": Score("[P, G, T]", TEACHER, "logp"),
    "teacher_entropy": Score("[P, G, T]", TEACHER, "entropy"),
    "teacher_certainty": Score("[P, G, T]", TEACHER, "certainty"),
    "teacher_collision": Score("[P, G, T]", TEACHER, "collision"),
    "cold_logp": Score("[P, G, T]", "trainer", "logp", temperature=0.5),
    "hinted_logp": Score("[P, G, T]", "trainer", "logp", prompt="hinted"),
    "taught_logp": Score("[P, G, T]", TEACHER, "logp", prompt="hinted"),
    "ranks": Score("[P, G, T]", "trainer", "effective_rank", stride=2),
}


@functools.cache
def weights(path):
    """The parameters of the run's own model (None) or of the teacher."""
    return tiny.params(WIDE) if path is None else tiny.params(LARGER, seed=5)


def preparer(*names, late=(), mesh=(1, 1, 1, 1), tokens=25):
    reader = advantages.transform(lambda signal, rollouts: signal, name="reader")
    chain = advantages.chain(advantages.sum_rewards(), reader)
    chain = chain._replace(needs=frozenset(names))
    objective = losses.Objective(losses.clip()._replace(needs=frozenset(late)), losses.token_mean())
    teacher = decoder.build(LARGER, constrain=sharding.constrain(cpu_mesh(*mesh)))
    return Preparer(
        make_blueprint(
            WIDE,
            (P, G, WIDTH, STEPS),
            tokens,
            mesh=mesh,
            temperature=0.8,
            chain=chain,
            objective=objective,
            scores=SCORES | ADDED,
            teachers={TEACHER: Teacher(teacher)},
        )
    )


def hinted_rollouts():
    """Rollouts with another prompt for each row, longer than its own."""
    rollouts = tiny.rollouts(np.random.default_rng(3).integers(0, 2, (P, G)), STEPS, WIDTH)
    random = np.random.default_rng(8)
    hints = random.integers(2, tiny.VOCAB, (P, WIDTH + 3)).astype(np.int32)
    hints = np.where(np.arange(WIDTH + 3) < random.integers(2, WIDTH + 4, (P, 1)), hints, -1)
    return dataclasses.replace(rollouts, fields={prompt_field("hinted"): hints}), hints


def begin(prepare):
    layouts = {
        path: sharding.param_shardings(prepare.blueprint.mesh, model.axes, model.shapes)
        for path, model in ((None, prepare.blueprint.model), (TEACHER, decoder.build(LARGER)))
    }
    params, teacher = (jax.device_put(weights(path), layouts[path]) for path in layouts)
    return first_learner(prepare.blueprint, params, 8, ("reward",), {TEACHER: teacher})


def scored(prepare, rollouts):
    rollouts, learner = put_prompts(prepare.blueprint.mesh, rollouts), begin(prepare)
    fields = prepare.with_fields(learner, rollouts, prepare.blueprint.chain.needs)[0].fields
    return {name: np.asarray(fields[name]) for name in prepare.blueprint.chain.needs}


@functools.partial(jax.jit, static_argnums=0)
def causal_pass(config, params, tokens):
    """Hidden states and logits of one sequence."""
    position = jnp.arange(len(tokens))[None]
    attend = causal(position, jnp.ones_like(position, bool))
    hidden, _ = tiny.model(config).apply(params, tokens[None], position, Caller(attend), None)
    return hidden[0], tiny.model(config).unembed(params, hidden)[0]


def plain(config, prompt, completion, temperature):
    """(hidden states, log-probs, quantities) at a completion's tokens, by a pass over it alone."""
    tokens = np.array([*prompt, *completion], np.int32)
    padded = np.pad(tokens, (0, WIDTH + 3 + STEPS - len(tokens)))
    outputs = causal_pass(config, weights(None if config is WIDE else TEACHER), padded)
    drawn = slice(len(prompt) - 1, len(tokens) - 1)
    hidden, logits = (np.asarray(output)[drawn] for output in outputs)
    logits = logits / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    quantities = {
        "entropy": -(np.exp(logp) * logp).sum(-1),
        "certainty": -logp.mean(-1),
        "collision": (np.exp(logp) ** 2).sum(-1),
    }
    return hidden, logp[np.arange(len(completion)), completion], quantities


def expected(rollouts, hints):
    """All added fields by plain passes."""
    fields = {name: np.zeros((P, G, STEPS)) for name in ADDED}
    for p in range(P):
        prompt = rollouts.prompt_tokens[p][rollouts.prompt_mask[p]]
        for g in range(G):
            completion = rollouts.completion_tokens[p, g][rollouts.token_mask[p, g]]
            count = slice(len(completion))
            _, logp, quantities = plain(LARGER, prompt, completion, 0.8)
            fields["teacher_logp"][p, g, count] = logp
            for name, values in quantities.items():
                fields[f"teacher_{name}"][p, g, count] = values
            hidden, logp, _ = plain(WIDE, prompt, completion, 0.5)
            fields["cold_logp"][p, g, count] = logp
            hint = hints[p][hints[p] >= 0]
            for name, config in (("hinted_logp", WIDE), ("taught_logp", LARGER)):
                fields[name][p, g, count] = plain(config, hint, completion, 0.8)[1]
            for number in range(1, len(completion) + 1):
                if number % 2 == 0 or number == len(completion):
                    fields["ranks"][p, g, number - 1] = rank_by_numpy(hidden[:number])
    return fields


def rank_by_numpy(states):
    values = np.linalg.svd(states - states.mean(0), compute_uv=False)
    share = values[values > 1e-12] / max(values.sum(), 1e-300)
    return float(np.exp(-(share * np.log(share)).sum()))


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [
        (1, 1, 2, 2),
        *(pytest.param(mesh, marks=pytest.mark.full) for mesh in ((1, 1, 1, 1), (2, 2, 1, 1))),
    ],
)
def test_scores_are_those_of_one_plain_pass_per_sample(mesh):
    with jax.enable_x64(True):
        prepare = preparer(*ADDED, mesh=mesh)
        rollouts, hints = hinted_rollouts()
        actual = scored(prepare, rollouts)
        for name, value in expected(rollouts, hints).items():
            np.testing.assert_allclose(
                np.where(rollouts.token_mask, actual[name], 0), value, atol=1e-9, err_msg=name
            )


@pytest.mark.full
def test_what_only_the_loss_reads_is_scored_on_live_samples():
    with jax.enable_x64(True):
        names = ("teacher_logp", "hinted_logp", "taught_logp")
        prepare = preparer(late=names)
        rollouts, hints = hinted_rollouts()
        rewards = {"reward": np.where(np.arange(P)[:, None] < 2, 0, rollouts.rewards["reward"])}
        rollouts = dataclasses.replace(rollouts, rewards=rewards)
        on_mesh = put_prompts(prepare.blueprint.mesh, rollouts)
        _, prepared = prepare.prepare(begin(prepare), on_mesh)
        expected_fields, live = expected(rollouts, hints), prepared.live
    assert live[2:].any()
    assert not live[:2].any()  # no baseline: a sample with reward 0 is dead
    (batch,) = prepared.batches
    for name in names:
        values = np.asarray(batch.fields[name])[np.asarray(batch.mask)]
        plain_values = np.where(rollouts.token_mask & live[..., None], expected_fields[name], 0)
        plain_values = np.sort(plain_values[plain_values != 0])
        np.testing.assert_allclose(np.sort(values), plain_values, atol=1e-9)


@pytest.mark.full
def test_effective_ranks_are_those_of_their_closed_forms():
    rank = lambda states, mask: float(effective_rank(jnp.asarray(states), jnp.asarray(mask)))  # noqa: E731
    directions = np.eye(6, 8)
    centred = np.concatenate([directions, -directions])  # so that the mean is 0
    everywhere = np.ones(12, bool)
    assert rank(centred, everywhere) == pytest.approx(6, rel=1e-5)
    line = np.outer(np.arange(12.0), np.arange(1.0, 9.0))
    assert rank(line, everywhere) == pytest.approx(1, abs=1e-4)
    assert rank(np.ones((12, 8)), everywhere) == 1  # equal states
    assert rank(centred, np.arange(12) < 1) == 1  # one state
    shares = np.array([0.5, 0.3, 0.2])
    scaled = np.concatenate([np.diag(shares), -np.diag(shares)])
    entropy = -(shares * np.log(shares)).sum()
    assert rank(scaled, np.ones(6, bool)) == pytest.approx(np.exp(entropy), rel=1e-5)


@pytest.mark.full
def test_ranks_stand_at_each_stride_and_at_the_end_of_each_sample():
    segment = jnp.array([[[1, 1, 1, 1, 1, 2, 2, 3, 0, 0]]], jnp.int32)
    hidden = jax.random.normal(jax.random.key(0), (1, 1, 10, 4))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    ranks = np.asarray(ranks_along(mesh, hidden, segment, 2))[0, 0]
    assert (ranks > 0).tolist() == [False, True, False, True, True, False, True, True, False, False]
    assert ranks[4] == pytest.approx(rank_by_numpy(np.asarray(hidden[0, 0, :5], float)), rel=1e-5)
    assert ranks[7] == 1
    no_sample = jnp.zeros_like(segment)
    assert not np.asarray(ranks_along(mesh, hidden, no_sample, 2)).any()
