"""Commands run as a user runs them: with one device and an optimising compiler, and timed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import small_run

LIMIT = 300  # seconds that `jaxgrpo quickstart` may take on two cores


def run(python: str, folder: Path, *arguments: str) -> tuple[str, dict[str, Any], float]:
    """A command with the devices and the compiler of a user: (output, summary, seconds)."""
    began = time.monotonic()
    environment = {**os.environ, "XLA_FLAGS": "", "NO_COLOR": "1", "COLUMNS": "120"}
    process = small_run.command(python, *arguments, cwd=folder, env=environment)
    output, _ = process.communicate(timeout=2 * LIMIT)
    assert process.returncode == 0, output
    [summary] = folder.glob("runs/*/summary.json")
    return output, json.loads(summary.read_text()), time.monotonic() - began
