"""What `loss.kl` and `loss.mismatch` put behind the run's recipe or chain.

Both act on the advantage: KL-control as a return, and weights for what the sampler, which is not
quite the trainer, drew. Weights come last, since they weigh all that a token is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxgrpo import advantages, losses
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.errors import InputError
from jaxgrpo.losses import Penalty
from jaxgrpo.names import call, find

IN_REWARD = "k1_in_reward"
"""The name in `loss.kl` that makes the KL a part of the return, and no penalty in the loss."""

WEIGHING: dict[str, Callable[..., AdvantageTransform]] = {
    "truncated_importance": advantages.truncated_importance,
    "masked_importance": advantages.masked_importance,
}
REJECTING: dict[str, Callable[..., AdvantageTransform]] = {
    "geometric_rejection": advantages.geometric_rejection,
    "sequence_rejection": advantages.sequence_rejection,
}


def build_penalties(kl: Mapping[str, Any] | None) -> tuple[Penalty, ...]:
    """The penalties in the loss that `loss.kl` asks for.

    Raises: InputError on unknown names and options, and a target_validity that no loss can reach.
    """
    if kl is None or kl["use"] == IN_REWARD:
        return ()
    if isinstance(kl["use"], str) and "target_validity" in kl:
        raise InputError(
            f"{kl['use']}: target_validity is reached by KL-control alone, and the loss"
            f' {kl["use"]} has another fixed point: take {{ use = "{IN_REWARD}", target_validity'
            f" = {kl['target_validity']} }}, or give beta"
        )
    return (losses.build_penalty(kl),)


def build_tail(
    kl: Mapping[str, Any] | None, mismatch: Mapping[str, Any] | None
) -> tuple[AdvantageTransform, ...]:
    """The steps behind a run's recipe or chain. Raises: InputError on wrong names and options."""
    tail = []
    if kl is not None and kl["use"] == IN_REWARD:
        tail.append(_kl_return({name: value for name, value in kl.items() if name != "use"}))
    if mismatch is not None:
        tail.append(_correction(mismatch))
    return tuple(tail)


def _kl_return(options: dict[str, Any]) -> AdvantageTransform:
    if ("beta" in options) == ("target_validity" in options):
        raise InputError(
            f"{IN_REWARD} takes beta or target_validity, one of the two: beta = 0.01, the price of"
            " a nat; or target_validity = 0.9, the success rate that the price shall lead to"
        )
    if "beta" in options:
        return call(IN_REWARD, advantages.add_kl_return, options)
    return call(IN_REWARD, advantages.add_kl_return_for_validity, options)


def _correction(part: Mapping[str, Any]) -> AdvantageTransform:
    if not isinstance(part["use"], str):
        return advantages.build([part]).steps[0][1]
    options = {name: value for name, value in part.items() if name != "use"}
    make = find("mismatch", part["use"], {**WEIGHING, **REJECTING})
    return call(part["use"], make, options)
