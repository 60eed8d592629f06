"""The tasks of the package reasoning-gym: "task:reasoning_gym:NAME:SPLIT", with options behind it.

    task:reasoning_gym:chain_sum:train?min_terms=2&max_terms=3&size=2000

The package runs in child processes alone (`reasoning_program.py`), whose hashes are fixed: some of
its generators go through sets, and would ask other questions in each process. So rows are the same
whenever they are made, and a row need not carry what its scorer knows. Its column `entry` says how
it is made again; the reward `reasoning_gym` does so where it scores.

A hash of its question puts each row in one split, whatever its seed. (Different seeds would not do:
the package draws row i of seed s from s + i, so seeds overlap but for their ends.)
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrpo.core.errors import InputError, cut

NAME = "reasoning_gym"
PROGRAM = Path(__file__).with_name("reasoning_program.py")
NEEDED = (
    "needs the package reasoning-gym, which is not installed: "
    'pip install "jaxgrpo[envs]" (or reasoning-gym by itself)'
)
SPLITS = {"train": 1024, "test": 256}
SECONDS = 600  # for the rows of a split
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Of its processes: sets have the same order in all of them."""


def find(name: str, options: Mapping[str, Any]) -> functools.partial[list[dict[str, Any]]]:
    """What makes the rows of a generator: a function of (split, count, seed).

    Raises: InputError where the package is not installed, knows no such generator or option, or
      the generator refuses its options.
    """
    _ask(name, json.dumps(options), 0, "test", 0)
    return functools.partial(_rows, name, json.dumps(options))


def _rows(name: str, options: str, split: str, count: int, seed: int) -> list[dict[str, Any]]:
    reply = _ask(name, options, seed, split, count)
    if len(reply) < count:
        raise InputError(
            f"{NAME}:{name} made {len(reply)} of {count} rows of {split!r} in {SECONDS} s and "
            f"20,000 tries: ask for fewer, task:{NAME}:{name}:{split}?size={max(len(reply), 1)}"
        )
    return [
        {"prompt": question, "answer": answer or "", "entry": json.dumps([*place, index])}
        for place in [(name, json.loads(options), seed)]
        for index, question, answer in reply
    ]


@functools.lru_cache(64)
def _ask(name: str, options: str, seed: int, split: str, count: int) -> list[tuple[int, str, str]]:
    """(index, question, answer) of rows, from a process that ends with them."""
    where = f"task:{NAME}:{name}"
    if importlib.util.find_spec(NAME) is None:
        raise InputError(f"{where} {NEEDED}")
    question = json.dumps([name, json.loads(options), seed, split, count, SECONDS])
    process = subprocess.run(
        [sys.executable, "-P", str(PROGRAM)],
        input=question.encode(),
        capture_output=True,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    try:
        reply = json.loads(process.stdout)
    except ValueError:
        problem = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InputError(f"{where}: its process ended ({cut(problem)}): name another") from None
    if names := reply.get("unknown"):
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {len(names)} others"
        raise InputError(f"{where}: reasoning-gym has no generator {name!r}: {hint}")
    if "error" in reply:
        raise InputError(f"{where}: {cut(reply['error'])}")
    return [tuple(row) for row in reply["rows"]]
