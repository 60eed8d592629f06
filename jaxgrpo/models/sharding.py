"""The mesh, and the rules that lay parameters and data out on it by logical axis names."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxgrpo.core.errors import InputError, refuse_all
from jaxgrpo.core.types import Params
from jaxgrpo.models.api import Constrain, ExpertsKind, LayerKind

AXES = ("data", "fsdp", "tensor", "context")

AnyMesh = Mesh | AbstractMesh
"""A mesh, or one whose devices are not here."""

Rules = Mapping[str, str | tuple[str, ...] | None]

TRAINING: Rules = {
    # activations
    "bins": ("data", "fsdp"),
    "parts": "data",  # the same dimension, where another one is divided over fsdp
    "rows": None,
    "sequence": "context",
    # parameters
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": None,  # of stacked maps, each of which is divided by "mlp"
    "router": None,
    "latent": None,
    "rank": None,
    "norm": None,
    "taps": None,
    "layers": None,
}
"""Logical axis -> mesh axes. A logical axis without a rule is an error."""

SAMPLING: Rules = {**TRAINING, "embed": None}
"""Decoding reads every weight at every token, so parameters are gathered over fsdp once, before."""


def sampling_rules(mesh: Mesh, kinds: Iterable[LayerKind]) -> Rules:
    """SAMPLING, but on a TPU experts are divided over `tensor`, and not their matrices, where
    parameters are gathered anyway and that divides the number of experts.

    A device reads as many numbers, in matrices of full width. Where it read 768 / 4 columns of
    each, XLA copied the weights of all experts into tiles of 256 columns, in each segment.
    Elsewhere a product has room for all rows at each expert (`experts.grouped`), and with fewer
    experts of full width it would be more work.
    """
    numbers = [kind.feed.number for kind in kinds if isinstance(kind.feed, ExpertsKind)]
    ways, is_tpu = mesh.shape["tensor"], mesh.devices.flat[0].platform == "tpu"
    divides = is_tpu and mesh.shape["fsdp"] > 1 and ways > 1 and bool(numbers)
    divides = divides and not any(number % ways for number in numbers)
    return {**SAMPLING, "experts": "tensor"} if divides else SAMPLING


def make_mesh(
    data: int = 0, fsdp: int = 1, tensor: int = 1, context: int = 1, devices: Any = None
) -> Mesh:
    """A mesh with axes (data, fsdp, tensor, context); `data` = 0 takes the devices left over.

    Where the devices are in several slices of TPUs or hosts of GPUs, each with a network inside
    that is faster than the one between them, `data` goes across them first. Across TPU slices
    nothing else does, across GPU hosts fsdp too; tensor and context stay inside.

    Raises: InputError if the product of the sizes is not the number of devices, or an axis would go
      across slices or hosts that must not.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(data, fsdp, tensor, context, len(devices))
    parts, split = islands(devices), {"allow_split_physical_axes": True}
    if parts.number == 1:
        array = mesh_utils.create_device_mesh(shape, devices=devices, **split)
    else:
        across = _across(parts, len(devices), shape[0], fsdp, tensor * context)
        inside = tuple(size // ways for size, ways in zip(shape, across, strict=True))
        array = mesh_utils.create_hybrid_device_mesh(
            *(inside, across, devices), process_is_granule=parts.attribute == PROCESS, **split
        )
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_shape(
    data: int, fsdp: int, tensor: int, context: int, devices: int
) -> tuple[int, int, int, int]:
    """The sizes of a mesh's axes over so many devices; `data` = 0 takes what the others leave.

    Raises: InputError if their product is another number.
    """
    inner = fsdp * tensor * context
    sizes = (data or max(1, devices // inner), fsdp, tensor, context)
    if math.prod(sizes) != devices:
        factors = " x ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise InputError(
            f"mesh: {factors} = {math.prod(sizes)} devices, but there are {devices}: "
            "choose sizes whose product is the number of devices (data = 0 takes what is left)"
        )
    return sizes


def sampling_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """The mesh to sample on: `tensor` devices share a copy of the weights, `data` takes the rest.

    It has the devices of `mesh` in the same order, so that one program may take arrays of both, and
    those of a copy are next to one another. It is `mesh` itself where that would be laid out alike.

    Args:
      tensor: 0: samples on `mesh`.

    Raises: InputError if that does not divide the devices, or a copy would not be inside one slice
      or host.
    """
    if tensor == 0 or (tensor == mesh.shape["tensor"] and mesh.shape["context"] == 1):
        return mesh
    where = f"mesh.sampling_tensor = {tensor}"
    if mesh.size % tensor:
        raise InputError(f"{where}: must divide the {mesh.size} devices")
    parts = islands([*mesh.devices.flat])
    array = mesh.devices.reshape(-1, 1, tensor, 1)
    for copy in array.reshape(-1, tensor):
        if len({parts.place(device) for device in copy}) > 1:
            raise InputError(
                f"{where}: {tensor} neighbours of the mesh would not be inside one of the "
                f"{parts.number} {parts.noun}: take mesh.tensor x mesh.context, or a divisor of it"
            )
    return Mesh(array, AXES, axis_types=mesh.axis_types)


SLICE, PROCESS = "slice_index", "process_index"


class Islands(NamedTuple):
    """Parts of the devices with a fast network inside: slices of TPUs, hosts of GPUs."""

    attribute: str  # of a device, which tells its part
    number: int
    noun: str

    def place(self, device: Any) -> int:
        return getattr(device, self.attribute) if self.number > 1 else 0


def islands(devices: Sequence[Any]) -> Islands:
    """The parts in which devices are; one of all of them where nothing tells them apart.

    Of GPUs JAX reports slices, those that NVLink connects, or else a process is taken for a host if
    it has several. CPUs are one part.
    """
    platform = devices[0].platform
    if platform not in ("tpu", "gpu"):
        return Islands(PROCESS, 1, "hosts")
    slices = {getattr(device, SLICE, 0) for device in devices}
    processes = {device.process_index for device in devices}
    if len(slices) > 1 or platform == "tpu":
        return Islands(SLICE, len(slices), "slices" if platform == "tpu" else "hosts")
    is_host = len(devices) > len(processes)
    return Islands(PROCESS, len(processes) if is_host else 1, "hosts")


def _across(
    parts: Islands, devices: int, data: int, fsdp: int, inner: int
) -> tuple[int, int, int, int]:
    """How often each axis goes across slices or hosts, whose number is the product.

    Args:
      inner: tensor x context.

    Raises: InputError where `data`, or on GPUs data and fsdp, cannot.
    """
    number, each = parts.number, devices // parts.number
    placement = f"the {devices} devices are in {number} {parts.noun}"
    if devices % number:
        raise InputError(f"mesh: {placement} of different sizes; use devices of whole {parts.noun}")
    if parts.noun == "slices":
        if data % number:
            raise InputError(
                f"mesh.data = {data}: {placement} of {each}, and only data may go across them: "
                f"take a multiple of {number}, with fsdp x tensor x context = {each} or a divisor "
                "of it"
            )
        return number, 1, 1, 1
    data_ways = math.gcd(data, number)
    fsdp_ways = number // data_ways
    if fsdp % fsdp_ways:
        raise InputError(
            f"mesh: data {data} x fsdp {fsdp} x tensor x context {inner}: {placement} of {each}, "
            f"and tensor and context must stay inside one: take tensor x context = {each} or a "
            f"divisor of it, and data or fsdp a multiple of {number}"
        )
    return data_ways, fsdp_ways, 1, 1


def num_bins(mesh: Mesh) -> int:
    """D, the number of shards of the batch: data x fsdp."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def spec(axes: tuple[str | None, ...], rules: Rules = TRAINING) -> PartitionSpec:
    """The partition of an array by the logical names of its dimensions. A mesh axis divides the
    first dimension whose rule names it.

    Raises: InputError for a name without a rule.
    """
    splits: list[Any] = []
    for name in axes:
        if name is not None and name not in rules:
            raise InputError(
                f"sharding: logical axis {name!r} of {axes} has no rule; known: {', '.join(rules)}"
            )
        split = None if name is None else rules[name]
        splits.append(None if split in splits else split)
    return PartitionSpec(*splits)


def named(mesh: Mesh, *axes: str | None, rules: Rules = TRAINING) -> NamedSharding:
    return NamedSharding(mesh, spec(axes, rules))


def replicated(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(
    mesh: AnyMesh,
    axes: Params,
    shapes: Params,
    rules: Rules = TRAINING,
    keys: str = "tensor or fsdp",
) -> Params:
    """A tree of NamedSharding for parameters, from their logical axes.

    Args:
      keys: of the config's mesh, which an error says to make smaller.

    Raises: InputError, with every parameter whose dimension its mesh axes do not divide.
    """
    problems: list[str] = []

    def shard_param(path, names: tuple[str | None, ...], shape) -> NamedSharding:
        partition = spec(names, rules)
        for name, size, split in zip(names, shape.shape, partition, strict=True):
            ways = _ways(mesh, split)
            if size % ways:
                problems.append(
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')}: dimension {name!r} "
                    f"of size {size} is not divisible by {ways} (mesh axes {split})"
                )
        return NamedSharding(mesh, partition)

    tree = jax.tree_util.tree_map_with_path(
        shard_param, axes, shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
    title = f"mesh: the model does not divide over it; use smaller {keys} sizes:"
    refuse_all(title, problems)
    return tree


def check_divides(mesh: Mesh, label: str, size: int, logical: str) -> None:
    """Raises InputError if the mesh does not divide a dimension of the data."""
    fits, split = rounded_up(mesh, size, logical), TRAINING[logical]
    if size != fits:
        raise InputError(
            f"{label} = {size}: must be a multiple of {_ways(mesh, split)}, the size of mesh axes "
            f"{split}; use {fits} or change the mesh"
        )


def rounded_up(mesh: Mesh, size: int, logical: str) -> int:
    """The least size from `size` on that the mesh divides, of a dimension of the data."""
    ways = _ways(mesh, TRAINING[logical])
    return math.ceil(size / ways) * ways


class OnMesh(NamedTuple):
    """What models lay out activations with. A dimension of size 1 stays whole."""

    mesh: Mesh
    rules: Rules

    def __call__(self, value: Array, axes: tuple[str | None, ...]) -> Array:
        layout = NamedSharding(self.mesh, self.partition(value, axes))
        return jax.lax.with_sharding_constraint(value, layout)

    def partition(self, value: Array, axes: tuple[str | None, ...]) -> PartitionSpec:
        names = (None if size == 1 else name for name, size in zip(axes, value.shape, strict=True))
        return in_part(self.mesh, spec((*names,), self.rules), value.shape)

    def spread(
        self,
        function: Callable[..., Array],
        tokens: Sequence[tuple[Array, tuple[str | None, ...]]],
        weights: Sequence[tuple[Array, tuple[str | None, ...]]],
    ) -> Array:
        """`models.api.Spread` over the devices of the mesh."""
        if self.mesh.size == 1:
            return on_one_device(function, tokens, weights)
        values = [value for value, _ in (*tokens, *weights)]
        specs = [self.partition(*pair) for pair in (*tokens, *weights)]
        split = {name: None for part in specs[len(tokens) :] for name in part if name}
        parts = jax.shard_map(
            lambda *values: function(*values)[None],
            mesh=self.mesh,
            in_specs=(*specs,),
            out_specs=PartitionSpec((*split,) or None, *specs[0]),
            check_vma=False,
        )(*values)
        return parts.sum(0)


def on_one_device(
    function: Callable[..., Array],
    tokens: Sequence[tuple[Array, tuple[str | None, ...]]],
    weights: Sequence[tuple[Array, tuple[str | None, ...]]],
) -> Array:
    """`models.api.Spread` where one device has all."""
    return function(*(value for value, _ in (*tokens, *weights)))


def constrain(mesh: Mesh, rules: Rules = TRAINING) -> Constrain:
    """The function that models call on activations."""
    return OnMesh(mesh, rules)


def in_part(mesh: Mesh, partition: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
    """A partition by `spec`, as it is inside `over_data`: dimensions that hold the bins of one part
    of the axis "data" are not divided over it, which `over_data` does."""

    def local_split(split: Any, size: int) -> Any:
        names = _names(split)
        if "data" not in names or size % num_bins(mesh) == 0:
            return split
        return tuple(name for name in names if name != "data") or None

    return PartitionSpec(*map(local_split, partition, shape))


def over_data(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the bins of each part of the axis "data" by itself: results [data, ...].

    So what it sums over bins is not summed over "data", and can be after a loop, once.

    Args:
      function: (shared, by bins [D, ...], shared) -> results; inside it D is fsdp.
    """
    parts = mesh.shape["data"]

    def divided(leaf: Array) -> Array:
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, parts)
        leaf = leaf.reshape(parts, -1, *leaf.shape[1:])
        unconstrained = [PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 2)
        layout = NamedSharding(mesh, PartitionSpec("data", "fsdp", *unconstrained))
        return jax.lax.with_sharding_constraint(leaf, layout)

    each = jax.vmap(function, in_axes=(None, 0, None), spmd_axis_name="data")
    return lambda shared, bins, more_shared: each(shared, jax.tree.map(divided, bins), more_shared)


def layout_per_part(layout: NamedSharding) -> NamedSharding:
    """The layout of an array of `over_data` whose entries [data, ...] are laid out as `layout`."""
    return NamedSharding(layout.mesh, PartitionSpec("data", *layout.spec))


def layout_per_bin(layout: NamedSharding) -> NamedSharding:
    """The layout of an array [D, ...] whose entries are laid out as `layout`, which divides them
    over no axis of the bins."""
    return NamedSharding(layout.mesh, PartitionSpec(TRAINING["bins"], *layout.spec))


def sum_over_bins(parts: Array, layout: NamedSharding) -> Array:
    """The sum of parts [D, ...] of all bins, laid out as `layout` says for what is left.

    Devices that divide a dimension of it among them add up only what each keeps, a reduce-scatter;
    left to XLA they may add up all of it, an all-reduce of twice the bytes, and drop the rest. So
    does XLA for TPUs where a dimension behind the first is divided: then the first is, and what is
    left of it is exchanged for parts of the other.
    """
    mesh = layout.mesh
    assert isinstance(mesh, Mesh)

    @jax.custom_batching.custom_vmap
    def total(parts: Array) -> Array:
        # Inside `over_data` it is traced for its shape, and not computed.
        inside = len(parts) % num_bins(mesh) > 0
        return parts.sum(0) if inside else _summed(parts, layout, each_part=False)

    @total.def_vmap
    def _(size: int, batched: list[bool], parts: Array) -> tuple[Array, bool]:  # by `over_data`
        return _summed(parts.reshape(-1, *parts.shape[2:]), layout, each_part=True), True

    return total(parts)


def _summed(parts: Array, layout: NamedSharding, each_part: bool) -> Array:
    """`sum_over_bins` of all bins, or [data, ...] of those of each part of the axis "data"."""
    mesh, axes = layout.mesh, [*layout.spec, *[None] * (parts.ndim - 1 - len(layout.spec))]
    bins = _names(TRAINING["bins"])
    over = [axis for axis in bins if not (each_part and axis == "data")]
    divided = {axis: axes.index(axis) for axis in over if axis in axes}

    def sum_bins(part: Array) -> Array:
        total = part.sum(0)
        for axis, dimension in divided.items():
            rows, unpadded = total.shape[0], [(0, 0)] * (total.ndim - 1)
            short = -rows % mesh.shape[axis] if dimension else 0
            filled = jnp.pad(total, [(0, short), *unpadded])
            total = jax.lax.psum_scatter(filled, axis, tiled=True)
            if dimension:
                total = jax.lax.all_to_all(total, axis, dimension, 0, tiled=True)[:rows]
        remaining = tuple(axis for axis in over if axis not in divided)
        total = jax.lax.psum(total, remaining) if remaining else total
        return total[None] if each_part else total

    input_axes = (None if axis in divided else axis for axis in axes)
    in_spec = PartitionSpec(bins, *input_axes)
    out_spec = layout_per_part(layout).spec if each_part else PartitionSpec(*axes)
    return jax.shard_map(sum_bins, mesh=mesh, in_specs=in_spec, out_specs=out_spec)(parts)


def highest(values: Array, most: int, shards: int = 1) -> tuple[Array, Array]:
    """`jax.lax.top_k` of [*B, V]: of each shard, and then of what these have. By itself it would
    collect the values. Of equal values those of lower places come first.

    Args:
      shards: devices that the last dimension is divided over.
    """
    if shards == 1:
        best, ids = jax.lax.top_k(values, most)
        return best, ids
    *rows, number = values.shape
    size = -(-number // shards)
    behind = [(0, 0)] * len(rows) + [(0, size * shards - number)]
    divided = jnp.pad(values, behind, constant_values=-jnp.inf).reshape(*rows, shards, size)
    best, ids = jax.lax.top_k(divided, min(most, size))
    first = size * jnp.arange(shards, dtype=ids.dtype)
    ids += jnp.broadcast_to(first[:, None], ids.shape)
    best, place = jax.lax.top_k(best.reshape(*rows, -1), most)
    return best, jnp.take_along_axis(ids.reshape(*rows, -1), place, -1)


def put(value: Any, sharding: Sharding) -> Array:
    """A host array, the same in every process, as a global array on the mesh."""
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def to_host(tree: Any) -> Any:
    """Every leaf whole, as NumPy, in every process."""

    def fetch(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            if leaf.is_fully_replicated:
                return np.asarray(leaf.addressable_data(0))
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


def _ways(mesh: AnyMesh, split: str | tuple[str, ...] | None) -> int:
    return math.prod(mesh.shape[name] for name in _names(split))


def _names(split: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of a mesh that divide a dimension."""
    return (split,) if isinstance(split, str) else split or ()


def give_back(mesh: Mesh) -> None:
    """Gives freed memory of CPU devices back to the system, where C's allocator is glibc's.

    It keeps what was smaller than 32 MiB: each layer's weights, once the sampler has read them, the
    parts in which a state is saved, and what compiling took. What comes next would have to find its
    own beside that.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
