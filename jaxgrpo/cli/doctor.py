"""`jaxgrpo doctor`: what a report of a problem should show."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.training import process

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "flax", "optax"),
    *("orbax-checkpoint", "transformers", "tokenizers", "safetensors", "datasets", "numpy"),
)
GIB = 2**30


def main() -> int:
    """Prints versions, devices, memory and disk; 2 where JAX cannot use the machine's devices."""
    table = Table(title=f"jaxgrpo {jaxgrpo.__version__}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    found = devices()
    for rows in (versions(), found, memory(), disk(os.environ)):
        for name, value in rows.items():
            table.add_row(name, value)
        table.add_section()
    Console().print(table)
    return 2 if "problem" in found else 0


def versions() -> dict[str, str]:
    """Of Python, the system and the packages that results depend on."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> dict[str, str]:
    """What JAX computes on, with the memory of each device where it tells."""
    try:
        rows = {"devices": process.start("auto")}
    except InputError as error:
        rows = {"problem": str(error)}
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            used, limit = stats.get("bytes_in_use", 0) / GIB, stats["bytes_limit"] / GIB
            rows[f"device {device.id}"] = f"{used:.1f} of {limit:.1f} GiB in use"
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    rows["processor"] = f"{cores} cores for this process"
    return rows


def memory() -> dict[str, str]:
    """Of the machine."""
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return {"memory": "this system does not tell"}
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page / GIB for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return {"memory": f"{total:.1f} GiB, {free:.1f} GiB unused"}


def disk(environment: Mapping[str, str]) -> dict[str, str]:
    """Where runs and compiled programs go."""
    rows = {}
    places = {"runs": Path.cwd() / "runs", "compile cache": process.cache_folder(environment)}
    for name, folder in places.items():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        rows[name] = f"{folder}, {shutil.disk_usage(there).free / GIB:.1f} GiB free"
    return rows
