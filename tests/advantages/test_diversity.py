"""Diversity within a group: factors that can be read off, and an oracle."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxgrpo.advantages import (
    chain,
    darling,
    evaluate,
    sum_rewards,
    to_tokens,
    token_share_weights,
    tree_process,
    unlikeliness,
)
from jaxgrpo.advantages.weights import _fingerprints
from jaxgrpo.core.errors import InputError

pytestmark = pytest.mark.usefixtures("float64")

NAN = np.nan


def run(recipe, rewards, options=None, **fields):
    fields = jax.tree.map(jnp.asarray, {name: np.asarray(leaf) for name, leaf in fields.items()})
    compiled = jax.jit(
        lambda rewards, fields: evaluate(recipe, rewards, None, options, **fields)[0]
    )
    return np.asarray(compiled(jax.tree.map(jnp.asarray, rewards), fields))


def test_each_class_is_paid_by_the_share_of_the_others_floored():
    classes = [[0, 1, 2, 3], [5, 5, 5, 5], [0, 0, 0, 1], [0, 1, 1, 0], [4, 4, 9, 9]]
    rewards = [
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 0.0, 1.0],
        [1.0, NAN, NAN, NAN],  # alone: nothing to be different from
        [1.0, NAN, 1.0, NAN],  # unscored members leave the class and the count
    ]
    value = run(chain(sum_rewards(), darling("kind", 0.1)), np.array(rewards), kind=classes)
    third = 1 / 3
    expected = [[1] * 4, [0.1] * 4, [third, third, 0, 1], [1, 0, 0, 0], [1, 0, 1, 0]]
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert (value[0] == 1).all()


def test_an_all_pass_group_is_live_with_two_classes_and_flat_with_one():
    rewards = np.array([[1.0] * 4, [1.0] * 4, [0.0] * 4])
    value = run("darling", rewards, {"field": "kind"}, kind=[[0, 0, 0, 1], [2] * 4, [0, 0, 0, 1]])
    np.testing.assert_allclose(value[0], [-1 / 6, -1 / 6, -1 / 6, 1 / 2], rtol=1e-12)
    assert (value[1:] == 0).all()


def test_a_reward_may_give_the_classes_and_an_unknown_class_is_one_of_its_own():
    rewards = {
        "correct": np.ones((2, 3)),
        "style": np.array([[0.2, 0.7, 0.2], [0.2, NAN, 0.2]]),
    }
    options = {"field": "style", "weights": {"correct": 1.0, "style": 0.0}}
    value = run("darling", rewards, options)
    np.testing.assert_allclose(value, 2 * [[-1 / 6, 1 / 3, -1 / 6]], rtol=1e-12)


def test_without_classes_equal_completions_are_one_class():
    tokens = [[1, 2, 3], [1, 2, 3], [1, 2, 9], [1, 2, 3], [7, 2, 3], [4, 4, 4]]
    mask = [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]]
    # 0 and 1 agree; 2 and 3 agree where they were chosen, and are a prefix of 0, not it.
    value = run(
        chain(sum_rewards(), darling()),
        np.ones((1, 6)),
        completion_tokens=[tokens],
        token_mask=np.array([mask], bool),
    )
    np.testing.assert_allclose(value[0], [0.8, 0.8, 0.8, 0.8, 1, 1], rtol=1e-12)


def test_what_stands_before_or_between_chosen_tokens_is_of_no_class():
    """A goal before the first two: of one token, and of two."""
    tokens = [[8, 1, 2, 3, 0], [8, 9, 1, 2, 3], [1, 2, 8, 3, 0], [1, 3, 2, 0, 0]]
    mask = [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 1, 0, 1, 0], [1, 1, 1, 0, 0]]
    masks = np.array([mask], bool)
    diverse = chain(sum_rewards(), darling())
    value = run(diverse, np.ones((1, 4)), completion_tokens=[tokens], token_mask=masks)
    np.testing.assert_allclose(value[0], [1 / 3, 1 / 3, 1 / 3, 1], rtol=1e-12)


def test_no_two_completions_share_their_fingerprints():
    every = np.array(list(itertools.product(range(12), repeat=4)))
    every_place = np.ones((1, *every.shape), bool)
    first_hash, second_hash = _fingerprints(jnp.asarray(every[None]), jnp.asarray(every_place))
    assert len(set(zip(first_hash[0].tolist(), second_hash[0].tolist(), strict=True))) == len(every)
    # Renamings at two places, which sums of one scramble of token and place would confuse.
    names = np.random.default_rng(0).integers(0, 150_000, 40_000)
    twice = np.stack([names, 0 * names + 7, 0 * names + 8, names], -1)
    pairs = [[6145, 7, 8, 6145], [56596, 7, 8, 56596]]
    pairs = jnp.asarray(np.concatenate([pairs, twice])[None])
    first_hash, second_hash = _fingerprints(pairs, jnp.ones(pairs.shape, bool))
    fingerprints = set(zip(first_hash[0].tolist(), second_hash[0].tolist(), strict=True))
    assert len(fingerprints) == len({6145, 56596, *names.tolist()})


def test_equal_completions_are_found_among_many():
    random = np.random.default_rng(0)
    tokens = random.integers(0, 2, (6, 9, 3))
    mask = np.arange(3) < random.integers(0, 4, (6, 9, 1))
    scored = random.random((6, 9)) < 0.8
    value = run(
        chain(sum_rewards(), darling(floor=0.0)),
        np.where(scored, 1.0, NAN),
        completion_tokens=tokens,
        token_mask=mask,
    )
    for p in range(6):
        texts = [tuple(row[keep]) for row, keep in zip(tokens[p], mask[p], strict=True)]
        scored_texts = [text for text, keep in zip(texts, scored[p], strict=True) if keep]
        for g in np.flatnonzero(scored[p]):
            share = (len(scored_texts) - scored_texts.count(texts[g])) / (len(scored_texts) - 1)
            assert value[p, g] == pytest.approx(share)


def test_the_likeliest_sample_loses_beta_and_the_least_likely_nothing():
    logp = np.array([[[-1.0, -1.0], [-0.1, NAN], [-3.0, -1.0], [-0.2, -0.2], [NAN, NAN]]])
    mask = np.array([[[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]], bool)
    rewards = np.array([[1.0, 2.0, 1.0, 0.0, NAN]])  # sums -2, -0.1, -4, -0.4
    transform = chain(sum_rewards(), unlikeliness(beta=0.3))
    value = run(transform, rewards, behavior_logp=logp, token_mask=mask)
    np.testing.assert_allclose(value, [[0.9, 2 * 0.7, 1.0, 0, 0]], rtol=1e-12)


def test_equally_likely_samples_share_their_ranks_and_one_alone_keeps_its_reward():
    rewards = np.array([[1.0, 1.0, 1.0], [1.0, NAN, NAN], [1.0, 1.0, 1.0]])
    logp = np.array([[-1.0, -1.0, -2.0], [-5.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])[..., None]
    value = run(
        chain(sum_rewards(), unlikeliness(0.4)),
        rewards,
        behavior_logp=logp,
        token_mask=np.ones((3, 3, 1), bool),
    )
    np.testing.assert_allclose(value, [[0.7, 0.7, 1], [1, 0, 0], [0.8] * 3], rtol=1e-12)


@pytest.mark.slow
def test_a_sample_of_unknown_likelihood_is_masked_and_moves_no_rank():
    chains, rewards = [sum_rewards(), unlikeliness(0.4)], np.ones((1, 4))
    logp = np.array([[[-1.0, -1.0], [NAN, -1.0], [-9.0, NAN], [-np.inf, -1.0]]])
    mask = np.array([[[True, True], [True, True], [True, False], [True, True]]])
    value, live = evaluate(chains, rewards, behavior_logp=logp, token_mask=mask)
    np.testing.assert_allclose(value, [[0.6, 0, 0.8, 1]], rtol=1e-12)
    assert live.tolist() == [[True, False, True, True]]


def test_shares_outside_zero_to_one_are_refused():
    with pytest.raises(InputError, match=r"darling: floor = -0.1, expected a number in \[0, 1\]"):
        darling(floor=-0.1)
    with pytest.raises(InputError, match="unlikeliness: beta = 2"):
        unlikeliness(beta=2.0)


def sizes(jaxpr):
    """Elements of every array in a program, the inner programs' too."""
    for equation in jaxpr.eqns:
        yield from (out.aval.size for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_no_array_is_larger_than_the_tokens():
    p, g, t = 2, 4, 64
    tokens, mask = jnp.zeros((p, g, t), jnp.int32), jnp.ones((p, g, t), bool)

    def program(step, rewards, **fields):
        transform = chain(sum_rewards(), step)
        return jax.make_jaxpr(lambda rewards: evaluate(transform, rewards, **fields))(rewards)

    ids = {"ancestors": tokens[..., :3], "token_depth": tokens, "token_mask": mask}
    share = chain(to_tokens(), token_share_weights())
    for step, fields in (
        (darling(), {"completion_tokens": tokens, "token_mask": mask}),
        (unlikeliness(), {"behavior_logp": jnp.zeros((p, g, t)), "token_mask": mask}),
        (tree_process(), ids),
        (share, ids),
    ):
        assert max(sizes(program(step, jnp.ones((p, g)), **fields).jaxpr)) == p * g * t
