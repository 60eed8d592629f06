"""What a program computes, its loops counted with their trips.

XLA's own `cost_analysis` counts the body of a loop once, and kernels not at all. The bytes that a
program moves are read by `jaxgrpo.planning.traffic`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def products(jaxpr: Any, unknown: Sequence[int] = (1,), kernel: float = 0.0) -> float:
    """Operations of the matrix products of a traced program, over all devices.

    2 x outputs x contracted numbers of each; what is recomputed counts again, and of `cond` the
    dearest branch.

    Args:
      unknown: trips of the loops whose end is computed, as of `hlo.places`.
      kernel: operations of one product of an attention kernel, over all devices: which pairs it
        sees cannot be read from its grid.
    """
    return _products(getattr(jaxpr, "jaxpr", jaxpr), unknown, kernel, 0)


def _products(jaxpr: Any, unknown: Sequence[int], kernel: float, depth: int) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = math.prod(shape[dimension] for dimension in contracted)
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * inner
        elif name == "while":
            trips = unknown[min(depth, len(unknown) - 1)]
            total += trips * _products(params["body_jaxpr"].jaxpr, unknown, kernel, depth + 1)
        elif name == "cond":
            total += max(
                _products(branch.jaxpr, unknown, kernel, depth) for branch in params["branches"]
            )
        elif name == "pallas_call":
            total += kernel * _dots(params["jaxpr"])
        elif name == "shard_map":  # its shapes are those of one device
            size = params["mesh"].size
            total += size * _products(params["jaxpr"], unknown, kernel / size, depth)
        else:
            trips = params["length"] if name == "scan" else 1
            inner = sum(
                _products(inner_jaxpr, unknown, kernel, depth) for inner_jaxpr in _inner(params)
            )
            total += trips * inner
    return total


def _dots(jaxpr: Any) -> int:
    """The products of a kernel that is run for one block of its grid."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            total += max(_dots(branch.jaxpr) for branch in equation.params["branches"])
        else:
            inside = sum(map(_dots, _inner(equation.params)))
            total += inside + (equation.primitive.name == "dot_general")
    return total


def _inner(params: Mapping[str, Any]) -> list[Any]:
    """The programs among the parameters of an equation."""
    values = (getattr(value, "jaxpr", value) for value in params.values())
    return [value for value in values if hasattr(value, "eqns")]
