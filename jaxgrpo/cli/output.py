"""What commands print, and to whom: documents on stdout alone, and outputs that a reader closes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from jaxgrpo.training.processes import parent

CLOSED = 128 + signal.SIGPIPE
"""The exit code if what reads the output closes it."""


@contextlib.contextmanager
def printing_on_stderr() -> Iterator[None]:
    """Within it stdout is stderr: of what is printed here, by own code and by its processes."""
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    try:
        with contextlib.suppress(OSError):  # where a shell has closed stderr
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def until_closed(command: Callable[[], int | None]) -> int:
    """Runs a command to its end, or until what reads its output has closed it, as `head` does.

    Nothing is printed in that case, and the exit code is that of a program which SIGPIPE ends.
    """
    try:
        code = command() or 0
        if sys.stdout is not None and not sys.stdout.closed:  # as where a service closes it
            _flush(sys.stdout.flush)
        return code
    except (BrokenPipeError, SystemExit) as error:
        # Rich raises SystemExit. A pipe to a reward's process may break as well.
        by_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        if not by_rich and (isinstance(error, SystemExit) or not _is_closed(sys.stdout)):
            raise
    # Python writes what is left at its end, and would complain.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return CLOSED


def _flush(flush: Callable[[], object]) -> None:
    """Raises: NotSaved where the disk is full that the output goes to. A terminal that is gone has
    no reader."""
    try:
        flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        parent.discard_output(1)  # Python would try again at its end
        if error.errno in parent.FULL:
            from jaxgrpo.training.processes.process import NotSaved

            raise NotSaved(
                f"what was printed could not be written to stdout ({error.strerror}): make space "
                "there, or send it elsewhere; the command has done all else"
            ) from error


def _is_closed(stream: TextIO | None) -> bool:
    """Whether a stream is a pipe that is not read any more."""
    if stream is None:
        return False
    poller = select.poll()
    poller.register(stream, 0)  # it reports errors in any case
    return bool(poller.poll(0))
