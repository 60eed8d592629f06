"""What a program computes and moves, its loops counted with their trips.

XLA's own `cost_analysis` counts the body of a loop once, and kernels not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgrpo.planning import hlo
from jaxgrpo.planning.hlo import Instruction

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "partition-id", "replica-id", "iota", "broadcast"),
}
"""Instructions that move nothing themselves; broadcasts and iotas that stand alone are small."""
SLICES = ("dynamic-slice", "slice", "gather")
PARTED = hlo.KINDS
"""Collectives: inside a fusion they are parts of one, which is counted once, by its channel."""
_LAID_OUT = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\](\{[^}]*\})?")
_OF_START = re.compile(r"^\(\(.*?\), |, s32\[\][^,]*\)$")
"""Of the result of an instruction that starts: what it takes, and its context."""
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ALIASED = re.compile(r"\{\d+\}: \((\d+), \{\}\)")
"""Of an instruction: the operand in whose place it gives a part of its result."""


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


def kernels(text: str, unknown: Sequence[int] = (1,)) -> int:
    """What a program launches: its instructions outside fusions, each as often as it runs. Of a
    conditional all branches count.

    Args:
      unknown: as of `products`.
    """
    computations, entry = hlo.computations(text)
    inside = _inside(computations)
    return sum(
        place.trips * sum(_is_launched(instruction) for instruction in computations[name])
        for name, place in hlo.places(computations, entry, unknown).items()
        if name not in inside
    )


def moved(
    text: str, unknown: Sequence[int] = (1,), shares: Mapping[str, float] | None = None
) -> float:
    """Bytes of its main memory that a device reads and writes in a compiled program.

    Of every instruction outside fusions what it reads and what it gives. What reads or writes
    slices of an array moves those; arrays in on-chip memory, S(1), move nothing.

    Args:
      unknown: as of `products`.
      shares: name of a Pallas kernel -> the share that it reads of what it is given. What it gives
        in the place of that, it writes a small part of, which is not counted.
    """
    computations, entry = hlo.computations(text)
    inside = _inside(computations)
    total, parted = 0.0, {}
    for name, place in hlo.places(computations, entry, unknown).items():
        if name in inside:
            parts = [
                instruction for instruction in computations[name] if instruction.code in PARTED
            ]
            # Those of a collective may stand in a loop that it is not part of.
            for part in parts:
                key = part.code, _CHANNEL.findall(part.tail)[0]
                size = place.trips * _bytes(part.result, everywhere=True)
                parted[key] = min(size, parted.get(key, size))
            continue
        size_of = {
            instruction.name: _bytes(instruction.result) for instruction in computations[name]
        }
        for instruction in computations[name]:
            share = _share(instruction, shares or {})
            if share is None:
                total += place.trips * _moved(instruction, size_of, computations)
                continue
            operands = [size_of.get(operand, 0) for operand in hlo.operands(instruction)]
            overwritten = sum(operands[int(place)] for place in _ALIASED.findall(instruction.tail))
            output = size_of[instruction.name] - overwritten
            total += place.trips * (share * sum(operands) + output)
    return total + sum(parted.values())


def _inside(computations: Mapping[str, Sequence[Instruction]]) -> set[str]:
    """The computations that are parts of instructions."""
    return {
        name
        for body in computations.values()
        for instruction in body
        for name in _not_run(instruction)
    }


def _is_launched(instruction: Instruction) -> bool:
    return instruction.code not in FREE and not instruction.code.endswith(("-done", "-update"))


def _share(instruction: Instruction, shares: Mapping[str, float]) -> float | None:
    """The share of what it is given that a kernel reads; None: it is none of those."""
    if instruction.code != "custom-call":
        return None
    matches = (share for name, share in shares.items() if f"{name}/pallas_call" in instruction.tail)
    return next(matches, None)


def _not_run(instruction: Instruction) -> list[str]:
    """Computations that are part of an instruction: fused ones, and those that reduce."""
    is_run = instruction.code in ("call", "conditional") or instruction.code.startswith("async-")
    return [] if is_run else instruction.called


def _moved(
    instruction: Instruction, size_of: Mapping[str, int], computations: Mapping[str, Any]
) -> float:
    if instruction.code in FREE or instruction.code.endswith(("-done", "-update")):
        return 0
    if instruction.name.startswith("async-collective-"):
        return 0  # the ends of a collective whose parts are in fusions
    operands, code = hlo.operands(instruction), instruction.code.removesuffix("-start")
    result_size = size_of[instruction.name]
    if code in SLICES:
        part = _OF_START.sub("", instruction.result)
        in_memory = size_of.get(operands[0], 0) > 0
        return in_memory * _bytes(part, everywhere=True) + _bytes(part)
    if code == "dynamic-update-slice":
        return 2 * size_of.get(operands[1], 0)
    if code == "async":
        return 0  # its computation is counted
    if instruction.code.endswith("-start"):  # what it takes and what it gives stand in its result
        return result_size
    if instruction.code == "fusion":
        return _moved_by_fusion(instruction, operands, size_of, computations)
    return result_size + sum(size_of.get(name, 0) for name in operands)


def _moved_by_fusion(
    fusion: Instruction,
    operands: Sequence[str],
    size_of: Mapping[str, int],
    computations: Mapping[str, Any],
) -> float:
    body = _body(fusion, computations)
    by_name = {inner.name: inner for inner in body}
    total = 0.0
    for place, name in enumerate(operands):
        total += min(size_of.get(name, 0), _read(fusion, place, computations))
    roots = [inner for inner in body if inner.is_root]
    if roots and roots[0].code == "tuple":
        roots = [by_name[name] for name in hlo.operands(roots[0]) if name in by_name]
    return total + min(sum(_written(root, by_name) for root in roots), size_of[fusion.name])


def _read(fusion: Instruction, place: int, computations: Mapping[str, Any]) -> float:
    """Bytes that a fusion reads of one of its operands, wherever that lies."""
    body = _body(fusion, computations)
    starts = [inner for inner in body if inner.code == "parameter"]
    start = next((inner for inner in starts if inner.tail.startswith(f"{place})")), None)
    if start is None:
        return 0
    operand_size = _bytes(start.result, everywhere=True)
    total, names = 0.0, {start.name}
    for inner in body:  # in the order in which they run
        places = [position for position, name in enumerate(hlo.operands(inner)) if name in names]
        if not places or inner.code in PARTED or (inner.is_root and inner.code == "tuple"):
            continue
        if inner.code == "bitcast":
            names.add(inner.name)
        elif inner.code in SLICES and places == [0]:
            total += _bytes(inner.result, everywhere=True)
        elif inner.code == "fusion":
            total += sum(_read(inner, position, computations) for position in places)
        elif inner.code != "dynamic-update-slice" or places != [0]:
            total += operand_size
    return min(total, operand_size)


def _written(root: Instruction, by_name: Mapping[str, Instruction]) -> int:
    """Bytes that a fusion writes of an array which it gives."""
    operands = hlo.operands(root)
    if root.code == "parameter" or root.code in PARTED:
        return 0  # it was there, or is counted with its collective
    if root.code == "bitcast" and operands and operands[0] in by_name:
        return _written(by_name[operands[0]], by_name)
    if root.code == "dynamic-update-slice" and operands[1] in by_name:
        return _bytes(by_name[operands[1]].result, everywhere=True)
    return _bytes(root.result)


def _body(instruction: Instruction, computations: Mapping[str, Any]) -> list[Instruction]:
    return [inner for name in instruction.called for inner in computations.get(name, ())]


def _bytes(result: str, everywhere: bool = False) -> int:
    """Of the arrays of a type as HLO writes it; those outside main memory only if `everywhere`."""
    total = 0
    for kind, bits, sizes, layout in _LAID_OUT.findall(result):
        if everywhere or "S(" not in layout:
            shape = tuple(int(size) for size in sizes.split(",") if size)
            total += hlo.Array(kind + bits, shape).bytes
    return total
