"""What a compiled program does, read from its text: loops, arrays, and collectives.

The text is that of the optimised HLO, `compiled.as_text()`, of XLA for CPUs, GPUs and TPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?)\s([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)|branch_computations=\{([^}]*)\}")
_BRANCHES = re.compile(r"\b(?:true|false)_computation=%?([\w.-]+)")
_LOOP = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAMED_TRIPS = re.compile(r'op_name="[^"]*\btrips_(\d+)\)*/while"')
_INDEX = re.compile(r"index=(\d+)")
CHANNEL = re.compile(r"channel_id=(\d+)")
_NAMED_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r"\s*\{([^}]*)\}"
)
_COUNTED_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")


class Array(NamedTuple):
    """An array of a program, as one device holds it."""

    dtype: str  # as HLO names it: "f32", "bf16"
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Numbers of less than a byte count as one."""
        bits = re.sub(r"[^0-9]", "", self.dtype) or "8"
        return math.prod(self.shape) * max(1, int(bits) // 8)


class Instruction(NamedTuple):
    name: str
    result: str  # its type as HLO text
    code: str
    tail: str  # operands and attributes
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        matches = _ARRAY.findall(self.result)
        return [Array(kind + bits, _numbers(sizes)) for kind, bits, sizes in matches]

    @property
    def bytes(self) -> int:
        """Of the largest array of the result."""
        return max((array.bytes for array in self.arrays), default=0)

    @property
    def called(self) -> list[str]:
        """The computations that it runs once."""
        names = [*_BRANCHES.findall(self.tail)]
        for callee, branches in _CALLED.findall(self.tail):
            names += [callee] if callee else [name.strip(" %") for name in branches.split(",")]
        return names


class Collective(NamedTuple):
    """A collective, with how often it runs."""

    kind: str  # of KINDS
    axes: tuple[str, ...]  # of the mesh, those along which its groups extend
    arrays: tuple[Array, ...]  # what it gives, on each device
    group: int  # devices of a group
    trips: int  # how often a call of the program runs it, at the most
    depth: int  # loops round it
    source: str  # what JAX calls the operation that it was made for

    @property
    def sent(self) -> float:
        """Bytes that a device sends each time, by algorithms that send least.

        With n devices and S bytes of the result on each: all-gather and all-to-all (n-1)/n S,
        all-reduce 2 (n-1)/n S, reduce-scatter (n-1) S, collective-permute S.
        """
        size, n = sum(array.bytes for array in self.arrays), max(1, self.group)
        return (
            size
            * {
                "all-gather": (n - 1) / n,
                "all-to-all": (n - 1) / n,
                "all-reduce": 2 * (n - 1) / n,
                "reduce-scatter": n - 1,
                "collective-permute": 1,
            }[self.kind]
        )


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation of a program, and the name of that it begins with."""
    bodies: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            body = bodies[opened[2]] = []
            entry = opened[2] if opened[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, result, code, tail = match.groups()
            body.append(Instruction(name, result, code, tail, root is not None))
    return bodies, entry


class Place(NamedTuple):
    """Where a computation stands: how often it runs at the most, and within how many loops."""

    trips: int
    depth: int


def places(
    bodies: Mapping[str, Sequence[Instruction]], entry: str, unknown: Sequence[int]
) -> dict[str, Place]:
    """Where each computation stands; where it is called from several places, the most trips.

    Args:
      unknown: trips of the loops whose end the program computes: of the outermost such loop, of one
        within it, and so on. The last holds for all that are deeper.
    """
    placed: dict[str, Place] = {}

    def visit(name: str, trips: int, depth: int, open_loops: int) -> None:
        old = placed.get(name)
        if name not in bodies or (old is not None and old.trips >= trips):
            return
        placed[name] = Place(trips, depth)
        for instruction in bodies[name]:
            for called in instruction.called:
                visit(called, trips, depth, open_loops)
            loop = _LOOP.search(instruction.tail) if instruction.code == "while" else None
            if loop is None:
                continue
            count = _trips(instruction, *(bodies.get(name, ()) for name in loop.groups()))
            inner_loops = open_loops + (count is None)
            if count is None:
                count = unknown[min(open_loops, len(unknown) - 1)]
            visit(loop[2], trips * count, depth + 1, inner_loops)

    visit(entry, 1, 0, 0)
    return placed


def _trips(
    loop: Instruction, condition: Sequence[Instruction], body: Sequence[Instruction]
) -> int | None:
    """How often a loop runs that counts from 0 to a constant, or whose name says it (the blocks of
    `models.kernels.expert_rows`); None: the program computes it."""
    if match := _TRIPS.search(loop.tail) or _NAMED_TRIPS.search(loop.tail):
        return int(match[1])
    constants, root = _constants(condition), _root(condition)
    if root is None or root.code != "compare" or "direction=LT" not in root.tail:
        return None
    counter, *limit = operands(root)
    if not limit or limit[0] not in constants:
        return None
    place = next(
        (
            _INDEX.search(instruction.tail)
            for instruction in condition
            if instruction.name == counter
        ),
        None,
    )
    return -(-constants[limit[0]] // _step(body, int(place[1]) if place else 0))


def _step(body: Sequence[Instruction], place: int) -> int:
    """What the body of a loop adds to the counter, which is at a place of what it carries."""
    root, by_name = _root(body), {instruction.name: instruction for instruction in body}
    carried = operands(root) if root is not None and root.code == "tuple" else []
    increment = by_name.get(carried[place]) if place < len(carried) else None
    constants = _constants(body)
    if increment is None or increment.code != "add":
        return 1
    return next((constants[name] for name in operands(increment) if name in constants), 1)


def _constants(body: Sequence[Instruction]) -> dict[str, int]:
    matches = (
        (instruction, re.match(r"(\d+)\)", instruction.tail))
        for instruction in body
        if instruction.code == "constant"
    )
    return {instruction.name: int(match[1]) for instruction, match in matches if match}


def _root(body: Sequence[Instruction]) -> Instruction | None:
    return next((instruction for instruction in body if instruction.is_root), None)


def operands(instruction: Instruction) -> list[str]:
    """The names of what an instruction takes."""
    return re.findall(r"%([\w.-]+)", instruction.tail.split(")")[0])


def collectives(
    text: str, axes: Mapping[str, int], unknown: Sequence[int] = (1,)
) -> list[Collective]:
    """The collectives of a program that is compiled for a mesh.

    A TPU takes a collective apart, to compute in between: the parts, inside fusions, share its
    channel and count as one, with the fewest trips of them: some stand in loops of what is computed
    in between, which the collective is not part of. And its reduce-scatter is a fusion of an
    all-reduce and the slice that is kept.

    Args:
      axes: the mesh, name of an axis -> its size, in the order of its devices.
      unknown: as in `places`.
    """
    bodies, entry = computations(text)
    placed = places(bodies, entry, unknown)
    parts = {
        name for body in bodies.values() for instruction in body for name in fused(instruction)
    }
    by_channel: dict[tuple[str, str], Collective] = {}
    standalone: list[Collective] = []
    for name, place in placed.items():
        for instruction in bodies[name]:
            kind = instruction.code.removesuffix("-start")
            if kind not in KINDS:
                continue
            group, group_axes = _extent(instruction.tail, axes)
            source = _SOURCE.search(instruction.tail)
            operation, outputs = source[1] if source else "", _outputs(instruction)
            if kind == "all-reduce" and (sliced := _sliced_output(instruction, bodies[name])):
                kind, outputs = "reduce-scatter", sliced
            collective = Collective(kind, group_axes, tuple(outputs), group, *place, operation)
            channel = CHANNEL.search(instruction.tail)
            if name in parts and channel:
                key = kind, channel[1]
                if key not in by_channel or collective.trips < by_channel[key].trips:
                    by_channel[key] = collective
            else:
                standalone.append(collective)
    return [
        collective for collective in (*by_channel.values(), *standalone) if collective.group > 1
    ]


def arrays(text: str) -> Iterator[Array]:
    """Every array that an instruction of a program gives, those inside fusions too."""
    for body in computations(text)[0].values():
        for instruction in body:
            yield from instruction.arrays


def fused(instruction: Instruction) -> list[str]:
    """The computation that a fusion is."""
    return instruction.called if instruction.code == "fusion" else []


def _sliced_output(instruction: Instruction, body: Sequence[Instruction]) -> list[Array]:
    """The slice of an all-reduce that its computation gives, where it gives nothing else."""
    root = _root(body)
    if root is None or root.code != "dynamic-slice" or operands(root)[0] != instruction.name:
        return []
    return root.arrays


def _outputs(instruction: Instruction) -> list[Array]:
    """What a collective gives. A -start gives a tuple of what it takes and then of that."""
    if not instruction.code.endswith("-start") or instruction.code == "all-reduce-start":
        return instruction.arrays
    count = len(operands(instruction))
    return instruction.arrays[count : 2 * count]


def _extent(attributes: str, axes: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """Devices of a group of a collective, and the axes of the mesh along which it extends."""
    total = math.prod(axes.values())
    groups = _groups(attributes, total)
    if not groups:
        return total, tuple(name for name, size in axes.items() if size > 1)
    grid = np.stack(np.unravel_index(np.arange(total), tuple(axes.values())), -1)
    group_axes = set()
    for group in groups:
        differs = (grid[group] != grid[group[0]]).any(0)
        group_axes |= {name for name, varies in zip(axes, differs, strict=True) if varies}
    return max(map(len, groups)), tuple(name for name in axes if name in group_axes)


def _groups(attributes: str, total: int) -> list[list[int]]:
    """The groups of devices, by their place in the mesh; none: all devices are one group."""
    if named := _NAMED_GROUPS.search(attributes):
        sizes, shape, order, group_axes = named.groups()
        return _named_groups(sizes, group_axes, _counted(total, shape or str(total), order))
    if counted := _COUNTED_GROUPS.search(attributes):
        shape, ids_shape, order = counted.groups()
        return _counted(total, ids_shape, order).reshape(_numbers(shape)).tolist()
    match = _PAIRS.search(attributes) or _LISTED_GROUPS.search(attributes)
    listed = re.findall(r"\{([\d, ]+)\}", match[0]) if match else []
    return [list(_numbers(group)) for group in listed]


def _counted(total: int, shape: str, order: str | None) -> np.ndarray:
    """0, 1, ... as an array of a shape whose dimensions are then put in another order."""
    ids = np.arange(total).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _named_groups(sizes: str, group_axes: str, devices: np.ndarray) -> list[list[int]]:
    """Groups along axes of a mesh that the program names itself: 'a'=2,'b'=4 and 'b', or 'b':(1)2,
    a part of an axis: behind 1 place of it, 2."""
    shape: list[int] = []
    parts: dict[str, list[int]] = {}  # of an axis, the dimensions that it is cut into
    axis_cuts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", group_axes)
    for name, size in re.findall(r"'([^']+)'=(\d+)", sizes):
        cut = next(((int(a), int(b)) for axis, a, b in axis_cuts if axis == name and a), None)
        pieces = [int(size)] if cut is None else [cut[0], cut[1], int(size) // (cut[0] * cut[1])]
        parts[name] = [len(shape) + (1 if cut else 0)]
        shape += pieces
    inner = [dimension for name, *_ in axis_cuts for dimension in parts[name]]
    outer = [dimension for dimension in range(len(shape)) if dimension not in inner]
    ids = devices.reshape(shape).transpose(outer + inner)
    return ids.reshape(-1, math.prod(shape[dimension] for dimension in inner)).tolist()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
