"""Votes among the samples of a prompt, weighted by confidence or not; how good confidences are.

A vote chooses the most frequent answer, or the one with the most confidence (DeepConf).
`trace_confidence` turns the confidences of tokens into one of the completion. Brier score,
calibration error and AUROC measure how well confidences tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.core.metrics import accumulate_dtype

BINS = 10  # of the calibration error

FinalAnswers = Sequence[Sequence[Hashable]]
"""[N][n] answers; None: no answer could be read, and the sample does not vote"""


class Weighing(NamedTuple):
    """How confidence weighs votes."""

    window: int = 2048  # tokens over which confidence is averaged
    voter_share: float = 0.9  # share of a block's voters, the most confident, that vote


def vote(
    answers: FinalAnswers,
    success: np.ndarray,
    k: int,
    weight: np.ndarray | None = None,
    voter_share: float = 1.0,
) -> np.ndarray:
    """Per prompt, the share of disjoint blocks of k samples whose chosen answer is right.

        V(a) = sum of weight over the block's voters that answer a;  the largest V is chosen

    Voters are samples with an answer, and of these those whose weight is no less than the
    1 - voter_share quantile of the block's. Ties go to the answer that came first; a block without
    votes is wrong. Equal weights make it the majority vote.

    Args:
      weight: none negative; None: all equal.

    Shapes: answers [N][n], success and weight [N, n] -> [N].
    Source: Fu et al. 2025 (DeepConf), arXiv 2508.15260, for weights and filter.
    """
    weight = np.ones(success.shape) if weight is None else weight
    shares = np.zeros(len(answers))
    for place, row in enumerate(answers):
        weights: list[float] = weight[place].tolist()
        begins = range(0, len(row) - k + 1, k)
        for begin in begins:
            voters = [i for i in range(begin, begin + k) if row[i] is not None]
            if not voters:
                continue
            threshold = (
                np.quantile([weights[i] for i in voters], 1 - voter_share)
                if voter_share < 1
                else 0.0
            )
            voters = [i for i in voters if weights[i] >= threshold]
            totals = dict.fromkeys((row[i] for i in voters), 0.0)
            for i in voters:
                totals[row[i]] += weights[i]
            answer = max(totals, key=lambda answer: totals[answer])  # the first of equal ones
            first = next(i for i in voters if row[i] == answer)
            shares[place] += success[place, first] / len(begins)
    return shares


def confidences(
    token_confidence: np.ndarray, mask: np.ndarray, window: int
) -> dict[str, np.ndarray]:
    """name -> [N, n], the summaries of `trace_confidence` for confidences of tokens [N, n, T]."""
    flat_confidence, flat_mask = (
        jnp.asarray(x.reshape(-1, x.shape[-1])) for x in (token_confidence, mask)
    )
    summaries = trace_confidence(flat_confidence, flat_mask, window)._asdict()
    return {name: np.asarray(value).reshape(mask.shape[:2]) for name, value in summaries.items()}


def votes(
    answers: FinalAnswers,
    success: np.ndarray,
    sizes: Sequence[int],
    voter_share: float,
    traces: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """maj@k, and deepconf@k/NAME by each summary of confidence that there is.

    Returns: per prompt, what `vote` of so many samples gives, [N] each.
    """
    shares = {f"maj@{k}": vote(answers, success, k) for k in sizes}
    for k in sizes:
        for name, weight in traces.items():
            shares[f"deepconf@{k}/{name}"] = vote(answers, success, k, weight, voter_share)
    return shares


def confidence_metrics(
    success: np.ndarray, scored: np.ndarray, traces: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """deepconf/NAME/auroc: how well each summary tells right completions from wrong ones."""
    right, mask = jnp.asarray(success.ravel()), jnp.asarray(scored.ravel())
    return {
        f"deepconf/{name}/auroc": float(auroc(jnp.asarray(value.ravel()), right, mask))
        for name, value in traces.items()
    }


class TraceConfidence(NamedTuple):
    """Four ways to put the confidence of a completion into one number, [N] each."""

    mean: Array  # over all of its tokens
    least: Array  # its least confident window
    bottom: Array  # mean of the least confident tenth of its windows
    tail: Array  # its last window


def trace_confidence(
    confidence: Float[Array, "N T"], mask: Bool[Array, "N T"], window: int
) -> TraceConfidence:
    """Summaries of the confidence of tokens, over windows of so many tokens.

        W[t] = mean of C over tokens t - window + 1 ... t, one for each place that a window fits
        mean = mean C,  least = min W,  bottom = mean of the max(1, len(W) // 10) lowest W,
        tail = the last W

    A slip that a long completion's mean hides shows in its least window. Masked tokens are left
    out and the rest joined. A completion shorter than the window has one, of all its tokens; an
    empty one is 0 everywhere.

    Args:
      confidence: of tokens, as `jaxgrpo.models.logprobs.token_confidence` gives it.
      window: static, at least 1.

    Source: Fu et al. 2025 (DeepConf), arXiv 2508.15260: windows of 2048 tokens. The tail there has
      a length of its own, of the same 2048 tokens.
    """
    if window < 1:
        raise ValueError(f"window = {window}: a window has at least 1 token")
    dtype = accumulate_dtype(confidence.dtype)
    size = min(window, confidence.shape[1])
    order = jnp.argsort(~mask, axis=1, stable=True)
    length = mask.sum(1, keepdims=True)
    real = jnp.arange(confidence.shape[1])[None, :] < length
    value = jnp.where(real, jnp.take_along_axis(confidence, order, axis=1), 0).astype(dtype)
    mean = value.sum(1, keepdims=True) / jnp.maximum(length, 1).astype(dtype)
    # Sums of what is left of the mean: running sums of C itself would swallow its changes.
    sums = jnp.cumsum(jnp.where(real, value - mean, 0), axis=1)
    sums = jnp.concatenate([jnp.zeros_like(mean), sums], axis=1)
    short = length < size
    windows = jnp.where(short, mean, mean + (sums[:, size:] - sums[:, :-size]) / size)
    number = jnp.where(short, 1, length - size + 1)
    place = jnp.arange(windows.shape[1])[None, :]
    lowest = jnp.sort(jnp.where(place < number, windows, jnp.inf), axis=1)
    tenth = jnp.maximum(1, number // 10)
    bottom = jnp.where(place < tenth, lowest, 0).sum(1) / tenth[:, 0].astype(dtype)
    tail = jnp.take_along_axis(windows, number - 1, axis=1)[:, 0]
    return TraceConfidence(mean[:, 0], lowest[:, 0], bottom, tail)


def brier(
    confidence: Float[Array, "N"], correct: Bool[Array, "N"], mask: Bool[Array, "N"]
) -> Float[Array, ""]:
    """The mean squared difference of what was claimed and what came.

        mean over unmasked n of (q[n] - c[n])^2

    0 is best, 1 the worst; saying 0.5 always gives 0.25. Confidences that are uniform and right
    give 1/6.

    Args:
      confidence: q, the stated probability of being right, in [0, 1]; anything where masked.
      correct: c.
      mask: which samples stated a confidence. None did: NaN.

    Source: Damani et al. 2025, arXiv 2507.16806.
    """
    q, c, count = _unmasked(confidence, correct, mask)
    return ((q - c) ** 2).sum() / count


def ece(
    confidence: Float[Array, "N"], correct: Bool[Array, "N"], mask: Bool[Array, "N"]
) -> Float[Array, ""]:
    """The expected calibration error: by how much claims miss the share of right answers.

        sum_b n_b / n |mean_b q - mean_b c|

    over ten equal bins [b / 10, (b + 1) / 10) of q, of which the last is closed at 1. It does not
    see what averages out inside a bin, and even calibrated confidences give about sqrt(10 / n) / 3
    by chance: compare samples of one size.

    Args:
      confidence, correct, mask: as in `brier`.

    Returns: NaN if everything is masked.
    Source: Damani et al. 2025, arXiv 2507.16806: 10 bins.
    """
    q, c, count = _unmasked(confidence, correct, mask)
    # Divided in Python: 0.3 as a float32 lies on its edge, and the product 0.3 * 10 may not.
    edges = jnp.asarray([b / BINS for b in range(1, BINS)], confidence.dtype)
    place = jnp.searchsorted(edges, jnp.where(mask, confidence, 0), side="right")
    excess = jnp.zeros(BINS, q.dtype).at[place].add(q - c)
    return jnp.abs(excess).sum() / count


def auroc(
    confidence: Float[Array, "N"], correct: Bool[Array, "N"], mask: Bool[Array, "N"]
) -> Float[Array, ""]:
    """The probability that a right sample is more confident than a wrong one; ties count half.

        sum over right i, wrong j of [q_i > q_j] + [q_i = q_j] / 2, over their number

    The Mann-Whitney statistic, so any increasing map of the confidences gives the same: they need
    be no probabilities. 0.5 is no better than chance.

    Args:
      confidence: finite where unmasked.
      correct, mask: as in `brier`.

    Returns: NaN if no unmasked sample is right, or none is wrong.
    """
    right, wrong = mask & correct, mask & ~correct
    dtype = accumulate_dtype(confidence.dtype)
    rivals = jnp.sort(jnp.where(wrong, confidence, jnp.inf))
    below = jnp.searchsorted(rivals, confidence, side="left")
    level = jnp.searchsorted(rivals, confidence, side="right")
    # As a share of the rivals first: the number of pairs is beyond the whole numbers of a float32.
    share = (below + level).astype(dtype) / (2 * wrong.sum()).astype(dtype)
    return jnp.where(right, share, 0).sum() / right.sum().astype(dtype)


def _unmasked(confidence: Array, correct: Array, mask: Array) -> tuple[Array, Array, Array]:
    """(q, c) as numbers, 0 where masked, and how many are not."""
    dtype = accumulate_dtype(confidence.dtype)
    q = jnp.where(mask, confidence.astype(dtype), 0)
    return q, (mask & correct).astype(dtype), mask.sum().astype(dtype)
