"""Contenders as processes, one step of each in turn, and what the pairs of steps say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import interval
from benchmarks.contest import over
from benchmarks.versus.work import PHASES, Work

MODULES = {"jaxgrpo": "ours", "trl": "trl_step", "torch": "torch_step"}
"""What a contender is called -> its module."""
OURS = "jaxgrpo"
WARM_UP = 1  # steps after the first that are not counted
GIB = 2**30


class Step(NamedTuple):
    """What a contender says of a step."""

    seconds: float
    tokens: int  # sampled
    phases: dict[str, float]
    device_bytes: int | None = None  # that arrays took of a GPU at most, so far; None: on a CPU


class Failed(RuntimeError):
    """A contender that ended before it had said something of its step."""


class Contender:
    """A process that trains on the files of a workload, a step at a time."""

    def __init__(self, name: str, work: Work, log: Path, cache: Path):
        self.name, self.log = name, log
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        module = f"benchmarks.versus.{MODULES[name]}"
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, work.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )
        self._read_step()
        self.start = time.perf_counter() - began
        """seconds from the start of the process to the end of its first step"""

    def step(self) -> Step:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read_step()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read_step(self) -> Step:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            last = self.log.read_text(errors="replace")[-2000:]
            raise Failed(
                f"{self.name} ended with {self.process.returncode}; its last words:\n{last}"
            )
        return read_step(line)


def read_step(line: str) -> Step:
    """What a contender says in a line."""
    message = json.loads(line)
    phases = {phase: message[phase] for phase in PHASES}
    return Step(message["seconds"], message["tokens"], phases, message["device_bytes"])


def most_memory(last: Step, pid: int) -> float:
    """GiB that a contender had at most: its arrays on a GPU, or its process on a CPU.

    Args:
      last: its last step.
    """
    if last.device_bytes is not None:
        return last.device_bytes / GIB
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 / GIB if match else float("nan")


@contextlib.contextmanager
def contenders(names: Sequence[str], work: Work, cache: Path) -> Iterator[dict[str, Contender]]:
    """All of them, started one after the other, each after its first step."""
    running: dict[str, Contender] = {}
    try:
        for name in names:
            running[name] = Contender(name, work, Path(work.folder) / f"{name}.log", cache)
        yield running
    finally:
        for contender in running.values():
            contender.end()


def contest(
    work: Work, names: Sequence[str], pairs: int, limit: float, cache: Path
) -> dict[str, Any]:
    """The numbers of one workload: each contender's, and the peers' seconds over ours.

    Args:
      pairs: rounds at most, three at least.
      limit: seconds after which no further round begins.
      cache: a folder for compiled programs, which is empty yet.
    """
    began = time.perf_counter()
    steps: dict[str, list[Step]] = {name: [] for name in names}
    with contenders(names, work, cache) as running:
        for _ in range(WARM_UP):
            for contender in running.values():
                contender.step()
        for round_number in range(pairs):
            if round_number >= 3 and time.perf_counter() - began > limit:
                break
            for name, contender in running.items():
                steps[name].append(contender.step())
        results: dict[str, Any] = {}
        for name, contender in running.items():
            refuse_other_work(work, name, steps[name])
            results[name] = summary(contender, steps[name])
    for name in names:
        if name != OURS:
            results[name] |= ratios(steps[name], steps[OURS], work.exact)
    return results


def refuse_other_work(work: Work, name: str, steps: Sequence[Step]) -> None:
    """Raises: Failed where samples are not as long as they have to be."""
    expected = work.prompts * work.samples * work.completion
    if work.exact and any(step.tokens != expected for step in steps):
        raise Failed(f"{work.name}: {name} sampled {steps[0].tokens} tokens, not {expected}")


def summary(contender: Contender, steps: Sequence[Step]) -> dict[str, Any]:
    """Medians of a contender's steps."""
    median: Any = lambda values: interval(list(values))[0]  # noqa: E731
    return {
        "start": contender.start,
        "step": median(step.seconds for step in steps),
        **{phase: median(step.phases[phase] for step in steps) for phase in PHASES},
        "tokens": median(step.tokens for step in steps),
        "tokens_per_second": median(step.tokens / step.seconds for step in steps),
        "gib": most_memory(steps[-1], contender.process.pid),
        "memory": "process" if steps[-1].device_bytes is None else "device",
        "steps": len(steps),
    }


def ratios(theirs: Sequence[Step], ours: Sequence[Step], exact: bool) -> dict[str, float]:
    """Their seconds over ours, with the interval, of pairs that were taken one after the other.

    On ragged work two steps differ in how much was sampled: the seconds are then of a token.
    """

    def cost(step: Step) -> float:
        return step.seconds if exact else step.seconds / step.tokens

    median, low, high = over(map(cost, theirs), map(cost, ours))
    return {"ratio": median, "low": low, "high": high}


def start(work: Work, cache: Path) -> float:
    """Seconds from the start of our process to the end of its first step."""
    with contenders([OURS], work, cache) as running:
        return running[OURS].start
