"""What the compiler makes of sampler and update: memory, copies, size, and when it compiles."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import monitoring
from jax.experimental import topologies

from benchmarks.step import make_blueprint
from benchmarks.workloads import PAD, Workload, build, make_prompts
from jaxgrpo.models import decoder, sharding
from jaxgrpo.models.api import ModelConfig
from jaxgrpo.planning import hlo
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.capacity import Sizes
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.rollout.slots.programs import make_programs
from jaxgrpo.update import packing
from jaxgrpo.update.forward import opt_layout, param_layout
from jaxgrpo.update.step import build_steps

TPU, LARGER_TPU = "v5e:2x2", "v6e:2x2"
COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event for each program that a backend compiles, or reads from the compile cache."""


def large_copies(compiled_text: str, least_bytes: int) -> list[str]:
    """The copies and transposes of a compiled program whose result is large, wherever they stand.

    A fusion counts if its own result is large and a large copy or transpose is inside: it writes
    what it moved. One that reads transposed and writes little (a reduction, a product) does not
    count, nor do copy-start and copy-done, by which a TPU brings an array into its fast memory.

    Args:
      compiled_text: optimised HLO, `compiled.as_text()`.
      least_bytes: results of at least this size are large.

    Returns: "computation: name = type opcode" of each.
    """
    computations, _ = hlo.computations(compiled_text)
    fused = {
        name
        for body in computations.values()
        for instruction in body
        for name in hlo.fused(instruction)
    }

    def moves(instruction: hlo.Instruction) -> bool:
        if instruction.bytes < least_bytes:
            return False
        inside = [inner for name in hlo.fused(instruction) for inner in computations.get(name, [])]
        return instruction.code in ("copy", "transpose") or any(map(moves, inside))

    return [
        f"{name}: {instruction.name} = {instruction.result[:60]} {instruction.code}"
        for name, body in computations.items()
        if name not in fused
        for instruction in body
        if moves(instruction)
    ]


def instructions(compiled: Any) -> int:
    """How many instructions the optimised HLO of a program has, over all its computations."""
    return sum(map(len, hlo.computations(compiled.as_text())[0].values()))


class Program(NamedTuple):
    """A compiled program, with the seconds of its two stages."""

    compiled: Any
    trace_seconds: float  # from Python to what the compiler is given
    compile_seconds: float
    cache_elements: int = 0  # of the keys, or the values, of one layer, where it decodes

    @classmethod
    def compile(cls, function: Any, arguments: Sequence[Any], device: Any) -> Program:
        """A jitted function compiled for a device, which need not be there."""
        began = time.perf_counter()
        lowered = function.trace(*arguments).lower(lowering_platforms=(device.platform,))
        traced = time.perf_counter()
        compiled = lowered.compile()
        return cls(compiled, traced - began, time.perf_counter() - traced)

    def plan(self) -> dict[str, Any]:
        """Temporaries over arguments, and the copies as large as the keys of one layer."""
        memory = self.compiled.memory_analysis()
        # The compiler of a TPU makes bfloat16 copies of a float32 cache: half the bytes, all of it.
        copies = large_copies(self.compiled.as_text(), 2 * self.cache_elements)
        share = memory.temp_size_in_bytes / memory.argument_size_in_bytes
        return {"temporaries": share, "copies": copies, **self.size()}

    def size(self) -> dict[str, Any]:
        memory = self.compiled.memory_analysis()
        return {
            "gib": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
            "instructions": instructions(self.compiled),
            # 0 bytes: the backend does not say.
            "code_bytes": memory.generated_code_size_in_bytes,
            "trace_seconds": self.trace_seconds,
            "compile_seconds": self.compile_seconds,
        }


def tpu_device(topology: str = TPU) -> Any:
    """One chip of a TPU that is not there, to compile for.

    Raises: RuntimeError without libtpu.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # it would look for a machine with a TPU
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def placed(tree: Any, layout: Any) -> Any:
    """Shapes of arrays with their layouts: a tree of them, or one for all."""

    def place(leaf: Any, leaf_layout: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=leaf_layout)

    return jax.tree.map(place, tree, jax.tree.broadcast(layout, tree))


def decode_program(
    config: ModelConfig, work: Workload, settings: SamplingSettings, device: Any
) -> Program:
    """Compiles the decoding of a workload for one device, which need not be there."""
    mesh = sharding.make_mesh(devices=[device])
    model = decoder.build(config, constrain=sharding.constrain(mesh))
    programs = make_programs(model, settings, mesh)
    layout = sharding.named(mesh)
    params = placed(jax.eval_shape(programs.split, model.shapes), layout)
    sizes = Sizes.for_prompts(settings.slots, 1, work.prompts, work.samples, work.longest)
    state = placed(jax.eval_shape(functools.partial(programs.begin, sizes)), layout)
    arguments = (sizes.aligned, params, state, placed(np.int32(0), layout))
    program = Program.compile(programs.decode, arguments, device)
    return program._replace(cache_elements=max(leaf.size for leaf in jax.tree.leaves(state.memory)))


def update_program(config: ModelConfig, work: Workload, device: Any, remat: str) -> Program:
    """Compiles the update of a workload for one device, which need not be there.

    Forward and backward pass, the sum over micro-batches, AdamW and what is measured.
    """
    mesh = sharding.make_mesh(devices=[device])
    blueprint = make_blueprint(config, work, mesh, remat=remat)
    params = placed(blueprint.model.shapes, param_layout(blueprint.model, blueprint.mesh))
    opt_state = placed(
        jax.eval_shape(blueprint.optimizer.init, params),
        opt_layout(blueprint.model, blueprint.mesh, blueprint.optimizer),
    )
    batch = packing.abstract_batch(blueprint.geometry, blueprint.objective.needs)
    batch = placed(batch, sharding.named(mesh))
    update = build_steps(blueprint).update_program
    return Program.compile(update, (params, opt_state, {}, {}, batch), device)


def deep_config(layers: int) -> ModelConfig:
    """Many layers, each so narrow that compiling is most of the work."""
    return ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of every compilation inside the block, as a list that grows."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            seconds.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        monitoring.unregister_event_duration_listener(listen)


def late_compilations(work: Workload, steps: int, warm_up: int) -> int:
    """How many programs `steps` steps of sampling compile after `warm_up` steps.

    The model is tiny; each step has other prompts, of other lengths.
    """
    model, params = build(deep_config(2), work.ragged)
    settings = SamplingSettings(work.completion, 1.0, work.stop_tokens, PAD, 8)
    engine = SlotEngine(model, settings, width=work.longest)
    key = jax.random.key_data(jax.random.key(0))

    def run(step: int) -> None:
        prompts = make_prompts(work, model.config.vocab_size, seed=step, step=step)
        draw(engine, params, prompts, key, work.samples).finish()

    for step in range(warm_up):
        run(step)
    with compilations() as seconds:
        for step in range(warm_up, warm_up + steps):
            run(step)
    return len(seconds)
