"""Recipes that use more than the samples' summed reward.

Several rewards that are normalised apart; planning tokens, trees and classes inside a group; what
is remembered of earlier batches; log-probs of the right answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxgrpo.advantages import streams, tokens, trees, turns
from jaxgrpo.advantages import weights as diversity
from jaxgrpo.advantages.absolute import clip_advantage
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.batch import whiten_batch
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import divide_by_group_std, subtract_group_mean
from jaxgrpo.advantages.reflection import reasoning_reflection
from jaxgrpo.advantages.streams import Weights, per_reward, sum_rewards, sum_then
from jaxgrpo.advantages.tokens import add_information_gain, to_tokens
from jaxgrpo.advantages.tracked import ema_baseline, subtract_tracked_success
from jaxgrpo.core.errors import InputError, suggest


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

    >>> from jaxgrpo.advantages import evaluate
    >>> rewards = {"a": [[1.0, 0.0]], "b": [[9.0, 9.0]]}
    >>> evaluate("gdpo", rewards, options={"eps": 0.0, "ddof": 0})[0].tolist()
    [[1.0, -1.0]]
    """
    cut = () if clip is None else (clip_advantage(clip),)
    normalise = chain(subtract_group_mean(), divide_by_group_std(eps, ddof), *cut, name="normalise")
    return chain(
        per_reward(normalise),
        sum_rewards(**(weights or {})),
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

    >>> from jaxgrpo.advantages import evaluate
    >>> rewards = {"a": [[1.0, 0.0]], "b": [[0.5, 0.5]]}
    >>> evaluate("dvao", rewards, options={"eps": 0.0})[0].tolist()
    [[1.0, -1.0]]
    """
    return chain(streams.dvao_with_weights(weights or {}, eps), name="dvao")


def rlcr(weights: Weights | None = None) -> AdvantageTransform:
    """Correctness plus a proper score of the stated confidence; the group mean is subtracted.

        r = w_accuracy c + w_brier (1 - (c - q)^2) + w_format f;  a[p, g] = r[p, g] - mean_g r

    With c in {0, 1} the correctness, q in [0, 1] the confidence that the completion states and f
    its format. The expected reward is highest at q = the chance of being right, and grows with it:
    calibration and accuracy agree. No division by a deviation: it would scale q's part by how much
    c varies. A group that is flat in c is not flat in q and teaches calibration.

    Use it when the model should say how sure it is, and be right about it.

    Needs the rewards "accuracy" = c, "brier" = 1 - (c - q)^2 and "format" = f, or others, named in
    `weights`. All three must be 0 where the answer or q cannot be parsed or q is outside [0, 1]:
    taking q = 0 for it would pay a wrong answer in full. The built-in rewards `accuracy`, `brier`
    and `confidence_format` are these; the shipped config `rlcr` uses them.

    Args:
      weights: None: 0.5 each, as in the authors' code.

    Source: Damani et al. 2025, arXiv 2507.16806. The paper writes c - (q - c)^2, which is this with
    weights 1, 1 and 0, less a constant.

    >>> from jaxgrpo.advantages import evaluate
    >>> rewards = {"accuracy": [[1.0, 0.0]], "brier": [[1.0, 1.0]], "format": [[1.0, 0.0]]}
    >>> evaluate("rlcr", rewards)[0].tolist()
    [[0.5, -0.5]]
    """
    weights = weights or {"accuracy": 0.5, "brier": 0.5, "format": 0.5}
    return sum_then("rlcr", weights, subtract_group_mean())


def hicra(
    alpha: Scheduled = 0.2,
    field: str | None = None,
    grams: Sequence[Sequence[int]] | None = None,
    placebo: int | None = None,
    entropies: bool = False,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, less the group mean, then raised by alpha |a| at planning tokens.

    Use it when tokens that plan can be distinguished from those that carry out.

    Needs the planning tokens: bool [P, G, T] in a field, "planning" unless named, or the token
    ids of the grams that mark them. Flat groups stay without signal.

    Args: as in the part `hicra`.

    Source: arXiv 2509.03646.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"token_mask": [[[1], [1]]], "planning": [[[True], [True]]]}
    >>> evaluate("hicra", [[1.0, 0.0]], options={"alpha": 0.5}, **fields)[0].tolist()
    [[[0.75], [-0.25]]]
    """
    part = tokens.hicra(alpha, field, grams, placebo, entropies)
    return sum_then("hicra", weights, subtract_group_mean(), tokens.to_tokens(), part)


def darling(
    field: str | None = None, floor: Scheduled = 0.1, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, times the share of other samples in another class, less the group mean.

    Use it when right answers grow alike: it pays the rare ones more.

    Args: as in the part `darling`; without `field`, equal completions are one class.

    Source: arXiv 2509.02534, without a division by the standard deviation.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(
    ...     "darling", [[1.0, 1.0, 2.0]], options={"field": "kind"}, kind=[[0, 0, 1]]
    ... )[0].tolist()
    [[-0.5, -0.5, 1.0]]
    """
    return sum_then("darling", weights, diversity.darling(field, floor), subtract_group_mean())


def tree_grpo(
    eps: Scheduled = 1e-6, ddof: int = 1, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, normalised within the tree plus normalised within the prompt.

    Use it when samples are leaves of trees with shared beginnings, and one value per leaf is
    enough.

    Needs the field `tree`, the ids of the trees [P, G]: in a run set `tree.branch`.

    Args:
      eps, ddof: as in the part `tree_normalise`.

    Source: arXiv 2509.21240.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(
    ...     "tree_grpo", [[1.0, 0.0]], options={"eps": 0.5, "ddof": 0}, tree=[[0, 1]]
    ... )[0].tolist()
    [[0.5, -0.5]]
    """
    return sum_then("tree_grpo", weights, trees.tree_normalise(eps, ddof))


def gigpo(
    gamma: Scheduled = 0.95,
    weight: Scheduled = 1.0,
    std: bool = True,
    eps: Scheduled = 1e-6,
    environment: str | None = None,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, normalised within the group, plus each turn among the turns in the same state.

    Use it when samples have turns and meet the same states again, as in games and shops.

    Needs the fields `turn` [P, G, T], `turn_reward` and `state_hash` [P, G, K]: in a run set
    `environment` or `tools`.

    Args:
      gamma, weight, std, eps: as in the part `turn_normalise`.
      environment: the reward that `turn_reward` adds up to; its weight is the turns' too. None:
        the only one of `weights`, or one of weight 1.

    Source: GiGPO, arXiv 2505.10978. The authors' code subtracts means only by default, as with
    std = False here, and has its first mean over all turns of the group, not over samples.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"turn": [[[0], [0]]], "turn_reward": [[[0.0], [0.0]]], "state_hash": [[[7], [7]]]}
    >>> fields["token_mask"] = [[[True], [True]]]
    >>> options = {"gamma": 1.0, "std": False}
    >>> evaluate("gigpo", [[1.0, 0.0]], options=options, **fields)[0].tolist()
    [[[1.0], [-1.0]]]
    """
    weights = weights or {}
    if environment is None and len(weights) == 1:
        (environment,) = weights
    if environment and weights and environment not in weights:
        raise InputError(
            f"gigpo: environment = {environment!r}: no reward is called so: "
            f"{suggest(environment, weights)}"
        )
    if environment is None and len(weights) > 1 and 1 not in weights.values():
        raise InputError(
            "gigpo: turn_reward weighs as its reward does, and of several none has the weight 1: "
            f"name the environment's, environment = {next(iter(weights))!r} for example"
        )
    scale = weights.get(environment, 1.0) if environment else 1.0
    return sum_then("gigpo", weights, turns.turn_normalise(gamma, weight, std, eps, scale=scale))


def tree_rl(leaf_power: float = 0.5, weights: Weights | None = None) -> AdvantageTransform:
    """Sum, then per token: its node against the prompt plus its node against the parent.

    Use it when samples are leaves of a tree and each branch should earn its own credit.

    Needs the fields `ancestors` [P, G, D] and `token_depth` [P, G, T]: in a run set `tree.branch`.

    Args:
      leaf_power: as in the part `tree_process`.

    Source: TreeRL, arXiv 2506.11902.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"ancestors": [[[0, 1], [0, 2]]], "token_depth": [[[0, 1], [0, 1]]]}
    >>> fields["token_mask"] = [[[True, True], [True, True]]]
    >>> evaluate("tree_rl", [[1.0, 0.0]], **fields)[0].tolist()
    [[[0.0, 1.0], [0.0, -1.0]]]
    """
    return sum_then("tree_rl", weights, trees.tree_process(leaf_power=leaf_power))


def tree_po(weighting: str = "average", weights: Weights | None = None) -> AdvantageTransform:
    """Sum, less the means of the subgroups of leaves below each node of the path, then whiten.

    Use it when a tree branches at segments, and each subtree should judge its own leaves.

    Needs the field `ancestors` [P, G, D]: in a run set `tree.branch`. Whitened over the
    tokens of the batch, as in the paper; groups that are 0 throughout stay so, which the paper does
    not say.

    Args:
      weighting: as in the part `tree_subgroup`.

    Source: TreePO, arXiv 2508.17445.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"ancestors": [[[0, 1], [0, 2], [0, 3]]], "token_mask": [[[1], [1], [1]]]}
    >>> evaluate("tree_po", [[1.0, 0.0, 0.5]], **fields)[0].tolist()
    [[[1.0], [-1.0], [0.0]]]
    """
    return sum_then(
        "tree_po",
        weights,
        trees.tree_subgroup(weighting),
        to_tokens(),
        whiten_batch(keep="zero_groups"),
    )


def ema(
    decay: Scheduled = 0.9, initial: float = 0.0, weights: Weights | None = None
) -> AdvantageTransform:
    """Sum, then subtract the running mean of earlier batches; flat groups keep their signal.

    Use it when there are one or few samples per prompt and prompts are about equally hard.

    Args:
      decay: weight of the past, in [0, 1).
      initial: the baseline of the first batch.

    Source: Williams 1992, REINFORCE with a reinforcement-comparison baseline.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("ema", [[1.0, 0.0]], options={"initial": 0.5})[0].tolist()
    [[0.5, -0.5]]
    """
    return sum_then("ema", weights, ema_baseline(decay, initial))


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
      drift: a field [P], how far the policy has moved on the prompt since its last visit; "drift"
        is the paper's, which training measures.
      initial: success rate of a row before its first visit, or a field [P] of such rates.
      eps: added to the standard deviation of the batch.

    Source: arXiv 2509.13232. There 8 samples per prompt are drawn before the first step for the
    first estimates; here `initial`, which may be a data column of rates measured so.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate("spo", [[1.0, 0.0]], options={"eps": 0.0})[0].tolist()
    [[1.0, -1.0]]
    """
    return sum_then(
        "spo",
        weights,
        subtract_tracked_success(keep, drift, initial=initial),
        # An exact 0 is a reward equal to its estimate here, and no flat group.
        whiten_batch(eps, ddof=0, eps_in="std", keep="nothing"),
    )


def l2t(
    alpha: Scheduled = 1.0,
    beta: Scheduled = 0.0,
    clip: float = 10.0,
    scorer: str = "trainer",
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then GRPO; each part of a thought earns what it tells of the known answer.

        a[p, g, t] = (r - mean_g r) / (std_g r + eps) + alpha (u[p, g, k(t)] - mean_g u)
        u = log pi(answer | k parts of the thought) - log pi(answer | k - 1 parts) - beta its length

    Use it when the data have an answer to each prompt, and a reward for the whole says too little
    about which part of a long thought helped. It costs a pass over `data.answer_cuts` + 1 answers
    for each sample.

    Args:
      alpha, beta, clip, scorer: as in the part `add_information_gain`.
      eps, ddof: as in `grpo`.

    Fields: cut_answer_logp, thought_tokens: in training from the data's `data.answer`.
    Source: L2T, arXiv 2505.10425, with the length where it has a bound on parameters.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"cut_answer_logp": [[[-3.0, 0.0], [-3.0, -3.0]]], "thought_tokens": [[1, 1]]}
    >>> options = {"eps": 0.0, "ddof": 0}
    >>> fields["token_mask"] = [[[True], [True]]]
    >>> evaluate("l2t", [[1.0, 0.0]], options=options, **fields)[0].tolist()
    [[[2.5], [-2.5]]]
    """
    normalised = subtract_group_mean(), divide_by_group_std(eps, ddof)
    gain = add_information_gain(alpha, beta, clip, scorer)
    return sum_then("l2t", weights, *normalised, gain)


def dro_r3(
    kind: str = "var",
    drop: Scheduled = 0.2,
    masked_thought: bool = False,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    scorer: str = "trainer",
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
      scorer: "trainer", "base" (frozen) or "reference" (with reference.reset_every a lagged copy).

    Fields: answer_logp [P, G, J] and answer_mask [P, J] (`reasoning_reflection`), from the data's
    answers in training. R3 alone is `weights = {"correct": 0.0}`, where `correct` is only logged.
    Source: DRO, arXiv 2506.13351; its loss takes clip(0.2, 0.2) and masks truncated samples.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"answer_logp": [[[-1.0], [-3.0]]], "answer_mask": [[True]]}
    >>> options = {"eps": 0.0, "ddof": 0, "weights": {"reward": 0.0}}
    >>> evaluate("dro_r3", [[0.0, 0.0]], options=options, **fields)[0].tolist()
    [[1.0, -1.0]]
    """
    return chain(
        reasoning_reflection(kind, drop=drop, masked_thought=masked_thought, scorer=scorer),
        sum_rewards(**({} if weights is None else {"r3": 1.0, **weights})),
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        name="dro_r3",
    )
