"""What a run has written, read back: its metrics, its samples, and the texts beside them.

Each file is input like any other: what cannot be read is refused in a line.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a half-written last line is left out.

    Args:
      path: the run folder, or the file.
    Raises: InputError on a line that is no JSON object with a step, unless it is the last one.
    """
    path = storage.place(path) if storage.is_url(path) else Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    return [entry for _, entry in complete_lines(file)]


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in a line, or a step's values, without "eval/"."""
    return {name[5:]: value for name, value in line.items() if name.startswith("eval/")}


def read_samples(path: str | os.PathLike[str], step: int | None = None) -> list[dict[str, Any]]:
    """The rows of a run's file of samples, by default of the newest; [] where there is none."""
    folder = storage.place(path) if storage.is_url(path) else Path(path)
    numbers = [number for number in sample_steps(folder) if step in (None, number)]
    if not numbers:
        return []
    file = folder / "samples" / f"step_{max(numbers)}.jsonl"
    text = file.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    # Split at "\n" alone: a completion may hold other characters that end lines.
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [dict(json.loads(line))] if line else []
        except (ValueError, TypeError, RecursionError):
            raise InputError(
                f"{file}, line {number} is no sample: {line[:60]!r}; take the line out"
            ) from None
    return rows


def sample_steps(path: Place) -> list[int]:
    """The steps of a run that have a file of samples."""
    names = [file.stem.removeprefix("step_") for file in (path / "samples").glob("step_*.jsonl")]
    return [int(name) for name in names if is_step(name)]


def is_step(name: str) -> bool:
    """Whether it is the number of a step as we write it: "9", and not "0009"."""
    return name.isdecimal() and name == str(int(name))


def read_text(file: Path) -> str | None:
    """The text of a file of a run; None where there is none. Raises: InputError."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): put back what "
            "the run wrote there, or set run.dir to another folder"
        ) from None


def read_bytes(file: Path) -> bytes | None:
    """The content of a file; None where it cannot be read, as a folder cannot."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def complete_lines(file: Place) -> list[tuple[bytes, dict[str, Any]]]:
    """Each complete line of a metrics file, as bytes with its end, and what it says."""
    try:
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror or error}): put back what the run wrote "
            "there, or start again in another run.dir"
        ) from None
    result = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if not line.endswith(b"\n") or not isinstance(entry["step"], int):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(lines):  # the process died while it wrote this line
                break
            raise InputError(
                f'{file}, line {number} is not a JSON object with a "step": {line[:60]!r}; '
                "take the line out, or start again in another run.dir"
            ) from None
        result.append((line, entry))
    return result
