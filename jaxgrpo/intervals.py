"""Intervals by the bootstrap over prompts: of means, and of what is a mean up to small terms."""

from __future__ import annotations

import numpy as np

LEVEL = 0.99
RESAMPLES = 2000
BLOCK = 2**20  # draws held at a time
SAME = 1e-6  # float32 values that differ by less are one


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
    `group_signal.gap_influence`. On that gap at 99%, 16 samples and G = 2, 4, 8 it was measured to
    miss, in 1000 probes each: with 200 prompts 0.6 to 1.7%, whether they are equally hard, bimodal,
    beta or mostly hopeless, but for 3.2% on equal ones at G = 8, where hardly any group is flat;
    the normal interval, and nearly always on one side, 1.0 to 6.7%. With 50 prompts 0.3 to 1.8%,
    on mostly hopeless ones and equal ones at G = 8 3 to 6.5%; the normal one 0.8 to 13%.

    Args:
      bounds: what the estimated quantity cannot leave. Where resamples hold hardly any spread, as
        with two successes in all, the interval reaches them: nothing is known.

    Returns: (low, high), the same for the same values; NaN where all of `influence` is equal, which
    says nothing of the spread, and where the estimate is NaN.
    Source: Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans, chapter 10.
    """
    values = np.asarray(influence, float)
    count = len(values)
    if count < 2 or not np.isfinite(estimate) or np.ptp(values) < SAME:
        return float("nan"), float("nan")
    random = np.random.default_rng(0)
    centred = values - values.mean()
    error = centred.std(ddof=1) / np.sqrt(count)
    tail = (1 - level) / 2 * 100
    scores = []
    for begin in range(0, RESAMPLES, block := max(1, BLOCK // count)):
        rows = min(block, RESAMPLES - begin)
        drawn = centred[random.integers(0, count, (rows, count))]
        spread = drawn.std(1, ddof=1) / np.sqrt(count)
        scores.append(drawn.mean(1) / np.maximum(spread, SAME / count))
    low, high = np.percentile(np.concatenate(scores), [tail, 100 - tail])
    ends = np.clip([estimate - high * error, estimate - low * error], *bounds)
    return float(ends[0]), float(ends[1])
