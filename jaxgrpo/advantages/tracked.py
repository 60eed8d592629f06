"""Parts with memory: success estimates of every row of the data, and running means over batches.

A baseline or filter that had seen its own sample would be biased, so each part reads its state
first and updates it afterwards. State is saved with the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

_INSTEAD = (
    "train on a data set of known size, or begin with init(spec_of(rollouts, num_rows=...));"
    " ema_baseline needs no rows"
)


def subtract_tracked_success(
    keep: Scheduled = 0.96,
    drift: str | None = None,
    half_life: float = 0.06,
    low: float = 0.875,
    high: float = 0.96,
    initial: float | str = 0.5,
    count: float = 8.0,
) -> AdvantageTransform:
    """Subtracts the tracked success rate of each prompt's own row.

        a[p, g] = r[p, g] - v[row p],   v = alpha / (alpha + beta)    from before this batch
        alpha <- rho alpha + sum_g r[p, g],   beta <- rho beta + sum_g (1 - r[p, g])

    With n scored samples and N = alpha + beta that is v <- v + n (mean_g r - v) / (rho N + n): the
    rewards' mean with n new observations in a memory of 1 / (1 - rho) visits. One sample per
    prompt is the paper's case; the samples of a group are observations of one policy, so a visit
    forgets once, however many they are. A row drawn twice in a batch is visited twice, in the order
    of the prompts; both are judged by the v of before. A group without a scored sample is no visit,
    nor one that `rollout.refill` discards. Rewards outside [0, 1] are tracked alike, by their mean.

    Args:
      keep: rho, the share of old counts that a visit keeps, in [0, 1], or a function of the step;
        not read with `drift`.
      drift: a field [P], how far the policy has moved on the prompt since its last visit (the
        paper: the mean absolute difference of log-probs on the last completion, which training
        measures as "drift"). Then rho is clip(2^(-drift / half_life), low, high); high where that
        is not finite.
      half_life: the drift that halves the counts, in nats.
      low, high: bounds of rho under `drift`.
      initial: v of a row before its first visit: a number, or a field [P] such as a data column
        of success rates measured beforehand (the paper: of 8 samples); 0.5 if it is not finite.
      count: N of a row before its first visit, in samples; above 0.

    Signal: [P, G] -> [P, G], mask unchanged.  State: alpha, beta [rows], 0 before the first visit.
    Raises: InputError on a stream of data, whose rows never return.
    Metrics, means over the visits: estimate, v; kept, rho; lag, mean_g r - v, in which the noise of
    samples averages out; error, |mean_g r - v|, in which it does not.
    Source: SPO, arXiv 2509.13232; its code keeps only the last of two visits in a batch.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(subtract_tracked_success(), [[1.0, 0.0]])[0].tolist()
    [[0.5, -0.5]]
    """
    tracker = _Tracker(keep, drift, half_life, low, high, initial, count)
    tracker.check()
    init = base.row_state("subtract_tracked_success", _INSTEAD, "alpha", "beta")
    needs = base.needed_fields(drift, initial if isinstance(initial, str) else None)
    part = AdvantageTransform("subtract_tracked_success", init, tracker.update, needs)
    return part._replace(levels=(2,), ordered=True)


def mask_difficulty_band(
    low: float = 0.125,
    high: float = 0.875,
    threshold: Scheduled = 0.5,
    prior: Sequence[float] = (0.5, 0.5),
    keep: Scheduled = 1.0,
) -> AdvantageTransform:
    """Masks the groups of rows whose running success estimate is outside a band.

        estimate = (successes + a0) / (samples + a0 + b0)    of the row, from before this batch
        kept where low <= estimate <= high

    Rare successes on prompts that are too hard are lucky ones, and the largest advantages. The
    estimate drifts as the policy learns, so a row comes and goes; what is masked is still counted.
    A row not seen yet is at a0 / (a0 + b0). No group in the band is legal: a step without a live
    sample moves nothing. low = 0, high = 1 masks nothing. Refused with `rollout.refill`.

    Args:
      low, high: the band of success rates, 0 <= low <= high <= 1.
      threshold: the lowest value that is a success; a number or a function of the step.
      prior: a0, b0, successes and failures that every row is thought to have had; above 0.
      keep: share of the old counts that a batch keeps for the rows in it, in [0, 1]; 1 counts
        everything ever seen.

    Signal: [P, G] -> [P, G], mask cut.  Put it on rewards, before any baseline.
    State: successes, samples [rows].  Raises: InputError on a stream of data.
    Metrics: masked_groups; too_hard, too_easy (below, above): shares of groups with a sample.
    Source: ours; that overly hard samples hurt: arXiv 2605.28388.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(mask_difficulty_band(), [[1.0, 0.0]])[1].tolist()
    [[True, True]]
    """
    _check_band("mask_difficulty_band", low, high, keep, prior)

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        row = base.read("mask_difficulty_band", rollouts, "row")
        successes, samples = state["successes"][row], state["samples"][row]
        estimate = ((successes + prior[0]) / (samples + sum(prior)))[:, None]
        hard, easy = estimate < low, estimate > high
        in_band, scored = ~(hard | easy), signal.mask.any(axis=1, keepdims=True)
        success = signal.value >= base.at_step(threshold, rollouts, signal.value.dtype)
        share = base.at_step(keep, rollouts, samples.dtype)
        new_state = _count(state, row, share, success, base.fresh_mask(signal.mask, rollouts))
        too_hard, too_easy = mean(hard, scored), mean(easy, scored)
        masked, metrics = base.keep_groups(signal, in_band, too_hard=too_hard, too_easy=too_easy)
        return masked, new_state, metrics

    init = base.row_state("mask_difficulty_band", _INSTEAD, "successes", "samples")
    return AdvantageTransform("mask_difficulty_band", init, update, levels=(2,), counts_flat=True)


def ema_baseline(decay: Scheduled = 0.9, initial: float = 0.0) -> AdvantageTransform:
    """Subtracts the running mean of the mean rewards of earlier batches.

        a[p, g] = r[p, g] - b                       b as it was before this batch
        n <- decay n + 1,   b <- b + (m - b) / n    m the mean of this batch's unmasked values

    The weights of the batches are decay^age over their sum, from the first batch on: no start-up
    bias, and the second batch already has the mean of the first. A batch without a scored sample
    changes nothing. Samples of earlier steps (`experience.share`) do not count for m: b is what
    the policy earns, with `rollout.refill` in groups trained on, as in `subtract_tracked_success`.

    Args:
      decay: weight of the past, in [0, 1): 0 remembers the last batch only; a number or a
        function of the step.
      initial: the baseline of the first batch, in units of reward. 0 assumes nothing about rewards
        and is unbiased; 0.5 suits rewards in {0, 1}.

    Signal: [P, G] -> [P, G], mask unchanged.  State: mean [], weight [].  Metrics: baseline.
    Source: Williams 1992, REINFORCE with a reinforcement-comparison baseline.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(ema_baseline(initial=0.5), [[1.0, 0.0]])[0].tolist()
    [[0.5, -0.5]]
    """
    base.check("ema_baseline", "0 or more and below 1", lambda share: 0 <= share < 1, decay=decay)

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        dtype = state["mean"].dtype
        baseline = jnp.where(state["weight"] > 0, state["mean"], jnp.asarray(initial, dtype))
        value = stats.widen(signal.value)
        centred = value - baseline.astype(value.dtype)
        weight = base.at_step(decay, rollouts, dtype) * state["weight"] + 1
        fresh = dataclasses.replace(signal, mask=base.fresh_mask(signal.mask, rollouts))
        batch = stats.mean(fresh.value.reshape(-1), fresh.mask.reshape(-1), axis=0)[0]
        batch = batch.astype(dtype)
        new_state = {"mean": state["mean"] + (batch - state["mean"]) / weight, "weight": weight}
        centred = base.with_value(signal, centred)
        return centred, _unless_empty(fresh, new_state, state), {"baseline": mean(baseline)}

    return AdvantageTransform("ema_baseline", _zeros("mean", "weight"), update, levels=(2,))


def divide_by_running_scale(
    decay: Scheduled = 0.99, eps: float = 1e-8, initial: float | None = None
) -> AdvantageTransform:
    """Divides by the running standard deviation of the values of earlier batches.

        a = x / (s + eps),   s^2 the variance of earlier values, those of a batch weighing decay^age

    One number for the whole batch, fixed before it: the expected gradient keeps its direction. An
    s of exactly 0 (all values were equal) divides by 1. A batch whose values are all equal counts
    with variance exactly 0. Samples of earlier steps (`experience.share`) count, and discarded ones
    (`rollout.refill`) do not: s is the scale of what an update sees.

    Args:
      decay: weight of the past, in [0, 1); a number or a function of the step.
      eps: added to s, in units of reward.
      initial: s of the first batch; None takes the deviation of that batch itself, so that the
        scale of the rewards never matters.

    Signal: [P, G] or [P, G, T], mask unchanged.  State: mean, variance, weight, each [].
    Metrics: scale, the s that was used.
    Source: reward scaling of common PPO codes (Engstrom et al. 2020, arXiv 2005.12729), which
    takes the deviation of discounted returns and includes the present batch.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(divide_by_running_scale(initial=2.0), [[1.0, 0.0]])[0].tolist()
    [[0.5, 0.0]]
    """
    name = "divide_by_running_scale"
    base.check(name, "0 or more and below 1", lambda share: 0 <= share < 1, decay=decay)
    base.check_divisor(name, eps)
    base.check(name, "above 0 or None", lambda scale: scale > 0, initial=initial)

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        dtype = state["mean"].dtype
        moments = _whole_moments(signal, dtype)
        first = jnp.sqrt(moments[1]) if initial is None else jnp.asarray(initial, dtype)
        scale = jnp.where(state["weight"] > 0, jnp.sqrt(state["variance"]), first)
        divisor = jnp.where(scale > 0, scale + eps, 1)
        value = stats.widen(signal.value)
        new_signal = base.with_value(signal, value / divisor.astype(value.dtype))
        new_state = _mixed(state, base.at_step(decay, rollouts, dtype), *moments)
        return new_signal, _unless_empty(signal, new_state, state), {"scale": mean(divisor)}

    return AdvantageTransform(name, _zeros("mean", "variance", "weight"), update)


def smooth_standardise(eps: Scheduled = 1e-6) -> AdvantageTransform:
    """Normalises by the group and by all that the row has seen, and takes what is nearer to 0.

        now = (r - mean_g r) / (std_g r + eps),   all = (r - M) / (S + eps)
        a   = the smaller in size of  all / i + (1 - 1/i) now  and  now / i + (1 - 1/i) all

    i counts the visits of the row, this one too. M is the mean of its groups' means, S^2 the mean
    of their variances and the variance of their means, this group's too: what was learnt on a row
    does not jump with the luck of a group. A flat group has now = 0 and teaches by its distance
    from M, unless the row was always so. A row drawn twice in a batch is judged by the visits
    before both. A group with fewer than two scored samples is 0 and no visit. What is remembered
    leaves out samples of earlier steps (`experience.share`). Refused with `rollout.refill`.

    Args:
      eps: added to both deviations, in units of reward; a deviation of exactly 0 gives 0.

    Signal: [P, G] -> [P, G], mask unchanged.  State: visits, mean, squares (i S^2), each [rows].
    Raises: InputError on a stream of data, whose rows never return, and on groups of one sample.
    Metrics: visits, the mean of i; flat_with_signal, the share of flat groups that teach.
    Source: smooth advantage standardisation of Dynamic Clipping Policy Optimization (DCPO), Yang et
    al. 2025, arXiv 2509.02333, with the deviations (by n - 1) of its code, which has no eps.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(smooth_standardise(0.0), [[1.0, 0.0, 0.5]])[0].tolist()  # the first visit
    [[1.0, -1.0, 0.0]]
    """
    name = "smooth_standardise"
    base.check_divisor(name, eps)

    def update(signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        row = base.read(name, rollouts, "row")
        group, variance = _spread(signal.value, signal.mask)
        drawn, drawn_variance = _spread(signal.value, base.fresh_mask(signal.mask, rollouts))
        visit, dtype = group.count > 1, state["mean"].dtype
        earlier = _Visits(*(state[key][row][:, None] for key in ("visits", "mean", "squares")))
        after = earlier.joined(*(leaf.astype(dtype) for leaf in (visit, group.mean, variance)))
        number = jnp.maximum(after.visits, 1)
        small = base.at_step(eps, rollouts, dtype)
        value = stats.widen(signal.value)
        current = _over_deviation(group.centred(value), jnp.where(group.flat, 0, variance), small)
        overall = _over_deviation(value - after.mean, after.squares / number, small)
        smooth = jnp.where(visit, _nearer_to_0(current, overall, number), 0)
        moved = ((smooth != 0) & signal.mask).any(1, keepdims=True)
        shares = {"flat_with_signal": mean(moved, visit & group.flat)}
        metrics: Metrics = {"visits": mean(number, visit), **shares}
        new_state = _with_visits(state, row, drawn.count > 1, drawn.mean, drawn_variance)
        return base.with_value(signal, smooth), new_state, metrics

    init = base.row_state(name, _INSTEAD, "visits", "mean", "squares", samples=2)
    return AdvantageTransform(name, init, update, levels=(2,), counts_flat=True)


def _spread(value: Array, mask: Array) -> tuple[stats.Summary, Array]:
    """Summary and variance (by n - 1) of each group."""
    group = stats.summary(value, mask)
    return group, stats.variance(value, mask, ddof=1, about=group)


class _Visits(NamedTuple):
    """Groups of a row: how many, the mean of their means, and i S^2 as `smooth_standardise` has."""

    visits: Array
    mean: Array
    squares: Array

    def joined(self, number: Array, mean: Array, squares: Array) -> _Visits:
        """With `number` further groups of that mean of means and those squares."""
        total = self.visits + number
        gap, share = mean - self.mean, number / jnp.maximum(total, 1)
        squares = jnp.where(number > 0, squares, 0) + jnp.square(gap) * self.visits * share
        return _Visits(total, self.mean + gap * share, self.squares + squares)


def _with_visits(
    state: Any, row: Array, visit: Array, mean: Array, variance: Array
) -> dict[str, Array]:
    """The state after a batch's groups [P, 1], several of one row at once."""
    dtype, empty = state["mean"].dtype, jnp.zeros_like(state["mean"])

    def by_row(values: Array) -> Array:
        return empty.at[row].add(jnp.where(visit, values, 0).astype(dtype)[:, 0], mode="drop")

    number = by_row(jnp.ones_like(mean))
    # Sums about the highest mean of a row: groups that are equal have no square.
    highest = (empty - jnp.inf).at[row].max(jnp.where(visit, mean, -jnp.inf).astype(dtype)[:, 0])
    highest = jnp.where(number > 0, highest, 0)
    apart = mean - highest[row][:, None].astype(mean.dtype)
    gap = by_row(apart) / jnp.maximum(number, 1)
    within = by_row(variance + jnp.square(apart)) - number * jnp.square(gap)
    old = _Visits(state["visits"], state["mean"], state["squares"])
    return old.joined(number, highest + gap, jnp.maximum(within, 0))._asdict()


def _nearer_to_0(current: Array, overall: Array, number: Array) -> Array:
    """Of both mixtures of two values, by the number of visits, the smaller in size."""
    mixed = overall / number + (1 - 1 / number) * current
    mirror = current / number + (1 - 1 / number) * overall
    return jnp.where(jnp.abs(mixed) < jnp.abs(mirror), mixed, mirror)


def _over_deviation(value: Array, variance: Array, eps: Any) -> Array:
    """value / (sqrt(variance) + eps), 0 where the variance is exactly 0."""
    deviation = jnp.sqrt(jnp.where(variance > 0, variance, 1))
    return jnp.where(variance > 0, value / (deviation + eps), 0)


class _Tracker(NamedTuple):
    """The options of `subtract_tracked_success`, and what it does with them."""

    keep: Scheduled
    drift: str | None
    half_life: float
    low: float
    high: float
    initial: float | str
    count: float

    def check(self) -> None:
        name = "subtract_tracked_success"
        _check_band(name, self.low, self.high, self.keep)
        base.check(
            name, "above 0", lambda number: number > 0, half_life=self.half_life, count=self.count
        )
        rate = None if isinstance(self.initial, str) else self.initial
        base.check(name, "a rate in [0, 1] or a field's name", lambda r: 0 <= r <= 1, initial=rate)

    def update(self, signal: Signal, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        row = base.read("subtract_tracked_success", rollouts, "row")
        alpha, beta = self._row_counts(state, row, rollouts)
        estimate = alpha / (alpha + beta)
        value = stats.widen(signal.value)
        centred = base.with_value(signal, value - estimate[:, None].astype(value.dtype))
        rho = self._retention(row, rollouts, alpha.dtype)
        sums = _sums(signal.value, base.fresh_mask(signal.mask, rollouts))
        success, number = (x.astype(alpha.dtype) for x in sums)
        visited = number > 0
        gap = success / jnp.maximum(number, 1) - estimate
        new_state = _visit(state, row, visited, rho, (alpha, beta), (success, number - success))
        observed = {"estimate": estimate, "kept": rho, "lag": gap, "error": jnp.abs(gap)}
        metrics: Metrics = {name: mean(value, visited) for name, value in observed.items()}
        return centred, new_state, metrics

    def _row_counts(self, state: Any, row: Array, rollouts: Rollouts) -> tuple[Array, Array]:
        """alpha and beta of each prompt's row, [P], with the prior where it was never visited."""
        alpha, beta = state["alpha"][row], state["beta"][row]
        prior = _per_prompt(self.initial, rollouts, row, alpha.dtype)
        prior = jnp.where(jnp.isfinite(prior), prior, 0.5)
        fresh = (alpha == 0) & (beta == 0)
        return (
            jnp.where(fresh, self.count * prior, alpha),
            jnp.where(fresh, self.count * (1 - prior), beta),
        )

    def _retention(self, row: Array, rollouts: Rollouts, dtype: Any) -> Array:
        """rho of each prompt, [P]."""
        if self.drift is None:
            rho = jnp.asarray(base.at_step(self.keep, rollouts, dtype), dtype)
            return jnp.broadcast_to(rho, row.shape)
        drift = _per_prompt(self.drift, rollouts, row, dtype)
        rho = jnp.clip(jnp.exp2(-drift / self.half_life), self.low, self.high)
        return jnp.where(jnp.isfinite(drift), rho, self.high)


@jax.jit  # called outside of one, the scan's levels would be a small program each
def _visit(
    state: dict[str, Array],
    row: Array,
    visited: Array,
    rho: Array,
    old_counts: tuple[Array, Array],
    increments: tuple[Array, Array],
) -> dict[str, Array]:
    """x[row p] <- rho[p] x[row p] + increments[p], one prompt p after the other, without a loop.

    Such steps compose: (rho, a) then (rho', a') is (rho rho', rho' a + a'). Sorted by row, a scan
    that begins again at each row leaves the whole composition at the row's last prompt.

    Args:
      old_counts: alpha and beta of each prompt's row, [P]; equal for prompts of one row.
      increments: what a visit adds, [P].
    """
    number = state["alpha"].shape[0]
    row = jnp.where(visited, row, number)  # sorted to the end, and dropped by the scatter
    order = jnp.argsort(row, stable=True)
    row = row[order]
    differs = row[1:] != row[:-1]
    edge = jnp.ones(1, bool)
    begins, ends = jnp.concatenate([edge, differs]), jnp.concatenate([differs, edge])

    def compose(left: Any, right: Any) -> Any:
        (begin, rho, a, b), (begins_again, rho_2, a_2, b_2) = left, right
        return (
            begin | begins_again,
            jnp.where(begins_again, rho_2, rho * rho_2),
            jnp.where(begins_again, a_2, rho_2 * a + a_2),
            jnp.where(begins_again, b_2, rho_2 * b + b_2),
        )

    steps = (begins, rho[order], increments[0][order], increments[1][order])
    _, rho_product, alpha, beta = jax.lax.associative_scan(compose, steps)
    target_row = jnp.where(ends, row, number)
    new_numbers = {
        "alpha": rho_product * old_counts[0][order] + alpha,
        "beta": rho_product * old_counts[1][order] + beta,
    }
    return {
        name: state[name].at[target_row].set(value, mode="drop")
        for name, value in new_numbers.items()
    }


def _count(state: Any, row: Array, keep: Any, success: Array, mask: Array) -> dict[str, Array]:
    """Adds successes and samples to their rows; rows met in this batch keep a share of theirs."""
    dtype = state["samples"].dtype

    def by_row(value: Array) -> Array:
        empty = jnp.zeros(state["samples"].shape, dtype)
        return empty.at[row].add(value.astype(dtype), mode="drop")

    won, number = _sums(success.astype(dtype), mask)
    new_samples = by_row(number)
    share = jnp.where(new_samples > 0, keep, jnp.ones((), dtype))
    return {
        "successes": share * state["successes"] + by_row(won),
        "samples": share * state["samples"] + new_samples,
    }


def _sums(value: Array, mask: Array) -> tuple[Array, Array]:
    """Sum and number of the unmasked values of each group, [P]."""
    total = jnp.where(mask, stats.widen(value), 0).sum(axis=1)
    return total, stats.count(mask)[:, 0]


def _per_prompt(option: float | str, rollouts: Rollouts, row: Array, dtype: Any) -> Array:
    """A number, or a field [P], as [P]."""
    if not isinstance(option, str):
        return jnp.full(row.shape, option, dtype)
    return base.read_field("subtract_tracked_success", option, rollouts, row.shape).astype(dtype)


def _check_band(
    name: str, low: float, high: float, keep: Scheduled, prior: Sequence[float] | None = None
) -> None:
    fits = lambda prior: len(prior) == 2 and min(prior) > 0  # noqa: E731
    base.check(name, "two counts above 0", fits, prior=prior)
    if not 0 <= low <= high <= 1:
        raise InputError(f"{name}: low = {low}, high = {high}: expected 0 <= low <= high <= 1")
    base.check_share(name, keep=keep)


def _zeros(*names: str) -> Callable[[RolloutSpec], dict[str, Array]]:
    """The `init` of a part that keeps one number under each name."""
    return lambda spec: dict.fromkeys(names, jnp.zeros((), jnp.result_type(float)))


def _mixed(state: Any, decay: Any, average: Array, variance: Array) -> dict[str, Array]:
    """The moments of what was seen and of a new batch, the old ones weighing `decay` as much."""
    weight = decay * state["weight"] + 1
    share, gap = 1 / weight, average - state["mean"]
    # Within both, and between their means; a mean of squares would cancel in float32.
    within = (1 - share) * state["variance"] + share * variance
    between = share * (1 - share) * jnp.square(gap)
    return {"mean": state["mean"] + share * gap, "variance": within + between, "weight": weight}


def _whole_moments(signal: Signal, dtype: Any) -> tuple[Array, Array]:
    """Mean and variance of all unmasked values, []; exact where they are all equal."""
    value, mask = signal.value.reshape(-1), signal.mask.reshape(-1)
    summary = stats.summary(value, mask, axis=0)
    variance = stats.variance(value, mask, axis=0, about=summary)
    return summary.mean[0].astype(dtype), variance[0].astype(dtype)


def _unless_empty(signal: Signal, new_state: Any, old_state: Any) -> Any:
    has_samples = signal.mask.any()
    return jax.tree.map(
        lambda new_leaf, old_leaf: jnp.where(has_samples, new_leaf, old_leaf), new_state, old_state
    )
