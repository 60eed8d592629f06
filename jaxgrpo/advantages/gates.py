"""Gates: hard conditions on samples and groups that are no reward."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, stateless
from jaxgrpo.advantages.reading import samples
from jaxgrpo.errors import InputError
from jaxgrpo.metrics import Metrics, mean
from jaxgrpo.types import Rollouts, Signal

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

    A sample passes where field >= threshold. One that was not judged (NaN) is masked in each mode.
    Stand before the baseline: behind it, "rollout" leaves the baseline as if nothing had been
    refused. Under "floor" a group without a pass is flat, so it gets exactly 0 behind a baseline
    and still counts in the loss's denominator; the other modes take it out. The feasible group
    with its refused samples out is `rubric_gate(mode="group")`, then `rubric_gate(mode="rollout")`.

    Args:
      field: name of the field or reward [P, G], 1 = passed, 0 = refused, or a grade. A reward
        that is only a gate gets weight 0 in `sum_rewards`.
      mode: "group", "rollout" or "floor".
      minimum: of mode "group": the lowest share of passes, 0 to 1; None: one pass is enough.
      margin: of mode "floor": how far below the lowest value, in units of reward, 0 or more.
      threshold: the lowest grade that passes.

    Signal: [P, G] -> [P, G], mask cut (under "floor" only where nothing was judged).
    Raises: InputError on token-level values [P, G, T], an unknown mode, options of another mode.
    Metrics: passed, the share of judged samples; masked_groups, of groups with a sample, under
    "floor" those without a pass.
    Source: DRO, arXiv 2506.13351, for the gate on groups; the exact rules are ours.
    """
    _check(mode, minimum, margin)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        read = samples("rubric_gate", field, signal, rollouts)
        judged = read.mask
        passed = judged & (read.value >= at_step(threshold, rollouts, read.value.dtype))
        feasible = passed.any(axis=1, keepdims=True)
        value = signal.value
        if mode == "group":
            if minimum is not None:
                share = stats.mean(passed.astype(read.value.dtype), judged)
                enough = share >= at_step(minimum, rollouts, share.dtype)
                feasible = judged.any(axis=1, keepdims=True) & enough
            mask = judged & feasible
        elif mode == "rollout":
            mask = passed
        else:
            mask = judged
            low, _ = stats.extremes(value, judged)
            floor = jnp.where(jnp.isfinite(low), low, 0) - at_step(margin, rollouts, low.dtype)
            value = jnp.where(passed, value, floor)
        scored = signal.mask.any(axis=1, keepdims=True)
        metrics = {"passed": mean(passed, judged), "masked_groups": mean(~feasible, scored)}
        return dataclasses.replace(signal, value=value, mask=mask), metrics

    return stateless("rubric_gate", apply, needs=frozenset({field}), levels=(2,))


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
