"""The plan of a run: its programs compiled for a topology, their memory, costs and bounds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgrpo.core.errors import one_line
from jaxgrpo.core.types import WEIGHTS
from jaxgrpo.models import sharding
from jaxgrpo.planning import costs, hlo, programs
from jaxgrpo.planning.costs import Bound, Work
from jaxgrpo.planning.hlo import Collective
from jaxgrpo.planning.programs import Program, Run
from jaxgrpo.planning.topologies import Topology
from jaxgrpo.planning.traffic import Traffic, read_traffic
from jaxgrpo.training import memory

TOO_MUCH = 1.3
"""Times a chip's memory, from which on nothing is compiled: the formulas err by less."""
_FULL = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT])\)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


Telling = Callable[[str], contextlib.AbstractContextManager[None]]
"""What says, while its block runs, what is done."""


class Planned(NamedTuple):
    """One program of a run, on each device."""

    name: str
    arguments: int  # bytes
    temporaries: int
    outputs: int  # bytes that are not written over arguments
    donated: int
    aliased: int  # of them, what is written over
    beside: int  # bytes that lie in memory meanwhile and are not its own
    seconds: float  # of compiling it
    work: Work
    traffic: Traffic  # of a call
    collectives: tuple[Collective, ...]
    bound: Bound

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs + self.beside


class Plan(NamedTuple):
    """What `jaxgrpo plan` finds."""

    topology: Topology
    run: Run
    parts: dict[str, int]  # what is kept on each device -> bytes, by formula
    formula: dict[str, tuple[Work, Bound]]  # of each program, without what devices send
    planned: tuple[Planned, ...]
    problem: str  # why a program does not fit, as the compiler says it; "": all fit

    @property
    def limit(self) -> int:
        return self.topology.chip.memory

    @property
    def peak(self) -> int:
        """As compiled; where nothing is, by formula."""
        return max((program.peak for program in self.planned), default=peak_bytes(self.parts))

    @property
    def fits(self) -> bool:
        return not self.problem and self.peak <= self.limit

    @property
    def seconds(self) -> float:
        """Of a step at the least; where nothing is compiled, by formula."""
        compiled = [program.bound for program in self.planned]
        bounds = compiled or [bound for _, bound in self.formula.values()]
        return sum(bound.seconds for bound in bounds)

    @property
    def tokens(self) -> int:
        """Completion tokens of a step at the most."""
        geometry = self.run.blueprint.geometry
        return geometry.num_prompts * geometry.group_size * geometry.max_completion_tokens


def by_formula(run: Run, topology: Topology, most: float = TOO_MUCH) -> Plan:
    """The plan of a run before anything is compiled.

    Its `problem` says where the run takes too much memory, and compiling would be in vain.

    Args:
      most: times a chip's memory that are not yet too much.
    """
    parts = memory_parts(run)
    in_vain = peak_bytes(parts) > most * topology.chip.memory
    problem = f"by formula it takes {memory.shown(peak_bytes(parts))}, so nothing was compiled"
    return Plan(topology, run, parts, formula(run, topology), (), problem if in_vain else "")


def formula(run: Run, topology: Topology) -> dict[str, tuple[Work, Bound]]:
    """The work of each program of a run, and its least seconds without what devices send."""
    chip, devices, work = topology.chip, len(topology.devices), costs.program_work(run)
    names = programs.program_names(run)
    return {
        name: (work[name], costs.program_bound(work[name], (), chip, devices, {})) for name in names
    }


def plan(
    run: Run,
    topology: Topology,
    names: Sequence[str] = programs.NAMES,
    dump: Any = None,
    telling: Telling = contextlib.nullcontext,
    finished: Callable[[Planned], None] = lambda _: None,
) -> Plan:
    """Compiles the programs of a run for a topology and reads what they take.

    Args:
      names: of the programs.
      dump: a folder for the text of each program; None: none is written.
      telling: a context round the compilation of each program, of what it does.
      finished: gets each program when it is compiled.
    """
    planned, problem = [], ""
    names = programs.program_names(run, names)
    compiled = programs.compiled(run, names)
    try:
        for place, name in enumerate(names, start=1):
            with telling(f"compiling {name} ({place} of {len(names)})"):
                planned.append(_read(run, next(compiled), topology, dump))
            finished(planned[-1])
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise
        problem = one_line(error)
    return Plan(topology, run, memory_parts(run), formula(run, topology), tuple(planned), problem)


def program_mesh(run: Run, name: str) -> Mesh:
    """The mesh whose devices a program's collectives count."""
    sampling = name in ("prefill", "decode")
    return run.blueprint.samples_on if sampling else run.blueprint.mesh


def is_full(error: BaseException) -> bool:
    """Whether a compiler says that a program does not fit into memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def needed(problem: str) -> int | None:
    """The bytes that a compiler says a program takes, if its message tells."""
    match = _FULL.search(problem)
    return int(float(match[1]) * 1024 ** _POWERS[match[2]]) if match else None


def memory_parts(run: Run) -> dict[str, int]:
    """What a run keeps on each device, by formula: name -> bytes."""
    blueprint = run.blueprint
    sizes = run.memory
    return {
        "parameters": sizes.parameters,
        "frozen weights": sizes.frozen,
        "optimizer": sizes.optimizer,
        "other policies": sizes.copies,
        "sampler's weights, logits": sizes.sampler,
        "caches and samples": sizes.decode,
        **memory.update_bytes(
            blueprint.model,
            blueprint.mesh,
            blueprint.optimizer,
            blueprint.geometry.tokens,
            blueprint.remat,
            blueprint.logits_per_chunk,
            blueprint.objective,
        ),
    }


RESIDENT = ("parameters", "frozen weights", "optimizer", "other policies")
SAMPLING = ("sampler's weights, logits", "caches and samples")


def peak_bytes(parts: Mapping[str, int]) -> int:
    """Bytes that a run takes at the most, by formula: what it keeps, and sampling or updating."""
    resident, sampling = (sum(parts[name] for name in names) for names in (RESIDENT, SAMPLING))
    return resident + max(sampling, sum(parts.values()) - resident - sampling)


def islands(mesh: Mesh) -> dict[str, int]:
    """Axis -> how many slices (of GPUs hosts) it crosses."""
    parts = sharding.islands(mesh.devices.flatten().tolist())
    crossed = {}
    for place, name in enumerate(mesh.axis_names):
        lines = np.moveaxis(mesh.devices, place, -1).reshape(-1, mesh.devices.shape[place])
        crossed[name] = max(len({parts.place(device) for device in line}) for line in lines)
    return crossed


def _read(run: Run, program: Program, topology: Topology, dump: Any) -> Planned:
    text = program.compiled.as_text()
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
        (Path(dump) / f"{program.name}.hlo.txt").write_text(text, encoding="utf-8")
    analysis = program.compiled.memory_analysis()
    mesh, work = program_mesh(run, program.name), costs.program_work(run)[program.name]
    collectives = tuple(hlo.collectives(text, dict(mesh.shape), work.loops))
    traffic = read_traffic(text, work.loops)
    return Planned(
        name=program.name,
        arguments=analysis.argument_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        donated=program.donated,
        aliased=analysis.alias_size_in_bytes,
        beside=_beside(run, program),
        seconds=program.seconds,
        work=work,
        traffic=traffic,
        collectives=collectives,
        bound=costs.program_bound(
            work, collectives, topology.chip, len(topology.devices), islands(mesh), traffic
        ),
    )


def _beside(run: Run, program: Program) -> int:
    """Bytes of the run's state that a program does not read, of the base that evaluations keep,
    while it samples of what a sync has left, and in an update of the rest of a step's samples."""
    arguments = program.arguments
    if program.name == "sync":  # it is given the state, and reads the policy
        arguments = (run.learner.trainable, run.learner.frozen.get(WEIGHTS))
    argument_ids = {id(leaf) for leaf in jax.tree.leaves(arguments)}
    unread = [leaf for leaf in jax.tree.leaves(run.learner) if id(leaf) not in argument_ids]
    left = programs.left_by_sync(run) if program.name in ("prefill", "decode") else {}
    count = memory.on_device((unread, left)) + _outside_learner(run)
    if program.name == "update":
        count += memory.beside_update(run.blueprint.geometry, program.arguments[-1:])
    return count


def _outside_learner(run: Run) -> int:
    """Bytes of copies that a run keeps and its learner does not hold: the base of evaluations."""
    frozen = [tree for name, tree in run.learner.frozen.items() if name != WEIGHTS]
    return run.memory.copies - memory.on_device(frozen)


def each_axis(collectives: Sequence[Collective]) -> dict[tuple[str, tuple[str, ...]], float]:
    """(kind, axes) -> bytes that a device sends in one call of a program."""
    total: dict[tuple[str, tuple[str, ...]], float] = {}
    for collective in collectives:
        key = collective.kind, collective.axes
        total[key] = total.get(key, 0.0) + collective.sent * collective.trips
    return total
