"""From the names in a config to a run's method: chain, objective, prompt policy, columns read.

What `loss.kl` and `loss.mismatch` put behind the run's recipe or chain.

Both act on the advantage: KL-control as a return, and weights for what the sampler, which is not
quite the trainer, drew. Weights come last, since they weigh all that a token is trained on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxgrpo import advantages, losses
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import own_code
from jaxgrpo.config.keys import Config
from jaxgrpo.core.errors import InputError, call, find
from jaxgrpo.core.types import FIELDS, OF_SAMPLES, RolloutSpec
from jaxgrpo.losses import Objective, Penalty, Surrogate
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.selection import PromptPolicy, build_policy


def make_chain(
    config: Config, rewards: Sequence[Reward], advantage: AdvantageTransform | None = None
) -> AdvantageTransform:
    """The advantage of a run: a recipe by name, the list of parts or `advantage`, and its tail."""
    chain = advantage if advantage is not None else _named_chain(config, rewards)
    kl, mismatch = config.loss.kl, config.loss.mismatch
    tail = build_tail(kl and _part(config, kl), mismatch and _part(config, mismatch))
    return advantages.extend(chain, *tail)


def _named_chain(config: Config, rewards: Sequence[Reward]) -> AdvantageTransform:
    if config.advantage is not None:
        return advantages.build([_part(config, step) for step in config.advantage])
    assert config.method is not None
    options = {name: value for name, value in config.method.items() if name != "use"}
    recipe = _own(config, config.method["use"])
    if not isinstance(recipe, str):
        return advantages.build(recipe(**options))
    weights = {reward.name: reward.weight for reward in rewards}
    return advantages.build(recipe, {"weights": weights, **options})


def make_policy(config: Config, rewards: Sequence[Reward]) -> PromptPolicy:
    """The prompt policy of a run."""
    spec = {**config.rollout.prompts, "use": _own(config, config.rollout.prompts["use"])}
    return build_policy(spec, {reward.name: reward.weight for reward in rewards})


def make_objective(config: Config) -> Objective:
    """Surrogate, reduction and penalties of a run."""
    loss = config.loss
    reduction = _part(config, loss.reduction)
    if reduction["use"] == "constant":
        reduction = {"length": config.rollout.max_completion_tokens, **reduction}
    return Objective(
        surrogate=losses.build_surrogate(_part(config, loss.surrogate)),
        reduction=losses.build_reduction(reduction),
        penalties=(
            *build_penalties(_part(config, loss.kl) if loss.kl else None),
            *([losses.build_entropy(_part(config, loss.entropy))] if loss.entropy else []),
        ),
        penalties_on=loss.penalties_on,
        proximal=loss.proximal,
    )


def needed_columns(
    needs: frozenset[str], rows: Sequence[Mapping[str, Any]], rewards: Sequence[Reward]
) -> dict[str, np.ndarray]:
    """The data columns that a method reads as fields, as arrays [rows, ...].

    Raises: InputError for a field that no pass, column or reward produces, and for a column that
    holds no numbers.
    """
    names = needs - FIELDS.keys() - {reward.name for reward in rewards}
    missing = sorted(names - rows[0].keys())
    if missing:
        raise InputError(
            f"the method needs {', '.join(missing)}, which nobody produces: passes of a model give "
            f"{', '.join(FIELDS)}; the data have the columns {', '.join(sorted(rows[0]))}"
            f"{_to_bring(missing)}"
        )
    columns = {name: np.asarray([row[name] for row in rows]) for name in sorted(names)}
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            raise InputError(
                f"the method needs the data column {name!r} as numbers, but row 0 holds "
                f"{rows[0][name]!r}: write numbers, the same count in every row"
            )
    return columns


def _to_bring(missing: Sequence[str]) -> str:
    """What to do about missing fields that belong to the samples."""
    known = [f"{name} {OF_SAMPLES[name]}" for name in missing if name in OF_SAMPLES]
    if not known:
        return ""
    return (
        f". Training has no pass yet that makes {'; '.join(known)}: run the chain on rollouts of "
        "your own that bring them, by jaxgrpo.advantages.compute (rollouts.fields) or evaluate"
    )


def _part(config: Config, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A part with the function that it names."""
    return {**spec, "use": _own(config, spec["use"])}


def _own(config: Config, use: Any) -> Any:
    """The function that "file.py:function" or "package.module:function" names; else `use`."""
    return own_code.resolve(use, config.folder)


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
