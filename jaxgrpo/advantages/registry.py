"""Parts and recipes by name; chains from names and lists of steps; chains on plain arrays."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxgrpo.advantages import (
    absolute,
    batch,
    filtered_model,
    group,
    kl_return,
    masks,
    mismatch,
    reflection,
    scored,
    streams,
    tokens,
    tracked,
    trees,
    turns,
    weights,
)
from jaxgrpo.advantages.base import AdvantageTransform, as_floats, transform
from jaxgrpo.advantages.chains import chain, compute, spec_of
from jaxgrpo.advantages.plain import as_array, check_shapes
from jaxgrpo.advantages.recipes import group as group_recipes
from jaxgrpo.advantages.recipes import peers, several, targets
from jaxgrpo.advantages.recipes import scored as scored_recipes
from jaxgrpo.advantages.stats import widen
from jaxgrpo.core import errors
from jaxgrpo.core.errors import InputError, call, find, suggest
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

Factory = Callable[..., AdvantageTransform]


# These make transforms, but are no parts.
_HELPERS = ("add_stream", "dvao_with_weights", "sum_then")


def _factories(*modules: ModuleType) -> dict[str, Factory]:
    """The public functions of the modules that return a transform, by name."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and name not in _HELPERS
        if getattr(value, "__annotations__", {}).get("return") == "AdvantageTransform"
        if not name.startswith("_")
    }


parts: dict[str, Factory] = _factories(
    *(streams, group, batch, masks, absolute, weights, tracked, reflection, filtered_model),
    *(tokens, kl_return, mismatch, scored, trees, turns),
)
recipes: dict[str, Factory] = _factories(group_recipes, several, scored_recipes, targets, peers)

Step = AdvantageTransform | Callable[..., Any] | Mapping[str, Any] | str
"""A transform, a function, or {"use": name or either of them, option: value, ...}."""


def build(
    spec: str | AdvantageTransform | Sequence[Step], options: Mapping[str, Any] | None = None
) -> AdvantageTransform:
    """A recipe by name, or a chain from the list of its steps.

    A step is {"use": ..., **options}; `use` is the name of a part, a transform, a function
    (signal, rollouts) -> signal, or, where there are options or nothing else fits, a factory that
    returns one of the two. `transform` of per_reward is given as such a step, or a list of them.

    Args:
      options: of the recipe; of nothing else.

    Raises: InputError naming every wrong step, with the nearest known name.

    >>> build("dr_grpo").name
    'dr_grpo'
    >>> [key for key, _ in build([{"use": "sum_rewards"}, {"use": "mask_truncated"}]).steps]
    ['sum_rewards', 'mask_truncated']
    """
    if isinstance(spec, str):
        return errors.build("recipe", {**(options or {}), "use": spec}, recipes)
    if options:
        raise InputError("options belong to a recipe given by name; give a step its own")
    if isinstance(spec, AdvantageTransform):
        return spec if spec.steps else chain(spec)
    steps, problems = [], []
    for index, step in enumerate(spec):
        try:
            steps.append(_step(step))
        except InputError as error:
            problems.append(f"advantage[{index}]: {error}")
    if problems:
        raise InputError("\n".join(problems))
    return chain(*steps)


def evaluate(
    recipe: str | AdvantageTransform | Sequence[Step],
    rewards: Any,
    mask: Any = None,
    options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> tuple[Array, Array]:
    """A recipe or chain on plain arrays: any framework's rollouts, no trainer.

    Args:
      recipe: name, chain or list of steps as in `build`.
      rewards: [P, G], or a dict name -> [P, G]; NaN or None = not scored. Lists, arrays, or torch
        tensors of any dtype, which are detached; so are mask and fields.
      mask: [P, G], False leaves a sample out of everything; None keeps all.
      options: of a recipe given by name.
      fields: what a step reads: attributes of `Rollouts` (truncated [P, G], token_mask
        [P, G, T], row [P], ...) and the fields in its `needs`. Without `row` each prompt is a row
        of its own; parts with memory start empty at every call. One that is None counts as not
        given. Options of the recipe are none.

    Returns: (advantage, mask), [P, G] or [P, G, T], 0 where masked.
    Raises: InputError on what `build` refuses, on a field that nothing reads, and on lists that
    differ in length, wrong shapes and what is no number, with its name and place.

    >>> advantage, mask = evaluate("dr_grpo", [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    >>> advantage.tolist()
    [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    built_recipe = build(recipe, options)
    if isinstance(recipe, str):
        parameters = inspect.signature(recipes[recipe]).parameters.keys()
        # Nothing would read these.
        for name in sorted((fields.keys() - built_recipe.needs) & parameters):
            raise InputError(
                f"evaluate: {name} is an option of {recipe}, but stands where fields of the"
                f" rollouts are given: write options={{{name!r}: ...}}"
            )
    fields = {name: value for name, value in fields.items() if value is not None}
    refuse_unread(built_recipe, fields)
    rollouts, spec = plain_rollouts(rewards, mask, **fields)
    signal, _, _ = compute(built_recipe, rollouts, built_recipe.init(spec))
    if mask is None:
        return signal.value, signal.mask
    live = signal.mask & _samples(mask, signal.mask.ndim)  # where no reward counts too
    return jnp.where(live, signal.value, 0), live


def _refuse_huge(rewards: Mapping[str, Array]) -> None:
    """Raises: InputError on finite rewards with squares that cannot be summed.

    The deviation of their group would be infinite, and the advantage of each sample silently 0.
    """
    for name, value in rewards.items():
        if isinstance(value, Tracer):
            continue  # inside jit no number is known
        largest = jnp.max(jnp.where(jnp.isfinite(value), jnp.abs(widen(value)), 0), initial=0)
        limit = float(jnp.finfo(largest.dtype).max) ** 0.5 / 1e4
        if largest > limit:
            raise InputError(
                f"reward {name!r} holds {float(largest):g} in size: its square does not fit "
                f"{largest.dtype}; give rewards from -{limit:.0e} to {limit:.0e}"
            )


def refuse_unread(recipe: AdvantageTransform, fields: Iterable[str]) -> None:
    """Raises InputError on names that are neither parts of all rollouts nor needed by a chain."""
    names = recipe.needs | (Rollouts.__dataclass_fields__.keys() - {"rewards", "fields"})
    for name in fields:
        if name not in names:
            raise InputError(
                f"nothing in {recipe.name} reads the field {name!r}: {suggest(name, names)}; a step"
                " of your own says what it reads, jaxgrpo.transform(function)._replace(needs="
                f"frozenset({{{name!r}}}))"
            )


def plain_rollouts(rewards: Any, mask: Any = None, **fields: Any) -> tuple[Rollouts, RolloutSpec]:
    """Rollouts, and their spec, that hold what `evaluate` was given and nothing else.

    Raises: InputError as `evaluate` does.
    """
    named = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
    arrays = {name: as_array(name, value) for name, value in fields.items()}
    attributes = dict.fromkeys(Rollouts.__dataclass_fields__)
    contents: dict[str, Any] = {
        **attributes,
        "step": jnp.int32(0),
        **{name: value for name, value in arrays.items() if name in attributes},
        "rewards": {name: _reward(name, value, mask) for name, value in named.items()},
        "fields": {name: value for name, value in arrays.items() if name not in attributes},
    }
    _refuse_huge(contents["rewards"])
    rollouts = Rollouts(**contents)
    spec = spec_of(rollouts)
    check_shapes(arrays, {"P": spec.num_prompts, "G": spec.group_size})
    tokens = rollouts.token_mask
    if mask is not None and tokens is not None:
        live_tokens = jnp.where(_samples(mask, 3), tokens, jnp.zeros_like(tokens))
        rollouts = dataclasses.replace(rollouts, token_mask=live_tokens)
    if rollouts.row is None:
        row = jnp.arange(spec.num_prompts, dtype=jnp.int32)
        rollouts = dataclasses.replace(rollouts, row=row)
    return rollouts, spec._replace(num_rows=_num_rows(rollouts.row))


def _samples(mask: Any, ndim: int) -> Array:
    """The mask [P, G], or [P, G, 1]."""
    samples = as_array("mask", mask).astype(bool)
    return samples if ndim == 2 else samples[..., None]


def _num_rows(row: Array) -> int:
    """One more than the highest row; under jit, where it is not known, one for each prompt."""
    return row.shape[0] if isinstance(row, Tracer) else int(row.max(initial=-1)) + 1


def _reward(name: str, value: Any, mask: Any) -> Array:
    value = as_floats(as_array(f"reward {name!r}", value, none=True))
    if mask is None:
        return value
    mask = as_array("mask", mask).astype(bool)
    if mask.shape != value.shape:
        raise InputError(
            f"mask has shape {mask.shape}, expected that of reward {name!r}, {value.shape}"
        )
    return jnp.where(mask, value, jnp.nan)


def _step(step: Step) -> AdvantageTransform:
    if not isinstance(step, Mapping):
        step = {"use": step}
    if "use" not in step:
        raise InputError(f"{dict(step)} names no part: write {{ use = 'sum_rewards', ... }}")
    use = step["use"]
    options = {name: value for name, value in step.items() if name != "use"}
    if isinstance(use, str):
        factory = find("part", use, parts)
        if needs_function(factory) and not callable(options.get("function")):
            raise InputError(how_to_give_a_function(use))
        if use == "per_reward" and "transform" in options:
            options["transform"] = _inner(options["transform"])
        return call(use, factory, options)
    return _user_step(use, options)


def needs_function(factory: Callable[..., Any]) -> bool:
    """Whether a part is made of a function, as `combine` and `stream` are."""
    return "function" in inspect.signature(factory).parameters


def how_to_give_a_function(name: str) -> str:
    """What to say where such a part is named in a text."""
    return (
        f"{name} takes a function, which text cannot give: write a step of your own in a file, def"
        f" mine(): return jaxgrpo.advantages.{name}(...), and name that, file.py:mine"
    )


def _inner(spec: Any) -> AdvantageTransform:
    if isinstance(spec, Sequence) and not isinstance(spec, (str, AdvantageTransform)):
        return build(spec)
    return _step(spec)


def _user_step(use: Any, options: Mapping[str, Any]) -> AdvantageTransform:
    """A user's transform, function or factory."""
    name = getattr(use, "__name__", repr(use))
    if isinstance(use, AdvantageTransform):
        if options:
            raise InputError(f"{use.name} is a finished transform and takes no options: {options}")
        return use
    if not callable(use):
        raise InputError(f"{name} is neither a part's name, a transform nor a function")
    if not options and _takes_signal(use):
        _refuse_missing(name, use)
        return transform(use)
    if options and _takes_signal(use) and not set(_required(use)) <= set(options):
        raise InputError(
            f"{name}{inspect.signature(use)} takes no options: make it a factory,"
            f" def {name}({', '.join(options)}): return lambda signal, rollouts: ..."
        )
    step = call(name, use, options)
    if not isinstance(step, AdvantageTransform) and not callable(step):
        raise InputError(
            f"{name} returned {type(step).__name__}, expected a transform or a function"
            " (signal, rollouts) -> signal"
        )
    function: Any = step
    return step if isinstance(step, AdvantageTransform) else transform(function, name)


def _required(function: Callable[..., Any]) -> list[str]:
    """The positional parameters without a default."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _refuse_missing(name: str, function: Callable[..., Any]) -> None:
    """Raises: InputError where a step needs a keyword, which a chain does not give."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    words = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if words:
        raise InputError(
            f"{name}{signature} gets signal and rollouts alone: give {', '.join(words)} a default,"
            f" or make it a factory, def {name}({', '.join(words)}):"
            " return lambda signal, rollouts: ..."
        )


def _takes_signal(function: Any) -> TypeGuard[Callable[[Signal, Rollouts], Signal]]:
    """Raises: InputError where the arguments are named the other way round, or for `combine`."""
    required = _required(function)
    name = getattr(function, "__name__", repr(function))
    if required == ["streams", "rollouts"]:
        raise InputError(
            f"{name}(streams, rollouts) makes one signal of all rewards: that step is"
            f" jaxgrpo.advantages.combine({name}); write a function that returns it, and name that"
        )
    if required == ["rollouts", "signal"]:
        raise InputError(f"{name}(rollouts, signal): write (signal, rollouts), the signal first")
    return len(required) == 2
