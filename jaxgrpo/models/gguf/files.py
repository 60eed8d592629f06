"""A GGUF file: its metadata, and its tensors as numbers.

The package `gguf` (extra `gguf`) reads the format and undoes its quantisations.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrpo.core.errors import InputError, refusing

ENDING = ".gguf"
OTHERWISE = "take the model's Hugging Face folder"
"""What to do about a file of a kind that is not read."""
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""GGUF's name of a type that is stored as it is -> ours."""
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""The types whose numbers are computed from blocks: a scale, perhaps an offset, and small
integers."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor: where its numbers are in the file, and how they are kept."""

    path: Path
    name: str  # in the file
    kind: str  # one of FLOATS or QUANTISED
    shape: tuple[int, ...]  # as in PyTorch: outputs first, as rows
    stored: Any  # gguf's ReaderTensor

    def read(self) -> np.ndarray:
        """Its numbers in float32, [*shape].

        Raises: InputError if one is not finite.
        """
        from gguf import quants

        with warnings.catch_warnings(action="ignore"):  # of overflows, which are refused below
            values = quants.dequantize(self.stored.data, self.stored.tensor_type)
        if not np.isfinite(values).all():
            raise InputError(
                f"{self.path}: the tensor {self.name} holds inf or NaN: the file is damaged; "
                "fetch it again"
            )
        return values.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A GGUF file, or all parts of a file that was split."""

    path: Path
    metadata: Mapping[str, Any]
    """Key -> number, flag, text or a list of one of them"""
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def read(path: str | os.PathLike[str]) -> Gguf:
    """Opens a GGUF file; no tensor is read yet.

    Raises: InputError if it is none, is damaged, or holds a type that is not read.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(
            f"{path}: GGUF is read by a package that is not installed: pip install 'jaxgrpo[gguf]'"
        )
    parts = _parts(Path(path))
    metadata: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for part in parts:
        with refusing(
            f"{part} is no GGUF file that can be read ({{kind}}: {{reason}}): fetch it again"
        ):
            reader = _open(part)
            part_metadata = {key: _value(field) for key, field in reader.fields.items()}
        if reader.byte_order != "I":
            raise InputError(f"{part} is in the byte order of other machines: take another file")
        metadata = {**part_metadata, **metadata}  # what the first part says counts
        tensors |= {stored.name: _tensor(part, stored) for stored in reader.tensors}
    return Gguf(parts[0], metadata, tensors)


def _open(path: Path) -> Any:
    """gguf's reader of a file. Raises: ValueError where the file ends before what it announces.

    The reader itself takes what lies behind the end for nothing: it would make an array of 2^40
    entries out of a flipped bit, one by one (gguf 0.19).
    """
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(
            self,
            offset: int | np.integer,
            dtype: Any,
            count: int | np.integer = 1,
            *order: Any,
            **orders: Any,
        ) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it has {len(self.data)} bytes, and announces {end} or more")
            return super()._get(int(offset), dtype, int(count), *order, **orders)

    return Reader(path)


def _parts(path: Path) -> list[Path]:
    """A file, or all parts of the model that it is a part of."""
    if not path.is_file():
        raise InputError(f"{path} is no file: give a model in a GGUF file")
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], match["count"]
    parts = [
        path.with_name(f"{stem}-{number:05}-of-{count}{ENDING}")
        for number in range(1, int(count) + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise InputError(
            f"{path} is one of {len(parts)} parts of a model, and {', '.join(missing[:8])} "
            "is not beside it: complete the copy"
        )
    return parts


def _value(field: Any) -> Any:
    """What a field says. Numbers in float32 become the shortest ones that are those: 1e-05, not
    9.999999747378752e-06."""
    value = field.contents()
    if isinstance(value, list):
        has_floats = bool(value) and isinstance(value[0], float)
        return [_shortest(number) for number in value] if has_floats else value
    return _shortest(value) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def _tensor(path: Path, stored: Any) -> Tensor:
    kind = stored.tensor_type.name
    if kind not in FLOATS and kind not in QUANTISED:
        raise InputError(
            f"{path}: the tensor {stored.name} is of the type {kind}, which is not read: take a "
            f"file of the types {', '.join((*FLOATS, *QUANTISED))}"
        )
    shape = tuple(reversed(stored.shape.tolist()))
    return Tensor(path, stored.name, kind, shape, stored)
