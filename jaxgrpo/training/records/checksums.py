"""Whether metrics.jsonl is what the run wrote: the checksums by which a checkpoint knows it.

A checkpoint holds [bytes, crc32] of the metrics that were logged before it. A start that evaluates
other questions changes lines of steps that have a checkpoint, before it saves one itself. So it
first writes rewritten.json: for each step with a checkpoint the checksums of all contents that the
lines up to it have had. A start that is killed in between leaves metrics that are known.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from jaxgrpo.data import sources
from jaxgrpo.data.storage import Place
from jaxgrpo.training.records.reading import complete_lines, is_step, read_bytes

REWRITTEN = "rewritten.json"

Checksum = list[int]
"""[bytes, crc32]"""


def checksum(text: bytes) -> Checksum:
    """Bytes and crc32 of a text."""
    return [len(text), zlib.crc32(text)]


def text_until(metrics: Path, step: int) -> bytes:
    """The complete lines of a metrics file up to a step, as bytes."""
    return b"".join(line for line, entry in complete_lines(metrics) if entry["step"] <= step)


def saved_steps(checkpoints: Place) -> list[int]:
    """The steps that a folder of checkpoints has anything of."""
    return sorted(int(path.name) for path in checkpoints.glob("*") if is_step(path.name))


def record_rewrite(
    folder: Path,
    steps: Iterable[int],
    old: Iterable[tuple[int, bytes]],
    new: Iterable[tuple[int, str]],
) -> str:
    """The content of rewritten.json before lines of metrics are replaced.

    Contents are known as long as each replaced one that the run had written: where somebody else
    changed the file in between, the list of that step begins again with what was there.

    Args:
      folder: of the run.
      steps: that have a checkpoint.
      old: (step, line) of the metrics as they are, in their order.
      new: the same as they will be.
    """
    before, after = list(old), [(number, line.encode()) for number, line in new]
    earlier, table = read_rewrites(folder), {}
    for step in steps:
        first, last = (
            checksum(b"".join(line for number, line in lines if number <= step))
            for lines in (before, after)
        )
        contents = earlier.get(step, [])
        contents = contents if first in contents else [first]
        table[step] = contents + [last] * (last not in contents)
    return json.dumps(table)


def read_rewrites(folder: Path) -> dict[int, list[Checksum]]:
    """Step -> the contents that its metrics have had; {} where none were rewritten."""
    try:
        table = sources.parse_json(read_bytes(folder / REWRITTEN) or b"{}")
        return {int(step): [list(pair) for pair in pairs] for step, pairs in table.items()}
    except (ValueError, TypeError, AttributeError):
        return {}  # it is damaged: metrics that were rewritten are then said to be others


def is_written(folder: Path, step: int, saved: Checksum, present: Checksum) -> bool:
    """Whether metrics are what the run wrote until a step, or what it put in their place.

    Args:
      folder: of the run.
      saved: as the checkpoint of that step has it.
      present: of the lines as they are.
    """
    contents = read_rewrites(folder).get(step, [])
    return saved == present or (saved in contents and present in contents)
