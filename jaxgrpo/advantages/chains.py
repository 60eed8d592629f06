"""Chains of transforms, and running them: order is meaning.

A chain takes the named rewards as streams, each a `Signal` (value and mask), and hands one signal
from step to step. After each step masked values are set to 0 and masks are cut to what they were,
so no step can bring a sample back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import base
from jaxgrpo.advantages.base import AdvantageTransform, Streams, transform
from jaxgrpo.core.errors import (
    InputError,
    NotGiven,
    as_names,
    explaining_own_code,
    own_line,
    suggest,
)
from jaxgrpo.core.metrics import Metric, Metrics, as_metrics
from jaxgrpo.core.scores import ANSWERED, OF_ANSWERS, REACHED, SCORES
from jaxgrpo.core.types import Rollouts, RolloutSpec, Signal, refuse_other_state, rollout_arrays

Steps = tuple[tuple[str, AdvantageTransform], ...]
"""The steps of a chain under their unique names."""


def chain(
    *transforms: AdvantageTransform | Callable[[Signal, Rollouts], Signal], name: str = "chain"
) -> AdvantageTransform:
    """Runs transforms one after the other; itself a transform, so chains nest.

    State and metrics are keyed by the name of the step ("sign", a second one "sign_2"). A plain
    function (signal, rollouts) -> signal is taken as a step. A chain whose steps all take one
    signal may be given the streams too where there is exactly one. No gradient flows through.

    Raises: InputError on an empty chain, on a step behind the sum that wants streams, and on two
    that weigh by trainer over sampler; at trace time on several streams that nothing sums, values
    of the wrong rank, missing fields.
    """
    if not transforms:
        raise InputError(f"{name}() has no steps: begin it with sum_rewards()")
    steps = _fitted(_named(transforms))
    _check_order(name, steps)
    _check_weights(name, steps)
    takes_streams = steps[0][1].kind != "signal->signal"
    sums = any(step.kind == "streams->signal" for _, step in steps)

    def init(spec: RolloutSpec) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, step in steps:
            with explaining_own_code(key):
                state[key] = step.init(spec)
            spec = spec._replace(rewards=(*spec.rewards, *step.provides))
        if takes_streams and not sums:
            _check_single(name, spec.rewards)
        return state

    return AdvantageTransform(
        name,
        init,
        lambda signal, state, rollouts: _run(name, steps, signal, state, rollouts),
        needs=frozenset().union(*(step.needs for _, step in steps)),
        kind="streams->signal" if takes_streams else "signal->signal",
        levels=(2, 3) if takes_streams else steps[0][1].levels,
        relative=any(step.relative for _, step in steps),
        compares_groups=any(step.compares_groups for _, step in steps),
        counts_flat=any(step.counts_flat for _, step in steps),
        ordered=any(step.ordered for _, step in steps),
        importance=any(step.importance for _, step in steps),
        shrinks=any(step.shrinks for _, step in steps),
        alone=_alone(steps),
        shrunk=_shrunk(name, steps),
        steps=steps,
    )


def extend(
    base_chain: AdvantageTransform,
    *transforms: AdvantageTransform | Callable[[Signal, Rollouts], Signal],
) -> AdvantageTransform:
    """A chain with further steps at its end, under its own name; its steps keep theirs."""
    steps = [step for _, step in base_chain.steps] or [base_chain]
    return chain(*steps, *transforms, name=base_chain.name) if transforms else base_chain


def start(rollouts: Rollouts) -> Streams:
    """The named rewards as streams: what is not finite (NaN = not scored) is masked, with value 0.

    In at least float32, so that no step of a chain subtracts what another one has rounded.

    Shapes: each reward [P, G].  Raises: InputError without rewards, or with other shapes.
    """
    if not rollouts.rewards:
        raise InputError("rollouts.rewards is empty: give at least one named reward [P, G]")
    streams: Streams = {}
    for name, reward in rollouts.rewards.items():
        if reward.ndim != 2:
            raise InputError(
                f"reward {name!r} has shape {reward.shape}, expected [P, G]:"
                " one row per prompt, one column per sample"
            )
        streams[name] = base.finite(base.floating(reward))
    shapes = {name: stream.value.shape for name, stream in streams.items()}
    if len(set(shapes.values())) > 1:
        raise InputError(f"rewards differ in shape: {shapes}; all must be the same [P, G]")
    return streams


def at_tokens(signal: Signal, token_mask: Array) -> tuple[Array, Array]:
    """(advantage, mask) [P, G, T] of what a chain returned: a value of a sample at its tokens."""
    value, mask = signal.value, signal.mask
    if value.ndim == 2:
        value, mask = value[..., None], mask[..., None]
    mask = jnp.broadcast_to(mask, token_mask.shape) & token_mask
    return jnp.where(mask, value, 0), mask


def compute(
    recipe: AdvantageTransform, rollouts: Rollouts, state: Any = None
) -> tuple[Signal, Any, Metrics]:
    """Runs a chain on rollouts: rewards -> (signal, state after, metrics).

    Args:
      recipe: a chain or recipe; a single transform is run as a chain of one.
      state: what the call before returned; None starts empty, for parts that remember no rows
        (begin those with `recipe.init(spec_of(rollouts, num_rows))`).
    """
    recipe, state = _begin(recipe, rollouts, state)
    signal, state, metrics = recipe.update(start(rollouts), state, rollouts)
    return signal, state, dict(metrics)


class Stage(NamedTuple):
    """What left one step of a chain."""

    name: str  # of the step
    signal: Signal | Streams
    metrics: Metrics


def trace(recipe: AdvantageTransform, rollouts: Rollouts, state: Any = None) -> list[Stage]:
    """As `compute`, and every stage on the way: the rewards first, then what each step left.

    For looking at: `jaxgrpo advantages NAME --rewards 1,0,0,0` prints it.
    """
    recipe, state = _begin(recipe, rollouts, state)
    rewards = start(rollouts)
    results = _walk(recipe.name, recipe.steps, rewards, state, rollouts)
    stages = [Stage(key, signal, dict(metrics)) for key, signal, _, metrics in results]
    return [Stage("rewards", rewards, {}), *stages]


def trace_shapes(
    recipe: AdvantageTransform,
    spec: RolloutSpec,
    fields: Mapping[str, Any] | None = None,
    lacking: Collection[str] = (),
) -> None:
    """Runs a chain on shapes, as a step compiles it.

    Args:
      fields: name -> array of what the data bring, [rows, ...] or [P, ...]; what passes of a
        model give need not be there.
      lacking: attributes that the rollouts do not have.

    Raises: InputError where own code fails, or cannot be compiled; NotGiven where a part reads what
      is lacking.
    """
    recipe = recipe if recipe.steps else chain(recipe)

    def run(rollouts: Rollouts, state: Any) -> Any:
        signal, new_state, metrics = recipe.update(start(rollouts), state, rollouts)
        if signal.value.ndim == 3 and signal.value.shape != rollouts.token_mask.shape:
            raise InputError(
                f"{recipe.name} ends with values of shape {signal.value.shape}, expected [P, G] or "
                f"[P, G, T] = {rollouts.token_mask.shape}"
            )
        return signal, new_state, metrics

    state = jax.tree.map(jnp.asarray, recipe.init(spec))
    rollouts = _rollout_shapes(spec, recipe.needs, fields or {})
    nothing: Any = dict.fromkeys(lacking)
    rollouts = dataclasses.replace(rollouts, **nothing)
    _, new_state, _ = jax.eval_shape(run, rollouts, state)
    for key, before in state.items():
        refuse_other_state(key, before, new_state[key])


def _rollout_shapes(
    spec: RolloutSpec, needs: frozenset[str], fields: Mapping[str, Any]
) -> Rollouts:
    """The shapes of the rollouts of a step, with the fields that a chain needs."""
    prompts, samples, _, length = spec[:4]

    def array(kind: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((prompts, *shape), kind)

    real, tokens = jnp.float32, (samples, length)
    answers = {
        name: array(real, *((samples, length) if "G" in field.shape else (length,)))
        for name, field in OF_ANSWERS.items()
    }
    answers["answer_mask"] = array(jnp.bool_, length)
    answers["thought_tokens"] = array(jnp.int32, samples)
    answers[REACHED], answers[ANSWERED] = (array(jnp.bool_, *size) for size in ((samples,), tokens))
    model_fields: dict[str, Any] = {name: array(real, *tokens) for name in SCORES} | answers
    data_fields: dict[str, Any] = {
        name: array(jax.dtypes.canonicalize_dtype(value.dtype), *value.shape[1:])
        for name, value in fields.items()
    }
    return Rollouts(
        **rollout_arrays(jax.ShapeDtypeStruct, *spec[:4]),
        rewards={name: array(real, samples) for name in spec.rewards},
        fields={name: model_fields[name] for name in needs & model_fields.keys()} | data_fields,
    )


def spec_of(rollouts: Rollouts, num_rows: int | None = None) -> RolloutSpec:
    """The sizes and names of rollouts that are already there.

    Args:
      num_rows: of the data set; None: a stream, so parts that remember rows refuse it.
    """
    streams = start(rollouts)
    num_prompts, group_size = next(iter(streams.values())).value.shape
    prompts, tokens = rollouts.prompt_tokens, rollouts.token_mask
    return RolloutSpec(
        num_prompts=num_prompts,
        group_size=group_size,
        max_prompt_tokens=0 if prompts is None else prompts.shape[-1],
        max_completion_tokens=0 if tokens is None else tokens.shape[-1],
        rewards=tuple(streams),
        fields=frozenset(rollouts.fields),
        num_rows=num_rows,
    )


def _begin(recipe: AdvantageTransform, rollouts: Rollouts, state: Any) -> tuple[Any, Any]:
    """A transform as a chain, and its first state if there is none."""
    recipe = recipe if recipe.steps else chain(recipe)
    return recipe, recipe.init(spec_of(rollouts)) if state is None else state


def _run(
    name: str, steps: Steps, signal: Any, state: Any, rollouts: Rollouts
) -> tuple[Signal, Any, Metrics]:
    new_state: dict[str, Any] = {}
    metrics: Metrics = {}
    for key, step_signal, new_state[key], step_metrics in _walk(
        name, steps, signal, state, rollouts
    ):
        signal = step_signal
        metrics |= {f"{key}/{metric}": value for metric, value in step_metrics.items()}
    return jax.lax.stop_gradient((_single(name, signal), new_state, metrics))


def _walk(
    name: str, steps: Steps, signal: Any, state: Any, rollouts: Rollouts
) -> Iterator[tuple[str, Any, Any, Mapping[str, Metric]]]:
    """(name of the step, signal or streams, state, metrics) after each step."""
    _check_state(name, steps, state)
    widened_by = "to_tokens"
    for key, step in steps:
        if step.kind == "signal->signal":
            signal = _single(name, signal)
        for field in sorted(step.needs):
            base.read_field(key, field, rollouts)
        _check_level(key, step, signal, widened_by)
        input_signal = signal
        with explaining_own_code(key), _explaining_fields(key, rollouts, input_signal):
            signal, new_state, step_metrics = step.update(input_signal, state[key], rollouts)
        signal, step_metrics = _settle(key, input_signal, signal), as_metrics(key, step_metrics)
        rank = input_signal.value.ndim if isinstance(input_signal, Signal) else 2
        if isinstance(signal, Signal) and signal.value.ndim > rank:
            widened_by = key
        yield key, signal, new_state, step_metrics


@contextlib.contextmanager
def _explaining_fields(key: str, rollouts: Rollouts, signal: Any) -> Iterator[None]:
    """Turns the error of a step that reads what the rollouts do not hold into an InputError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        place, line = own_line(error)
        is_field = isinstance(error, AttributeError) and error.obj is rollouts
        is_entry = isinstance(error, KeyError) and "fields" in line
        if is_field or is_entry:
            name = error.name if isinstance(error, AttributeError) else error.args[0]
            raise InputError(
                f"{key} ({place}: {line}) reads the field {name!r}, which it does not declare: "
                f"write rollouts.fields[{name!r}], and jaxgrpo.transform(function)._replace(needs="
                f"frozenset({{{name!r}}})), so that it is there"
            ) from error
        if isinstance(error, KeyError) and any(x in line for x in ("rewards[", "streams[")):
            names = {*rollouts.rewards, *(signal if isinstance(signal, dict) else ())}
            raise InputError(
                f"{key} ({place}: {line}) reads the reward {error.args[0]!r}: "
                f"{suggest(error.args[0], names)}"
            ) from error
        for name in Rollouts.__dataclass_fields__:
            if getattr(rollouts, name) is None and f".{name}" in line:
                message = f"{key} ({place}: {line}) reads {name}, which was not given"
                raise NotGiven(name, message) from error
        raise


def _named(transforms: tuple[Any, ...]) -> Steps:
    steps: dict[str, AdvantageTransform] = {}
    for item in transforms:
        if not isinstance(item, AdvantageTransform):
            if not callable(item):
                raise InputError(
                    f"a chain takes transforms and functions (signal, rollouts) -> signal, got"
                    f" {item!r}"
                )
            function: Any = item
            item = transform(function)
        item = item._replace(needs=as_names(item.name, item.needs))
        key, number = item.name, 1
        while key in steps:
            number += 1
            key = f"{item.name}_{number}"
        steps[key] = item
    return tuple(steps.items())


def _fitted(steps: Steps) -> Steps:
    """The steps, those behind one that shrinks the gradient as they are there."""
    fitted = []
    for index, (key, step) in enumerate(steps):
        before = steps[:index]
        behind = step.shrunk and any(earlier.shrinks for _, earlier in before)
        fitted.append((key, step.shrunk(_alone(before)) if behind else step))
    return tuple(fitted)


def _alone(steps: Steps) -> float:
    """What the steps that shrink the gradient leave of it to a single sample."""
    return math.prod(step.alone for _, step in steps if step.shrinks)


def _shrunk(name: str, steps: Steps) -> Callable[[float], AdvantageTransform] | None:
    """The chain as it is behind a step that shrinks the gradient; None if it is the same."""
    if all(step.shrunk is None for _, step in steps):
        return None
    return lambda alone: chain(
        *(step.shrunk(alone) if step.shrunk else step for _, step in steps), name=name
    )


def _check_order(name: str, steps: Steps) -> None:
    """Refuses a step on streams behind one that made, or took, a single signal."""
    signal_step = None
    for key, step in steps:
        if step.kind != "signal->signal" and signal_step is not None:
            raise InputError(
                f"{name}: {key} takes the reward streams, but {signal_step} before it has one"
                f" signal: put {key} before {signal_step}"
            )
        if step.kind != "streams->streams" and signal_step is None:
            signal_step = key


def _check_weights(name: str, steps: Steps) -> None:
    """Refuses a second step that weighs by trainer over sampler."""
    weighing = [key for key, step in steps if step.importance]
    if len(weighing) > 1:
        raise InputError(
            f"{name}: {' and '.join(weighing)} each weigh by trainer over sampler, and their"
            " weights would be multiplied: leave all but one out; what drops samples beside"
            " weights is geometric_rejection or sequence_rejection"
        )


def _check_single(name: str, rewards: tuple[str, ...]) -> None:
    if len(rewards) != 1:
        raise InputError(
            f"{name} has {len(rewards)} reward streams ({', '.join(rewards)}) and no step that"
            " makes one signal of them: put sum_rewards() before its first step on one signal"
        )


def _single(name: str, signal: Any) -> Signal:
    """A signal as it is; of streams, the only one."""
    if isinstance(signal, Signal):
        return signal
    _check_single(name, tuple(signal))
    return next(iter(signal.values()))


def _check_state(name: str, steps: Steps, state: Any) -> None:
    names = [key for key, _ in steps]
    if not isinstance(state, Mapping) or set(state) != set(names):
        keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise InputError(
            f"{name} has the steps {names} but was given state of {keys}: use the state that its"
            " own init(spec) or last update returned"
        )


def _check_level(key: str, step: AdvantageTransform, signal: Any, widened_by: str) -> None:
    for stream in [signal] if isinstance(signal, Signal) else signal.values():
        shape = stream.value.shape
        if len(shape) in step.levels:
            continue
        if len(shape) == 3:
            raise InputError(
                f"{key} needs sequence-level values [P, G] but got shape {shape}:"
                f" put it before {widened_by}()"
            )
        raise InputError(
            f"{key} needs token-level values [P, G, T] but got shape {shape}:"
            " put it after to_tokens()"
        )


def _settle(key: str, input_signal: Any, output_signal: Any) -> Any:
    """What a step returned, with masks that only shrink and 0 where masked."""
    if not isinstance(output_signal, Signal):
        if not isinstance(output_signal, dict) or isinstance(input_signal, Signal):
            raise InputError(
                f"{key} returned {type(output_signal).__name__}, expected a Signal: return"
                " dataclasses.replace(signal, value=...)"
            )
        return {
            name: _settle(key, input_signal.get(name, stream), stream)
            for name, stream in output_signal.items()
        }
    value, mask = base.as_arrays(key, output_signal)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        # Ranks, lengths or truth values: statistics of them are no whole numbers.
        before = input_signal.value if isinstance(input_signal, Signal) else jnp.zeros(())
        value = value.astype(base.as_floats(before).dtype)
    if isinstance(input_signal, Signal):
        shape = input_signal.mask.shape
        if value.shape[: len(shape)] != shape:
            raise InputError(
                f"{key} turned values {shape} into {value.shape}: a step keeps"
                " [P, G], or widens it to [P, G, T]"
            )
        mask = mask & input_signal.mask.reshape(shape + (1,) * (mask.ndim - len(shape)))
    return Signal(value=jnp.where(mask, value, 0), mask=mask)
