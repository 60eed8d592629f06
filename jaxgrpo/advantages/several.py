"""Several rewards made one signal in other ways than a plain sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, Streams, at_step, check_at_least
from jaxgrpo.advantages.streams import common_dtypes, counted
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal


def combine(
    function: Callable[[Streams, Rollouts], Any],
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

    def update(streams: Streams, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        return _within(step, function(streams, rollouts), streams), state, {}

    return AdvantageTransform(
        step, lambda spec: (), update, frozenset(needs), "streams->signal", levels=(2,)
    )


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
    """
    if weights:
        return dvao_of(weights, eps)._replace(init=partial(_refuse_eps, weights))
    return dvao_of(weights, eps)


def dvao_of(weights: Mapping[str, Scheduled], eps: Scheduled) -> AdvantageTransform:
    """`dvao` with the weights of rewards that may have any name."""
    _check_weights(weights)
    check_at_least("dvao", 0, eps=eps)

    def init(spec: RolloutSpec) -> tuple[()]:
        counted("dvao", weights, spec.rewards)
        return ()

    def update(streams: Streams, state: Any, rollouts: Rollouts) -> tuple[Signal, Any, Metrics]:
        dtype, sum_dtype = common_dtypes(streams)
        mask, parts = _weighed(
            counted("dvao", weights, tuple(streams)), streams, rollouts, sum_dtype
        )
        total = sum((part for part, _ in parts.values()), jnp.zeros(mask.shape, sum_dtype))
        spreads = {name: spread for name, (_, spread) in parts.items()}
        spread = sum(spreads.values(), jnp.zeros((mask.shape[0], 1), sum_dtype))
        live = spread > 0
        metrics: Metrics = {
            f"share_{name}": mean(own / jnp.where(live, spread, 1), live)
            for name, own in spreads.items()
        }
        divisor = jnp.where(live, spread + at_step(eps, rollouts, sum_dtype), 1)
        value = jnp.where(live & mask, total / divisor, 0)
        return Signal(value=value.astype(dtype), mask=mask), state, metrics

    return AdvantageTransform(
        "dvao", init, update, kind="streams->signal", levels=(2,), relative=True
    )


def _within(step: str, made: Any, streams: Streams) -> Signal:
    """What a function made of the streams, masked where it is not finite or nothing was scored."""
    expected = next(iter(streams.values())).value.shape
    if not isinstance(made, Signal):
        raise InputError(
            f"{step} returned {type(made).__name__}, expected a Signal: return"
            " Signal(value=..., mask=...)"
        )
    if made.value.shape != expected or made.mask.shape != expected:
        raise InputError(
            f"{step} returned value {made.value.shape} and mask {made.mask.shape},"
            f" expected [P, G] = {expected}"
        )
    scored = jnp.zeros(expected, bool)
    for stream in streams.values():
        scored = scored | stream.mask
    mask = made.mask.astype(bool) & scored & jnp.isfinite(made.value)
    return Signal(value=jnp.where(mask, made.value, 0), mask=mask)


def _refuse_eps(weights: Mapping[str, Scheduled], spec: RolloutSpec) -> tuple[()]:
    if "eps" in spec.rewards:
        raise InputError(
            "dvao: a reward has the name eps, which is an option of this part: give the reward"
            ' another, name = "...", or take the recipe dvao'
        )
    counted("dvao", weights, spec.rewards)
    return ()


def _check_weights(weights: Mapping[str, Scheduled]) -> None:
    for name, weight in weights.items():
        if not callable(weight) and not 0 <= weight < float("inf"):
            wrong = "is negative" if weight < 0 else "is no weight"
            raise InputError(
                f"dvao: weight {name} = {weight:g} {wrong}, expected 0 or more: negate the"
                " reward itself, or use sum_rewards, which takes any weight"
            )


def _weighed(
    weights: dict[str, Scheduled], streams: Streams, rollouts: Rollouts, dtype: Any
) -> tuple[Array, dict[str, tuple[Array, Array]]]:
    """(mask, name -> (weight * centred reward, weight * its deviation)) where all are scored."""
    mask = jnp.ones_like(next(iter(streams.values())).mask)
    for name in weights:
        mask = mask & streams[name].mask
    parts: dict[str, tuple[Array, Array]] = {}
    for name, weight in weights.items():
        if callable(weight):
            weight = jnp.maximum(at_step(weight, rollouts, dtype), 0)
        value = streams[name].value.astype(dtype)
        group = stats.summary(value, mask)
        # Exactly 0 in flat groups, where the mean is rounded.
        centred = jnp.where(mask & ~group.flat, value - group.mean, 0)
        spread = jnp.where(group.flat, 0, stats.std(value, mask, about=group))
        parts[name] = weight * centred, weight * spread
    return mask, parts
