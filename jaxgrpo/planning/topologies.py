"""Devices that are not here: TPU slices and hosts of GPUs, by name, to compile for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import re
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from jaxgrpo.core.chips import CHIPS, Chip
from jaxgrpo.core.errors import InputError, one_line, suggest
from jaxgrpo.training.processes import parent

GPUS = ("h100", "h200")
DEVICES_PER_CHIP = {"tpu7x": 2}  # others have one
_ONE_DEVICE_PER_CHIP = {"v4": {"chip_config_name": "megacore"}}
_EXAMPLES = "v5e:4x4, v6e:16x16, v5p:4x4x4, h100:8x8 (hosts x GPUs)"

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{kind}"
"""
"""What XLA asks of a GPU that it compiles for, here one of NVIDIA's Hopper architecture, from its
white paper: 132 multiprocessors, 50 MB of L2, 228 KB of shared memory each."""
_GPU_KINDS = {"h100": ("NVIDIA H100 80GB HBM3", 84942979072), "h200": ("NVIDIA H200", 150110011392)}
"""JAX's name of the device, and its bytes of memory."""


class Topology(NamedTuple):
    """Devices that a program can be compiled for."""

    name: str  # as it was given
    chip: Chip  # what one of the devices can do
    slices: int
    devices: tuple[Any, ...]  # of jax.Device

    @property
    def chips(self) -> int:
        return len(self.devices) // DEVICES_PER_CHIP.get(self.chip.name, 1)

    @property
    def title(self) -> str:
        """In words."""
        slices = f"{self.slices} slices of " if self.slices > 1 else ""
        per_chip = DEVICES_PER_CHIP.get(self.chip.name, 1)
        halves = f", {per_chip} devices each" if per_chip > 1 else ""
        return f"{slices}{self.name}, {self.chips} chips{halves}"


def topology(name: str, slices: int = 1, where: str | None = None) -> Topology:
    """The devices of a topology.

    Args:
      name: a chip of `core.chips.CHIPS` and sizes: "v5e:4x4", "v5p:4x4x4"; of GPUs the hosts and
        the GPUs of each, "h100:8x8".
      slices: how many of that topology, with a data-centre network between them.
      where: who names them, which opens messages; None: the options of `jaxgrpo plan`.

    Raises: InputError for what there is not, and where the compiler for it is not installed.
    """
    kind, sizes = read_name(name, slices, where)
    describe = _gpu_devices if kind in GPUS else _tpu_devices
    try:
        devices = describe(kind, sizes, slices)
    except Exception as error:  # RuntimeError, ValueError, and what plugins raise
        raise InputError(
            f"{where or f'--topology {name}'}: cannot be compiled for ({one_line(error)}); "
            f"examples: {_EXAMPLES}. The compilers come with jaxgrpo[plan]; --formula needs none"
        ) from None
    return Topology(name, CHIPS[kind], slices, tuple(devices))


def read_name(name: str, slices: int = 1, where: str | None = None) -> tuple[str, tuple[int, ...]]:
    """The chip and the sizes that the name of a topology holds.

    Args: where: as in `topology`.

    Raises: InputError for a name of another form, where there is no such chip, and for what GPUs
      have not.
    """
    where = where or f"--topology {name} --slices {slices}"
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or slices < 1:
        hint = suggest(kind, CHIPS)
        raise InputError(
            f"{where}: expected a chip and sizes, as {_EXAMPLES}, and one slice or more; chips: "
            f"{hint}"
        )
    sizes = tuple(map(int, shape.split("x")))
    if kind in GPUS and (len(sizes) > 2 or slices > 1):
        raise InputError(f"{where}: GPUs have hosts and GPUs of each, as h100:8x8, and no slices")
    return kind, sizes


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A device that is not here, of which only sizes are read."""

    id: int
    platform: str
    device_kind: str
    memory: int  # bytes
    process_index: int = 0  # of GPUs their host's
    slice_index: int = 0
    core_on_chip: int = 0

    @property
    def coords(self) -> tuple[int, int, int]:
        """As of TPUs in a line: where they stand is not known."""
        return self.id, 0, 0

    @property
    def client(self) -> Any:
        return jax.devices()[0].client

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.memory}


def not_compiled_for(name: str, slices: int, where: str | None = None) -> Topology:
    """A topology of stand-ins, for formulas alone. Raises: as `read_name`."""
    devices = stand_ins(name, slices, where)
    return Topology(name, CHIPS[read_name(name, slices)[0]], slices, (*devices,))


def stand_ins(name: str, slices: int, where: str | None = None) -> list[StandIn]:
    """Devices in place of those of a topology, in as many slices or hosts, without a compiler.

    Raises: as `read_name`.
    """
    kind, sizes = read_name(name, slices, where)
    per_slice = math.prod(sizes) * DEVICES_PER_CHIP.get(kind, 1)
    platform, memory = "gpu" if kind in GPUS else "tpu", CHIPS[kind].memory
    per_host = sizes[-1] if kind in GPUS else slices * per_slice
    return [
        StandIn(place, platform, kind, memory, place // per_host, place // per_slice)
        for place in range(slices * per_slice)
    ]


def quiet(environment: MutableMapping[str, str]) -> None:
    """Keeps this process to the CPU, and libtpu from looking for chips. Before devices are used."""
    environment["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")  # which has read the variable already
    environment.setdefault("TPU_SKIP_MDS_QUERY", "1")
    environment.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    environment.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    environment.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing here runs on a chip
    environment.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # nor needs CUDA


def _tpu_devices(kind: str, sizes: tuple[int, ...], slices: int) -> Any:
    options: dict[str, Any] = dict(_ONE_DEVICE_PER_CHIP.get(kind, {}))
    if math.prod(sizes) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if slices > 1:
        options["num_slices"] = slices
    return _described("tpu", f"{kind}:{'x'.join(map(str, sizes))}", tuple(options.items()))


def _gpu_devices(kind: str, sizes: tuple[int, ...], slices: int) -> Any:
    del slices  # one, as `read_name` checks
    hosts, gpus = (1, *sizes)[-2:]
    name, memory = _GPU_KINDS[kind]
    bandwidth = int(CHIPS[kind].bandwidth)
    target = _TARGET.format(bandwidth=bandwidth, memory=memory, kind=name)
    options = {"target_config": target, "topology": f"1x{hosts}x{gpus}"}
    _answer_for_gpu()
    return _described("cuda", kind, tuple(options.items()))


def _answer_for_gpu() -> None:
    """Has JAX trace cuDNN's attention and Triton's kernels as for `_TARGET`: it asks the devices
    that are here, and on a machine without a GPU refuses. This process runs nothing on one
    (`quiet`)."""
    fused_attention_stablehlo.check_cudnn_version = lambda: 90800
    fused_attention_stablehlo.check_compute_capability = lambda least: float(least) <= 9.0
    with contextlib.suppress(ImportError):  # JAX 0.10 takes a GPU that is not here for Hopper's
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
        hopper = gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H100)
        gpu_info.registry["cpu"] = lambda: hopper


@functools.cache
def _described(platform: str, name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    quiet(os.environ)
    with parent.without_cuda_lines():
        jax.devices()
    return topologies.get_topology_desc(
        platform=platform, topology_name=name, **dict(options)
    ).devices
