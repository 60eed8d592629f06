"""The loss: sum(weight * (surrogate + penalties)), in parts for a trainer and whole for arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxgrpo.errors import InputError
from jaxgrpo.losses.penalties import Penalty
from jaxgrpo.losses.reductions import Reduction
from jaxgrpo.losses.registry import Spec, build_penalty, build_reduction, build_surrogate
from jaxgrpo.losses.surrogates import Surrogate
from jaxgrpo.metrics import Mean, Metrics, merge


def token_loss(
    surrogate: Surrogate,
    penalties: Sequence[Penalty],
    logp: Array,
    proximal_logp: Array,
    advantage: Array,
    mask: Array,
    segment: Array,
    fields: Mapping[str, Array],
    states: Mapping[str, Any] | None = None,
) -> tuple[Array, Metrics]:
    """(surrogate + penalties per token, metrics), 0 where masked; multiply by the weights and sum.

    Args:
      states: name of a penalty -> what it remembers; None: what each begins with.

    Shapes: all arrays alike, any rank.
    """
    arguments = (logp, proximal_logp, advantage, mask, segment, fields)
    loss, metrics = surrogate.compute(*arguments)
    for penalty in penalties:
        if penalty.init is None:
            value, more = penalty.compute(*arguments)
        else:
            state = penalty.init() if states is None else states[penalty.name]
            value, more = penalty.compute(*arguments, state)
        loss, metrics = loss + value, merge(metrics, more)
    return loss, metrics


def policy_loss(
    surrogate: Spec | Surrogate,
    reduction: Spec | Reduction,
    logp: Array,
    proximal_logp: Array,
    advantage: Array,
    mask: Array,
    *,
    penalties: Sequence[Spec | Penalty] = (),
    surrogate_options: Mapping[str, Any] | None = None,
    reduction_options: Mapping[str, Any] | None = None,
    **fields: Array,
) -> tuple[Array, Metrics]:
    """The loss of plain arrays whose rows are sequences; differentiate it with respect to logp.

    Args:
      surrogate, reduction: a name, {"use": name, **options}, or the object.
      logp, proximal_logp: [B, T].
      advantage: [B], or [B, T].
      mask: [B, T], True at tokens that the policy chose.
      penalties: as `surrogate`.
      surrogate_options, reduction_options: of those given by name.
      fields: [B, T] each, what a part reads: reference_logp, ...

    Returns: (loss [], metrics).  Raises: InputError on other shapes and unknown names.

    >>> one, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    >>> loss, _ = policy_loss("clip", "token_mean", one, one, jnp.ones(1), mask)
    >>> float(loss)
    -1.0
    """
    if advantage.ndim == 1:
        advantage = jnp.broadcast_to(advantage[:, None], (advantage.shape[0], mask.shape[-1]))
    _check_shapes(logp, proximal_logp=proximal_logp, advantage=advantage, mask=mask, **fields)
    mask = mask.astype(bool)
    weight = build_reduction(reduction, reduction_options).weights(mask[:, None, :])[:, 0]
    rows = mask.astype(jnp.int32)  # one segment per row
    per_token, metrics = token_loss(
        build_surrogate(surrogate, surrogate_options),
        [build_penalty(penalty) for penalty in penalties],
        logp,
        proximal_logp,
        advantage,
        mask,
        rows,
        fields,
    )
    loss = (weight.astype(per_token.dtype) * per_token).sum()
    one = jnp.ones((), loss.dtype)
    return loss, merge(metrics, {"loss": Mean(total=loss, weight=one)})


def _check_shapes(logp: Array, **given: Array) -> None:
    for name, array in given.items():
        if logp.ndim != 2 or array.shape != logp.shape:
            raise InputError(
                f"{name} has shape {array.shape} and logp {logp.shape}: both must be [B, T]"
            )
