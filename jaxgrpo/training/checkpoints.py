"""Checkpoints: Learner and Stream, saved in the background, checked byte by byte when restored.

    FOLDER/STEP/state/         the arrays, one entry per leaf, written by Orbax
    FOLDER/STEP/meta.json      names, dtypes and shapes of the leaves, and the caller's own data
    FOLDER/STEP/manifest.json  size and crc32 of every other file; written last

A step exists once its manifest does, so a kill at any moment leaves the step before. Orbax is used
through its v0 `AsyncCheckpointer`, not its `CheckpointManager`: the manager removes old steps when
the arrays are committed, which is before our manifest is, and with `keep = 1` a kill between the
two would leave nothing. What Orbax does not see we check: a flipped bit in its data files restores
without an error, and a dtype other than the stored one is cast without a word.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxgrpo.core.errors import InputError, differing_names, one_line
from jaxgrpo.core.types import Params
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place, write_atomically
from jaxgrpo.models import sharding
from jaxgrpo.training import fingerprints
from jaxgrpo.training.processes import parent, process
from jaxgrpo.training.records.folder import Closing
from jaxgrpo.training.records.reading import is_step
from jaxgrpo.training.step_files import FORMAT, damage, fingerprint, read_meta

GATHERED = 1 << 30
"""Bytes of a parameter that are brought together at a time: with several processes each device then
holds them, and the stacked matrices of a large model's experts are more than a device has."""
logger: logging.Logger = logging.getLogger(__name__)


class _TracebackFilter(logging.Filter):
    """Leaves out the tracebacks that Orbax's threads log: what fails is raised, in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        failed = record.levelno >= logging.ERROR and "orbax" in record.pathname
        # The files of its loop may have been closed under it, the disk be full; and its database.
        numbers = (errno.EBADF, *parent.FULL)
        is_closed = isinstance(error, OSError) and error.errno in numbers
        return not failed and not is_closed and "OCDBT" not in str(error)


TRACEBACK_FILTER = _TracebackFilter()


def _leave_out_late_writes() -> None:
    """A write that Orbax has given up may end later: it finds its event loop closed and says so."""
    previous_hook = sys.unraisablehook
    if getattr(previous_hook, "__name__", "") != "unless_late":

        def unless_late(unraisable: Any) -> None:
            if "Event loop is closed" not in str(unraisable.exc_value):
                previous_hook(unraisable)

        sys.unraisablehook = unless_late


class Checkpoints(Closing):
    """The checkpoints of one run, in one folder. A context manager, or `close` it.

    On several processes every method but `steps` and `latest` is called by all of them; the folder
    is on a file system they share, or in a bucket. Process 0 writes the small files, checks, and
    removes old steps.

    Args:
      folder: made by the first save.
      keep: how many of the newest steps stay; an older one goes once a newer one is complete.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2):
        if keep < 1:
            raise InputError(f"checkpoint.keep = {keep}: set it to 1 or more")
        self.folder: Place = storage.place(folder)
        self._refuse_files_in_the_way()
        self.keep = keep
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(TRACEBACK_FILTER)
        _leave_out_late_writes()
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.newest: int | None = None  # what this object saved or restored last
        self._checked_step: int | None = None  # what `choose` returned: `restore` trusts it
        self.lasting: frozenset[int] = frozenset()  # steps that stay beside the newest ones

    def close(self) -> None:
        """Waits for the save under way, then lets go of the threads."""
        ending = sys.exception()  # what ends the run says more than a save that it leaves
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._orbax.close)
                stack.callback(self._thread.shutdown)
                self.wait()
        except OSError as error:
            if ending is None:
                raise
            logger.warning("the save under way has failed too: %s", one_line(error))

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return [step for step in self._folders() if self._is_complete(step)]

    def latest(self) -> int | None:
        """The newest complete step; None where there is none. Its contents are not checked here."""
        return max(self.steps(), default=None)

    def choose(self, step: int | None = None) -> int:
        """The step that `restore` reads, the same on every process. Its files are read for that.

        Args:
          step: None takes the newest step whose files are intact and says which were not.
        Raises: InputError where there is no such step, or its files are damaged.
        """
        intact_step = process.broadcast(lambda: self._intact(step))
        file = self._manifest(intact_step)
        fingerprints.refuse_unless_alike(
            lambda: {f"step {intact_step}": fingerprint(file) if file.exists() else "none"},
            "put run.dir on a file system that all processes share",
        )
        self._checked_step = intact_step
        return intact_step

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the state of a step. Raises: InputError as `restore`."""
        return read_meta(self.folder / str(step))["meta"]

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Begins to save; returns when the state's arrays may be donated or overwritten.

        Saving the step that was saved or restored last does nothing. After `restore` chose an older
        step, the first save removes the newer ones: they belong to a future that will not happen.

        Args:
          step: finished steps.
          state: any tree of jax and numpy arrays.
          meta: JSON values, given back by `restore`.
        Raises: InputError where the folder holds steps and none was restored. ValueError where
          `step` is older than the last, a leaf is no array or `meta` no JSON.
          OSError where the save before this one failed.
        """
        self.wait()
        if step == self.newest:
            return
        self._refuse_unless_next(step)
        leaves = _named_leaves(state)
        table = {name: _description(leaf) for name, leaf in leaves.items()}
        try:
            document = {"format": FORMAT, "step": step, "leaves": table, "meta": meta}
            text = json.dumps(document, indent=1)
        except TypeError as error:
            raise ValueError(f"meta of step {step} must hold JSON values only: {error}") from error
        home = self.folder / str(step)
        try:
            self._begin(home, text, leaves)
        except Exception as error:
            raise self._not_saved(home, error) from error
        self._pending = self._thread.submit(self._finish, step, self.lasting)

    def _begin(self, home: Place, text: str, leaves: Mapping[str, Any]) -> None:
        """Writes meta.json, and returns when Orbax has taken copies of the arrays."""
        if jax.process_index() == 0:
            for existing_step in self._folders():
                if not self._is_complete(existing_step) or existing_step > (self.newest or 0):
                    self._remove(existing_step)
            home.mkdir(parents=True)
            write_atomically(home / "meta.json", text)
        arrays = {name: _leaf_to_save(leaf) for name, leaf in leaves.items() if leaf.size}
        self._orbax.save(home / "state", args=ocp.args.StandardSave(arrays))

    def wait(self) -> None:
        """Returns when no save is under way. Raises: OSError where the last one failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore(
        self, abstract: Any, step: int | None = None, partial: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a step back, bit for bit, onto the shardings asked for.

        Args:
          abstract: the tree to fill: jax arrays or `jax.ShapeDtypeStruct` with a sharding for what
            lives on devices, numpy arrays for what lives on the host.
          step: as in `choose`.
          partial: the tree may leave out what was saved; nothing else is read.
        Returns: (state, meta).
        Raises: InputError where there is no such step, its files are damaged, or its tree, shapes
          or dtypes differ from what is asked for.
        """
        self.wait()
        is_checked = step is not None and step == self._checked_step
        intact_step, self._checked_step = step if is_checked else self.choose(step), None
        home = self.folder / str(intact_step)
        stored = read_meta(home)
        abstract_leaves = _named_leaves(abstract)
        stored_leaves = {
            n: leaf for n, leaf in stored["leaves"].items() if n in abstract_leaves or not partial
        }
        _refuse_unless_equal(home, stored_leaves, abstract_leaves)
        targets = {
            name: _restore_target(name, leaf) for name, leaf in abstract_leaves.items() if leaf.size
        }
        arrays = _read_arrays(home, targets)
        leaves = [_place_leaf(arrays.get(name), leaf) for name, leaf in abstract_leaves.items()]
        self.newest = intact_step
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), stored["meta"]

    def _folders(self) -> list[int]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in paths if is_step(path.name) and path.is_dir())

    def _refuse_files_in_the_way(self) -> None:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        if files := sorted(p.name for p in paths if is_step(p.name) and not p.is_dir()):
            raise InputError(
                f"{self.folder / files[0]} is a file where the folder of a step belongs: move it "
                "away, or set run.dir to another folder"
            )

    def _manifest(self, step: int) -> Place:
        return self.folder / str(step) / "manifest.json"

    def _is_complete(self, step: int) -> bool:
        try:
            return self._manifest(step).is_file()
        except PermissionError:  # a folder that may not be looked into
            return False

    def _remove(self, step: int) -> None:
        """Makes it no step first, for a kill may come, and removes its files. Raises: OSError."""
        home = self.folder / str(step)
        if not storage.is_url(home) and os.path.islink(home):
            logger.warning("%s is a link: it is removed, and what it points to stays", home)
        elif not self._manifest(step).is_dir():
            self._manifest(step).unlink(missing_ok=True)
        storage.remove_tree(home)
        if os.path.lexists(home):
            logger.warning("%s is no step any more, but a part of it cannot be removed", home)

    def _refuse_unless_next(self, step: int) -> None:
        if self.newest is not None and step < self.newest:
            raise ValueError(
                f"{self.folder}: step {step} cannot be saved after step {self.newest}: "
                "steps go forward; restore an older step to go on from it"
            )
        existing_steps = process.broadcast(self.steps) if self.newest is None else []
        if existing_steps:
            raise InputError(
                f"{self.folder} already holds steps {existing_steps}: "
                "go on with that run by --resume auto, or set run.dir to another folder"
            )

    def _finish(self, step: int, lasting: frozenset[int]) -> None:
        """In the background: waits for Orbax, writes the manifest, removes old steps."""
        home = self.folder / str(step)
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                entries = storage.folder_files(home).items()
                files = {name: fingerprint(p) for name, p in entries if p.name != "manifest.json"}
                storage.flush_tree(home)
                write_atomically(self._manifest(step), json.dumps({"files": files}, indent=1))
                storage.flush(home, self.folder)
        except Exception as error:
            raise self._not_saved(home, error) from error
        self.newest = step
        if jax.process_index() == 0:
            self._remove_older(lasting)

    def _remove_older(self, lasting: frozenset[int]) -> None:
        """A step that cannot be removed is said; the save before it has not failed."""
        try:
            for step in reversed(self.steps()[: -self.keep]):  # one that stays stops no newer one
                if step not in lasting:
                    self._remove(step)
        except Exception as error:  # of a bucket too
            logger.warning("older steps stay in %s: %s", self.folder, one_line(error))

    def _not_saved(self, home: Place, error: Exception) -> OSError:
        """What to raise; nothing is left of a step that is not complete."""
        reason = str(error.__cause__ or error).split("\n")[0]
        complete = f"; complete steps: {self.newest}, if any"  # of a bucket that does not answer
        with contextlib.suppress(OSError), storage.failing_as_os_error(home):
            if jax.process_index() == 0 and not (home / "manifest.json").exists():
                storage.remove_tree(home)
            complete = f"; complete steps: {self.steps()}"
        return OSError(f"{home} could not be saved: {reason}{complete}")

    def _intact(self, step: int | None) -> int:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            missing = "no complete checkpoint" if step is None else f"no complete step {step}"
            raise InputError(
                f"{self.folder} holds {missing} (steps there: {steps or 'none'}): "
                "give a run that has saved one"
            )
        problems = []
        for candidate in [step] if step is not None else reversed(steps):
            problem = damage(self.folder / str(candidate))
            if problem is None:
                return candidate
            problems.append(f"step {candidate} is damaged: {problem}")
            if step is None:
                logger.warning("%s; trying the step before it", problems[-1])
        remedy = "choose another step" if step is not None else "start again in another run.dir"
        raise InputError(f"{self.folder}: {'; '.join(problems)}: {remedy}")


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Path in the tree -> leaf, in the order of the leaves. numpy scalars become arrays."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two leaves of the state are called {name}: no key may hold a slash")
        if isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        if not isinstance(leaf, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
            raise ValueError(f"{name} is {type(leaf).__name__}: a state holds arrays only")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name} is a typed key: keep jax.random.key_data(key) in the state")
        leaves[name] = leaf
    return leaves


def _description(leaf: Any) -> list[Any]:
    """[dtype, shape], as meta.json holds it."""
    return [str(leaf.dtype), list(leaf.shape)]


def _leaf_to_save(leaf: Any) -> Any:
    """What Orbax is given. It copies what it is given before `save` returns.

    On several processes it refuses a device array that each of them has of its own, such as a step
    counter; those are equal, and process 0 saves its as a host array.
    """
    if isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable:
        return np.asarray(leaf)
    return leaf


def _restore_target(name: str, leaf: Any) -> Any:
    """What Orbax is asked for."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if leaf.sharding is None:
        raise ValueError(f"{name} is asked for without a sharding: give each leaf one")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _read_arrays(home: Place, targets: Mapping[str, Any]) -> Mapping[str, Any]:
    """What Orbax reads of a step whose files were intact. Raises: InputError where they are not any
    more, as where a run under way has removed the step."""
    # A reader of its own: the one that saves reads whole trees only.
    leaf_arguments = ocp.checkpoint_utils.construct_restore_args(targets)
    arguments = ocp.args.PyTreeRestore(targets, restore_args=leaf_arguments, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(home / "state", args=arguments)
    except Exception as error:
        if (problem := damage(home)) is None:
            raise
        raise InputError(
            f"{problem}: it was there when the step was checked; start again, and where another "
            "process removes steps, as a run under way does, name one that stays"
        ) from error


def _place_leaf(array: Any, leaf: Any) -> Any:
    """What the caller gets: Orbax's array; one without entries, which Orbax cannot store, again."""
    if array is not None:
        return array
    empty = np.zeros(leaf.shape, leaf.dtype)
    return empty if isinstance(leaf, np.ndarray) else jax.device_put(empty, leaf.sharding)


def _refuse_unless_equal(
    home: Place, stored: dict[str, list[Any]], abstract_leaves: dict[str, Any]
) -> None:
    """Raises InputError naming the first leaf whose name, dtype or shape differs."""
    expected = {name: _description(leaf) for name, leaf in abstract_leaves.items()}
    if wrong := differing_names(stored, expected):
        sides = (table.get(wrong[0], ["nothing"]) for table in (stored, expected))
        stored_text, expected_text = (" ".join(map(str, entry)) for entry in sides)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InputError(
            f"{home}: {wrong[0]} is stored as {stored_text} and asked for as {expected_text}"
            f"{more}: use the model, dtype, optimizer and number of rows that the run began with, "
            "or set run.dir to another folder"
        )


def parameter_hash(params: Params) -> str:
    """sha256 over name, dtype, shape and bytes of every leaf, in the order of the names.

    The same on every process and for every sharding. Called by all processes.
    """
    digest = hashlib.sha256()
    for name, leaf in sorted(_named_leaves(params).items()):
        digest.update(f"{name}|{leaf.dtype}|{leaf.shape}|".encode())
        for part in _parts(leaf):
            digest.update(sharding.to_host(part).tobytes())
    return digest.hexdigest()


def _parts(leaf: Any) -> Iterator[Any]:
    """An array in parts of some GATHERED bytes, by its first axis."""
    if leaf.nbytes <= GATHERED:
        yield leaf
        return
    rows = max(1, len(leaf) * GATHERED // leaf.nbytes)
    for begin in range(0, len(leaf), rows):
        yield leaf[begin : begin + rows]
