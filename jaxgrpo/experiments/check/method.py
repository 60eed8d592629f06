"""What `jaxgrpo check` takes for a method: a recipe, a config, or own code; and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgrpo import advantages, losses
from jaxgrpo.advantages import AdvantageTransform, registry
from jaxgrpo.config import files, methods, own_code
from jaxgrpo.core.errors import InputError, call, suggest
from jaxgrpo.core.scores import OF_ANSWERS, OF_PASS, OF_SAMPLES, SCORES, TOKEN_DRAW
from jaxgrpo.losses import Objective, Penalty, Reduction, Surrogate
from jaxgrpo.losses import registry as loss_registry
from jaxgrpo.rewards.protocol import Reward
from jaxgrpo.training.rewarding import resolve_rewards

REWARDS: dict[str, dict[str, float]] = {
    "rlcr": {"accuracy": 0.5, "brier": 0.5, "format": 0.5},
}
"""Rewards, by name and weight, of recipes that ask for them."""

KNOWN = frozenset(
    (
        *(name for name, score in SCORES.items() if score.quantity == "logp"),
        *("token_entropy", "token_collision", "self_certainty"),
        *("classes", "behavior_logp", "sampled_now"),
        *OF_PASS,
    )
)
"""Fields that follow from the tables of the games."""

HIDDEN = {
    "token_confidence": "which is of the likeliest tokens of a vocabulary",
    "token_rank": "which is of the tokens of a vocabulary",
    "effective_rank": "which is of the hidden states of a model",
}


TEXTS = frozenset(("completions", "prompts", "completion_ids"))
"""Arguments of rewards, and of functions that write the prompts of scores."""


class Method(NamedTuple):
    """A chain and a loss, with the rewards that the chain sums."""

    name: str
    chain: AdvantageTransform
    objective: Objective
    rewards: tuple[tuple[str, float], ...] = (("reward", 1.0),)
    """(name, weight in the sum); the first is the game's reward, the others are 0. What is only
    logged, with weight 0, comes last."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.rewards)


def make_method(
    name: str,
    chain: AdvantageTransform | None = None,
    surrogate: Any = "clip",
    reduction: Any = "sequence_sum",
    penalties: tuple[Penalty, ...] = (),
    rewards: Mapping[str, float] | None = None,
) -> Method:
    """A method of parts; what is not said is the plainest: leave-one-out REINFORCE.

    Args:
      chain: None: `rloo`.
      surrogate, reduction: as `losses.build_surrogate` takes them.
    """
    objective = Objective(
        losses.build_surrogate(surrogate), losses.build_reduction(reduction), penalties
    )
    chain = advantages.build("rloo") if chain is None else chain
    method = Method(name, chain, objective, tuple((rewards or {"reward": 1.0}).items()))
    refuse_unknown(method)
    return method


def read_method(name: str) -> Method:
    """The method that a name stands for.

    Args:
      name: of a recipe; of a config, a file or shipped; or "path/file.py:function", an advantage or
        a part of a loss.

    Raises: InputError that says why it cannot be checked.
    """
    if own_code.is_reference(name):
        return _read_own(name)
    if name in registry.recipes:
        rewards = REWARDS.get(name)
        return make_method(name, advantages.build(name), rewards=rewards)
    if Path(name).suffix == ".py":
        raise InputError(f"check {name}: name the function too, as {name}:my_advantage")
    if Path(name).suffix or Path(name).exists() or name in files.shipped():
        return _read_config(name)
    parts = {*loss_registry.surrogates, *loss_registry.reductions}
    names = {*registry.recipes, *files.shipped(), *parts}
    if name in loss_registry.surrogates:
        return make_method(name, surrogate=name)
    if name in loss_registry.reductions:
        options = {"length": 2.0} if name == "constant" else {}
        return make_method(name, reduction={"use": name, **options})
    raise InputError(
        f"check {name}: no recipe, surrogate, reduction or config is called so: "
        f"{suggest(name, names)}; own code is path/file.py:function"
    )


def refuse_unknown(method: Method) -> None:
    """Raises: InputError if the method reads what the games do not have, or its loss fails."""
    parts = {key: step.needs for key, step in method.chain.steps} or {
        method.chain.name: method.chain.needs
    }
    parts[method.objective.surrogate.name] = method.objective.surrogate.needs
    parts |= {penalty.name: penalty.needs for penalty in method.objective.penalties}
    computed = {field.name for field in method.objective.batch_fields}
    for part, needs in parts.items():
        for field in sorted(needs - KNOWN - computed - {*method.reward_names}):
            raise InputError(
                f"check {method.name}: {part} reads {field}, {_source(field)}; the games of check "
                "have none, so that it cannot be enumerated: jaxgrpo advantages and jaxgrpo losses "
                "show what a part does with numbers of yours"
            )
    method.objective.trace()


def _source(field: str) -> str:
    """Where a field comes from, that the games do not have."""
    if field in OF_ANSWERS:
        return "a score of reference answers by a model"
    if field in SCORES:
        return HIDDEN[field]
    if field == TOKEN_DRAW:
        return "which is a random number"
    return OF_SAMPLES.get(field, "a score of [[scores]] by a model, or a column of the data")


def _read_config(name: str) -> Method:
    config = files.load(name)
    longest = config.rollout.max_completion_tokens
    rewards = resolve_rewards(config.rewards, longest)
    recipe = methods.make_recipe(config.named_chain, rewards)
    objective = methods.make_objective(config.loss, longest)
    chain = methods.make_chain(config.loss, recipe)
    weights = _read_weights(config.named_chain, rewards)
    method = Method(Path(name).stem, chain, objective, tuple(weights.items()))
    refuse_unknown(method)
    return method


def _read_weights(
    named: Mapping[str, Any] | Sequence[Mapping[str, Any]], rewards: Sequence[Reward]
) -> dict[str, float]:
    """Name -> weight of the rewards of a config, those of weight 0 last: the first is the game's.

    Args:
      named: the recipe, or the parts of a chain; the weights that a chain names itself count as 1
        here, as do all those of a recipe of own code, which gets none from the config.
    """
    # The games' reward stands for that of an environment, which has no entry in the config.
    weights = {reward.name: reward.weight for reward in rewards} or {"reward": 1.0}
    counted = weights
    if isinstance(named, Mapping):
        if own_code.is_reference(named["use"]):
            weights = dict.fromkeys(weights, 1.0)
        options = named.get("weights", {})
        counted, weights = (
            {name: options.get(name, weight) for name, weight in table.items()}
            for table in (counted, weights)
        )
    else:
        sums = next((part for part in named if part["use"] in methods.SUMS), {"use": ""})
        if not methods.takes_weights(sums):
            counted, weights = {**weights, **sums}, dict.fromkeys(weights, 1.0)
    return {name: weights[name] for name in sorted(weights, key=lambda name: counted[name] == 0)}


def _read_own(name: str) -> Method:
    function = own_code.load_part(name)
    short = own_code.short_name(name)
    parameters = list(inspect.signature(function).parameters.values())
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if TEXTS.intersection(parameter.name for parameter in parameters):
        raise InputError(
            f"check {name}: {short}{inspect.signature(function)} reads texts, which the games have "
            "not: a reward, or the prompt of a score, has no part in what a method climbs"
        )
    if len(required) == 2 and required[0] != "tokens":
        return make_method(short, _behind_sum(_make_step(function)))
    if required == ["tokens"]:
        return make_method(short, surrogate=function)
    if required:
        raise InputError(
            f"check {name}: {short}{inspect.signature(function)} takes {', '.join(required)}: "
            "expected (signal, rollouts) -> signal, an advantage; (tokens) -> (loss per token, "
            "metrics), a surrogate; or no arguments, a function that returns a chain, the list of "
            "its steps, a surrogate, a reduction, a penalty, or losses.Objective; where it takes "
            "options, name it in a config and check that"
        )
    return _from_part(name, short, call(short, function, {}))


def _from_part(name: str, short: str, part: Any) -> Method:
    """The method of what a user's function returned."""
    makers: dict[type, Callable[[Any], Method]] = {
        Method: lambda method: method,
        AdvantageTransform: lambda step: make_method(short, _behind_sum(step)),
        Surrogate: lambda surrogate: make_method(short, surrogate=surrogate),
        Reduction: lambda reduction: make_method(short, reduction=reduction),
        Penalty: lambda penalty: make_method(short, penalties=(penalty,)),
        Objective: lambda objective: _with_objective(short, objective),
    }
    for kind, make in makers.items():
        if isinstance(part, kind):
            method = make(part)
            refuse_unknown(method)
            return method
    if isinstance(part, list | str) or type(part) is tuple:  # as a recipe of own code may return
        return make_method(short, advantages.build(part))
    if loss_registry.takes_tokens(part):
        return make_method(short, surrogate=Surrogate(short, part))
    if callable(part):
        return make_method(short, _behind_sum(_make_step(part)))
    raise InputError(
        f"check {name}: {short}() returned {type(part).__name__}, expected a chain "
        "(jaxgrpo.chain), the list of its steps, a surrogate, a reduction, a penalty, or "
        "losses.Objective"
    )


def _with_objective(name: str, objective: Objective) -> Method:
    """A method with all of a loss, whose parts are taken as those of a config are."""
    penalties = tuple(map(losses.build_penalty, objective.penalties))
    built = make_method(name, None, objective.surrogate, objective.reduction, penalties)
    options: Any = {"penalties_on": objective.penalties_on, "proximal": objective.proximal}
    return built._replace(objective=built.objective._replace(**options))


def _make_step(function: Callable[..., Any]) -> AdvantageTransform:
    """A step of own code."""
    try:
        return registry.build([function]).steps[0][1]
    except InputError as error:  # the list is ours, not the user's
        raise InputError(str(error).removeprefix("advantage[0]: ")) from None


def _behind_sum(step: AdvantageTransform) -> AdvantageTransform:
    """A chain: itself, or a step on one signal behind the sum of the rewards."""
    if step.kind == "signal->signal":
        return advantages.chain(advantages.sum_rewards(), step, name=step.name)
    return step if step.steps else advantages.chain(step, name=step.name)
