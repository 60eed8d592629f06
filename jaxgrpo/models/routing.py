"""Experts that tokens were routed to: recorded while they are decoded, and taken again in updates.

A router whose scores are close chooses another expert after the least change of rounding, so the
update would train other weights than those that drew a token. With the recorded experts it has its
own gate values and gradients, of the experts that drew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.models.api import ExpertsKind, LayerKind, LayerMemory, highest_scores


def has_experts(kinds: Iterable[LayerKind]) -> bool:
    """Whether tokens pass some of many experts."""
    return any(isinstance(kind.feed, ExpertsKind) for kind in kinds)


def recorded(kinds: Sequence[LayerKind]) -> tuple[int, int] | None:
    """(layers with experts, experts of a token), of what is recorded of a token; None: no layer."""
    feeds = [kind.feed for kind in kinds if isinstance(kind.feed, ExpertsKind)]
    return (len(feeds), feeds[0].top_k) if feeds else None


def with_records(
    kinds: Sequence[LayerKind], memory: tuple[Any, ...], records: Any = None
) -> tuple[Any, ...]:
    """The memory of each layer's mixer, with the experts of the layers that have some beside it.

    Args:
      records: [*B, layers, k], or a tree of such arrays; None: of none.
    """
    number, entries = 0, []
    for kind, entry in zip(kinds, memory, strict=True):
        if isinstance(kind.feed, ExpertsKind):
            record = jax.tree.map(lambda leaf, number=number: leaf[..., number, :], records)
            entry, number = LayerMemory(entry, record), number + 1
        entries.append(entry)
    return tuple(entries)


def without_records(
    kinds: Sequence[LayerKind], memory: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[Any]]:
    """(the memory of each layer's mixer, what `route` made of that of each layer's experts)."""
    mixers, records = [], []
    for kind, entry in zip(kinds, memory, strict=True):
        if isinstance(kind.feed, ExpertsKind):
            entry, record = entry
            records.append(record)
        mixers.append(entry)
    return tuple(mixers), records


def replay(scores: Array, shares: Array, memory: Array, kind: ExpertsKind) -> tuple[Array, Array]:
    """The recorded experts, and the router's own where there is no record.

    Args:
      memory: [*B, k], the record.

    Returns: (experts [*B, k]; bool [*B], whether the router would have chosen others)
    """
    fresh, _ = highest_scores(scores, shares, None, kind)
    experts = jnp.where(memory < 0, fresh, memory.astype(fresh.dtype))
    return experts, (jnp.sort(experts, -1) != jnp.sort(fresh, -1)).any(-1)


def replay_priced(
    scores: Array, shares: Array, memory: tuple[Array, Array], kind: ExpertsKind
) -> tuple[Array, tuple[Array, Array]]:
    """`replay`, and what each token adds to the mean of its layer's auxiliary loss.

        experts * sum_e load_e * share_e

    Args:
      memory: (the record [*B, k]; the layer's loads [*B or 1, experts or more], choices of an
        expert over tokens).

    Returns: (experts; (as `replay` returns it, the terms [*B])).
    """
    record, loads = memory
    experts, rerouted = replay(scores, shares, record, kind)
    return experts, (rerouted, kind.number * (loads[..., : kind.number] * shares).sum(-1))


def tokens_per_expert(kinds: Sequence[LayerKind], experts: Array) -> Array:
    """[layers, experts] floats: how many tokens of a record [..., layers, k] passed each.

    As many columns as the largest layer has experts.
    """
    number = max(kind.feed.number for kind in kinds if isinstance(kind.feed, ExpertsKind))
    layers = jnp.moveaxis(experts, -2, 0).reshape(experts.shape[-2], -1)
    counts = jnp.stack([jnp.bincount(layer + 1, length=number + 1)[1:] for layer in layers])
    return counts.astype(jnp.result_type(float))


def load_metrics(kinds: Sequence[LayerKind], experts: Array) -> Metrics:
    """How evenly the experts were used by the tokens of which there are records.

        routing/load    tokens of the busiest expert of a layer over the mean of its experts;
                        0 in a layer without records
        routing/dead    share of experts that no token passed

    Shapes: experts [P, G, T, layers, k].
    """
    counts = tokens_per_expert(kinds, experts)
    numbers = [kind.feed.number for kind in kinds if isinstance(kind.feed, ExpertsKind)]
    number = jnp.asarray(numbers, counts.dtype)
    even = counts.sum(-1) / number
    busiest = counts.max(-1) / jnp.where(even > 0, even, 1.0)
    is_expert = jnp.arange(counts.shape[-1], dtype=counts.dtype) < number[:, None]
    return {"routing/load": mean(busiest), "routing/dead": mean(counts == 0, is_expert)}
