"""From the names in a config to a run's method: chain, objective, prompt policy, columns read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxgrpo import advantages, losses
from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import own_code
from jaxgrpo.config.chain_tail import build_penalties, build_tail
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import FIELDS, OF_SAMPLES
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.rollout.selection import build_policy
from jaxgrpo.rollout.stream import PromptPolicy
from jaxgrpo.update.forward import Objective


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
