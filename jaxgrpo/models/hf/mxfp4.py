"""Weights of experts in MXFP4, as GPT-OSS is published: read as bfloat16, which holds them exactly.

A tensor NAME of [experts, inputs, outputs] is stored as NAME_blocks [experts, outputs, groups, 16],
two numbers of 4 bits in each byte, the lower bits first, and NAME_scales [experts, outputs,
groups], powers of two above 2^-127 for each 32 inputs.

Source: OCP Microscaling Formats (MX) 1.0, section 5.3, which calls the numbers E2M1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxgrpo.core.errors import InputError

BLOCKS, SCALES = "_blocks", "_scales"
GROUP, BYTES = 32, 16  # inputs that share a scale, and what they take
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
"""The number that each 4 bits stand for."""


class Tensor:
    """A tensor stored so, read in slices as safetensors reads others."""

    def __init__(self, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales

    def get_slice(self, name: str) -> Tensor:
        del name
        return self

    def get_dtype(self) -> str:
        return "BF16"

    def get_shape(self) -> list[int]:
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * GROUP, outputs]

    def __getitem__(self, where: slice | tuple[int, slice, slice]) -> np.ndarray:
        """Args: where: an expert, inputs and outputs; or experts, of which all is read."""
        if isinstance(where, slice):
            experts, inputs, outputs = (slice(0, size) for size in self.get_shape())
            numbers = range(*where.indices(experts.stop))
            return np.stack([self[expert, inputs, outputs] for expert in numbers])
        expert, inputs, outputs = where
        first, last = inputs.start // GROUP, -(-inputs.stop // GROUP)
        blocks = self._blocks[expert, outputs, first:last]
        scales = self._scales[expert, outputs, first:last].astype(np.int32) - 127
        numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, GROUP)
        values = np.ldexp(VALUES[numbers], scales[..., None]).reshape(len(scales), -1)
        begin = inputs.start - first * GROUP
        return values[:, begin : begin + inputs.stop - inputs.start].T.astype(ml_dtypes.bfloat16)


def unpacked(files: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The files of an opened folder by the names of whole tensors.

    Raises: InputError where the two parts of a tensor do not fit, or it is there as a whole too.
    """
    names = {name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)}
    names = {name for name in names if name + SCALES in files}
    packed = {name + ending for name in names for ending in (BLOCKS, SCALES)}
    plain = {name: file for name, file in files.items() if name not in packed}

    def stored(name: str) -> Any:
        return files[name].get_slice(name)

    for name in sorted(names):
        blocks, scales = stored(name + BLOCKS), stored(name + SCALES)
        parts = [f"{part.get_dtype()} {part.get_shape()}" for part in (blocks, scales)]
        shape = [*scales.get_shape(), BYTES]
        if name in plain or len(shape) != 4 or parts != [f"U8 {shape}", f"U8 {shape[:3]}"]:
            twice = ", and as a whole" if name in plain else ""
            raise InputError(
                f"{folder}: {name} is stored as blocks and scales, {' and '.join(parts)}{twice}: "
                f"expected U8 [experts, outputs, groups, {BYTES}] and U8 [experts, outputs, "
                "groups] alone; copy the folder again"
            )
        plain[name] = Tensor(blocks, scales)
    return plain
