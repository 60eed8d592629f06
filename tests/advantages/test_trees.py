"""Trees: oracles in NumPy, what holds on every tree, and unbiasedness by enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.advantages import (
    build,
    chain,
    evaluate,
    sum_rewards,
    to_tokens,
    token_share_weights,
    tree_normalise,
    tree_process,
    tree_subgroup,
)
from jaxgrpo.core.errors import InputError

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
P, G, D = 3, 8, 4
LOCAL = tree_process(global_weight=0.0, leaf_power=0.0)


def grow():
    """Ids of random trees: root, branches, sub-branches, leaf; some paths end early."""
    path = np.full((P, G, D), -1)
    path[..., 0] = 7
    path[..., 1] = RANDOM.integers(0, 3, (P, G))
    path[..., 2] = 10 * path[..., 1] + RANDOM.integers(0, 2, (P, G))
    path[..., 3] = 100 + np.arange(G)
    path[0, 2, 3] = path[1, 5, 3] = -1
    return path


PATH = grow()
REWARD = RANDOM.normal(size=(P, G))
REWARD[0, 1] = REWARD[2, 6] = np.nan  # truncated leaves, taken out of everything
SCORED = np.isfinite(REWARD)
FIELDS = {
    "ancestors": PATH,
    "token_depth": np.broadcast_to(np.arange(D), (P, G, D)),
    "token_mask": np.ones((P, G, D), bool),
    "tree": PATH[..., 1],
}


def run(step, rewards: Any = REWARD, **fields):
    transform = chain(sum_rewards(), step)
    read = transform.needs | {"token_mask"}
    rollout_fields = {name: leaf for name, leaf in (FIELDS | fields).items() if name in read}
    fields = jax.tree.map(jnp.asarray, rollout_fields)
    compiled = jax.jit(lambda rewards, fields: evaluate(transform, rewards, **fields)[0])
    return np.asarray(compiled(jnp.asarray(rewards), fields))


def below(p, g, depth):
    """Rewards of the scored leaves that share the node of leaf g at a depth."""
    return REWARD[p][SCORED[p] & (PATH[p, :, depth] == PATH[p, g, depth])]


def leaves():
    return [(p, g) for p, g in np.ndindex(P, G) if SCORED[p, g]]


def deepest(p, g):
    return int((PATH[p, g] >= 0).sum())


@pytest.mark.parametrize("divide", [True, False])
def test_tree_grpo_is_the_sum_of_two_normalisations(divide):
    value = run(tree_normalise(eps=1e-3, std=divide))
    expected = np.zeros((P, G))
    for p, g in leaves():
        for scores in (below(p, g, 1), REWARD[p][SCORED[p]]):
            if len(scores) > 1:
                scale = scores.std(ddof=1) + 1e-3 if divide else 1
                expected[p, g] += (REWARD[p, g] - scores.mean()) / scale
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


def test_tree_rl_is_the_papers_formula_at_the_node_of_each_token():
    depth = RANDOM.integers(-1, D + 1, (P, G, 9))
    value = run(tree_process(), token_depth=depth, token_mask=np.ones(depth.shape, bool))
    expected = np.zeros(depth.shape)
    for p, g in leaves():
        for t, d in enumerate(depth[p, g]):
            if 0 <= d < deepest(p, g):
                node = below(p, g, d)
                total = node.mean() - REWARD[p][SCORED[p]].mean()
                if d:
                    total += node.mean() - below(p, g, d - 1).mean()
                expected[p, g, t] = total / np.sqrt(len(node))
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", ["average", "size"])
def test_tree_po_averages_over_the_subgroups_of_more_than_one_leaf(weighting):
    value = run(tree_subgroup(weighting))
    expected = np.zeros((P, G))
    for p, g in leaves():
        groups = [below(p, g, d) for d in range(deepest(p, g))]
        groups = [scores for scores in groups if len(scores) > 1]
        sizes = [len(scores) if weighting == "size" else 1 for scores in groups]
        differences = [REWARD[p, g] - scores.mean() for scores in groups]
        expected[p, g] = np.average(differences, weights=sizes)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


def test_local_advantages_add_up_to_the_leafs_own_and_to_zero_among_siblings():
    local = run(LOCAL)
    for p, g in leaves():
        # Where the path ends at a node of its own, the steps lead from V(root) to the reward.
        leaf_rewards = below(p, g, deepest(p, g) - 1)
        difference = leaf_rewards.mean() - REWARD[p][SCORED[p]].mean()
        np.testing.assert_allclose(local[p, g].sum(), difference, rtol=0, atol=1e-12)
        for d in range(1, D):
            # Each leaf carries its child's LA once: the sum over leaves is sum_c n_c LA_c.
            siblings = SCORED[p] & (PATH[p, :, d - 1] == PATH[p, g, d - 1])
            if (PATH[p, siblings, d] >= 0).all():
                assert abs(local[p, siblings, d].sum()) < 1e-12


def test_samples_that_share_nothing_are_centred_grpo_and_grpo():
    alone = np.broadcast_to(np.arange(G)[:, None], (P, G, D))
    rooted = alone.copy()
    rooted[..., 0] = 0
    centred, normalised = np.asarray(
        jax.jit(lambda r: [evaluate(name, r)[0] for name in ("dr_grpo", "grpo")])(REWARD)
    )
    process = run(tree_process(), ancestors=alone)
    np.testing.assert_allclose(process, centred[..., None] * np.ones(D), rtol=0, atol=1e-12)
    # Behind a root of the prompt the first node's two differences are the same one.
    process = run(tree_process(), ancestors=rooted)
    expected = centred[..., None] * np.array([0, 2, 1, 1])
    np.testing.assert_allclose(process, expected, rtol=0, atol=1e-12)
    for weighting in ("average", "size"):
        value = run(tree_subgroup(weighting), ancestors=rooted)
        np.testing.assert_allclose(value, centred, rtol=0, atol=1e-12)
    value = run(tree_normalise(), tree=alone[..., 0])
    np.testing.assert_allclose(value, normalised, rtol=0, atol=1e-12)


def test_names_of_nodes_mean_nothing():
    renamed, trees = PATH.copy(), PATH[..., 1].copy()
    for p, d in np.ndindex(P, D):
        names = RANDOM.permutation(500)
        renamed[p, :, d] = np.where(PATH[p, :, d] < 0, -1, names[PATH[p, :, d]])
        if d == 1:
            trees[p] = names[trees[p]]
    for step in (tree_normalise(), tree_process(), tree_subgroup()):
        plain, renamed_values = run(step), run(step, ancestors=renamed, tree=trees)
        np.testing.assert_array_equal(plain, renamed_values)


def test_a_shared_token_counts_once_in_all():
    value = run(
        chain(to_tokens(), token_share_weights()),
        np.where(SCORED, 1.0, np.nan),
        token_depth=np.broadcast_to(np.arange(D + 1), (P, G, D + 1)),
        token_mask=np.ones((P, G, D + 1), bool),
    )
    for p in range(P):
        ids = PATH[p, SCORED[p]]
        nodes = sum(len({node for node in ids[:, d] if node >= 0}) for d in range(D))
        # A token of a depth that its leaf does not have is its own; depth D none of them has.
        assert value[p].sum() == pytest.approx(nodes + (ids < 0).sum() + len(ids))
        np.testing.assert_allclose(value[p, SCORED[p], 0], 1 / SCORED[p].sum())


def test_equal_float32_rewards_give_exactly_zero():
    rewards = np.repeat(RANDOM.normal(size=(P, 1)), G, 1).astype(np.float32)
    for step in (tree_normalise(), tree_normalise(std=False), tree_process(), tree_subgroup()):
        assert (run(step, rewards) == 0).all()


M, B = 3, 2


def test_local_advantages_are_unbiased_but_for_one_less_one_in_n():
    """All trees of M first actions with B continuations each, two actions at each place.

    With A = LA the expected gradient is (1 - 1/M) grad E r on the parameters of the first action
    and (1 - 1/B) grad E r on those of the second.
    """
    first = np.array(list(itertools.product(range(2), repeat=M)))
    second = np.array(list(itertools.product(range(2), repeat=M * B)))
    first, second = (
        np.repeat(np.repeat(first, B, 1), len(second), 0),
        np.tile(second, (len(first), 1)),
    )  # [512, M * B]: the actions of each leaf
    reward_of = RANDOM.normal(size=(2, 2))
    branch = np.repeat(np.arange(M), B)
    path = np.stack([np.zeros(M * B, int), branch, np.arange(M * B)], -1)
    shape = (*first.shape, 3)
    advantage = run(
        LOCAL,
        reward_of[first, second],
        ancestors=np.broadcast_to(path, shape),
        token_depth=np.broadcast_to(np.array([1, 2]), (*first.shape, 2)),
        token_mask=np.ones((*first.shape, 2), bool),
    )

    def expected_gradient(theta):
        start = jax.nn.log_softmax(theta[0])[first]
        follow = jax.nn.log_softmax(theta[1:])[first, second]
        chance = jnp.exp(start[:, ::B].sum(1) + follow.sum(1))
        token_sum = (advantage * jnp.stack([start, follow], -1)).sum(-1)
        return (jax.lax.stop_gradient(chance) * token_sum.mean(1)).sum()

    def objective(theta):
        follow = jax.nn.softmax(theta[1:])
        return (jax.nn.softmax(theta[0])[:, None] * follow * reward_of).sum()

    theta = jnp.asarray(RANDOM.normal(size=(3, 2)))
    slope = jax.jit(jax.grad(expected_gradient))(theta)
    exact = jax.jit(jax.grad(objective))(theta)
    np.testing.assert_allclose(slope[0], (1 - 1 / M) * exact[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(slope[1:], (1 - 1 / B) * exact[1:], rtol=0, atol=1e-12)


def test_recipes_are_their_parts_behind_the_sum():
    for recipe, behind in {
        "tree_grpo": ["tree_normalise"],
        "tree_rl": ["tree_process"],
        "tree_po": ["tree_subgroup", "to_tokens", "whiten_batch"],
    }.items():
        assert [name for name, _ in build(recipe).steps] == ["sum_rewards", *behind]


def test_wrong_options_and_missing_fields_are_refused():
    with pytest.raises(InputError, match="weighting = 'mean', expected one of average, size"):
        tree_subgroup("mean")
    with pytest.raises(InputError, match="ddof = 2"):
        tree_normalise(ddof=2)
    with pytest.raises(InputError, match="tree_subgroup needs the field 'ancestors'"):
        evaluate("tree_po", REWARD)
