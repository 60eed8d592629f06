"""What sampling costs, beside `generate` of Hugging Face transformers on the same weights, or vLLM.

    python -m benchmarks.sampling [--quick] [--workloads S/A,S/C] [--pairs 5] [--slots 64]
                                  [--devices 2] [--engine vllm --vllm-python PYTHON]

A workload is a model (S, M, SR, ...) and what it samples (A, B, C, ...): benchmarks/workloads.py.
With --engine vllm the peer is vLLM's build for CPUs, of an environment of its own: PYTHON is that
environment's, by default what VLLM_PYTHON says; S/A and L/E are compared, without limits. Both
engines draw from the whole distribution on two cores or on one GPU, in turn (ours, theirs, ours,
...) after a first run of each; theirs has the faster of two kinds of cache. A ratio is theirs over
ours in seconds per generated token, since on ragged workloads two draws differ in length. It is
judged by the lower end of its 95% bootstrap interval, or by the upper end if it must be small.

Of two cores JAX is told to make two devices, and models of a small vocabulary are split over both
by heads and feed-forward: XLA computes the products of attention on one core of a device. With
--devices 1 both cores are one device, as JAX has it by default.

Then come the figures that need no peer: slot-steps per token on C and its time per token over that
of S/A with as many slots, the cost of a prompt for groups of different sizes, what the compiler
plans for the CPU and for a TPU, and how many programs ragged steps compile after the first ones;
on a GPU and with --workloads they are left out. Without torch ours is timed alone.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import contest
from benchmarks.common import Interval, report, timed, verdict
from benchmarks.contest import in_turn
from benchmarks.peers import THREADS, Run, Transformers, Vllm
from benchmarks.programs import (
    LARGER_TPU,
    decode_program,
    deep_config,
    late_compilations,
    tpu_device,
)
from benchmarks.workloads import (
    MODELS,
    OF_KINDS,
    PAD,
    WORKLOADS,
    Workload,
    build,
    make_prompts,
    model_config,
    qwen3_0p6b,
)
from jaxgrpo.core.types import Prompts, Rollouts
from jaxgrpo.models import sharding
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.slots.driver import SlotEngine

SPLIT = (
    "S",
    "M",
    *OF_KINDS,
)  # models split over the devices; logits of 151,936 tokens are slower so
LIMITS = {"S/A": 1.8, "S/B": 3.2, "M/A": 1.5, "V/A": 6.0, "S/C": 5.0}  # theirs over ours
LIMITS |= dict.fromkeys((f"{letter}/A" for letter in OF_KINDS), 3.0)
RAGGED, FIXED = "S/C", "S/A"
MAX_SLOT_STEPS = 1.15  # per token of the ragged workload
MAX_RAGGED = 1.5  # its seconds per token over those of the fixed one
MAX_TEMPORARIES = 0.15  # of a decoding program, over its arguments
WITH_VLLM = ("S/A", "L/E")
QUICK = {"S/A": 5, "S/C": 5, "S/B": 3}  # pairs at most
SAME = {"float32": 1e-3, "bfloat16": 0.5}  # nats by which the peer's log-probs differ at most
GROUPS = (1, 8, 32)  # samples that share a prompt; the first and the last if it must be quick
DEPTHS = (28, 64)
STEPS, WARM_UP = 50, 3
REPEATS = 5  # of prompts alone
TINY = Workload(prompts=4, samples=4, shortest=4, longest=32, completion=32, ragged=True)
FITTING = 128  # its slots on a chip with 32 GB, beside the 6.7 GiB that training keeps
DEEP = Workload(prompts=2, samples=4, shortest=16, longest=16, completion=32)

Pairs = Mapping[str, Sequence[Run]]


def work_settings(work: Workload, slots: int) -> SamplingSettings:
    settings = SamplingSettings(work.completion, 1.0, work.stop_tokens, PAD)
    return settings._replace(slots=slots)


class Ours:
    """A workload ready to be sampled by our engine."""

    def __init__(self, name: str, slots: int):
        letter, kind = name.split("/")
        self.workload, self.slots = WORKLOADS[kind], slots
        self.config = model_config(letter)
        devices = jax.devices() if letter in SPLIT else jax.devices()[:1]
        self.mesh = sharding.make_mesh(tensor=len(devices), devices=devices)
        self.model, self.params = build(self.config, self.workload.ragged, self.mesh)
        self.engine, self.prompts = self.engine_for(self.workload), self.prompts_for(self.workload)
        self.rollouts: Any = None  # of the last run

    def prompts_for(self, work: Workload) -> Prompts:
        return make_prompts(work, self.config.vocab_size)

    def engine_for(self, work: Workload) -> SlotEngine:
        settings = work_settings(work, self.slots)
        return SlotEngine(self.model, settings, self.mesh, width=work.longest)

    def run(self, seed: int) -> Run:
        key = jax.random.key_data(jax.random.key(seed))
        arguments = self.engine, self.params, self.prompts, key, self.workload.samples
        self.rollouts, seconds = timed(draw_all, *arguments)
        tokens = int(self.rollouts.token_mask.sum())
        return Run(seconds, tokens, int(self.engine.slot_steps))


def draw_all(*arguments: Any) -> Rollouts:
    """As `rollout.batch.draw`, to the end."""
    return draw(*arguments).finish()


def rival(ours: Ours, vllm_python: str | None, console: Console) -> Transformers | Vllm | None:
    """The peer, once it is seen to have our distribution; transformers with its faster cache.

    Args:
      vllm_python: of vLLM's environment; None: transformers.
    """
    parts = ours.model, ours.params, ours.prompts, ours.workload
    try:
        peer = Vllm(*parts, vllm_python) if vllm_python else Transformers(*parts)
    except (ImportError, RuntimeError) as error:
        console.print(f"transformers' models need torch for this device ({error}): left out")
        return None
    difference = peer.difference(ours.rollouts)
    if difference > SAME[ours.config.dtype]:
        raise SystemExit(f"peer: its log-probs differ by {difference}: not the same model")
    if isinstance(peer, Vllm):
        console.print(f"  log-probs of vLLM differ by {difference:.1e}")
        peer.run(0)
        return peer
    runs = peer.choose_cache()
    times = ", ".join(f"{cache} {run.seconds:.2f} s" for cache, run in runs.items())
    console.print(f"  a quarter by transformers: {times}; log-probs differ by {difference:.1e}")
    return peer


def ratio(runs: Pairs, above: str, below: str) -> Interval:
    """The seconds per token of one contender over those of another, each round with its seed."""
    upper, lower = ([run.seconds_per_token for run in runs[name]] for name in (above, below))
    return contest.over(upper, lower)


def rate(runs: Sequence[Run]) -> float:
    """Median tokens per second."""
    return float(np.median([run.tokens / run.seconds for run in runs]))


def measure(
    name: str,
    pairs: int,
    find_ours: Callable[[str], Ours],
    vllm_python: str | None,
    console: Console,
) -> dict[str, Any]:
    """The numbers of one workload, of which every contender has run once before it is timed."""
    console.print(f"{name}, {pairs} pairs")
    ours = find_ours(name)
    ours.run(0)
    peer = rival(ours, vllm_python, console)
    contenders = {"ours": ours.run}
    if peer is not None:
        contenders["peer"] = peer.run
    letter, kind = name.split("/")
    fixed = f"{letter}/A"
    if kind == "C":
        find_ours(fixed).run(0)
        contenders["fixed"] = find_ours(fixed).run
    runs = in_turn(contenders, pairs)
    result: dict[str, Any] = {"tokens_per_second": rate(runs["ours"])}
    if peer is not None:
        median, low, high = ratio(runs, "peer", "ours")
        result |= {"ratio": median, "low": low, "high": high}
        result["limit"] = None if vllm_python else LIMITS.get(name)
        result |= {"peer_tokens_per_second": rate(runs["peer"]), "peer_cache": peer.cache}
    if ours.workload.ragged:
        result |= raggedness(runs, ours.rollouts, console)
    return result


def raggedness(runs: Pairs, rollouts: Rollouts, console: Console) -> dict[str, Any]:
    """Whether the cost of a ragged workload follows its tokens."""
    lengths = np.asarray(rollouts.token_mask).sum(-1)
    ours = runs["ours"]
    steps = sum(run.slot_steps or 0 for run in ours) / sum(run.tokens for run in ours)
    result: dict[str, Any] = {
        "mean_length": float(lengths.mean()),
        "median_length": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "slot_steps_per_token": steps,
    }
    console.print(
        f"  completions: mean {lengths.mean():.0f}, median {np.median(lengths):.0f}, "
        f"longest {lengths.max()} tokens\n"
        f"  slot-steps per token: {steps:.2f}, limit {MAX_SLOT_STEPS}: "
        f"{verdict(steps <= MAX_SLOT_STEPS)}"
    )
    if "fixed" in runs:
        median, low, high = ratio(runs, "ours", "fixed")
        result["over_fixed"] = {"ratio": median, "low": low, "high": high}
        console.print(
            f"  seconds per token over A: {median:.2f} [{low:.2f}, {high:.2f}], "
            f"limit {MAX_RAGGED}: {verdict(high <= MAX_RAGGED)}"
        )
    return result


def show(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table("workload", "tokens/s", "peer", "cache", "ratio", "95%", "limit", "")
    for name, numbers in results.items():
        row = [name, f"{numbers['tokens_per_second']:.0f}"]
        if "ratio" in numbers:
            limit = numbers["limit"]
            row += [
                f"{numbers['peer_tokens_per_second']:.0f}",
                numbers["peer_cache"],
                f"{numbers['ratio']:.2f}",
                f"{numbers['low']:.2f} .. {numbers['high']:.2f}",
                "" if limit is None else f"{limit}",
                "" if limit is None else verdict(numbers["low"] >= limit),
            ]
        table.add_row(*row)
    console.print(table)


def prompt_seconds(ours: Ours, groups: Sequence[int] = GROUPS) -> dict[int, float]:
    """Seconds of the prompts of a workload by the number of samples that share each.

    Prompts at their longest, over prompts of two tokens: both sample one token.
    """
    seconds = {}
    key = jax.random.key_data(jax.random.key(0))
    for group in groups:
        spent = []
        for length in (ours.workload.longest, 2):
            changes = {"samples": group, "completion": 1, "shortest": length, "longest": length}
            work = ours.workload._replace(**changes)
            arguments = ours.params, ours.prompts_for(work), key, group
            run = functools.partial(timed, draw_all, ours.engine_for(work), *arguments)
            run()
            spent.append([run()[1] for _ in range(REPEATS)])
        long, short = map(np.median, spent)
        seconds[group] = float(long - short)
    return seconds


def show_prompts(seconds: Mapping[int, float], console: Console) -> None:
    first = next(iter(seconds.values()))
    parts = [f"G = {group} {1e3 * value:.0f} ms" for group, value in seconds.items()]
    times = max(seconds.values()) / first
    console.print(f"prompts of {RAGGED}: {', '.join(parts)}; at most {times:.2f} x the first")


def programs(slots: int, quick: bool, console: Console) -> dict[str, Any]:
    """Decoding as the compilers of a CPU and of a TPU plan it; if `quick`, no deep models."""
    devices = {"cpu": jax.local_devices(backend="cpu")[0]}
    try:
        devices["tpu"] = tpu_device()
    except Exception as error:  # libtpu is missing, or refuses: it raises many kinds
        reason = str(error).strip().splitlines()[0]
        console.print(f"no program for a TPU ({reason}): install libtpu, as jaxgrpo[test] does")
    facts = {}
    for platform, device in devices.items():
        for name in (FIXED, RAGGED):
            letter, kind = name.split("/")
            work, config = WORKLOADS[kind], model_config(letter)
            program = decode_program(config, work, work_settings(work, slots), device)
            facts[f"{platform} {name}"] = program.plan()
        if platform == "tpu":
            wide = WORKLOADS["G"]
            program = decode_program(qwen3_0p6b(4), wide, work_settings(wide, slots), device)
            facts["tpu 4 layers of 0.6B"] = program.plan()
            if not quick:
                chip, settings = tpu_device(LARGER_TPU), work_settings(wide, FITTING)
                facts["v6e 0.6B"] = decode_program(qwen3_0p6b(), wide, settings, chip).plan()
        for depth in () if quick else DEPTHS:
            settings = work_settings(DEEP, DEEP.prompts * DEEP.samples)
            program = decode_program(deep_config(depth), DEEP, settings, device)
            facts[f"{platform} {depth} layers"] = program.size()
    return facts


def show_programs(facts: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table("decoding", "temporaries", "", "copies", "", "GiB", "HLO", "code MB", "compile s")
    for name, figures in facts.items():
        row = [name, "", "", "", ""]
        if "copies" in figures:
            share, copies = figures["temporaries"], len(figures["copies"])
            row[1:] = [f"{share:.1%}", verdict(share <= MAX_TEMPORARIES)]
            row += [f"{copies}", verdict(copies == 0)]
        code = figures["code_bytes"]
        row += [
            f"{figures['gib']:.2f}",
            f"{figures['instructions']}",
            f"{code / 1e6:.1f}" if code else "",
        ]
        table.add_row(*row, f"{figures['compile_seconds']:.1f}")
    console.print("temporaries over arguments; copies as large as the keys of a layer")
    console.print(table)
    for name, figures in facts.items():
        for line in figures.get("copies", ())[:4]:
            console.print(f"  {name}, {line}", highlight=False)


def options() -> argparse.Namespace:
    names = [f"{model}/{kind}" for model in MODELS for kind in WORKLOADS]
    parser = contest.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="under 6 minutes: without M and V")
    parser.add_argument("--workloads", type=contest.names, help="such as S/A,S/C")
    parser.add_argument("--pairs", type=int, default=5, help="with 9 the intervals are narrower")
    parser.add_argument("--slots", type=int, default=64, help="samples decoded at once; 0: all")
    parser.add_argument("--devices", type=int, default=THREADS, help="that the cores become")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"), metavar="PYTHON")
    arguments = parser.parse_args()
    if arguments.engine == "transformers":
        arguments.vllm_python = None
    elif not Path(arguments.vllm_python or "").is_file():
        text = "give the Python of an environment with vLLM, by this option or as VLLM_PYTHON"
        parser.error(f"--vllm-python {arguments.vllm_python}: {text}")
    for name in ("pairs", "devices"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: give 1 or more")
    arguments.is_selection = arguments.workloads is not None
    if not arguments.is_selection:
        usual = QUICK if arguments.quick else LIMITS
        arguments.workloads = list(WITH_VLLM if arguments.vllm_python else usual)
    for name in arguments.workloads:
        if name not in names:
            parser.error(f"--workloads: {name!r} is none; choose from {', '.join(names)}")
    return arguments


def main() -> None:
    arguments, began = options(), time.perf_counter()
    if hasattr(os, "sched_setaffinity"):  # before JAX counts the cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs some of a GPU
    about, console = contest.begin()
    slots = arguments.slots
    find_ours = functools.cache(lambda name: Ours(name, slots))
    results = {}
    for name in arguments.workloads:
        most = QUICK.get(name, 1) if arguments.quick else arguments.pairs
        pairs, python = min(arguments.pairs, most), arguments.vllm_python
        results[name] = measure(name, pairs, find_ours, python, console)
    show(results, console)
    result: dict[str, Any] = {**about, "quick": arguments.quick, "pairs": arguments.pairs}
    result |= {"slots": slots, **results}
    if jax.default_backend() == "cpu" and not arguments.vllm_python and not arguments.is_selection:
        result |= without_peer(find_ours(RAGGED), arguments.quick, console)
    report({**result, "seconds": time.perf_counter() - began})


def without_peer(ours: Ours, quick: bool, console: Console) -> dict[str, Any]:
    """The figures that need no peer."""
    prompts = prompt_seconds(ours, GROUPS[:: len(GROUPS) - 1] if quick else GROUPS)
    show_prompts(prompts, console)
    facts = programs(ours.slots, quick, console)
    show_programs(facts, console)
    late = late_compilations(TINY, STEPS, WARM_UP)
    console.print(f"compilations in {STEPS} ragged steps after {WARM_UP}: {late}: ", end="")
    console.print(verdict(late == 0))
    numbers = {name: _numbers(figures) for name, figures in facts.items()}
    return {"prompt_seconds": prompts, "late_compilations": late, "programs": numbers}


def _numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: len(value) if name == "copies" else value for name, value in figures.items()}


if __name__ == "__main__":
    main()
