"""The tensors of a GGUF file under Hugging Face's names and in its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.models.api import Model
from jaxgrpo.models.gguf.configs import ROPE_FACTORS, find_architecture
from jaxgrpo.models.gguf.files import FLOATS, Gguf, Tensor
from jaxgrpo.models.hf import families, mapping, weights

DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


class Source(NamedTuple):
    """Where a tensor of the Hugging Face folder comes from."""

    tensor: Tensor
    heads: int  # whose rows are stored pair by pair; 0: rows are stored in order
    offset: float  # that is stored on top of each number

    def read(self, dtype: str) -> np.ndarray:
        """Its numbers, in Hugging Face's layout."""
        values = self.tensor.read()
        if self.heads:
            values = _in_halves(values, self.heads)
        if self.offset:
            values = values - np.float32(self.offset)
        return np.ascontiguousarray(values.astype(DTYPES[dtype]))


def find_sources(gguf: Gguf, model: Model) -> dict[str, Source]:
    """Hugging Face's name of each tensor of a model -> where it comes from.

    Raises: InputError naming tensors that are missing, unknown or of another shape.
    """
    config, architecture = model.config, find_architecture(gguf)
    family = families.find_family(config.family)
    shapes = {
        entry.name: entry.hf_shape
        for leaf_entries in mapping.entries(model, family)
        for entry in leaf_entries
    }
    names = {name: _stored_name(gguf, config.num_layers, name) for name in shapes}
    _refuse_unmatched(gguf, set(names.values()))
    sources: dict[str, Source] = {}
    for name, stored in names.items():
        tensor = gguf.tensors[stored]
        if tensor.shape != shapes[name]:
            raise InputError(
                f"{gguf.path}: the tensor {stored} has shape {tensor.shape}, but the file's own "
                f"sizes ask for {shapes[name]}: it is damaged, or of a model that is not built"
            )
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        module = name.split(".")[-2]
        turned = heads.get(module, 0) if architecture.turned else 0
        is_norm = module.endswith("norm")
        sources[name] = Source(tensor, turned, architecture.norm_offset if is_norm else 0.0)
    return sources


def _stored_name(gguf: Gguf, layers: int, name: str) -> str:
    """GGUF's name of one of Hugging Face's tensors, by the tables of its package."""
    import gguf as package

    (number,) = (key for key, text in package.MODEL_ARCH_NAMES.items() if text == gguf.architecture)
    table = package.get_tensor_name_map(number, layers)
    stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if stored is None:
        raise InputError(f"{gguf.path}: GGUF has no name for {name} of this architecture")
    return stored


def _refuse_unmatched(gguf: Gguf, expected: set[str]) -> None:
    stored = gguf.tensors.keys() - {ROPE_FACTORS}
    odd = {"missing": expected - stored, "unknown": stored - expected}
    problems = [f"{kind}: {weights.listed(names)}" for kind, names in odd.items() if names]
    if problems:
        raise InputError(
            f"{gguf.path}: the tensors are not those of a {gguf.architecture} of its sizes; "
            + "; ".join(problems)
        )


def _in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads, from pairs (0, 1), (2, 3), ... to the halves that Hugging Face turns together.

    llama.cpp turns neighbours of a head, Hugging Face dimension k and k + half of it, so that the
    file holds rows 0, half, 1, half + 1, ...

    >>> _in_halves(np.array([[0], [2], [1], [3]]), 1).ravel()
    array([0, 1, 2, 3])
    """
    columns = values.shape[1:]
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *columns)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def choose_dtype(sources: Mapping[str, Source]) -> str:
    """In which the numbers are written: that of the matrices, if all have the same one and it holds
    each number of the vectors, which files keep in float32; otherwise float32."""
    kinds = {source.tensor.kind for source in sources.values() if len(source.tensor.shape) > 1}
    dtype = FLOATS.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
    vectors = [source for source in sources.values() if len(source.tensor.shape) == 1]
    return dtype if all(_holds(dtype, vector) for vector in vectors) else "float32"


def _holds(dtype: str, vector: Source) -> bool:
    """Whether a vector's numbers are those of a dtype, but for what adding the offset lost."""
    lost = np.float32(np.finfo(np.float32).eps if vector.offset else 0)
    difference = vector.read(dtype).astype(np.float32) - vector.read("float32")
    return bool(np.abs(difference).max() <= lost)
