"""Methods that look inside a group: planning tokens, trees, diversity."""

from __future__ import annotations

from collections.abc import Sequence

from jaxgrpo.advantages import diversity, tokens, trees
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.batch import whiten_batch
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import subtract_group_mean
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum
from jaxgrpo.advantages.tokens import to_tokens


def hicra(
    alpha: Scheduled = 0.2,
    field: str | None = None,
    grams: Sequence[Sequence[int]] | None = None,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, less the group mean, then raised by alpha |a| at planning tokens.

    Use it when tokens that plan can be told from those that carry out.

    Needs the planning tokens: bool [P, G, T] in a field, "planning" unless named, or the token
    ids of the grams that mark them. Flat groups stay without signal.

    Args: as of the part `hicra`.

    Source: arXiv 2509.03646.
    """
    return chain(
        weighted_sum(weights),
        subtract_group_mean(),
        tokens.to_tokens(),
        tokens.hicra(alpha, field, grams),
        name="hicra",
    )


def darling(
    field: str | None = None, floor: Scheduled = 0.1, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, times the share of other samples in another class, less the group mean.

    Use it when right answers grow alike: it pays the rare ones more.

    Args: as of the part `darling`; without `field`, equal completions are one class.

    Source: arXiv 2509.02534, without a division by the standard deviation.
    """
    return chain(
        weighted_sum(weights),
        diversity.darling(field, floor),
        subtract_group_mean(),
        name="darling",
    )


def tree_grpo(
    eps: Scheduled = 1e-6, ddof: int = 1, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, normalised within the tree plus normalised within the prompt.

    Use it when samples are leaves of trees with shared beginnings, and one value per leaf is
    enough.

    Needs the field `tree`, the ids of the trees [P, G].

    Args:
      eps, ddof: as of the part `tree_normalise`.

    Source: arXiv 2509.21240.
    """
    return chain(weighted_sum(weights), trees.tree_normalise(eps, ddof), name="tree_grpo")


def tree_rl(leaf_power: float = 0.5, weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then per token: its node against the prompt plus its node against the parent.

    Use it when samples are leaves of a tree and each branch should earn its own credit.

    Needs the fields `ancestors` [P, G, D] and `token_depth` [P, G, T].

    Args:
      leaf_power: as of the part `tree_process`.

    Source: TreeRL, arXiv 2506.11902.
    """
    return chain(weighted_sum(weights), trees.tree_process(leaf_power=leaf_power), name="tree_rl")


def tree_po(weighting: str = "average", weights: Weights | None = None) -> AdvantageTransform:
    """Sum, less the means of the subgroups of leaves below each node of the path, then whiten.

    Use it when a tree branches at segments, and each subtree should judge its own leaves.

    Needs the field `ancestors` [P, G, D]. Whitened over the tokens of the batch, as in the paper;
    groups that are 0 throughout stay so, which the paper does not say.

    Args:
      weighting: as of the part `tree_subgroup`.

    Source: TreePO, arXiv 2508.17445.
    """
    return chain(
        weighted_sum(weights),
        trees.tree_subgroup(weighting),
        to_tokens(),
        whiten_batch(keep="zero_groups"),
        name="tree_po",
    )
