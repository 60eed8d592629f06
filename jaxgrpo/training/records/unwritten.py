"""Files of a run that a full disk has not taken, until it does."""

from __future__ import annotations

from collections.abc import Callable

from jaxgrpo.training.processes import parent

LIMIT = 256 << 20
"""Characters of text, or bytes, that may wait: a full disk must not fill the memory too."""


class Unwritten:
    """Files that are written in their order. What a full disk does not take waits; no step is saved
    before it is written, so that the samples of every step that is saved are there.

    Args:
      write: writes a file by its name in the run folder, whole or not at all.
    """

    def __init__(self, write: Callable[[str, str | bytes], None]):
        self._write = write
        self._files: dict[str, str | bytes] = {}

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file behind those that wait. Raises: OSError; where the disk is full the file
        then waits too, unless more than LIMIT would."""
        self._files[name] = content
        try:
            self.catch_up()
        finally:
            if sum(map(len, self._files.values())) > LIMIT:
                self._files.pop(name, None)

    def catch_up(self) -> None:
        """Writes what waits. Raises: OSError of what it could not write; what failed by anything
        but a full disk waits no longer."""
        problem = None
        for name, content in list(self._files.items()):
            try:
                self._write(name, content)
            except OSError as error:
                problem = error
                if error.errno in parent.FULL:
                    break
            del self._files[name]
        if problem is not None:
            raise problem
