"""The lock of a run folder, which one trainer holds at a time and the system gives up with it.

A trainer that was killed may take a while to end, for example within a write. A start right after
the kill meets a lock that will be free in a moment. So a start waits for a holder
that is about to end, and for no other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import signal
import time
from pathlib import Path

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import storage

LOCK = ".lock"
PATIENCE = 30.0  # seconds that a killed holder may take to end
TICK = 0.02  # seconds between two tries
PF_EXITING = 0x4  # of Linux' flags of a process
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""How a file system says that it has none, as Lustre without the option flock, or some of NFS."""

logger: logging.Logger = logging.getLogger(__name__)


def take_lock(folder: Path, name: object) -> int:
    """Takes the lock of a folder for this process, and returns its descriptor.

    Where the file system has no locks, a warning says that nothing keeps a second trainer out.

    Args:
      name: of the run folder, for the message.

    Raises: InputError where another process holds it. OSError where it cannot be opened.
    """
    lock, over = storage.open_file(folder / LOCK, os.O_RDWR), time.monotonic() + PATIENCE
    try:
        while not _try_lock(lock):
            holder = os.pread(lock, 200, 0).decode("utf-8", "replace").strip()
            is_ending = is_about_to_end(holder) and time.monotonic() < over
            if is_ending:
                time.sleep(TICK)
            elif not _try_lock(lock):  # it may have ended between the two
                raise InputError(
                    f"run.dir = {name} is in use by another trainer ({holder or 'unknown'}): "
                    "wait for it or stop it, or set run.dir to another folder"
                )
            else:
                break
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return False
        logger.warning(
            "run.dir is on a file system without locks (%s): see to it that no second trainer "
            "uses the same folder",
            error.strerror,
        )
    return True


def give_up_lock(lock: int) -> None:
    """Unlocks, also where a process forked just now has the descriptor still."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_UN)


def is_about_to_end(holder: str) -> bool:
    """Whether a holder, as a lock names it, is a process of this machine that has been killed.

    It is ending, its first thread has ended, or SIGKILL is on its way to it. One that is gone has
    closed its files: another process then holds them. False where there is no /proc.
    """
    match = re.fullmatch(r"process (\d{1,9}) on (.*)", holder)
    if match is None or match[2] != os.uname().nodename:
        return False
    place = Path("/proc", match[1])
    try:
        state, *fields = (place / "stat").read_text("utf-8", "replace").rpartition(") ")[2].split()
        status = (place / "status").read_text("utf-8", "replace")
    except OSError:
        return False
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", status, re.M)
    is_killed = any(int(mask, 16) >> signal.SIGKILL - 1 & 1 for mask in pending)
    return state in "ZX" or bool(int(fields[5]) & PF_EXITING) or is_killed
