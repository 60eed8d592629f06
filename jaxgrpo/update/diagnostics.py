"""Metrics of rollouts: rewards, flat groups and what chance explains of them, repetition, drift."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform
from jaxgrpo.advantages.streams import sums_scored
from jaxgrpo.core.metrics import Mean, Metrics, maximum, mean, merge, minimum
from jaxgrpo.core.scores import ANSWERED, SCORES
from jaxgrpo.core.types import REPLAYED, Rollouts

RARE = 0.25
"""A success is rare if no larger share of its group succeeded."""

N_GRAM = 4
"""Tokens in a run that counts as repeated if the completion holds it twice."""


ANCHORS = ("base_logp", "reference_logp")
"""Fields that show, if a method asks for them, how far the policy has moved."""


def rollout_metrics(
    weights: Mapping[str, float] | None,
    summed_rewards: Mapping[str, Array],
    temperature: float | None,
    rollouts: Rollouts,
    drawn: Rollouts,
    live: Array,
    advantage: Array,
    mask: Array,
) -> Metrics:
    """Metrics of rewards and completions, under TRL's names if TRL has one.

    Args:
      weights: of the rewards; summed_rewards: those that are added up.
      temperature: that samples were drawn at; 0: they are the likeliest tokens; None: no policy
        drew them.
      drawn: the rollouts as they were drawn, where the update trains known answers instead.
      live: [P, G]; advantage, mask: [P, G, T].
    """
    tokens, drawn_tokens = rollouts.token_mask, drawn.token_mask
    metrics: Metrics = {
        "live_samples": mean(live),
        "live_groups": mean(live.any(-1)),
        "live_tokens": mean(live[..., None], tokens),
        "sampling/not_finite": mean(~jnp.isfinite(drawn.behavior_logp), drawn_tokens),
    }
    if temperature:  # of the likeliest token alone there is no entropy
        metrics |= surprise_metrics(drawn.behavior_logp, fresh_tokens(drawn))
    metrics |= advantage_metrics(advantage, mask, summed_rewards, weights)
    texts = drawn.completion_tokens, drawn_tokens
    metrics |= completion_metrics(*texts, drawn.truncated)
    rare = rare_successes(summed_rewards, weights)
    metrics |= symptom_metrics(*texts, rare)
    for name in ANCHORS:
        if name in rollouts.fields and temperature is not None:
            fresh, policy = fresh_tokens(rollouts), SCORES[name].policy
            metrics |= drift_metrics(rollouts.behavior_logp, rollouts.fields[name], fresh, policy)
    metrics |= group_metrics(summed_rewards, weights)
    return metrics | reward_metrics(rollouts.rewards)


def fresh_tokens(rollouts: Rollouts) -> Bool[Array, "P G T"]:
    """The tokens that a policy drew for this step: not those of samples of an earlier one
    (`experience.share`), which were picked since they were right, nor known answers that are
    trained behind the thoughts."""
    replayed, answered = (rollouts.fields.get(name) for name in (REPLAYED, ANSWERED))
    mask = rollouts.token_mask
    if replayed is not None:
        mask = mask & (replayed[..., None] == 0)  # files may hold numbers
    return mask if answered is None else mask & (answered == 0)


def group_metrics(
    rewards: Mapping[str, Array], weights: Mapping[str, float] | None = None
) -> Metrics:
    """Rewards and shares of groups, of the weighted sum of the rewards (None: all weigh 1).

    A sample that one of the rewards could not score is left out, as in `sum_rewards`; a group
    without any scored sample is counted in no share. A group is flat if its scored rewards are
    all equal, or only one is scored:

        groups/all_fail  flat, and the reward is 0 or below
        groups/all_pass  flat, and the reward is above 0
        groups/mixed     not flat
        frac_reward_zero_std  flat (TRL's name): the measured degeneracy
        groups/flat_iid       what that share would be if all prompts were equally hard
        groups/jensen_gap     by how much it is larger because they are not

    the last two as in `jensen_gap`, where a success is a reward above 0; NaN in a step with fewer
    prompts than samples per group. For rewards in {0, 1}, all scored, the measured share is their
    sum. Further: reward (mean over samples), reward_std (mean over groups of the n - 1 deviation),
    each reward's own rewards/NAME/mean and std (n - 1, over all samples) and the share that it
    could not score, rewards/NAME/unscored.
    Shapes: each reward [P, G].
    """
    total, mask = weighted_sum(rewards, weights)
    group = stats.summary(total, mask)
    scored = mask.any(axis=1, keepdims=True)
    correct = (mask & (total > 0)).sum(1, dtype=jnp.int32)
    _, iid, gap = jensen_gap(correct, mask.sum(1, dtype=jnp.int32), mask.shape[1])
    return reward_metrics(rewards) | {
        "reward": mean(total, mask),
        "reward_std": mean(jnp.sqrt(stats.variance(total, mask, ddof=1)), scored),
        "frac_reward_zero_std": mean(group.flat, scored),
        "groups/all_fail": mean(group.flat & (group.high <= 0), scored),
        "groups/all_pass": mean(group.flat & (group.high > 0), scored),
        "groups/mixed": mean(~group.flat, scored),
        "groups/flat_iid": mean(iid, jnp.isfinite(iid)),
        "groups/jensen_gap": mean(gap, jnp.isfinite(gap)),
    }


def reward_metrics(rewards: Mapping[str, Array]) -> Metrics:
    """Each reward's rewards/NAME/mean, std and unscored, as `group_metrics` describes them."""
    return functools.reduce(merge, [_single_reward_metrics(*item) for item in rewards.items()])


def _single_reward_metrics(name: str, reward: Float[Array, "P G"]) -> Metrics:
    scored = jnp.isfinite(reward)
    value = jnp.where(scored, reward, 0)
    flat, mask = value.reshape(1, -1), scored.reshape(1, -1)
    return {
        f"rewards/{name}/mean": mean(value, scored),
        f"rewards/{name}/std": mean(
            jnp.sqrt(stats.variance(flat, mask, ddof=1)), mask.any(keepdims=True)
        ),
        f"rewards/{name}/unscored": mean(~scored),
    }


def completion_metrics(
    tokens: Int[Array, "P G T"], mask: Bool[Array, "P G T"], truncated: Bool[Array, "P G"]
) -> Metrics:
    """Lengths in tokens, how many were cut, and whether samples differ at all.

        completions/{mean,min,max}_length, and _terminated_length of those that ended by themselves
        completions/clipped_ratio  the share that the length limit cut
        groups/identical           the share of groups whose completions are all the same tokens
        num_tokens                 their sum

    A group of one sample is not identical to anything. Names as in TRL, but for `identical`;
    num_tokens is this step's, TRL's the sum over the run and with prompts.
    """
    length = mask.sum(-1)
    metrics: Metrics = {
        "completions/clipped_ratio": mean(truncated),
        "num_tokens": Mean(total=length.sum(dtype=jnp.float32), weight=jnp.float32(1)),
    }
    for name, sample_mask in {"length": None, "terminated_length": ~truncated}.items():
        for kind, reduce in {"mean": mean, "min": minimum, "max": maximum}.items():
            metrics[f"completions/{kind}_{name}"] = reduce(length, sample_mask)
    if mask.shape[1] > 1:
        unmasked_tokens = jnp.where(mask, tokens, -1)
        metrics["groups/identical"] = mean((unmasked_tokens == unmasked_tokens[:, :1]).all((1, 2)))
    return metrics


def advantage_metrics(
    advantage: Array,
    mask: Array,
    rewards: Mapping[str, Array],
    weights: Mapping[str, float] | None = None,
) -> Metrics:
    """How large advantages are, and which samples have them.

        advantage/abs_max      the largest |A|
        advantage/lucky_share  sum of |A| over lucky single successes / sum of |A|
        advantage/flat_share   sum of |A| over samples of flat groups / sum of |A|
        advantage/rare_success_mass    sum of |A| over `rare_successes` / sum of |A|

    A lucky single success is the only sample of its group that succeeded (weighted sum of the
    rewards above 0) while another scored one failed. |A| of a sample is the mean over its
    unmasked tokens. The shares are NaN if all advantages are 0.

    Shapes: advantage and mask [P, G] or [P, G, T], as a chain returns them; rewards [P, G].
    Source: the rare accidental success as exemplar, arXiv 2605.28388; the metric is ours.
    """
    size = jnp.where(mask, jnp.abs(stats.widen(advantage)), 0)
    largest = maximum(size)
    if size.ndim == 3:
        size = stats.mean(size, mask, axis=2)[..., 0]
    total, scored = weighted_sum(rewards, weights)
    success = scored & (total > 0)
    alone = (stats.count(success) == 1) & (stats.count(scored) > 1)
    sample_sets = {
        "advantage/lucky_share": success & alone,
        "advantage/flat_share": scored & stats.is_flat(total, scored),
        "advantage/rare_success_mass": rare_successes(rewards, weights),
    }
    metrics: Metrics = {"advantage/abs_max": largest}
    for name, samples in sample_sets.items():
        metrics[name] = Mean(total=jnp.where(samples, size, 0).sum(), weight=size.sum())
    return metrics


def rare_successes(
    rewards: Mapping[str, Array], weights: Mapping[str, float] | None = None
) -> Bool[Array, "P G"]:
    """The successes in groups of which at most RARE of the scored samples succeeded.

    Success is a weighted sum of the rewards above 0. In groups of 4 these are the lucky single
    successes of `advantage_metrics`, in groups of 8 pairs too; in groups of 2 and 3 there are none.
    Shapes: each reward [P, G].
    """
    total, scored = weighted_sum(rewards, weights)
    success = scored & (total > 0)
    return success & (stats.count(success) <= RARE * stats.count(scored))


def pass_at_k(correct: Int[Array, "P"], samples: Int[Array, "P"], k: int) -> Float[Array, "P"]:
    """The probability that k samples hold a success, unbiased, from `correct` of `samples`.

        1 - C(n - c, k) / C(n, k)

    NaN if n < k: k samples cannot be judged from fewer. Stable for any n: a product of k
    factors in [0, 1], never a binomial coefficient.

    Args:
      correct, samples: successes c and samples n per prompt.
      k: static, at least 1.

    Source: Chen et al. 2021, arXiv 2107.03374.
    """
    return 1 - drawn_alike(samples - correct, samples, k)


def flat_share(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> Float[Array, "P"]:
    """The probability that a group of G samples is flat, unbiased, from `correct` of `samples`.

        (C(c, G) + C(n - c, G)) / C(n, G)

    Putting c / n into p^G + (1 - p)^G instead overestimates, by Jensen's inequality. NaN if
    n < G.
    """
    all_pass = drawn_alike(correct, samples, group_size)
    return all_pass + drawn_alike(samples - correct, samples, group_size)


def jensen_gap(
    correct: Int[Array, "P"], samples: Int[Array, "P"], group_size: int
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The share of flat groups, the same if all prompts were equally hard, and the difference.

        measured  mean_x (C(c_x, G) + C(n_x - c_x, G)) / C(n_x, G)
        iid       mean over all sets of G prompts of prod c_x / n_x, plus the same of failures
        gap       measured - iid; G = 2: twice the variance of the prompts' success rates

    All three are unbiased for prompts drawn at random: the first for E_x[p_x^G + (1 - p_x)^G], the
    second for p^G + (1 - p)^G at p = E_x p_x. That formula at a batch's mean rate overestimates it;
    products over *distinct* prompts do not, because those are independent. The gap of one
    step is noisy and may be negative; take its mean over steps.

    Args:
      correct, samples: successes c and samples n per prompt. Prompts with fewer than G samples are
        left out of all three, so that they are about the same prompts.
      group_size: G, static, at least 1.

    Returns: NaN if no prompt has G samples; iid and gap if fewer than G prompts have them.
    Source: Gradient starvation, arXiv 2605.07689, for the gap; the estimators are ours.
    """
    usable = samples >= group_size
    flat = flat_share(correct, samples, group_size)
    number = usable.sum()
    measured = jnp.where(usable, flat, 0).sum() / jnp.maximum(number, 1).astype(flat.dtype)
    rate = correct.astype(flat.dtype) / jnp.maximum(samples, 1).astype(flat.dtype)
    wins = _product_of_distinct(rate, usable, group_size)
    losses = _product_of_distinct(1 - rate, usable, group_size)
    iid = jnp.where(number >= group_size, wins + losses, jnp.nan)
    measured = jnp.where(number > 0, measured, jnp.nan)
    return measured, iid, measured - iid


def _product_of_distinct(
    value: Float[Array, "P"], usable: Bool[Array, "P"], number: int
) -> Float[Array, ""]:
    """The mean, over all sets of `number` usable entries, of the product of the set.

    With E_k(j) the sum over sets of k among the first j of N, and T_k(j) = E_k(j) / C(N, k):
    T_k(j) = k / (N - k + 1) sum_{i <= j} x_i T_{k - 1}(i - 1), and T_k(N) is the mean. All terms
    are positive and all T at most 1: nothing overflows or cancels, however many prompts there are.
    """
    value = jnp.where(usable, value, 0)
    total = usable.sum().astype(value.dtype)

    def larger(sets: Array, means: Array) -> Array:
        size = sets.astype(value.dtype)
        sums = jnp.cumsum(value * means[:-1]) * (size / jnp.maximum(total - size + 1, 1))
        return jnp.concatenate([jnp.zeros_like(sums[:1]), sums])

    return jax.lax.fori_loop(1, number + 1, larger, jnp.ones_like(value, shape=len(value) + 1))[-1]


def drawn_alike(alike: Int[Array, "P"], samples: Int[Array, "P"], draws: int) -> Float[Array, "P"]:
    """The probability that `draws` of the samples, none twice, are all of one kind.

        C(alike, draws) / C(samples, draws) = prod_{j < draws} (alike - j) / (samples - j)

    Args:
      alike: samples of that kind, of `samples`.
      draws: static, at least 1. NaN if there are fewer samples.
    """
    if draws < 1:
        raise ValueError(f"{draws} draws: pass@k and group sizes begin at 1")
    dtype = jnp.result_type(float)
    previous_draws = jnp.arange(draws, dtype=alike.dtype)[None, :]
    alike_left = jnp.maximum(alike[:, None] - previous_draws, 0).astype(dtype)
    samples_left = jnp.maximum(samples[:, None] - previous_draws, 1).astype(dtype)
    return jnp.where(samples >= draws, (alike_left / samples_left).prod(axis=1), jnp.nan)


def repetition(
    tokens: Int[Array, "P G T"], mask: Bool[Array, "P G T"], n: int = N_GRAM
) -> Float[Array, "P G"]:
    """The share of a completion's runs of n tokens that stood in it before.

        1 - distinct n-grams / n-grams

    0: none comes twice; near 1: a loop. Only n-grams without a masked token count; NaN if there
    is none. Exact, by sorting the n-grams of each completion.

    Source: a detector of degenerate behaviour, after arXiv 2605.28388; n is ours.
    """
    count = tokens.shape[-1] - n + 1
    if count < 1:
        return jnp.full(tokens.shape[:-1], jnp.nan)
    is_complete = jnp.stack([mask[..., i : i + count] for i in range(n)]).all(0)
    grams = [jnp.where(is_complete, tokens[..., i : i + count], -1) for i in range(n)]
    grams = jax.lax.sort(grams, num_keys=n)  # what is left out comes first
    is_new = jnp.stack([gram[..., 1:] != gram[..., :-1] for gram in grams]).any(0)
    real = grams[0] >= 0
    distinct = real[..., 0].astype(jnp.int32) + (is_new & real[..., 1:]).sum(-1)
    number = real.sum(-1)
    return jnp.where(number > 0, 1 - distinct / jnp.maximum(number, 1), jnp.nan)


def symptom_metrics(
    tokens: Int[Array, "P G T"], mask: Bool[Array, "P G T"], rare: Bool[Array, "P G"]
) -> Metrics:
    """Repetition and length of all completions, and of rare successes among them.

        completions/repetition         mean of `repetition` over those that have an n-gram
        rare_success/repetition        the same of rare successes
        rare_success/relative_length   mean of their length over the median length of their group

    Rare successes that repeat themselves, or are far shorter than the rest, are accidents that the
    policy learns from. The last two are NaN in a step without a rare success.

    Args:
      rare: as `jaxgrpo.update.diagnostics.rare_successes` finds them.

    Source: arXiv 2605.28388: one lucky sample shortened completions from 511 to 46 tokens.
    """
    repeated = repetition(tokens, mask)
    has_ngram = jnp.isfinite(repeated)
    length = mask.sum(-1).astype(repeated.dtype)
    relative = length / jnp.maximum(jnp.median(length, axis=1, keepdims=True), 1)
    return {
        "completions/repetition": mean(repeated, has_ngram),
        "rare_success/repetition": mean(repeated, has_ngram & rare),
        "rare_success/relative_length": mean(relative, rare),
    }


def drift_metrics(
    logp: Float[Array, "P G T"],
    other_logp: Float[Array, "P G T"],
    mask: Bool[Array, "P G T"],
    name: str,
) -> Metrics:
    """kl_to_NAME_estimated: KL(policy || other) of whole completions, from samples of the policy.

        mean over completions of sum_t logp - other_logp

    In nats per completion; unbiased, so it may be negative in one step. Completions without an
    unmasked token are left out.

    Args:
      logp: of the policy that sampled.
      name: of the other policy, "base" or "reference".

    Source: the estimator k1 of Schulman 2020, over sequences.
    """
    total = jnp.where(mask, logp - other_logp, 0).sum(-1)
    return {f"kl_to_{name}_estimated": mean(total, mask.any(-1))}


def surprise_metrics(behavior_logp: Float[Array, "P G T"], mask: Bool[Array, "P G T"]) -> Metrics:
    """entropy_estimated: the entropy of the policy that sampled, over all tokens of a step.

        mean over tokens of -behavior_logp

    In nats per token. A token is drawn from the distribution that its log-prob is of, so -logp has
    the entropy at its position for its mean: of all tokens together the sum is unbiased, at any
    temperature above 0, and with top-k, top-p or min-p for the distribution that they leave. It
    costs no pass, unlike the exact entropy of the update, which is of live samples only.
    """
    return {"entropy_estimated": mean(-behavior_logp, mask)}


class Rounding(NamedTuple):
    """Nats of difference between sampler and trainer that rounding explains."""

    largest: float  # at one token
    mean: float  # over tokens


def agreement_metrics(
    logp: Array, behavior_logp: Array, mask: Array, sampled_now: Array, rounding: Rounding | None
) -> Metrics:
    """How far trainer and sampler are from each other about the tokens of this step's policy.

        sampling/sampling_logp_difference    |logp - behavior_logp| in nats, mean and max
        sampling/disagreement                that max over `rounding.largest`
        sampling/mean_disagreement           that mean over `rounding.mean`

    What an older policy sampled is left out: its difference is drift and no disagreement. One that
    is not finite is neither, and counts.

    Args:
      sampled_now: whether the parameters that `logp` is of sampled the token.
      rounding: None: not comparable, and both ratios to it are left out.

    Shapes: all [D, R, Q].
    """
    gap = jnp.abs(logp - behavior_logp)
    mask = mask & (sampled_now | ~jnp.isfinite(gap))
    name = "sampling/sampling_logp_difference"
    metrics: Metrics = {f"{name}/mean": mean(gap, mask), f"{name}/max": maximum(gap, mask)}
    if rounding is not None:
        metrics["sampling/disagreement"] = maximum(gap / rounding.largest, mask)
        metrics["sampling/mean_disagreement"] = mean(gap / rounding.mean, mask)
    return metrics


def as_summed(
    rewards: Mapping[str, Array],
    weights: Mapping[str, float] | None,
    chain: AdvantageTransform,
) -> Mapping[str, Array]:
    """The rewards as the chain adds them up: behind `sum_scored`, what one could not score is 0.

    A sample that none of those with a weight could score stays NaN. Shapes: each reward [P, G].
    """
    if not sums_scored(chain):
        return rewards
    terms = [r for name, r in rewards.items() if weights is None or weights[name] != 0]
    scored = functools.reduce(operator.or_, map(jnp.isfinite, terms))
    return {name: jnp.where(scored & ~jnp.isfinite(r), 0, r) for name, r in rewards.items()}


def weighted_sum(
    rewards: Mapping[str, Array], weights: Mapping[str, float] | None
) -> tuple[Float[Array, "P G"], Bool[Array, "P G"]]:
    """The sum of the rewards, and which samples have one: those that every reward in it scored."""
    terms, masks = [], []
    for name, reward in rewards.items():
        weight = 1.0 if weights is None else weights[name]
        if weight == 0:
            continue
        masks.append(jnp.isfinite(reward))
        terms.append(weight * stats.widen(jnp.where(masks[-1], reward, 0)))
    if not terms:
        raise ValueError("group_metrics needs at least one reward whose weight is not 0")
    mask = functools.reduce(operator.and_, masks)
    return jnp.where(mask, stats.added(terms, mask), 0), mask
