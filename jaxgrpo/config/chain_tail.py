"""What `loss.kl` and `loss.mismatch` put behind the run's recipe or chain.

Both act on the advantage: KL-control as a return, and weights for what the sampler, which is not
quite the trainer, drew. Weights come last, since they weigh all that a token is trained on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxgrpo import advantages, losses
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.names import call, find
from jaxgrpo.core.types import RolloutSpec
from jaxgrpo.losses import Penalty, Surrogate

IN_REWARD = "k1_in_reward"
"""The name in `loss.kl` that makes the KL a part of the return, and no penalty in the loss."""

CORRECTIONS: dict[str, Callable[..., AdvantageTransform]] = {
    "truncated_importance": advantages.truncated_importance,
    "masked_importance": advantages.masked_importance,
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


def weighed_twice() -> str:
    """What is wrong with a weight of trainer over sampler beside a ratio from the sampler."""
    return (
        'with loss.proximal = "behavior" the surrogate\'s ratio begins at the sampler and holds '
        'this weight already; set loss.proximal = "trainer", or take a surrogate without a ratio, '
        "reinforce or on_policy"
    )


def refuse_double_weights(chain: AdvantageTransform, surrogate: Surrogate, proximal: str) -> None:
    """Raises InputError where chain and surrogate both weigh by trainer over sampler."""
    if proximal == "behavior" and surrogate.weighs and chain.importance:
        step = next((name for name, step in chain.steps if step.importance), chain.name)
        raise InputError(f"{step}: {weighed_twice()}")


def _kl_return(options: dict[str, Any]) -> AdvantageTransform:
    if ("beta" in options) == ("target_validity" in options):
        raise InputError(
            f"{IN_REWARD} takes beta or target_validity, one of the two: beta = 0.01, the price of"
            " a nat; or target_validity = 0.9, the success rate that the price shall lead to"
        )
    known = "beta" in options
    factory = advantages.add_kl_return if known else advantages.add_kl_return_for_validity
    with _naming(factory.__name__):
        step = call(IN_REWARD, factory, options)

    def init(spec: RolloutSpec) -> Any:
        with _naming(step.name):
            return step.init(spec)

    return step._replace(init=init)


@contextlib.contextmanager
def _naming(part: str) -> Iterator[None]:
    """Errors of a part say what the user wrote for it."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(f"{part}:", f"{IN_REWARD}:", 1)) from None


def _correction(part: Mapping[str, Any]) -> AdvantageTransform:
    if not isinstance(part["use"], str):
        return advantages.build([part]).steps[0][1]
    options = {name: value for name, value in part.items() if name != "use"}
    make = find("mismatch", part["use"], CORRECTIONS)
    return call(part["use"], make, options)
