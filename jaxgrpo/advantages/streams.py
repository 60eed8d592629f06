"""Transforms that know several rewards: each reward is a stream until one signal is made of them.

First the weighted sums and what works on streams before them; then a gate, a condition that is no
reward; last, other ways to make one signal of several rewards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base, stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, Streams
from jaxgrpo.advantages.chains import chain
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.core.metrics import Metrics, accumulate_dtype, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

Weights = Mapping[str, Scheduled]
"""Name of a reward = its weight. Where a recipe has None, every reward counts with weight 1."""
_MODES = ("group", "rollout", "floor")


def sum_rewards(**weights: Scheduled) -> AdvantageTransform:
    """Adds the weighted streams to one signal.

        r[p, g] = sum_name weight[name] * stream[name][p, g]

    Without weights every stream weighs 1, and in the chain of a config what its reward says
    (`weight`). With weights each stream must be named: one that is not meant to count gets weight
    0, and is then not read at all. A sample that one of the summed streams could not score is
    masked: a sum over the others would be another reward.

    Args:
      weights: name of the stream = weight, a number or a function of the step.

    Streams: [P, G] each -> Signal [P, G], unmasked where all summed streams are.
    Raises: InputError (a ValueError) on weights without a stream and streams without a weight.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate([sum_rewards(a=1.0, b=0.5)], {"a": [[1.0, 0.0]], "b": [[1.0, 1.0]]})[0].tolist()
    [[1.5, 0.5]]
    """

    return _sum("sum_rewards", weights, operator.and_)


def sum_scored(**weights: Scheduled) -> AdvantageTransform:
    """Adds the weighted streams to one signal; what a stream could not score counts 0 in it.

        r[p, g] = sum_name weight[name] * stream[name][p, g]     over the streams that scored it

    `sum_rewards` masks such a sample instead: its sum is another reward than that of its group.
    A sample that none of them could score is masked.

    Args:
      weights: name of the stream = weight, a number or a function of the step; none: all 1.

    Streams: [P, G] each -> Signal [P, G], unmasked where any summed stream is.
    Raises: InputError (a ValueError) on weights without a stream and streams without a weight.
    Source: TRL 1.16, which adds what is not NaN. Ours only in `like_trl`.

    >>> from jaxgrpo.advantages import evaluate
    >>> rewards = {"a": [[1.0, 0.0]], "b": [[float("nan"), 1.0]]}
    >>> evaluate([sum_scored()], rewards)[0].tolist()
    [[1.0, 1.0]]
    """

    return _sum("sum_scored", weights, operator.or_)


def sums_scored(chain: AdvantageTransform) -> bool:
    """Whether a chain adds up rewards as `sum_scored` does."""
    return any(step.name == "sum_scored" for _, step in chain.steps)


def sum_then(name: str, weights: Weights | None, *steps: AdvantageTransform) -> AdvantageTransform:
    """The recipe of that name: the weighted sum of the rewards, then the steps."""
    return chain(sum_rewards(**(weights or {})), *steps, name=name)


def per_reward(transform: AdvantageTransform) -> AdvantageTransform:
    """Applies a transform of one signal to each stream by itself, with a state of its own.

    GRPO sums and then normalises; GDPO normalises per reward and then sums:
    `chain(per_reward(chain(subtract_group_mean(), divide_by_group_std())), sum_rewards())`.
    A mask that the transform sets holds for its stream; `sum_rewards` unites them.

    Streams: [P, G] each -> the same names.  Raises: InputError on a transform that takes streams.

    >>> from jaxgrpo.advantages import evaluate, subtract_group_mean
    >>> rewards = {"a": [[1.0, 0.0]], "b": [[4.0, 2.0]]}
    >>> evaluate([per_reward(subtract_group_mean()), sum_rewards()], rewards)[0].tolist()
    [[1.5, -1.5]]
    """
    if transform.kind != "signal->signal":
        raise InputError(
            f"per_reward({transform.name}) needs a transform of one signal, but it takes the"
            " streams: put it beside per_reward in the chain"
        )
    # A chain of one re-zeroes and checks, whatever was given.
    inner = transform if transform.steps else chain(transform, name=transform.name)

    def init(spec: RolloutSpec) -> dict[str, Any]:
        return {name: inner.init(spec) for name in spec.rewards}

    def update(streams: Streams, state: Any, rollouts: Rollouts) -> tuple[Streams, Any, Metrics]:
        if set(state) != set(streams):
            raise InputError(
                f"per_reward has state for the streams {sorted(state)} but got {sorted(streams)}:"
                " use the state that init(spec) returned for these rewards"
            )
        new_streams: Streams = {}
        new_state: dict[str, Any] = {}
        metrics: Metrics = {}
        for name, stream in streams.items():
            new_streams[name], new_state[name], stream_metrics = inner.update(
                stream, state[name], rollouts
            )
            metrics |= {f"{name}/{metric}": value for metric, value in stream_metrics.items()}
        return new_streams, new_state, metrics

    name = f"per_reward_{transform.name}"
    kind = "streams->streams"
    return inner._replace(name=name, init=init, update=update, kind=kind, shrunk=None, steps=())


def stream(
    name: str, function: Callable[[Rollouts], Array], needs: tuple[str, ...] = ()
) -> AdvantageTransform:
    """Adds a stream computed from the rollouts; entries that are not finite are masked.

    So is a sample that every stream before it has masked: nothing brings it back.

    Args:
      name: of the new stream, as `sum_rewards` knows it.
      function: rollouts -> [P, G].
      needs: names of the fields that it reads.

    Streams: those given and the new one.  Raises: InputError where the name is taken.

    >>> from jaxgrpo.advantages import evaluate
    >>> added = stream("length", lambda rollouts: rollouts.token_mask.sum(-1) / 2)
    >>> evaluate([added, sum_rewards()], [[1.0, 0.0]], token_mask=[[[1, 1], [1, 0]]])[0].tolist()
    [[2.0, 0.5]]
    """

    def make(streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = function(rollouts)
        expected = next(iter(streams.values())).value.shape
        if value.shape != expected:
            raise InputError(
                f"stream {name!r} has shape {value.shape}, expected [P, G] = {expected}"
            )
        return base.finite(value, any_mask(streams)), {}

    return add_stream(f"stream_{name}", name, make, frozenset(needs))


def add_stream(
    step: str,
    name: str,
    make: Callable[[Streams, Rollouts], tuple[Signal, Metrics]],
    needs: frozenset[str],
) -> AdvantageTransform:
    """The step that adds the stream `name`, which `make` makes of those before it."""

    def apply(streams: Streams, rollouts: Rollouts) -> tuple[Streams, Metrics]:
        _check_free(name, tuple(streams))
        new_stream, metrics = make(streams, rollouts)
        return {**streams, name: new_stream}, metrics

    accepts = lambda spec: _check_free(name, spec.rewards)  # noqa: E731
    transform = base.stateless(
        step, apply, needs=needs, kind="streams->streams", levels=(2,), accepts=accepts
    )
    return transform._replace(provides=(name,))


def any_mask(streams: Streams) -> Array:
    """The samples that a stream still has, [P, G]."""
    return functools.reduce(operator.or_, (signal.mask for signal in streams.values()))


def _check_free(name: str, streams: tuple[str, ...]) -> None:
    """Raises: InputError if there is a stream of that name already."""
    if name in streams:
        raise InputError(f"stream {name!r} exists already: {', '.join(streams)}; take another name")


def counted(step: str, weights: Weights, streams: tuple[str, ...]) -> dict[str, Scheduled]:
    """The streams that are summed, with their weights: weight 0 leaves a stream unread.

    Args:
      step: opens the message of an error.
      weights: of every stream, or of none (all count with weight 1).

    Raises: InputError on weights without a stream and streams without a weight.
    """
    for name in weights:
        if name not in streams:
            raise InputError(
                f"{step}: weight {name!r} has no reward of that name: {suggest(name, streams)}"
            )
    for name in streams:
        if weights and name not in weights:
            raise InputError(
                f"{step}: reward {name!r} has no weight: name every reward"
                f" (weight 0 leaves it out) or none; weights: {', '.join(weights)}"
            )
    all_weights = {name: weights.get(name, 1.0) for name in streams}
    return {name: weight for name, weight in all_weights.items() if callable(weight) or weight != 0}


def common_dtypes(streams: Streams) -> tuple[Any, Any]:
    """(dtype of one signal made of the streams, dtype to add them in).

    Streams of one dtype give that dtype; of several, the widest that sums are taken in.
    """
    dtypes = {stream.value.dtype for stream in streams.values()}
    widest = max(map(accumulate_dtype, dtypes), key=lambda dtype: dtype.itemsize)
    return (next(iter(dtypes)) if len(dtypes) == 1 else widest), widest


def rubric_gate(
    field: str = "rubric",
    mode: str = "group",
    minimum: Scheduled | None = None,
    margin: Scheduled = 0.0,
    threshold: Scheduled = 0.5,
) -> AdvantageTransform:
    """Lets through what a rubric accepts: a condition, never a reward to be climbed.

        group:    masks groups of which less than `minimum` of the judged samples passed
        rollout:  masks the samples that did not pass
        floor:    r[p, g] = min_g r[p, g] - margin where the sample did not pass

    A sample passes where field >= threshold; one that was not judged (NaN) is always masked. Put it
    before the baseline: after it, "rollout" leaves the baseline as if nothing had been refused.
    Under "floor" a group without a pass gets 0 of a baseline and stays in the loss's denominator.

    Args:
      field: name of the field or reward [P, G], 1 = passed, 0 = refused, or a grade; a reward
        that is only a gate gets weight 0 in `sum_rewards`.
      mode: "group", "rollout" or "floor".
      minimum: of mode "group": the lowest share of passes, 0 to 1; None: one pass is enough.
      margin: of mode "floor": how far below the lowest value, in units of reward, 0 or more.
      threshold: the lowest grade that passes.

    Signal: [P, G] -> [P, G], mask cut (under "floor" only where nothing was judged).
    Raises: InputError on token-level values [P, G, T], an unknown mode, options of another mode.
    Metrics: passed, the share of judged samples; masked_groups, those gone or without a pass.
    Source: DRO, arXiv 2506.13351, for the gate on groups; the exact rules are ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> evaluate(rubric_gate(mode="rollout"), [[1.0, 1.0]], rubric=[[1.0, 0.0]])[1].tolist()
    [[True, False]]
    """
    _check(mode, minimum, margin)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        grades = base.samples("rubric_gate", field, signal, rollouts)
        value, dtype = signal.value, grades.value.dtype
        passed = grades.mask & (grades.value >= base.at_step(threshold, rollouts, dtype))
        rate = stats.mean(passed.astype(dtype), grades.mask)
        feasible = rate > 0 if minimum is None else rate >= base.at_step(minimum, rollouts, dtype)
        masks = {"group": grades.mask & feasible, "rollout": passed, "floor": grades.mask}
        if mode == "floor":
            low = jnp.min(value, axis=1, keepdims=True, initial=jnp.inf, where=grades.mask)
            value = jnp.where(passed, value, low - base.at_step(margin, rollouts, value.dtype))
        _, metrics = base.keep_groups(signal, feasible, passed=mean(passed, grades.mask))
        return Signal(value=value, mask=masks[mode]), metrics

    return base.stateless("rubric_gate", apply, needs=frozenset({field}), levels=(2,))


def combine(
    function: Callable[[Streams, Rollouts], Signal],
    name: str | None = None,
    needs: tuple[str, ...] = (),
) -> AdvantageTransform:
    """Makes one signal of the streams by any function (streams, rollouts) -> signal.

    What is not finite is masked, and so is what no stream could score: a function cannot invent a
    sample. Whether a sample that only some streams scored counts is the function's to say.

    Args:
      function: ({name of the reward: Signal}, rollouts) -> Signal [P, G].
      name: of the step; None: that of the function.
      needs: names of the fields that it reads.

    Streams: [P, G] each -> Signal [P, G], mask = the function's, within that of any stream.
    Raises: InputError where the function returns anything else.

    >>> import dataclasses
    >>> def correct_if_tidy(streams, rollouts):
    ...     correct, tidy = streams["correct"], streams["tidy"]
    ...     return dataclasses.replace(
    ...         correct, value=correct.value * tidy.value, mask=correct.mask & tidy.mask
    ...     )
    >>> combine(correct_if_tidy).name
    'correct_if_tidy'
    """
    step = name or getattr(function, "__name__", "combine")

    def apply(streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        return _within(step, function(streams, rollouts), streams), {}

    return base.stateless(step, apply, needs=frozenset(needs), kind="streams->signal", levels=(2,))


def dvao(eps: Scheduled = 1e-6, **weights: Scheduled) -> AdvantageTransform:
    """The centred weighted sum, divided by the weighted sum of the standard deviations.

        a[p, g] = sum_k w_k (r_k[p, g] - mean_g r_k) / (sum_k w_k std_g r_k + eps)

    This is sum_k share_k z_k with z_k the normalised reward k and share_k = w_k std_k over the sum
    of all w_l std_l: in each group a reward counts as much as it varies there. One that is flat in
    a group (max == min) has no share in it; where all are flat, or fewer than two samples are
    scored by every counted reward, the advantage is exactly 0. Never larger than normalising the
    sum, `sum_rewards` and `divide_by_group_std(ddof=0)`: the std of a sum is at most the sum of the
    stds, with equality where the rewards move together. With one reward the two are the same.

    Args:
      eps: added to the divisor, in units of reward. A reward of this name cannot be weighed here;
        the recipe `dvao` takes weights of any name.
      weights: as those of `sum_rewards`, not negative: a negative one could make the divisor 0 or
        turn the sign (state a cost as a negative reward). A schedule below 0 counts as 0.

    Streams: [P, G] each -> Signal [P, G], unmasked where all counted streams are.
    Raises: InputError on negative weights or eps, weights without a stream, streams without one.
    Metrics: share_NAME, the mean of share_k over groups that are not flat.
    Source: DVAO, arXiv 2605.25604, as sum_k share_k z_k with population standard deviations; that
    it is one division, and eps, are ours.

    >>> from jaxgrpo.advantages import evaluate
    >>> rewards = {"a": [[1.0, 0.0]], "b": [[0.5, 0.5]]}
    >>> evaluate([dvao(eps=0.0)], rewards)[0].tolist()
    [[1.0, -1.0]]
    """
    return dvao_with_weights(weights, eps, refuses=("eps",) if weights else ())


def dvao_with_weights(
    weights: Weights, eps: Scheduled, refuses: tuple[str, ...] = ()
) -> AdvantageTransform:
    """`dvao` with the weights of rewards that may have any name but those that it `refuses`."""
    expected = "0 or more: negate the reward itself, or use sum_rewards, which takes any weight"
    named = {f"weight {name}": weight for name, weight in weights.items()}
    base.check("dvao", expected, lambda weight: 0 <= weight < float("inf"), **named)
    base.check_at_least("dvao", 0, eps=eps)

    def accepts(spec: RolloutSpec) -> None:
        for name in refuses:
            if name in spec.rewards:
                raise InputError(
                    f"dvao: a reward has the name {name}, which is an option of this part: give the"
                    ' reward another, name = "...", or take the recipe dvao'
                )
        counted("dvao", weights, spec.rewards)

    def apply(streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        dtype, sum_dtype = common_dtypes(streams)
        summed_weights = counted("dvao", weights, tuple(streams))
        all_samples = jnp.ones_like(next(iter(streams.values())).mask)
        mask = functools.reduce(
            operator.and_, (streams[name].mask for name in summed_weights), all_samples
        )
        total, spreads, terms = jnp.zeros(mask.shape, sum_dtype), {}, []
        for name, weight in summed_weights.items():
            if callable(weight):
                weight = jnp.maximum(base.at_step(weight, rollouts, sum_dtype), 0)
            value = streams[name].value.astype(sum_dtype)
            group = stats.summary(value, mask)
            terms.append(weight * value)
            # Exactly 0 in flat groups, where the mean is rounded.
            total = total + weight * jnp.where(mask & ~group.flat, group.centred(value), 0)
            std = jnp.sqrt(stats.variance(value, mask, about=group))
            spreads[name] = weight * jnp.where(group.flat, 0, std)
        if terms:  # totals that are equal but for rounding
            total = jnp.where(stats.is_flat(stats.added(terms, mask), mask), 0, total)
        spread = sum(spreads.values(), jnp.zeros((mask.shape[0], 1), sum_dtype))
        live = spread > 0
        metrics: Metrics = {
            f"share_{name}": mean(reward_spread / jnp.where(live, spread, 1), live)
            for name, reward_spread in spreads.items()
        }
        divisor = jnp.where(live, spread + base.at_step(eps, rollouts, sum_dtype), 1)
        value = jnp.where(live & mask, total / divisor, 0)
        return Signal(value=value.astype(dtype), mask=mask), metrics

    part = base.stateless("dvao", apply, kind="streams->signal", levels=(2,), accepts=accepts)
    return part._replace(relative=True, shrinks=True)


def _sum(part: str, weights: Weights, unite: Callable[[Array, Array], Array]) -> AdvantageTransform:
    """The weighted sum of the streams that count; `unite` makes one mask of two."""

    def apply(streams: Streams, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        dtype, sum_dtype = common_dtypes(streams)
        first = next(iter(streams.values()))
        terms, masks = [], []
        for name, weight in counted(part, weights, tuple(streams)).items():
            weight = base.at_step(weight, rollouts, sum_dtype)
            terms.append(weight * streams[name].value.astype(sum_dtype))
            masks.append(streams[name].mask)
        if not terms:
            return Signal(value=jnp.zeros_like(first.value), mask=jnp.ones_like(first.mask)), {}
        mask = functools.reduce(unite, masks)
        return Signal(value=stats.added(terms, mask).astype(dtype), mask=mask), {}

    accepts = lambda spec: counted(part, weights, spec.rewards)  # noqa: E731
    return base.stateless(part, apply, kind="streams->signal", levels=(2,), accepts=accepts)


def _check(mode: str, minimum: Scheduled | None, margin: Scheduled) -> None:
    base.check_choice("rubric_gate", _MODES, mode=mode)
    if minimum is not None and mode != "group":
        raise InputError(f"rubric_gate: minimum = {minimum} belongs to mode 'group', not {mode!r}")
    share = "a share above 0, up to 1"
    base.check("rubric_gate", share, lambda minimum: 0 < minimum <= 1, minimum=minimum)
    base.check("rubric_gate", "0 or more", lambda margin: margin >= 0, margin=margin)
    if margin and not callable(margin) and mode != "floor":
        raise InputError(f"rubric_gate: margin = {margin} belongs to mode 'floor', not {mode!r}")


def _within(step: str, signal: Any, streams: Streams) -> Signal:
    """What a function made of the streams, masked where it is not finite or nothing was scored."""
    expected = next(iter(streams.values())).value.shape
    if not isinstance(signal, Signal):
        raise InputError(
            f"{step} returned {type(signal).__name__}, expected a Signal: return"
            " Signal(value=..., mask=...)"
        )
    value, mask = base.as_arrays(step, signal)
    if value.shape != expected:
        raise InputError(
            f"{step} returned values of shape {value.shape}, expected [P, G] = {expected}"
        )
    return base.finite(value, mask & any_mask(streams))
