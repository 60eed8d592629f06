"""What the chips of an update exchange, and what each holds, as their number grows.

    python -m benchmarks.growth [--config qwen3_0p6b_v5e] [--layers 4] [--cases 2x2:1,4x4:4,...]
                                [--slices N] [--set key=value ...] [--dump DIR]

Nothing runs: the update is compiled for TPU slices that need not be here (jaxgrpo[plan]). A case is
a topology and the size of the axis "data"; "fsdp" takes the rest. Each chip has the same work in
all of them: 4 prompts x 8 samples of at most 1,024 tokens, in micro-batches of 4,608 tokens.
Printed per chip are the memory that XLA plans, and the bytes sent per completion token of its own,
by collective and axis.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import contest
from benchmarks.common import describe, report
from jaxgrpo.config import files
from jaxgrpo.config.files import Config
from jaxgrpo.planning import plan, programs
from jaxgrpo.planning.topologies import quiet, topology

CASES = "2x2:1,4x4:1,4x4:4,8x8:16,16x16:64"
PROMPTS, SAMPLES, TOKENS = 4, 8, 1024  # of each chip; the tokens of a sample
MICRO_BATCH = 512 + 4 * 1024  # tokens: a prompt and half of its samples


@dataclasses.dataclass(frozen=True)
class Case:
    """Chips, and how many parts of them hold a copy of the weights."""

    chip: str
    shape: str
    data: int
    slices: int

    @property
    def chips(self) -> int:
        return self.slices * math.prod(map(int, self.shape.split("x")))

    def config(self, arguments: argparse.Namespace) -> Config:
        more = {
            "mesh.data": self.data,
            "mesh.fsdp": self.chips // self.data,
            "mesh.tensor": 1,
            "rollout.prompts_per_step": PROMPTS * self.chips,
            "rollout.group_size": SAMPLES,
            "rollout.max_completion_tokens": TOKENS,
            "train.tokens_per_micro_batch": MICRO_BATCH,
        }
        if arguments.layers:
            more["model.config.num_hidden_layers"] = arguments.layers
        overrides = [f"{key}={value}" for key, value in more.items()]
        return files.load(arguments.config, [*overrides, *arguments.set])


def measured(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the update of a case takes of each chip."""
    config, chips = case.config(arguments), topology(f"{case.chip}:{case.shape}", case.slices)
    folder = arguments.dump and arguments.dump / f"{case.shape}_data_{case.data}"
    outcome = plan.plan(programs.build_run(config, chips.devices), chips, ("update",), dump=folder)
    if not outcome.planned:
        raise SystemExit(f"{case}: {outcome.problem}")
    (update,) = outcome.planned
    chip_tokens = PROMPTS * SAMPLES * TOKENS
    sent = {
        f"{kind} over {'+'.join(axes)}": size / chip_tokens
        for (kind, axes), size in plan.each_axis(update.collectives).items()
    }
    return {
        "chips": case.chips,
        "mesh": {"data": case.data, "fsdp": case.chips // case.data},
        "peak": update.peak,
        "sent_per_token": sum(sent.values()),
        "by_collective": sent,
        "compile_seconds": update.seconds,
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    """A table of all cases, with a column for each collective."""
    names = sorted({name for row in rows for name in row["by_collective"]})
    columns = [
        name for name in names if any(row["by_collective"].get(name, 0) > 500 for row in rows)
    ]
    table = Table("chips", "mesh", "peak, GiB", "kB sent per token", *columns)
    for row in rows:
        mesh = ", ".join(f"{name} {size}" for name, size in row["mesh"].items())
        table.add_row(
            str(row["chips"]),
            mesh,
            f"{row['peak'] / 2**30:.2f}",
            f"{row['sent_per_token'] / 1e3:.1f}",
            *(f"{row['by_collective'].get(name, 0) / 1e3:.1f}" for name in columns),
        )
    return table


def options() -> argparse.Namespace:
    parser = contest.parser(__doc__)
    parser.add_argument("--config", default="qwen3_0p6b_v5e", help="a shipped config, or a file")
    parser.add_argument("--layers", type=int, default=4, help="cut to so many; 0: all")
    parser.add_argument("--chip", default="v5e")
    parser.add_argument(
        "--cases", type=contest.names, default=CASES, help="topology:data, as 4x4:4"
    )
    parser.add_argument("--slices", type=int, default=1, help="of each topology")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="of the config")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="writes the programs' text there")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    quiet(os.environ)
    jax.config.update("jax_platforms", "cpu")  # what is compiled for is not here
    console, rows = Console(width=200), []
    for case_text in arguments.cases:
        shape, _, data = case_text.partition(":")
        case = Case(arguments.chip, shape, int(data or 1), arguments.slices)
        rows.append(measured(case, arguments))
        print(json.dumps(rows[-1]), flush=True)  # compiling takes minutes
    console.print(shown(rows))
    report(describe() | {"device": "none: compiled ahead of time", "found": rows})


if __name__ == "__main__":
    main()
