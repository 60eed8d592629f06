"""Meshes over several slices and hosts, and what moving weights from mesh to mesh costs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from moved import moved_entries
from planned import NEEDS_CUDA

from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.models.resharding import moved, refined

pytestmark = pytest.mark.slow

H100 = Path(__file__).parents[1] / "support" / "h100.txtpb"


def chips(name: str, slices: int = 1):
    more = {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices


def gpus(topology: str):
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h100", target_config=H100.read_text(), topology=topology
    ).devices


def places(devices, axis: int, of: str) -> set[int]:
    """In how many slices or hosts the devices along an axis are, over all of them."""
    lines = devices.swapaxes(axis, -1).reshape(-1, devices.shape[axis])
    return {len({getattr(device, of) for device in line}) for line in lines}


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 16}, {"fsdp": 4, "tensor": 4}, {"data": 4, "fsdp": 2, "tensor": 2, "context": 2}],
    ids=str,
)
def test_only_data_goes_across_slices(sizes):
    mesh = sharding.make_mesh(**sizes, devices=chips("v5e:4x4", 2))
    assert places(mesh.devices, 0, "slice_index") == {2}
    for axis in (1, 2, 3):
        assert places(mesh.devices, axis, "slice_index") == {1}
    first = mesh.devices[: mesh.shape["data"] // 2]
    assert len({device.slice_index for device in first.flat}) == 1  # slices are outermost


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_copy_of_the_weights_to_sample_is_on_neighbours_of_one_slice(slices, tensor):
    devices = chips("v5e:4x4", slices)
    mesh = sharding.make_mesh(fsdp=16, devices=devices)
    sampling = sharding.sampling_mesh(mesh, tensor)
    assert [*sampling.devices.flat] == [*mesh.devices.flat]
    assert dict(sampling.shape) == {
        "data": 16 * slices // tensor,
        "fsdp": 1,
        "tensor": tensor,
        "context": 1,
    }
    if slices > 1:
        assert places(sampling.devices, 2, "slice_index") == {1}
    for copy in sampling.devices.reshape(-1, tensor):
        coordinates = np.array([device.coords for device in copy])
        assert set(np.abs(np.diff(coordinates, axis=0)).sum(1)) == {
            1
        }  # each has a link to the next


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 32}, r"mesh.data = 1: the 32 devices are in 2 slices of 16, and only data may"),
        ({"tensor": 32}, r"take a multiple of 2, with fsdp x tensor x context = 16 or a divisor"),
    ],
)
def test_an_axis_that_would_go_across_slices_is_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        sharding.make_mesh(**sizes, devices=chips("v5e:4x4", 2))


def test_a_copy_in_two_slices_is_refused():
    mesh = sharding.make_mesh(fsdp=16, devices=chips("v5e:4x4", 2))
    with pytest.raises(InputError, match=r"sampling_tensor = 32: 32 neighbours .* of the 2 slices"):
        sharding.sampling_mesh(mesh, 32)


@NEEDS_CUDA
@pytest.mark.parametrize("topology", ["1x4x8", "4x1x8"])
def test_fsdp_goes_across_hosts_of_gpus_and_tensor_stays_inside(topology):
    devices = gpus(topology)
    for sizes in ({"fsdp": 32}, {"data": 2, "fsdp": 4, "tensor": 4}, {"data": 4, "tensor": 8}):
        mesh = sharding.make_mesh(**sizes, devices=devices)
        for axis in (2, 3):
            assert places(mesh.devices, axis, "process_index") == {1}
        copies = sharding.sampling_mesh(mesh, 8)
        assert places(copies.devices, 2, "process_index") == {1}
    assert places(mesh.devices, 0, "process_index") == {4}
    with pytest.raises(InputError, match="tensor and context must stay inside one"):
        sharding.make_mesh(data=2, tensor=16, devices=devices)
    with pytest.raises(InputError, match=r"of the 4 hosts: take mesh\.tensor"):
        sharding.sampling_mesh(mesh, 16)


AXES = {"up": (None, "embed", "mlp"), "down": (None, "mlp", "embed"), "table": ("vocab", "embed")}
SHAPES = {"up": (4, 1024, 3072), "down": (4, 3072, 1024), "table": (8192, 1024)}
EXCHANGED = re.compile(
    r"= \(?(\w+)\[([\d,]*)\].*? (all-gather|all-to-all|collective-permute|all-reduce)(-start)?\("
)


@pytest.mark.parametrize("is_cast", [True, False])
@pytest.mark.parametrize(
    ("sizes", "tensor", "most"),
    [
        ({"fsdp": 8}, 4, 1.0),
        ({"fsdp": 8}, 2, 1.0),
        ({"data": 2, "fsdp": 4}, 2, 1.0),
        ({"fsdp": 4, "context": 2}, 2, 1.0),
        ({"fsdp": 4, "tensor": 2}, 4, 1.5),
    ],
    ids=str,
)
@pytest.mark.full
def test_a_compiled_move_brings_the_bytes_that_are_counted(sizes, tensor, most, is_cast):
    """Of a TPU: what its collectives bring to a device, in bfloat16, and no whole array."""
    mesh = sharding.make_mesh(**sizes, devices=chips("v5e:2x4"))
    to = sharding.sampling_mesh(mesh, tensor)
    for name, axes in AXES.items():
        source = sharding.named(mesh, *axes)
        target = sharding.named(to, *axes, rules=sharding.SAMPLING)
        shape, source_dtype = SHAPES[name], jnp.float32 if is_cast else jnp.bfloat16
        argument = jax.ShapeDtypeStruct(shape, source_dtype, sharding=source)

        def move(value, source=source, target=target):
            return moved(value.astype(jnp.bfloat16), source, target)

        lowered = jax.jit(move).trace(argument).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
        assert compiled.output_shardings.is_equivalent_to(target, len(shape))
        text, planned = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert planned is not None
        came = sum(received(line) for line in text.splitlines())
        least = 2 * max(moved_entries(shape, source, target).values())
        assert least <= came <= most * least
        part_bytes = 2 * math.prod(target.shard_shape(shape))
        assert planned.temp_size_in_bytes <= 2 * part_bytes


def received(line: str) -> int:
    """Bytes that a collective brings to a device from others."""
    match = EXCHANGED.search(line)
    if not match:
        return 0
    dtype, shape, kind, _ = match.groups()
    assert dtype == "bf16"
    size = 2 * math.prod(map(int, shape.split(",")))
    if kind == "collective-permute":
        return size
    assert kind in ("all-gather", "all-to-all")
    ways = group_size(line)
    return size * (ways - 1) // ways


def group_size(line: str) -> int:
    """Devices that take part in one group of a collective."""
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", match[2]))
    match = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    assert match, line
    return match[1].count(",") + 1


def test_meshes_without_common_parts_are_told():
    devices = chips("v5e:2x4")
    mesh = sharding.make_mesh(data=4, tensor=2, devices=devices)
    common = refined([mesh, sharding.sampling_mesh(mesh, 4)])
    assert common is not None
    assert common.strides == (4, 2, 1)
    six = sharding.make_mesh(fsdp=3, tensor=2, devices=devices[:6])
    assert refined([six, sharding.sampling_mesh(six, 3)]) is None


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("vocab", "embed"), (10, 12)),
        (("norm", "embed"), (5, 8)),
        (("embed", "norm"), (8, 3)),
        (("norm", "vocab"), (8, 12)),
    ],
)
def test_gradients_of_bins_are_added_up_where_they_are_kept(sizes, axes, shape):
    mesh = sharding.make_mesh(**sizes)
    layout = sharding.named(mesh, *axes)
    parts = np.random.default_rng(0).normal(size=(2 * sharding.num_bins(mesh), *shape))
    program = jax.jit(lambda parts: sharding.sum_over_bins(parts, layout))
    total = program(jnp.asarray(parts, jnp.float32))
    assert total.sharding.is_equivalent_to(layout, 2)
    np.testing.assert_allclose(total, parts.sum(0), rtol=1e-5, atol=1e-6)
    text = str(program.lower(parts).compile().as_text())
    assert ("reduce-scatter(" in text) == ("embed" in axes)
