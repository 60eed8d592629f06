"""A run in a bucket: its small files are written here, and copied there at declared moments.

All of a run but its checkpoints is written into a folder of this host's cache, as any run folder
is. A thread copies what has changed every SECONDS_BETWEEN, each checkpoint waits for it, and so
does the end of the run. Checkpoints go straight to the bucket (checkpoints.py). To go on, a run
copies its files back first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from jaxgrpo.core.errors import InputError, one_line
from jaxgrpo.data import storage

SECONDS_BETWEEN = 30.0
"""Between two copies by the thread; 20 times what the last one took, where that is longer."""
BEAT = 15.0
"""Seconds after which the holder of a run writes its lock again."""
LEASE = 60.0
"""Seconds after which a lock that was not written again counts no more."""
LOCK = ".lock"
STAY = ("checkpoints", "model", "adapter", "profile")
"""What is not copied back: large, and nothing of a run that goes on reads it here."""
LAST = "summary.json"
"""Copied after all others: a run that has it is complete."""
logger: logging.Logger = logging.getLogger(__name__)


def local_folder(url: str) -> Path:
    """The folder of this host's cache in which a run of that URL is written."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return storage.cache_folder() / "runs" / digest / url.rpartition("/")[2]


def refuse_scheme(url: str) -> None:
    """Raises: InputError where checkpoints cannot be written to such URLs."""
    where = f"run.dir = {url}"
    scheme = url.partition("://")[0]
    if scheme not in storage.RUNS:
        schemes = ", ".join(f"{name}://" for name in storage.RUNS)
        raise InputError(
            f"{where}: checkpoints can be written to folders and {schemes} only: give one of "
            "these, or mount the bucket as a folder"
        )


def refuse_unusable(url: str, resume: bool = False) -> None:
    """Refuses a URL as the folder of a run.

    Raises: InputError where checkpoints cannot be written to such URLs, where the bucket cannot be
      read, and where it holds something under the name and `resume` is False.
    """
    refuse_scheme(url)
    where = f"run.dir = {url}"
    storage.file_system(url, "run.dir")
    try:
        names = [name for name in storage.listing(url) if name != LOCK]
    except OSError as error:
        raise InputError(
            f"{where} cannot be read: {one_line(error)}; see to the name of the bucket, your "
            "credentials and the network"
        ) from error
    if names and not resume:
        holds = ", ".join(sorted({name.partition("/")[0] for name in names})[:4])
        raise InputError(
            f"{where} is not empty (it holds {holds}): "
            "go on with that run by --resume auto, or set run.dir to another folder"
        )


class Mirror:
    """The copy in a bucket of one run's folder, and the run's lock there.

    A lock in a bucket is an object that its holder writes again every BEAT seconds. One that this
    host left behind is taken at once, since the folder's own lock shows that its holder is dead;
    another's when it was not written for LEASE seconds.

    Args:
      folder: of this host, locked by the caller. Emptied, and filled from the bucket.
    Raises: InputError where another trainer holds the run; OSError.
    """

    def __init__(self, url: str, folder: Path):
        self.url: str = url.rstrip("/")
        self.folder: Path = folder
        self._host_id = self._load_host_id()
        self._beats, self._new_holder = 0, ""  # who took the run from this process
        self._sent: dict[str, tuple[int, int] | None] = {}  # size and time; None: not from here
        self._copying, self._end = threading.Lock(), threading.Event()
        self._take_lock()
        try:
            self._fetch()
        except BaseException:
            storage.remove(f"{self.url}/{LOCK}")
            raise
        # Two, since a copy may take longer than a lock counts.
        targets = (self._keep_lock, self._keep_copying)
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def copy(self) -> None:
        """Copies what has changed since the last time, and removes what is gone.

        Raises: OSError with the first file that could not be written, or where another trainer has
          taken the run.
        """
        with self._copying:
            self._beat()  # a machine that slept hears first that another has taken the run
            if self._new_holder:
                raise OSError(f"{self.url} was taken by another trainer ({self._new_holder})")
            files = (file for file in self.folder.rglob("*") if file.is_file())
            files = {str(file.relative_to(self.folder)): file for file in files}
            run_files = {name: file for name, file in files.items() if not _is_passing(name)}
            for name in sorted(run_files, key=lambda name: (name == LAST, name)):
                self._send(name, run_files[name])
            replaced = {name.partition("/")[0] for name in run_files}
            for name in [name for name in self._sent if name not in run_files]:
                top = name.partition("/")[0]
                if top not in STAY or top in replaced - {"checkpoints", "profile"}:
                    storage.remove(f"{self.url}/{name}")
                    del self._sent[name]

    def close(self) -> None:
        """Copies once more, says what could not be written, and gives up the lock, which is written
        again until then: a copy may take longer than it counts."""
        try:
            self.copy()
        except OSError as error:
            logger.warning("%s; the files are in %s", error, self.folder)
        self._end.set()
        for thread in self._threads:
            thread.join()
        try:
            if not self._new_holder:
                storage.remove(f"{self.url}/{LOCK}")
        except OSError as error:
            logger.warning("the lock stays for %.0f seconds: %s", LEASE, error)

    def _send(self, name: str, file: Path) -> None:
        try:
            stat = file.stat()
            mark = stat.st_size, stat.st_mtime_ns
            if self._sent.get(name) != mark:
                storage.upload(file, f"{self.url}/{name}")
                self._sent[name] = mark
        except FileNotFoundError:
            if file.exists():  # it is the bucket that is gone
                raise

    def _fetch(self) -> None:
        """Makes the folder what the bucket holds, but for what stays there."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in storage.listing(self.url):
            top = name.partition("/")[0]
            if top not in STAY and not _is_passing(name):
                file = storage.below(self.folder, name, self.url)
                storage.download(f"{self.url}/{name}", file)
                self._sent[name] = (file.stat().st_size, file.stat().st_mtime_ns)
            elif top in ("model", "adapter"):
                self._sent[name] = None

    def _keep_lock(self) -> None:
        while not self._end.wait(BEAT):
            self._beat()

    def _keep_copying(self) -> None:
        pause, failing = SECONDS_BETWEEN, False
        while not self._end.wait(pause):
            began = time.monotonic()
            try:
                self.copy()
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning("%s; it is tried again", error)
                failing = True
            pause = max(SECONDS_BETWEEN, 20 * (time.monotonic() - began))

    def _beat(self) -> None:
        try:
            claim = read_lock(self.url)
            if claim is not None and claim["id"] != self._host_id:
                self._new_holder = claim["who"]
            elif not self._new_holder:
                storage.write(f"{self.url}/{LOCK}", self._claim())
        except OSError:
            return  # the next beat tries again, and copying says what is wrong

    def _load_host_id(self) -> str:
        """A name of this folder of this host, which tells its own old lock from others'."""
        file = self.folder.parent / "id"
        if not file.exists() or not file.stat().st_size:  # begun on a full disk
            storage.write_atomically(file, os.urandom(16).hex())
        return file.read_text()

    def _claim(self) -> bytes:
        self._beats += 1
        who = f"process {os.getpid()} on {os.uname().nodename}"
        claim = {"id": self._host_id, "who": who, "beat": self._beats, "time": time.time()}
        return json.dumps(claim).encode()

    def _take_lock(self) -> None:
        lock = f"{self.url}/{LOCK}"
        try:
            storage.write(lock, self._claim(), new=True)
            return
        except FileExistsError:
            first_claim = read_lock(self.url)
        began = time.monotonic()
        while (claim := read_lock(self.url)) is not None and claim["id"] != self._host_id:
            if claim != first_claim:
                raise InputError(
                    f"run.dir = {self.url} is in use by another trainer ({claim['who']}): "
                    "wait for it or stop it, or set run.dir to another folder"
                )
            if time.monotonic() - began > LEASE:
                break
            if claim == first_claim and time.monotonic() - began < 1.0:
                logger.warning(
                    "%s holds %s: waiting up to %.0f seconds to see whether it runs",
                    claim["who"],
                    self.url,
                    LEASE,
                )
            time.sleep(1.0)
        storage.write(lock, self._claim())


def read_lock(url: str) -> dict[str, Any] | None:
    """What the holder of a run wrote about itself; None where there is none. Raises: OSError."""
    content = storage.read(f"{url.rstrip('/')}/{LOCK}")
    try:
        claim = json.loads(content) if content else None
    except ValueError:
        return None
    return claim if isinstance(claim, dict) and {"id", "who", "time"} <= claim.keys() else None


def is_held(url: str) -> bool:
    """Whether a trainer has written the run's lock within LEASE, by both machines' clocks."""
    claim = read_lock(url)
    return claim is not None and abs(time.time() - claim["time"]) < LEASE


def _is_passing(name: str) -> bool:
    """Whether a file is no part of the run: the lock, and what is being written or replaced."""
    top = name.partition("/")[0]
    is_unfinished = top.startswith(".") and top.endswith((".partial", ".previous"))
    return name == LOCK or name.endswith(".tmp") or is_unfinished
