"""Weights of groups, by how much a prompt should count, and of samples, by how rare they are."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.metrics import Metrics, mean, reduce, summed
from jaxgrpo.core.types import Rollouts, Signal

_FACTORS = (
    (0x9E3779B1, 0x7FEB352D, 0x85EBCA77, 0x846CA68B),
    (0xC2B2AE3D, 0x2C1B3C6D, 0x27D4EB2F, 0x297A2D39),
)
"""Odd numbers of 32 bits, without a pattern."""


def shrink_rare_success(
    count: Scheduled = 2, reward: str | None = None, threshold: Scheduled | None = None
) -> AdvantageTransform:
    """Shrinks groups with few successes: a lucky one of a hard prompt teaches less.

        a[p, g] = a[p, g] min(1, N[p] / count),  N[p] = the group's number of successes

    Without a success nothing is rare and the group stays as it is: its values are 0 behind a
    baseline in any case, and the failures that `sign` keeps alive are kept.

    Args:
      count: so many successes count in full; a number or a function of the step.
      reward: name of the reward or field [P, G] that says success, NaN = not judged; None: the
        signal, so behind the baseline of rewards in {0, 1} the values above 0.
      threshold: the lowest value that is a success; None: any value above 0.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T],
    on a count that is not positive.
    Metrics: shrunk_groups, the share of groups with a sample.
    Source: methods against overly hard samples, arXiv 2605.28388, name the harm; the rule is ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(shrink_rare_success(count=2), [[1.0, -1.0, -1.0]])[0].tolist()
    [[0.5, -0.5, -0.5]]
    """
    base.check("shrink_rare_success", "more than 0 successes", lambda n: n > 0, count=count)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        successes = base.samples("shrink_rare_success", reward, signal, rollouts)
        if threshold is None:
            success = successes.value > 0
        else:
            success = successes.value >= base.at_step(threshold, rollouts, successes.value.dtype)
        number = stats.count(successes.mask & success).astype(successes.value.dtype)
        share = jnp.minimum(1, number / base.at_step(count, rollouts, number.dtype))
        factor = jnp.where(number == 0, 1, share)
        scored = signal.mask.any(axis=1, keepdims=True)
        return base.scaled(signal, factor), {"shrunk_groups": mean(factor < 1, scored)}

    return base.stateless(
        "shrink_rare_success", apply, needs=base.needed_fields(reward), levels=(2,)
    )


def weight_by_absolute_advantage(normalise: bool = False) -> AdvantageTransform:
    """Weighs each group by the mean size of its advantages, so by how much its samples disagree.

        a[p, g] = a[p, g] w[p],  w[p] = mean_g |a[p, g]|

    Behind the normalisation of rewards in {0, 1} by the population deviation w is
    2 sqrt(p (1 - p)), p the group's success rate: prompts at the edge count most.

    Args:
      normalise: divides w by its mean over the groups with a sample. Off, the weights also change
        the size of the update, as any weights do; on, that of one group depends on the others.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: weight, its mean over groups before normalising.
    Source: ours; the closed form is exact.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(weight_by_absolute_advantage(), [[0.5, -0.5], [0.0, 0.0]])[0].tolist()
    [[0.25, -0.25], [0.0, 0.0]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        return _weighed(signal, stats.mean(jnp.abs(signal.value), signal.mask), normalise)

    return base.stateless("weight_by_absolute_advantage", apply, levels=(2,))


def weight_by_learnability(
    reward: str | None = None, normalise: bool = False
) -> AdvantageTransform:
    """Weighs each group by the variance of its rewards: p (1 - p) where they are 0 or 1.

        a[p, g] = a[p, g] w[p],  w[p] = mean_g (r[p, g] - mean_g r)^2

    The success rate p is that of the group; a prompt always or never solved weighs exactly 0.

    Args:
      reward: name of the reward or field [P, G] whose variance it is, NaN = not judged. None: the
        signal, which must not have been divided by its deviation: a baseline such as
        `subtract_group_mean` leaves the variance as it is, behind `divide_by_group_std` it is
        about 1 for every group. Behind that, name the reward.
      normalise: divides w by its mean over the groups with a sample, as
        `weight_by_absolute_advantage` does.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: weight, its mean over groups before normalising.
    Source: LILO, arXiv 2502.12272, which chooses prompts by p (1 - p) before they are trained on;
    here it weighs those that were sampled.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(weight_by_learnability(), [[0.5, -0.5]])[0].tolist()
    [[0.125, -0.125]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        samples = base.samples(name, reward, signal, rollouts)
        flat = stats.is_flat(samples.value, samples.mask)
        weight = jnp.where(flat, 0, stats.variance(samples.value, samples.mask))
        return _weighed(signal, weight, normalise)

    needs = base.needed_fields(reward)
    name = "weight_by_learnability"
    return base.stateless(name, apply, needs=needs, levels=(2,), relative=True)


def darling(field: str | None = None, floor: Scheduled = 0.1) -> AdvantageTransform:
    """Multiplies each reward by the share of the others that belong to another class.

        r[p, g] max((n - |class of g|) / (n - 1), floor),  n = unmasked samples of the prompt

    All distinct: factor 1; all alike: the floor. A sample alone in its group has factor 1. Wrong
    answers with reward 0 keep 0; a negative reward would be softened by being common. A group
    where all succeed is live as soon as it has two classes of different size, where GRPO has
    nothing to say; of one class, or of classes of equal size, it is still flat. Put it before the
    baseline.

    Args:
      field: classes [P, G], by the name of a field or a reward, equal numbers being one class.
        None: completions of the same drawn tokens are one class.
      floor: in [0, 1]; a number or a function of the step.

    Signal: [P, G] -> [P, G], mask unchanged.  Raises: InputError on token-level values [P, G, T].
    Metrics: diversity, the mean factor before the floor; floored, the share of samples at it.
    Source: DARLING, arXiv 2509.02534; classes there come from a classifier, and n = 1 divides by 0.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(darling("kind"), [[1.0, 1.0, 1.0]], kind=[[0, 0, 1]])[0].tolist()
    [[0.5, 0.5, 1.0]]
    """
    base.check_share("darling", floor=floor)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = stats.widen(signal.value), signal.mask
        if field is None:
            token_mask = base.read("darling", rollouts, "token_mask").astype(bool)
            tokens = base.read("darling", rollouts, "completion_tokens")
            same_class = _same_tokens(tokens, token_mask)
        else:
            classes = base.read_field("darling", field, rollouts, mask.shape, "[P, G]")
            same_class = classes[:, :, None] == classes[:, None, :]
            # NaN, a class that is not known, equals nothing: the sample is a class of its own.
            same_class = same_class | jnp.eye(classes.shape[1], dtype=bool)[None]
        same_class = same_class & mask[:, :, None] & mask[:, None, :]
        number = stats.count(mask)
        other_count = jnp.maximum(number - 1, 1).astype(value.dtype)
        apart = (number - same_class.sum(-1, dtype=jnp.int32)).astype(value.dtype) / other_count
        diversity = jnp.where(number > 1, apart, 1)
        least = jnp.asarray(base.at_step(floor, rollouts, value.dtype), value.dtype)
        metrics: Metrics = {
            "diversity": mean(diversity, mask),
            "floored": mean(diversity <= least, mask),
        }
        return base.with_value(signal, value * jnp.maximum(diversity, least)), metrics

    return base.stateless("darling", apply, needs=base.needed_fields(field), levels=(2,))


def unlikeliness(beta: Scheduled = 0.25) -> AdvantageTransform:
    """Lowers the reward of a sample by its rank in likelihood among the group.

        r[p, g] (1 - beta rank / (n - 1)),  rank = unmasked samples that are less likely

    The likelihood is that of the whole completion, the sum of behavior_logp: short completions
    rank high. Equally likely ones share the mean of their ranks. The least likely keeps its
    reward, the likeliest loses beta of it; alone in a group it keeps it. Put it before the
    baseline.

    Args:
      beta: in [0, 1]; a number or a function of the step.

    Signal: [P, G] -> [P, G], mask cut where the log-probs are NaN: such a sample has no rank.
    Raises: InputError on token-level values [P, G, T].
    Metrics: factor, the mean; likeliest_reward and unlikeliest_reward, the mean reward before of
    the likelier and the unlikelier half.
    Source: He et al. 2025, arXiv 2506.02355 (beta 0.25), which counts rank / n from the other end,
    so that the least likely loses beta / n too.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"behavior_logp": [[[-1.0], [-2.0]]], "token_mask": [[[True], [True]]]}
    >>> evaluate(unlikeliness(beta=0.25), [[1.0, 1.0]], **fields)[0].tolist()
    [[0.75, 1.0]]
    """
    base.check_share("unlikeliness", beta=beta)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = stats.widen(signal.value), signal.mask
        token_mask = base.read("unlikeliness", rollouts, "token_mask").astype(bool)
        logp = stats.widen(base.read("unlikeliness", rollouts, "behavior_logp"))
        logp = jnp.where(token_mask & mask[..., None], logp, 0).sum(-1)
        mask = mask & ~jnp.isnan(logp)
        sample_logp, other_logp = logp[:, :, None], logp[:, None, :]
        less = ((other_logp < sample_logp) & mask[:, None, :]).sum(-1, dtype=jnp.int32)
        tied = ((other_logp == sample_logp) & mask[:, None, :]).sum(-1, dtype=jnp.int32)
        # Ranks less, less + 1, ..., less + tied - 1 are shared by `tied` samples.
        rank = less.astype(value.dtype) + (tied - 1).astype(value.dtype) / 2
        number = jnp.maximum(stats.count(mask) - 1, 1).astype(value.dtype)
        share = jnp.where(mask, rank / number, 0)
        weight = jnp.asarray(base.at_step(beta, rollouts, value.dtype), value.dtype)
        factor = 1 - weight * share
        metrics: Metrics = {
            "factor": mean(factor, mask),
            "likeliest_reward": mean(value, mask & (share > 0.5)),
            "unlikeliest_reward": mean(value, mask & (share < 0.5)),
        }
        return Signal(value=(value * factor).astype(signal.value.dtype), mask=mask), metrics

    return base.stateless("unlikeliness", apply, levels=(2,))


def _weighed(signal: Signal, weight: Array, normalise: bool) -> tuple[Signal, Metrics]:
    scored = signal.mask.any(axis=1, keepdims=True)
    metrics: Metrics = {"weight": mean(weight, scored)}
    if normalise:
        average = stats.mean(weight, scored, axis=0)
        # Where every weight is 0 they stay 0.
        weight = weight / jnp.where(average > 0, average, 1)
    return base.scaled(signal, weight), metrics


def _same_tokens(tokens: Array, token_mask: Array) -> Array:
    """[P, G, G]: True where the policy chose the same tokens, in the same order, in two samples:
    whatever stands between them, or before them, as a goal does.

    By two sums of 32 bits each: samples that differ are taken for the same once in 1e19 pairs. One
    pass over the tokens, where comparing all pairs of samples takes G^2 / 2.
    """
    size = tokens.shape[1]
    equal = jnp.ones((tokens.shape[0], size, size), bool)
    for total in _fingerprints(tokens, token_mask):
        equal = equal & (total[:, :, None] == total[:, None])
    return equal


def _fingerprints(tokens: Array, mask: Array) -> list[Array]:
    """Two sums [P, G], modulo 2^32, of numbers that token and place are scrambled to; a place is
    counted in unmasked tokens.

    The token is scrambled before its place is added, and each sum has factors of its own: else two
    samples that differ at two places alike could agree in both.
    """
    place = jnp.cumsum(mask, axis=-1, dtype=jnp.uint32)
    parts = (_scrambled(tokens.astype(jnp.uint32), place, factors) for factors in _FACTORS)
    sums = reduce(*(summed(part, mask) for part in parts), axis=-1)
    return [total[..., 0] for total in sums]


def _scrambled(token: Array, place: Array, factors: tuple[int, int, int, int]) -> Array:
    token_factor, second_factor, place_factor, last_factor = (
        jnp.uint32(factor) for factor in factors
    )
    half, most = jnp.uint32(16), jnp.uint32(13)
    token = token * token_factor
    token = (token ^ token >> half) * second_factor
    mixed = (token ^ token >> most) + place * place_factor
    mixed = (mixed ^ mixed >> half) * last_factor
    return mixed ^ mixed >> most
