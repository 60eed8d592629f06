"""The runs of a comparison, one after the other in one process, which shares what they share."""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Params
from jaxgrpo.evaluation.evaluate import SUCCESS, Evaluate, Evaluation
from jaxgrpo.experiments.compare.experiment import Case
from jaxgrpo.models import sharding
from jaxgrpo.training import loop, process
from jaxgrpo.training.folder import write_atomically
from jaxgrpo.training.policy import evaluator_of
from jaxgrpo.training.setup import setup
from jaxgrpo.training.sharing import Shared


def is_finished(case: Case) -> bool:
    """Whether the run has come to its end: its summary is what it writes last.

    Raises: InputError where its folder holds a run with another config.
    """
    if not (case.path / "config.toml").exists():
        return False
    text = (case.path / "config.toml").read_text(encoding="utf-8")
    before = configs.flat(configs.tables_of(configs.from_dict(tomllib.loads(text))))
    now = configs.flat(configs.tables_of(case.config))
    # Where it was kept then: the whole folder may have been moved.
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if key != "run.dir" and before.get(key) != now.get(key)
    )
    if changed:
        lines = (
            f"{key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}" for key in changed
        )
        raise InputError(
            f"{case.path}: holds a run with another config:\n  " + "\n  ".join(lines) + "\n"
            "remove the folder to run it anew, or set dir to another one"
        )
    return (case.path / "summary.json").exists()


class Runner:
    """Takes runs; what one has made, inputs, programs, the base's evaluation, the next one uses."""

    def __init__(self) -> None:
        self._shared = Shared()
        self._base: dict[Any, Evaluation] = {}  # of the seed under way
        self._seed: int | None = None

    def run(self, case: Case) -> None:
        """Takes a run to its end, from where a killed process left it, as `jaxgrpo train` would.

        Its checkpoints are removed at the end: the model stays.
        """
        if case.seed != self._seed:  # runs come seed by seed
            self._base.clear()
            self._seed = case.seed
        share = self._shared.of(case.config)
        loop.take(
            case.config,
            lambda: setup(case.config, share=share),
            lambda parts: self._remembering(evaluator_of(parts, share), case.path),
            resume=True,
            shown=False,
        )
        if process.is_main():
            shutil.rmtree(case.path / "checkpoints", ignore_errors=True)

    def _remembering(self, evaluate: Evaluate, folder: Path) -> Evaluate:
        """Evaluates the base once per seed, and writes down how often each prompt succeeded."""

        def remembering(params: Params, key: Array, step: int) -> Evaluation:
            # Before the first step the parameters are those of the base, whatever the method.
            place = (id(evaluate), sharding.to_host(key).tobytes()) if step == 0 else None
            found = self._base.get(place) or evaluate(params, key, step)
            if place is not None:
                self._base[place] = found
            write_successes(folder, step, found.sampled.scores)
            return found

        return remembering


def write_successes(folder: Path, step: int, scores: np.ndarray) -> None:
    """successes/step_N.json: of how many samples, and how many were right, by prompt [N, n]."""
    if not process.is_main():
        return
    counts = (scores > SUCCESS).sum(1).tolist()
    (folder / "successes").mkdir(exist_ok=True)
    text = json.dumps({"samples": scores.shape[1], "correct": counts})
    write_atomically(folder / "successes" / f"step_{step}.json", text + "\n")


def split(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """Those whose runs are finished and those that wait. Raises: InputError, as `is_finished`."""
    finished, waiting = [], []
    for case in cases:
        (finished if is_finished(case) else waiting).append(case)
    return finished, waiting


def take_all(
    finished: Sequence[Case],
    waiting: Sequence[Case],
    say: Callable[[str], None],
    check: Callable[[Case], None],
    how_to_go_on: str,
) -> None:
    """Takes every run that is not finished.

    Args:
      finished, waiting: as `split` finds them.
      say: is told of each run that has come to its end.
      check: is given the first one that has, and may refuse to take more.
    Raises: runtime.StopRequested after a stop signal, with what the run under way has saved.
    """
    count = len(finished) + len(waiting)
    if finished:
        check(finished[0])
        say(f"{len(finished)} of {count} runs are finished already")
    runner, began = Runner(), time.monotonic()
    for place, case in enumerate(waiting, start=1):
        began_run = time.monotonic()
        try:
            runner.run(case)
        except process.StopRequested as stopped:
            raise process.StopRequested(
                f"{stopped.args[0].partition(';')[0]}; {how_to_go_on}"
            ) from None
        if place == 1:
            check(case)
        now = time.monotonic()
        left = (now - began) / place * (len(waiting) - place)
        say(
            f"{len(finished) + place:4d} of {count}: {case.arm}, rate "
            f"{case.rate:g}, seed {case.seed}: {now - began_run:.1f} s, {_duration(left)} left"
        )
        if process.stop_requested(0) and place < len(waiting):
            raise process.StopRequested(f"stopped behind a run; {how_to_go_on}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
