"""What benchmarks share: the device and its ceiling, quiet timing, the last line of JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CPUINFO = Path("/proc/cpuinfo")
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}
"""Flags of /proc/cpuinfo, the widest first, and what their instructions are called."""


def processor(file: Path = CPUINFO) -> str:
    """Model and widest vector instructions, as Linux tells them: ratios depend on both. Elsewhere
    the architecture."""
    try:
        fields = dict(re.findall(r"^(\S.*?)\s*: (.*)$", file.read_text(), re.MULTILINE))
    except OSError:
        return platform.machine()
    flags = fields.get("flags", fields.get("Features", "")).split()
    vectors = [name for flag, name in VECTORS.items() if flag in flags]
    return ", ".join([fields.get("model name", platform.machine()), *vectors[:1]])


def describe() -> dict[str, Any]:
    """Device, versions and commit."""
    device = jax.devices()[0]
    kind = processor() if device.platform == "cpu" else device.device_kind
    repository = Path(__file__).resolve().parent.parent
    commit = ""
    if (repository / ".git").exists():  # not in a source distribution
        command = ["git", "-C", repository, "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "device": f"{len(jax.devices())} x {kind} ({device.platform})",
        "jax": jax.__version__,
        "commit": commit or "unknown",
    }


def keep_memory(module: str) -> None:
    """Starts the benchmark again with a C allocator that keeps what it was given, as pools do.

    glibc returns blocks above 32 MiB to the system after each call, and page faults of milliseconds
    would be most of what is timed. Elsewhere the variables mean nothing.
    """
    thresholds = {"MMAP_THRESHOLD": 2**32, "TRIM_THRESHOLD": 2**34, "TOP_PAD": 2**28}
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.environ.update({f"MALLOC_{name}_": str(value) for name, value in thresholds.items()})
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def most_memory(device: Any) -> tuple[float, str]:
    """GiB that this process has taken at most, and of what: of an accelerator by arrays on it.

    Raises: SystemExit where that device does not tell.
    """
    if device.platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "process"
    stats = device.memory_stats()
    if stats is None:
        raise SystemExit(f"{device.device_kind}: its allocator keeps no count of memory")
    return stats["peak_bytes_in_use"] / 2**30, "device"


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a call returns, awaited, and its wall-clock seconds."""
    began = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - began


def matmul_rate(rows: int, inner: int, columns: int, repeats: int = 5) -> float:
    """FLOP/s that JAX reaches here for one float32 product of this shape: the ceiling."""
    left = jnp.ones((rows, inner), jnp.float32)
    right = jnp.ones((inner, columns), jnp.float32)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(left, right))
    return 2 * rows * inner * columns / min(timed(product, left, right)[1] for _ in range(repeats))


class Interval(NamedTuple):
    """A median and the ends of its interval."""

    median: float
    low: float
    high: float

    @property
    def ends(self) -> str:
        """As a cell."""
        return f"{self.low:.2f} .. {self.high:.2f}"


def interval(values: list[float]) -> Interval:
    """Median with its 95% bootstrap interval.

    Of three to five values that is their range, which holds the median of all that could be
    measured in 1 - 2^(1 - n) of cases: in 75% with three, 94% with five.
    """
    array = np.asarray(values)
    draws = np.random.default_rng(0).integers(0, len(array), (2000, len(array)))
    low, high = np.percentile(np.median(array[draws], axis=1), [2.5, 97.5])
    return Interval(float(np.median(array)), float(low), float(high))


def verdict(passed: bool) -> str:
    return "pass" if passed else "MISS"


def report(result: Mapping[str, Any]) -> None:
    """The last line of every benchmark."""
    print(json.dumps(result))
