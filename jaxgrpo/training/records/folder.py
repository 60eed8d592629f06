"""The run folder: what a run leaves on disk, readable after a kill at any moment.

    config.toml  summary.json  metrics.jsonl  samples/step_N.jsonl  checkpoints/  code/
    rollouts/0000000N.safetensors  replay.json  (by rollout_files.py and collecting/replay.py)
    report.html  tensorboard/  (written by report/html.py and logbook.py)
    before_N/  (what was logged from step N on, before a start that continued there)
    rewritten.json  (by checksums.py, where evaluations were put aside)

The first two lines are the same bytes for the same run, apart from the metrics "time/...".
"""

from __future__ import annotations

import abc
import contextlib
import errno
import json
import logging
import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import mirror, storage
from jaxgrpo.data.storage import Place, write_atomically
from jaxgrpo.training.processes.process import broadcast
from jaxgrpo.training.records import checksums
from jaxgrpo.training.records.lock import LOCK, give_up_lock, refuse_unshared, take_lock
from jaxgrpo.training.records.reading import (
    OPTIONAL_TYPES,
    SAMPLE_TYPES,
    complete_lines,
    evaluation_metrics,
    read_bytes,
    read_metrics,
    read_replay,
    read_text,
    sample_steps,
)
from jaxgrpo.training.records.unwritten import Unwritten

SAMPLE_KEYS = tuple(SAMPLE_TYPES)
FILES = ("config.toml", "metrics.jsonl", "summary.json", "report.html", "replay.json")
FOLDERS = ("checkpoints", "samples", "rollouts", "code", "model", "adapter", "tensorboard")
"""What is written at the end too: that it cannot be is said at the start."""
UNREADABLE = {"[", "\\"}  # characters that Orbax and tensorstore take for something else
SHOWN = 200  # characters of a path in a message
INSIDE = 300  # bytes that the paths of files within a run folder may have
logger: logging.Logger = logging.getLogger(__name__)
Closes = TypeVar("Closes", bound="Closing")


class Closing(abc.ABC):
    """A context manager that calls its own `close` at the end."""

    def __enter__(self: Closes) -> Closes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None: ...


def plain(value: Any, name: str = "value") -> Any:
    """`value` as JSON can hold it: arrays as lists, numbers that are not finite as None.

    Raises: TypeError, naming the place, on anything that is no number, text, list or mapping.
    """
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    raise TypeError(
        f"{name} is {type(value).__name__}, which JSON cannot hold: "
        "give numbers, text, lists, mappings or arrays"
    )


def _refuse_other_kinds(folder: Path) -> None:
    """Raises: InputError where a folder has the name of a file of the run, or the reverse."""
    for name in (*FILES, checksums.REWRITTEN):
        if (folder / name).exists() and not (folder / name).is_file():
            kind = "a folder" if (folder / name).is_dir() else "no file"
            raise InputError(f"{folder / name} is {kind}, and a run writes a file there: move it")
    for name in FOLDERS:
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            raise InputError(f"{folder / name} is no folder, and a run writes one there: move it")


def _line(step: int, metrics: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl: names in order, numbers that are not finite as null."""
    named = {name: plain(metrics[name], name) for name in sorted(metrics) if name != "step"}
    return json.dumps({"step": int(step), **named}, allow_nan=False) + "\n"


def refuse_unusable(path: str | os.PathLike[str], resume: bool = False) -> None:
    """Refuses a path as the folder of a run, without making anything there.

    Args:
      resume: a folder that holds something may be taken.

    Raises: InputError where it, or what it would be made in, is a file or cannot be written, where
      it holds something, and where it is too long.
    """
    if storage.is_url(path):
        mirror.refuse_unusable(os.fspath(path), resume)
        return
    folder = Path(path)
    where = f"run.dir = {str(path)[:SHOWN]}"
    storage.refuse_unnameable(folder, where)
    ancestor = next(filter(os.path.lexists, (folder, *folder.absolute().parents)))
    if not ancestor.is_dir():
        kind = (
            "a file" if ancestor.exists() else f"a link to {os.path.realpath(ancestor)}, not there"
        )
        place = f"is {kind}" if ancestor == folder else f"is under {ancestor}, which is {kind}"
        raise InputError(f"{where} {place}: give a folder")
    longest = max(len(os.fsencode(part)) for part in folder.absolute().parts)
    limit = os.pathconf(ancestor, "PC_NAME_MAX"), os.pathconf(ancestor, "PC_PATH_MAX")
    if longest > limit[0] or len(os.fsencode(folder.absolute())) + INSIDE > limit[1]:
        raise InputError(f"{where}... is longer than the system allows: give a shorter path")
    if odd := UNREADABLE & {*os.fspath(folder.absolute())}:
        raise InputError(
            f"{where}: its path has {' and '.join(sorted(odd))}, where Orbax does not find again "
            "what it saves: give a path without"
        )
    if not storage.may_write(ancestor):
        raise InputError(f"{where}: {ancestor} cannot be written: give a folder that can")
    if not resume and (names := sorted(p.name for p in folder.glob("*") if p.name != LOCK)):
        holds = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise InputError(
            f"{where} is not empty (it holds {holds}): "
            "go on with that run by --resume auto, or set run.dir to another folder"
        )


class RunFolder(Closing):
    """A run's folder, held by one trainer at a time. Only process 0 writes and locks it.

    The system lets go of the lock when the process dies, however it dies. A run in a bucket is
    written in a folder of this host, `path`, which `mirror.Mirror` copies to `place`.

    Args:
      path: made where it is missing; or a URL.
      resume: take a folder that already holds a run; `rewind` then drops what no longer counts.
    Raises: InputError where the folder holds something and `resume` is False, where `path` is a
      file, where another trainer holds it, or where not all processes see it.
    """

    def __init__(self, path: str | os.PathLike[str], resume: bool = False):
        if in_bucket := storage.is_url(path):
            mirror.refuse_scheme(os.fspath(path))  # before a package for reading it is asked for
        self.place: Place = storage.place(path)  # absolute: a reward may change directory
        self.path: Path = mirror.local_folder(os.fspath(path)) if in_bucket else Path(self.place)
        self.places: tuple[Place, Place] = self.place, self.path
        self._mirror: mirror.Mirror | None = None
        self._unwritten_lines = b""  # lines of metrics that the disk did not take
        self._unwritten_files = Unwritten(self._write)
        self._size: int | None = None  # of metrics.jsonl, as this start has left it
        self._torn_at: int | None = None  # where a part of a line begins that the disk still has
        self.checkpoints: Place = self.place / "checkpoints"
        self._lock: int | None = None  # file descriptor
        self._writes = jax.process_index() == 0
        broadcast(lambda: self._take(resume))
        try:
            refuse_unshared(self.place, self.path, self._lock)
        except InputError:
            self.close()
            raise

    def _take(self, resume: bool) -> None:
        refuse_unusable(self.place, resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path, self.place)
            _LOCKED.add(self)
            if not resume:  # another trainer may have had it between the look and the lock
                refuse_unusable(self.place)
            _refuse_other_kinds(self.path)
            if storage.is_url(self.place):
                self._mirror = mirror.Mirror(os.fspath(self.place), self.path)
        except InputError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise InputError(
                f"run.dir = {self.place} cannot be written ({error.strerror or error}): "
                "set run.dir to a folder that can"
            ) from error

    def publish(self) -> None:
        """Copies what has changed to the bucket, if the run is in one. Raises: OSError."""
        if self._mirror is not None:
            self._mirror.copy()

    def is_moved(self) -> bool:
        """Whether `path` is no longer the folder that was taken: renamed, replaced or deleted."""
        if self._lock is None:
            return False
        try:
            return os.stat(self.path / LOCK).st_ino != os.fstat(self._lock).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return True

    def _refuse_moved(self) -> None:
        """Raises: OSError where the folder is another one: nothing is written into that."""
        if self.is_moved():
            raise OSError(errno.ESTALE, f"{self.path} is not the folder that this run began in")

    def rewind(self, step: int | None) -> Path | None:
        """Puts aside what was written after `step` finished steps; None: everything logged.

        Keeps the lines of metrics.jsonl with step <= `step`, byte for byte, and the files of
        samples and rollouts of those steps. Later ones go to before_N/, N being the next step, or
        before_N_2/ if that is there: the checkpoint they belong to may have been removed. Call it
        once a checkpoint is restored and before anything is written.

        Returns: the folder of what was put aside; None where nothing was.
        """
        if not self._writes:
            return None
        # From here on a missing folder means that it was removed, and not that none was saved yet.
        if not storage.is_url(self.place):
            self.checkpoints.mkdir(exist_ok=True)
        last = -1 if step is None else step
        metrics = self.path / "metrics.jsonl"
        lines = complete_lines(metrics)
        earlier = b"".join(line for line, entry in lines if entry["step"] <= last)
        later = b"".join(line for line, entry in lines if entry["step"] > last)
        names = [f"step_{number}.jsonl" for number in sample_steps(self.path) if number > last]
        files = [self.path / "samples" / name for name in names]
        rollouts = (self.path / "rollouts").glob("*.safetensors")
        files += [file for file in rollouts if file.stem.isdecimal() and int(file.stem) > last]
        aside_folder = self._folder_aside(f"before_{max(last, 0) + 1}") if later or files else None
        if aside_folder is not None:
            write_atomically(aside_folder / metrics.name, later)
            for file in files:
                (aside_folder / file.parent.name).mkdir(exist_ok=True)
                file.rename(aside_folder / file.parent.name / file.name)
        if metrics.exists():
            write_atomically(metrics, earlier)
        self._size = len(earlier)
        return aside_folder

    def _folder_aside(self, name: str) -> Path:
        """A new folder, whose name gets a number where it is taken."""
        folder, number = self.path / name, 1
        while os.path.lexists(folder):
            number += 1
            folder = self.path / f"{name}_{number}"
        folder.mkdir()
        return folder

    def logged(self, until: int | None = None) -> list[int]:
        """[bytes, crc32] of metrics.jsonl, with the lines that wait for space; of process 0's.

        Args:
          until: of the lines up to this step; None: of all.
        """
        file = self.path / "metrics.jsonl"
        text = (read_bytes(file) or b"") if until is None else checksums.text_until(file, until)
        return checksums.checksum(text + self._unwritten_lines)

    def problems(self, step: int | None, logged: Any) -> list[str]:
        """What of the files beside the checkpoint of a step is not what the run wrote.

        Args:
          logged: `logged()` as the checkpoint has it; None: it was not saved.
        """
        problems: list[str] = []
        if step is None or not self._writes:
            return problems
        if logged and not checksums.is_written(self.path, step, logged, self.logged(step)):
            problems.append(
                f"{self.path / 'metrics.jsonl'} is not what this run wrote until step {step}: "
                "lines were removed or changed, or are another run's; it continues behind them"
            )
        if not (self.path / "config.toml").exists():
            problems.append(
                f"{self.path / 'config.toml'} is gone: that this config is the run's was not "
                "compared"
            )
        return problems

    def evaluation(self, step: int) -> dict[str, Any]:
        """The evaluation in the line of a step, 0 for the base; {} where there is none."""
        lines = [line for line in read_metrics(self.path) if line["step"] == step]
        return evaluation_metrics(lines[0]) if lines else {}

    def replace_evaluations(self, until: int, evaluations: Mapping[int, Mapping[str, Any]]) -> str:
        """Puts evaluations of other questions aside, and writes new ones into the lines of steps.

        Those up to step `until` become eval_until_STEP/..., so that what is called eval/... can
        be compared; eval_until_STEP_2/... where other ones have that name. It may be called again,
        by the next start, where one was killed after it.

        Args:
          evaluations: step -> the metrics of its evaluation; step 0 is the base.

        Returns: what the names begin with; "" in processes that do not write.
        """
        if not self._writes:
            return ""
        old = complete_lines(self.path / "metrics.jsonl")
        lines = {entry["step"]: entry for _, entry in old}
        base, new_base = (evaluation_metrics(side.get(0, {})) for side in (lines, evaluations))
        prefix, number = f"eval_until_{until}/", 1
        if base not in ({}, plain(new_base)):  # else a start was killed after it wrote the new one
            while any(name.startswith(prefix) for line in lines.values() for name in line):
                number += 1
                prefix = f"eval_until_{until}_{number}/"
        for step, line in lines.items():
            evaluation = evaluation_metrics(line)
            entry = {name: value for name, value in line.items() if not name.startswith("eval/")}
            is_aside = any(name.startswith(prefix) for name in line)
            is_aside |= evaluation == plain(evaluation_metrics(evaluations.get(step, {})))
            if not is_aside:  # by a start before this one
                entry |= {f"{prefix}{name}": value for name, value in evaluation.items()}
            lines[step] = entry
        self._rewrite(old, lines, evaluations)
        return prefix

    def add_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes an evaluation into the line of a step that has none."""
        if self._writes:
            old = complete_lines(self.path / "metrics.jsonl")
            self._rewrite(old, {entry["step"]: entry for _, entry in old}, {step: values})

    def _rewrite(
        self,
        old: Sequence[tuple[bytes, dict[str, Any]]],
        lines: dict[int, dict[str, Any]],
        evaluations: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Writes `lines` with evaluations in place of the old ones, once rewritten.json says it."""
        for step, values in evaluations.items():
            lines[step] = {**lines.get(step, {}), **values}
        texts = {step: _line(step, lines[step]) for step in sorted(lines)}
        contents = [(entry["step"], text) for text, entry in old], texts.items()
        steps = checksums.saved_steps(self.checkpoints)
        record = checksums.record_rewrite(self.path, steps, *contents)
        self._write(checksums.REWRITTEN, record)
        write_atomically(self.path / "metrics.jsonl", text := "".join(texts.values()))
        self._size = len(text.encode())

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line, names in order, numbers that are not finite as null.

        Raises: OSError where the disk takes it not or in part; `catch_up` then has it to write.
        """
        if self._writes:
            self._unwritten_lines += _line(step, metrics).encode("ascii")
            self._append_lines()

    def catch_up(self) -> None:
        """Writes the lines and files that wait, before a step is saved. Raises: OSError."""
        self._append_lines()
        self._unwritten_files.catch_up()

    def _append_lines(self) -> None:
        if not self._unwritten_lines:
            return
        self._refuse_moved()
        file = self.path / "metrics.jsonl"
        self._take_off_part(file)
        size = file.stat().st_size if file.exists() else 0
        if self._size not in (None, size):
            logger.warning(
                "%s has %d bytes, and this run has written %d: lines were removed or added by "
                "another program; it continues behind them",
                *(file, size, self._size),
            )
        try:
            with open(file, "ab", opener=storage.open_file) as end:
                end.write(self._unwritten_lines)
        except OSError as error:
            self._torn_at = size
            with contextlib.suppress(OSError):  # since a fault of the disk it may be read-only
                self._take_off_part(file)
            raise OSError(error.errno, f"{file} could not be written: {error.strerror}") from error
        self._size = size + len(self._unwritten_lines)
        self._unwritten_lines = b""

    def _take_off_part(self, file: Path) -> None:
        """Cuts the metrics where a line ended in the middle, which the next must not continue."""
        if self._torn_at is not None and file.exists() and file.stat().st_size > self._torn_at:
            os.truncate(file, self._torn_at)
        self._torn_at = None

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes samples/step_N.jsonl as `Unwritten.write`, keys in the order of SAMPLE_KEYS.

        Every process reads `rows` to its end: what makes them may gather arrays.
        Raises: ValueError where a row lacks a key or brings another.
        """
        lines = []
        for number, row in enumerate(rows):
            if row.keys() - OPTIONAL_TYPES.keys() != set(SAMPLE_KEYS):
                missing = set(SAMPLE_KEYS) - row.keys()
                extra = row.keys() - {*SAMPLE_KEYS, *OPTIONAL_TYPES}
                raise ValueError(
                    f"sample row {number} of step {step}: missing {sorted(missing)}, unknown "
                    f"{sorted(extra)}; a row has the keys {', '.join(SAMPLE_KEYS)}"
                )
            ordered = {n: plain(row[n], n) for n in SAMPLE_TYPES | OPTIONAL_TYPES if n in row}
            lines.append(json.dumps(ordered, ensure_ascii=False, allow_nan=False) + "\n")
        self._unwritten_files.write(f"samples/step_{step}.jsonl", "".join(lines))

    def write_rollouts(self, step: int, content: bytes) -> None:
        """Writes a file of rollouts as `Unwritten.write`; by its leading zeros a shell sorts it."""
        self._unwritten_files.write(f"rollouts/{step:08}.safetensors", content)

    def write_replay(self, text: str) -> None:
        """Writes replay.json, which says what a run trains on instead of samples of its own."""
        self._write("replay.json", text)

    def replay(self) -> dict[str, Any] | None:
        """What replay.json holds; None where the run has none. Raises: InputError."""
        return read_replay(self.path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json in one go; numbers that are not finite become null."""
        text = json.dumps(plain(summary, "summary"), indent=2, allow_nan=False)
        self._write("summary.json", text + "\n")

    def write_config(self, text: str) -> None:
        """Writes config.toml, the resolved config as TOML."""
        self._write("config.toml", text)

    def config(self) -> str | None:
        """The text of config.toml; None where the run has none yet."""
        return read_text(self.path / "config.toml")

    def _write(self, name: str, content: str | bytes) -> None:
        if self._writes:
            self._refuse_moved()
            (self.path / name).parent.mkdir(exist_ok=True)
            write_atomically(self.path / name, content)

    def copy_code(self, files: Iterable[str | os.PathLike[str]]) -> None:
        """Copies own code files into code/. A name taken by other contents gets a number.

        So a resumed run whose file has changed keeps what it began with: reward.py, reward_2.py.
        """
        if not self._writes:
            return
        folder = self.path / "code"
        for source in map(Path, files):
            folder.mkdir(exist_ok=True)
            target, number = folder / source.name, 1
            while os.path.lexists(target) and read_bytes(target) != source.read_bytes():
                number += 1
                target = folder / f"{source.stem}_{number}{source.suffix}"
            write_atomically(target, source.read_bytes())

    def close(self) -> None:
        """Gives up the lock. Its file stays and names the last holder."""
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        if self._lock is not None:
            give_up_lock(self._lock)
        self.unlock()

    def unlock(self) -> None:
        """Closes the descriptor of the lock, which the system gives up with the last one."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


_LOCKED: weakref.WeakSet[RunFolder] = weakref.WeakSet()
"""Folders that this process has locked."""


def _unlock_in_child() -> None:
    """A process that a reward forks may outlive the trainer: the lock is not its."""
    for folder in list(_LOCKED):
        folder.unlock()


os.register_at_fork(after_in_child=_unlock_in_child)
