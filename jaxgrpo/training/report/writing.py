"""The report of a run folder, written into it or printed."""

from __future__ import annotations

from pathlib import Path

from jaxgrpo.config.own_code import installed
from jaxgrpo.core.errors import InputError
from jaxgrpo.training.folder import write_atomically
from jaxgrpo.training.report.record import read_run

NAME = "report.html"


def check_can_draw(who: str, instead: str) -> None:
    """Raises: InputError where matplotlib is missing: what needs it, and what to do instead."""
    if not installed("matplotlib"):
        raise InputError(f"{who} matplotlib: pip install matplotlib, or {instead}")


def write_report(folder: Path, status: str | None = None) -> Path:
    """Writes report.html into a run folder, whole or not at all, and returns its path.

    Args:
      status: of the run, where the caller knows; None looks at the folder.
    Raises: InputError where the folder holds no run, cannot be written, or matplotlib is missing.
    """
    check_can_draw(f"{NAME} needs", f"print the report with `jaxgrpo report {folder} --text`")
    from jaxgrpo.training.report import page

    text = page.render(read_run(folder, status))
    target = folder / NAME
    try:
        write_atomically(target, text)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror}): free space or permissions there, or "
            f"print the report with `jaxgrpo report {folder} --text`"
        ) from error
    return target


def report(folder: str | Path, text: bool = False) -> int:
    """The command: writes report.html anew, or prints a summary. Returns the exit code."""
    from rich.console import Console

    console = Console(highlight=False)
    if text:
        from jaxgrpo.training.report import terminal

        terminal.show(console, read_run(Path(folder)))
    else:
        console.print(str(write_report(Path(folder))), markup=False, soft_wrap=True)
    return 0
