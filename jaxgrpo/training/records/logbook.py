"""Where the numbers of a run go: its folder, trackers, the terminal, warnings and the report.

The trackers, TensorBoard and Weights & Biases, are loaded when a run asks for them. They get what
metrics.jsonl holds; that file stays the record of the run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxgrpo.config.keys import RunKeys, TrackingKeys
from jaxgrpo.config.own_code import installed
from jaxgrpo.config.ranges import wandb_problem
from jaxgrpo.core.errors import InputError, one_line, without_passwords
from jaxgrpo.core.types import Rollouts
from jaxgrpo.data.storage import write_atomically
from jaxgrpo.training.processes import process
from jaxgrpo.training.records import alarms, rollout_files
from jaxgrpo.training.records.console import Display, best_and_worst, warning
from jaxgrpo.training.records.folder import Closing, RunFolder
from jaxgrpo.training.records.reading import is_number, read_metrics
from jaxgrpo.training.records.report.html import write_report
from jaxgrpo.training.records.report.record import FINISHED, STOPPED, UNDER_WAY, RewardSum

REPORT_SHARE = 0.01
"""Of the seconds since the start, so much at most goes into reports during the run."""

FIRST_REPORT_SECONDS = 3.0
"""What the first report is taken to cost, before one has been measured: most of it is importing."""


QUEUE = 10_000
"""Steps that may wait for TensorBoard's thread."""

FLUSH_SECONDS = 5
"""Seconds between two writes of TensorBoard's thread."""


class Logbook(Closing):
    """The records of one run. A context manager, or `close` it.

    Every process calls it alike; only the first one writes, prints and warns.

    Args:
      config_text: the config as TOML, for trackers that show it.
      folder: rewound to `finished_steps`.
      finished_steps: of the run, before this start.
    Raises: InputError where a tracker that the config asks for cannot start.
    """

    def __init__(
        self,
        keys: RunKeys,
        tracking: TrackingKeys,
        config_text: str,
        folder: RunFolder,
        display: Display,
        finished_steps: int,
    ):
        self._keys, self._folder, self._display = keys, folder, display
        self._active = process.is_main()
        self._trackers = (
            self._start_trackers(tracking, config_text, finished_steps) if self._active else []
        )
        lines = read_metrics(folder.path) if self._active else []
        self._state, self._alarms = alarms.replay(lines)
        self._report = _Report(folder, display) if self._active and keys.report else None
        self._finished = False
        self._failing: set[str] = set()  # what the disk did not take last time

    def close(self) -> None:
        """Lets the trackers finish; a run that ended before its time leaves a report too."""
        if self._report and not self._finished:
            self._report.write(STOPPED)
        for tracker in self._trackers:
            try:
                with _failing_as_os_error():
                    tracker.close()
            except OSError as error:
                name = type(tracker).__name__
                self._display.say(f"{name} not closed: {error}; metrics.jsonl has all numbers")

    def step(self, number: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step, and says what begins to go wrong with it.

        Lines that the disk does not take are kept, and written when it does again.
        """
        self._attempt("metrics", number, lambda: self._folder.write_metrics(number, values))
        if not self._active:
            return
        self._write_trackers(number, values)
        self._state, new_alarms = alarms.see(self._state, {"step": number, **values})
        self._alarms += new_alarms
        for alarm in new_alarms:
            self._display.say(warning(alarm.step, alarm.text))
        report_every = self._keys.report_every
        if self._report and report_every and number and number % report_every == 0:
            self._report.refresh()

    def replace_evaluations(self, until: int, lines: Mapping[int, Mapping[str, float]]) -> None:
        """Puts what was evaluated up to a step aside, and writes new evaluations of some steps."""
        prefix = self._folder.replace_evaluations(until, lines)
        self._display.say(f"earlier numbers are {prefix}... in metrics.jsonl")
        self._begin_again(lines)

    def add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Writes an evaluation of a step that was logged without."""
        self._folder.add_evaluation(step, values)
        self._begin_again({step: values})

    def _begin_again(self, lines: Mapping[int, Mapping[str, float]]) -> None:
        """Reads metrics that were rewritten, and tells trackers of the evaluations that are new."""
        if not self._active:
            return
        self._state, self._alarms = alarms.replay(read_metrics(self._folder.path))
        for number, values in lines.items():
            self._write_trackers(number, values)

    def _write_trackers(self, number: int, values: Mapping[str, float]) -> None:
        def write(tracker: Tracker) -> None:
            with _failing_as_os_error():
                tracker.write(number, values)

        for tracker in self._trackers:
            self._attempt(type(tracker).__name__, number, functools.partial(write, tracker))

    def samples(self, number: int, rows: Iterable[Mapping[str, Any]], summing: RewardSum) -> None:
        """Writes the samples of a step, and shows the best and the worst of them."""
        rows = list(rows)
        self._attempt("samples", number, lambda: self._folder.write_samples(number, rows))
        if self._active:
            for text in best_and_worst(rows, summing):
                self._display.say(text)

    def rollouts(self, number: int, rollouts: Rollouts) -> None:
        """Writes the rollouts of a step, host arrays."""
        if self._active:
            content = rollout_files.encode(rollouts, number)
            write = self._folder.write_rollouts
            self._attempt("rollouts", number, lambda: write(number, content))

    def _attempt(self, record_name: str, number: int, write: Callable[[], None]) -> None:
        """Writes; says in one line, once until it succeeds again, that the disk did not take it."""
        try:
            write()
        except OSError as error:
            if record_name not in self._failing:
                self._display.say(
                    f"step {number}: {record_name} not written: {error.strerror or error}"
                )
            self._failing.add(record_name)
        else:
            self._failing.discard(record_name)

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the summary, with the count of each warning, and the last report."""
        full_summary = {**summary, "warnings": alarms.count(self._alarms)}
        self._folder.write_summary(full_summary)
        if self._report:
            self._report.write(FINISHED)
        self._finished = True
        return full_summary

    def _start_trackers(
        self, tracking: TrackingKeys, config_text: str, finished_steps: int
    ) -> list[Tracker]:
        path = self._folder.path
        trackers: list[Tracker] = []
        if tracking.wandb is not None:  # first: it is the one that may refuse
            tables = tomllib.loads(without_passwords(config_text))
            trackers.append(page := WandB(path, tracking.wandb, tables))
            self._display.console.print(
                f"Weights & Biases: {page.place}", markup=False, soft_wrap=True
            )
        problem = "pip install tensorboardX for them"
        if tracking.tensorboard and installed("tensorboardX"):
            try:
                return [*trackers, TensorBoard(path, finished_steps)]
            except Exception as error:
                if isinstance(error, OSError) and error.filename:  # a file of the run
                    for tracker in trackers:
                        tracker.close()
                    raise
                # As of another protobuf, or of a system without semaphores.
                reason = f"{type(error).__name__}: {one_line(error)}"
                problem = f"tensorboardX cannot be used here ({reason}): mend that"
        if tracking.tensorboard:
            self._display.say(
                f"no TensorBoard events: {problem}, or set tracking.tensorboard = false"
            )
        return trackers


def affords_report(elapsed: float, spent: float, cost: float) -> bool:
    """Whether a report that takes `cost` seconds keeps all of them within REPORT_SHARE."""
    return spent + cost <= REPORT_SHARE * elapsed


class _Report:
    """report.html, rewritten during the run within REPORT_SHARE of the time.

    If a report cannot be written the run goes on; the reason is printed, once until one is written
    again. Nothing is written into another folder at the place of the run's.
    """

    def __init__(self, folder: RunFolder, display: Display):
        self._folder, self._display = folder, display
        self._began = time.monotonic()
        self._spent, self._next = 0.0, FIRST_REPORT_SECONDS
        self._failed = False

    def refresh(self) -> None:
        """Rewrites the report if its last cost fits the time budget."""
        if affords_report(time.monotonic() - self._began, self._spent, self._next):
            self.write()

    def write(self, status: str = UNDER_WAY) -> None:
        began = time.monotonic()
        try:
            if not self._folder.is_moved():
                write_report(self._folder.path, status)
            self._failed = False
        except Exception as error:
            if not self._failed:
                self._display.say(f"no report: {error}")
            self._failed = True
        self._next = time.monotonic() - began
        self._spent += self._next


def _quiet(close: Callable[[], None], stop: Callable[[], None]) -> Callable[[], None]:
    """A file's `close` where the disk may be full; `stop` ends the thread that writes it."""

    def close_quietly() -> None:
        try:
            close()
        except OSError:
            with contextlib.suppress(OSError):
                stop()

    return close_quietly


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs` shows all runs beneath it.

    A thread writes them: a kill loses the last FLUSH_SECONDS. Tags are the names of the metrics.

    Args:
      folder: the run's.
      finished_steps: before this start; the reader hides what an earlier process wrote after them.
    """

    def __init__(self, folder: Path, finished_steps: int = 0):
        self._folder = folder / "tensorboard"
        # Made of descriptors when they are loaded, so that no checker of types finds their names.
        self._events = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        self._open(finished_steps)

    def _open(self, finished_steps: int) -> None:
        from tensorboardX import FileWriter

        # Not its SummaryWriter, which writes eval/pass@4 as eval/pass_4.
        self._writer = FileWriter(
            str(self._folder),
            max_queue=QUEUE,
            flush_secs=FLUSH_SECONDS,
            # Two starts in one second are two files.
            filename_suffix=f".{os.getpid()}.{finished_steps}",
        )
        # It ends where the disk is full, and a queue that is read no more blocks once it is full.
        writer: Any = self._writer.event_writer
        self._thread = writer._worker
        writer.close = _quiet(writer.close, self._thread.stop)  # is called again as Python ends
        # From this step on the reader drops what earlier files hold.
        log, first = self._events.SessionLog, finished_steps + 1 if finished_steps else 0
        begins = log(status=log.START)
        self._writer.add_event(self._events.Event(file_version="brain.Event:2"), step=first)
        self._writer.add_event(self._events.Event(session_log=begins), step=first)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises: OSError where the thread has ended and a new file cannot be opened."""
        if not self._thread.is_alive():
            self._open(step)
        value = self._summary.Value
        scalars = [
            value(tag=name, simple_value=number) for name, number in numbers(metrics).items()
        ]
        self._writer.add_summary(self._summary(value=scalars), step)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


class WandB:
    """A run of Weights & Biases; one run folder is one run there, however often it is resumed.

    The metric "step" is the axis of all others: steps taken again after a crash are not refused.

    Args:
      folder: the run's; wandb keeps its files in RUN/wandb.
      options: of `wandb.init`: project, entity, name, group, tags, mode, ...
      config: what the run's page shows as its config.
    `place` is the address of the run's page; of an offline one, the command that sends it there.
    Raises: InputError where wandb is not installed, an option is unknown, or it cannot start.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], config: Mapping[str, Any]):
        if problem := wandb_problem(options):
            raise InputError(problem)
        import wandb

        # Nothing of ours goes through its console: the run's bar would be drawn twice.
        quiet = wandb.Settings(console="off", silent=True)
        run_options = {"name": folder.name, **options}
        try:
            self._run = wandb.init(
                **run_options,
                dir=str(folder),
                config=dict(config),
                id=_wandb_id(folder),
                resume="allow",
                settings=quiet,
            )
        except Exception as error:  # of a wrong value pydantic's, which is none of wandb's
            raise InputError(
                f"tracking.wandb could not start: {one_line(error)}; mend what is wrong there, "
                '`wandb login` once, set tracking.wandb.mode = "offline", or take it out'
            ) from error
        self._run.define_metric("*", step_metric="step")
        place = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else self._run.url
        self.place: str = str(place)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises: OSError where wandb's process is gone, as where memory ran out."""
        with _failing_as_os_error():
            self._run.log({"step": step, **numbers(metrics)})

    def close(self) -> None:
        """Raises: OSError as `write`."""
        import wandb

        with _failing_as_os_error():
            try:
                self._run.finish()
            except Exception:
                with contextlib.suppress(Exception):
                    wandb.teardown()  # else it fails again, with a traceback, as Python ends
                raise


@contextlib.contextmanager
def _failing_as_os_error() -> Iterator[None]:
    """What a tracker raises, wandb of a dozen kinds, becomes an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(one_line(error) or type(error).__name__) from error


Tracker = TensorBoard | WandB


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers: the others have no place in a chart."""
    return {name: float(value) for name, value in metrics.items() if is_number(value)}


def _wandb_id(folder: Path) -> str:
    """The id of the run, made once and kept in the folder."""
    file = folder / "wandb_id.txt"
    if not file.exists():
        write_atomically(file, os.urandom(8).hex())
    return file.read_text(encoding="utf-8").strip()


class Clock:
    """Wall-clock seconds of the phases of a step, as metrics; `on_phase` hears which one begins."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self.on_phase = on_phase
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        began = time.monotonic()
        with jax.profiler.TraceAnnotation(phase):
            yield
        spent = time.monotonic() - began
        self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + spent
        self.seconds["time/step"] = self.seconds.get("time/step", 0.0) + spent
