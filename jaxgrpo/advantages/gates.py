"""Gates: hard conditions on samples and groups that are no reward."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, stateless
from jaxgrpo.advantages.reading import samples
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Metrics, mean
from jaxgrpo.core.types import Rollouts, Signal

_MODES = ("group", "rollout", "floor")


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

    A sample passes where field >= threshold; one that was not judged (NaN) is always masked. Stand
    before the baseline: behind it, "rollout" leaves the baseline as if nothing had been refused.
    Under "floor" a group without a pass is flat, so a baseline makes it exactly 0, and it still
    counts in the loss's denominator; the other modes take it out.

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
    """
    _check(mode, minimum, margin)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        read = samples("rubric_gate", field, signal, rollouts)
        passed = read.mask & (read.value >= at_step(threshold, rollouts, read.value.dtype))
        feasible = passed.any(axis=1, keepdims=True)
        if minimum is not None:
            share = stats.mean(passed.astype(read.value.dtype), read.mask)
            feasible = share >= at_step(minimum, rollouts, share.dtype)
        masks = {"group": read.mask & feasible, "rollout": passed, "floor": read.mask}
        value = signal.value
        if mode == "floor":
            below = at_step(margin, rollouts, value.dtype)
            value = jnp.where(passed, value, _lowest(value, read.mask) - below)
        gone = mean(~feasible, signal.mask.any(axis=1, keepdims=True))
        metrics: Metrics = {"passed": mean(passed, read.mask), "masked_groups": gone}
        return Signal(value=value, mask=masks[mode]), metrics

    return stateless("rubric_gate", apply, needs=frozenset({field}), levels=(2,))


def _lowest(value: Array, mask: Array) -> Array:
    """The lowest unmasked value of each group, 0 where there is none."""
    low, _ = stats.extremes(value, mask)
    return jnp.where(jnp.isfinite(low), low, 0)


def _check(mode: str, minimum: Scheduled | None, margin: Scheduled) -> None:
    if mode not in _MODES:
        raise InputError(f"rubric_gate: mode = {mode!r}, expected one of {', '.join(_MODES)}")
    if minimum is not None and mode != "group":
        raise InputError(f"rubric_gate: minimum = {minimum} belongs to mode 'group', not {mode!r}")
    if isinstance(minimum, (int, float)) and not 0 < minimum <= 1:
        raise InputError(f"rubric_gate: minimum = {minimum}, expected a share above 0, up to 1")
    if callable(margin):
        return
    if margin < 0:
        raise InputError(f"rubric_gate: margin = {margin}, expected 0 or more")
    if margin and mode != "floor":
        raise InputError(f"rubric_gate: margin = {margin} belongs to mode 'floor', not {mode!r}")
