"""The pass over reference answers against one plain causal pass per sample."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engines import make_blueprint

from jaxgrpo import advantages
from jaxgrpo.models import sharding
from jaxgrpo.models.api import Caller
from jaxgrpo.models.attention import XLA, causal
from jaxgrpo.rollout.answers import FORCED, MASK, THOUGHT
from jaxgrpo.rollout.judging import put_prompts
from jaxgrpo.training.parameters import first_learner
from jaxgrpo.update import answers
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.preparing import Preparer

pytestmark = pytest.mark.slow

WIDE = dataclasses.replace(tiny.UNIFORM, dtype="float64")
TEMPERATURE = 0.8
P, G = 4, 4
PREFIX = [2, 2, 1, 2]  # tokens before each answer, which may take one into its first token
LENGTHS = [3, 1, 4, 2]
THOUGHTS = np.array([[5, 0, 3, 1], [0, 0, 0, 0], [2, 5, 4, 3], [1, 1, 2, 0]], np.int32)


def preparer(
    config=WIDE,
    masked=True,
    tokens=25,
    mesh=(1, 1, 1, 1),
    width=6,
    steps=5,
    scorer="trainer",
    recipe=None,
    cuts=4,
):
    return Preparer(
        make_blueprint(
            config,
            (P, G, width, steps),
            tokens,
            mesh=mesh,
            temperature=TEMPERATURE,
            chain=recipe
            or advantages.build("dro_r3", {"masked_thought": masked, "scorer": scorer}),
            answer_cuts=cuts,
        )
    )


def full_rollouts(width=6, steps=5, seed=0):
    """Rollouts of full length, whose thoughts are some of their tokens, with answers."""
    random = np.random.default_rng(11)
    most = max(map(sum, zip(PREFIX, LENGTHS, strict=True)))
    forced = random.integers(2, tiny.VOCAB, (P, most)).astype(np.int32)
    size = np.add(PREFIX, LENGTHS)[:, None]
    forced = np.where(np.arange(most) < size, forced, -1)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    fields = {FORCED: forced, THOUGHT: THOUGHTS, MASK: mask}
    rewards = np.random.default_rng(3).random((P, G))
    rollouts = tiny.rollouts(rewards, steps, width)
    tokens = np.random.default_rng(seed).integers(2, tiny.VOCAB, (P, G, steps)).astype(np.int32)
    thought_tokens = (
        np.random.default_rng(99).integers(2, tiny.VOCAB, (P, G, steps)).astype(np.int32)
    )
    tokens = np.where(np.arange(steps) < THOUGHTS[..., None], thought_tokens, tokens)
    everywhere = np.ones_like(tokens, bool)
    changes = {"completion_tokens": tokens, "token_mask": everywhere, "fields": fields}
    return jax.tree.map(jnp.asarray, dataclasses.replace(rollouts, **changes))


def scored(prepare, rollouts, config=WIDE, scale=1.0):
    """Args: scale: of the trained parameters over those of frozen policies."""
    blueprint = prepare.blueprint
    layout = sharding.param_shardings(blueprint.mesh, blueprint.model.axes, blueprint.model.shapes)
    params = jax.device_put(tiny.params(config), layout)
    learner = first_learner(blueprint, params, 8, ("reward",))
    trainable = jax.tree.map(lambda leaf: scale * leaf, learner.trainable)
    learner = dataclasses.replace(learner, trainable=trainable)
    rollouts = put_prompts(blueprint.mesh, rollouts)
    fields = prepare.with_fields(learner, rollouts, blueprint.chain.needs)[0].fields
    return {
        name: np.asarray(fields[name])
        for name in sorted(fields)
        if name.endswith(("_logp", "_rank"))
    }


@functools.partial(jax.jit, static_argnums=0)
def causal_pass(config, params, tokens):
    """The logits of one sequence."""
    position = jnp.arange(len(tokens))[None]
    attend = causal(position, jnp.ones_like(position, bool))
    hidden, _ = tiny.model(config).apply(params, tokens[None], position, Caller(attend), None)
    return tiny.model(config).unembed(params, hidden)[0]


@functools.cache
def alone(config, *tokens, ranks=False):
    """Log-probs, or ranks, [n - 1] of all tokens but the first, in one pass over their sequence.

    What is behind it, for one program to take every length, no token of it attends to.
    """
    padded = np.pad(np.asarray(tokens, np.int32), (0, 24 - len(tokens)))
    logits = np.asarray(causal_pass(config, tiny.params(config), padded))[: len(tokens)]
    if ranks:
        order = np.argsort(-logits[:-1], axis=-1, kind="stable")
        return np.argmax(order == np.array(tokens[1:])[:, None], axis=-1)
    logits = logits / TEMPERATURE
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logp[np.arange(len(tokens) - 1), list(tokens[1:])]


def plain(rollouts, config=WIDE):
    """Both fields by one plain pass per sample."""
    most = max(LENGTHS)
    logps = np.zeros((P, G, most)), np.zeros((P, most))
    for p in range(P):
        prompt = np.asarray(rollouts.prompt_tokens[p])[np.asarray(rollouts.prompt_mask[p])]
        forced = np.asarray(rollouts.fields[FORCED][p])
        forced = forced[forced >= 0]
        for g in range(G + 1):
            thought = rollouts.completion_tokens[p, g, : THOUGHTS[p, g]] if g < G else []
            sequence = [*prompt.tolist(), *np.asarray(thought).tolist(), *forced.tolist()]
            row = logps[0][p, g] if g < G else logps[1][p]
            row[: LENGTHS[p]] = alone(config, *map(int, sequence))[-LENGTHS[p] :]
    return {"answer_logp": logps[0], "masked_answer_logp": logps[1]}


@pytest.mark.full
@pytest.mark.parametrize("tokens", [25, 200])
def test_answers_are_scored_as_in_one_plain_pass_per_sample(tokens):
    with jax.enable_x64(True):
        rollouts = full_rollouts()
        got, want = scored(preparer(tokens=tokens), rollouts), plain(rollouts)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], want[name], atol=1e-9, rtol=0)
    assert np.ptp(want["answer_logp"][0, :, 0]) > 0.1  # thoughts make a difference
    np.testing.assert_array_equal(got["answer_logp"] == 0, ~np.asarray(answer_mask(rollouts)))
    # A sample without a thought is the one that masks it.
    np.testing.assert_allclose(
        got["answer_logp"][1], np.broadcast_to(got["masked_answer_logp"][1], (G, 4)), atol=1e-9
    )


def test_the_kernel_of_the_pass_is_for_as_many_samples_in_a_row_as_its_groups_have():
    sizes = []

    def choose_again(row, samples_per_row):
        sizes.append((row, samples_per_row))
        return XLA

    blueprint = preparer(tiny.UNIFORM).blueprint
    prepare = Preparer(blueprint._replace(kernel=XLA._replace(choose_again=choose_again)))
    scored(prepare, full_rollouts(), tiny.UNIFORM)
    answer = max(map(sum, zip(PREFIX, LENGTHS, strict=True)))
    assert set(sizes) == {(blueprint.geometry.max_completion_tokens + answer, G + 1)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("scorer", "mesh"),
    [("trainer", (1, 1, 1, 1)), ("base", (2, 2, 1, 1))],
)
def test_ranks_of_answers_are_places_in_a_sort_and_the_trainers_whoever_scores(scorer, mesh):
    chain = advantages.build("dro_r3", {"scorer": scorer})
    chain = chain._replace(needs=chain.needs | {"answer_rank"})
    with jax.enable_x64(True):
        rollouts = full_rollouts()
        ranks = scored(preparer(recipe=chain, mesh=mesh, tokens=40), rollouts)["answer_rank"]
        expected = np.zeros((P, G, max(LENGTHS)))
        for p, g in np.ndindex(P, G):
            prompt = np.asarray(rollouts.prompt_tokens[p])[np.asarray(rollouts.prompt_mask[p])]
            thought = np.asarray(rollouts.completion_tokens[p, g, : THOUGHTS[p, g]])
            forced = np.asarray(rollouts.fields[FORCED][p])
            sequence = np.concatenate([prompt, thought, forced[forced >= 0]]).tolist()
            expected[p, g, : LENGTHS[p]] = alone(WIDE, *sequence, ranks=True)[-LENGTHS[p] :]
    np.testing.assert_array_equal(ranks, expected)
    assert np.ptp(expected[0], axis=0).max() > 1  # thoughts make a difference


def behind_parts(rollouts, cuts, config=WIDE):
    """The answers' log-probs behind 0 to all parts of each thought, by one plain pass for each."""
    logps = np.zeros((P, G, cuts + 1))
    for p, g, part in np.ndindex(P, G, cuts + 1):
        prompt = np.asarray(rollouts.prompt_tokens[p])[np.asarray(rollouts.prompt_mask[p])]
        forced = np.asarray(rollouts.fields[FORCED][p])
        thought = rollouts.completion_tokens[p, g, : -(-THOUGHTS[p, g] * part // cuts)]
        sequence = [*prompt.tolist(), *np.asarray(thought).tolist(), *forced[forced >= 0].tolist()]
        logps[p, g, part] = alone(config, *map(int, sequence))[-LENGTHS[p] :].sum()
    return logps


@pytest.mark.full
@pytest.mark.parametrize(
    ("cuts", "mesh"), [(1, (1, 1, 1, 1)), pytest.param(3, (2, 2, 1, 1), marks=pytest.mark.full)]
)
def test_answers_behind_parts_of_thoughts_are_those_of_one_plain_pass_for_each(cuts, mesh):
    chain = advantages.build("l2t")
    with jax.enable_x64(True):
        rollouts = full_rollouts()
        got = scored(preparer(recipe=chain, cuts=cuts, mesh=mesh, tokens=40), rollouts)
        ends = scored(preparer(tokens=200), rollouts)
        want = behind_parts(rollouts, cuts)
    assert got.keys() == {"cut_answer_logp"}
    np.testing.assert_allclose(got["cut_answer_logp"], want, atol=1e-9, rtol=0)
    # The gains of all parts add up to what R3 says of the whole thought.
    total = ends["answer_logp"].sum(-1) - ends["masked_answer_logp"].sum(-1)[:, None]
    gains = np.diff(got["cut_answer_logp"], axis=-1)
    np.testing.assert_allclose(gains.sum(-1), total, atol=1e-9)
    assert np.ptp(gains[0]) > 0.1


def answer_mask(rollouts):
    return np.broadcast_to(np.asarray(rollouts.fields[MASK])[:, None], (P, G, max(LENGTHS)))


def test_text_behind_the_thought_changes_nothing():
    with jax.enable_x64(True):
        prepare = preparer()
        first, second = full_rollouts(seed=0), full_rollouts(seed=1)
        assert (first.completion_tokens != second.completion_tokens).any()
        left, right = scored(prepare, first), scored(prepare, second)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.full
def test_equal_thoughts_of_a_group_have_the_answers_log_probs_of_the_first_bit_for_bit():
    """What rounding makes of another place in a micro-batch would be divided by its own spread."""
    rollouts, sizes = full_rollouts(), preparer(tiny.UNIFORM).blueprint
    tokens = rollouts.completion_tokens.at[3, 1, 0].set(rollouts.completion_tokens[3, 0, 0])
    rollouts = dataclasses.replace(rollouts, completion_tokens=tokens)
    longest = rollouts.fields[FORCED].shape[1]
    geometry = answers.answer_geometry(sizes.geometry, longest, 1, True, sizes.mesh)
    shape = answers.behind_thoughts(rollouts, geometry).token_mask.shape
    noise = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    answer_logp = np.asarray(answers.pick_answer_logp(jnp.asarray(noise), rollouts)[answers.ANSWER])
    kinds = [len({tuple(sample) for sample in group.tolist()}) for group in answer_logp]
    assert kinds == [4, 1, 4, 3]  # the second group has no thoughts; two of the last are equal
    np.testing.assert_array_equal(answer_logp[3, 0], answer_logp[3, 1])


@pytest.mark.full
def test_meshes_of_four_devices_score_the_same():
    # 8 tokens and 5 of an answer do not divide over a context of four devices: room for 16.
    rollouts = full_rollouts(width=8, steps=8)
    want = plain(rollouts, tiny.UNIFORM)
    for mesh in ((2, 2, 1, 1), (1, 1, 1, 4)):
        prepare = preparer(tiny.UNIFORM, tokens=32, mesh=mesh, width=8, steps=8)
        got = scored(prepare, rollouts, tiny.UNIFORM)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], atol=1e-5, rtol=0)


def test_the_pass_has_room_for_the_longest_answer_whatever_the_update_computes_at_a_time():
    mesh = sharding.make_mesh(context=4)
    small = Geometry(P, G, 8, 8, 1, 16)
    sizes = answers.answer_geometry(small, 7, 1, True, mesh)
    assert sizes == Geometry(P, G + 1, 8, 16, 1, 24)
    assert answers.answer_geometry(small._replace(tokens=64), 8, 1, False, mesh).tokens == 64


@pytest.mark.full
@pytest.mark.parametrize("scorer", ["base", "reference"])
def test_a_frozen_policy_scores_with_weights_of_its_own(scorer):
    """A lagged one is the reference, which resets change. The trained policy is far from both."""
    with jax.enable_x64(True):
        rollouts = full_rollouts()
        prepare = preparer(tokens=200, scorer=scorer)
        assert prepare.blueprint.policies == [scorer]
        values, expected = scored(prepare, rollouts, scale=1.5), plain(rollouts)
    assert values.keys() == {f"{scorer}_{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(values[f"{scorer}_{name}"], value, atol=1e-9)


@pytest.mark.full
def test_a_chain_without_a_baseline_adds_no_sample():
    prepare = preparer(tiny.UNIFORM, masked=False)
    assert scored(prepare, full_rollouts(), tiny.UNIFORM).keys() == {"answer_logp"}
