"""Intervals of means and ratios over seeds, and over prompts of means and what is close to one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

LEVEL = 0.99
RESAMPLES = 2000  # of the prompts, for the bootstrap-t
BLOCK = 2**20  # draws held at a time
TOLERANCE = 1e-6  # float32 values that differ by less are one
HALVINGS = 60  # of an interval that is searched: to the last digit of float64


def read_interval(metrics: Mapping[str, Any], name: str) -> tuple[Any, Any] | None:
    """The ends NAME/low and NAME/high of a metric's interval; None if one of them is missing.

    >>> read_interval({"accuracy": 0.5, "accuracy/low": 0.4, "accuracy/high": 0.6}, "accuracy")
    (0.4, 0.6)
    """
    low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
    return None if low is None or high is None else (low, high)


def without_ends(names: Collection[str]) -> list[str]:
    """The metrics to show by themselves: all but the ends of others' intervals.

    >>> without_ends(["accuracy", "accuracy/low", "accuracy/high", "format/low"])
    ['accuracy', 'format/low']
    """
    ends = {f"{name}/{end}" for name in names for end in ("low", "high")}
    return [name for name in names if name not in ends]


def bootstrap(values: np.ndarray) -> np.ndarray:
    """The 95% percentile interval of the mean of values, [n] -> [2].

    The n prompts are drawn with replacement; the same for the same values. For hundreds: of 7
    normal values it misses the mean in 12% of cases, see `student_interval`.
    """
    indices = np.random.default_rng(0).integers(0, len(values), (1000, len(values)))
    return np.percentile(values[indices].mean(1), [2.5, 97.5])


def finite_mean(values: Any) -> float:
    """The mean of the values that are finite; NaN where none is.

    >>> finite_mean([1.0, float("nan"), 3.0]), finite_mean([])
    (2.0, nan)
    """
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    return float(finite.mean()) if finite.size else float("nan")


def student_interval(values: np.ndarray) -> np.ndarray:
    """Student's 95% interval of the mean over the first axis, of few values: [n] or [n, m].

        mean +- t std / sqrt(n),   t the .975 quantile with n - 1 degrees, std by n - 1

    Exact for normal values. It was measured to miss the mean of 7 normal values in 5% of
    cases, of uniform ones in 6%, of exponential ones in 11%; percentiles of resamples miss 12, 12
    and 18%. NaN for one value.

    Source: Student 1908, Biometrika 6.
    """
    values = np.asarray(values, float)
    count = len(values)
    if count < 2:
        return np.full((2, *values.shape[1:]), np.nan)
    middle = values.mean(0)
    reach = student_quantile(count - 1) * values.std(0, ddof=1) / np.sqrt(count)
    return np.stack([middle - reach, middle + reach])


def ratio_interval(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Fieller's 95% interval of mean(above) / mean(below), of pairs, [n] each.

        {r: |mean(d)| <= t std(d) / sqrt(n)},   d = above - r below,   t as in `student_interval`

    Exact for normal pairs. Percentiles of resamples were measured to miss the ratio of 2, 3, 5 and
    7 pairs, independent and normal, in 50, 29, 16 and 14% of cases; this one in 2 to 6%.

    Returns: (low, high); NaN for one pair, and infinite where mean(below) may be 0.
    Source: Fieller 1954, J. R. Stat. Soc. B 16.
    """
    count = len(above)
    if count < 2:
        return np.nan, np.nan
    share = student_quantile(count - 1) ** 2 / count
    (above_variance, covariance), (_, below_variance) = share * np.cov(above, below)
    top, bottom = np.mean(above), np.mean(below)
    # The ends are the roots of square r^2 - 2 middle r + constant.
    square, middle = bottom**2 - below_variance, top * bottom - covariance
    if square <= 0:
        return -np.inf, np.inf
    reach = np.sqrt(max(0.0, middle**2 - square * (top**2 - above_variance)))
    return float((middle - reach) / square), float((middle + reach) / square)


def student_quantile(degrees: int) -> float:
    """The .975 quantile of Student's t: what a 95% interval reaches, in standard errors.

    >>> round(student_quantile(2), 3), round(student_quantile(10**9), 3)
    (4.303, 1.96)
    """
    from scipy.special import stdtrit  # slow to import, and only evaluation needs it

    return float(stdtrit(degrees, 0.975))


def studentised(
    estimate: float,
    influence: np.ndarray,
    level: float = LEVEL,
    bounds: tuple[float, float] = (-1.0, 1.0),
) -> tuple[float, float]:
    """The bootstrap-t interval of an estimate whose error is the mean of `influence`, [P].

        t* = (mean of a resample of a) / (its standard error)
        estimate - t*_high error  to  estimate - t*_low error,   error = std(a) / sqrt(P)

    For a mean over prompts, a_x = value_x - mean; for the gap of degeneracy see
    `probe.measure.gap_influence`. On that gap at 99%, 16 samples and G = 2, 4, 8 it was measured to
    miss, in 1000 probes each: with 200 prompts 0.6 to 1.7%, whether they are equally hard, bimodal,
    beta or mostly hopeless, but for 3.2% on equal ones at G = 8, where hardly any group is flat;
    the normal interval, and nearly always on one side, 1.0 to 6.7%. With 50 prompts 0.3 to 1.8%,
    on mostly hopeless ones and equal ones at G = 8 3 to 6.5%; the normal one 0.8 to 13%.

    Args:
      bounds: what the estimated quantity cannot leave. Where resamples hold hardly any spread, as
        with two successes in all, the interval reaches them; of shares see `mean_of_shares`.

    Returns: (low, high), the same for the same values; NaN if all of `influence` is equal, which
    says nothing about the spread, and if the estimate is NaN.
    Source: Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans, chapter 10.
    """
    values = np.asarray(influence, float)
    count = len(values)
    if count < 2 or not np.isfinite(estimate) or np.ptp(values) < TOLERANCE:
        return float("nan"), float("nan")
    random = np.random.default_rng(0)
    centred = values - values.mean()
    error = centred.std(ddof=1) / np.sqrt(count)
    tail = (1 - level) / 2 * 100
    scores = []
    for begin in range(0, RESAMPLES, block := max(1, BLOCK // count)):
        rows = min(block, RESAMPLES - begin)
        draws = centred[random.integers(0, count, (rows, count))]
        spread = draws.std(1, ddof=1) / np.sqrt(count)
        scores.append(draws.mean(1) / np.maximum(spread, TOLERANCE / count))
    low, high = np.percentile(np.concatenate(scores), [tail, 100 - tail])
    ends = np.clip([estimate - high * error, estimate - low * error], *bounds)
    return float(ends[0]), float(ends[1])


def mean_of_shares(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """The interval of the mean of values in [0, 1], one per prompt: what two intervals share.

        the bootstrap-t interval  and  {m: P kl(mean, m) <= log(2 / (1 - level))},
        kl(x, m) = x log(x / m) + (1 - x) log((1 - x) / (1 - m))

    With 5 of 200 prompts solved some resamples hold hardly a success, so that the first reaches 1,
    and if no prompt is solved it says nothing. The second holds for any distribution and any
    number of prompts, but does not know that values spread less than those that are all 0 or 1:
    there the first is the shorter one. Together they may miss more often than the first alone, by
    1 - level. At 99%, of prompts that are solved or not, .002 to .95 of them, they miss, computed
    exactly, 0.03 to 0.3% with 20 prompts, 0.05 to 1.0% with 100 and 0.08 to 1.6% with 200.

    Args:
      values: [P], finite; rounding beyond the ends is taken back.

    Returns: (low, high); NaN without a value.
    Source: Hoeffding 1963, Probability Inequalities for Sums of Bounded Random Variables, theorem 1
    (2.1), solved for the mean at each side.
    """
    values = np.clip(np.asarray(values, float), 0, 1)
    if not len(values):
        return float("nan"), float("nan")
    mean = float(values.mean())
    limit = float(np.log(2 / (1 - level)) / len(values))
    low = 1 - _reach(1 - mean, limit)
    high = _reach(mean, limit)
    ends = studentised(mean, values - mean, level, (0.0, 1.0))
    return float(np.fmax(low, ends[0])), float(np.fmin(high, ends[1]))


def _reach(mean: float, limit: float) -> float:
    """The largest m in [mean, 1] with kl(mean, m) <= limit."""
    low, high = mean, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_inside = middle < 1 and _divergence(mean, middle) <= limit
        low, high = (middle, high) if is_inside else (low, middle)
    return low


def _divergence(mean: float, upper: float) -> float:
    """KL of two coins, in nats; `upper` lies between `mean` and 1."""
    success_term = mean * np.log(mean / upper) if mean > 0 else 0.0
    failure_term = (1 - mean) * np.log((1 - mean) / (1 - upper)) if mean < 1 else 0.0
    return float(success_term + failure_term)
