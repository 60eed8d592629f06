"""Instructions and seconds of compilation of update and decoding, by the number of layers.

    python -m benchmarks.depth [--family llama] [--layers 4,12,28,48] [--remat full]
                               [--programs update,decode] [--platform cpu|tpu]

The model is as narrow as compilation allows, so that nearly all of the time is the compiler's. The
update is that of a training step: forward and backward pass over all micro-batches, optimizer,
what is measured. Its layers are scanned, and its number of instructions, in the optimised HLO of
all computations, must be the same to 2% for the fewest and the most layers. `--remat` is
`train.remat`: "full" is what a GPU or TPU has by default; with "auto" a CPU recomputes nothing,
and unrolls models of few layers. Decoding unrolls all layers.

For a TPU, which need not be there (libtpu must), programs are compiled for a v5e. Give a family
with several kinds of layers whole periods: six layers of gemma3_text, four of olmo3. A loop over
one period is no loop to XLA: compare two periods with many.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import contest
from benchmarks.common import describe, report, verdict
from benchmarks.programs import Program, decode_program, tpu_device, update_program
from benchmarks.workloads import PAD, Workload
from jaxgrpo.models.api import ModelConfig
from jaxgrpo.models.hf import families
from jaxgrpo.rollout.engine import SamplingSettings

NARROW = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
WORK = Workload(prompts=4, samples=4, shortest=16, longest=16, completion=32)
PROGRAMS = ("update", "decode")
MOST = 0.02  # by which the update's instructions may differ


def narrow(family: str, layers: int) -> ModelConfig:
    """A model of a family as its config.json would say it."""
    fields = {"model_type": family, **NARROW, "num_hidden_layers": layers}
    return families.model_config(fields, "benchmarks.depth")


def compiled(program: str, config: ModelConfig, device: Any, remat: str) -> Program:
    if program == "update":
        return update_program(config, WORK, device, remat)
    settings = SamplingSettings(WORK.completion, 1.0, (), PAD)
    return decode_program(config, WORK, settings, device)


def options() -> argparse.Namespace:
    parser = contest.parser(__doc__)
    parser.add_argument("--family", default="llama", choices=sorted(families.FAMILIES))
    parser.add_argument("--layers", default="4,12,28,48", help="in ascending order")
    parser.add_argument("--remat", default="full", help="as train.remat")
    parser.add_argument("--programs", type=contest.names, default=",".join(PROGRAMS))
    parser.add_argument("--platform", default="cpu", choices=("cpu", "tpu"))
    arguments = parser.parse_args()
    arguments.layers = [int(number) for number in arguments.layers.split(",")]
    if not set(arguments.programs) <= set(PROGRAMS):
        parser.error(f"--programs {','.join(arguments.programs)}: choose from {PROGRAMS}")
    return arguments


def main() -> None:
    arguments, console = options(), Console(width=110)
    jax.config.update("jax_enable_compilation_cache", False)
    is_tpu = arguments.platform == "tpu"
    device = tpu_device() if is_tpu else jax.local_devices(backend="cpu")[0]
    about = {**describe(), "compiled_for": device.device_kind}
    variant = {"family": arguments.family, "remat": arguments.remat}
    console.print(f"{about['compiled_for']}, jax {about['jax']}, {variant}")
    table = Table("program", "layers", "instructions", "trace s", "compile s")
    measured_sizes: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in arguments.programs}
    for name, sizes in measured_sizes.items():
        for layers in arguments.layers:
            config = narrow(arguments.family, layers)
            size = sizes[layers] = compiled(name, config, device, arguments.remat).size()
            seconds = (f"{size[key]:.1f}" for key in ("trace_seconds", "compile_seconds"))
            table.add_row(name, f"{layers}", f"{size['instructions']}", *seconds)
    console.print(table)
    if "update" in measured_sizes:
        counts = [size["instructions"] for size in measured_sizes["update"].values()]
        times, ends = counts[-1] / counts[0], f"{arguments.layers[-1]} over {arguments.layers[0]}"
        passed = verdict(abs(times - 1) <= MOST)
        console.print(f"update, {ends} layers: {times:.3f}, limit {MOST:.0%}: {passed}")
    report({**about, **variant, **measured_sizes})


if __name__ == "__main__":
    main()
