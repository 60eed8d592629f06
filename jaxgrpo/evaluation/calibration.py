"""How well confidences tell right from wrong: Brier score, calibration error, AUROC."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxgrpo.core.metrics import accumulate_dtype


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
    confidence: Float[Array, "N"], correct: Bool[Array, "N"], mask: Bool[Array, "N"], bins: int = 10
) -> Float[Array, ""]:
    """The expected calibration error: by how much claims miss the share of right answers.

        sum_b n_b / n |mean_b q - mean_b c|

    over equal bins [b / bins, (b + 1) / bins) of q, of which the last is closed at 1. It does not
    see what averages out inside a bin, and even calibrated confidences give about
    sqrt(bins / n) / 3 by chance: compare samples of one size.

    Args:
      confidence, correct, mask: as in `brier`.
      bins: static.

    Returns: NaN where everything is masked.
    Source: Damani et al. 2025, arXiv 2507.16806: 10 bins.
    """
    q, c, count = _unmasked(confidence, correct, mask)
    # Divided in Python: 0.3 as a float32 lies on its edge, and the product 0.3 * 10 may not.
    edges = jnp.asarray([b / bins for b in range(1, bins)], confidence.dtype)
    place = jnp.searchsorted(edges, jnp.where(mask, confidence, 0), side="right")
    excess = jnp.zeros(bins, q.dtype).at[place].add(q - c)
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

    Returns: NaN where no unmasked sample is right, or none is wrong.
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
