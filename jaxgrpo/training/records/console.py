"""What the terminal shows: a run's steps and bar, warnings, its best and worst sample, its report.

What a model wrote is shown as text: no markup, no escape sequence in it acts on the terminal.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxgrpo.core.errors import without_passwords
from jaxgrpo.evaluation.intervals import without_ends
from jaxgrpo.training.processes import parent, process
from jaxgrpo.training.records.folder import plain
from jaxgrpo.training.records.report.record import (
    Record,
    RewardSum,
    accuracy_first,
    shown,
    total_reward,
    visible,
    with_interval,
)

BARS = "▁▂▃▄▅▆▇█"
LOOK: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False}
"""Of a table that stands among other lines."""
MAX_WIDTH = 10**6  # columns of a table that is not cut
WIDTH = 24  # of a sparkline
FIRST = 60.0  # seconds of one phase after which a line says so; then after twice as long each time
SILENCE = 9.0  # seconds without a line after which one says so where no bar is seen, as in a log
TICK = 0.5  # seconds between two looks
METRICS = (
    "reward",
    "live_groups",
    "groups/all_fail",
    "groups/all_pass",
    "entropy_estimated",
    "kl",
    "grad_norm",
    "completions/mean_length",
    "completions/clipped_ratio",
    "time/step",
)


class Document(NamedTuple):
    """What a command returns for --json: `cli.main` prints it, alone on stdout."""

    value: Any  # numbers, texts, lists, mappings and arrays
    code: int = 0  # the exit code

    def text(self) -> str:
        """As JSON of ASCII, so that nothing in it acts on a terminal; NaN and infinity are null."""
        return json.dumps(plain(self.value), indent=2, allow_nan=False) + "\n"


class Display:
    """Progress of one run; silent in every process but the first. `bar` is a context manager.

    Args:
      clock: seconds, as time.monotonic.
    """

    def __init__(
        self,
        steps: int,
        finished_steps: int,
        active: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console: Console = Console(quiet=not active, highlight=False)
        self.bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not active,
            transient=True,
        )
        self._task = self.bar.add_task("training", total=steps, completed=finished_steps)
        self._due = FIRST  # seconds of a phase at which the next line about it is due
        self._clock, self._last_line = clock, clock()  # when the last line was printed
        self._compiled = process.Programs.compiled()  # programs that a line has told of

    def say(self, text: str | Text) -> None:
        self._last_line = self._clock()
        with parent.reaching_output(1), _stopping_unread():
            # It may hold what a model wrote. A log breaks no line between a name and its number.
            self.console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def showing_bar(self) -> Iterator[None]:
        """The bar is shown within it."""
        parent.print_any_text()  # a program that calls jaxgrpo.train has not done so
        with parent.reaching_output(1):
            self.bar.start()
        try:
            yield
        finally:
            # It prints the end of a line. Where that is not read, what ends the run says more.
            with parent.reaching_output(1), contextlib.suppress(SystemExit, BrokenPipeError):
                self.bar.stop()

    def under_way(self, phase: str, seconds: float) -> None:
        """What the run does for so many seconds: in the bar, and as a line now and then.

        Where a bar is seen, a line says what takes minutes; in a log no `SILENCE` is longer.
        Called by the thread that watches a run.
        """
        busy = ", compiling" if process.Programs.under_way() else ""
        self.bar.update(self._task, description=f"{phase}, {seconds:.0f} s{busy}")
        if seconds < FIRST:
            self._due = FIRST
        due = seconds >= self._due
        if due:
            self._due *= 2
        if due or (not self.console.is_terminal and self._clock() - self._last_line >= SILENCE):
            number = process.Programs.compiled() - self._compiled
            self._compiled += number
            now = f"; {process.compiling_line(number)}" if number else ""
            # Of Rich, or of a pipe: the thread that watches must not end by it.
            with contextlib.suppress(SystemExit, BrokenPipeError):
                self.say(f"{phase}: for {seconds:.0f} s now{now}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        low, high = metrics["accuracy/low"], metrics["accuracy/high"]
        parts = [f"accuracy {metrics['accuracy']:.3f} (95%: {low:.3f} to {high:.3f})"]
        parts += [f"{name} {value:.3f}" for name, value in metrics.items() if is_summary(name)]
        self.say(f"evaluated at step {step}: {', '.join(parts)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """What matters first: is there reward, is there signal, does it move."""
        self.say(
            f"{step:4d} reward {metrics['reward']:6.3f} live {metrics['live_groups']:4.0%} "
            f"gradient {metrics['grad_norm']:.1e} loss {metrics['loss']:8.1e} "
            f"time {metrics['time/step']:.1f}s"
        )
        self.bar.update(self._task, completed=step)


@contextlib.contextmanager
def _stopping_unread() -> Iterator[None]:
    """Where what is printed is read no more, as behind `head`, a run is asked to stop, so that its
    step is saved; a command without steps ends by it. Nothing more is printed then."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as ending:
        by_rich = isinstance(ending.__context__, BrokenPipeError)  # not before Rich 13.8
        is_unread = by_rich or isinstance(ending, BrokenPipeError)
        if not (is_unread and process.ask_to_stop(signal.SIGPIPE)):
            raise
        if not by_rich:
            parent.discard_output(1)


@contextlib.contextmanager
def telling(console: Console, activity: str) -> Iterator[None]:
    """Says, while something takes long, what it is and what is compiled for it, as a log needs."""
    display, is_over, began = (
        Display(0, 0, active=process.is_main()),
        threading.Event(),
        time.monotonic(),
    )
    display.console = console

    def tell() -> None:
        while not is_over.wait(TICK):
            display.under_way(activity, time.monotonic() - began)

    thread = threading.Thread(target=tell, name="jaxgrpo-telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def is_summary(name: str) -> bool:
    """Whether a metric of an evaluation is pass@k or maj@k itself, not an end of its interval."""
    return name.startswith(("pass@", "maj@")) and "/" not in name


def terminal_table(
    rows: Sequence[Sequence[RenderableType]],
    text: Collection[int] = (0,),
    no_wrap: bool = False,
    title: str | None = None,
    **options: Any,
) -> Table:
    """Rows for the terminal; the first one is the head. Brackets and colons in a cell, as in the
    regular expression "[a-z]+", are shown: Rich would take them for markup or an emoji.

    Args:
      text: the places of the columns that hold text; the others hold numbers.
      no_wrap: every cell stays in one line.
      title: of the table.
      options: of `rich.table.Table`.
    """
    head, *body = [list(map(_literal, row)) for row in rows]
    text_places = {place % len(head) for place in text}
    table = Table(**{"title_justify": "left", **options})
    table.title = None if title is None else Text(title, style="table.title")
    for place, name in enumerate(head):
        justify = "left" if place in text_places else "right"
        table.add_column(name, justify=justify, no_wrap=no_wrap)
    for row in body:
        table.add_row(*row)
    return table


def _literal(cell: RenderableType) -> RenderableType:
    return Text(cell) if isinstance(cell, str) else cell


def show_table(console: Console, rows: Sequence[Sequence[RenderableType]], **options: Any) -> None:
    """Prints rows with every cell whole; where they are too wide for the console, as columns if
    that is narrower.

    Args: options: of `terminal_table`; as columns, the first one alone holds text.
    """
    table = terminal_table(rows, no_wrap=True, **options)
    if _width(console, table) > console.width:
        columns = list(zip(*rows, strict=True))
        turned = terminal_table(columns, no_wrap=True, **{**options, "text": (0,)})
        table = min(table, turned, key=functools.partial(_width, console))
    show_whole(console, table)


def show_whole(console: Console, table: Table, wraps: bool = False) -> None:
    """Prints a table as wide as its cells are: a terminal breaks longer lines, and cuts none.

    Args:
      wraps: columns without `no_wrap` are broken into lines first, between words; no word is cut.
    """
    width, size = console.width, _measure(console, table)
    console.width = max(size.minimum if wraps else size.maximum, width)
    console.print(table)
    console.width = width


def _width(console: Console, table: Table) -> int:
    return _measure(console, table).maximum


def _measure(console: Console, table: Table) -> Measurement:
    free = console.options.update(max_width=MAX_WIDTH)
    return Measurement.get(console, free, table)


def comparison(
    title: str,
    columns: Sequence[tuple[str, Mapping[str, float]]],
    rows: Sequence[str],
    intervals: bool = False,
) -> Table:
    """A table with one column per policy.

    Args:
      intervals: whether a number that has an interval shows it too.
    """
    show = with_interval if intervals else lambda column, row: f"{column[row]:.3f}"
    head = ["", *(name for name, _ in columns)]
    body = ([Text(row), *(show(column, row) for _, column in columns)] for row in rows)
    return terminal_table([head, *body], title=title, title_justify="center")


def facts(console: Console, values: Mapping[str, Any]) -> None:
    """Name and value, one per line, aligned."""
    width = max(map(len, values))
    for name, value in values.items():
        # Without markup: a value may hold brackets, as a prompt does.
        text = without_passwords(f"{name:<{width}}  {value}")
        console.print(text, soft_wrap=True, markup=False, emoji=False)


def show_config(console: Console, text: str) -> None:
    """A config as TOML, without passwords; its lines are not broken."""
    text = f"\nthe whole config:\n\n{without_passwords(text)}"
    console.print(text, markup=False, soft_wrap=True)


def show(console: Console, record: Record) -> None:
    """The step of the run, its warnings, evaluations and curves."""
    out_of = f" of {record.steps}" if record.steps else ""
    console.print(Text(f"{record.name}: {record.status}, step {record.step}{out_of}", style="bold"))
    for alarm in record.warnings:
        console.print(warning(alarm.step, alarm.text), soft_wrap=True)
    if record.evaluations:
        columns = [(f"step {step}", values) for step, values in record.evaluations]
        (_, base), (_, now) = ends = columns[0], columns[-1]
        rows = sorted(without_ends(base.keys() & now.keys()), key=accuracy_first)
        title = "evaluation, with 95% intervals over prompts"
        show_whole(console, comparison(title, ends, rows, intervals=True))
    curves = {metric: values for metric in METRICS if (values := record.series(metric)[1])}
    rows = [["", "first", "now", f"to step {record.step}"]]
    for metric, values in curves.items():
        rows.append([metric, f"{values[0]:.3g}", f"{values[-1]:.3g}", sparkline(values)])
    if curves:
        show_whole(console, terminal_table(rows, text=(0, 3), no_wrap=True, **LOOK))


def summarize(record: Record) -> dict[str, Any]:
    """What `show` prints, as numbers: all evaluations, and every value of the curves."""
    curves = {metric: record.series(metric) for metric in METRICS}
    return {
        "run": record.name,
        "status": record.status,
        "step": record.step,
        "steps": record.steps,
        "warnings": [alarm._asdict() for alarm in record.warnings],
        "evaluations": [{"step": step, **values} for step, values in record.evaluations],
        "metrics": {
            metric: {"steps": steps, "values": values}
            for metric, (steps, values) in curves.items()
            if values
        },
    }


def warning(step: int, text: str) -> Text:
    """One warning as a line."""
    return Text.assemble((f"warning at step {step}: ", "bold yellow"), visible(text))


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """A curve in one line; more values than `width` are taken together.

    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    """
    scale = max(map(abs, values)) or 1.0  # the difference of two large numbers is infinite
    values = [value / scale for value in values]
    if len(values) > width:
        edges = [round(place * len(values) / width) for place in range(width + 1)]
        pieces = [values[a:b] for a, b in itertools.pairwise(edges)]
        values = [sum(piece) / len(piece) for piece in pieces]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def best_and_worst(rows: Sequence[Mapping[str, Any]], summing: RewardSum) -> list[Text]:
    """What to print of a step's sample rows: the sample with most reward and the one with least.

    One alone where all rewards are equal, and a line where none is scored.
    """
    scored = [(total, row) for row in rows if (total := total_reward(row, summing)) is not None]
    if not scored:
        return [Text("no completion of this step could be scored", style="yellow")]
    (high, best), (low, worst) = (
        choose(scored, key=lambda entry: entry[0]) for choose in (max, min)
    )
    if high == low:
        return [excerpt(f"all {len(scored)} scored the same, {high:.3g}", best)]
    return [excerpt(f"best, {high:.3g}", best), excerpt(f"worst, {low:.3g}", worst)]


def excerpt(title: str, row: Mapping[str, Any]) -> Text:
    """A sample in a few lines: the end of its prompt, the start and end of its completion."""
    prompt, completion = visible(shown(row["prompt"])), visible(shown(row["completion"]))
    text = Text.assemble((f"  {title}: ", "bold"), (_end(prompt), "dim"))
    for line in _few(completion):
        text.append(f"\n    {line}", "default")
    return text


def _end(text: str, length: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"…{flat[-length:]}"


def _few(text: str) -> list[str]:
    """It in lines of at most 100 characters: the first two and the last, if there are more."""
    lines = [piece for line in text.split("\n") for piece in textwrap.wrap(line, 100)]
    if len(lines) <= 4:
        return lines or ["(empty)"]
    return [*lines[:2], f"… {len(lines) - 3} lines …", lines[-1]]
