"""Moves arrays from one mesh to another over the same devices, in steps that XLA does well.

Asked for both layouts at once, XLA for CPUs and GPUs gathers the whole array on every device first
(JAX 0.10.2: "involuntary full rematerialization").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]


class Refined(NamedTuple):
    """A mesh whose axes, major to minor, are the parts that axes of several meshes are made of."""

    mesh: Mesh
    strides: tuple[int, ...]  # devices from one index of an axis to the next

    def parts(self, sharding: NamedSharding, ndim: int) -> list[Axes]:
        """The axes that divide each dimension of an array, for a layout on one of the meshes."""
        shape = sharding.mesh.shape
        sizes = [*shape.values()]
        begin = {name: math.prod(sizes[i + 1 :]) for i, name in enumerate(shape)}
        dimension_axes = []
        for split in (*sharding.spec, *[None] * (ndim - len(sharding.spec))):
            names = (split,) if isinstance(split, str) else split or ()
            ends = [(begin[name], begin[name] * shape[name]) for name in names]
            axes = [
                axis
                for low, high in ends
                for axis, stride in zip(self.mesh.axis_names, self.strides, strict=True)
                if low <= stride < high
            ]
            dimension_axes.append((*axes,))
        return dimension_axes


def refined(meshes: Sequence[Mesh]) -> Refined | None:
    """The common parts of meshes of the same devices in the same order; None if there are none."""
    sizes = [[*mesh.shape.values()] for mesh in meshes]
    ends = {math.prod(axis_sizes[i:]) for axis_sizes in sizes for i in range(len(axis_sizes) + 1)}
    chain = sorted(ends, reverse=True)
    pairs = [*itertools.pairwise(chain)]
    if any(high % low for high, low in pairs):
        return None
    shape = tuple(high // low for high, low in pairs)
    names = tuple(f"part_{i}" for i in range(len(shape)))
    devices = np.asarray(meshes[0].devices).reshape(shape)
    common = Mesh(devices, names, axis_types=meshes[0].axis_types[:1] * len(shape))
    return Refined(common, tuple(low for _, low in pairs))


def moved(value: Array, source: NamedSharding, target: NamedSharding) -> Array:
    """The same values in another layout; to be called in a jitted function.

    First what divides a dimension after, and did not before, does so: a slice, or an all-to-all
    where it came from another dimension. What divides none after is gathered behind that.

    Args:
      source, target: layouts on meshes of the same devices in the same order.
    """
    value = jax.lax.with_sharding_constraint(value, source)
    assert isinstance(source.mesh, Mesh)
    assert isinstance(target.mesh, Mesh)
    common = refined([source.mesh, target.mesh])
    if common is not None:
        spec = _between(*(common.parts(sharding, value.ndim) for sharding in (source, target)))
        ways = [math.prod(common.mesh.shape[axis] for axis in axes) for axes in spec]
        if all(size % parts == 0 for size, parts in zip(value.shape, ways, strict=True)):
            layout = NamedSharding(common.mesh, PartitionSpec(*spec))
            value = jax.lax.with_sharding_constraint(value, layout)
    return jax.lax.with_sharding_constraint(value, target)


def _between(source: Sequence[Axes], target: Sequence[Axes]) -> list[Axes]:
    """What divides each dimension before the last step, the gathering."""
    final_axes = {axis for axes in target for axis in axes}
    stays = [
        [axis for axis in axes if axis not in final_axes - {*target_axes}]
        for axes, target_axes in zip(source, target, strict=True)
    ]
    comes = [
        [axis for axis in target_axes if axis not in axes]
        for axes, target_axes in zip(source, target, strict=True)
    ]
    return [(*staying, *coming) for staying, coming in zip(stays, comes, strict=True)]
