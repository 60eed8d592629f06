"""What JAX computes on: its backend is started, or refused with the reason in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import jax
from jax._src.hardware_utils import num_available_tpu_chips_and_device_id
from jax._src.xla_bridge import backends_are_initialized

from jaxgrpo.core.errors import InputError, one_line
from jaxgrpo.training.processes import parent

PLATFORM_NAMES = {"cuda": "gpu", "rocm": "gpu"}
GRAPHS = "--xla_gpu_enable_command_buffer"
"""XLA's flag for what it runs as CUDA graphs, an empty value for nothing. While a graph runs, JAX's
profiler ends the process (benchmarks/results/2026-11-27-h200.md)."""


def start_backend() -> str:
    """Starts what JAX computes on, once. Returns: "cpu", "gpu" or "tpu".

    To be called before anything is computed, which would start it too.

    Raises: InputError where JAX cannot start it.
    """
    names = os.environ.get("JAX_PLATFORMS")
    where = f"JAX_PLATFORMS = {names}" if names else "the devices of this machine"
    remedy = f"{'unset it, or ' * bool(names)}set JAX_PLATFORMS=cpu"
    try:
        platform = jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        reason = one_line(error) or "there are none"  # JAX's assertion says nothing
        raise InputError(f"{where}: JAX cannot use them ({reason}); {remedy}") from error
    return PLATFORM_NAMES.get(platform, platform)


def prepare_profile(environment: MutableMapping[str, str]) -> None:
    """Turns CUDA graphs off where JAX will start an NVIDIA GPU. Elsewhere it changes nothing.

    Raises: as `flags_without_graphs`.
    """
    if not parent.has_cuda():
        return
    has_backend = backends_are_initialized()
    platforms = jax.default_backend() if has_backend else jax.config.values["jax_platforms"]
    if {"cuda", "gpu"} & {*(platforms or "cuda").split(",")}:
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = flags_without_graphs(flags, has_backend)


def flags_without_graphs(flags: str, has_backend: bool = False) -> str:
    """XLA_FLAGS with CUDA graphs turned off, unless they say what to run as graphs.

    Args:
      flags: the variable so far.
      has_backend: JAX has started the GPU, and has read them.

    Raises: InputError where that is too late, and for the name of a file.

    >>> flags_without_graphs("--xla_dump_to=/tmp/x")
    '--xla_dump_to=/tmp/x --xla_gpu_enable_command_buffer='
    """
    if GRAPHS in flags:
        return flags
    why = "JAX's profiler ends the process while a CUDA graph runs"
    if has_backend:
        raise InputError(
            f"profile: {why}, and JAX has started the GPU with them; start a new process with "
            f"XLA_FLAGS={GRAPHS}="
        )
    if flags and not flags.lstrip().startswith("-"):
        raise InputError(
            f"XLA_FLAGS = {flags}: {why}, and a profile cannot turn them off in a file; set the "
            "variable to the flags themselves"
        )
    return f"{flags} {GRAPHS}=".strip()


def devices_line() -> str:
    """The devices that JAX computes on, in words."""
    devices, count = jax.devices(), jax.process_count()
    platform = PLATFORM_NAMES.get(devices[0].platform, devices[0].platform)
    return (
        f"{len(devices)} {platform} device{'s' * (len(devices) > 1)} ({devices[0].device_kind}) in "
        f"{count} process{'es' * (count > 1)}"
    )


def check_platform(platform: str, backend: str) -> None:
    """Refuses devices of another platform, and the CPU in silence. Raises: InputError."""
    if platform not in ("auto", backend):
        remedy = (
            "unset JAX_PLATFORMS and start a new process"
            if platform == "cpu"
            else f"install jaxgrpo[{'tpu' if platform == 'tpu' else 'cuda12'}] and see that the "
            f'devices are visible, or set mesh.platform = "{backend}"'
        )
        raise InputError(f'mesh.platform = "{platform}": JAX found {backend} devices; {remedy}')
    idle = idle_accelerator(os.environ) if platform == "auto" and backend == "cpu" else None
    if idle:
        raise InputError(
            f'mesh.platform = "auto": {idle} is there, but this JAX has only the CPU; install '
            'jaxgrpo[cuda12] or jaxgrpo[tpu], or set mesh.platform = "cpu"'
        )


def idle_accelerator(
    environment: Mapping[str, str],
    folder: str = "/dev",
    count_tpus: Callable[[], tuple[int, Any]] = num_available_tpu_chips_and_device_id,
    has_driver: Callable[[], bool] = parent.has_driver,
) -> str | None:
    """The device file of an accelerator of this machine that is not hidden from JAX.

    A virtual machine's host has vfio/N too, which are TPUs only beside chips on its PCI bus; and
    WSL2 has dxg for GPUs of all makers, of which only NVIDIA's come with a driver of CUDA.

    Args:
      folder: of device files.
      count_tpus: gives the number of TPU chips on the PCI bus, and their version.
      has_driver: whether there is a driver of CUDA.
    """
    if "cpu" in environment.get("JAX_PLATFORMS", ""):
        return None
    is_hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    patterns = {
        "nvidia[0-9]*": lambda: not is_hidden,
        "dxg": lambda: not is_hidden and has_driver(),
        "accel[0-9]*": lambda: True,
        "vfio/[0-9]*": lambda: count_tpus()[0] > 0,
    }
    for pattern, is_accelerator in patterns.items():
        files = sorted(Path(folder).glob(pattern))
        if files and is_accelerator():
            return str(files[0])
    return None


def quiet_libtpu(environment: MutableMapping[str, str]) -> None:
    """Keeps libtpu, installed to compile for TPUs, from complaining where there is none."""
    # JAX sets the first variable where it finds no TPU; libtpu then takes the rest for a mistake.
    if environment.get("TPU_SKIP_MDS_QUERY") == "1" and not environment.get("JAX_PLATFORMS"):
        environment.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        environment.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
