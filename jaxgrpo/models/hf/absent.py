"""What a model folder has instead of its weights or its tokenizer, and what to do then.

A repository that was cloned without Git LFS has small pointers under the names of its large files;
some models are published as pickles or GGUF alone. Messages name what there is, with the way to a
folder that is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jaxgrpo.core.errors import InputError

POINTER = b"version https://git-lfs"
"""How the text begins that Git LFS has for a file."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
INDEX = ".index.json"
"""The end of the name of a file that lists the parts of weights; the hub's cache has it alone."""


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raises: InputError for the first file that is a pointer of Git LFS; none need be there."""
    for file in files:
        if not file.is_file():
            continue
        with file.open("rb") as stream:
            is_pointer = stream.read(len(POINTER)) == POINTER
        if is_pointer:
            raise InputError(
                f"{file} is a pointer of Git LFS and not the file: the folder was cloned without "
                f"it; run `git lfs install` and `git lfs pull` in {file.parent}, or fetch the "
                "model again by `hf download`"
            )


def is_of_hub(folder: Path) -> bool:
    """Whether a folder is a snapshot in the cache of the hub, which has no pickles and no GGUF."""
    return folder.parent.name == "snapshots"


def gguf_remedy(folder: Path) -> str:
    """How a folder is made of the GGUF files that lie in one, or may lie on the hub; "": there are
    none."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"; jaxgrpo import {ggufs[0]} OUT writes one"
    if is_of_hub(folder):
        return (
            "; GGUF files of the hub are not fetched: `hf download NAME FILE --local-dir DIR`, and "
            "jaxgrpo import DIR/FILE OUT writes one"
        )
    return ""


def no_weights(folder: Path, expected: str) -> InputError:
    """The error of a folder without safetensors.

    Args:
      expected: names of the files that are read.
    """
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return InputError(
            f"{folder} has weights only as {pickles[0].removesuffix(INDEX)}, a pickle, which can "
            "run any code and is not read: convert it to safetensors (save_pretrained of "
            "transformers writes them)"
        )
    hub = " (of the hub safetensors alone are fetched, no pickles, and nothing without a network)"
    where = hub if is_of_hub(folder) else ""
    return InputError(
        f"{folder} has no {expected}{where}: give a folder with weights{gguf_remedy(folder)}"
    )
