"""The commands around training: quickstart, train, replay and make-base.

Each imports the trainer when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.storage import Place
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.console import (
    Document,
    comparison,
    facts,
    is_summary,
    show_whole,
    telling,
)


def quickstart(
    family: str | None = None, as_json: bool = False, overrides: Sequence[str] = ()
) -> int | Document:
    """Builds the base where it is missing, trains it, prints the table. Returns the exit code.

    Args:
      family: of the base, in folders with its name; None: what configs/quickstart.toml says.
      as_json: returns the run's summary in place of the table.
    """
    from jaxgrpo.config import files
    from jaxgrpo.models.hf import families, folders

    options = {} if family is None else {"family": family}
    if family is not None:
        families.find_family(family, "quickstart --family")
        places = f"model.path=runs/base-{family}", f"run.dir=runs/quickstart-{family}"
        overrides = [*places, *overrides]
    config = files.load("quickstart", overrides)
    if config.eval.data is None:
        raise InputError(
            "quickstart evaluates the base and the trained model, and eval.data is unset: name it, "
            "as task:arithmetic:test; a run without it is `jaxgrpo train quickstart`"
        )
    console = Console(highlight=False)
    process.start(config.mesh.platform)
    if jax.process_count() > 1:
        raise InputError(
            f"quickstart runs in one process, not {jax.process_count()}: make the base once with "
            "`jaxgrpo make-base arithmetic BASE`, then `jaxgrpo train quickstart --set "
            "model.path=BASE` in each"
        )
    base = Path(config.model.path)
    if not (base / "config.json").exists():
        make_small_base(console, base, "arithmetic", seed=config.train.seed, **options)
    elif family is not None and (base_family := folders.read_config(base).family) != family:
        raise InputError(
            f"quickstart --family {family}: {base} is a {base_family}: remove it, or name another "
            "folder with --set model.path=..."
        )
    run = _train(config, resume="auto")
    if as_json:
        return Document(run.summary)
    _show(console, run.path, run.summary)
    return 0


def train(
    config: str,
    resume: str | None = None,
    dry_run: bool = False,
    profile: bool = False,
    overrides: Sequence[str] = (),
) -> int:
    """Trains, or prints what would be trained. Returns the exit code."""
    from jaxgrpo.config import files
    from jaxgrpo.planning import preview

    if dry_run and profile:
        raise InputError("--profile: a dry run takes no step that could be traced; leave it out")
    run_config = files.load(config, overrides)
    if dry_run:
        preview.dry_run(run_config, resume == "auto")
    else:
        _train(run_config, resume=resume, profile=profile)
    return 0


def replay(
    files: Sequence[str],
    config: str | None = None,
    resume: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Trains on saved rollouts. Returns the exit code."""
    from jaxgrpo.training.collecting import replay

    _train(replay.replay_config(files, config, overrides), resume=resume, rollouts=files)
    return 0


def _train(*arguments: Any, **options: Any) -> Any:
    """The run of `loop.train`, also where a stop signal came so late that it is complete: a command
    takes no further run."""
    from jaxgrpo.training import loop

    try:
        return loop.train(*arguments, **options)
    except process.StopRequested as stopped:
        if stopped.run is None:
            raise
        return stopped.run


def make_base(out: str, task: str, **options: Any) -> int:
    """Makes a small base model and prints its size and loss. Returns the exit code."""
    console = Console(highlight=False)
    console.print(process.start())
    make_small_base(console, out, task, **options)
    return 0


def make_small_base(
    console: Console, out: str | Path, task: str, label: str | None = None, **options: Any
) -> None:
    """`base_model.make_base` with a progress bar and a line with the model's size and loss.

    Args:
      label: what the folder is called in that line; None: `out`.
    """
    from jaxgrpo.cli import make_base as base_model

    console.print(f"base model for {task}: supervised warm start", markup=False)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("warm start", total=None)

        def report(step: int, steps: int, loss: float) -> None:
            progress.update(bar, completed=step, total=steps, description=f"loss {loss:.3f}")

        with telling(console, "warm start"):
            base = base_model.make_base(out, task, progress=report, **options)
    console.print(
        f"{label or out}: {base['parameters']:,} parameters, loss {base['loss']:.4f} nats per token"
        f" (no model is below {base['loss_floor']:.4f}), {base['seconds']:.0f} s",
        soft_wrap=True,
        markup=False,
    )


def _show(console: Console, folder: Place, summary: Mapping[str, Any]) -> None:
    """The table of the end, from summary.json's own numbers."""
    summary_names = [name for name in summary["base"] if is_summary(name)]
    summary_names.sort(key=lambda name: (name.split("@")[0] != "pass", int(name.split("@")[1])))
    if "flat_groups" in summary["base"]:  # not of fewer samples than a group has
        summary_names.append("flat_groups")
    columns = [(name, summary[name]) for name in ("base", "trained")]
    show_whole(console, comparison("test problems", columns, ["accuracy", *summary_names]))
    speed = summary["time/tokens_per_second"]
    facts(
        console,
        {
            "seconds": f"{summary['time/seconds']:.0f}",
            "sampled tokens per second": "–" if speed is None else f"{speed:,.0f}",
            "model": summary["model"],
            "summary": folder / "summary.json",
            "metrics": summary["metrics"],
            "samples": folder / "samples",
        },
    )
