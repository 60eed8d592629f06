"""Methods for several rewards at once: what is normalised before they are added."""

from __future__ import annotations

from jaxgrpo.advantages import several
from jaxgrpo.advantages.absolute import clip_advantage
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.batch import whiten_batch
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import divide_by_group_std, subtract_group_mean
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum
from jaxgrpo.advantages.streams import per_reward


def gdpo(
    eps: Scheduled = 1e-4,
    ddof: int = 1,
    clip: Scheduled | None = None,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Normalise each reward within the group, then sum, then whiten over the batch.

        z_k = (r_k - mean_g r_k) / (std_g r_k + eps);  s = sum_k w_k z_k
        a[p, g] = (s[p, g] - mean_pg s) / (std_pg s + eps), exactly 0 stays 0

    Rewards that GRPO's sum would confound stay apart: a group that differs in one of two rewards
    gets half of what a group gets that differs in both. The scale of a reward does not matter, its
    weight does. A reward that is flat in a group adds 0 there. The batch's statistics are over
    samples, each counting once, as in TRL; verl takes them over tokens, so long samples count more.

    Use it when there are several rewards of different scale or frequency, and none may drown
    the others.

    Args:
      eps: added to both standard deviations.
      ddof: 1 divides variances by n - 1 (TRL), 0 by n.
      clip: cuts every z_k to [-clip, clip] by itself before the sum, so that one reward's rare
        success does not drown the others; None: no cut.

    Source: GDPO, arXiv 2601.05242. TRL's `normalize_then_sum` has these numbers, but adds up what
    is there where a reward could not be scored; here such a sample is masked.
    """
    cut = () if clip is None else (clip_advantage(clip),)
    normalise = chain(subtract_group_mean(), divide_by_group_std(eps, ddof), *cut, name="normalise")
    return chain(
        per_reward(normalise),
        weighted_sum(weights),
        whiten_batch(eps, ddof, eps_in="std"),
        name="gdpo",
    )


def dvao(eps: Scheduled = 1e-6, weights: Weights | None = None) -> AdvantageTransform:
    """Each reward counts by how much it varies in the group: centred sum over the sum of stds.

        a[p, g] = sum_k w_k (r_k - mean_g r_k) / (sum_k w_k std_g r_k + eps)

    Use it when there are several rewards and the one that varies in a group should decide
    there.

    Args:
      eps: added to the divisor, in units of reward.
      weights: none negative.

    Source: DVAO, arXiv 2605.25604; see the part `dvao`.
    """
    return chain(several.dvao_of(weights or {}, eps), name="dvao")


def rlcr(weights: Weights | None = None) -> AdvantageTransform:
    """Correctness plus a proper score of the stated confidence; the group mean is subtracted.

        r = w_accuracy c + w_brier (1 - (c - q)^2) + w_format f;  a[p, g] = r[p, g] - mean_g r

    With c in {0, 1} the correctness, q in [0, 1] the confidence that the completion states and f
    its format. The expected reward is highest at q = the chance of being right, and grows with it:
    calibration and accuracy agree. No division by a deviation: it would scale q's part by how much
    c varies. A group that is flat in c is not flat in q and teaches calibration.

    Use it when the model shall say how sure it is, and be right about it.

    Needs the rewards "accuracy" = c, "brier" = 1 - (c - q)^2 and "format" = f, or others, named in
    `weights`. All three must be 0 where the answer or q cannot be parsed or q is outside [0, 1]:
    taking q = 0 for it would pay a wrong answer in full.

    Args:
      weights: None: 0.5 each, as in the authors' code.

    Source: Damani et al. 2025, arXiv 2507.16806. The paper writes c - (q - c)^2, which is this with
    weights 1, 1 and 0, less a constant.
    """
    return chain(
        weighted_sum(weights or {"accuracy": 0.5, "brier": 0.5, "format": 0.5}),
        subtract_group_mean(),
        name="rlcr",
    )
