"""Surrogates, reductions and penalties by name, as a config writes them.

Surrogate and reduction under the names of another library, with its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax.numpy as jnp
from jax import Array

from jaxgrpo.core.errors import InputError, call, find
from jaxgrpo.core.metrics import Metrics, merge
from jaxgrpo.losses import penalties as entropy_parts
from jaxgrpo.losses import penalties as penalty_parts
from jaxgrpo.losses import reductions as reduction_parts
from jaxgrpo.losses import sequences
from jaxgrpo.losses import surrogates as surrogate_parts
from jaxgrpo.losses.penalties import Penalty
from jaxgrpo.losses.reductions import Reduction, constant, sequence_mean, sequence_sum, token_mean
from jaxgrpo.losses.sequences import gspo, vespo
from jaxgrpo.losses.surrogates import Surrogate, cispo, clip, sapo

surrogates: dict[str, Callable[..., Surrogate]] = {
    "clip": surrogate_parts.clip,
    "dual_clip": surrogate_parts.dual_clip,
    "gspo": sequences.gspo,
    "gspo_token": sequences.gspo_token,
    "cispo": surrogate_parts.cispo,
    "sapo": surrogate_parts.sapo,
    "gmpo": sequences.gmpo,
    "vespo": sequences.vespo,
    "dppo_tv": surrogate_parts.dppo_tv,
    "reinforce": surrogate_parts.reinforce,
    "on_policy": surrogate_parts.on_policy,
    "shaped_ratio": surrogate_parts.shaped_ratio,
}
reductions: dict[str, Callable[..., Reduction]] = {
    "token_mean": reduction_parts.token_mean,
    "sequence_mean": reduction_parts.sequence_mean,
    "sequence_sum": reduction_parts.sequence_sum,
    "constant": reduction_parts.constant,
    "prompt_mean": reduction_parts.prompt_mean,
}
penalties: dict[str, Callable[..., Penalty]] = {
    "k2": penalty_parts.k2,
    "forward_kl_k3": penalty_parts.forward_kl_k3,
    "reverse_kl_off_policy": penalty_parts.reverse_kl_off_policy,
    "full_kl": penalty_parts.full_kl,
}
"""Uses of the KL divergence to the reference that act in the loss."""

entropies: dict[str, Callable[..., Penalty]] = {
    "bonus": entropy_parts.entropy_bonus,
    "adaptive": entropy_parts.adaptive_entropy,
}

Spec = str | Mapping[str, Any]
"""A name, or {"use": name or an own factory, option: value, ...}."""

T = TypeVar("T", Surrogate, Reduction, Penalty)


def build_surrogate(spec: Spec | Surrogate, options: Mapping[str, Any] | None = None) -> Surrogate:
    """The surrogate that a spec names. Raises: InputError with the nearest name or option."""
    return _build("surrogate", Surrogate, surrogates, spec, options)


def build_reduction(spec: Spec | Reduction, options: Mapping[str, Any] | None = None) -> Reduction:
    """The reduction that a spec names. Raises: InputError with the nearest name or option."""
    return _build("reduction", Reduction, reductions, spec, options)


def build_penalty(spec: Spec | Penalty, options: Mapping[str, Any] | None = None) -> Penalty:
    """The penalty that a spec names. Raises: InputError with the nearest name or option."""
    return _build("penalty", Penalty, penalties, spec, options)


def build_entropy(spec: Spec | Penalty, options: Mapping[str, Any] | None = None) -> Penalty:
    """The entropy term that a spec names. Raises: InputError with the nearest name or option."""
    return _build("entropy", Penalty, entropies, spec, options)


def by_sample(
    field: str, then: Spec | Surrogate = "shaped_ratio", otherwise: Spec | Surrogate = "clip"
) -> Surrogate:
    """One surrogate where a field is true, another elsewhere: replayed and fresh samples.

        loss = then's where field != 0, otherwise's where field == 0

    Each sees its own tokens alone. A field that changes within a sequence splits it in two.

    Args:
      field: name of the field, one number per token or sample.
      then, otherwise: as `build_surrogate` takes them.

    Metrics: both's, over all tokens together.  Raises: InputError where fields lack the field.
    Source: ExGRPO, arXiv 2510.02245, whose groups mix replayed and fresh samples.
    """
    chosen, rest = build_surrogate(then), build_surrogate(otherwise)

    def compute(logp, proximal_logp, advantage, mask, segment, fields) -> tuple[Array, Metrics]:
        if field not in fields:
            raise InputError(
                f"by_sample reads fields[{field!r}], one number per token; given: "
                f"{', '.join(sorted(fields)) or 'no fields'}"
            )
        here = mask & (fields[field] != 0)
        arrays = (logp, proximal_logp, advantage)
        loss, metrics = chosen.compute(*arrays, here, segment, fields)
        other, more = rest.compute(*arrays, mask & ~here, segment, fields)
        return jnp.where(here, loss, other), merge(metrics, more)

    needs = chosen.needs | rest.needs | {field}
    return Surrogate("by_sample", compute, needs, chosen.weighs or rest.weighs)


surrogates["by_sample"] = by_sample


def _build(
    what: str,
    kind: type[T],
    table: Mapping[str, Callable[..., T]],
    spec: Any,
    options: Mapping[str, Any] | None,
) -> T:
    options = dict(options or {})
    if isinstance(spec, Mapping):
        if "use" not in spec:
            raise InputError(f"{what} {dict(spec)} has no name: write {{ use = ..., ... }}")
        options = {**{key: value for key, value in spec.items() if key != "use"}, **options}
        spec = spec["use"]
    if isinstance(spec, kind):
        if options:
            raise InputError(f"{what} {spec.name} is finished and takes no options: {options}")
        return cast(T, spec)
    if isinstance(spec, str):
        return call(f"{what} {spec}", find(what, spec, table), options)
    name = getattr(spec, "__name__", repr(spec))
    made = call(f"{what} {name}", spec, options) if callable(spec) else spec
    if not isinstance(made, kind):
        raise InputError(
            f"{what} {name} gave {type(made).__name__}, expected a {kind.__name__} or a function"
            " that returns one"
        )
    return cast(T, made)


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")


def like_trl(
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_sampling_level: str = "token",
    max_completion_length: int = 512,
    *,
    delta: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Surrogate, Reduction]:
    """(surrogate, reduction) with the loss and gradient of TRL 1.16.0's GRPOTrainer.

    Arguments and defaults are GRPOConfig's. TRL's loss of one optimizer step is the mean over its
    micro-batches of what each of them gives; this is the loss of the whole step, which is the same
    where loss_type is "dapo", "cispo" or "vespo", or where there is one micro-batch.

    Surprises kept: `epsilon_high` of "cispo" bounds the ratio itself, and without it epsilon does;
    rows without a token in the loss count as sequences.

    Raises: InputError on unknown names; on a level of "sequence" with "cispo" and "sapo", which
    nobody's paper has; on delta where its clip would undo the other (below 1 + epsilon_high).
    Source: TRL 1.16.0, trainer/grpo_trainer.py, _compute_loss.

    >>> surrogate, reduction = like_trl("dr_grpo", max_completion_length=1024)
    >>> surrogate.name, reduction.name
    ('clip', 'constant')
    """
    _check(loss_type, importance_sampling_level, delta)
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo":
        surrogate = cispo(high=high)
    elif loss_type == "sapo":
        surrogate = sapo(sapo_temperature_pos, sapo_temperature_neg)
    elif loss_type == "vespo":
        surrogate = vespo(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    elif importance_sampling_level == "sequence":
        surrogate = gspo(epsilon, high)
    else:
        surrogate = clip(epsilon, high, delta)
    return surrogate, _reduction(loss_type, max_completion_length)


def _reduction(loss_type: str, max_completion_length: int) -> Reduction:
    if loss_type in ("grpo", "sapo"):
        return sequence_mean(count_empty=True)
    if loss_type == "dr_grpo":
        return constant(max_completion_length, count_empty=True)
    if loss_type == "luspo":
        return sequence_sum(count_empty=True)
    return token_mean()


def _check(loss_type: str, importance_sampling_level: str, delta: float | None) -> None:
    if loss_type not in LOSS_TYPES:
        raise InputError(f"like_trl: loss_type = {loss_type!r}, expected one of {LOSS_TYPES}")
    if importance_sampling_level not in ("token", "sequence"):
        raise InputError(
            f"like_trl: importance_sampling_level = {importance_sampling_level!r}, expected 'token'"
            " or 'sequence'"
        )
    refused = loss_type in ("cispo", "sapo") or delta is not None
    if importance_sampling_level == "sequence" and refused:
        raise InputError(
            f"like_trl: importance_sampling_level = 'sequence' goes with {', '.join(CLIPPED)}"
            " without delta; leave it at 'token'"
        )
