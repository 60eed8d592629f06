"""Adapters of single experts, as PEFT wrote them with transformers 4: read as those of all at once.

There each expert's gate_proj, up_proj and down_proj have an A [rank, inputs] and a B
[outputs, rank] of their own. In transformers 5 the experts of a layer are two parameters, and
PEFT's adapter of one has A [experts * rank, inputs] and B [outputs, rank * experts]. That of
gate_up_proj is twice as wide: A is that of gate beside that of up, and B is block-diagonal.

Source: PEFT 0.21, utils/transformers_weight_conversion.py, whose results these are.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxgrpo.core.errors import refusing
from jaxgrpo.models.api import EXPERT_MAPS
from jaxgrpo.models.hf import absent

SINGLE = re.compile(
    r"(?P<place>.*[.]experts)[.](?P<expert>\d+)[.](?P<module>\w+)[.](?P<half>lora_[AB][.]weight)"
)


def are_stored(file: Path) -> bool:
    """Whether an adapter's tensors are those of single experts; no where there is no file."""
    if not file.is_file():
        return False
    problem = f"{file} is no readable safetensors file ({{reason}}): fetch it again"
    with refusing(problem, SafetensorError, OSError):
        absent.refuse_pointers([file])
        with safe_open(file, framework="numpy") as stored:
            return any(SINGLE.fullmatch(name) for name in stored.keys())  # noqa: SIM118


def joined(files: Mapping[str, Any], experts: Mapping[str, str]) -> Mapping[str, Any]:
    """The files of an opened adapter by the names of tensors of all experts.

    Tensors of single experts that are not all there, or of several shapes, stay as they are.

    Args:
      experts: `Family.experts`, our maps and transformers' modules of an expert.
    """
    modules = {name.rpartition(".")[2]: ours for ours, name in experts.items()}
    stacks: dict[tuple[str, str], dict[str, dict[int, str]]] = {}
    for name in files:
        match = SINGLE.fullmatch(name)
        if match and match["module"] in modules:
            by_map = stacks.setdefault((match["place"], match["half"]), {})
            by_map.setdefault(modules[match["module"]], {})[int(match["expert"])] = name
    plain = dict(files)
    for (place, half), by_map in stacks.items():
        for maps in (EXPERT_MAPS[:2], EXPERT_MAPS[2:]):
            numbered = [by_map.get(name, {}) for name in maps]
            count = len(numbered[0])
            if not count or any(sorted(part) != [*range(count)] for part in numbered):
                continue
            names = [[part[i] for i in range(count)] for part in numbered]
            tensor = Tensor(files, names, is_a=half.startswith("lora_A"))
            if not tensor.fits:
                continue
            is_inner = len(maps) > 1 and EXPERT_MAPS[2] in by_map
            for name in itertools.chain(*names):
                del plain[name]
            plain[f"{place}{'.base_layer' * is_inner}.{half}"] = tensor
    return plain


class Tensor:
    """A or B of all experts, read in slices as safetensors reads others."""

    def __init__(self, files: Mapping[str, Any], names: Sequence[Sequence[str]], is_a: bool):
        """Args: names: of the tensors of each map, by expert."""
        self._files, self._names, self._is_a = files, names, is_a
        first = self._slice(names[0][0])
        self._shape, self._dtype = first.get_shape(), first.get_dtype()

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    @property
    def fits(self) -> bool:
        """Whether all have one shape and dtype."""
        slices = map(self._slice, itertools.chain(*self._names))
        return all((s.get_shape(), s.get_dtype()) == (self._shape, self._dtype) for s in slices)

    def get_slice(self, name: str) -> Tensor:
        del name
        return Tensor(self._files, self._names, self._is_a)  # with what it reads, while it is read

    def get_dtype(self) -> str:
        return self._dtype

    def get_shape(self) -> list[int]:
        width, count = len(self._names), len(self._names[0])
        first, last = self._shape
        return (
            [width * count * first, last] if self._is_a else [width * first, width * count * last]
        )

    def __getitem__(self, where: Any) -> np.ndarray:
        return self._full[where]

    @functools.cached_property
    def _full(self) -> np.ndarray:
        stored = np.array([[self._slice(n)[:] for n in names] for names in self._names])
        width, count, first, last = stored.shape
        if self._is_a:
            return stored.swapaxes(0, 1).reshape(self.get_shape())
        # [outputs of a map, rank of a map, expert], 0 where the two maps differ
        full = np.zeros((width, first, width, last, count), stored.dtype)
        for k in range(width):
            full[k, :, k] = np.moveaxis(stored[k], 0, -1)
        return full.reshape(width * first, math.prod((width, last, count)))
