"""Advantages of samples that grew as leaves of trees, from the ids of the nodes above them.

A sample is a leaf; its tokens lie on the nodes of its path. The fields, by their default names:

    tree         [P, G] int       which tree of the prompt the leaf belongs to
    ancestors    [P, G, D] int    ids of the nodes on its path, root first, -1 where it is shorter
    token_depth  [P, G, T] int    which of these nodes a token belongs to

Ids mean nothing but "the same node", within one prompt and depth. Masked leaves leave every node.

A run whose config sets `tree.branch` grows such samples (`rollout.trees`). Rollouts of your own
bring the fields to `advantages.compute`, or to `advantages.evaluate` as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.metrics import Metrics, mean, reduce, summed
from jaxgrpo.core.types import Rollouts, Signal

_WEIGHTINGS = ("average", "size")


def tree_normalise(
    eps: Scheduled = 1e-6, ddof: int = 1, std: bool = True, field: str = "tree"
) -> AdvantageTransform:
    """Normalises a leaf among the leaves of its tree, and among all of its prompt, and adds both.

        a = (r - mean_tree r) / (std_tree r + eps) + (r - mean_prompt r) / (std_prompt r + eps)

    A part is exactly 0 where its leaves are all equal, or fewer than two: with one leaf per tree
    it is GRPO. The same value for every token of the path.

    Args:
      eps: added to the standard deviations, in units of reward; a number or a function of the step.
      ddof: 0 divides the variances by n, 1 by n - 1.
      std: False subtracts the two means only.
      field: ids of the trees, [P, G]; `tree.branch` brings them.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: flat_trees, the share of leaves whose tree says nothing.
    Source: Tree-GRPO, arXiv 2509.21240 (intra-tree plus inter-tree). Only the sum works there:
    trees alone collapse.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(tree_normalise(std=False), [[3.0, 1.0, 2.0]], tree=[[0, 0, 1]])[0].tolist()
    [[2.0, -2.0, 0.0]]
    """
    base.check_divisor("tree_normalise", eps, ddof)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = stats.widen(signal.value), signal.mask
        ids = base.read_field("tree_normalise", field, rollouts, mask.shape, "[P, G]")
        tree, prompt = node_summary(value, ids, mask), stats.summary(value, mask)
        eps_value = jnp.asarray(base.at_step(eps, rollouts, value.dtype), value.dtype)
        total = jnp.zeros_like(value)
        tree_variance = node_variance(value, ids, mask, tree, ddof)
        prompt_variance = stats.variance(value, mask, ddof=ddof, about=prompt)
        for node, variance in ((tree, tree_variance), (prompt, prompt_variance)):
            total = total + normalised(node, value, variance, std, eps_value)
        return base.with_value(signal, total), {"flat_trees": mean(tree.flat, mask)}

    needs = frozenset({field})
    return _relative("tree_normalise", apply, needs)


def tree_process(
    global_weight: Scheduled = 1.0,
    local_weight: Scheduled = 1.0,
    leaf_power: float = 0.5,
    ancestors: str = "ancestors",
    token_depth: str = "token_depth",
) -> AdvantageTransform:
    """Gives each token what its node is better than the prompt, and better than its parent.

        V(n) = mean reward of the leaves below n
        a[t] = (V(n) - V(prompt) + V(n) - V(parent(n))) / sqrt(leaves(n)),  n the node of token t

    A node without a parent (depth 0) has no second difference. Where all leaves of a prompt share
    the first node, V(prompt) is its value; trees may as well have first nodes of their own. On
    samples that share nothing this is r - mean r: centred GRPO. The square root undoes part of
    what a node of many leaves would weigh, counted once in each; see `token_share_weights`.

    Args:
      global_weight, local_weight: of the two differences; numbers or functions of the step.
      leaf_power: leaves(n) is raised to it: 0.5 is the paper's root, 0 leaves it out.
      ancestors, token_depth: names of the fields; `tree.branch` brings them.

    Signal: [P, G] -> [P, G, T], mask = that of the leaf on its token_mask. Tokens of a depth that
    their leaf does not have get 0.  Raises: InputError on values that are already [P, G, T].
    Metrics: unplaced, the share of such tokens; live, the share of tokens that are not 0.
    Source: TreeRL, arXiv 2506.11902. Its code differs from its formula: rewards are centred by
    leave-one-out, and divided by the root before parents are subtracted.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"ancestors": [[[0, 1], [0, 2]]], "token_depth": [[[0, 1], [0, 1]]]}
    >>> fields["token_mask"] = [[[True, True], [True, True]]]
    >>> evaluate(tree_process(), [[1.0, 0.0]], **fields)[0].tolist()
    [[[0.0, 1.0], [0.0, -1.0]]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        tokens = base.read("tree_process", rollouts, "token_mask").astype(bool)
        path = _read_path("tree_process", ancestors, rollouts, value)
        depths = base.read_field("tree_process", token_depth, rollouts, tokens.shape, "[P, G, T]")
        weights = [base.at_step(w, rollouts, value.dtype) for w in (global_weight, local_weight)]
        parts = _steps(value, signal.mask, path, weights, leaf_power)
        has_node = _on_tokens(list(jnp.moveaxis(path >= 0, -1, 0)), depths)
        spread, mask = _on_tokens(parts, depths), tokens & signal.mask[..., None]
        metrics: Metrics = {"unplaced": mean(~has_node, mask), "live": mean(spread != 0, mask)}
        return Signal(value=spread.astype(signal.value.dtype), mask=mask), metrics

    needs = frozenset({ancestors, token_depth})
    return _relative("tree_process", apply, needs)


def tree_subgroup(weighting: str = "average", ancestors: str = "ancestors") -> AdvantageTransform:
    """Subtracts the mean of every subgroup that a leaf belongs to, and averages over subgroups.

        average:  a = mean_d (r - V_d),  size:  a = sum_d n_d (r - V_d) / sum_d n_d

    over the depths d whose node has more than one leaf; V_d is its mean reward, n_d its leaves.
    The first node must be that of the prompt, else samples of different trees never meet. On
    samples that share nothing else this is r - mean r: centred GRPO.

    Args:
      weighting: "average" or "size", in which nodes near the root weigh more.
      ancestors: name of the field; `tree.branch` brings it.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: subgroups, the mean number of depths that were averaged.
    Source: TreePO, arXiv 2508.17445, whose batch whitening over tokens is a further step.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(tree_subgroup(), [[1.0, 0.0]], ancestors=[[[0, 1], [0, 2]]])[0].tolist()
    [[0.5, -0.5]]
    """
    base.check_choice("tree_subgroup", _WEIGHTINGS, weighting=weighting)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        path = _read_path("tree_subgroup", ancestors, rollouts, value)
        total, weight, subgroups = (jnp.zeros_like(value) for _ in range(3))
        for depth in range(path.shape[-1]):
            ids = path[..., depth]
            node = node_summary(value, ids, signal.mask & (ids >= 0))
            shared = (node.count > 1).astype(value.dtype)
            size = shared * (node.count.astype(value.dtype) if weighting == "size" else 1)
            total = total + size * node.centred(value)
            weight, subgroups = weight + size, subgroups + shared
        advantage = total / jnp.where(weight > 0, weight, 1)
        return base.with_value(signal, advantage), {"subgroups": mean(subgroups, signal.mask)}

    needs = frozenset({ancestors})
    return _relative("tree_subgroup", apply, needs)


def token_share_weights(
    ancestors: str = "ancestors", token_depth: str = "token_depth"
) -> AdvantageTransform:
    """Divides the value of each token by the number of leaves that share it.

        a[p, g, t] / leaves(node of t)

    A token of a common prefix stands in every leaf below it and is trained on in each; with this
    step each token that was sampled counts once. The mask, and so the denominator of the loss, is
    unchanged. A token whose depth its leaf does not have is its own. `tree.branch` brings the two
    fields.

    Signal: [P, G, T] -> [P, G, T], mask unchanged.  Raises: InputError on [P, G]: put to_tokens()
    before it.  Metrics: weight, the mean: sampled tokens over tokens trained on.
    Source: ours; the papers of the other parts count a shared token once per leaf.

    >>> from jaxgrpo.advantages import evaluate, to_tokens
    >>> fields = {"ancestors": [[[0, 1], [0, 2]]], "token_depth": [[[0, 1], [0, 1]]]}
    >>> fields["token_mask"] = [[[True, True], [True, True]]]
    >>> evaluate([to_tokens(), token_share_weights()], [[1.0, 4.0]], **fields)[0].tolist()
    [[[0.5, 1.0], [2.0, 4.0]]]
    """
    needs = frozenset({ancestors, token_depth})

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        name, value, scored = "token_share_weights", stats.widen(signal.value), signal.mask.any(-1)
        path = _read_path(name, ancestors, rollouts, scored)
        depths = base.read_field(name, token_depth, rollouts, value.shape, "[P, G, T]")
        shares = []
        for depth in range(path.shape[-1]):
            ids = path[..., depth]
            leaves = _pairs(ids, scored & (ids >= 0)).sum(1, dtype=jnp.int32)
            shares.append(1 / jnp.maximum(leaves, 1).astype(value.dtype))
        weight = _on_tokens(shares, depths, otherwise=1)
        return base.with_value(signal, value * weight), {"weight": mean(weight, signal.mask)}

    return base.stateless("token_share_weights", apply, needs=needs, levels=(3,))


def _read_path(name: str, field: str, rollouts: Rollouts, samples: Array) -> Array:
    """The ids of the nodes above samples [P, G], [P, G, D]."""
    return base.read_field(name, field, rollouts, (*samples.shape, None), "[P, G, D]")


def _relative(name: str, apply: Callable[..., Any], needs: frozenset[str]) -> AdvantageTransform:
    """A part whose means over leaves hold the sample itself."""
    return base.stateless(name, apply, needs=needs, levels=(2,), relative=True, shrinks=True)


def _pairs(ids: Array, mask: Array) -> Array:
    """[P, other, leaf]: True where another unmasked leaf, or the leaf itself, is of its node.

    Never an array in memory: reductions over the first G take it in.
    """
    return (ids[:, :, None] == ids[:, None]) & mask[:, :, None]


def node_summary(value: Array, ids: Array, mask: Array) -> stats.Summary:
    """What each leaf [P, G] finds at one node above it; masked leaves are of no node."""
    same_node = _pairs(ids, mask)
    other_value = jnp.broadcast_to(value[:, :, None], same_node.shape)
    low, high, *statistics = (
        statistic[:, 0] for statistic in stats.summary(other_value, same_node)
    )
    return stats.Summary(low, high, *(jnp.where(mask, statistic, 0) for statistic in statistics))


def node_variance(value: Array, ids: Array, mask: Array, node: stats.Summary, ddof: int) -> Array:
    same_node = _pairs(ids, mask)
    squares = jnp.broadcast_to(jnp.square(node.centred(value))[:, :, None], same_node.shape)
    (total,) = reduce(summed(squares, same_node), axis=1)
    return total[:, 0] / jnp.maximum(node.count - ddof, 1).astype(value.dtype)


def normalised(
    group: stats.Summary, value: Array, variance: Array, std: bool, eps: float | Array
) -> Array:
    """What a value is above the mean of its group, over the deviation; 0 in a flat group."""
    part = group.centred(value)
    if std:
        divisor = jnp.where(group.flat, 1, jnp.sqrt(variance) + eps)
        part = part / jnp.where(divisor > 0, divisor, jnp.inf)  # eps 0, a variance that underflows
    return jnp.where(group.flat, 0, part)


def _steps(
    value: Array, mask: Array, path: Array, weights: Sequence[Any], leaf_power: float
) -> list[Array]:
    """Per depth [P, G]: what its node adds against the prompt and its parent; 0 without a node."""
    prompt_weight, parent_weight = (jnp.asarray(weight, value.dtype) for weight in weights)
    value = value - stats.summary(value, mask).near  # exact, and means of the rest keep digits
    prompt = node_summary(value, jnp.zeros(mask.shape, jnp.int32), mask).mean
    steps, parent = [], None
    for depth in range(path.shape[-1]):
        has_node = path[..., depth] >= 0
        node = node_summary(value, path[..., depth], mask & has_node)
        step = prompt_weight * (node.mean - prompt)
        if parent is not None:
            step = step + parent_weight * (node.mean - parent)
        step = step / jnp.maximum(node.count, 1).astype(value.dtype) ** leaf_power
        steps.append(jnp.where(has_node, step, 0))
        parent = node.mean
    return steps


def _on_tokens(per_depth: list[Array], depths: Array, otherwise: float = 0) -> Array:
    """[P, G] per depth -> [P, G, T] by the depth of the token. Few depths: selects, no gather."""
    first = per_depth[0]
    spread = jnp.full(depths.shape, otherwise, first.dtype)
    for depth, value in enumerate(per_depth):
        spread = jnp.where(depths == depth, value[..., None], spread)
    return spread
