"""Updates on known answers behind the samples' thoughts: VeriFree against one plain pass each.

The oracle writes each sample out as prompt, thought, prefix and answer, and differentiates the
paper's two terms in float64.
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
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.scores import ANSWERED, REACHED
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import answers
from jaxgrpo.update.atlas import Contender, refuse
from jaxgrpo.update.forward import param_layout, params_of
from jaxgrpo.update.step import build_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float64")]

P, G, WIDTH, STEPS, RATE = 4, 4, 6, 8, 0.1
PREFIX, ANSWER = [2, 0, 1, 2], [2, 1, 3, 2]
"""tokens before each answer, and of it"""
THOUGHTS = np.array([[4, 0, 2, 1], [7, 1, 8, 3], [1, 4, 2, 5], [1, 1, 2, 0]], np.int32)
"""of the second prompt the third has no room for prefix and answer, of the third the last"""
UNREACHED, CUT = [(0, 2), (3, 0)], [(3, 2)]
"""(prompt, sample): ended by themselves without an answer; cut by the limit"""
WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
WEIGHT = 0.7


@functools.cache
def rollouts():
    """Samples that are longer than their thoughts, but for those without room."""
    random = np.random.default_rng(4)
    size = np.add(PREFIX, ANSWER)[:, None]
    forced = random.integers(2, tiny.VOCAB, (P, size.max())).astype(np.int32)
    forced = np.where(np.arange(size.max()) < size, forced, -1)
    mask = np.arange(max(ANSWER)) < np.array(ANSWER)[:, None]
    cut, reached = np.zeros((P, G), bool), np.ones((P, G), bool)
    for place in CUT:
        cut[place] = True
    for place in [*UNREACHED, *CUT]:
        reached[place] = False
    fields = {FORCED: forced, THOUGHT: THOUGHTS, MASK: mask, REACHED: reached}
    result = tiny.rollouts(np.zeros((P, G)), STEPS, WIDTH, fields=fields)
    tokens = random.integers(2, tiny.VOCAB, (P, G, STEPS)).astype(np.int32)
    real = np.arange(STEPS) < np.minimum(THOUGHTS + 2, STEPS)[..., None]
    drawn = {"completion_tokens": np.where(real, tokens, 0), "token_mask": real, "truncated": cut}
    return jax.tree.map(jnp.asarray, dataclasses.replace(result, **drawn))


def written():
    """The same rollouts with the answers written in by hand: (rollouts, answered)."""
    tokens = np.zeros((P, G, STEPS), np.int32)
    real, answered = np.zeros((2, P, G, STEPS), bool)
    for p, g in np.ndindex(P, G):
        thought = int(THOUGHTS[p, g])
        if (p, g) in UNREACHED:
            thought = int(rollouts().token_mask[p, g].sum())
        tokens[p, g, :thought] = rollouts().completion_tokens[p, g, :thought]
        real[p, g, :thought] = True
        if (p, g) in [*UNREACHED, *CUT]:
            continue
        forced = np.asarray(rollouts().fields[FORCED][p])[: PREFIX[p] + ANSWER[p]]
        end = thought + len(forced)
        if end <= STEPS:
            tokens[p, g, thought:end] = forced
            answered[p, g, end - ANSWER[p] : end] = True
    changes = {"completion_tokens": jnp.asarray(tokens), "token_mask": jnp.asarray(real | answered)}
    return dataclasses.replace(rollouts(), **changes), answered


def blueprint(mesh=(1, 1, 1, 1), tokens=200, recipe="verifree"):
    options = {"weights": {"reward": 0.0}, "answer": WEIGHT}
    return make_blueprint(
        WIDE,
        (P, G, WIDTH, STEPS),
        tokens,
        mesh=mesh,
        rate=RATE,
        chain=advantages.build(recipe, options),
        objective=CLIPPED._replace(reduction=losses.sequence_sum()),
    )


def updated(**changes):
    """(the step of SGD on all parameters, divided by the rate; what `prepare` gave)."""
    sizes = blueprint(**changes)
    steps = build_steps(sizes)
    params = jax.device_put(tiny.params(WIDE), param_layout(sizes.model, sizes.mesh))
    learner = first_learner(sizes, params, 8, ("reward",))
    before = jax.tree.map(np.asarray, params_of(learner))
    behaved = dataclasses.replace(rollouts(), behavior_logp=sampled_logp())
    learner, prepared = steps.prepare(learner, put_prompts(sizes.mesh, behaved))
    learner, _ = steps.update(learner, prepared.batches)
    after = jax.tree.map(np.asarray, params_of(learner))
    return jax.tree.map(lambda old, new: (old - new) / RATE, before, after), prepared


def sampled_logp():
    return tiny.whole_logps(WIDE, tiny.params(WIDE), rollouts(), 1.0)


def slope_by_hand():
    """Minus the gradient of sum (r - rloo) log p(thought) + weight r log p(answer | thought)."""
    by_hand, answered = written()
    real = np.asarray(by_hand.token_mask)

    # The reward is that of all answers, also of those without room in the completion.
    longer = np.zeros((P, G, STEPS + 6), np.int32)
    places = np.zeros(longer.shape, bool)
    for p, g in np.ndindex(P, G):
        forced = np.asarray(rollouts().fields[FORCED][p])[: PREFIX[p] + ANSWER[p]]
        thought = int(THOUGHTS[p, g])
        longer[p, g, :thought] = rollouts().completion_tokens[p, g, :thought]
        end = thought + len(forced)
        longer[p, g, thought:end] = forced
        places[p, g, end - ANSWER[p] : end] = True
    longest = {"completion_tokens": jnp.asarray(longer), "token_mask": jnp.asarray(places)}
    logp = tiny.whole_logps(WIDE, tiny.params(WIDE), dataclasses.replace(by_hand, **longest), 1.0)
    reward = np.exp(np.where(places, logp, 0).sum(-1)) * np.asarray(rollouts().fields[REACHED])
    advantage = reward - (reward.sum(1, keepdims=True) - reward) / (G - 1)
    weight = np.where(answered, WEIGHT * reward[..., None], advantage[..., None]) * real

    def loss(params):
        return -(tiny.whole_logps(WIDE, params, by_hand, 1.0) * weight).sum() / (P * G)

    return jax.grad(loss)(tiny.params(WIDE)), reward


def close(left, right):
    """Advantages of a batch are float32."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8, rtol=2e-6), left, right)


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"tokens": 30}, {"mesh": (2, 2, 1, 1)}])
def test_an_update_is_the_papers_two_terms(changes):
    step, prepared = updated(**changes)
    expected, reward = slope_by_hand()
    close(step, expected)
    assert np.ptp(reward, axis=1).max() > 1e-4
    metrics = finalise(prepared.metrics)
    assert metrics["train_on_answers/room"] == pytest.approx(written()[1].any(-1).mean())
    # What the log says of completions is of those that were drawn.
    assert metrics["completions/max_length"] == STEPS
    drawn = np.asarray(rollouts().token_mask)
    surprise = -np.asarray(sampled_logp())[drawn].mean()
    assert metrics["entropy_estimated"] == pytest.approx(surprise, rel=1e-5)
    # The sampler is compared with the trainer at the tokens that it drew.
    (batch,), (by_hand, answered) = prepared.batches, written()
    sampled = np.asarray(by_hand.token_mask) & ~answered & prepared.live[..., None]
    assert (batch.fields["sampled_now"] & batch.mask).sum() == sampled.sum()


def test_answers_stand_behind_thoughts_where_there_is_room():
    random = np.random.default_rng(1)
    answer_logp = random.normal(size=(P, G, max(ANSWER)))
    changed = answers.with_answers(rollouts(), jnp.asarray(answer_logp))
    by_hand, answered = written()
    assert answered.any(-1).sum() == P * G - 2 - len(UNREACHED) - len(CUT)
    np.testing.assert_array_equal(changed.fields[ANSWERED], answered)
    np.testing.assert_array_equal(changed.token_mask, by_hand.token_mask)
    np.testing.assert_array_equal(changed.completion_tokens, by_hand.completion_tokens)
    for p, g in np.ndindex(P, G):
        thought, behavior = THOUGHTS[p, g], changed.behavior_logp[p, g]
        thought += 2 * ((p, g) in UNREACHED)
        sampled = rollouts().behavior_logp[p, g, :thought]
        np.testing.assert_array_equal(behavior[:thought], sampled)
        if answered[p, g].any():
            values = behavior[answered[p, g]]
            np.testing.assert_allclose(values, answer_logp[p, g, : ANSWER[p]], rtol=1e-6)


def test_an_atlas_of_one_set_of_samples_refuses_a_method_that_changes_them():
    sizes = blueprint()
    contender = Contender(sizes.chain, sizes.objective)
    with pytest.raises(InputError, match="verifree: trains known answers in place of"):
        refuse("verifree", contender, sizes.scores, {"trainer"}, sizes.chain.needs)
