"""Weights in fp8 with a scale for each block, as DeepSeek-V3 is published: read as bfloat16.

Beside a tensor NAME of [outputs, inputs] in float8_e4m3 there is NAME_scale_inv, the float32 number
that each block of it, of 128 outputs and 128 inputs, is multiplied by.

Source: DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxgrpo.core.errors import InputError

SCALES = "_scale_inv"
BLOCK = 128
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
"""quantization_config of such weights."""
STORED, STORED_SCALES = "F8_E4M3", "F32"
"""The dtypes of both in safetensors."""


class Tensor:
    """A tensor stored so, read in slices as safetensors reads others."""

    def __init__(self, path: Path, begin: int, shape: list[int], scales: Any):
        """Args: begin: where its bytes do in the file."""
        self._path, self._begin, self._shape, self._scales = path, begin, shape, scales

    def get_slice(self, name: str) -> Tensor:
        del name
        return self

    def get_tensor(self, name: str) -> np.ndarray:
        del name
        return self[slice(None), slice(None)]

    def get_dtype(self) -> str:
        return "BF16"

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, where: slice | tuple[slice, slice]) -> np.ndarray:
        """Args: where: rows, and columns or all of them."""
        pair = where if isinstance(where, tuple) else (where, slice(None))
        spans = [range(*part.indices(size)) for part, size in zip(pair, self._shape, strict=True)]
        blocks = [np.arange(span.start, span.stop) // BLOCK for span in spans]
        first = [int(block[0]) if block.size else 0 for block in blocks]
        block_slices = (
            slice(at, int(block[-1]) + 1) for at, block in zip(first, blocks, strict=True)
        )
        scales = self._scales[tuple(block_slices)]
        rows, columns = (block - at for block, at in zip(blocks, first, strict=True))
        # safetensors gives no slice of fp8: its bytes are mapped from the file. Only while they are
        # read: there are 45,000 such tensors in DeepSeek-V3, and each map takes a descriptor.
        shape, kind = (*self._shape,), ml_dtypes.float8_e4m3fn
        stored: Any = np.memmap(self._path, kind, "r", self._begin, shape)
        values = stored[pair].astype(np.float32) * scales[np.ix_(rows, columns)]
        return values.astype(ml_dtypes.bfloat16)


def unpacked(files: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The files of an opened folder by the names of whole tensors.

    Args:
      paths: of the file that has each tensor.

    Raises: InputError where a tensor and its scales are not such as these.
    """
    names = {name for name in files if name + SCALES in files}
    plain = {name: file for name, file in files.items() if name.removesuffix(SCALES) not in names}
    begins = {path: _begins(path) for path in {paths[name] for name in names}}
    for name in sorted(names):
        stored, scales = (files[part].get_slice(part) for part in (name, name + SCALES))
        parts = [f"{part.get_dtype()} {part.get_shape()}" for part in (stored, scales)]
        shape = stored.get_shape()
        blocks = [-(-size // BLOCK) for size in shape]
        if len(shape) != 2 or parts != [f"{STORED} {shape}", f"{STORED_SCALES} {blocks}"]:
            raise InputError(
                f"{paths[name]}: {name} is stored with scales, {' and '.join(parts)}: expected "
                f"{STORED} [outputs, inputs] and {STORED_SCALES}, a scale for each block of "
                f"{BLOCK} x {BLOCK}; convert the model to bfloat16"
            )
        plain[name] = Tensor(paths[name], begins[paths[name]][name], shape, scales)
    return plain


def _begins(path: Path) -> dict[str, int]:
    """Where in a file the bytes of each tensor begin."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}
