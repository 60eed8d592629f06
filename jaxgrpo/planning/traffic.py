"""What a compiled program moves, and how many kernels it runs, its loops counted with their trips.

XLA's own `cost_analysis` counts the body of a loop once, and kernels not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
_ALIASED = re.compile(r"\{\d+\}: \((\d+), \{\}\)")
"""Of an instruction: the operand in whose place it gives a part of its result."""
_PLANNED = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast|Assume\w+|Async\w+)"')
"""Custom calls of a TPU that tell its compiler something, and do nothing themselves."""


class Traffic(NamedTuple):
    """Of a call of a program, on each device."""

    moved: float  # bytes of main memory that are read and written
    kernels: int  # instructions outside fusions: on a GPU, a launch each


def read_traffic(
    text: str, unknown: Sequence[int] = (1,), shares: Mapping[str, float] | None = None
) -> Traffic:
    """The traffic of a compiled program, from its text.

    Of every instruction outside fusions the bytes that it reads and gives. What reads or writes
    slices of an array moves those; arrays in on-chip memory, S(1), move nothing. Of a conditional
    all branches count, so that decoding reads all of its caches.

    Args:
      unknown: trips of the loops whose end is computed, as in `hlo.places`.
      shares: name of a Pallas kernel -> the share that it reads of what it is given. Of what it
        overwrites, it writes a small part, which is not counted.
    """
    computations, entry = hlo.computations(text)
    inside = {
        name
        for body in computations.values()
        for instruction in body
        for name in _not_run(instruction)
    }
    total, kernels, parted = 0.0, 0, {}
    for name, place in hlo.places(computations, entry, unknown).items():
        if name in inside:
            parts = [
                instruction for instruction in computations[name] if instruction.code in PARTED
            ]
            # Those of a collective may stand in a loop that it is not part of.
            for part in parts:
                key = part.code, hlo.CHANNEL.findall(part.tail)[0]
                size = place.trips * _bytes(part.result, everywhere=True)
                parted[key] = min(size, parted.get(key, size))
            continue
        size_of = {
            instruction.name: _bytes(instruction.result) for instruction in computations[name]
        }
        for instruction in computations[name]:
            size = _moved_by_kernel(instruction, size_of, shares or {})
            if size is None:
                size = _moved(instruction, size_of, computations)
            total += place.trips * size
            kernels += place.trips * (not _is_free(instruction))
    return Traffic(total + sum(parted.values()), kernels)


def _moved_by_kernel(
    instruction: Instruction, size_of: Mapping[str, int], shares: Mapping[str, float]
) -> float | None:
    """As `_moved`, of a kernel that `shares` names; None: it is another instruction."""
    names = (name for name in shares if f"{name}/pallas_call" in instruction.tail)
    if instruction.code != "custom-call" or (name := next(names, None)) is None:
        return None
    operands = [size_of.get(operand, 0) for operand in hlo.operands(instruction)]
    overwritten = sum(operands[int(place)] for place in _ALIASED.findall(instruction.tail))
    return shares[name] * sum(operands) + size_of[instruction.name] - overwritten


def _is_free(instruction: Instruction) -> bool:
    """Whether it moves nothing and takes no kernel itself."""
    code = instruction.code
    return (
        code in FREE
        or code == "async-start"  # its computation is counted
        or code.endswith(("-done", "-update"))
        or instruction.name.startswith("async-collective-")  # its parts are in fusions
        or (code == "custom-call" and _PLANNED.search(instruction.tail) is not None)
    )


def _not_run(instruction: Instruction) -> list[str]:
    """Computations that are part of an instruction: fused ones, and those that reduce."""
    is_run = instruction.code in ("call", "conditional") or instruction.code.startswith("async-")
    return [] if is_run else instruction.called


def _moved(
    instruction: Instruction, size_of: Mapping[str, int], computations: Mapping[str, Any]
) -> float:
    if _is_free(instruction):
        return 0
    operands, code = hlo.operands(instruction), instruction.code.removesuffix("-start")
    result_size = size_of[instruction.name]
    if code in SLICES:
        part = _OF_START.sub("", instruction.result)
        in_memory = size_of.get(operands[0], 0) > 0
        return in_memory * _bytes(part, everywhere=True) + _bytes(part)
    if code == "dynamic-update-slice":
        return 2 * size_of.get(operands[1], 0)
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
