"""Runs every command of README.md, in order, as a new user would: `make readme`, part of CI.

    python tests/readme.py

In a new folder: the source distribution of this checkout, and an environment into which the package
is installed from it. The packages that it needs are those of the environment that runs this
script; nothing is fetched. Where a line says what it prints, that must come out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("make ", "pip ", "jaxgrpo ", "$ ")

INSTALL = "python -m pip install --quiet --no-deps --no-build-isolation ."
INSTEAD = {
    "pip install .": INSTALL,
    "make quickstart": f"{INSTALL} && make --old-file .venv/.run-time quickstart",
    "make agents": "make --old-file .venv/.run-time agents",
    "make real-model": "true",  # as a test of `make test-long`
}
"""Lines that are run in another way: what the package needs is there already."""


def main() -> int:
    """Exit code 1 if a command fails, or prints something else than the page says."""
    blocks = command_blocks((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    if len(blocks) < 3 or not any("jaxgrpo train" in line for block in blocks for line in block):
        raise SystemExit(f"README.md: only {len(blocks)} blocks of commands were found")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxgrpo-readme-") as folder:
        checkout = source_distribution(Path(folder))
        environment = new_environment(checkout / ".venv")
        for block in blocks:
            run(block, checkout, environment)
    say(f"{len(blocks)} blocks of commands ran in {time.monotonic() - began:.0f} s")
    return 0


def command_blocks(text: str) -> list[list[str]]:
    """The lines of each block that begins with a program; what a "$ " line prints follows it."""
    blocks = [block.splitlines() for language, block in BLOCK.findall(text) if not language]
    return [block for block in blocks if block[0].startswith(PROGRAMS)]


def source_distribution(target: Path) -> Path:
    """The folder of its files: those that git has or would have, also where there is no git."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(target)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (archive,) = target.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(target, filter="data")
    return target / archive.name.removesuffix(".tar.gz")


def new_environment(folder: Path) -> dict[str, str]:
    """A virtual environment with this one's packages, but for the package itself; its variables."""
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    # Files .pth in a folder that is named in one are not read: an editable install stays out.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("JAX")}
    return {
        **{
            name: value
            for name, value in variables.items()
            if name not in ("PYTHONPATH", "XLA_FLAGS")
        },
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "XDG_CACHE_HOME": str(folder.parent.parent / "cache"),  # no program compiled before
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }


def run(block: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Runs a block in one shell, which a failing line ends."""
    shown, *printed = block
    command = shown.removeprefix("$ ")
    if command != shown:
        output = shell([command], folder, environment, capture=True)
        lines = [line.rstrip() for line in output.splitlines()]
        if lines != printed:
            expected = "\n".join(printed)
            raise SystemExit(f"README.md: `{command}` prints\n{output}\nand not\n{expected}")
        return
    commands = [line.partition("#")[0].strip() for line in block]
    shell([INSTEAD.get(command, command) for command in commands], folder, environment)


def shell(
    commands: list[str], folder: Path, environment: dict[str, str], capture: bool = False
) -> str:
    """What the commands print, if it is captured. Ends this process if one fails."""
    script = "\n".join(["set -eu", "PS4='README ${SECONDS}s: '", "set -x", *commands])
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"README.md: exit code {process.returncode} after the line above")
    return process.stdout or ""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
