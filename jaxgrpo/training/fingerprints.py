"""What a run was given, as short texts and numbers: its config, own code, data and base model.

They tell whether two processes of a run were given the same, and whether a run that goes on is
evaluated on the same questions as before.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.own_code import file_of, short_name
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.models.hf import adapters, folders

REMEDY = "give every process of a run the same config, code, data and base model"
LOCAL = ("model.path", "lora.path", "data.path", "eval.data", "run.dir", "tracking")
"""Keys, and a table, that may differ between machines: what is found there is compared instead."""


def given_by(config: Config) -> dict[str, Any]:
    """What has to be alike before anything is set up: the config, own code and the base model."""
    facts = configs.flat(configs.tables_of(config))
    local = tuple(f"{key}." for key in LOCAL)
    facts = {name: value for name, value in facts.items() if not f"{name}.".startswith(local)}
    base = folders.fingerprint(folders.find_folder(config.model.path, config.model.revision))
    adapter = [] if config.lora.path is None else adapters.files_of(config.lora.path)
    found = {"model.path": base, "lora.path": code_of(adapter)}
    return {**facts, **found, "own code": code_of(config.own_files)}


def code_of(files: Iterable[Path]) -> dict[str, str]:
    """Name -> checksum of files, as own code; what is missing is refused where it is loaded."""
    return {file.name: checksum([file.read_bytes()]) for file in files if file.is_file()}


def data_of(rows: Sequence[Mapping[str, Any]], encoded: Sequence[np.ndarray]) -> str:
    """Number and checksum of rows and their prompts' tokens."""
    parts = (
        part
        for row, ids in zip(rows, encoded, strict=True)
        for part in (json.dumps(row, default=_kind).encode(), ids.tobytes())
    )
    return f"{len(rows)} rows, crc32 {checksum(parts)}"


def asked_by(config: Config, held_out: PromptData) -> dict[str, Any]:
    """What evaluations ask and how they judge: numbers of other questions cannot be compared.

    The rows and not the name of the file; the scorer and its code; samples and the other keys of
    `eval` that act on a number.
    """
    asked = config.eval
    use = asked.scorer or config.rewards[0].use
    keys = configs.flat({"eval": configs.tables_of(config)["eval"]})
    where = ("data", "subset", "split", "prompts", "scorer", "every")
    kept = {name: value for name, value in keys.items() if name.removeprefix("eval.") not in where}
    file = file_of(use)
    return {
        **kept,
        "eval.data": data_of(held_out.rows[: asked.prompts], held_out.encoded[: asked.prompts]),
        "eval.scorer": [short_name(use), *code_of([Path(file)] if file else []).values()],
    }


def checksum(parts: Iterable[bytes]) -> str:
    """The crc32 of all parts, in hexadecimal digits."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def _kind(value: Any) -> str:
    # Not its repr, which may hold an address in memory.
    return type(value).__name__
