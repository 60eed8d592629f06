"""Surrogate and reduction under the names of another library, with its numbers."""

from __future__ import annotations

from jaxgrpo.core.errors import InputError
from jaxgrpo.losses.reductions import Reduction, constant, sequence_mean, sequence_sum, token_mean
from jaxgrpo.losses.sequences import gspo, vespo
from jaxgrpo.losses.surrogates import Surrogate, cispo, clip, sapo

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
