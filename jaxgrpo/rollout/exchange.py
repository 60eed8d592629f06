"""What processes tell one another: which share is whose, and any value that JSON holds."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

SMALLEST = 4096  # bytes of a value that processes exchange


def is_own(place: Any) -> Any:
    """Which groups this process judges, and answers: a number, or an array of them."""
    return place % jax.process_count() == jax.process_index()


def gather_json(value: Any) -> list[Any]:
    """The value of every process, by process number; every process has to call it.

    Args:
      value: whatever JSON holds. Floats come back bit for bit, NaN too.
    """
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data))))
    # Powers of two, so that few sizes are compiled.
    size = max(SMALLEST, 1 << (int(lengths.max()) - 1).bit_length())
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = data
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:n].tobytes()) for row, n in zip(gathered, lengths, strict=True)]
