"""Trees: where branches grow, how many, and what the fields of their leaves say."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.rollout.trees import (
    Leaf,
    Trees,
    check,
    count_drawn,
    fields,
    first_branches,
    next_branches,
)

LONGEST = 12


def grow(trees, seed=0, lengths=None):
    """A prompt's leaves, with random lengths and log-probs where none are given."""
    random, leaves, number = np.random.default_rng(seed), [], 0
    branches = first_branches(trees)
    tokens: list[np.ndarray] = []
    while branches:
        for branch in branches:
            length = LONGEST if lengths is None else lengths
            length = int(random.integers(branch.cut + 1, length + 1))
            new_logp = -random.exponential(size=length - branch.cut)
            words = random.integers(0, 10**9, length - branch.cut)
            start = slice(0, branch.cut)
            before = leaves[branch.parent].logp[start] if branch.cut else new_logp[:0]
            first_words = tokens[branch.parent][start] if branch.cut else words[:0]
            leaves.append(
                Leaf(branch.tree, branch.parent, branch.cut, np.concatenate([before, new_logp]))
            )
            tokens.append(np.concatenate([first_words, words]))
            assert branch.sample == len(leaves) - 1
        number += 1
        branches = next_branches(trees, leaves, number, np.random.default_rng([seed, number]))
    return leaves, tokens


CASES = [
    Trees("uniform", 2, 2, 1, 2, 3, 10, LONGEST),
    Trees("uniform", 3, 1, 2, 1, 1, 9, LONGEST),
    Trees("surprise", 2, 2, 2, 1, 4, 10, LONGEST),
    Trees("segment", 2, 1, 1, 1, 3, 9, LONGEST),
    Trees("uniform", 4, 2, 1, 0, 3, 4, LONGEST),
]


@pytest.mark.parametrize("trees", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_leaves_are_as_many_as_the_group_and_share_what_their_nodes_say(trees, seed):
    check(trees)
    leaves, tokens = grow(trees, seed)
    assert len(leaves) == trees.group_size
    tree, ancestors, depth = fields(trees, leaves, LONGEST)
    assert ancestors.shape == (trees.group_size, trees.depths)
    assert (ancestors[:, 0] == 0).all()  # the prompt
    drawn = sum(leaf.length - leaf.cut for leaf in leaves)
    mask = np.arange(LONGEST) < np.array([leaf.length for leaf in leaves])[:, None]
    twice = (np.stack([array, array]) for array in (ancestors, depth, mask))
    assert count_drawn(*twice) == 2 * drawn
    # At depths that no leaf has each token counts by itself.
    for place in (trees.depths, -1):
        nowhere = ancestors[None], np.full_like(depth, place)[None], mask[None]
        assert count_drawn(*nowhere) == mask.sum()
    places = {}
    for sample, leaf in enumerate(leaves):
        path = ancestors[sample]
        assert tree[sample] == leaf.tree
        assert (depth[sample, leaf.length :] == 0).all()
        assert (np.diff(depth[sample, : leaf.length]) >= 0).all()
        for place in range(leaf.length):
            node = path[depth[sample, place]]
            assert node > 0
            places.setdefault((node, place), set()).add(tokens[sample][place])
    assert len(places) == drawn  # each drawn token is one place of one node
    assert all(len(words) == 1 for words in places.values())
    below = collections.Counter(node for path in ancestors for node in path if node > 0)
    for sample, leaf in enumerate(leaves):  # leaves share a node as far as they share tokens
        for earlier in range(sample):
            same = tokens[sample][: leaf.length] == np.resize(tokens[earlier], leaf.length)
            common = int(np.argmin(np.append(same[: leaves[earlier].length], False)))
            shared = {*ancestors[sample][1:]} & {*ancestors[earlier][1:]} - {-1}
            assert bool(shared) == (common > 0)
    assert below


def test_uniform_branches_are_as_likely_at_every_node_with_the_root():
    trees = Trees("uniform", 1, 1, 1, 1, 3, 2, LONGEST)
    leaf = Leaf(0, 0, 0, np.zeros(10))
    cuts = collections.Counter(
        next_branches(trees, [leaf], 1, np.random.default_rng(seed))[0].cut for seed in range(4000)
    )
    assert cuts.keys() == {0, 3, 6, 9}
    for count in cuts.values():
        assert count == pytest.approx(1000, abs=4 * np.sqrt(750))


def test_surprise_branches_where_the_tree_was_least_likely():
    trees = Trees("surprise", 1, 2, 2, 1, 4, 5, LONGEST)
    leaf = Leaf(0, 0, 0, np.array([-0.1, -5.0, -0.2, -3.0, -0.4]))
    branches = next_branches(trees, [leaf], 1, np.random.default_rng(0))
    assert [(branch.parent, branch.cut) for branch in branches] == [(0, 1), (0, 1), (0, 3), (0, 3)]
    # In the next round the tokens of the new leaves count, not those that they begin with.
    more = trees._replace(rounds=2, group_size=9)
    leaves = [leaf, Leaf(0, 0, 1, np.array([-0.1, -9.0]))]
    leaves += [Leaf(0, 0, 3, np.array([-0.1, -5.0, -0.2, -0.1]))] * 3
    branches = next_branches(more, leaves, 2, np.random.default_rng(0))
    assert [(branch.parent, branch.cut) for branch in branches] == [(1, 1), (1, 1), (0, 1), (0, 1)]


def test_segments_branch_every_leaf_as_long_as_there_is_room():
    trees = Trees("segment", 1, 1, 1, 1, 2, 4, LONGEST)
    leaf = Leaf(0, 0, 0, np.zeros(9))
    (branch,) = next_branches(trees, [leaf], 1, np.random.default_rng(0))
    assert (branch.parent, branch.cut) == (0, 2)
    leaves = [leaf, Leaf(0, 0, 2, np.zeros(9))]
    branches = next_branches(trees, leaves, 2, np.random.default_rng(0))
    assert [(branch.parent, branch.cut) for branch in branches] == [(0, 4), (1, 4)]
    short = [Leaf(0, 0, 0, np.zeros(1))]
    branches = next_branches(trees, short, 1, np.random.default_rng(0))
    assert [(branch.sample, branch.parent, branch.cut) for branch in branches] == [
        (1, 1, 0),
        (2, 2, 0),
        (3, 3, 0),
    ]  # no leaf is long enough: chains


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 8}, "are 10 samples, but rollout.group_size = 8: set it to 10"),
        ({"trees": 20}, "rollout.group_size = 10 has no room for so many chains"),
    ],
)
def test_a_budget_that_is_not_the_group_is_refused(changes, message):
    with pytest.raises(InputError) as caught:
        check(CASES[0]._replace(**changes))
    assert message in str(caught.value)
