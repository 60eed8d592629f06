"""What an advantage transform is, how to make one, and what parts share. chains.py chains them.

Shared: reading a reward or field by name, the number that a schedule gives, checks of options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.core.errors import InputError, NotGiven, suggest
from jaxgrpo.core.metrics import Metric, Metrics, mean
from jaxgrpo.core.types import REPLAYED, Rollouts, RolloutSpec, Signal

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
    compares_groups: bool = False  # whether a group has an advantage depends on others of the batch
    counts_flat: bool = False  # what it remembers is of all groups, flat ones too
    ordered: bool = False  # the result depends on the order of the prompts
    provides: tuple[str, ...] = ()  # streams it adds
    importance: bool = False  # weighs by trainer over sampler
    shrinks: bool = False  # its baseline holds the sample itself: 1 - 1/n of the gradient is left
    alone: float = 0.0  # what a part that shrinks leaves of it to a single sample
    shrunk: Any = None  # alone -> the transform behind one that shrinks so; None: itself
    steps: tuple[tuple[str, AdvantageTransform], ...] = ()  # of a chain: its named steps

    def __repr__(self) -> str:
        """The name, and of a chain the names of its steps."""
        steps = " -> ".join(name for name, _ in self.steps)
        return f"<AdvantageTransform {self.name}{': ' if steps else ''}{steps}>"


def stateless(
    name: str,
    apply: Callable[[Any, Rollouts], tuple[Any, Mapping[str, Metric]]],
    *,
    needs: frozenset[str] = frozenset(),
    kind: Kind = "signal->signal",
    levels: tuple[int, ...] = (2, 3),
    relative: bool = False,
    importance: bool = False,
    shrinks: bool = False,
    accepts: Callable[[RolloutSpec], Any] = lambda spec: None,
) -> AdvantageTransform:
    """A transform without memory from `apply(signal or streams, rollouts) -> (same, metrics)`.

    Args:
      accepts: raises InputError on a spec that the transform cannot work on.
    """

    def init(spec: RolloutSpec) -> tuple[()]:
        accepts(spec)
        return ()

    def update(
        signal: Any, state: Any, rollouts: Rollouts
    ) -> tuple[Any, Any, Mapping[str, Metric]]:
        new_signal, metrics = apply(signal, rollouts)
        return new_signal, state, metrics

    return AdvantageTransform(
        *(name, init, update, needs, kind, levels, relative),
        importance=importance,
        shrinks=shrinks,
    )


def with_shrunk_form(build: Callable[[float | None], AdvantageTransform]) -> AdvantageTransform:
    """`build(None)`, which behind a step that shrinks the gradient becomes `build(alone)`."""
    return build(None)._replace(shrunk=build)


def transform(
    function: Callable[[Signal, Rollouts], Signal], name: str | None = None
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


def scaled(signal: Signal, factor: Array) -> Signal:
    """The signal times a factor that broadcasts to it: one of samples [P, G] on tokens too."""
    value = stats.widen(signal.value)
    factor = factor if factor.ndim == value.ndim else factor[..., None]
    return with_value(signal, value * factor.astype(value.dtype))


def read(name: str, rollouts: Rollouts, attribute: str) -> Array:
    """An attribute of the rollouts. Raises: NotGiven if plain arrays came without it."""
    value = getattr(rollouts, attribute)
    if value is None:
        message = f"{name} reads {attribute}, which was not given: pass {attribute}=..."
        raise NotGiven(attribute, message)
    return value


def read_field(
    name: str,
    field: str,
    rollouts: Rollouts,
    shape: tuple[int | None, ...] | None = None,
    axes: str = "[P]",
) -> Array:
    """A field of the rollouts, or a reward, by the name that a part `needs`.

    Args:
      name: of the part; opens the message of an error.
      shape: that it must have, None for a size that may be any, `axes` in words; None: any shape.

    Raises: NotGiven, an InputError, if there is neither; InputError on another shape.
    """
    for table in (rollouts.fields, rollouts.rewards):
        if field in table:
            value = table[field]
            if shape is not None and not _has_shape(value, shape):
                sizes = str(shape).replace("None", "any")
                raise InputError(
                    f"{name}: {field} has shape {value.shape}, expected {axes} = {sizes}"
                )
            return value
    readable_names = {*rollouts.fields, *rollouts.rewards}
    raise NotGiven(field, f"{name} needs the field {field!r}: {suggest(field, readable_names)}")


def _has_shape(value: Array, shape: Sequence[int | None]) -> bool:
    return value.ndim == len(shape) and all(
        size in (None, actual) for actual, size in zip(value.shape, shape, strict=True)
    )


def at_step(value: Scheduled, rollouts: Rollouts, dtype: Any) -> float | Array:
    """The number that a scheduled argument has at the step of these rollouts."""
    return jnp.asarray(value(rollouts.step), dtype) if callable(value) else value


def check(where: str, expected: str, fits: Callable[[Any], bool], **options: Any) -> None:
    """Refuses options that do not fit; None and functions of the step are not looked at.

    Raises: InputError naming the part, the option, what was given and what was expected.

    >>> check("gae", "a number in [0, 1]", lambda share: 0 <= share <= 1, gamma=0.9, lam=2)
    Traceback (most recent call last):
    jaxgrpo.core.errors.InputError: gae: lam = 2, expected a number in [0, 1]
    """
    for option, value in options.items():
        if value is None or callable(value):
            continue
        try:
            is_valid = fits(value)
        except TypeError:  # a text where a number belongs
            is_valid = False
        if not is_valid:
            raise InputError(f"{where}: {option} = {value!r}, expected {expected}")


def check_at_least(where: str, least: float, **options: Scheduled | None) -> None:
    """Refuses numbers below `least`, and those that are not finite."""
    check(where, f"{least:g} or more", lambda value: least <= value < float("inf"), **options)


def check_whole(where: str, **options: Any) -> None:
    """Refuses all but whole numbers from 1 on."""
    fits = lambda n: isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1  # noqa: E731
    check(where, "a whole number of at least 1", fits, **options)


def check_share(where: str, **options: Scheduled | None) -> None:
    """Refuses numbers outside [0, 1]."""
    check(where, "a number in [0, 1]", lambda value: 0 <= value <= 1, **options)


def check_divisor(where: str, eps: Scheduled, ddof: int = 0) -> None:
    """Refuses a negative eps, and a ddof that is neither 0 nor 1."""
    check_at_least(where, 0, eps=eps)
    check(where, "0 (by n) or 1 (by n - 1)", lambda value: value in (0, 1), ddof=ddof)


def check_choice(where: str, choices: Sequence[str], **options: str) -> None:
    """Refuses words that are not among the known ones."""
    check(where, f"one of {', '.join(choices)}", lambda value: value in choices, **options)


def share_left(mask: Array, dtype: Any, alone: float = 0.0) -> Array:
    """1 - 1/n [P, 1]: what a baseline that holds the sample itself leaves of a group's gradient.

    With a[g] = r[g] - mean_h r[h] over the n samples y[1 ... n] that a policy drew independently,

        E[ 1/n sum_g a[g] grad log policy(y[g]) ] = (1 - 1/n) grad E[r]

    since of the mean only r[g] / n depends on y[g], and E[grad log policy(y[g])] = 0. What is added
    behind such a baseline and meant to be weighed against the reward is scaled by the same.

    Args:
      mask: [P, G] or [P, G, T], of the samples that count; those that are masked between the
        baseline and what calls this are not among its n.
      alone: what is left where n is 1. 0 by the formula; 1 behind a baseline that is not taken from
        a single sample, and 1 - 1/(1 + K) behind one of that sample and K further rewards.
    """
    number = stats.count(mask.any(-1) if mask.ndim == 3 else mask)
    share = 1 - 1 / jnp.maximum(number, 1).astype(dtype)
    return jnp.where(number == 1, jnp.asarray(alone, dtype), share)


def fresh_mask(mask: Array, rollouts: Rollouts) -> Array:
    """The mask [P, G] without samples of earlier steps. These come again since they were right, so
    that they say nothing of how often a policy is (`experience.share`)."""
    replayed = rollouts.fields.get(REPLAYED)
    return mask if replayed is None else mask & (replayed == 0)


def keep_groups(signal: Signal, keep: Array, **metrics: Metric) -> tuple[Signal, Metrics]:
    """Masks groups but those of `keep` [P, 1]; reports their share of the groups with a sample."""
    masked_share = mean(~keep, signal.mask.any(axis=1, keepdims=True))
    masked = dataclasses.replace(signal, mask=signal.mask & keep)
    return masked, {"masked_groups": masked_share, **metrics}


def row_state(
    where: str, alternative: str, *names: str, samples: int = 1
) -> Callable[[RolloutSpec], dict[str, Array]]:
    """The `init` of a part that keeps a number for every row of the data set under each name.

    It raises InputError on a stream, which has no rows that return, and says what to take instead;
    and on groups of less than `samples`, which the part would leave at 0.
    """

    def init(spec: RolloutSpec) -> dict[str, Array]:
        if spec.num_rows is None:
            raise InputError(
                f"{where} remembers every row of the data set, but this is a stream whose rows do"
                f" not return: {alternative}"
            )
        if spec.group_size < samples:
            raise InputError(
                f"rollout.group_size = {spec.group_size}: {where} compares the samples of a group"
                f" with each other and needs at least {samples}"
            )
        return {name: jnp.zeros(spec.num_rows, jnp.result_type(float)) for name in names}

    return init


def add_at_rows(state: Mapping[str, Array], row: Array, **increments: Array) -> dict[str, Array]:
    """The state of `row_state` with numbers [P] added to the rows of the prompts."""
    return {
        name: numbers.at[row].add(increments[name].astype(numbers.dtype))
        for name, numbers in state.items()
    }


def needed_fields(*names: str | None) -> frozenset[str]:
    """The `needs` of a step that reads the rewards or fields that are named."""
    return frozenset(name for name in names if name is not None)


def samples(step: str, name: str | None, signal: Signal, rollouts: Rollouts) -> Signal:
    """The values of a reward or field [P, G], or of the signal itself, as the step gets it.

    In at least float32; masked where the signal is, and where a value is not finite (NaN = not
    judged), with 0 there.

    Args:
      step: opens the message of an error.
      name: of the reward or field; None: the signal's values.

    Raises: InputError if there is no reward or field of that name, or it is not [P, G].
    """
    value = signal.value if name is None else read_field(step, name, rollouts)
    if value.shape != signal.value.shape:
        raise InputError(
            f"{step}: {name!r} has shape {value.shape}, expected that of the signal,"
            f" [P, G] = {signal.value.shape}"
        )
    return finite(floating(value), signal.mask)


def finite(value: Array, mask: Array | bool = True) -> Signal:
    """The values as floats, masked where they are not finite (NaN = not scored), with 0 there."""
    value = as_floats(value)
    mask = mask & jnp.isfinite(value)
    return Signal(value=jnp.where(mask, value, 0), mask=mask)


def as_arrays(key: str, signal: Signal) -> tuple[Array, Array]:
    """Value and mask of what a step returned; a mask of numbers is True where they are above 0.

    Raises: InputError on what is no array, and on another shape of the mask.
    """
    for name, array in (("value", signal.value), ("mask", signal.mask)):
        if not hasattr(array, "dtype"):
            raise InputError(
                f"{key} returned the {name} {array!r}, expected an array [P, G] or [P, G, T]"
            )
    if signal.value.shape != signal.mask.shape:
        raise InputError(
            f"{key} returned value {signal.value.shape} and mask {signal.mask.shape}: they must"
            " have the same shape"
        )
    # As a truth value -1 would be true.
    mask = signal.mask if signal.mask.dtype == bool else signal.mask > 0
    return jnp.asarray(signal.value), jnp.asarray(mask)


def as_floats(value: Array) -> Array:
    """Integers and truth values as floats; floats as they are."""
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return value if is_float else value.astype(jnp.result_type(float))


def floating(value: Array) -> Array:
    """As floats in at least float32."""
    return stats.widen(as_floats(value))
