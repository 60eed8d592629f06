"""Resets of the reference to the current policy: when one is due, and what it changes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config.keys import ReferenceKeys
from jaxgrpo.core.errors import InputError, suggest
from jaxgrpo.core.scores import Score
from jaxgrpo.core.types import Learner, Params
from jaxgrpo.losses import Objective
from jaxgrpo.update.forward import Blueprint, opt_layout, trained_layout
from jaxgrpo.update.optimizer import fresh_moments


def reset_reference(learner: Learner, fresh: Callable[..., tuple[Params, Any]]) -> Learner:
    """The learner with its policy as the new reference, and nothing remembered of gradients.

    Trained parameters, the base and all else stay; KL(policy || reference) is 0 afterwards. The
    learning rate goes on along its schedule (ProRL says that the optimizer's state is reset, and
    not what becomes of a schedule). Before the first update it changes nothing.

    Args:
      fresh: `fresh_parts` for the run's optimizer, jitted or not.

    Raises: InputError where the learner has no reference.
    Source: ProRL, arXiv 2505.24864, section 3.2.
    """
    if "reference" not in learner.frozen:
        raise InputError(
            "reset_reference: the learner has no reference policy, since nothing in the run reads "
            "reference_logp; add a KL to it"
        )
    reference, moments = fresh(learner.trainable, learner.frozen["reference"], learner.opt_state)
    frozen = {**learner.frozen, "reference": reference}
    return dataclasses.replace(learner, frozen=frozen, opt_state=moments)


def fresh_parts(
    optimizer: optax.GradientTransformation, trainable: Params, reference: Params, opt_state: Any
) -> tuple[Params, Any]:
    """(reference, optimizer's state) after a reset."""
    # A copy, since the trainable parameters are donated to the next update.
    copy = lambda new, old: jnp.copy(new).astype(old.dtype)  # noqa: E731
    moments = fresh_moments(optimizer, trainable, opt_state)
    return jax.tree.map(copy, trainable, reference), moments


class Resets(NamedTuple):
    """What a run remembers of its resets, saved beside each checkpoint as JSON."""

    count: int = 0
    last: int = 0  # step of the last one; 0: none yet
    best: float | None = None  # the best evaluation so far
    stale: int = 0  # evaluations since the best one, or since the last reset

    def metrics(self, keys: ReferenceKeys) -> dict[str, float]:
        """`reference/resets`, in runs that may have some."""
        return {"reference/resets": float(self.count)} if may_reset(keys) else {}


Reset = Callable[[Learner, Resets, int, Mapping[str, float]], tuple[Learner, Resets]]
"""(learner, resets, step, the step's metrics) -> (learner, resets), where due with a new reference
"""


def make_resetter(keys: ReferenceKeys, evaluated_every: int, blueprint: Blueprint) -> Reset:
    """What the loop calls after each step, with the step's metrics and evaluation.

    Args:
      evaluated_every: `eval.every`.

    Raises: InputError where resets are asked for and nothing in the run reads a reference, or those
      by a KL and nothing measures it.
    """
    if not may_reset(keys):
        return lambda learner, resets, number, values: (learner, resets)
    if "reference" not in blueprint.policies:
        raise InputError(
            "reference: nothing in the run reads the reference's log-probs, so that a reset would "
            "do nothing; add a KL to it, or leave reference.reset_... out"
        )
    names = kl_metrics(blueprint.chain, blueprint.objective, blueprint.scores)
    if keys.reset_kl_above and not names:
        raise InputError(
            f"reference.reset_kl_above = {keys.reset_kl_above:g}: what reads the reference in this "
            "run measures no KL to it at the tokens of samples; add one, as loss.kl = { use = "
            '"k2", beta = 0.001 }, or take reference.reset_every or reset_patience'
        )
    model, mesh, optimizer = blueprint.model, blueprint.mesh, blueprint.optimizer
    layout = (trained_layout(model, mesh), opt_layout(model, mesh, optimizer))
    # What is replaced is written over: a device need not hold it twice.
    fresh = jax.jit(
        functools.partial(fresh_parts, optimizer),
        out_shardings=layout,
        donate_argnums=(1, 2),
        keep_unused=True,
    )

    def reset(
        learner: Learner, resets: Resets, number: int, values: Mapping[str, float]
    ) -> tuple[Learner, Resets]:
        # A run with more steps would not evaluate after this last one.
        if number % (evaluated_every or 1) == 0:
            resets = see(keys, resets, values)
        if not is_due(keys, resets, number, values, names):
            return learner, resets
        resets = resets._replace(count=resets.count + 1, last=number, stale=0)
        return reset_reference(learner, fresh), resets

    return reset


def see(keys: ReferenceKeys, resets: Resets, values: Mapping[str, float]) -> Resets:
    """Counts the evaluations that brought nothing better.

    A step without an evaluation changes nothing; nor does one whose value is not finite, or is not
    there, as the accuracy of a format that no sample has.
    """
    value = float(values.get(keys.reset_metric, math.nan))
    if not keys.reset_patience or not math.isfinite(value):
        return resets
    if is_better(value, resets.best):
        return resets._replace(best=value, stale=0)
    return resets._replace(stale=resets.stale + 1)


def kl_metrics(
    chain: AdvantageTransform, objective: Objective, scores: Mapping[str, Score]
) -> tuple[str, ...]:
    """Where a step's KL to the reference may be found: in the loss, then in steps of the chain.

    A step that reads base_logp and no score by the reference measures from the base, which is never
    reset.

    Args:
      scores: that passes of models give (`Blueprint.scores`).
    """
    reads = bool(objective.anchors) or _reads_reference(objective.needs, scores)
    return (*(("kl",) if reads else ()), *_kl_of_steps(chain, scores))


def is_due(
    keys: ReferenceKeys,
    resets: Resets,
    number: int,
    values: Mapping[str, float],
    names: Sequence[str],
) -> bool:
    """Whether the reference is to be reset after step `number`; `names` as `kl_metrics` gives."""
    if keys.reset_every and number - resets.last >= keys.reset_every:
        return True
    if keys.reset_patience and resets.stale >= keys.reset_patience:
        return True
    # NaN, in a step without a live sample, is above nothing.
    return keys.reset_kl_above is not None and _kl(values, names) > keys.reset_kl_above


def refuse_unknown_best(
    metric: str | None, names: Set[str], key: str = "checkpoint.keep_best"
) -> None:
    """Raises InputError where a key names no metric of evaluations; `names` are bare."""
    if metric is not None and metric.removeprefix("eval/") not in names:
        raise InputError(
            f'{key} = "{metric}": the evaluation has no such metric; '
            + suggest(metric, [f"eval/{name}" for name in names])
        )


def is_better(value: float, best: float | None) -> bool:
    """Whether a value is above the best so far; what is not finite is never better, nor a best.

    >>> is_better(0.1, None), is_better(float("nan"), None), is_better(0.1, float("nan"))
    (True, False, True)
    """
    if not math.isfinite(value):
        return False
    return best is None or not math.isfinite(best) or value > best


def _reads_reference(needs: Set[str], scores: Mapping[str, Score]) -> bool:
    return any("reference" in scores[name].scored_by for name in needs & scores.keys())


def _kl_of_steps(chain: AdvantageTransform, scores: Mapping[str, Score]) -> tuple[str, ...]:
    names = []
    for name, step in chain.steps or ((chain.name, chain),):
        inner = _kl_of_steps(step, scores) if step.steps else ("kl",)
        if _reads_reference(step.needs, scores):
            names += [f"{name}/{metric}" for metric in inner]
    return tuple(names)


def _kl(values: Mapping[str, float], names: Sequence[str]) -> float:
    """The step's KL to the reference, under the first of the names that is there.

    Raises: InputError where nothing reports it.
    """
    for name in names:
        if name in values:
            return values[name]
    raise InputError(
        f"reference.reset_kl_above: no step reports {' or '.join(names)}; let code of your own "
        "return the metric kl, take a part that measures it, or take reference.reset_every"
    )


def may_reset(keys: ReferenceKeys) -> bool:
    """Whether the reference of such a run may become another policy than the base."""
    return bool(keys.reset_every or keys.reset_patience or keys.reset_kl_above)
