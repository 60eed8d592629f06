"""Devices that are not here: by name, in slices, refused, and with the memory that they have."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from planned import NEEDS_CUDA

from jaxgrpo.config.keys import MeshKeys, PlanKeys
from jaxgrpo.core.chips import CHIPS, GIB
from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.models.cache import Lines
from jaxgrpo.models.kernels import pallas_decoding
from jaxgrpo.planning import command, plan, preview, topologies
from jaxgrpo.training import memory
from jaxgrpo.training.method import attention_lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chips", "devices"),
    [
        ("v5e:1x1", 1, 1),
        ("v5e:2x2", 4, 4),
        ("v5e:4x4", 16, 16),
        ("v6e:2x4", 8, 8),
        ("v6e:16x16", 256, 256),
        ("v5p:2x2x1", 4, 4),
        ("v5p:4x4x4", 64, 64),
        ("v4:2x2x2", 8, 8),
        ("tpu7x:2x2x1", 4, 8),
    ],
)
def test_a_topology_has_the_chips_that_its_name_says(name, chips, devices):
    topology = topologies.topology(name)
    assert (topology.chips, len(topology.devices)) == (chips, devices)
    assert topology.chip is CHIPS[name.partition(":")[0]]
    assert f"{name}, {chips} chips" in topology.title


@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "v4:2x2x1", "tpu7x:2x2x1"])
def test_the_memory_of_a_mesh_of_absent_devices_is_that_of_its_chip(name):
    topology = topologies.topology(name)
    mesh = sharding.make_mesh(devices=topology.devices)
    assert memory.device_bytes(mesh) == topology.chip.memory


@dataclasses.dataclass(frozen=True)
class Silent(topologies.StandIn):
    """A device whose allocator keeps no count."""

    def memory_stats(self) -> None:
        return None


def test_a_gpu_that_does_not_say_its_memory_has_not_that_of_its_host(monkeypatch):
    def memory_needed(kind: str) -> int:
        return memory.device_bytes(sharding.make_mesh(devices=[Silent(0, "gpu", kind, 0)]))

    assert memory_needed("NVIDIA H200") == CHIPS["h200"].memory
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    with pytest.raises(InputError, match=r"NVIDIA L4: its memory is not known.*: unset that"):
        memory_needed("NVIDIA L4")


def test_of_devices_of_several_sizes_the_smallest_counts():
    """As of a machine with two kinds of GPUs: all hold as much."""
    sizes = (80 * GIB, 24 * GIB)
    devices = [topologies.StandIn(place, "gpu", "GPU", size) for place, size in enumerate(sizes)]
    assert memory.device_bytes(sharding.make_mesh(devices=devices)) == 24 * GIB


def test_a_process_that_none_of_the_devices_stands_for_knows_their_memory():
    """As of a dry run in several processes: a mesh that is not here may be of fewer hosts."""
    process = jax.process_index() + 1
    devices = [topologies.StandIn(n, "gpu", "GPU", 24 * GIB, process) for n in range(2)]
    mesh = sharding.make_mesh(devices=devices)
    assert mesh.local_devices == []
    assert memory.device_bytes(mesh) == 24 * GIB


def test_what_a_gpu_has_no_room_for_may_have_room_in_a_larger_share_of_it(monkeypatch):
    for name in memory.GPU_SHARES:
        monkeypatch.delenv(name, raising=False)
    mesh = sharding.make_mesh(devices=topologies.stand_ins("h200:1x1", 1))
    too_much = memory.Memory(int(130 * GIB), 0, 0, 0, 0)
    with pytest.raises(InputError, match=r"75% of a GPU's memory, with XLA_\w+=0\.9 more"):
        memory.refuse_too_large(too_much, mesh)
    for name in memory.GPU_SHARES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "0.9")
            with pytest.raises(InputError, match="does not fit") as caught:
                memory.refuse_too_large(too_much, mesh)
            assert "XLA_" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"parameters": 99}, r"take a smaller model, adapters .* or mesh.fsdp over more devices"),
        ({"parameters": 1, "frozen": 99}, "take a smaller model, or mesh.fsdp over more devices"),
        ({"sampler": 40, "decode": 60, "update": 50}, "take fewer rollout.slots, or shorter"),
        ({"sampler": 10, "update": 99}, "take a smaller train.tokens_per_micro_batch"),
        ({"sampler": 40, "update": 50, "evaluation": 99}, "take eval.kl_to_base = false"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would_take_less_of_that(parts, words):
    mesh = sharding.make_mesh(devices=topologies.stand_ins("v5p:1x1x1", 1))
    sizes = dict.fromkeys(("parameters", "optimizer", "copies", "sampler", "decode"), 0)
    needed = memory.Memory(**{**sizes, **{name: part * GIB for name, part in parts.items()}})
    with pytest.raises(InputError, match=words):
        memory.refuse_too_large(needed, mesh)


def test_slices_are_islands_and_what_crosses_them_is_known():
    topology = topologies.topology("v5e:2x2", slices=2)
    assert len(topology.devices) == 8
    assert topology.title == "2 slices of v5e:2x2, 8 chips"
    assert {device.slice_index for device in topology.devices} == {0, 1}
    devices = sorted(topology.devices, key=lambda device: device.slice_index)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2, 2, 1), sharding.AXES)
    assert plan.islands(mesh) == {"data": 2, "fsdp": 1, "tensor": 1, "context": 1}
    mesh = jax.sharding.Mesh(np.array(devices).reshape(1, 8, 1, 1), sharding.AXES)
    assert plan.islands(mesh) == {"data": 1, "fsdp": 2, "tensor": 1, "context": 1}


@pytest.mark.parametrize(
    ("name", "slices", "sizes", "message"),
    [
        ("v5e:2x2", 2, {"fsdp": 8}, "mesh.data = 1: the 8 devices are in 2 slices of 4"),
        ("h100:2x4", 1, {"tensor": 8}, "the 8 devices are in 2 hosts of 4, and tensor and context"),
    ],
)
def test_what_stands_in_for_devices_is_in_as_many_slices_or_hosts(name, slices, sizes, message):
    devices = topologies.stand_ins(name, slices)
    mesh = sharding.make_mesh(data=2, fsdp=4, devices=devices)
    assert plan.islands(mesh) == {"data": 2, "fsdp": 1, "tensor": 1, "context": 1}
    with pytest.raises(InputError, match=message):
        sharding.make_mesh(**sizes, devices=devices)
    with pytest.raises(InputError, match=message):
        preview.planned_mesh(MeshKeys(**sizes), PlanKeys(topology=name, slices=slices))


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [
        ("v9:2x2", 1, r"--topology v9:2x2 --slices 1: expected a chip and sizes, as v5e:4x4"),
        ("v5:2x2", 1, r"chips: .*v5e"),
        ("v5e", 1, "expected a chip and sizes"),
        ("v5e:2y2", 1, "expected a chip and sizes"),
        ("v5e:2x2", 0, "one slice or more"),
        ("v5e:3x5", 1, r"--topology v5e:3x5: cannot be compiled for \(.+\); examples"),
        ("h100:1x8x2", 1, "hosts and GPUs of each"),
        ("h100:1x8", 2, "no slices"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(name, slices, message):
    with pytest.raises(InputError, match=message):
        topologies.topology(name, slices)


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [("h100:1x8", 2, "no slices"), ("h100:2x2x8", 1, "no slices"), ("v5e:0x4", 1, "expected a")],
)
def test_no_devices_stand_in_for_what_there_is_not(name, slices, message):
    """Formulas alone, and dry runs, ask no compiler."""
    for make in (topologies.stand_ins, topologies.not_compiled_for):
        with pytest.raises(InputError, match=message):
            make(name, slices)


@pytest.mark.parametrize("name", ["v9:2x2", "h100:2x2x8"])
def test_a_message_names_the_key_where_a_config_names_the_devices(name):
    """A dry run has no option --topology."""
    keys, message = PlanKeys(topology=name), f'^plan.topology = "{name}", plan.slices = 1: '
    with pytest.raises(InputError, match=message):
        preview.planned_mesh(MeshKeys(fsdp=4096), keys)
    for formula in (False, True):
        with pytest.raises(InputError, match=message):
            command._topology(keys, None, None, formula)


@NEEDS_CUDA
@pytest.mark.parametrize(("name", "hosts", "devices"), [("h100:8", 1, 8), ("h200:2x4", 2, 8)])
def test_gpus_are_hosts_and_the_gpus_of_each(name, hosts, devices):
    topology = topologies.topology(name)
    assert len(topology.devices) == devices
    assert len({device.process_index for device in topology.devices}) == hosts
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(hosts, -1, 1, 1), sharding.AXES)
    assert plan.islands(mesh) == {"data": hosts, "fsdp": 1, "tensor": 1, "context": 1}
    assert memory.device_bytes(mesh) == topology.chip.memory


@NEEDS_CUDA
@pytest.mark.parametrize("name", ["h100:1x1", "h200:1x1"])
def test_kernels_of_triton_are_lowered_for_a_gpu_that_is_not_here(name):
    """On a mesh of one device, as a program of it is: JAX 0.11 asks the CPU what GPU it is."""
    (device,) = topologies.topology(name).devices
    place = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    lines = Lines(array(2, 2, 64, 128), array(2, 2, 64, 128))
    arguments = array(2, 2, 4, 2, 128), lines, array(2, dtype=jnp.int32)
    traced = jax.jit(pallas_decoding.over_prompts).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert "decode_prompts" in text


def test_what_computes_attention_on_a_gpu_that_is_not_here_is_known_with_the_reason():
    devices, mesh = topologies.stand_ins("h200:1x1", 1), {"fsdp": 1, "tensor": 1}
    run = planned.run(devices=devices, mesh=mesh)
    lines = attention_lines(run.blueprint.kernel, run.blueprint.teachers, run.engine)
    assert lines == {"attention": "by cudnn", "decoding": "by pallas"}
    run = planned.run(devices=devices, mesh=mesh, **{"model.dtype": "float32"})
    lines = attention_lines(run.blueprint.kernel, run.blueprint.teachers, run.engine)
    assert lines["attention"].startswith("by xla: cudnn cannot: model.dtype = float32")
    assert lines["decoding"].startswith("by xla: pallas cannot: model.dtype = float32")


def too_large(name: str) -> str:
    """What the compiler of a chip says of arrays of 400 GiB."""
    (device, *_) = topologies.topology(name).devices
    single_device = jax.sharding.SingleDeviceSharding(device)
    argument = jax.ShapeDtypeStruct((100 * GIB,), jnp.float32, sharding=single_device)
    lowered = jax.jit(lambda x: jnp.sin(x)).trace(argument).lower(lowering_platforms=("tpu",))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lowered.compile()
    assert plan.is_full(caught.value)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_memory_of_chips_is_what_their_compiler_gives_a_program(name):
    """It says so where a program asks for more: "... exceeds available HBM (15.75G)"."""
    message = too_large(name)
    match = plan._FULL.search(message)
    assert match is not None, message
    available = float(match[3]) * 1024 ** plan._POWERS[match[4]]
    chip = topologies.topology(name).chip
    assert chip.memory == pytest.approx(available, abs=0.01 * GIB)
    needed = plan.needed(message)
    assert needed is not None
    assert needed >= 400 * GIB
