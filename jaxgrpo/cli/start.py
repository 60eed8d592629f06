"""`jaxgrpo quickstart`: a base model, GRPO on it, and what that changed, in one command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from jaxgrpo.cli import make_base as warmstart
from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.training import loop, process
from jaxgrpo.training.console import comparison, facts, is_summary


def main(overrides: Sequence[str] = ()) -> int:
    """Builds the base where it is missing, trains it, prints the table. Returns the exit code."""
    config = configs.load("quickstart", overrides)
    console = Console(highlight=False)
    process.start(config.mesh.platform)
    if jax.process_count() > 1:
        raise InputError(
            f"quickstart runs in one process, not {jax.process_count()}: make the base once with "
            "`jaxgrpo make-base arithmetic runs/base`, then `jaxgrpo train quickstart` in each"
        )
    base = Path(config.model.path)
    if not (base / "config.json").exists():
        make_base(console, base, "arithmetic", seed=config.train.seed)
    show(console, loop.train(config, resume="auto"))
    return 0


def make_base(console: Console, out: str | Path, task: str, **options: Any) -> None:
    """`warmstart.make_base` with a bar, and a line on what came of it."""
    console.print(f"base model for {task}: supervised warm start")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("warm start", total=None)

        def report(done: int, steps: int, loss: float) -> None:
            progress.update(bar, completed=done, total=steps, description=f"loss {loss:.3f}")

        made = warmstart.make_base(out, task, progress=report, **options)
    console.print(
        f"{made['path']}: {made['parameters']:,} parameters, loss {made['loss']:.4f} nats per token"
        f" (no model is below {made['loss_floor']:.4f}), {made['seconds']:.0f} s",
        soft_wrap=True,
    )


def show(console: Console, run: loop.Run) -> None:
    """The table of the end, from summary.json's own numbers."""
    summary = run.summary
    several = [name for name in summary["base"] if is_summary(name)]
    several.sort(key=lambda name: (name.split("@")[0] != "pass", int(name.split("@")[1])))
    names = ["accuracy", *several]
    columns = {"base": summary["base"], "trained": summary["trained"]}
    console.print(comparison("test problems", columns, [*names, "flat_groups"]))
    speed = summary["time/tokens_per_second"]
    facts(
        console,
        {
            "seconds": f"{summary['time/seconds']:.0f}",
            "sampled tokens per second": "–" if speed is None else f"{speed:,.0f}",
            "model": summary["model"],
            "summary": run.path / "summary.json",
            "metrics": summary["metrics"],
            "samples": run.path / "samples",
        },
    )
