"""Filters of convolutions as transformers 5 saves those of OLMo hybrid: read as they were meant.

It joins the filters of queries, keys and values of a layer into one tensor when it loads a model,
and cuts that into three equal parts when it saves it. Where values are wider than keys, as in the
published models, the parts are not those of queries, keys and values. It joins them again and reads
the same model. What a part should be is said by the projection beside it, which has as many rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LETTERS = "qkv"
FILTERS, PROJECTION = "linear_attn.{}_conv1d.weight", "linear_attn.{}_proj.weight"


class Tensor:
    """Some rows of tensors that are one behind another, read in slices as safetensors reads."""

    def __init__(self, parts: Sequence[Any], rows: slice):
        self._parts, self._rows = parts, rows

    def get_slice(self, name: str) -> Tensor:
        del name
        return self

    def get_tensor(self, name: str) -> np.ndarray:
        del name
        return np.concatenate([part[:] for part in self._parts])[self._rows]

    def get_dtype(self) -> str:
        return self._parts[0].get_dtype()

    def get_shape(self) -> list[int]:
        return [self._rows.stop - self._rows.start, *self._parts[0].get_shape()[1:]]

    def __getitem__(self, where: Any) -> np.ndarray:
        return self.get_tensor("")[where]


def joined(files: Mapping[str, Any]) -> dict[str, Any]:
    """The files of an opened folder by the names of tensors; of filters that were cut so, those
    that belong to the projections."""
    first = FILTERS.format(LETTERS[0])
    recut: dict[str, Any] = {}
    for layer in (name.removesuffix(first) for name in files if name.endswith(first)):
        names = [layer + FILTERS.format(letter) for letter in LETTERS]
        projections = [layer + PROJECTION.format(letter) for letter in LETTERS]
        if not all(name in files for name in (*names, *projections)):
            continue
        stored = [files[name].get_slice(name) for name in (*names, *projections)]
        parts, shapes = stored[:3], [tensor.get_shape() for tensor in stored]
        if not all(shapes) or len({tuple(shape[1:]) for shape in shapes[:3]}) > 1:
            continue
        row_counts = [shape[0] for shape in shapes[3:]]
        part_counts = [shape[0] for shape in shapes[:3]]
        if part_counts == row_counts or sum(part_counts) != sum(row_counts):
            continue
        ends = np.cumsum(row_counts).tolist()
        for name, end, size in zip(names, ends, row_counts, strict=True):
            recut[name] = Tensor(parts, slice(end - size, end))
    return {**files, **recut}
