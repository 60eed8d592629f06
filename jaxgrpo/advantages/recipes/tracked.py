"""Methods that judge a sample by what is remembered: one sample per prompt is enough."""

from __future__ import annotations

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.batch import whiten_batch
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum
from jaxgrpo.advantages.running import ema_baseline
from jaxgrpo.advantages.tracked import subtract_tracked_success


def ema(
    decay: Scheduled = 0.9, initial: float = 0.0, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, then subtract the running mean of earlier batches; flat groups keep their signal.

    Use it when there are one or few samples per prompt and prompts are about equally hard.

    Args:
      decay: weight of the past, in [0, 1).
      initial: the baseline of the first batch.

    Source: Williams 1992, REINFORCE with a reinforcement-comparison baseline.
    """
    return chain(weighted_sum(weights), ema_baseline(decay, initial), name="ema")


def spo(
    keep: Scheduled = 0.96,
    drift: str | None = None,
    initial: float | str = 0.5,
    eps: float = 1e-8,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Single-stream policy optimisation: sum, subtract the row's own success rate, whiten.

    Use it when rows return many times and one or few samples per prompt is all that can be
    afforded.

    Needs data whose rows return. Prompt policy `spo_priority` is the paper's way to draw them.

    Args:
      keep: share of old counts that a visit of a row keeps; not read with `drift`.
      drift: a field [P], how far the policy has moved on the prompt since its last visit.
      initial: success rate of a row before its first visit, or a field [P] of such rates.
      eps: added to the standard deviation of the batch.

    Source: arXiv 2509.13232. There 8 samples per prompt are drawn before the first step for the
    first estimates; here `initial`, which may be a data column of rates measured so.
    """
    return chain(
        weighted_sum(weights),
        subtract_tracked_success(keep, drift, initial=initial),
        # An exact 0 is a reward equal to its estimate here, and no flat group.
        whiten_batch(eps, ddof=0, eps_in="std", keep="nothing"),
        name="spo",
    )
