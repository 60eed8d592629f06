"""jaxgrpo beside TRL's GRPOTrainer, or beside plain PyTorch: a whole training step.

    python -m benchmarks.versus [--quick] [--workloads S/A,S/C] [--against trl|torch|trl,torch]
                                [--pairs N] [--device cpu|cuda] [--chart FILE.png]

First it shows that all compute the same: loss and gradients of recorded rollouts whose ratios leave
1, and an AdamW step (proof.py). Then each contender trains on the same checkpoint and prompts in a
process of its own, one step of each in turn, while the others wait. A ratio is theirs over ours, in
seconds of a step, on ragged work in seconds per token sampled; it is judged by the lower end of its
95% bootstrap interval. docs/benchmarks.md says what is equal and what is not.

Needs torch and, for TRL, which is compared on a CPU alone, the extra "versus":
pip install torch==2.13.0 '.[versus]'
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.common import processor, report, verdict
from benchmarks.contest import begin, names
from benchmarks.contest import parser as make_parser
from benchmarks.versus import chart, contest, files, proof
from benchmarks.versus.contest import OURS
from benchmarks.versus.work import PHASES, THREADS
from benchmarks.workloads import MODELS, WORKLOADS, model_config
from jaxgrpo.models import decoder
from jaxgrpo.models.counts import count_weights

LIMITS = {"S/A": 1.5, "S/B": 4.2, "M/A": 1.4, "V/A": 4.3, "S/C": 5.0, "S/D": 7.5}
QUICK = ("S/A", "S/B", "S/C")
PAIRS = {"S/B": 9, "S/C": 3, "S/D": 3, "V/A": 3}  # at most, others 5
STARTS = "S/A"
MOST = {"cold": 13.0, "warm": 7.0}  # seconds to the end of the first step of STARTS
MEMORY = {"V/A": 3.5, "M/A": 5.0, "S/C": 2.0}  # GB of our process
GB = 1e9 / contest.GIB
QUICK_SECONDS = 110.0  # of a workload, after which no pair begins


def main() -> None:
    arguments, began = options(), time.perf_counter()
    if hasattr(os, "sched_setaffinity") and arguments.device == "cpu":  # the processes inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    jax.config.update("jax_platforms", "cpu")  # this process only writes files and compares
    about, console = begin(120, device=device_name(arguments.device))
    sides = [OURS, *arguments.against]
    result: dict[str, Any] = {**about, "quick": arguments.quick, "against": arguments.against}
    with tempfile.TemporaryDirectory(prefix="versus-") as scratch:
        result["proof"] = proof.show(Path(scratch) / "proof", arguments.against, console)
        results: dict[str, Any] = {}
        for name, pairs in arguments.workloads.items():
            folder = Path(scratch) / name.replace("/", "_")
            work = files.write(name, folder, device=arguments.device)
            limit = QUICK_SECONDS if arguments.quick else float("inf")
            console.print(f"{name}, {pairs} pairs at most")
            cache = Path(scratch) / f"cache_{folder.name}"
            results[name] = contest.contest(work, sides, pairs, limit, cache)
            if name == STARTS:
                warm = contest.start(work, cache)
                result["starts"] = {"cold": results[name][OURS]["start"], "warm": warm}
    show(results, console)
    show_own(results, result.get("starts", {}), console)
    if arguments.peak:
        result["utilisation"] = {name: utilisation(name, results[name]) for name in results}
        for name, flops in result["utilisation"].items():
            share = flops / (1e12 * arguments.peak)
            console.print(f"update, {name}: {share:.1%} of {arguments.peak:g} TFLOP/s")
    if arguments.chart:
        chart.draw(results, arguments.chart, about)
        console.print(f"chart: {arguments.chart}")
    report({**result, **results, "seconds": time.perf_counter() - began})


def device_name(device: str) -> str:
    """What the contenders run on."""
    if device == "cpu":
        return f"{min(THREADS, os.cpu_count() or 1)} cores of {processor()}"
    import torch

    return torch.cuda.get_device_name()


def options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="S/A, S/B and S/C, under 10 minutes")
    parser.add_argument("--workloads", help="such as S/A,S/C; all with a limit by default")
    parser.add_argument(
        "--against", type=names, default="trl", help="trl, torch or both; trl by default"
    )
    parser.add_argument("--pairs", type=int, help="of steps, at most; 3 to 9 by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of the device, for the MFU")
    parser.add_argument("--chart", type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    workloads = arguments.workloads.split(",") if arguments.workloads else None
    for name in workloads or ():
        letter, _, kind = name.partition("/")
        if letter not in MODELS or kind not in WORKLOADS:
            choices = f"{', '.join(MODELS)} and {', '.join(WORKLOADS)}"
            parser.error(f"--workloads: {name!r} is none; a model and a kind of {choices}, as S/A")
    workloads = workloads or (QUICK if arguments.quick else LIMITS)
    arguments.workloads = {name: arguments.pairs or PAIRS.get(name, 5) for name in workloads}
    if arguments.device != "cpu" and "trl" in arguments.against:
        text = "its trainer is set up for a CPU (trl_step.py); give --against torch"
        parser.error(f"--against trl: with --device {arguments.device} {text}")
    for name in arguments.against:
        if name not in contest.MODULES or name == OURS:
            parser.error(f"--against: {name!r} is none; give trl, torch or trl,torch")
        if importlib.util.find_spec(name) is None:
            parser.error(f"--against {name}: it is not installed; see the end of this help")
    return arguments


def show(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """The table: a line for each contender of each workload."""
    memory = next(values["memory"] for sides in results.values() for values in sides.values())
    table = Table(
        "work",
        "",
        "step s",
        *PHASES,
        "tokens/s",
        f"GB, {memory}",
        "start s",
        "ratio",
        "95%",
        "limit",
    )
    for name, sides in results.items():
        for side, values in sides.items():
            row = [name if side == OURS else "", side, f"{values['step']:.2f}"]
            row += [f"{values[phase]:.2f}" for phase in PHASES]
            row += [f"{values['tokens_per_second']:.0f}", f"{values['gib'] / GB:.2f}"]
            row += [f"{values['start']:.1f}"]
            if "ratio" in values:
                limit = LIMITS.get(name) if side == "trl" else None
                row += [f"{values['ratio']:.2f}", f"{values['low']:.2f} .. {values['high']:.2f}"]
                row += ["" if limit is None else f"{limit} {verdict(values['low'] >= limit)}"]
            table.add_row(*row)
    console.print(table)


def show_own(
    results: Mapping[str, Mapping[str, Any]], starts: Mapping[str, float], console: Console
) -> None:
    """Memory of the process and starts of ours against their limits."""
    for name, limit in MEMORY.items():
        if name in results and results[name][OURS]["memory"] == "process":
            gb = results[name][OURS]["gib"] / GB
            console.print(f"memory, {name}: {gb:.2f} GB, limit {limit}: {verdict(gb <= limit)}")
    for state, seconds in starts.items():
        limit = MOST[state]
        comparison = f"{seconds:.1f} s, limit {limit:g}: {verdict(seconds <= limit)}"
        console.print(f"start to the end of the first step, {STARTS}, {state} cache: {comparison}")


def utilisation(name: str, sides: Mapping[str, Mapping[str, Any]]) -> float:
    """FLOP/s of our update: its products with weights, forward and backward, prompts once.

    Ragged prompts count with their mean length.
    """
    letter, kind = name.split("/")
    config, work, values = model_config(letter), WORKLOADS[kind], sides[OURS]
    weights = count_weights(decoder.build(config))
    prompts = work.prompts * (work.shortest + work.longest) / 2
    products = weights.active * (values["tokens"] + prompts) + weights.head * values["tokens"]
    return 6 * products / values["update"]


if __name__ == "__main__":
    main()
