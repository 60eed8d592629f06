"""What the makers publish of accelerators, and what a program may use of their memory.

All numbers are of one device as JAX counts them: a chip, and half a chip of TPU7x.
"""

from __future__ import annotations

import re
from typing import NamedTuple

GIB = 2**30
JAX_SHARE = 0.75
"""Of a GPU's memory, what JAX takes unless XLA_CLIENT_MEM_FRACTION says otherwise."""


class Chip(NamedTuple):
    """One device. The rates are the makers' peaks, which no program reaches."""

    name: str
    kinds: str  # regular expression of what JAX calls it, `jax.Device.device_kind`
    flops: float  # per second, products of bfloat16
    memory: int  # bytes that a program may use
    bandwidth: float  # bytes per second, of its memory
    link: float  # bytes per second that it can send to its neighbours (ICI, NVLink), all links
    network: float  # bytes per second that it can send beyond its slice or host
    source: str
    launch: float = 0.0  # seconds of each kernel that a program waits for at the least
    call: float = 0.0  # seconds that each collective takes, whatever it sends, ...
    hop: float = 0.5e-6  # ... and for each device behind the first of its group
    """TPUs: a hop takes about 1 us, and a ring is gone round both ways at once (jax-ml.github.io/
    scaling-book, part 3). Nothing of this was measured here."""


_GPU: dict[str, float] = {"launch": 5.4e-3 / 1289, "call": 6.6e-6, "hop": 0.5e-6}
"""launch: measured once, on an H100: a decoding step of 64 slots, which waits for launches, takes
5.4 ms for 1,289 kernels (benchmarks/results/2026-11-23-sampling.md). call, hop: not measured; what
NCCL itself reckons with for short messages round a ring of NVLinks (NVIDIA/nccl,
src/graph/tuning.cc, baseLat and hwLat of Ring, LL). An H200 is taken as an H100."""
_CLOUD = "docs.cloud.google.com/tpu/docs/"
_H100 = "nvidia.com, H100 and H200 SXM data sheets; 8 ports of 400 Gbit/s per host of 8 (DGX H100)"

CHIPS = {
    chip.name: chip
    for chip in (
        # The memory of TPUs is what libtpu 0.0.42 says a program may have when one does not fit.
        # Published bandwidth of ICI is both ways together: half of it leaves the chip.
        Chip(
            *("v4", "TPU v4", 275e12, int(30.75 * GIB), 1200e9),
            # The network is not on that page: taken as v5p's.
            *(1.1e15 / 4096, 50e9 / 8, f"{_CLOUD}v4: all-reduce of 1.1 PB/s for 4,096 chips"),
        ),
        Chip(
            *("v5e", "TPU v5 ?(lite|e)", 197e12, int(15.75 * GIB), 819e9),
            *(200e9, 25e9 / 8, f"{_CLOUD}v5e: 400 GB/s ICI; 6.4 Tbit/s of network for 256 chips"),
        ),
        Chip(
            *("v5p", "TPU v5p?", 459e12, int(95.74 * GIB), 2765e9),
            *(600e9, 50e9 / 8, f"{_CLOUD}v5p: 1200 GB/s ICI; 50 Gbit/s of network per chip"),
        ),
        Chip(
            *("v6e", "TPU v6 ?(lite|e)", 918e12, int(31.25 * GIB), 1638e9),
            *(400e9, 100e9 / 8, f"{_CLOUD}v6e: 800 GB/s ICI; 25.6 Tbit/s of network for 256 chips"),
        ),
        Chip(
            *("tpu7x", "TPU ?7x", 2307e12 / 2, int(94.75 * GIB), 7380e9 / 2),
            *(300e9, 100e9 / 16, f"{_CLOUD}tpu7x: 1200 GB/s ICI, 100 Gbit/s of network per chip"),
        ),
        Chip(
            *("h100", ".*H100.*", 989e12, int(JAX_SHARE * 79.1 * GIB), 3352e9),
            *(450e9, 400e9 / 8, f"{_H100}: 900 GB/s NVLink both ways"),
            **_GPU,
        ),
        Chip(
            *("h200", "(.* )?H200.*", 989e12, int(JAX_SHARE * 139.8 * GIB), 4800e9),
            *(450e9, 400e9 / 8, f"{_H100}: 900 GB/s NVLink both ways"),
            **_GPU,
        ),
    )
}
"""By the name that a topology begins with."""


def find_chip(kind: str) -> Chip | None:
    """The chip that JAX calls by this kind, if it is one of CHIPS.

    >>> find_chip("TPU v5 lite").name, find_chip("TPU v5").name, find_chip("cpu")
    ('v5e', 'v5p', None)
    >>> find_chip("NVIDIA H200").name, find_chip("NVIDIA GH200 480GB")  # it has less memory
    ('h200', None)
    """
    return next((chip for chip in CHIPS.values() if re.fullmatch(chip.kinds, kind)), None)
