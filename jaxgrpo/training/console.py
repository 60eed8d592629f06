"""What a run shows in the terminal: one line per step, a bar with the time left, a last table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """Progress of one run; silent in every process but the first."""

    def __init__(self, steps: int, done: int, active: bool):
        self.console = Console(quiet=not active, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not active,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done)
        self._accuracy: float | None = None

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)  # it may hold what a model wrote

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._accuracy = metrics["accuracy"]
        low, high = metrics["accuracy/low"], metrics["accuracy/high"]
        shown = [f"accuracy {metrics['accuracy']:.3f} (95%: {low:.3f} to {high:.3f})"]
        shown += [f"{name} {value:.3f}" for name, value in metrics.items() if is_summary(name)]
        self.say(f"evaluated at step {step}: {', '.join(shown)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """What matters first: is there reward, does it grow, is there signal, does it move."""
        accuracy = "    –" if self._accuracy is None else f"{self._accuracy:.3f}"
        self.say(
            f"{step:4d} reward {metrics['reward']:6.3f} accuracy {accuracy} "
            f"live {metrics['live_groups']:4.0%} gradient {metrics['grad_norm']:.1e} "
            f"{metrics['time/step']:.1f}s loss {metrics['loss']:8.1e}"
        )
        self._bar.update(self._task, completed=step)


def is_summary(name: str) -> bool:
    """Whether a metric of an evaluation is pass@k or maj@k itself, not an end of its interval."""
    return name.startswith(("pass@", "maj@")) and "/" not in name


def comparison(title: str, columns: Mapping[str, Mapping[str, float]], rows: list[str]) -> Table:
    """A table with one column per policy."""
    table = Table(title=title)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row, *(f"{column[row]:.3f}" for column in columns.values()))
    return table


def facts(console: Console, values: Mapping[str, Any]) -> None:
    """Name and value, one per line, aligned."""
    width = max(map(len, values))
    for name, value in values.items():
        # Without markup: a value may hold brackets, as a prompt does.
        console.print(f"{name:<{width}}  {value}", soft_wrap=True, markup=False, emoji=False)
