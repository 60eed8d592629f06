"""Configurations near one that does not fit, and all that might, by formula and by compiling."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxgrpo.config import files
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError
from jaxgrpo.planning import plan, programs
from jaxgrpo.planning.plan import Plan, Telling
from jaxgrpo.planning.programs import Run
from jaxgrpo.planning.topologies import Topology
from jaxgrpo.training import memory

SECONDS = 25.0  # for what would fit: the command answers within 45
MESH_SECONDS = 8.0  # of them, for a mesh that fits other devices
ROOM = 0.9
"""Of a chip's memory, what the formulas may fill of a run that is looked for: they were within 10%
of the compiler for the programs of tests/planning."""
MOST_TENSOR = 16
"""Devices that are tried for the axis "tensor"."""
MOST_SHOWN = 3
"""Configurations that are looked for."""
_PROMPTS = "rollout.prompts_per_step"
LORA: dict[str, float] = {"lora.rank": 64, "lora.alpha": 64.0}
"""Rank of the paper's runs in configs/experiments/x3_paper.toml; alpha as rank: scale 1."""


class Candidate(NamedTuple):
    """A changed configuration, and what the formulas say of it."""

    changes: dict[str, Any]  # key of the config -> value
    peak: int  # bytes on each device
    seconds: float  # of a step at the least, without what devices tell one another

    @property
    def overrides(self) -> str:
        """As --set takes them."""
        return " ".join(f"{key}={_toml(value)}" for key, value in self.changes.items())

    def behind(self, changes: dict[str, Any]) -> Candidate:
        """The candidate with what was changed of the config before."""
        return self._replace(changes=changes | self.changes)


def by_formula(run: Run, topology: Topology) -> tuple[int, float]:
    """(peak bytes on each device, least seconds of a step) of a run, without compiling."""
    bounds = [bound for _, bound in plan.formula(run, topology).values()]
    return plan.peak_bytes(plan.memory_parts(run)), sum(bound.seconds for bound in bounds)


class Search(NamedTuple):
    """Looks for configurations near a config on the devices of a topology."""

    config: Config
    topology: Topology

    def nearest(self) -> Candidate:
        """The nearest configuration that these devices, and not the config's own, can be used with.

        `tensor` stays as near as it can, then `context`, then `fsdp`, and `data` takes the rest; of
        those the first that fits into memory by formula, else the first. Where none divides the
        prompts of a step, there are more of them.

        Raises: InputError where the config cannot be built, whatever the mesh.
        """
        programs.read_model_config(self.config.model, self.config.lora)
        nearest, until = None, time.monotonic() + MESH_SECONDS
        shapes = sorted(self._shapes(), key=lambda changes: _PROMPTS in changes)
        for changes in shapes:
            if nearest and (time.monotonic() > until or _PROMPTS in changes):
                break
            candidate = self._build_candidate(changes)
            if candidate and candidate.peak <= self._room:
                return candidate
            nearest = nearest or candidate
        return nearest or self._candidate(shapes[0])

    def remedies(self, began: float) -> list[Candidate]:
        """The nearest configurations that should fit, the fewest changes first.

        What may change: the mesh, the micro-batch, the slots, what is recomputed, and last whether
        adapters are trained in place of all weights.

        Args:
          began: a `time.monotonic()`; the search ends `SECONDS` after it.
        """
        candidates: list[Candidate] = []
        until = began + SECONDS
        for changes in self._changes():
            if len(candidates) == MOST_SHOWN or time.monotonic() > until:
                break
            candidate = self._build_candidate(changes)
            if candidate is not None and candidate.peak <= self._room:
                candidates.append(candidate)
        return candidates

    def fastest(self, telling: Telling) -> Iterator[tuple[Candidate, Plan]]:
        """The meshes that fit and are fastest by formula, each compiled.

        Args:
          telling: as in `plan.plan`.
        """
        candidates = (self._build_candidate(changes) for changes in self._meshes(True))
        fitting = [
            candidate
            for candidate in candidates
            if candidate is not None and candidate.peak <= self._room
        ]
        for candidate in sorted(fitting, key=lambda fit: fit.seconds)[:MOST_SHOWN]:
            run = programs.build_run(self.changed(candidate.changes), self.topology.devices)
            yield candidate, plan.plan(run, self.topology, telling=telling)

    def changed(self, changes: dict[str, Any]) -> Config:
        """The config with some keys changed; None takes a key out."""
        tables = files.to_tables(self.config)
        for key, value in changes.items():
            table, name = key.split(".")
            if value is None:
                tables[table].pop(name, None)
            else:
                tables.setdefault(table, {})[name] = value
        return files.from_dict(tables, source=self.config.source)

    def fits(self, run: Run) -> bool:
        """Whether a run fits into memory by formula; what is looked for has to leave more room."""
        return by_formula(run, self.topology)[0] <= self.topology.chip.memory

    @property
    def _room(self) -> float:
        return ROOM * self.topology.chip.memory

    def _candidate(self, changes: dict[str, Any]) -> Candidate:
        run = programs.build_run(self.changed(changes), self.topology.devices)
        return Candidate(changes, *by_formula(run, self.topology))

    def _build_candidate(self, changes: dict[str, Any]) -> Candidate | None:
        """A candidate, if it can be built."""
        try:
            return self._candidate(changes)
        except InputError:
            return None

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Changes of the config, from the smallest."""
        config = self.config
        smaller: list[dict[str, Any]] = []
        if config.train.tokens_per_micro_batch is not None:
            smaller.append({"train.tokens_per_micro_batch": None})
        if config.rollout.slots is not None:
            smaller.append({"rollout.slots": None})
        if config.train.remat not in ("auto", "full"):
            smaller.append({"train.remat": "full"})
        meshes = list(self._meshes(False))
        adapters = [] if config.lora.rank or config.lora.path else [LORA]
        yield from smaller
        yield from meshes
        yield from (mesh | change for mesh, change in itertools.product(meshes, smaller))
        all_smaller = {key: value for change in smaller for key, value in change.items()}
        yield from (LORA | all_smaller for _ in adapters)
        yield from (
            mesh | adapter | all_smaller for mesh, adapter in itertools.product(meshes, adapters)
        )

    def _shapes(self) -> Iterator[dict[str, Any]]:
        """Meshes over all the devices, those nearest to the config's first, with enough prompts."""
        config, topology = self
        slice_devices, mesh = len(topology.devices) // topology.slices, config.mesh
        sizes = [size for size in range(1, slice_devices + 1) if slice_devices % size == 0]

        def distance(shape: tuple[int, int, int]) -> list[float]:
            pairs = zip(shape, (mesh.tensor, mesh.context, mesh.fsdp), strict=True)
            return [abs(math.log(size / current)) for size, current in pairs]

        three = itertools.product(sizes, sizes, sizes)
        for tensor, context, fsdp in sorted(three, key=distance):
            inner = tensor * context
            if context > mesh.context or slice_devices % (inner * fsdp) or tensor > MOST_TENSOR:
                continue
            bins, prompts = len(topology.devices) // inner, config.rollout.prompts_per_step
            shape = {"data": 0, "fsdp": fsdp, "tensor": tensor, "context": context}
            differs = {
                f"mesh.{key}": size for key, size in shape.items() if size != getattr(mesh, key)
            }
            if prompts % bins:
                differs[_PROMPTS] = bins * math.ceil(prompts / bins)
            yield differs
            if mesh.sampling_tensor:
                yield {**differs, "mesh.sampling_tensor": 0}

    def _meshes(self, with_current: bool) -> Iterator[dict[str, Any]]:
        """Other meshes over the devices: those that divide the parameters most, first.

        Args:
          with_current: with the config's own.
        """
        config, topology = self
        count, slices = len(topology.devices), topology.slices
        slice_devices = count // slices
        current = (config.mesh.fsdp, config.mesh.tensor)
        sizes = [size for size in range(1, slice_devices + 1) if slice_devices % size == 0]
        pairs = [
            (fsdp, tensor)
            for fsdp, tensor in itertools.product(sizes, sizes)
            if slice_devices % (fsdp * tensor * config.mesh.context) == 0 and tensor <= MOST_TENSOR
        ]
        for fsdp, tensor in sorted(pairs, key=lambda pair: (-pair[0] * pair[1], pair[1])):
            if with_current or (fsdp, tensor) != current:
                yield {"mesh.data": 0, "mesh.fsdp": fsdp, "mesh.tensor": tensor}


def blame(run_plan: Plan) -> Sequence[tuple[str, int]]:
    """What takes most of each device's memory, by formula, the largest first."""
    return sorted(run_plan.parts.items(), key=lambda part: -part[1])[:4]


def _toml(value: Any) -> str:
    """A value as --set takes it; None, a key that is taken out, is nothing behind the =."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(candidate: Candidate) -> str:
    """In words."""
    return f"{candidate.overrides}  ({memory.shown(candidate.peak)} by formula)"
