"""Samples' values that a step reads beside its signal: a reward or a field by name."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import read_field
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Rollouts, Signal


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
