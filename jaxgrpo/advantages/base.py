"""What an advantage transform is, and how to make one. chains.py puts them one after the other.

Samples' values that a step reads beside its signal: a reward or a field by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.core.errors import InputError, NotGiven, suggest
from jaxgrpo.core.metrics import Metric, Metrics
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal

Streams = dict[str, Signal]
Kind = Literal["streams->streams", "streams->signal", "signal->signal"]
Scheduled = float | Callable[[Array], Any]
"""A number, or a function of the step that gives one."""


class AdvantageTransform(NamedTuple):
    """One step of a chain, or a whole chain. Pure: `update` returns its new state and metrics."""

    name: str
    init: Callable[[RolloutSpec], Any]
    """spec -> state; refuses before anything compiles what the transform cannot work on."""
    update: Callable[[Any, Any, Rollouts], tuple[Any, Any, Mapping[str, Metric]]]
    """(signal or streams, state, rollouts) -> (signal or streams, state, metrics)"""
    needs: frozenset[str] = frozenset()  # names in rollouts.fields that must be produced for it
    kind: Kind = "signal->signal"
    levels: tuple[int, ...] = (2, 3)  # ranks of value it takes: 2 is [P, G], 3 is [P, G, T]
    relative: bool = False  # compares the samples of a group: one alone says nothing
    ordered: bool = False  # the result depends on the order of the prompts
    provides: tuple[str, ...] = ()  # streams it adds
    importance: bool = False  # weighs by trainer over sampler
    steps: tuple[tuple[str, AdvantageTransform], ...] = ()  # of a chain: its named steps


def stateless(
    name: str,
    apply: Callable[[Any, Rollouts], tuple[Any, Mapping[str, Metric]]],
    *,
    needs: frozenset[str] = frozenset(),
    kind: Kind = "signal->signal",
    levels: tuple[int, ...] = (2, 3),
    relative: bool = False,
    provides: tuple[str, ...] = (),
    importance: bool = False,
) -> AdvantageTransform:
    """A transform without memory from `apply(signal or streams, rollouts) -> (same, metrics)`."""

    def update(
        signal: Any, state: Any, rollouts: Rollouts
    ) -> tuple[Any, Any, Mapping[str, Metric]]:
        after, metrics = apply(signal, rollouts)
        return after, state, metrics

    return AdvantageTransform(
        *(name, lambda spec: (), update, needs, kind, levels, relative),
        provides=provides,
        importance=importance,
    )


def transform(
    function: Callable[[Signal, Rollouts], Any], name: str | None = None
) -> AdvantageTransform:
    """Makes a step of any function (signal, rollouts) -> signal. Also a decorator.

    What the function leaves in masked entries does not matter: the chain sets them to 0.

    >>> import dataclasses
    >>> @transform
    ... def halve(signal, rollouts):
    ...     return dataclasses.replace(signal, value=signal.value / 2)
    >>> halve.name
    'halve'
    """

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Any, Metrics]:
        return function(signal, rollouts), {}

    return stateless(name or getattr(function, "__name__", "transform"), apply)


def with_value(signal: Signal, value: Array) -> Signal:
    """The signal with another value, in the dtype that it had."""
    return dataclasses.replace(signal, value=value.astype(signal.value.dtype))


def read(name: str, rollouts: Rollouts, attribute: str) -> Array:
    """An attribute of the rollouts. Raises: NotGiven where it was not (plain arrays)."""
    value = getattr(rollouts, attribute)
    if value is None:
        message = f"{name} reads {attribute}, which was not given: pass {attribute}=..."
        raise NotGiven(attribute, message)
    return value


def read_field(name: str, field: str, rollouts: Rollouts) -> Array:
    """A field of the rollouts, or a reward, by the name that a part `needs`.

    Raises: NotGiven, an InputError, where neither bears it.
    """
    for table in (rollouts.fields, rollouts.rewards):
        if field in table:
            return table[field]
    known = {*rollouts.fields, *rollouts.rewards}
    raise NotGiven(field, f"{name} needs the field {field!r}: {suggest(field, known)}")


def at_step(value: Scheduled, rollouts: Rollouts, dtype: Any) -> Any:
    """The number that a scheduled argument has at the step of these rollouts."""
    return jnp.asarray(value(rollouts.step), dtype) if callable(value) else value


def check_at_least(name: str, least: float, **options: Scheduled | None) -> None:
    """Refuses numbers below `least`, and those that are not finite; not None, nor schedules.

    Raises: InputError naming the part and the option.
    """
    for option, value in options.items():
        if value is not None and not callable(value) and not least <= value < float("inf"):
            raise InputError(f"{name}: {option} = {value}, expected {least:g} or more")


def needs_of(name: str | None) -> frozenset[str]:
    """The `needs` of a step that reads a reward or field where it is named, else its signal."""
    return frozenset() if name is None else frozenset({name})


def samples(step: str, name: str | None, signal: Signal, rollouts: Rollouts) -> Signal:
    """The values of a reward or field [P, G], or of the signal itself, as the step gets it.

    In at least float32; masked where the signal is, and where a value is not finite (NaN = not
    judged), with 0 there.

    Args:
      step: opens the message of an error.
      name: of the reward or field; None: the signal's values.

    Raises: InputError where nothing bears the name, or it is not [P, G].
    """
    value = signal.value if name is None else read_field(step, name, rollouts)
    if value.shape != signal.value.shape:
        raise InputError(
            f"{step}: {name!r} has shape {value.shape}, expected that of the signal,"
            f" [P, G] = {signal.value.shape}"
        )
    value = floating(value)
    mask = signal.mask & jnp.isfinite(value)
    return Signal(value=jnp.where(mask, value, 0), mask=mask)


def floating(value: Array) -> Array:
    """Integers and truth values as floats, floats in at least float32."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.result_type(float))
    return stats.widen(value)
