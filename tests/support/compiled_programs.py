"""What must hold of the programs that a plan compiles; each function returns what is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgrpo.config import files
from jaxgrpo.planning import costs, hlo, plan, programs, topologies
from jaxgrpo.planning.hlo import Collective
from jaxgrpo.planning.plan import Plan
from jaxgrpo.rollout.slots.drawing import block_width

DECODING = 0.15
"""Of the arguments of decoding, the temporaries that it may take."""


class Compiled(NamedTuple):
    """A plan, and the text of its programs."""

    plan: Plan
    texts: dict[str, str]  # by the name of the program

    def collectives(self) -> Iterator[tuple[str, Collective]]:
        """(program, collective) of all programs."""
        run = self.plan.run
        work = costs.program_work(run)
        for name, text in self.texts.items():
            mesh = dict(plan.program_mesh(run, name).shape)
            yield from (
                (name, collective) for collective in hlo.collectives(text, mesh, work[name].loops)
            )


def compiled(
    config: str | dict[str, Any],
    folder: Path,
    *overrides: str,
    topology: str | None = None,
    names: tuple[str, ...] = programs.NAMES,
) -> Compiled:
    """The programs of a config for its topology.

    Args:
      config: a shipped config's name, or tables.
      folder: for their text.
    """
    read = files.from_dict(config) if isinstance(config, dict) else files.load(config, overrides)
    topology_name = topology or read.plan.topology
    assert topology_name is not None
    chips = topologies.topology(topology_name, 1 if topology else read.plan.slices)
    config_plan = plan.plan(programs.build_run(read, chips.devices), chips, names, dump=folder)
    texts = {
        program.name: (folder / f"{program.name}.hlo.txt").read_text()
        for program in config_plan.planned
    }
    return Compiled(config_plan, texts)


def problems(compilation: Compiled) -> list[str]:
    """All that is wrong."""
    return [
        *(
            f"does not fit: {compilation.plan.problem or compilation.plan.peak}"
            for _ in [0]
            if not compilation.plan.fits
        ),
        *full_logits(compilation),
        *float32_gathers(compilation),
        *gathered_vocabulary(compilation),
        *not_aliased(compilation),
        *large_decoding(compilation),
        *without_kernel(compilation),
    ]


def full_logits(compilation: Compiled) -> list[str]:
    """Arrays of the vocabulary, or a device's part of it, times the tokens of a micro-batch."""
    blueprint, sizes = compilation.plan.run.blueprint, _vocabularies(compilation.plan)
    tokens = blueprint.geometry.tokens // blueprint.mesh.shape["context"]
    assert tokens > blueprint.model.config.hidden_size, "weights would be taken for logits"
    findings = set()
    for name in ("score", "update"):
        for array in set(hlo.arrays(compilation.texts.get(name, ""))):
            vocabulary = max((size for size in _spans(array.shape) if size in sizes), default=0)
            if vocabulary and math.prod(array.shape) >= tokens * vocabulary:
                findings.add(f"{name}: {_shown(array)} holds the logits of {tokens} tokens or more")
    return sorted(findings)


def float32_gathers(compilation: Compiled) -> list[str]:
    """Weights that are gathered in more bits than they are computed with."""
    model, sizes = compilation.plan.run.blueprint.model, _weights(compilation.plan)
    assert model.config.dtype == "bfloat16", "weights of float32 are gathered in float32"
    # A router is computed in float32. A part of another map may have its shape, but not all maps.
    routers = {
        leaf.shape[-2:]
        for path, leaf in jax.tree.leaves_with_path(model.shapes)
        if "router" in jax.tree_util.keystr(path)
    }
    return [
        f"{name}: gathers {_shown(array)}: {_described(collective)}"
        for name, collective in compilation.collectives()
        for array in collective.arrays
        if collective.kind == "all-gather"
        and array.dtype == "f32"
        and math.prod(array.shape) in sizes
        and tuple(size for size in array.shape if size > 1) not in routers
    ]


def gathered_vocabulary(compilation: Compiled) -> list[str]:
    """Collectives as large as the vocabulary inside loops. Sampling has none. Training may gather
    the head once for each micro-batch; its gradient is added up there only by objectives that
    take two passes over the logits."""
    sizes, objective = _vocabularies(compilation.plan), compilation.plan.run.blueprint.objective

    def loops(name: str, kind: str) -> int:
        """How many it may stand in."""
        training = name in ("score", "update")
        return int(training and (kind == "all-gather" or not objective.per_token))

    return [
        f"{name}: {collective.kind} of {_shown(array)}: {_described(collective)}"
        for name, collective in compilation.collectives()
        for array in collective.arrays
        if collective.depth > loops(name, collective.kind) and _spans(array.shape) & sizes
    ]


def not_aliased(compilation: Compiled) -> list[str]:
    """Programs that keep two copies of what they are given to overwrite."""
    return [
        f"{program.name}: {program.donated} bytes are donated, {program.aliased} written over"
        for program in compilation.plan.planned
        if program.aliased < program.donated
    ]


def large_decoding(compilation: Compiled) -> list[str]:
    """Decoding that takes more beside its arguments than DECODING of them."""
    return [
        f"decode: temporaries are {program.temporaries / program.arguments:.0%} of its arguments"
        for program in compilation.plan.planned
        if program.name == "decode" and program.temporaries > DECODING * program.arguments
    ]


def without_kernel(compilation: Compiled) -> list[str]:
    """An update whose attention is not the kernel that the plan names."""
    kernel, text = compilation.plan.run.blueprint.kernel.name, compilation.texts.get("update")
    if kernel != "splash" or text is None:
        return []
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return [] if any("splash" in line for line in calls) else ["update: no splash attention in it"]


def _vocabularies(config_plan: Plan) -> set[int]:
    """The sizes of the vocabulary and of a device's part, with and without what fills up blocks."""
    blueprint = config_plan.run.blueprint
    vocab, sizes = blueprint.model.config.vocab_size, set()
    width = block_width(vocab)
    for mesh in (blueprint.mesh, blueprint.samples_on):
        ways = mesh.shape["tensor"]
        filled = width * ways * math.ceil(math.ceil(vocab / width) / ways)
        sizes |= {size // part for size in (vocab, filled) for part in (1, ways)}
    return sizes


def _spans(shape: tuple[int, ...]) -> set[int]:
    """Its dimensions, and the products of two that follow one another: a vocabulary in blocks."""
    real = [size for size in shape if size > 1]
    return {*real, *(a * b for a, b in itertools.pairwise(real))}


def _weights(config_plan: Plan) -> set[int]:
    """How many numbers the weights of linear maps in the model's dtype have: whole or stacked, and
    a device's part."""
    model, sizes = config_plan.run.blueprint.model, set()
    meshes = config_plan.run.blueprint.mesh, config_plan.run.blueprint.samples_on
    parts = {mesh.shape["tensor"] for mesh in meshes} | {1}
    for path, leaf in jax.tree.leaves_with_path(model.shapes):
        stacked = "blocks" in (name := jax.tree_util.keystr(path))
        # No norm, and no router: it is computed in float32.
        if len(leaf.shape) - stacked >= 2 and "router" not in name:
            numbers = math.prod(leaf.shape)
            each = math.prod(leaf.shape[1:]) if stacked else numbers
            sizes |= {size // part for size in (numbers, each) for part in parts}
    # What has fewer numbers than a hidden state may as well be an activation.
    return {size for size in sizes if size >= model.config.hidden_size}


def _shown(array: hlo.Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _described(collective: Collective) -> str:
    return (
        f"over {'+'.join(collective.axes)}, {collective.depth} loops deep, for {collective.source}"
    )
