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

import jax

from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.data import mirror, storage
from jaxgrpo.data.storage import Place
from jaxgrpo.rollout.exchange import gather_json
from jaxgrpo.training.processes import process

LOCK = ".lock"
PATIENCE = 30.0  # seconds that a killed holder may take to end
TICK = 0.02  # seconds between two tries
VISIBLE = 60.0
"""Seconds in which other hosts have to see what the holder has written: a mounted file system may
remember for some time what was not there."""
PF_EXITING = 0x4  # of Linux' flags of a process
BUSY = (errno.EWOULDBLOCK, errno.EACCES)  # how a file system says that another one has it
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


def refuse_unshared(place: Place, folder: Path, descriptor: int | None) -> None:
    """Refuses the folder of a run that is another one on another host: each process writes the part
    of a checkpoint that its devices hold, and what is not beside that of process 0 is lost.

    Called by all processes, once process 0 has the lock.

    Args:
      place, folder: of the run; where it is in a bucket the folder of this host is no part of it.
      descriptor: of the lock, in process 0; None in the others.

    Raises: InputError, in every process.
    """
    if jax.process_count() == 1:
        return
    if descriptor is not None:
        with contextlib.suppress(OSError):  # a file system that cannot flush it
            os.fsync(descriptor)
    where, holder = process.broadcast(lambda: [str(place), _read_holder(place, descriptor)])
    over, sees = time.monotonic() + VISIBLE, descriptor is not None
    while not sees and time.monotonic() < over:
        if not (sees := _sees(place, folder, holder)):
            time.sleep(1.0)
    blind = [str(number) for number, sees in enumerate(gather_json(sees)) if not sees]
    if blind:
        raise InputError(
            f"run.dir = {where}: process {', '.join(blind)} does not find there what process 0 has "
            "written: give a folder on a file system that all processes share, or one in a bucket, "
            "gs://"
        )


def _read_holder(place: Place, descriptor: int | None) -> str:
    """What the lock that this process has taken tells about it. Raises: InputError."""
    assert descriptor is not None
    if not storage.is_url(place):
        return os.pread(descriptor, 200, 0).decode("utf-8", "replace")
    with refusing(f"run.dir = {place} cannot be read ({{reason}})", OSError):
        claim = mirror.read_lock(os.fspath(place))
    return claim["id"] if claim else ""


def _sees(place: Place, folder: Path, holder: str) -> bool:
    """Whether this process finds the lock that another one has taken."""
    try:
        if storage.is_url(place):
            claim = mirror.read_lock(os.fspath(place))
            return claim is not None and claim["id"] == holder
        return (folder / LOCK).read_text("utf-8", "replace") == holder
    except FileNotFoundError:
        return False
    except OSError:  # some file systems let no other host read what is locked
        return os.path.lexists(folder / LOCK)


def _try_lock(lock: int) -> bool:
    """Whether the lock is taken now. Raises: OSError where the disk does not answer."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in BUSY:
            return False
        if error.errno not in NO_LOCKS:
            raise
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
