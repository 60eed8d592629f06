"""`jaxgrpo fit`: the curve of a run over its compute, as a sigmoid, and what it foretells.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

C is the compute spent by then, in floating-point operations (`flops` of metrics.jsonl, summed), R0
the metric before training, A its ceiling, C_mid the compute of half the way and B the steepness.
Where one of them ends at a bound of its range the curve does not say it, and the fit says so.

Source: ScaleRL, Khatri et al. 2025, arXiv 2510.13786, equation 1, where the first part of a curve
is left out and intervals are by a residual bootstrap. Ours enlarges the residuals (`enlarged`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.evaluation.intervals import student_quantile
from jaxgrpo.training.records.console import Document, show_table
from jaxgrpo.training.records.reading import is_number, read_metrics

COMPUTE = "flops"
METRIC = "eval/accuracy"
EVALUATIONS = "eval/", "eval_until_"
"""What opens the names of metrics that are measured behind the update of their step. The others are
of samples that were drawn before it."""
FEWEST = 5
"""Points: two more than the numbers that are fitted, so that there is something to be off by."""
STEEPNESS = 0.1, 10.0
"""The range of B; the paper's own values lie between 1.6 and 1.9."""
BEYOND = 30.0
"""The range of C_mid: from the first point over so much to the last point times so much."""
NEAR = 1e-3
"""Of a range: a number this near its end is at its bound."""
FLAT = 1e-6
"""A direction in which the fitted numbers move the curve by less than this says nothing of them."""
DRAWS = 200
"""Of the bootstrap."""
ROUNDING = 1e-6
"""Of the highest value: metrics are float32, and a mean of ones may be a little above 1."""
NORMAL = 1.959964
"""The .975 quantile of a normal value."""
NAMES = ("ceiling", "middle", "steepness")


class Curve(NamedTuple):
    """A metric of a run over its compute."""

    name: str
    start: float  # R0, before training
    compute: np.ndarray  # [n] float64, above 0 and growing
    value: np.ndarray  # [n] float64


class Fit(NamedTuple):
    """The sigmoid that fits a curve."""

    start: float
    ceiling: float  # A
    middle: float  # C_mid
    steepness: float  # B
    undetermined: tuple[str, ...] = ()  # of NAMES: at a bound of its range, or free

    def at(self, compute: Any) -> Any:
        """R(C)."""
        return sigmoid(compute, *self[:4])


class Outlook(NamedTuple):
    """A fit on the first half of a curve's compute, and how far off it is on the rest."""

    fit: Fit
    points: int  # that it was fitted on
    error: float  # mean absolute difference on the points behind
    ends: float  # its value at the last point
    actual: float  # that point


def sigmoid(compute: Any, start: float, ceiling: Any, middle: Any, steepness: Any) -> Any:
    """R(C) as the module says.

    >>> float(sigmoid(100.0, 0.2, 0.8, 100.0, 1.7))
    0.5
    """
    return start + (ceiling - start) / (1 + (middle / np.asarray(compute, float)) ** steepness)


def read_curve(run: str, metric: str = METRIC, skip: int = 0) -> Curve:
    """The curve of a run.

    An evaluation of a step is behind its update. Another metric of it is of samples that were drawn
    before, so that their policy has cost what the steps before did.

    Args:
      metric: of metrics.jsonl.
      skip: steps at the beginning that are left out, but for the start.

    Raises: InputError where it has no such metric, no compute, or too few points.
    """
    lines = read_metrics(run)
    steps = [line for line in lines if line["step"] > 0]
    if not any(is_number(line.get(COMPUTE)) for line in steps):
        raise InputError(
            f"{run}: its metrics.jsonl has no {COMPUTE}; it is no run folder, or one of an older "
            "version"
        )
    counts = (line.get(COMPUTE) for line in steps)
    spent = itertools.accumulate((float(n) if is_number(n) else 0.0 for n in counts), initial=0.0)
    numbers, totals = [line["step"] for line in steps], list(spent)
    totals = totals if metric.startswith(EVALUATIONS) else [0.0, *totals[:-1]]
    compute_at = dict(zip([0, *numbers], totals, strict=True))
    points = [
        (line["step"], compute_at[line["step"]], float(line[metric]))
        for line in lines
        if is_number(line.get(metric))
    ]
    if not points:
        names = sorted({name for line in lines for name in line})
        raise InputError(f"{run}: no metric {metric!r}: {suggest(metric, names)}")
    start = points[0][2]
    later = [point for point in points[1:] if point[0] > skip and point[1] > 0]
    if len(later) < FEWEST:
        raise InputError(
            f"{run}: {len(later)} values of {metric} after the first and --skip {skip}, and a "
            f"fit takes {FEWEST}: set eval.every lower, or take a metric of each step, --metric "
            "reward"
        )
    _, compute, value = zip(*later, strict=True)
    return Curve(str(run), start, np.asarray(compute), np.asarray(value))


def refuse_above(curve: Curve, metric: str, highest: float) -> None:
    """Raises: InputError where the metric has exceeded what it cannot exceed. No ceiling could be
    searched: the highest value so far would be taken for it."""
    top = max(curve.start, float(curve.value.max()))
    if top > highest + ROUNDING * abs(highest):
        raise InputError(
            f"{curve.name}: {metric} reaches {top:.4g}, and --highest is {highest:g}: give what it "
            "cannot exceed, as the largest reward of a sample"
        )


def fit_curve(curve: Curve, highest: float = 1.0, lowest: float | None = None) -> Fit:
    """The sigmoid of least squares, from the three best places of a grid over its range.

    Args:
      highest: what the metric cannot exceed, where the range of the ceiling ends.
      lowest: where it begins; None: at the lowest value of the curve.
    """
    from scipy.optimize import least_squares

    compute, value = curve.compute, curve.value
    lowest = _lowest(curve) if lowest is None else lowest
    lowest = min(lowest, highest - NEAR)  # a constant curve: there is no range
    low = np.array([lowest, np.log(compute[0] / BEYOND), STEEPNESS[0]])
    high = np.array([highest, np.log(compute[-1] * BEYOND), STEEPNESS[1]])

    def residuals(numbers: np.ndarray) -> np.ndarray:
        ceiling, log_middle, steepness = numbers
        return sigmoid(compute, curve.start, ceiling, np.exp(log_middle), steepness) - value

    inner = [np.linspace(a, b, 7)[1:-1] for a, b in zip(low, high, strict=True)]
    starts = sorted(
        itertools.product(*inner), key=lambda point: (residuals(np.array(point)) ** 2).sum()
    )
    ways = [least_squares(residuals, start, bounds=(low, high)) for start in starts[:3]]
    way = min(ways, key=lambda way: way.cost)
    best, singular = way.x, np.linalg.svd(way.jac, compute_uv=False)
    share = (best - low) / np.where(high > low, high - low, 1)
    is_at_bound = (share <= NEAR) | (share >= 1 - NEAR)
    if singular[-1] <= FLAT * max(1.0, singular[0]):  # as where nothing rises: any numbers fit
        is_at_bound[:] = True
    undetermined = tuple(itertools.compress(NAMES, is_at_bound))
    return Fit(curve.start, float(best[0]), float(np.exp(best[1])), float(best[2]), undetermined)


def _lowest(curve: Curve) -> float:
    return min(curve.start, float(curve.value.min()))


def enlarged(residuals: np.ndarray, fitted: int = len(NAMES)) -> np.ndarray:
    """Residuals of a fit of k numbers to n points, as large as a bootstrap has to draw them.

        (e - mean e) sqrt(n / (n - k)) t / 1.96,   t the .975 quantile with n - k degrees

    A fit comes nearer to its points than the curve that they lie about, and how far they lie from
    that is known from few of them. By the residuals as they are intervals of 95% were measured to
    miss the numbers of a sigmoid, linear about the truth, in 36, 19 and 11% of cases with 5, 8 and
    20 points; by these in 5, 6 and 6%.
    """
    count = len(residuals)
    student = student_quantile(count - fitted) / NORMAL
    return (residuals - residuals.mean()) * np.sqrt(count / (count - fitted)) * student


def bootstrap(curve: Curve, fit: Fit, highest: float = 1.0) -> dict[str, list[float]]:
    """95% intervals of the fitted numbers: of fits to the curve with resampled residuals, over the
    range in which the curve itself is fitted."""
    draw = np.random.default_rng(0)
    line = fit.at(curve.compute)
    residuals = enlarged(curve.value - line)
    fits = []
    for _ in range(DRAWS):
        noise = draw.choice(residuals, len(residuals))
        fits.append(fit_curve(curve._replace(value=line + noise), highest, _lowest(curve))[1:4])
    ends = np.quantile(np.array(fits), [0.025, 0.975], axis=0)
    return {name: ends[:, place].tolist() for place, name in enumerate(NAMES)}


def foretell(curve: Curve, highest: float = 1.0) -> Outlook:
    """Fits the points of the first half of the compute, and compares with the others.

    Raises: InputError where that half has too few points.
    """
    first = curve.compute <= curve.compute[-1] / 2 * (1 + 1e-9)  # in spite of rounding
    if first.sum() < FEWEST:
        raise InputError(
            f"{curve.name}: {first.sum()} points in the first half of its compute, and a fit takes "
            f"{FEWEST}: leave --half out, or set eval.every lower"
        )
    fit = fit_curve(curve._replace(compute=curve.compute[first], value=curve.value[first]), highest)
    foretold, actual = fit.at(curve.compute[~first]), curve.value[~first]
    error = float(np.abs(foretold - actual).mean())
    return Outlook(fit, int(first.sum()), error, float(foretold[-1]), float(actual[-1]))


def main(
    runs: Sequence[str],
    metric: str = METRIC,
    half: bool = False,
    skip: int = 0,
    highest: float = 1.0,
    as_json: bool = False,
) -> int | Document:
    """The command: prints the fit of each run. Returns the exit code.

    Args:
      half: also fits the first half of the compute, and says how far off the rest is.
      highest: what the metric cannot exceed.

    Raises: InputError as `read_curve`, `refuse_above` and `foretell`.
    """
    if not np.isfinite(highest):
        raise InputError(f"--highest {highest}: what the metric cannot exceed; give a number")
    curves = [read_curve(run, metric, skip) for run in runs]
    for curve in curves:
        refuse_above(curve, metric, highest)
    outlooks = [foretell(curve, highest) for curve in curves] if half else []
    numbers: dict[str, Any] = {}
    for place, curve in enumerate(curves):
        fit = fit_curve(curve, highest)
        numbers[curve.name] = {**fit._asdict(), "points": len(curve.value)}
        numbers[curve.name]["flops"] = float(curve.compute[-1])
        numbers[curve.name]["intervals"] = bootstrap(curve, fit, highest)
        if half:
            outlook = outlooks[place]
            numbers[curve.name]["half"] = {**outlook._asdict(), "fit": outlook.fit._asdict()}
    if as_json:
        return Document({"metric": metric, "runs": numbers})
    console = Console(highlight=False)
    show_table(console, _rows(numbers), title=f"{metric} over compute")
    for line in _remarks(numbers):
        console.print(line, soft_wrap=True, markup=False)
    return 0


def _rows(numbers: dict[str, Any]) -> list[list[str]]:
    """The table: a row per run."""
    rows = [["run", "points", "flops", "before", "ceiling A", "C_mid", "steepness B"]]
    for name, run in numbers.items():
        cells = [
            f"{run[key]:.3g} ({run['intervals'][key][0]:.3g} to {run['intervals'][key][1]:.3g})"
            for key in NAMES
        ]
        rows.append(
            [name, str(run["points"]), f"{run['flops']:.3g}", f"{run['start']:.3g}", *cells]
        )
    return rows


def _remarks(numbers: dict[str, Any]) -> list[str]:
    """What is to be said of bounds and of the second halves."""
    remarks = []
    for name, run in numbers.items():
        if run["undetermined"]:
            remarks.append(
                f"{name}: {', '.join(run['undetermined'])} at a bound of the range that is "
                "searched: the curve does not say it"
            )
        if half := run.get("half"):
            bound = half["fit"]["undetermined"]
            note = f"; {', '.join(bound)} at a bound" if bound else ""
            remarks.append(
                f"{name}: from its first {half['points']} points {half['ends']:.3f} at the end, "
                f"which is {half['actual']:.3f}; off by {half['error']:.3f} in the mean{note}"
            )
    return remarks
