"""Attention as a formula over queries, keys and what makes their mask, and as kernels of chips."""

from __future__ import annotations

import re
from typing import Any


def compute_capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU, such as 8.9; None of a device that names none.

    AMD's GPUs have a name in its place, such as gfx942.
    """
    name = getattr(device, "compute_capability", "")
    return float(name) if re.fullmatch(r"\d+\.\d", name) else None
