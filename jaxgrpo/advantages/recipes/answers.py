"""Methods that know the right answer, or the model that only gives right ones."""

from __future__ import annotations

from jaxgrpo.advantages import filtered_model
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import divide_by_group_std, subtract_group_mean
from jaxgrpo.advantages.recipes.weighing import Weights, weighted_sum
from jaxgrpo.advantages.reflection import reasoning_reflection


def dro_r3(
    kind: str = "var",
    drop: Scheduled = 0.2,
    masked_thought: bool = False,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """R3 as one more reward, its filter of queries, then the sum normalised within the group.

    `weights` knows it as "r3", with weight 1 where they do not name it: `{"correct": 0.2}`. For a
    rubric gate, `answer_length` and R3's other options write the chain.

    Use it when answers are long and free: there is a reference answer to each, and no verifier.

    Args:
      kind: of the token weights: "var", "sigma", "top" or "uniform".
      drop: share of the batch's prompts that are masked for varying least.
      masked_thought: subtract masked_answer_logp, the answer's log-probs without a thought.
      eps, ddof: of the standard deviation.

    Fields: answer_logp [P, G, J] and answer_mask [P, J] (`reasoning_reflection`). They go with the
    samples, so no data column can hold them, and training has no pass for them yet: bring them in
    the `fields` of rollouts of your own to `compute`, or to `evaluate`.
    Source: DRO, arXiv 2506.13351; its loss takes clip(0.2, 0.2) and masks truncated samples.
    """
    return chain(
        reasoning_reflection(kind, drop=drop, masked_thought=masked_thought),
        weighted_sum(None if weights is None else {"r3": 1.0, **weights}),
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        name="dro_r3",
    )


def alpha_dpg(
    alpha: Scheduled = 0.5,
    cap: float = 10.0,
    z: str = "group",
    threshold: Scheduled | None = None,
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

    Fields: base_logp [P, G, T], a pass of the frozen base.
    Source: arXiv 2512.05962.
    """
    part = filtered_model.alpha_dpg(alpha, cap=cap, z=z, threshold=threshold)
    return chain(weighted_sum(weights), part, name="alpha_dpg")


def f_dpg(
    divergence: str = "js",
    cap: float = 10.0,
    z: str = "group",
    threshold: Scheduled | None = None,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then f-DPG: as `alpha_dpg` under another divergence, with the same loss.

    Use it when `alpha_dpg` fits and another divergence is to be tried.

    Args:
      divergence: "forward_kl", "js", "tv" or "chi2"; the reverse ones are infinite on failures.
      cap, z, threshold: as in `alpha_dpg`.

    Fields: base_logp [P, G, T], a pass of the frozen base.
    Source: arXiv 2302.08215.
    """
    part = filtered_model.f_dpg(divergence, cap=cap, z=z, threshold=threshold)
    return chain(weighted_sum(weights), part, name="f_dpg")
