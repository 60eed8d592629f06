"""`jaxgrpo doctor`: what a bug report has to say of a machine, in at most eleven lines.

It works where a package that the trainer needs is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from packaging.requirements import Requirement
from rich.console import Console

import jaxgrpo
from jaxgrpo.core.errors import InputError, without_passwords
from jaxgrpo.data import storage
from jaxgrpo.training.processes import host, process
from jaxgrpo.training.processes.backend import devices_line, start_backend
from jaxgrpo.training.records.console import Document

PACKAGES = (
    ("jax", "jaxlib", "flax", "orbax-checkpoint"),
    ("numpy", "optax", "transformers", "tokenizers", "datasets"),
)
"""What results depend on, by line."""
DEVICE_PACKAGES = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
"""What JAX needs beside itself for a TPU or a GPU; shown where it is installed."""
WIDTH = 80  # columns that a line has, if it can


def main(as_json: bool = False) -> int | Document:
    """Prints it. Returns: the exit code, 2 where JAX cannot use the machine's devices."""
    machine = examine()
    code = 0 if machine["problem"] is None else 2
    if as_json:
        return Document(machine, code)
    console = Console(highlight=False)
    for line in lines(machine):
        console.print(without_passwords(line), markup=False, emoji=False, soft_wrap=True)
    return code


def examine() -> dict[str, Any]:
    """Versions, devices, memory and disk in bytes, and what each extra lacks."""
    names = [*(name for line in PACKAGES for name in line), "safetensors"]
    return {
        "jaxgrpo": jaxgrpo.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in (*names, *DEVICE_PACKAGES)},
        **_devices(),
        "memory": _memory(),
        "disk": _disk(Path.cwd()),
        "compile_cache": _cache(),
        "extras": _extras(),
    }


def lines(machine: Mapping[str, Any]) -> Iterator[str]:
    """What to print of `examine`: eight lines, and one each of plugins, a problem, incomplete
    extras."""
    packages = machine["packages"]
    yield f"jaxgrpo {machine['jaxgrpo']}, commit {machine['commit'] or 'not known'}"
    yield f"python {machine['python']} on {machine['system']}"
    for names in PACKAGES:
        yield ", ".join(f"{name} {packages[name] or 'NOT INSTALLED'}" for name in names)
    yield f"devices: {machine['devices']}, {machine['cores']} cores"
    if plugins := [f"{name} {packages[name]}" for name in DEVICE_PACKAGES if packages[name]]:
        yield f"plugins: {', '.join(plugins)}"
    if machine["problem"]:
        yield f"problem: {machine['problem']}"
    yield f"memory: {_memory_words(machine['memory'], machine['device_memory'])}"
    yield f"disk: {_size(machine['disk']['free'])} free in {_short(machine['disk']['folder'])}"
    cache = machine["compile_cache"]
    unused = "" if cache["used"] else ", not used here"
    size = "" if cache["bytes"] is None else f", {_size(cache['bytes'])}"
    yield f"compile cache: {_short(cache['folder'])}{size}{unused}"
    yield from _extras_line(machine["extras"])


def find_missing(package: str, extra: str) -> Iterator[str]:
    """What an extra of an installed package asks for and is not installed, as in its metadata.

    Extras that it asks for of other packages are followed, as "jax[cuda12]".
    """
    for text in importlib.metadata.requires(package) or ():
        requirement = Requirement(text)
        applies = requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        if not applies or (requirement.marker and requirement.marker.evaluate({"extra": ""})):
            continue  # of another extra or system, or needed without an extra
        version = _version(requirement.name)
        if version is None:
            yield requirement.name
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version}, not {requirement.specifier}"
        else:
            for inner in sorted(requirement.extras):
                yield from find_missing(requirement.name, inner)


def _extras() -> dict[str, list[str]] | None:
    """Each extra of this package -> what it lacks; None where the package is not installed."""
    try:
        names = importlib.metadata.metadata("jaxgrpo").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return {name: sorted({*find_missing("jaxgrpo", name)}) for name in names}


def _extras_line(extras: Mapping[str, Iterable[str]] | None) -> Iterator[str]:
    """A line on the extras that lack something; none where all are whole.

    >>> *_extras_line({"s3": ["s3fs"], "wandb": []}),
    ("extras without: s3 (s3fs); pip install 'jaxgrpo[s3]'",)
    """
    if extras is None:
        yield "extras: not known, since jaxgrpo is not installed (pip install .)"
    elif incomplete := {name: ", ".join(missing) for name, missing in extras.items() if missing}:
        name = next(iter(incomplete)) if len(incomplete) == 1 else "NAME"
        long_names = (f"{extra} ({missing})" for extra, missing in incomplete.items())
        texts = [
            f"extras without: {', '.join(names)}; pip install 'jaxgrpo[{name}]'"
            for names in (long_names, incomplete)
        ]
        texts.append(f"extras without: {', '.join(incomplete)}")
        yield next((text for text in texts if len(text) <= WIDTH), texts[-1])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """That of the checkout, or of the repository, which this package was installed from."""
    folder = Path(jaxgrpo.__file__).parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", folder, *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    # The folder of an installed package may be inside the checkout of another project.
    if git("ls-files", "--error-unmatch", "__init__.py"):
        changes = ", with changes" if git("status", "--porcelain", "--", ".") else ""
        return f"{git('rev-parse', '--short', 'HEAD')}{changes}"
    try:
        origin = importlib.metadata.distribution("jaxgrpo").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")


def _devices() -> dict[str, Any]:
    """What JAX computes on, with the memory of each device where it says."""
    problem, devices = None, []
    try:
        process.start("auto")
    except InputError as error:
        problem = str(error)
    with contextlib.suppress(InputError):  # which is the problem already
        start_backend()
        devices = jax.local_devices()
    stats = [device.memory_stats() or {} for device in devices]
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
    return {
        "devices": devices_line() if devices else "none",
        "problem": problem,
        "device_memory": [
            {"total": device_stats["bytes_limit"], "used": device_stats.get("bytes_in_use", 0)}
            for device_stats in stats
            if "bytes_limit" in device_stats
        ],
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
    }


def _memory() -> dict[str, int] | None:
    """Of the machine, as far as this process may use it; None where the system does not say."""
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    total = host.memory_bytes()
    unused = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return {"total": total, "unused": min(total, unused)}


def _memory_words(machine: Mapping[str, int] | None, devices: Sequence[Mapping[str, int]]) -> str:
    words = "not known"
    if machine is not None:
        words = f"{_size(machine['total'])}, {_size(machine['unused'])} unused"
    if devices:
        total = _size(min(device["total"] for device in devices))
        words += f"; each device {total}, {_size(max(device['used'] for device in devices))} in use"
    return words


def _disk(folder: Path) -> dict[str, Any]:
    """A folder that need not be there yet, and what its disk has free."""
    existing_folder = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return {"folder": str(folder), "free": shutil.disk_usage(existing_folder).free}


def _cache() -> dict[str, Any]:
    """Where compiled programs are kept, how many bytes, and whether this process uses it."""
    try:
        folder = process.cache_folder(os.environ)
    except InputError as error:
        return {"folder": f"none ({error})", "bytes": 0, "used": False}
    used = bool(jax.config.values["jax_enable_compilation_cache"])
    if storage.is_url(os.environ.get("JAX_COMPILATION_CACHE_DIR", "")):
        return {"folder": os.environ["JAX_COMPILATION_CACHE_DIR"], "bytes": None, "used": used}
    size = 0
    for entry in os.scandir(folder) if folder.is_dir() else ():
        try:
            size += entry.stat().st_size
        except FileNotFoundError:  # another process has removed it
            continue
    return {"folder": str(folder), "bytes": size, "used": used}


def _size(count: int) -> str:
    """
    >>> _size(3 * 2**29), _size(2**20)
    ('1.5 GiB', '1.0 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _short(folder: str) -> str:
    """A path without the user's name, which a bug report need not hold."""
    home = os.path.expanduser("~")
    return f"~{folder.removeprefix(home)}" if folder.startswith(f"{home}/") else folder
