"""Trees: samples of a prompt that begin with tokens of others, which are drawn once.

M chains are drawn first. Then branches grow, round by round: a branch takes the tokens of a leaf up
to a point and draws the rest itself, as a further sample of the group. There are three ways to
choose the points:

    uniform    each round takes so many nodes of each tree, uniformly with replacement. Nodes are
               the root and every `segment`-th token. (Tree-GRPO)
    surprise   each round takes the tokens of the tree that were least likely. (TreeRL)
    segment    round r branches every leaf behind r segments, as long as there is room. (TreePO)

    uniform, surprise:   group_size = trees (1 + rounds nodes continuations)

A leaf has the log-probs of all its tokens, as they were drawn, and all are the policy's choice.
`token_share_weights` counts each drawn token once.

Source: Tree-GRPO, arXiv 2509.21240; TreeRL, arXiv 2506.11902; TreePO, arXiv 2508.17445.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError

TREE, ANCESTORS, DEPTH = "tree", "ancestors", "token_depth"
"""Fields of samples that are leaves, as `advantages.trees` reads them."""

WAYS = ("uniform", "surprise", "segment")


class Trees(NamedTuple):
    """How the samples of a prompt grow."""

    branch: str  # of WAYS
    trees: int  # M
    nodes: int  # that each tree branches at, in each round
    continuations: int  # of each of them
    rounds: int
    segment: int  # tokens
    group_size: int
    longest: int  # tokens of a completion

    @property
    def depths(self) -> int:
        """D, the nodes on the longest path: the prompt is the first."""
        segments = 1 + math.ceil(self.longest / self.segment)
        branches = 2 + self.nodes * self.rounds
        return {"uniform": min(segments, branches), "surprise": branches, "segment": segments}[
            self.branch
        ]


def check(trees: Trees) -> None:
    """Raises: InputError where the samples are not as many as the group has."""
    if trees.trees > trees.group_size:
        raise InputError(
            f"tree.trees = {trees.trees}: rollout.group_size = {trees.group_size} has no room for "
            "so many chains; set one of the two"
        )
    leaves = trees.trees * (1 + trees.rounds * trees.nodes * trees.continuations)
    if trees.branch != "segment" and leaves != trees.group_size:
        raise InputError(
            f"tree: {trees.trees} trees of 1 + {trees.rounds} rounds x {trees.nodes} nodes x "
            f"{trees.continuations} continuations are {leaves} samples, but rollout.group_size = "
            f"{trees.group_size}: set it to {leaves}, or change the tree"
        )


class Leaf(NamedTuple):
    """A sample: where it left another one. One that left none begins at 0."""

    tree: int
    parent: int  # a sample; itself where it left none
    cut: int  # tokens that are its parent's
    logp: np.ndarray  # [length], of all its tokens

    @property
    def length(self) -> int:
        return len(self.logp)


class Branch(NamedTuple):
    """A sample to draw: it begins with the first `cut` tokens of another."""

    sample: int
    tree: int
    parent: int
    cut: int


def first_branches(trees: Trees) -> list[Branch]:
    """The chains that a prompt begins with."""
    return [Branch(sample, sample, sample, 0) for sample in range(trees.trees)]


def next_branches(
    trees: Trees, leaves: Sequence[Leaf], number: int, random: np.random.Generator
) -> list[Branch]:
    """What grows next, once all leaves have ended; nothing once the group is full.

    Args:
      leaves: of the prompt, by sample.
      number: of the round, from 1.
    """
    room, branches = trees.group_size - len(leaves), []
    for tree in range(trees.trees):
        points = _points(trees, leaves, tree, number, random)
        branches += [(tree, *point) for point in points for _ in range(trees.continuations)]
    if not branches and room:  # no leaf is long enough: further chains
        branches = [(0, 0, 0)] * room
    return [
        Branch(len(leaves) + place, tree, parent if cut else len(leaves) + place, cut)
        for place, (tree, parent, cut) in enumerate(branches[:room])
    ]


def _points(
    trees: Trees, leaves: Sequence[Leaf], tree: int, number: int, random: np.random.Generator
) -> list[tuple[int, int]]:
    """(leaf, tokens) behind which a tree branches in a round."""
    in_tree = [(sample, leaf) for sample, leaf in enumerate(leaves) if leaf.tree == tree]
    if trees.branch == "segment":
        cut = number * trees.segment
        return [(sample, cut) for sample, leaf in in_tree if leaf.length > cut]
    if trees.branch == "uniform":
        nodes = [(in_tree[0][0], 0)]
        for sample, leaf in in_tree:
            steps = range(trees.segment, leaf.length, trees.segment)
            nodes += [(sample, cut) for cut in steps if cut > leaf.cut]
        return [nodes[int(random.random() * len(nodes))] for _ in range(trees.nodes)]
    tokens = [
        (float(leaf.logp[place]), sample, place)
        for sample, leaf in in_tree
        for place in range(leaf.cut, leaf.length)
    ]
    points = [(sample, place) for _, sample, place in sorted(tokens)[: trees.nodes]]
    return points + [(in_tree[0][0], 0)] * (trees.nodes - len(points))


def fields(
    trees: Trees, leaves: Sequence[Leaf], tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """TREE [G], ANCESTORS [G, D] and DEPTH [G, tokens] of the leaves of a prompt.

    The prompt is node 0, at depth 0. A node is a run of tokens that the same leaves share.
    """
    owners = []
    for sample, leaf in enumerate(leaves):
        owner = np.full(leaf.length, sample)
        if leaf.cut:
            owner[: leaf.cut] = owners[leaf.parent][: leaf.cut]
        owners.append(owner)
    # Where a run of tokens that one leaf drew is left by others.
    ends: list[set[int]] = [set() for _ in leaves]
    for leaf in leaves:
        if leaf.cut:
            ends[owners[leaf.parent][leaf.cut - 1]].add(leaf.cut)
    ids: dict[tuple[int, int], int] = {}
    ancestors = np.full((len(leaves), trees.depths), -1, np.int32)
    depth = np.zeros((len(leaves), tokens), np.int32)
    ancestors[:, 0] = 0
    for sample in range(len(leaves)):
        path: dict[int, int] = {}
        for place, owner in enumerate(owners[sample].tolist()):
            key = owner, sum(end <= place for end in ends[owner])
            node = ids.setdefault(key, len(ids) + 1)
            depth[sample, place] = path.setdefault(node, len(path) + 1)
        ancestors[sample, 1 : 1 + len(path)] = [*path]
    return np.array([leaf.tree for leaf in leaves], np.int32), ancestors, depth


def count_drawn(ancestors: np.ndarray, depth: np.ndarray, mask: np.ndarray) -> int:
    """Tokens that were drawn: those of a node once, however many leaves have them. A token at a
    depth that its leaf does not have is of no node, and counts by itself.

    Shapes: those of the fields, [P, G, D] and [P, G, T]; mask [P, G, T], of the leaves' tokens.
    """
    depths = ancestors.shape[-1]
    node = np.take_along_axis(ancestors, np.clip(depth, 0, depths - 1), axis=-1)
    node = np.where(mask & (depth >= 0) & (depth < depths), node, -1)
    in_nodes = (np.diff(np.sort(node, axis=1), axis=1, prepend=-1) > 0).sum()
    return int(in_nodes + (mask & (node < 0)).sum())
