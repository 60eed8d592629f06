"""What of a run stays: its steps, a full disk, a reward that fails, weights that are of no use."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError

import jaxgrpo
from jaxgrpo.core.errors import InputError, one_line
from jaxgrpo.core.types import Learner, Stream
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place
from jaxgrpo.rewards.protocol import RewardError
from jaxgrpo.training import parameters
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.processes import parent, process
from jaxgrpo.training.records import alarms
from jaxgrpo.training.records.console import Display
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.resets import Resets

MAX_UNSAVED = 3
"""Checkpoints in a row that may fail before the run ends, since it would lose ever more."""


@dataclasses.dataclass
class Progress:
    """What a run remembers beside learner and stream. Checkpoints hold the first eight."""

    best: tuple[int, float] | None  # step and value
    best_metric: str | None  # the checkpoint.keep_best that it is the best by
    base: dict[str, Any] | None  # "metrics" of the base, and what was "asked" for them
    resets: Resets
    not_finite: int = 0  # steps in a row that computed something that is not finite
    tokens: float = 0.0  # that were sampled
    seconds: float = 0.0  # of steps
    owes_evaluation: bool = False  # a stop signal has ended that of the last step
    # What `best` was before, the worst first.
    earlier_bests: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.monotonic)
    reported: set[str] = dataclasses.field(default_factory=set)  # rewards whose failure was shown
    unsaved: int = 0  # checkpoints in a row that failed
    newest: int | None = None  # checkpoint when one was last asked for

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Progress:
        """From what a checkpoint holds beside its arrays; {} at the start of a run."""
        if not meta:
            return cls(None, None, None, Resets())
        try:
            best = (int(meta["best"][0]), float(meta["best"][1])) if meta["best"] else None
            resets, not_finite = Resets(**meta["resets"]), int(meta["not_finite"])
            tokens, seconds = (float(meta.get(name, 0.0)) for name in ("tokens", "seconds"))
            metric, base = meta["best_metric"], meta["base"]
            owes = bool(meta.get("owes_evaluation", False))
            return cls(best, metric, base, resets, not_finite, tokens, seconds, owes)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"the meta.json of the checkpoint is not what a run writes ({error}): choose "
                "another run.dir"
            ) from None

    def replace_best(self, step: int, value: float) -> None:
        """The best one before it counts again if this step cannot be saved."""
        self.earlier_bests += [] if self.best is None else [self.best]
        self.best = step, value

    def forget_best(self) -> None:
        """Later evaluations are compared with none before."""
        self.best, self.earlier_bests = None, []

    def meta(self) -> dict[str, Any]:
        """What is saved, as JSON values."""
        names = "best", "best_metric", "base", "not_finite", "tokens", "seconds", "owes_evaluation"
        saved = {name: getattr(self, name) for name in names}
        resets = self.resets._asdict()
        return {"jaxgrpo": jaxgrpo.__version__, **saved, "resets": resets}


@dataclasses.dataclass
class Keeper:
    """Saves the steps of a run, and says what is saved when it ends early."""

    config_file: Path | None  # that the run is started with, where there is one
    stop_after_not_finite: int  # steps in a row; 0: never
    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    progress: Progress
    inputs: dict[str, Any]  # fingerprints.input_facts of the run
    replays: bool = False  # saved rollouts
    adapters: dict[str, Any] | None = None  # parameters.adapter_identity of the run
    has_objects: bool = False  # of Python: `opening.gives_objects`

    def saved_line(self) -> str:
        """What of the run is saved, in a line."""
        # Nothing is asked of a bucket here: a watchdog says this, of a run that may wait for one.
        checkpoints, place = self.checkpoints, self.folder.place
        try:
            step = checkpoints.newest if storage.is_url(place) else checkpoints.latest()
        except OSError as error:
            return f"{place} cannot be read ({describe(error)})"
        return f"{place} holds {'no step yet' if step is None else f'step {step}'}"

    def resume_command(self) -> str:
        """The command that resumes this run, or the call."""
        if self.has_objects:
            return 'the same call of jaxgrpo.train, and resume="auto"'
        if self.replays:
            return "the same jaxgrpo replay, and --resume auto"
        source = self.config_file or self.folder.path / "config.toml"
        return f"jaxgrpo train {shlex.quote(str(source))} --resume auto (and the same --set)"

    def save(self, learner: Learner, stream: Stream, number: int, must: bool) -> None:
        """Saves a step; a run of one process goes on without for MAX_UNSAVED times in a row.

        Args:
          must: wait for it, and end the run where it fails.
        Raises: process.NotSaved.
        """
        progress, checkpoints = self.progress, self.checkpoints
        several = jax.process_count() > 1
        refuse = functools.partial(self.refuse_moved, number)
        problem = _first_error(refuse, checkpoints.wait)  # of the save before this one
        if checkpoints.newest != progress.newest:  # it was complete, perhaps long before this call
            progress.unsaved, progress.newest = 0, checkpoints.newest
        # It may have failed here alone: the others do not come to a new one, they wait for it.
        if problem is None or not several:
            save = functools.partial(self._save, number, learner, stream)
            save_error = _first_error(refuse, save, *([checkpoints.wait] if must else []))
            problem = save_error or (None if must else problem)
        if problem is None:
            return
        progress.unsaved += 1
        message = f"step {number}: {describe(problem)}"
        if must or progress.unsaved > MAX_UNSAVED or several:
            _first_error(checkpoints.wait)
            raise process.NotSaved(
                f"{message}; {remedy(problem)} and go on by --resume auto"
            ) from problem
        left = MAX_UNSAVED - progress.unsaved
        self.display.say(
            f"{message}; the run goes on, and ends if this happens {left + 1} times more"
        )

    def refuse_moved(self, number: int) -> None:
        """Raises: process.NotSaved where the run's folder was moved or deleted meanwhile; OSError
        where that cannot be seen."""
        if self.folder.is_moved():
            raise process.NotSaved(
                f"step {number}: {self.folder.path} is not the folder that this run began in: it, "
                "or .lock in it, was renamed, moved, replaced or deleted; nothing more is written "
                "there; put it back and go on by --resume auto"
            )

    def publish(self) -> None:
        """The end of a run in a bucket: all that is not there yet. Raises: process.NotSaved."""
        if error := _first_error(self.folder.publish):
            raise process.NotSaved(
                f"{error}; the files of the run are in {self.folder.path}; go on by --resume auto"
            ) from error

    def _save(self, number: int, learner: Learner, stream: Stream) -> None:
        """Begins to save, once all lines are written and, of a run in a bucket, sent there: nothing
        is saved in one that another trainer has taken. The save before it has ended.

        Raises: OSError.
        """
        self.folder.catch_up()
        self.folder.publish()
        self._settle_best(number)
        self.checkpoints.lasting = self._lasting_steps(number)
        metrics = self.folder.path / "metrics.jsonl"
        if process.is_main() and metrics.exists():
            storage.flush(metrics)  # before a checkpoint that says what is in it
        meta = {**self.progress.meta(), "inputs": self.inputs, "logged": self.folder.logged()}
        if self.adapters is not None:
            meta["lora"] = self.adapters
        self.checkpoints.save(number, parameters.to_save(learner, stream), meta)

    def _settle_best(self, number: int) -> None:
        """Where the best step could not be saved, the one before it is the best again, and later
        evaluations are compared with that."""
        progress, checkpoints = self.progress, self.checkpoints
        best = progress.best
        if best and jax.process_count() == 1:  # several end by a save that fails
            steps = {number, *checkpoints.steps()}
            progress.earlier_bests = [pair for pair in progress.earlier_bests if pair[0] in steps]
            if best[0] not in steps:
                progress.best = progress.earlier_bests.pop() if progress.earlier_bests else None
                now = f"step {progress.best[0]}" if progress.best else "none"
                self.display.say(f"step {best[0]}, the best, was not saved; the best is now {now}")

    def _lasting_steps(self, number: int) -> frozenset[int]:
        """The checkpoints that stay beside the newest ones: the best, and, while nothing finite is
        computed, the last good one, which `refuse_diverged` may have to name."""
        progress = self.progress
        steps = [] if progress.best is None else [progress.best[0]]
        if progress.not_finite:
            last_good_step = number - progress.not_finite
            steps += [step for step in self.checkpoints.steps() if step <= last_good_step][-1:]
        return frozenset(steps)

    @contextlib.contextmanager
    def saving(self, number: int, before: tuple[Learner, Stream] | None = None) -> Iterator[None]:
        """Saves what was before step `number`, where a reward fails within, or, in a run of one
        process, something else, as own code that chooses prompts, or memory that is not there for
        longer samples; None: nothing.

        Raises: process.RewardFailed instead of RewardError; in step 1 the reward is wrong input.
          Other errors as they are, with a note that says what is saved.
        """
        try:
            yield
        except RewardError as error:
            if number < 2:
                raise
            raise self.reward_failed(number, error, self._save_before(number, before)) from error
        except Exception as error:
            if number > 1 and before is not None and jax.process_count() == 1:
                try:
                    saved_line = self._save_before(number, before)
                except Exception as unsaved:  # a device may compute no more
                    saved_line = f"{one_line(unsaved)}; {self.saved_line()}"
                command = self.resume_command()
                error.add_note(f"the run ended in step {number}; {saved_line}; go on: {command}")
            raise

    def _save_before(self, number: int, before: tuple[Learner, Stream] | None) -> str:
        """Saves what was before a step in which something has failed, and says what is saved."""
        refuse = functools.partial(self.refuse_moved, number)
        last = [] if before is None else [functools.partial(self._save, number - 1, *before)]
        if jax.process_count() == 1:  # the save before may have failed, and this one may not
            _first_error(self.checkpoints.wait)
        unsaved = _first_error(refuse, *last, self.checkpoints.wait)
        line = self.saved_line()
        return f"{describe(unsaved)}; {line}" if unsaved else line

    def reward_failed(
        self, number: int, error: RewardError, saved_line: str
    ) -> process.RewardFailed:
        """What ends a run in a step in which a reward or a scorer has failed."""
        return process.RewardFailed(
            f"{error}\nthe run ended in step {number}; {saved_line}; mend the reward, then go "
            f"on with: {self.resume_command()}; where its file has changed, add "
            "--set run.allow_changes='[\"code\"]'"
        )

    def refuse_diverged(self, number: int, values: Mapping[str, float]) -> None:
        """Raises: Diverged if weights are of no use, or for too long nothing finite is computed."""
        progress, limit = self.progress, self.stop_after_not_finite
        progress.not_finite = progress.not_finite + 1 if alarms.is_not_finite(values) else 0
        problem = alarms.weights_problem(values)
        last_good_step = number - max(1, progress.not_finite)
        if problem is None and 0 < limit <= progress.not_finite:
            problem = (
                f"gradient, log-probs or entropy are not finite, {limit} steps in a row "
                "(train.stop_after_not_finite)"
            )
        if problem is None:
            return
        _first_error(self.checkpoints.wait)
        where = "no checkpoint is from before"
        try:
            steps = [step for step in self.checkpoints.steps() if step <= last_good_step]
        except OSError as error:
            steps, where = [], f"its checkpoints cannot be read ({describe(error)})"
        if steps:
            where = (
                f"the last good checkpoint is of step {steps[-1]}, `jaxgrpo export "
                f"{shlex.quote(str(self.folder.place))} OUT --step {steps[-1]}` writes its model"
            )
        raise process.Diverged(
            f"{self.folder.place}: step {number}: {problem}; {where}; begin a new run with a lower "
            f"optimizer.learning_rate ({values['learning_rate']:g} here), and look at what it "
            "learns from"
        )


@contextlib.contextmanager
def writing_results(place: Place) -> Iterator[None]:
    """Within it the end of a run is written, all of whose steps are saved.

    Raises: process.NotSaved where something cannot be written; InputError where the base is gone,
      or something else is at its place.
    """
    try:
        yield
    except InputError as error:
        text = f"{place} could not be written: {error}; all steps are saved"
        raise InputError(f"{text}: go on by --resume auto") from error
    except (OSError, SafetensorError) as error:
        text = f"{place} could not be written: {error}; {remedy(error)}"
        raise process.NotSaved(f"{text} and go on by --resume auto") from error


def describe(error: OSError) -> str:
    """Where and why, in a line.

    >>> describe(OSError(30, "Read-only file system", "r/a.tmp", None, "r/a"))
    'r/a: Read-only file system'
    """
    file = error.filename2 or error.filename
    return f"{file}: {error.strerror}" if file else error.strerror or str(error)


def remedy(error: BaseException) -> str:
    """What to do about a file that could not be written.

    >>> remedy(PermissionError(13, "Permission denied"))
    'give back the permission to write there'
    """
    while not getattr(error, "errno", None) and error.__cause__ is not None:
        error = error.__cause__
    number = getattr(error, "errno", None)
    if number == errno.ENOENT:
        return "put back what is missing"
    if number == errno.EROFS:
        return "let it be written again (after faults of a disk it may be read-only)"
    if number in (errno.EACCES, errno.EPERM):
        return "give back the permission to write there"
    return "make space" if number in (None, *parent.FULL) else "mend that"


def _first_error(*calls: Callable[[], None]) -> OSError | None:
    """The OSError of the first call that raises one; those after it are then not made."""
    try:
        for call in calls:
            call()
    except OSError as error:
        return error
    return None
