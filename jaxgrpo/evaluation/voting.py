"""Votes among the samples of a prompt: the most frequent answer, or the most confident one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxgrpo.evaluation.calibration import auroc
from jaxgrpo.evaluation.confidence import trace_confidence

Answered = Sequence[Sequence[Hashable]]
"""[N][n] answers; None: there is none, and the sample does not vote"""


class Weighing(NamedTuple):
    """How confidence weighs votes."""

    window: int = 2048  # tokens over which confidence is averaged
    kept: float = 0.9  # share of a block's voters, the most confident, that vote


def vote(
    answers: Answered,
    success: np.ndarray,
    k: int,
    weight: np.ndarray | None = None,
    kept: float = 1.0,
) -> np.ndarray:
    """Per prompt, the share of disjoint blocks of k samples whose chosen answer is right.

        V(a) = sum of weight over the block's voters that answer a;  the largest V is chosen

    Voters are samples with an answer, and of these those whose weight is no less than the 1 - kept
    quantile of the block's. Ties go to the answer that came first; a block in which nobody votes is
    wrong. Equal weights make it the majority vote.

    Args:
      weight: none negative; None: all equal.

    Shapes: answers [N][n], success and weight [N, n] -> [N].
    Source: Fu et al. 2025 (DeepConf), arXiv 2508.15260, for weights and filter.
    """
    weight = np.ones(success.shape) if weight is None else weight
    shares = np.zeros(len(answers))
    for place, given in enumerate(answers):
        weigh: list[float] = weight[place].tolist()
        begins = range(0, len(given) - k + 1, k)
        for begin in begins:
            voters = [i for i in range(begin, begin + k) if given[i] is not None]
            if not voters:
                continue
            least = np.quantile([weigh[i] for i in voters], 1 - kept) if kept < 1 else 0.0
            votes: dict[Hashable, float] = {}
            first: dict[Hashable, int] = {}
            for i in voters:
                if weigh[i] >= least:
                    votes[given[i]] = votes.get(given[i], 0.0) + weigh[i]
                    first.setdefault(given[i], i)
            chosen = first[max(votes, key=lambda answer: votes[answer])]
            shares[place] += success[place, chosen] / len(begins)
    return shares


def confidences(
    token_confidence: np.ndarray, mask: np.ndarray, window: int
) -> dict[str, np.ndarray]:
    """name -> [N, n], the summaries of `trace_confidence` for confidences of tokens [N, n, T]."""
    flat, own = (jnp.asarray(x.reshape(-1, x.shape[-1])) for x in (token_confidence, mask))
    summaries = trace_confidence(flat, own, window)._asdict()
    return {name: np.asarray(value).reshape(mask.shape[:2]) for name, value in summaries.items()}


def votes(
    answers: Answered,
    success: np.ndarray,
    sizes: Sequence[int],
    kept: float,
    traces: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """maj@k, and deepconf@k/NAME by each summary of confidence that there is.

    Returns: per prompt, what `vote` of so many samples gives, [N] each.
    """
    found = {f"maj@{k}": vote(answers, success, k) for k in sizes}
    for k in sizes:
        for name, weight in traces.items():
            found[f"deepconf@{k}/{name}"] = vote(answers, success, k, weight, kept)
    return found


def confidence_metrics(
    success: np.ndarray, scored: np.ndarray, traces: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """deepconf/NAME/auroc: how well each summary tells right completions from wrong ones."""
    right, known = jnp.asarray(success.ravel()), jnp.asarray(scored.ravel())
    return {
        f"deepconf/{name}/auroc": float(auroc(jnp.asarray(value.ravel()), right, known))
        for name, value in traces.items()
    }
