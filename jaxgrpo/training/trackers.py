"""Other programs that show metrics: TensorBoard event files, and Weights & Biases.

Both are loaded when a run asks for them. What they get is what metrics.jsonl holds; that file stays
the record of the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrpo.config.checks import wandb_problem
from jaxgrpo.core.errors import InputError
from jaxgrpo.training.folder import write_atomically

FLUSH_SECONDS = 5


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs` shows all runs beneath it.

    A thread writes them: a kill loses the last FLUSH_SECONDS. In a name every character that
    TensorBoard's tags have no room for becomes "_": eval/pass@4 is eval/pass_4 there.

    Args:
      folder: the run's.
      done: finished steps; what an earlier process wrote after them is hidden by the reader.
    """

    def __init__(self, folder: Path, done: int = 0):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=done + 1 if done else 0,
            flush_secs=FLUSH_SECONDS,
            filename_suffix=f".{os.getpid()}.{done}",  # two starts in one second are two files
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(_tag(name), value, step)

    def close(self) -> None:
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
        given = {"name": folder.name, **options}
        try:
            self._run = wandb.init(
                **given,
                dir=str(folder),
                config=dict(config),
                id=_wandb_id(folder),
                resume="allow",
                settings=quiet,
            )
        except wandb.Error as error:
            raise InputError(
                f"tracking.wandb could not start: {error}; `wandb login` once, set "
                'tracking.wandb.mode = "offline", or take tracking.wandb out'
            ) from error
        self._run.define_metric("*", step_metric="step")
        offline = self._run.offline
        self.place = f"wandb sync {Path(self._run.dir).parent}" if offline else str(self._run.url)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **numbers(metrics)})

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | WandB


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers: the others have no place in a chart."""
    found = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            found[name] = number
    return found


def _tag(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_./" else "_" for c in name)


def _wandb_id(folder: Path) -> str:
    """The id of the run, made once and kept in the folder."""
    file = folder / "wandb_id.txt"
    if not file.exists():
        write_atomically(file, os.urandom(8).hex())
    return file.read_text(encoding="utf-8").strip()
