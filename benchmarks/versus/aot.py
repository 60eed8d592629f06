"""The update of Tunix beside ours, compiled for the same TPUs, which need not be here.

    python -m benchmarks.versus.aot [--models 0.6B,8B] [--topologies v5e:2x4,v6e:4x4]
                                    [--contenders jaxgrpo,packed,tunix,documented] [--layers N]
                                    [--dump DIR]

Nothing runs. Both update Qwen3 on the same 256 samples, prompts of 512 and completions of 1,024
tokens, all full, all weights trained by AdamW, fsdp over all chips (as in Tunix's run_qwen3_8b.sh),
no reference. What is printed is of one optimizer step, from the compiled programs:

  jaxgrpo     our update, its micro-batches of as many tokens as Tunix's: 1,536 on each chip
  packed      our update as it is by default: prompts once for each group, micro-batches as they fit
  tunix       Tunix's training step (tunix_step.py says what of it is whose), weights and moments in
              float32 and products in bfloat16 as ours; called once for each micro-batch
  documented  the same in the numbers that its command line gives Qwen3: weights and moments in
              bfloat16 as they lie on the hub, products in float32

Memory is XLA's plan for a chip. Operations are matrix products of the traced program, bytes of main
memory and bytes sent those of the optimised HLO, all with loops times their trips (counts.py,
jaxgrpo/planning/traffic.py).

Needs jaxgrpo[plan]; where Tunix is not installed, only ours is compiled: pip install google-tunix
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from benchmarks import contest
from benchmarks.common import describe, report
from benchmarks.versus import counts, tunix_step
from jaxgrpo.config import files
from jaxgrpo.config.files import Config
from jaxgrpo.models.logprobs import chunk_tokens
from jaxgrpo.planning import costs, hlo, plan, programs, traffic
from jaxgrpo.planning.topologies import Topology, quiet, topology
from jaxgrpo.training import memory

MODELS = {"0.6B": "qwen3_0p6b_v5e", "8B": "qwen3_8b_h100"}
"""Shipped configurations, of which the geometry, the batch and the method are taken."""
TOPOLOGIES = ("v5e:2x4", "v6e:4x4")
CONTENDERS = ("jaxgrpo", "packed", "tunix", "documented")
NUMBERS = {"tunix": ("float32", "bfloat16"), "documented": ("bfloat16", "float32")}
"""Dtypes of what is trained and of the products."""


class Lowered(NamedTuple):
    """A program that is traced for a topology, and how a step calls it."""

    traced: Any
    argument_bytes: int  # bytes of its arguments on each device
    calls: int  # of a step
    loops: tuple[int, ...]  # trips of its loops whose end is computed
    kernel: float  # operations of one product of attention, over all devices, in an iteration
    axes: Mapping[str, int]  # of the mesh
    around: Any  # a context for tracing and compiling


def load_config(name: str, chips: int, contender: str, extra: tuple[str, ...] = ()) -> Config:
    """Ours for a model on so many chips."""
    overrides = [f"mesh.fsdp={chips}", "mesh.tensor=1", *extra]
    config = files.load(name, overrides)
    if contender == "packed":
        return config
    longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    as_theirs = f"train.tokens_per_micro_batch={longest}", "train.remat=full"
    return files.load(name, [*as_theirs, *overrides])


def ours(run: programs.Run) -> Lowered:
    """Our update program, on prompts and completions that are all full."""
    arguments = memory.update_arguments(
        run.blueprint.geometry, run.blueprint.objective, run.blueprint.mesh, run.learner
    )
    geometry, config = run.blueprint.geometry, run.blueprint.model.config
    micro, tokens, prompts = costs.full_batch(geometry)
    logits = run.blueprint.logits_per_chunk
    chunks = math.ceil(tokens / chunk_tokens(config.vocab_size, geometry.tokens, logits))
    samples = geometry.num_prompts * geometry.group_size
    return Lowered(
        traced=run.steps.update_program.trace(*arguments),
        argument_bytes=memory.on_device(arguments),
        calls=run.config.train.num_iterations * run.config.train.minibatches,
        loops=(micro, chunks),
        # A layer has two kernels with as many products each: of prompts, and of completions.
        kernel=attention_operations(run, prompts, samples) / (2 * micro),
        axes=dict(run.blueprint.mesh.shape),
        around=nullcontext(),
    )


def attention_operations(run: programs.Run, prompts: int, samples: int) -> float:
    """Operations of one product of a layer's attention, of queries with keys they see."""
    geometry, config = run.blueprint.geometry, run.blueprint.model.config
    width, steps = geometry.max_prompt_tokens, geometry.max_completion_tokens
    total = prompts * costs.attention_flops(config, 0, width)
    total += samples * costs.attention_flops(config, width, steps)
    return total / (2 * config.num_layers)


def theirs(run: programs.Run, devices: Topology, contender: str) -> Lowered:
    """Tunix's training step, for the samples of a step of ours."""
    geometry, chips = run.blueprint.geometry, len(devices.devices)
    samples = geometry.num_prompts * geometry.group_size
    sizes = tunix_step.Sizes(
        rows=chips,
        prompt=geometry.max_prompt_tokens,
        completion=geometry.max_completion_tokens,
        calls=samples // chips,
    )
    mesh = tunix_step.device_mesh(devices.devices, chips, 1)
    rate = run.config.optimizer.learning_rate
    config = run.blueprint.model.config
    traced, argument_bytes = tunix_step.trace(config, mesh, sizes, *NUMBERS[contender], rate)
    return Lowered(
        traced=traced,
        argument_bytes=argument_bytes,
        calls=sizes.calls,
        loops=(1,),
        kernel=attention_operations(run, samples, samples) / sizes.calls,
        axes={"fsdp": chips, "tp": 1},
        around=tunix_step.on(mesh),
    )


def measured(lowered: Lowered, devices: Topology, dump: Path | None = None) -> dict[str, Any]:
    """What a step takes on each chip. Where the compiler finds no room, what it asks for.

    Nothing is compiled where the arguments alone fill a chip.

    Args:
      dump: a file for the text of the program.
    """
    chips, platform = len(devices.devices), devices.devices[0].platform
    calls, began = lowered.calls, time.perf_counter()
    flops = calls * counts.products(lowered.traced.jaxpr, lowered.loops, lowered.kernel)
    result: dict[str, Any] = {
        "calls": calls,
        "flops": flops / chips,
        "arguments": lowered.argument_bytes,
    }
    if lowered.argument_bytes > devices.chip.memory:
        return {**result, "fits": False}
    try:
        with lowered.around:
            program = lowered.traced.lower(lowering_platforms=(platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        if not plan.is_full(error):
            raise
        return {**result, "fits": False, "peak": plan.needed(str(error))}
    result |= {"fits": True, "compile_seconds": time.perf_counter() - began}
    text, sizes = program.as_text(), program.memory_analysis()
    if dump is not None:
        dump.parent.mkdir(parents=True, exist_ok=True)
        dump.write_text(text, encoding="utf-8")
    fresh = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    argument_bytes, scratch = sizes.argument_size_in_bytes, sizes.temp_size_in_bytes
    largest = max(hlo.arrays(text), key=lambda array: array.bytes)
    sent: dict[str, float] = {}
    for collective in hlo.collectives(text, lowered.axes, lowered.loops):
        sent[collective.kind] = (
            sent.get(collective.kind, 0.0) + calls * collective.sent * collective.trips
        )
    return result | {
        "peak": argument_bytes + scratch + fresh,
        "arguments": argument_bytes,
        "temporaries": scratch,
        "outputs": fresh,
        "largest": f"{largest.dtype}{list(largest.shape)}",
        "largest_bytes": largest.bytes,
        "moved": calls * traffic.read_traffic(text, lowered.loops).moved,
        "sent": sum(sent.values()),
        "sent_by_kind": sent,
    }


def main() -> None:
    arguments = options()
    quiet(os.environ)
    jax.config.update("jax_platforms", "cpu")  # what is compiled for is not here
    console = Console(width=120)
    versions = {name: version(name) for name in ("jax", "libtpu", "flax", tunix_step.VERSION)}
    about = describe() | {"device": "none: compiled ahead of time", "versions": versions}
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()))
    contenders = arguments.contenders
    if importlib.util.find_spec(tunix_step.PACKAGE) is None:
        console.print(f"{tunix_step.VERSION} is not installed: only ours is compiled")
        contenders = [name for name in contenders if name not in NUMBERS]
    extra = (f"model.config.num_hidden_layers={arguments.layers}",) if arguments.layers else ()
    if extra:
        console.print(f"cut to {arguments.layers} layers")
    result: dict[str, Any] = {**about, "layers": arguments.layers, "found": {}}
    for model in arguments.models:
        for name in arguments.topologies:
            measurements = compare(MODELS[model], topology(name), contenders, extra, arguments.dump)
            show(f"Qwen3-{model} on {name}", measurements, console)
            result["found"][f"{model} {name}"] = measurements
    report(result)


def compare(
    name: str,
    devices: Topology,
    contenders: Sequence[str],
    extra: tuple[str, ...] = (),
    dump: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Compiles the updates of a model for a topology: contender -> `measured`.

    Args:
      name: of a configuration.
      extra: overrides of it.
      dump: a folder for the programs' text.
    """
    measurements = {}
    for contender in contenders:
        config = load_config(name, len(devices.devices), contender, extra)
        run = programs.build_run(config, devices.devices)
        lowered = theirs(run, devices, contender) if contender in NUMBERS else ours(run)
        geometry = run.blueprint.geometry
        samples = geometry.num_prompts * geometry.group_size
        file = (
            dump / f"{name}_{devices.name.replace(':', '_')}_{contender}.hlo.txt" if dump else None
        )
        measurements[contender] = {
            **measured(lowered, devices, file),
            "chip_memory": devices.chip.memory,
            "completion_tokens": samples * geometry.max_completion_tokens,
        }
        # Compiling takes minutes, so that what is known is told.
        print(
            json.dumps({f"{name} {devices.name} {contender}": measurements[contender]}), flush=True
        )
    return measurements


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


Numbers = Mapping[str, Any]
"""What `measured` returns."""


def amount(key: str, unit: float) -> Callable[[Numbers], str]:
    """A number in units; empty where it is not known."""
    return lambda numbers: f"{numbers[key] / unit:,.2f}" if numbers.get(key) else ""


def per_token(key: str, unit: float) -> Callable[[Numbers], str]:
    """A chip's share for each completion token of the batch."""

    def share(numbers: Numbers) -> str:
        value = numbers.get(key)
        return f"{value / unit / numbers['completion_tokens']:,.3f}" if value else ""

    return share


ROWS: dict[str, Callable[[Numbers], str]] = {
    "peak, GiB": amount("peak", 2**30),
    "  arguments": amount("arguments", 2**30),
    "  temporaries": amount("temporaries", 2**30),
    "  outputs over no argument": amount("outputs", 2**30),
    "largest array, GiB": amount("largest_bytes", 2**30),
    "TFLOP of products": amount("flops", 1e12),
    "main memory moved, GB": amount("moved", 1e9),
    "sent to other chips, GB": amount("sent", 1e9),
    "largest array": lambda numbers: numbers.get("largest", ""),
    "MFLOP per token": per_token("flops", 1e6),
    "kB moved per token": per_token("moved", 1e3),
    "kB sent per token": per_token("sent", 1e3),
    "calls": lambda numbers: str(numbers["calls"]),
    "fits": lambda numbers: "yes" if numbers["fits"] else "no",
    "compiled in, s": lambda numbers: f"{numbers.get('compile_seconds', math.nan):.0f}",
}


def show(title: str, measurements: Mapping[str, Numbers], console: Console) -> None:
    """The table: each chip's share of an optimizer step, and per completion token of all chips."""
    console.print(f"\n{title}: each chip, one optimizer step")
    rows = ((label, list(map(cell, measurements.values())), {}) for label, cell in ROWS.items())
    contest.show(console, ("", *measurements), rows)


def options() -> argparse.Namespace:
    parser = contest.parser(__doc__)
    for name, choices in (
        ("models", MODELS),
        ("topologies", TOPOLOGIES),
        ("contenders", CONTENDERS),
    ):
        parser.add_argument(f"--{name}", type=contest.names, default=",".join(choices))
    parser.add_argument("--layers", type=int, help="cut the models to so many; all by default")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="writes the programs' text there")
    arguments = parser.parse_args()
    for name, choices in (("models", MODELS), ("contenders", CONTENDERS)):
        if unknown := [entry for entry in getattr(arguments, name) if entry not in choices]:
            parser.error(f"--{name}: {unknown[0]!r} is none; give some of {', '.join(choices)}")
    return arguments


if __name__ == "__main__":
    main()
