"""What a run has written, read back: its metrics, its samples, and the texts beside them.

Each file is input like any other: what cannot be read is refused in a line.
"""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import sources, storage
from jaxgrpo.data.storage import Place

MOST_STEPS = 1 << 53
"""Of a line of metrics: as many as a float can count."""

SAMPLE_TYPES: dict[str, type | tuple[type, ...]] = {
    "step": int,  # the step it was drawn for, as in metrics.jsonl
    "ordinal": int,  # place of its prompt in the run's prompt stream
    "row": int,  # row of its prompt in the data set
    "sample": int,  # index within the group
    "prompt": (str, list),  # a text, or messages
    "completion": (str, list),
    "completion_ids": list,
    "logps": list,  # log-probability of each token of completion_ids under the sampler
    "rewards": dict,  # {name: reward, null where it could not be scored}
    "advantage": (int, float, list, type(None)),  # one number, or one per token
    "truncated": bool,  # stopped by the length limit
}
"""What each sample of samples/step_N.jsonl has, in this order."""
OPTIONAL_TYPES: dict[str, type | tuple[type, ...]] = {
    "source": str,
    "prefix": str,
    "extra": dict,
    "turns": list,
    "messages": list,
    "problem": str,
}
"""What some samples have behind it (docs/environments.md)."""
TURN_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "tokens": int,
    "reply": str,
    "reply_tokens": int,
    "reward": (int, float, type(None)),
}
"""What each of the turns of a sample has."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, as a float holds it."""
    number: Any = value
    return isinstance(value, numbers.Real) and bool(abs(number) <= sys.float_info.max)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a half-written last line is left out.

    Args:
      path: the run folder, or the file.
    Raises: InputError on a line that is no JSON object with a step, unless it is the last one.
    """
    path = storage.place_as_named(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    return [entry for _, entry in complete_lines(file)]


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in a line, or a step's values, without "eval/"."""
    return {name[5:]: value for name, value in line.items() if name.startswith("eval/")}


def read_samples(path: str | os.PathLike[str], step: int | None = None) -> list[dict[str, Any]]:
    """The rows of a run's file of samples, by default of the newest; [] where there is none."""
    folder = storage.place_as_named(path)
    numbers = [number for number in sample_steps(folder) if step in (None, number)]
    if not numbers:
        return []
    file = folder / "samples" / f"step_{max(numbers)}.jsonl"
    text = file.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    # Split at "\n" alone: a completion may hold other characters that end lines.
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [_parse_sample(line)] if line else []
        except ValueError as error:
            raise InputError(
                f"{file}, line {number} is no sample ({error}): {line[:60]!r}; take the line out"
            ) from None
    return rows


def _parse_sample(line: str) -> dict[str, Any]:
    """Raises: ValueError where it lacks something of SAMPLE_TYPES, or has something else."""
    row = sources.parse_json(line)
    _check_types(row, SAMPLE_TYPES)
    _check_types(row, {name: kinds for name, kinds in OPTIONAL_TYPES.items() if name in row})
    for turn in row.get("turns", ()):
        _check_types(turn, TURN_TYPES)
    return row


def _check_types(entry: Any, types: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raises: ValueError where it is no JSON object, or what it has is of another kind."""
    if not isinstance(entry, dict):
        raise ValueError("no JSON object")
    for name, kinds in types.items():
        if not isinstance(entry.get(name, ...), kinds):
            raise ValueError(f"{name} is {entry.get(name, 'missing')!r:.60}")


def sample_steps(path: Place) -> list[int]:
    """The steps of a run that have a file of samples."""
    names = [file.stem.removeprefix("step_") for file in (path / "samples").glob("step_*.jsonl")]
    return [int(name) for name in names if is_step(name)]


def is_step(name: str) -> bool:
    """Whether it is the number of a step as we write it: "9", and not "0009"."""
    return name.isdecimal() and name == str(int(name))


def read_object(file: Place, *names: str) -> dict[str, Any]:
    """The JSON object of a file of a run. Raises: InputError where it lacks one of the names."""
    try:
        content = sources.parse_json(read_text(file) or "")
        problem = ""
    except ValueError as error:
        content, problem = None, f" ({error})"
    if not isinstance(content, dict) or not content.keys() >= {*names}:
        raise InputError(
            f"{file} is no JSON object with {', '.join(names)}{problem}: put back what the run "
            "wrote there, or set run.dir to another folder"
        )
    return content


def read_replay(run: Place) -> dict[str, Any] | None:
    """What replay.json of a run folder holds; None where it has none. Raises: InputError."""
    file = run / "replay.json"
    return read_object(file, "files", "crc32") if file.exists() else None


def read_text(file: Place) -> str | None:
    """The text of a file of a run; None where there is none. Raises: InputError."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): put back what "
            "the run wrote there, or name another folder"
        ) from None


def read_bytes(file: Place) -> bytes | None:
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
            entry = sources.parse_json(line)
            step = entry["step"]
            if not line.endswith(b"\n") or type(step) is not int or not 0 <= step < MOST_STEPS:
                raise ValueError
        except (ValueError, TypeError, KeyError):
            if number == len(lines):  # the process died while it wrote this line
                break
            raise InputError(
                f'{file}, line {number} is not a JSON object with a "step" and each name once: '
                f"{line[:60]!r}; take the line out, or start again in another run.dir"
            ) from None
        result.append((line, entry))
    return result
