"""What a sampler records of each token that it draws, so that updates can take it again.

A record is a field [P, G, T, ...] of rollouts. In it stand numbers from 0 on, and NONE where
nothing was recorded: at tokens that were not drawn, and in entries that a token does not need.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

EXPERTS = "experts"
"""The field [P, G, T, layers, k]: the experts of what each token was drawn from."""
SUPPORT = "sample_support"
"""The field [P, G, T, K]: the ids of the tokens that each was drawn among, the likeliest first."""

DTYPES: Mapping[str, Any] = MappingProxyType({EXPERTS: np.int16, SUPPORT: np.int32})
"""Record -> its dtype."""
NONE = -1

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""(record, its sizes behind [P, G, T]) of each record"""


def no_record(name: str, *shape: int) -> np.ndarray:
    """A record [*shape] without any entry."""
    return np.full(shape, NONE, DTYPES[name])


def token_bytes(shapes: Shapes) -> int:
    """Bytes of the records of a token."""
    return sum(math.prod(shape) * np.dtype(DTYPES[name]).itemsize for name, shape in shapes)


def without(fields: Mapping[str, Any], taken_again: Collection[str]) -> dict[str, Any]:
    """The fields of rollouts without records, but for those that are taken again."""
    return {n: value for n, value in fields.items() if n not in DTYPES or n in taken_again}


def emptied(fields: Mapping[str, Any], samples: np.ndarray) -> dict[str, Any]:
    """The fields of rollouts, on the host, without the records of some samples [P, G] bool."""
    emptied_fields = dict(fields)
    for name in DTYPES & fields.keys():
        record = np.array(fields[name])
        record[samples] = NONE
        emptied_fields[name] = record
    return emptied_fields


def lengthened(fields: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The records among fields, on the host, with room for `steps` tokens of each sample."""
    records = {name: fields[name] for name in sorted(DTYPES & fields.keys())}
    for name, record in records.items():
        widths = [(0, 0)] * record.ndim
        widths[2] = 0, steps - record.shape[2]
        records[name] = np.pad(record.astype(DTYPES[name]), widths, constant_values=NONE)
    return records


def in_rows(fields: Mapping[str, Array], source: Array) -> dict[str, Array]:
    """The records among fields at places [K, D, R, Q] of their tokens; NONE where `source`, which
    says where each token is among all of them, is negative."""
    moved = {}
    for name in sorted(DTYPES & fields.keys()):
        record = fields[name]
        rows = record.reshape(-1, *record.shape[3:])[source]
        is_token = source.reshape(*source.shape, *[1] * (record.ndim - 3)) >= 0
        moved[name] = jnp.where(is_token, rows, NONE).astype(DTYPES[name])
    return moved
