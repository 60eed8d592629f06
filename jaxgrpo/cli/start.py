"""The commands around training: quickstart, train, replay, make-base and doctor.

Each imports the trainer when it runs: doctor works where a package that the trainer needs is not
installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.storage import Place
from jaxgrpo.training import process
from jaxgrpo.training.console import comparison, facts, is_summary, telling

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "flax", "optax"),
    *("orbax-checkpoint", "transformers", "tokenizers", "safetensors", "datasets", "numpy"),
)
EXTRAS: dict[str, tuple[str, ...]] = {
    "math": ("math-verify",),
    "wandb": ("wandb",),
    "gcs": ("gcsfs",),
    "s3": ("s3fs",),
    "plan": ("libtpu", "jax-cuda12-plugin"),
}
"""Extras of this package -> what they install."""
GIB = 2**30


def quickstart(family: str | None = None, overrides: Sequence[str] = ()) -> int:
    """Builds the base where it is missing, trains it, prints the table. Returns the exit code.

    Args:
      family: of the base, in folders with its name; None: what configs/quickstart.toml says.
    """
    from jaxgrpo.config import files
    from jaxgrpo.models.hf import families, folders
    from jaxgrpo.training import loop

    asked = {} if family is None else {"family": family}
    if family is not None:
        families.family_of(family, "quickstart --family")
        places = f"model.path=runs/base-{family}", f"run.dir=runs/quickstart-{family}"
        overrides = [*places, *overrides]
    config = files.load("quickstart", overrides)
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
        make_small_base(console, base, "arithmetic", seed=config.train.seed, **asked)
    elif family is not None and (found := folders.read_config(base).family) != family:
        raise InputError(
            f"quickstart --family {family}: {base} is a {found}: remove it, or name another folder "
            "with --set model.path=..."
        )
    run = loop.train(config, resume="auto")
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
    from jaxgrpo.training import loop

    read = files.load(config, overrides)
    if dry_run:
        preview.dry_run(read, resume == "auto")
    else:
        loop.train(read, resume=resume, profile=profile)
    return 0


def replay(
    files: Sequence[str],
    config: str | None = None,
    resume: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Trains on saved rollouts. Returns the exit code."""
    from jaxgrpo.training import loop, replay

    loop.train(replay.config_of(files, config, overrides), resume=resume, rollouts=files)
    return 0


def make_base(out: str, task: str, **options: Any) -> int:
    """Makes a small base model and prints its size and loss. Returns the exit code."""
    console = Console(highlight=False)
    console.print(process.start())
    make_small_base(console, out, task, **options)
    return 0


def doctor() -> int:
    """Prints versions, devices, memory and disk; 2 where JAX cannot use the machine's devices."""
    columns = Column(style="bold"), Column(overflow="fold")
    table = Table(*columns, title=f"jaxgrpo {jaxgrpo.__version__}", show_header=False)
    found = _devices()
    for rows in (_versions(), found, _memory(), _disk()):
        for name, value in rows.items():
            table.add_row(escape(name), escape(value))
        table.add_section()
    Console().print(table)
    return 2 if "problem" in found else 0


def _versions() -> dict[str, str]:
    """Of Python, the system and the packages that results depend on."""
    rows = {"python": platform.python_version(), "system": platform.platform()}
    rows |= {"commit": _commit()} | {name: _version(name) for name in PACKAGES}
    for extra, names in EXTRAS.items():
        versions = ", ".join(f"{name} {_version(name)}" for name in names)
        rows[f"jaxgrpo[{extra}]"] = versions
    return rows


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """That of the checkout, or of the repository, which this package was installed from."""
    folder = Path(jaxgrpo.__file__).parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", folder, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # The folder of an installed package may be inside the checkout of another project.
    if git("ls-files", "--error-unmatch", "__init__.py"):
        changed = ", with changes" if git("status", "--porcelain", "--", ".") else ""
        return f"{git('rev-parse', '--short', 'HEAD')}{changed}"
    try:
        origin = importlib.metadata.distribution("jaxgrpo").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    installed = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return installed or f"not known: version {jaxgrpo.__version__}, no checkout"


def _devices() -> dict[str, str]:
    """What JAX computes on, with the memory of each device where it tells."""
    try:
        rows = {"devices": process.start("auto")}
    except InputError as error:
        rows = {"problem": str(error)}
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            used, limit = stats.get("bytes_in_use", 0) / GIB, stats["bytes_limit"] / GIB
            rows[f"device {device.id}"] = f"{used:.1f} of {limit:.1f} GiB in use"
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    rows["processor"] = f"{cores} cores for this process"
    return rows


def _memory() -> dict[str, str]:
    """Of the machine."""
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return {"memory": "this system does not tell"}
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page / GIB for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return {"memory": f"{total:.1f} GiB, {free:.1f} GiB unused"}


def _disk() -> dict[str, str]:
    """Where runs and compiled programs go."""
    rows = {}
    places = {"runs": Path.cwd() / "runs", "compile cache": process.cache_folder(os.environ)}
    for name, folder in places.items():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        rows[name] = f"{folder}, {shutil.disk_usage(there).free / GIB:.1f} GiB free"
    return rows


def make_small_base(
    console: Console, out: str | Path, task: str, shown: str | None = None, **options: Any
) -> None:
    """`base_model.make_base` with a progress bar and a line with the model's size and loss.

    Args:
      shown: what the folder is called in that line; None: `out`.
    """
    from jaxgrpo.cli import make_base as base_model

    console.print(f"base model for {task}: supervised warm start")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("warm start", total=None)

        def report(done: int, steps: int, loss: float) -> None:
            progress.update(bar, completed=done, total=steps, description=f"loss {loss:.3f}")

        with telling(console, "warm start"):
            made = base_model.make_base(out, task, progress=report, **options)
    console.print(
        f"{shown or out}: {made['parameters']:,} parameters, loss {made['loss']:.4f} nats per token"
        f" (no model is below {made['loss_floor']:.4f}), {made['seconds']:.0f} s",
        soft_wrap=True,
    )


def _show(console: Console, folder: Place, summary: Mapping[str, Any]) -> None:
    """The table of the end, from summary.json's own numbers."""
    several = [name for name in summary["base"] if is_summary(name)]
    several.sort(key=lambda name: (name.split("@")[0] != "pass", int(name.split("@")[1])))
    names = ["accuracy", *several]
    columns = [(name, summary[name]) for name in ("base", "trained")]
    console.print(comparison("test problems", columns, [*names, "flat_groups"]))
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
