"""Experts that tokens were routed to: recorded while they are decoded, and taken again in updates.

A router whose scores are close chooses another expert after the least change of rounding, so the
update would train other weights than those that drew a token. With the recorded experts it has its
own gate values and gradients, of the experts that drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.models.api import ExpertsKind, LayerKind, LayerMemory, highest_scores


def recorded(kinds: Sequence[LayerKind]) -> tuple[int, int] | None:
    """(layers with experts, experts of a token), of what is recorded of a token; None: no layer."""
    feeds = [kind.feed for kind in kinds if isinstance(kind.feed, ExpertsKind)]
    return (len(feeds), feeds[0].top_k) if feeds else None


def with_records(
    kinds: Sequence[LayerKind], memory: tuple[Any, ...], records: Array | None = None
) -> tuple[Any, ...]:
    """The memory of each layer's mixer, with the experts of the layers that have some beside it.

    Args:
      records: [*B, layers, k]; None: of none.
    """
    number, entries = 0, []
    for kind, entry in zip(kinds, memory, strict=True):
        if isinstance(kind.feed, ExpertsKind):
            record = None if records is None else records[..., number, :]
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


def replay(scores: Array, memory: Array, kind: ExpertsKind) -> tuple[Array, Array]:
    """The recorded experts, and the router's own where there is no record.

    Args:
      memory: [*B, k], the record.

    Returns: (experts [*B, k]; bool [*B], whether the router would have chosen others)
    """
    fresh, _ = highest_scores(scores, None, kind)
    experts = jnp.where(memory < 0, fresh, memory.astype(fresh.dtype))
    return experts, (jnp.sort(experts, -1) != jnp.sort(fresh, -1)).any(-1)


def load_metrics(kinds: Sequence[LayerKind], experts: Array) -> Metrics:
    """How evenly the experts were used by the tokens of which there are records.

        routing/load    tokens of the busiest expert of a layer over the mean of its experts
        routing/dead    share of experts that no token passed

    Shapes: experts [P, G, T, layers, k].
    """
    number = max(kind.feed.number for kind in kinds if isinstance(kind.feed, ExpertsKind))
    layers = jnp.moveaxis(experts, -2, 0).reshape(experts.shape[-2], -1)
    counts = jnp.stack([jnp.bincount(layer + 1, length=number + 1)[1:] for layer in layers])
    counts = counts.astype(jnp.float32)
    busiest = counts.max(-1) / jnp.maximum(counts.mean(-1), 1.0)
    return {"routing/load": mean(busiest), "routing/dead": mean(counts == 0)}
