"""What the experiments share: checks, pages with computed parts, and policies that are tables.

An experiment is a module NAME with `run() -> Result`, beside a page NAME.md. The command

    python -m docs.experiments.NAME

computes it, writes the tables between the markers of the page and draws NAME.png. It exits with 1
where a check fails; the page then says so too.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from docs.pages import between

FOLDER = Path(__file__).resolve().parent
STEPS = (1e-14, 1e-12, 1e-9, 1e-6, 1e-4)
"""Errors are said as the first of these that they are below: digits of noise differ by machine."""


class Check(NamedTuple):
    """A claim that the numbers decide."""

    claim: str
    measured: str
    holds: bool


class Result(NamedTuple):
    """What an experiment found."""

    parts: dict[str, str]  # marker of the page -> what stands there
    checks: list[Check]
    figure: Callable[[], Figure]


def below(claim: str, errors: object, bound: float = 1e-9) -> Check:
    """A check that the largest absolute value is below a bound; NaN is not."""
    error = float(np.max(np.abs(np.asarray(errors, float))))
    magnitude = next((f"below {step:.0e}" for step in STEPS if error < step), f"{error:.2e}")
    return Check(f"{claim}: error < {bound:.0e}", magnitude, error < bound)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; floats to three digits."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float | np.floating | Array):
        return number(float(value))
    return str(value).replace("|", "\\|")


def number(value: float) -> str:
    """Three significant digits, or three behind the point for what is near 1."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    return f"{value:.3f}" if 0.0995 <= abs(value) < 99.95 else f"{value:#.3g}".rstrip(".")


def check_table(checks: Sequence[Check]) -> str:
    rows = [(check.claim, check.measured, "yes" if check.holds else "**NO**") for check in checks]
    return table(("criterion", "measured", "holds"), rows)


def fill(text: str, parts: Mapping[str, str], name: str) -> str:
    """A page with new parts, each between <!-- marker --> and <!-- end of marker -->.

    Raises: SystemExit naming the page, where a marker is missing.
    """
    for marker, content in parts.items():
        ends = f"<!-- {marker} -->", f"<!-- end of {marker} -->"
        text = between(text, *ends, f"\n{content}\n", f"{name} has no {' ... '.join(ends)}")
    return text


def page(name: str, parts: Mapping[str, str]) -> str:
    """The page of an experiment with new parts."""
    return fill((FOLDER / f"{name}.md").read_text(), parts, f"{name}.md")


def written(name: str, result: Result) -> str:
    """The page as the result wants it."""
    return page(name, {**result.parts, "checks": check_table(result.checks)})


def command(name: str, run: Callable[[], Result]) -> None:
    """Runs an experiment, writes page and figure, prints the checks; exits with 1 if one fails."""
    jax.config.update("jax_platforms", "cpu")
    began = time.perf_counter()
    result = run()
    text = written(name, result)
    changed = text != (FOLDER / f"{name}.md").read_text()
    (FOLDER / f"{name}.md").write_text(text)
    save(result.figure(), FOLDER / f"{name}.png")
    code = say(result.checks)
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{name}.md {'written' if changed else 'as it was'}, {seconds:.1f} s\n")
    sys.exit(code)


def say(checks: Iterable[Check]) -> int:
    """Prints checks. Returns the exit code: 1 if one fails."""
    code = 0
    for claim, measured, holds in checks:
        sys.stdout.write(f"{'ok  ' if holds else 'FAIL'} {claim}: {measured}\n")
        code |= not holds
    return code


def panels(number: int, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure of charts side by side, each with a grid: (figure, axes).

    Args:
      width: in inches, as the height.
      options: of `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, number, **options)
    for each in np.ravel(axes):
        each.grid(alpha=0.3)
    return figure, axes


def save(figure: Figure, file: Path) -> None:
    """Writes a figure: the same bytes for the same figure."""
    FigureCanvasAgg(figure)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def sequences(vocabulary: int, length: int) -> np.ndarray:
    """Every sequence, [V^T, T]."""
    return np.array(list(itertools.product(range(vocabulary), repeat=length)))


def prefixes(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """The number of the prefix before each token, counted through all lengths; [N, T]."""
    prefix = np.zeros_like(tokens)
    for position in range(1, tokens.shape[1]):
        prefix[:, position] = vocabulary * prefix[:, position - 1] + tokens[:, position - 1] + 1
    return prefix


def token_logp(logits: Array, state: np.ndarray, tokens: np.ndarray) -> Array:
    """Log-probs of tokens under one softmax per state: logits [S, V] -> [N, T]."""
    return jax.nn.log_softmax(logits)[state, tokens]


def cosine(left: Array, right: Array) -> Array:
    """Of two gradients [..., *parameters] with one leading axis, [...]."""
    left, right = (value.reshape(value.shape[0], -1) for value in (left, right))
    norms = jnp.linalg.norm(left, axis=1) * jnp.linalg.norm(right, axis=1)
    return (left * right).sum(1) / norms
