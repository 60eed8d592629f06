"""Which folder a model or an adapter may replace, and how: whole, and only what we wrote."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place

CARD = "README.md"
CARD_TITLE = "# Trained with jaxgrpo"
"""In each model card that we write: a folder without it was written by someone else."""
TEMPLATES = "additional_chat_templates"
"""The folder in which a tokenizer with several named templates keeps those beside the first."""


class Contents(NamedTuple):
    """What belongs into a folder of ours."""

    noun: str  # with its article
    files: re.Pattern[str]  # names of the files, but for the card
    config: str
    weights: tuple[str, ...]  # any of which must be there
    remedy: str = ""  # how to replace those that someone else wrote
    title: str = CARD_TITLE  # of the card of those that may be replaced


def refuse_unless_ours(
    folder: Place, contents: Contents, bases: Iterable[str | Path] = (), overwrite: bool = False
) -> None:
    """Refuses a folder that may not be replaced; one that is missing or empty may be.

    Ours are folders that hold our card, a config and weights, and no other file.

    Args:
      bases: folders and URLs of models that are never replaced; names on the hub are none.
      overwrite: allow a model that someone else wrote.

    Raises: InputError saying what is there.
    """
    storage.refuse_unwritable(folder, contents.noun)
    names = _names(folder)
    if not names:
        return
    for base in bases:
        if _holds(folder, base):
            raise InputError(
                f"{folder} holds files of {base}, from which this run was trained: "
                "they are never replaced; choose another folder"
            )
    has_card = CARD in names and contents.title.encode() in (folder / CARD).read_bytes()
    is_ours = has_card or overwrite
    allowed = {CARD} if is_ours else set()
    foreign = [name for name in names if name not in allowed and not contents.files.fullmatch(name)]
    has_model = contents.config in names and not names.isdisjoint(contents.weights)
    if foreign:
        obstacle = f"{min(foreign).rstrip('/')}, which is no file of {contents.noun}"
    elif not has_model:
        obstacle = f"{min(names)} and not {contents.noun} ({contents.config} and its weights)"
    elif not is_ours:
        obstacle = (
            f"{contents.noun} that jaxgrpo did not write (no {CARD} with {contents.title!r}"
            f"{contents.remedy})"
        )
    else:
        return
    raise InputError(
        f"{folder} exists and holds {obstacle}: it is not replaced; choose another folder or empty "
        "this one"
    )


def _names(folder: Place) -> set[str]:
    """The files of a folder; what is no plain file of it ends in "/", but for templates."""
    if storage.is_url(folder):
        return set(storage.listing(folder))
    names = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == TEMPLATES and path.is_dir() and not os.path.islink(path):
            names |= {f"{TEMPLATES}/{name}" for name in _names(path)}
        else:
            names.add(path.name if path.is_file() and not os.path.islink(path) else f"{path.name}/")
    return names


def _holds(folder: Place, base: str | Path) -> bool:
    """Whether a base, or a file that it links to, is in a folder."""
    if storage.is_url(folder) or storage.is_url(base):
        return f"{os.fspath(base).rstrip('/')}/".startswith(f"{os.fspath(folder).rstrip('/')}/")
    if not os.path.isdir(base):
        return False
    if os.path.samefile(folder, base):
        return True
    target = Path(folder).resolve()
    parts = [Path(base), *(path for path in Path(base).iterdir() if path.is_file())]
    return any(path.resolve().is_relative_to(target) for path in parts)


def write_card(folder: Path, text: str | None = None, title: str = CARD_TITLE) -> None:
    """Writes README.md with our title, by which the folder is recognised as ours."""
    if text is None or title not in text:
        text = "\n".join([*([] if text is None else [text]), f"{title}\n"])
    (folder / CARD).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced(folder: Path, refuse: Callable[[Path], None]) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place when the block ends without an error.

    The files are flushed to disk before they are renamed, so that `folder` is at any moment the
    old one, the new one or, between two renames, absent; never half written. A link stays, and
    what it points to is replaced.

    Args:
      refuse: raises where what is there may not be replaced.
    """
    folder = folder.resolve()
    refuse(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    previous = folder.with_name(f".{folder.name}.previous")
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        storage.flush_tree(partial)
        _remove(previous)
        if folder.exists():
            folder.rename(previous)
        partial.rename(folder)
        storage.flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes what a process that died has left there; of a link the link alone."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
