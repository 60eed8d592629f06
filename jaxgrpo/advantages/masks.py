"""Transforms that take samples or groups out of what follows: statistics, loss and denominators."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.tokens import at_tokens
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal


def mask_zero_variance() -> AdvantageTransform:
    """Masks every group whose unmasked values are all equal, and groups with fewer than two.

    Their advantage would be 0 in any case; masked, they leave the denominator of the loss too.
    Without this step they count in it with advantage 0 (TRL, verl).

    Signal: [P, G] -> [P, G], mask cut.  Raises: InputError on token-level values [P, G, T].
    Metrics: masked_groups, the share of groups with a sample that went.
    Source: DAPO, arXiv 2503.14476, section 3.2, without its refill, which is `rollout.refill`.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(mask_zero_variance(), [[1.0, 0.0], [1.0, 1.0]])[1].tolist()
    [[True, True], [False, False]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        return base.keep_groups(signal, ~stats.is_flat(signal.value, signal.mask))

    return base.stateless("mask_zero_variance", apply, levels=(2,), relative=True)


def keep_samples(count: int | None = None) -> AdvantageTransform:
    """Masks all but the first unmasked samples of each group: more are drawn, and judged, than
    trained on.

    Samples are drawn alike, so that the first are as good as any. Put it behind the sum of the
    rewards: the group's statistics are then of what is trained on. Rewards that look at the whole
    group, as votes do, have seen all of it.

    Args:
      count: samples of a group that stay; others cost no part of the update. None: half of them.

    Signal: [P, G] or [P, G, T], mask cut.
    Source: TTRL, arXiv 2504.16084, which votes over 64 samples and trains on 32.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(keep_samples(1), [[1.0, 0.0]])[1].tolist()
    [[True, False]]
    """
    name = "keep_samples"
    base.check_whole(name, count=count)

    def accepts(spec: RolloutSpec) -> None:
        if count is not None and count > spec.group_size:
            raise InputError(
                f"keep_samples: count = {count}, but a group has {spec.group_size} samples: give "
                "at most rollout.group_size"
            )

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        limit = (signal.mask.shape[1] + 1) // 2 if count is None else count
        number = jnp.cumsum(_sample_mask(signal), axis=1)
        stays = (number <= limit).reshape(*number.shape, *(1,) * (signal.mask.ndim - 2))
        return dataclasses.replace(signal, mask=signal.mask & stays), {}

    return base.stateless(name, apply, accepts=accepts)


def keep_thoughts() -> AdvantageTransform:
    """Leaves an advantage to the tokens of each thought alone; what follows is not trained.

    For rewards of a known answer, which say nothing of the sample's own.

    Fields: thought_tokens [P, G].  Signal: [P, G] or [P, G, T] -> [P, G, T], mask cut.
    Source: ours; VeriFree, arXiv 2505.21493, trains the known answer behind it: `train_on_answers`.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"thought_tokens": [[1]], "token_mask": [[[True, True]]]}
    >>> evaluate(keep_thoughts(), [[2.0]], **fields)[0].tolist()
    [[[2.0, 0.0]]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        wide = at_tokens("keep_thoughts", signal, rollouts)
        shape = wide.mask.shape
        thought = base.read_field("keep_thoughts", "thought_tokens", rollouts, shape[:2], "[P, G]")
        within = (
            jnp.arange(shape[2], dtype=jnp.int32)[None, None] < thought.astype(jnp.int32)[..., None]
        )
        return Signal(value=wide.value, mask=wide.mask & within), {}

    return base.stateless("keep_thoughts", apply, needs=frozenset({"thought_tokens"}))


def mask_truncated() -> AdvantageTransform:
    """Masks samples that were cut by the length limit.

    Before the baseline it takes them out of statistics and loss, after it out of the loss only:
    rewards 0 0 1 1, the last truncated, less the group mean: -1/3 -1/3 2/3 or -1/2 -1/2 1/2.

    Signal: [P, G] or [P, G, T], mask cut.  Metrics: masked, the share of unmasked samples.
    Source: DAPO, arXiv 2503.14476, section 3.4 (overlong filtering); where it stands is not given.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(mask_truncated(), [[1.0, 0.0]], truncated=[[False, True]])[1].tolist()
    [[True, False]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        truncated = base.read("mask_truncated", rollouts, "truncated").astype(bool)
        return _without_samples(signal, truncated)

    return base.stateless("mask_truncated", apply)


def mask_untaught(score: str = "teacher_top") -> AdvantageTransform:
    """Masks samples that a teacher has no prompt for, so that a mean is over taught samples.

    Beside a loss that reads the score (`top_k_divergence`), whose means count all unmasked tokens.

    Args:
      score: an entry of `[[scores]]`; NaN, in any number of a sample's tokens, says that it has
        none.

    Fields: the score, [P, G, T] or [P, G, T, 2, k + 1]; token_mask.
    Signal: [P, G] or [P, G, T], mask cut.  Metrics: masked, the share of unmasked samples.
    Source: SDPO, arXiv 2601.20802, in its code.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"teacher_top": [[[-1.0, -2.0], [float("nan")] * 2]], "token_mask": [[[1, 1]] * 2]}
    >>> evaluate(mask_untaught(), [[1.0, 0.0]], **fields)[1].tolist()
    [[True, False]]
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        numbers = base.read_field("mask_untaught", score, rollouts)
        drawn = base.read("mask_untaught", rollouts, "token_mask").astype(bool)
        if numbers.shape[:3] != drawn.shape:
            raise InputError(
                f"mask_untaught: {score} has shape {numbers.shape}, expected [P, G, T] or "
                f"[P, G, T, 2, k + 1] with [P, G, T] = {drawn.shape}"
            )
        untaught = jnp.isnan(numbers).any(tuple(range(3, numbers.ndim)))
        return _without_samples(signal, (untaught & drawn).any(-1))

    return base.stateless("mask_untaught", apply, needs=frozenset({score}))


def mask_low_variance(
    threshold: Scheduled | None = None,
    drop: Scheduled | None = None,
    field: str | None = None,
    positions: str | None = None,
    reduce: str = "max",
) -> AdvantageTransform:
    """Masks groups whose samples hardly differ: in the signal, or in any reward or field.

        v[p] = var_g x[p, g]                                  x [P, G]
        v[p] = max or mean over j of var_g x[p, g, j]         x [P, G, J] or [P, G, T]
        threshold:  group p stays where v[p] > threshold
        drop:       the floor(drop n) of the n groups with the lowest v go, and all with v = 0

    Exactly 0 where the unmasked samples are equal (max == min) or fewer than two: threshold 0 on
    the signal is `mask_zero_variance`. Under drop, n counts groups with a sample, flat ones too;
    groups that tie across the boundary all stay. Applied twice, a share goes twice.

    Args:
      threshold: a variance (divided by n), in squared units of x; a number or schedule. Or
      drop: a share of the batch's groups, from 0 to below 1. Exactly one of the two.
      field: name of the reward or field x, None: the signal. What is not finite is left out.
      positions: name of the field that is True where x counts, [P, J] or the shape of x, e.g.
        "answer_mask"; "token_mask" is known too. None: everywhere.
      reduce: "max" or "mean" over the positions at which two samples or more are read.

    Signal: [P, G] -> [P, G], mask cut.  Raises: InputError on [P, G, T], on shapes without fit.
    Metrics: masked_groups, the share of groups with a sample that went; variance, the mean of v.
    Source: DRO's query filter, arXiv 2506.13351. Threshold, ties and the zero rule are ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(mask_low_variance(drop=0.5), [[1.0, 0.0], [0.5, 0.4]])[1].tolist()
    [[True, True], [False, False]]
    """
    _check_low_variance(threshold, drop, field, positions, reduce)
    needs = base.needed_fields(field, None if positions == "token_mask" else positions)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value, mask = _compared(field, positions, signal, rollouts)
        spread = _spread(value, mask, reduce)
        scored = signal.mask.any(axis=1, keepdims=True)
        if drop is None:
            keep = spread > base.at_step(threshold or 0.0, rollouts, spread.dtype)
        else:
            keep = _above_lowest(spread, scored, base.at_step(drop, rollouts, spread.dtype))
        return base.keep_groups(signal, keep, variance=mean(spread, scored))

    step = base.stateless("mask_low_variance", apply, needs=needs, levels=(2,), relative=True)
    return step._replace(compares_groups=callable(drop) or bool(drop))


def mask_below_running_deviation(share: Scheduled = 0.5, decay: float = 0.99) -> AdvantageTransform:
    """Masks groups whose samples differ less than those of earlier batches did.

        group p stays where s[p] >= share m,  s[p] = std_g of its values, m the running mean of s
        n <- decay n + 1,   m <- m + (mean_p s[p] - m) / n

    m is that of the batches before; in the first one all groups stay. Flat groups have s exactly
    0, as those with fewer than two samples. Put it before the baseline. Samples of earlier steps
    (`experience.share`) count for m, since they do for the s that it is compared with. Refused with
    `rollout.refill`: an m of groups that stay, without flat ones, would only grow.

    Args:
      share: 0 or more; a number or a function of the step, such as one that is 0 for some steps.
      decay: weight of the past, in [0, 1).

    Signal: [P, G] -> [P, G], mask cut.  Raises: InputError on token-level values [P, G, T].
    State: mean [], weight [].  Metrics: masked_groups, the share of groups with a sample that went;
    deviation, the mean of s; threshold, share m.
    Source: RLPR, arXiv 2506.18254, with the numbers of its code, which begins after 10 steps.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(mask_below_running_deviation(), [[1.0, 0.0], [1.0, 1.0]])[1].tolist()
    [[True, True], [True, True]]
    """
    name = "mask_below_running_deviation"
    base.check_at_least(name, 0, share=share)
    base.check(name, "0 or more and below 1", lambda share: 0 <= share < 1, decay=decay)

    def init(spec: RolloutSpec) -> dict[str, Array]:
        return dict.fromkeys(("mean", "weight"), jnp.zeros((), jnp.result_type(float)))

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        group = stats.summary(signal.value, signal.mask)
        variance = stats.variance(signal.value, signal.mask, ddof=1, about=group)
        spread = jnp.where(group.flat, 0, jnp.sqrt(variance))
        scored, dtype = group.count > 0, state["mean"].dtype
        threshold = base.at_step(share, rollouts, dtype) * state["mean"]
        keep = spread >= threshold.astype(spread.dtype)
        weight = decay * state["weight"] + 1
        batch = stats.mean(spread, scored, axis=0)[0, 0].astype(dtype)
        after = {"mean": state["mean"] + (batch - state["mean"]) / weight, "weight": weight}
        new_state = {key: jnp.where(scored.any(), after[key], state[key]) for key in state}
        masked, metrics = base.keep_groups(
            signal, keep, deviation=mean(spread, scored), threshold=mean(threshold)
        )
        return masked, new_state, metrics

    part = AdvantageTransform(name, init, update, levels=(2,), relative=True)
    return part._replace(counts_flat=True)


def mask_group_difficulty(
    low: Scheduled = 0.125,
    high: Scheduled = 0.875,
    reward: str | None = None,
    threshold: Scheduled | None = None,
) -> AdvantageTransform:
    """Masks groups whose own success rate is outside a band: too hard or too easy now.

        group p stays where low <= rate[p] <= high,  rate[p] = mean_g r[p, g]

    The rate of these G samples, so it has steps of 1 / G and is read from the rewards that it
    judges: with low above 0 an unlucky group of an easy prompt goes too, and lucky groups of hard
    prompts stay. low 0 and high 1 mask nothing.

    Args:
      low, high: of the band, both ends included; numbers or functions of the step.
      reward: name of the reward or field [P, G] that says success, NaN = not judged; None: the
        signal, so put it before the baseline.
      threshold: the lowest value that is a success; None: values are 0 or 1, or credit between.

    Signal: [P, G] -> [P, G], mask cut; groups of which no sample is judged go.
    Raises: InputError on token-level values [P, G, T], on a band without room or beyond [0, 1].
    Metrics: masked_groups, the share of groups with a sample that went; rate, its mean.
    Source: the difficulties of arXiv 2605.28388, where overly hard samples harm; the band is ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(mask_group_difficulty(), [[1.0, 0.0], [0.0, 0.0]])[1].tolist()
    [[True, True], [False, False]]
    """
    if not callable(low) and not callable(high) and not low <= high:
        raise InputError(f"mask_group_difficulty: low = {low} is above high = {high}: swap them")
    base.check_share("mask_group_difficulty", low=low, high=high)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        successes = base.samples("mask_group_difficulty", reward, signal, rollouts)
        value = successes.value
        if threshold is not None:
            value = (value >= base.at_step(threshold, rollouts, value.dtype)).astype(value.dtype)
        rate = stats.mean(value, successes.mask)
        judged = successes.mask.any(axis=1, keepdims=True)
        bounds = [base.at_step(bound, rollouts, rate.dtype) for bound in (low, high)]
        keep = judged & (rate >= bounds[0]) & (rate <= bounds[1])
        return base.keep_groups(signal, keep, rate=mean(rate, judged))

    return base.stateless(
        "mask_group_difficulty", apply, needs=base.needed_fields(reward), levels=(2,)
    )


def _without_samples(signal: Signal, leaves: Array) -> tuple[Signal, Metrics]:
    """Masks the samples that leave, [P, G]; reports their share of the unmasked ones."""
    stays = ~leaves.reshape(*leaves.shape, *(1,) * (signal.mask.ndim - 2))
    masked = dataclasses.replace(signal, mask=signal.mask & stays)
    return masked, {"masked": mean(leaves, _sample_mask(signal))}


def _sample_mask(signal: Signal) -> Array:
    """The samples with an unmasked value, [P, G]."""
    return signal.mask.any(-1) if signal.mask.ndim == 3 else signal.mask


def _check_low_variance(threshold, drop, field, positions, reduce) -> None:
    where = "mask_low_variance"
    if (threshold is None) == (drop is None):
        raise InputError(
            f"{where}: threshold = {threshold}, drop = {drop}: give exactly one of the two, a"
            " variance that must be exceeded or the share of groups that goes"
        )
    base.check_at_least(where, 0, threshold=threshold)
    base.check(where, "a share from 0 to below 1", lambda share: 0 <= share < 1, drop=drop)
    base.check_choice(where, ("max", "mean"), reduce=reduce)
    if positions is not None and field is None:
        raise InputError(f"{where}: positions = {positions!r} belongs to a field: name it")


def _compared(
    field: str | None, positions: str | None, signal: Signal, rollouts: Rollouts
) -> tuple[Array, Array]:
    """What is compared across samples, [P, G] or [P, G, J], and where it counts."""
    value = signal.value
    if field is not None:
        value = base.read_field("mask_low_variance", field, rollouts)
    shape = signal.value.shape
    if value.ndim not in (2, 3) or value.shape[:2] != shape:
        raise InputError(
            f"mask_low_variance: {field!r} has shape {value.shape}, expected [P, G] or [P, G, J]"
            f" with [P, G] = {shape}"
        )
    value = base.floating(value)
    mask = jnp.isfinite(value)
    mask = mask & (signal.mask if value.ndim == 2 else signal.mask[..., None])
    if positions is not None:
        mask = mask & _positions(positions, value, rollouts)
    return value, mask


def _positions(name: str, value: Array, rollouts: Rollouts) -> Array:
    """Where a field counts, in its shape: given for all samples of a group, or for each."""
    if name == "token_mask":
        counts = base.read("mask_low_variance", rollouts, name)
    else:
        counts = base.read_field("mask_low_variance", name, rollouts)
    shared = (value.shape[0], *value.shape[2:])
    if counts.shape not in (shared, value.shape):
        raise InputError(
            f"mask_low_variance: positions {name!r} has shape {counts.shape}, expected {shared}"
            f" or {value.shape}"
        )
    counts = counts if counts.shape == value.shape else counts[:, None]
    return jnp.broadcast_to(counts.astype(bool), value.shape)


def _spread(value: Array, mask: Array, reduce: str) -> Array:
    """The variance over samples, [P, 1]: of each position, then over positions."""
    spread = stats.cross_rollout_variance(value, mask)
    if value.ndim == 2:
        return spread
    compared = stats.count(mask) >= 2
    if reduce == "max":
        return jnp.where(compared, spread, 0).max(axis=2, initial=0)
    return stats.mean(spread, compared, axis=2)[..., 0]


def _above_lowest(spread: Array, scored: Array, drop) -> Array:
    """Which groups stay when a share of those with a sample goes, and the flat ones."""
    number = scored.sum(dtype=spread.dtype)
    # A share such as 0.29 of 100 groups is 29 of them, whatever the product rounds to.
    drop_count = jnp.floor(drop * number * (1 + 1e-6)).astype(jnp.int32)
    ranked = jnp.sort(jnp.where(scored, spread, jnp.inf).reshape(-1))
    cutoff = ranked[jnp.clip(drop_count, 0, ranked.size - 1)]
    return (spread >= cutoff) & (spread > 0)
