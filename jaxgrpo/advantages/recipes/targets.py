"""Recipes with a policy to come to: a teacher, or the base model restricted to right answers."""

from __future__ import annotations

from jaxgrpo.advantages import filtered_model
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.group import (
    divide_by_group_std,
    subtract_group_mean,
    subtract_leave_one_out_mean,
)
from jaxgrpo.advantages.scored import distill
from jaxgrpo.advantages.streams import Weights, sum_then


def opd(
    share: Scheduled = 1.0,
    gamma: Scheduled = 0.0,
    teacher: str = "teacher",
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then on-policy distillation: towards a teacher, at each token that the policy chose.

        (1 - share) (r[p, g] - mean of r over the other samples) + share (teacher_logp - logp)

    Use it when a larger model, several models by row, or the policy itself behind a demonstration
    (OPSD) can do what the policy is to learn. Its surrogate is `reinforce`, or, over several
    updates, one with a ratio; a text's tokens take the same recipe (`data.completion`).

    Args: as in the part `distill`.

    Fields: {teacher}_logp [P, G, T], an entry of `[[scores]]`, and trainer_logp.
    Source: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649; several teachers: MOPD, arXiv
      2606.30406; a demonstration: OPSD, arXiv 2601.18734. As an advantage, with a share of
      rewards or none, in Tinker's cookbook, verl and NeMo-RL, which add the two terms up.

    >>> from jaxgrpo.advantages import evaluate
    >>> logp = {"trainer_logp": [[[-2.0], [-1.0]]], "teacher_logp": [[[-1.0], [-1.0]]]}
    >>> evaluate("opd", [[1.0, 0.0]], token_mask=[[[1], [1]]], **logp)[0].tolist()
    [[[1.0], [0.0]]]
    """
    # Without rewards a group may have one sample.
    baseline = () if share == 1 else (subtract_leave_one_out_mean(),)
    return sum_then("opd", weights, *baseline, distill(share, gamma, teacher))


def sdpo(
    share: Scheduled = 1.0,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    teacher: str = "teacher",
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then GRPO mixed with how likely the policy itself finds a sample once it has seen a
    right one, or feedback.

        (1 - share) (r[p, g] - mean_g r) / (std_g r + eps) + share (teacher_logp - logp)

    Use it when answers come with feedback, or right answers are rare. The score `{teacher}_logp`
    has policy = "ema" (reference.ema_decay = 0.95) or "trainer", and a prompt that is written from
    the group (`jaxgrpo.training.prompted.successful_sibling`, or own code). Samples for which it
    writes none learn from rewards alone; with share = 1 they leave the loss, so that its mean is
    over taught samples, as the authors'. The loss is `cispo(high = 2)`; in its code the logp is of
    the parameters of the moment, here of those before the step's updates.

    Args:
      share, teacher: as in the part `distill`.
      eps, ddof: of the standard deviation.

    Fields: {teacher}_logp [P, G, T], an entry of `[[scores]]`, and trainer_logp.
    Source: SDPO, arXiv 2601.20802, its token-level form; `top_k_divergence` is the other one.

    >>> import math
    >>> from jaxgrpo.advantages import evaluate
    >>> logp = {"trainer_logp": [[[-2.0], [-1.0]]], "teacher_logp": [[[-1.0], [math.nan]]]}
    >>> evaluate("sdpo", [[1.0, 0.0]], token_mask=[[[1], [1]]], **logp)[0].tolist()
    [[[1.0], [0.0]]]
    """
    return sum_then(
        "sdpo",
        weights,
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        distill(share, 0.0, teacher),
    )


def alpha_dpg(
    alpha: Scheduled = 0.5,
    cap: float = 10.0,
    z: str = "group",
    threshold: Scheduled | None = None,
    off_policy: bool = False,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then alpha-DPG: towards the base model restricted to right answers.

    Its gradient is that of whole sequences: reduction `constant(1)` (a sum over tokens, a mean over
    samples; the authors divide by 1024), one update per rollout, where the clipped ratio is 1.
    `token_mean` and `sequence_mean` weigh long samples otherwise and leave the divergence.

    Use it when right answers should stay as diverse as those of the base model: pass@k, not
    pass@1 alone.

    Args:
      alpha: in [0, 1): 0 covers (forward KL), towards 1 it is leave-one-out REINFORCE.
      cap: on the pseudo-reward.
      z: how the base's success rate is estimated: "group" or "running".
      threshold: the lowest sum that is a success; None: sums must be 0 or 1.
      off_policy: whether samples of older parameters are weighed, as with rollout.staleness; alpha
        0 is then GDC++. The surrogate is `reinforce`, since a ratio would weigh them twice.

    Fields: base_logp [P, G, T], a pass of the frozen base; trainer_logp if off_policy.
    Source: arXiv 2512.05962; GDC++, arXiv 2206.00761.

    >>> from jaxgrpo.advantages import evaluate
    >>> logp = {name: [[[-1.0], [-1.0]]] for name in ("base_logp", "behavior_logp")}
    >>> options = {"alpha": 0.0}
    >>> evaluate(
    ...     "alpha_dpg", [[1.0, 0.0]], token_mask=[[[1], [1]]], options=options, **logp
    ... )[0].tolist()
    [[2.0, -2.0]]
    """
    part = filtered_model.alpha_dpg(alpha, cap=cap, z=z, threshold=threshold, off_policy=off_policy)
    return sum_then("alpha_dpg", weights, part)


def f_dpg(
    divergence: str = "js",
    cap: float = 10.0,
    z: str = "group",
    threshold: Scheduled | None = None,
    off_policy: bool = False,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then f-DPG: as `alpha_dpg` under another divergence, with the same loss.

    Use it when `alpha_dpg` fits and another divergence is to be tried.

    Args:
      divergence: "forward_kl", "js", "tv" or "chi2"; the reverse ones are infinite on failures.
      cap, z, threshold, off_policy: as in `alpha_dpg`.

    Fields: base_logp [P, G, T], a pass of the frozen base; trainer_logp if off_policy.
    Source: arXiv 2302.08215.

    >>> from jaxgrpo.advantages import evaluate
    >>> logp = {name: [[[-1.0], [-1.0]]] for name in ("base_logp", "behavior_logp")}
    >>> options = {"divergence": "tv"}
    >>> evaluate(
    ...     "f_dpg", [[1.0, 0.0]], token_mask=[[[1], [1]]], options=options, **logp
    ... )[0].tolist()
    [[1.0, -1.0]]
    """
    part = filtered_model.f_dpg(
        divergence, cap=cap, z=z, threshold=threshold, off_policy=off_policy
    )
    return sum_then("f_dpg", weights, part)
