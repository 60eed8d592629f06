"""Where each tensor of a Hugging Face checkpoint lies in our parameters, both ways.

A family gives the names. The layouts are those of PyTorch's modules: the weight of a linear map is
[outputs, inputs], where our kernel is [*inputs, *outputs], and an embedding is [tokens, hidden] in
both. Some families keep several of our leaves as one tensor, with their outputs one after another.
Experts are stacked in ours; in a checkpoint each has tensors of its own or, as transformers 5 may
save them, those of all experts are one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.models.api import (
    EXPERT_MAPS,
    LAYERS,
    AttentionKind,
    DeltaKind,
    Model,
    ModelConfig,
)
from jaxgrpo.models.layers import turned_dims

LEAVES: Mapping[str, tuple[str, int | None]] = {
    "table": ("weight", None),
    "scale": ("weight", 0),
    "kernel": ("weight", 1),
    "bias": ("bias", 0),
    "sinks": ("sinks", 0),
    "correction": ("e_score_correction_bias", 0),
    "lora_a": ("lora_A.weight", 1),
    "lora_b": ("lora_B.weight", 1),
    "log_rate": ("A_log", 0),
    "taps": ("weight", -1),
}
"""Our leaf of a module -> the name of theirs, and `inputs` of an Entry."""
NAMES = {"delta/bias": "dt_bias"}
"""Leaves that have another name in one module."""
INPUTS = {
    f"{module}/{leaf}": 2
    for module in ("attention/out", "delta/out")
    for leaf in ("kernel", "lora_a")
}
"""Those that have more inputs: heads and the dimensions of a head."""

EXPERT_PARAMETERS = {"gate_up_proj": EXPERT_MAPS[:2], "down_proj": EXPERT_MAPS[2:]}
"""The parameters of transformers 5's module of all experts -> our maps; PEFT adapts each as one."""

TURNED = tuple(f"attention/{name}" for name in ("query", "key", "query_norm", "key_norm"))
TURNED_OF_LATENTS = tuple(f"attention/turned_{name}" for name in ("query", "query_up", "key"))
"""Modules whose outputs are turned by positions, or were; norms of latents are of no heads."""

Box = tuple[tuple[int, int], ...]
"""The part of an array with the indices from the first to before the second, in each dimension."""


@runtime_checkable
class Names(Protocol):
    """What the mapping needs of a family; `families` has them."""

    @property
    def modules(self) -> Mapping[str, str]:
        """Path of our module, within a layer if it is in one -> Hugging Face's name."""
        ...

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Hugging Face's module in a layer -> ours whose outputs lie in it, in this order."""
        ...

    @property
    def by_head(self) -> Sequence[str]:
        """Those of `fused` with the outputs of one key head of a delta net after another's."""
        ...

    @property
    def experts(self) -> Mapping[str, str]:
        """Our map of experts -> Hugging Face's module of one, with {} for its number."""
        ...

    @property
    def fused_experts(self) -> Mapping[str, tuple[str, ...]]:
        """The same of all experts in one tensor -> ours whose outputs lie in it, in this order."""
        ...

    @property
    def interleaves_experts(self) -> bool:
        """Whether experts are always fused, each with its inputs first and outputs in turn."""
        ...

    @property
    def in_pairs(self) -> bool:
        """Whether the two dimensions of a head that turn together stand side by side."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Part of a tensor's name -> what files may have in its place."""
        ...

    @property
    def carried(self) -> Sequence[str]:
        """Beginnings of tensors' names that no model reads."""
        ...


class Entry(NamedTuple):
    """A tensor of a checkpoint, or some of its rows, and the place in a leaf of our parameters.

    `inputs` counts our leading dimensions that are inputs of a linear map: Hugging Face flattens
    inputs and outputs and keeps the outputs first, as rows. None: the same layout. -1: the last
    dimension is a channel's taps, which Hugging Face has behind a dimension of size 1.
    """

    name: str  # Hugging Face's
    index: tuple[int, ...]  # in a leaf that is stacked over periods, experts or both
    shape: tuple[int, ...]  # ours, of this layer and expert
    inputs: int | None
    rows: tuple[int, int]  # of the tensor's first dimension, those that are ours
    hf_shape: tuple[int, ...]  # of the whole tensor
    expert: int | None = None  # of a tensor [experts, rows, columns]; None: it has no experts
    turn: tuple[int, int] = (0, 1)  # of the last dimension's entries: the first, and to the next
    turned: int = 0  # dimensions of each head whose rows stand in pairs, where ours are in halves
    heads: int = 0  # of which each has its rows of all entries side by side; 0: the entries have
    swaps: bool = False  # `shape` has the first two dimensions of ours in the other order

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of the tensor, or of an expert's part of it."""
        return self.hf_shape if self.expert is None else self.hf_shape[1:]

    def stored_rows(self, rows: slice) -> np.ndarray:
        """The rows of the tensor that hold some of these, ours: (0, 2, 4, ...; 1, 3, 5, ...).

        With heads it is the part of each head that lies between those of the other entries, which
        may be turned too.

        >>> Entry("in_proj_ba.weight", (), (2, 6), 1, (6, 12), (12, 2), heads=3).stored_rows(
        ...     slice(6, 12)
        ... )
        array([ 2,  3,  6,  7, 10, 11])
        >>> Entry("q_proj.bias", (), (2, 6), 0, (0, 12), (12,), turned=4).stored_rows(slice(0, 12))
        array([ 0,  2,  1,  3,  4,  5,  6,  8,  7,  9, 10, 11])
        """
        half, row = self.turned // 2, np.arange(rows.start, rows.stop) - self.rows[0]
        place = row % self.shape[-1]
        pair = np.where(place < half, 2 * place, 2 * (place - half) + 1)
        row = row - place + np.where(place < self.turned, pair, place)
        if not self.heads:
            return self.rows[0] + row
        head, place = np.divmod(row, (self.rows[1] - self.rows[0]) // self.heads)
        return (head * self.hf_shape[0] + self.rows[0]) // self.heads + place

    @property
    def groups(self) -> tuple[range, ...]:
        """Our dimensions that are flattened into each dimension of the tensor."""
        dims = range(len(self.shape))
        if self.inputs is None:
            return tuple(dims[k : k + 1] for k in dims)
        if self.inputs < 0:
            return dims[:-1], dims[:0], dims[-1:]
        return (dims[self.inputs :], dims[: self.inputs])[: len(self.matrix)]


def entries(model: Model, family: Names) -> list[list[Entry]]:
    """The tensors of each leaf of the model's parameters, in the order of the leaves.

    Raises: InputError for a parameter that the family has no name for.
    """
    leaves = {
        "/".join(str(key.key) for key in keys): spec.shape
        for keys, spec in jax.tree_util.tree_leaves_with_path(model.shapes)
    }
    return [_leaf_entries(model.config, family, path, leaves) for path in leaves]


def _leaf_entries(
    config: ModelConfig, family: Names, path: str, leaves: Mapping[str, tuple[int, ...]]
) -> list[Entry]:
    parts = path.split("/")
    in_layer, stacked = parts[0] in LAYERS, parts[0] == "blocks"
    start = len("/".join(parts[:2])) + 1 if in_layer else 0
    module, _, leaf = path[start:].rpartition("/")
    has_experts = module in family.experts
    periods, rest = range(config.periods if stacked else 1), config.num_layers - config.num_rest
    begin, width = {"lead": 0, "blocks": len(config.lead), "rest": rest}, len(config.pattern)
    first = int(parts[1]) + begin[parts[0]] if in_layer else 0

    def placed(period: int, entry: Entry) -> Entry:
        name = f"model.layers.{first + period * width}.{entry.name}"
        return entry._replace(name=name, index=(period,) * stacked + entry.index)

    if has_experts and leaf.startswith("lora_"):
        in_layer_leaves = (name for name in leaves if name[:start] == path[:start])
        in_layer_shapes = {name[start:]: leaves[name][stacked:] for name in in_layer_leaves}
        entry = _adapter_of_experts(family, module, leaf, in_layer_shapes)
        return [placed(period, entry) for period in periods]
    leading = stacked + has_experts
    layer_shapes = {name: shape[leading:] for name, shape in leaves.items()}
    fused = config.fused_experts or family.interleaves_experts
    mixers = (config.kinds[first].mixer, *config.attention) if family.in_pairs else ()
    turned = _turned_dims(mixers, config.head_dim, module)
    entry = _tensor(family, path[:start], path[start:], layer_shapes, fused, turned)
    if entry is None:
        raise InputError(f'{path}: family "{config.family}" has no tensor for this parameter')
    if not in_layer:
        return [entry]
    is_part = entry.rows != (0, entry.hf_shape[0])
    if is_part and entry.name.startswith(tuple(f"{module}." for module in family.by_head)):
        deltas = (kind.mixer for kind in config.kinds if isinstance(kind.mixer, DeltaKind))
        in_delta = module.startswith("delta/")
        entry = entry._replace(heads=next(deltas).key_heads if in_delta else config.num_heads)
    if has_experts and family.interleaves_experts:
        entry = _interleaved(family, path[start:], entry, layer_shapes[path])
    number = leaves[path][stacked] if has_experts else 1

    def at(period: int, expert: int) -> Entry:
        name = entry.name if fused else entry.name.replace("{}", str(expert))
        in_fused = {"hf_shape": (number, *entry.hf_shape), "expert": expert}
        changes = in_fused if fused and has_experts else {}
        index = (expert,) * has_experts
        return placed(period, entry._replace(name=name, index=index, **changes))

    return [at(period, expert) for period in periods for expert in range(number)]


def experts_module(family: Names, module: str) -> str:
    """transformers' module of all experts, in a layer.

    Args:
      module: one of EXPERT_MAPS.
    """
    return family.experts[module].partition(".{}")[0]


def _adapter_of_experts(
    family: Names, module: str, leaf: str, shapes: Mapping[str, tuple[int, ...]]
) -> Entry:
    """The entry of an adapter's leaf in a layer: PEFT's of a parameter of all experts.

    Its A is [experts * rank, inputs], its B [outputs, rank * experts]. Of two parameters of a
    module PEFT wraps the first, and then that by the second: the first one's are of its base_layer.

    Args:
      shapes: of the layer's leaves, by their paths in it.
    """
    maps = next(maps for maps in EXPERT_PARAMETERS.values() if module in maps)
    number, first, last = shapes[f"{module}/{leaf}"]
    is_inner = module != EXPERT_MAPS[2] and f"{EXPERT_MAPS[2]}/lora_b" in shapes
    hf_module = experts_module(family, module) + ".base_layer" * is_inner
    name, common = f"{hf_module}.{LEAVES[leaf][0]}", {"index": (), "swaps": True}
    if leaf == "lora_a":
        rows = number * last
        return Entry(
            name,
            shape=(first, number, last),
            inputs=1,
            rows=(0, rows),
            hf_shape=(rows, first),
            **common,
        )
    k, outputs = maps.index(module), len(maps) * last
    return Entry(
        name,
        shape=(first, number, last),
        inputs=2,
        rows=(k * last, (k + 1) * last),
        hf_shape=(outputs, first * number),
        heads=last if family.interleaves_experts and len(maps) > 1 else 0,
        **common,
    )


def _turned_dims(mixers: Iterable[AttentionKind | DeltaKind], head_dim: int, module: str) -> int:
    """The dimensions of a head that positions turn, of the outputs of a module in a layer.

    Args:
      mixers: that of the layer, and those of all others: where it knows no position, any order
        does, and theirs is taken.
    """
    for mixer in mixers:
        if isinstance(mixer, AttentionKind) and mixer.rope is not None:
            turned = TURNED if mixer.latent is None else TURNED_OF_LATENTS
            if module in turned:
                return turned_dims(mixer.rope, mixer.positioned(head_dim))
    return 0


def _interleaved(family: Names, path: str, entry: Entry, shape: tuple[int, ...]) -> Entry:
    """The entry of a map whose outputs take turns with those of the others in its tensor."""
    module, _, leaf = path.rpartition("/")
    name, modules = next(pair for pair in family.fused_experts.items() if module in pair[1])
    matrix = (*shape[:-1], shape[-1] * len(modules))
    return entry._replace(
        name=name if leaf == "kernel" else f"{name}_{leaf}",
        inputs=None,
        rows=(0, matrix[0]),
        hf_shape=matrix,
        turn=(modules.index(module), len(modules)),
    )


def _tensor(
    family: Names,
    prefix: str,
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    fused: bool,
    turned: int,
) -> Entry | None:
    """The entry of the leaf `prefix` + `path`, with its name in a layer; None if it has no name.

    Args:
      shapes: those of one layer, and of one expert, by whole path.
      fused: experts are as in `fused_experts`.
      turned: dimensions of a head that stand in pairs.
    """
    module, _, leaf = path.rpartition("/")
    suffix, inputs = LEAVES.get(leaf, ("", None))
    suffix, inputs = NAMES.get(path, suffix), INPUTS.get(path, inputs)
    all_fused = {**family.fused, **(family.fused_experts if fused else {})}
    fused_module = next((hf for hf, modules in all_fused.items() if module in modules), None)
    hf_module = fused_module or {**family.modules, **family.experts}.get(module)
    if not hf_module or not suffix:
        return None

    def outputs(module: str) -> int:
        shape = shapes[f"{prefix}{module}/{leaf}"]
        rows = shape[:1] if inputs is None else shape[:-1] if inputs < 0 else shape[inputs:]
        return math.prod(rows)

    # Fused maps share one A.
    modules = all_fused[fused_module] if fused_module and leaf != "lora_a" else (module,)
    shape = shapes[prefix + path]
    bounds = [0, *itertools.accumulate(map(outputs, modules))]
    k = modules.index(module)
    columns = shape[1:] if inputs is None else (math.prod(shape[:inputs]),) if inputs else ()
    if inputs == -1:
        columns = (1, shape[-1])
    rows, hf_shape = (bounds[k], bounds[k + 1]), (bounds[-1], *columns)
    name = hf_module if fused_module in family.fused_experts else f"{hf_module}.{suffix}"
    turned = turned if leaf != "lora_a" else 0
    return Entry(name, (), shape, inputs, rows, hf_shape, turned=turned)


def by_tensor(leaves: Iterable[Any], entries_by_leaf: list[list[Entry]]) -> dict[str, list[Any]]:
    """Tensor name -> the leaves that it is made of and their entries, in the order of its rows."""
    parts_by_name: dict[str, list[Any]] = {}
    for leaf, leaf_entries in zip(leaves, entries_by_leaf, strict=True):
        for entry in leaf_entries:
            parts_by_name.setdefault(entry.name, []).append((leaf, entry))
    return {
        name: sorted(parts, key=lambda part: (part[1].expert or 0, part[1].rows, part[1].turn))
        for name, parts in parts_by_name.items()
    }


def pieces(entry: Entry, box: Box, limit: int) -> Iterator[tuple[Box, tuple[slice | int, ...]]]:
    """Divides a part of our parameter into pieces that are each a plain slice of the tensor.

    Args:
      limit: elements of a piece.

    Yields: (the piece, as a part of our parameter; the slice of the tensor that is just it).
    """
    ranges = [_flattened(entry, box, group) for group in entry.groups]
    broken = [group for group, (_, _, plain) in zip(entry.groups, ranges, strict=True) if not plain]
    if broken or math.prod(stop - start for start, stop in box) > limit:
        # Rows are cut first: those of a few are one stretch of the file.
        dims = itertools.chain(*(broken or entry.groups))
        cut = next(k for k in dims if box[k][1] - box[k][0] > 1)
        start, stop = box[cut]
        for half in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
            yield from pieces(entry, (*box[:cut], half, *box[cut + 1 :]), limit)
        return
    (first, last, _), *columns = ranges
    rows = slice(entry.rows[0] + first, entry.rows[0] + last)
    where = [rows, *(slice(start, stop) for start, stop, _ in columns)]
    _, step = entry.turn
    where[-1] = slice(where[-1].start * step, where[-1].stop * step)
    yield box, (*where,) if entry.expert is None else (entry.expert, *where)


def _flattened(entry: Entry, box: Box, group: range) -> tuple[int, int, bool]:
    """(start, stop) of a part in dimensions that are flattened; whether it is all between them."""
    start, last, size = 0, 0, 1
    for k in group:
        start = start * entry.shape[k] + box[k][0]
        last = last * entry.shape[k] + box[k][1] - 1
        size *= box[k][1] - box[k][0]
    return start, last + 1, last + 1 - start == size


def read_slice(entry: Entry, stored: Any, where: tuple[int | slice, ...]) -> np.ndarray:
    """A slice of a tensor, its rows in our order."""
    if not entry.turned and not entry.heads:
        return stored[where]
    rows_of_ours, *columns = where
    assert isinstance(rows_of_ours, slice)  # experts have no heads
    rows = entry.stored_rows(rows_of_ours)
    first, last = int(rows.min()), int(rows.max())
    return stored[(slice(first, last + 1), *columns)][rows - first]


def to_ours(entry: Entry, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A view of a piece of the entry's rows in our layout, of that shape."""
    first, step = entry.turn
    tensor = tensor[..., first::step] if step > 1 else tensor
    turns = entry.inputs is not None and entry.inputs >= 0
    return (tensor.T if turns else tensor).reshape(shape)


def to_hf(entry: Entry, tensor: np.ndarray) -> np.ndarray:
    """Our parameter as the entry's rows of the tensor, contiguous."""
    rows = entry.rows[1] - entry.rows[0]
    if entry.inputs == -1:
        tensor = tensor.reshape(rows, *entry.hf_shape[1:])
    elif entry.inputs is not None:
        tensor = tensor.reshape(*entry.matrix[:0:-1], rows).T
    if entry.turned:
        order = entry.stored_rows(slice(*entry.rows)) - entry.rows[0]
        tensor = tensor[np.argsort(order)]
    return np.ascontiguousarray(tensor)
