"""The files of a saved step: whether they are what was written, and what they say of it."""

from __future__ import annotations

import errno
import zlib
from typing import Any

from jaxgrpo.core.errors import InputError, one_line
from jaxgrpo.data import sources
from jaxgrpo.data.storage import Place

FORMAT = 1  # of the files of a step
LASTING = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
    errno.EIO,
)
"""How the system names a file that is gone or broken. Without a permission, without memory or
descriptors, or where a server or a bucket does not answer, the file may be intact."""


def damage(home: Place) -> str | None:
    """What is wrong with the files of a step, the first file found; None where all are intact.

    Raises: InputError where a file cannot be read now, and may be intact.
    """
    manifest = home / "manifest.json"
    try:
        files = sources.parse_json(manifest.read_bytes())["files"]
        expected = {name: (size, crc) for name, (size, crc) in files.items()}
    except OSError as error:
        return _unreadable(manifest, error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{manifest} cannot be read ({type(error).__name__})"
    if "meta.json" not in expected or not any(name.startswith("state/") for name in expected):
        return f"{manifest} does not list meta.json and the files of state/"
    for name, (size, crc) in sorted(expected.items()):
        if name.startswith("/") or ".." in name.split("/"):
            return f"{manifest} lists {name}, which is no file of the step"
        path = home / name
        try:
            if not path.is_file():
                return f"{path} is missing"
            actual = fingerprint(path)
        except OSError as error:  # a bad sector, no permission, or removed meanwhile
            return _unreadable(path, error)
        if actual != [size, crc]:
            return (
                f"{path} was written as {size} bytes, crc32 {crc}, and is {actual[0]}, {actual[1]}"
            )
    return None


def _unreadable(file: Place, error: OSError) -> str:
    """The answer of `damage` about a file. Raises: InputError where its step may be intact: the
    step before it must not be taken for that, since the next save would then remove it."""
    text = f"{file} cannot be read ({error.strerror or one_line(error)})"
    is_gone = isinstance(error, FileNotFoundError)  # of a bucket, without a number
    if not is_gone and error.errno not in LASTING:
        raise InputError(
            f"{text}, and may be intact: try again once it can, or move the folder of its step away"
        ) from error
    return text


def refuse_other_step(folder: Place, named_step: int, stored_step: int) -> None:
    """Raises: InputError where the folder of a step holds another one, as a renamed one does."""
    if named_step != stored_step:
        raise InputError(
            f"{folder / str(named_step)} holds step {stored_step} and not {named_step}: "
            "give it its own name back, or remove it"
        )


def read_meta(home: Place) -> dict[str, Any]:
    """meta.json of a step. Raises: InputError where another version or another step wrote it."""
    try:
        stored = sources.parse_json((home / "meta.json").read_bytes())
        leaves = {name: (str(kind), [*shape]) for name, (kind, shape) in stored["leaves"].items()}
        is_read = isinstance(stored["step"], int) and isinstance(stored["meta"], dict)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        stored, leaves, is_read = {}, {}, False
    if not (is_read and leaves):
        raise InputError(
            f"{home / 'meta.json'} does not describe a step: choose another step, or start again "
            "in another run.dir"
        )
    if stored.get("format") != FORMAT:
        raise InputError(
            f"{home / 'meta.json'} has format {stored.get('format')!r}, and this jaxgrpo reads "
            f"{FORMAT}: go on with the version that saved it, or set run.dir to another folder"
        )
    refuse_other_step(home.parent, int(home.name), stored["step"])
    return stored


def fingerprint(path: Place) -> list[int]:
    """[bytes, crc32] of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]
