"""A run under random faults, continued until it ends: does it end as if nothing had happened?

    python tests/reliability/chaos.py [run.toml] [--seeds 0 1 2] [--every 2.0] [--steps 40]

Without a config it makes a small model and its config. The run of the config is trained undisturbed
and, for each seed, once with a fault every few seconds, by `jaxgrpo train --resume auto` in a
loop: kills, stop signals, Ctrl-C once and twice, a process that is stopped for a while, bits
that flip in the newest checkpoint while nothing runs, files that are cut, and a disk that is full
until the next start. Weights, metrics (apart from times) and samples must be equal, bit for bit.

Prints a line for each fault, a line for each seed, and ends with 0 if all seeds came out equal.
Linux only. What may differ by itself (a reward that draws random numbers) makes the seeds differ
without any fault: the undisturbed run is trained twice to find that out.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("", "tests/support")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import faulty_runs  # noqa: E402
from forked import Forked, ForkServer  # noqa: E402

from jaxgrpo.config import files as configs  # noqa: E402
from jaxgrpo.training.processes.parent import STOP_SIGNALS  # noqa: E402

MOST_STARTS = 200
STOPPED = [code for number in STOP_SIGNALS for code in (128 + number, -number)]
TRACE: Callable[[str], None] = print


class World(NamedTuple):
    """What starts the runs of a config."""

    server: ForkServer
    config: Path
    overrides: tuple[str, ...]

    def start(self, folder: Path, *arguments: str, limit: int | None = None) -> Forked:
        sets = ("--set", f"run.dir={folder}", *self.overrides)
        command = ("train", str(self.config), *arguments, *sets)
        return self.server.start(*command, env=dict(os.environ), merged=False, limit=limit)


def ask(number: int) -> Callable[[Forked, random.Random], None]:
    def send(run: Forked, draw: random.Random) -> None:
        run.send_signal(number)

    return send


def ask_twice(run: Forked, draw: random.Random) -> None:
    run.send_signal(signal.SIGINT)
    time.sleep(draw.uniform(0.25, 0.6))
    run.send_signal(signal.SIGINT)


def freeze(run: Forked, draw: random.Random) -> None:
    """As a machine that is suspended: it continues, and is killed later."""
    run.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(0.2, 1.0))
    run.send_signal(signal.SIGCONT)
    time.sleep(draw.uniform(0.0, 0.5))
    run.send_signal(signal.SIGKILL)


UNDER_WAY: dict[str, Callable[[Forked, random.Random], None]] = {
    "SIGKILL": ask(signal.SIGKILL),
    "SIGTERM": ask(signal.SIGTERM),
    "SIGHUP": ask(signal.SIGHUP),
    "SIGUSR1": ask(signal.SIGUSR1),
    "Ctrl-C": ask(signal.SIGINT),
    "Ctrl-C twice": ask_twice,
    "frozen": freeze,
}
"""What comes upon a run under way."""


def newest_step(folder: Path) -> Path | None:
    """The newest complete step, if there is one before it to fall back on."""
    manifests = (folder / "checkpoints").glob("*/manifest.json")
    steps = sorted((file.parent for file in manifests), key=lambda path: int(path.name))
    return steps[-1] if len(steps) > 1 else None


def flip_a_bit(folder: Path, draw: random.Random) -> bool:
    if (step := newest_step(folder)) is None:
        return False
    file = draw.choice(sorted(f for f in step.rglob("*") if f.is_file() and f.stat().st_size))
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return True


def cut_a_file(folder: Path, draw: random.Random) -> bool:
    if (step := newest_step(folder)) is None:
        return False
    file = draw.choice(sorted(f for f in step.rglob("*") if f.is_file() and f.stat().st_size))
    os.truncate(file, draw.randrange(file.stat().st_size))
    return True


def tear_a_line(folder: Path, draw: random.Random) -> bool:
    """Half a line behind the metrics, as a machine leaves it that loses its power."""
    if not (folder / "metrics.jsonl").exists():
        return False
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "rewa')
    return True


BETWEEN: dict[str, Callable[[Path, random.Random], bool]] = {
    "flipped bit": flip_a_bit,
    "cut file": cut_a_file,
    "torn line": tear_a_line,
}
"""What comes upon the folder of a run while nothing runs; whether it could."""
FULL = "full disk"
LIMITS = (100, 3_000, 20_000, 100_000)  # bytes that a file may have, as on a full disk


def disturbed(
    world: World, folder: Path, seed: int, every: float
) -> tuple[collections.Counter[str], int]:
    """Trains under faults until the run ends. Returns the faults and the number of starts.

    Raises: RuntimeError where a start ends as no fault explains.
    """
    draw, faults = random.Random(seed), collections.Counter[str]()
    for starts in range(1, MOST_STARTS + 1):
        fault = draw.choice([*UNDER_WAY, *BETWEEN, FULL])
        if fault in BETWEEN:
            if BETWEEN[fault](folder, draw):
                faults[fault] += 1
            fault = draw.choice([*UNDER_WAY])
        limit = draw.choice(LIMITS) if fault == FULL else None
        run = world.start(folder, "--resume", "auto", limit=limit)
        wait = draw.expovariate(1 / every) + 0.2
        over = time.monotonic() + wait
        while run.poll() is None and (limit is not None or time.monotonic() < over):
            time.sleep(0.002)
        if run.poll() is None:
            UNDER_WAY[fault](run, draw)
        _, errors = run.communicate(timeout=faulty_runs.SECONDS)
        TRACE(f"  seed {seed}, start {starts}: {fault} after {wait:.2f} s -> {run.returncode}")
        if run.returncode == 0:
            return faults, starts
        faults[fault] += 1
        # Before a run has begun, and when it has ended, a signal ends its process at once: -15 and
        # 143 are the same to a shell.
        expected = (-signal.SIGKILL, *STOPPED, *((74, 2) if limit else ()))
        if run.returncode not in expected or faulty_runs.disorder(errors):
            raise RuntimeError(f"seed {seed}: exit code {run.returncode}:\n{errors[-3000:]}")
    raise RuntimeError(f"seed {seed}: not at its end after {MOST_STARTS} starts")


def undisturbed(world: World, folder: Path) -> dict[str, Any]:
    """What the run comes to by itself."""
    run = world.start(folder)
    _, errors = run.communicate(timeout=10 * faulty_runs.SECONDS)
    if run.returncode:
        raise RuntimeError(f"the undisturbed run ended with {run.returncode}:\n{errors[-3000:]}")
    return faulty_runs.outcome(folder)


def own_config(home: Path, steps: int) -> Path:
    """A small run like the quickstart's: evaluations, a reference, samples, saved as it learns."""
    base = faulty_runs.make_base(home / "base")
    evaluation = {"eval.data": "task:arithmetic:test", "eval.every": 7, "eval.prompts": 4}
    reference = {"loss.kl": {"use": "k2", "beta": 0.01}, "eval.samples": 2}
    changes = {"train.steps": steps, "checkpoint.every": 3, **evaluation, **reference}
    return faulty_runs.write(base, home, **changes)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "config", nargs="?", type=Path, help="a config of jaxgrpo; its run.dir stays"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(10)], metavar="SEED")
    parser.add_argument(
        "--every", type=float, default=3.0, help="seconds between faults, on average"
    )
    parser.add_argument("--steps", type=int, default=100, help="of the run without a config")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="as of train")
    options = parser.parse_args(argv)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as home, ForkServer(os.environ) as server:
        config = options.config or own_config(Path(home) / "own", options.steps)
        configs.load(config, options.set)  # says what is wrong with it, if anything is
        world = World(server, config, tuple(options.set))
        expected = undisturbed(world, Path(home) / "straight")
        if unsteady := faulty_runs.compare(expected, undisturbed(world, Path(home) / "again")):
            print(f"two undisturbed runs differ in {', '.join(unsteady[:5])}: no fault needed")
            return 1
        for seed in options.seeds:
            folder = Path(home) / f"seed_{seed}"
            faults, starts = disturbed(world, folder, seed, options.every)
            different = faulty_runs.differences(expected, folder)
            wrong += bool(different)
            verdict = f"DIFFERS in {', '.join(different[:5])}" if different else "equal"
            kinds = ", ".join(f"{count} {name}" for name, count in sorted(faults.items()))
            count = sum(faults.values())
            print(f"seed {seed}: {count} faults ({kinds}) in {starts} starts: {verdict}")
        seeds = len(options.seeds)
        print(f"{seeds - wrong} of {seeds} seeds equal, hash {expected['hash']}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
