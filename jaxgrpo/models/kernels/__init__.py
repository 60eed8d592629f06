"""Attention as a formula over queries, keys and what makes their mask, and as kernels of chips."""

from __future__ import annotations

import importlib
import re
from typing import Any

import jax

from jaxgrpo.core.errors import one_line


def load(name: str) -> tuple[Any, list[str]]:
    """A module of this package, and why it is None: JAX may have moved what it is made of.

    What JAX calls experimental, or hides, may leave it in any release.
    """
    try:
        return importlib.import_module(f"{__name__}.{name}"), []
    except (ImportError, AttributeError) as error:
        return None, [f"JAX {jax.__version__} lacks what it is made of ({one_line(error)})"]


def compute_capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU, such as 8.9; None of a device that names none.

    AMD's GPUs have a name in its place, such as gfx942.
    """
    name = getattr(device, "compute_capability", "")
    return float(name) if re.fullmatch(r"\d+\.\d", name) else None


def not_of_nvidia(device: Any) -> list[str]:
    """What keeps a kernel that is for NVIDIA's GPUs from a device; empty: nothing does."""
    name = getattr(device, "compute_capability", "")
    is_unknown = bool(name) and compute_capability(device) is None
    return [f"compute capability {name}: it is for NVIDIA's GPUs"] * is_unknown
