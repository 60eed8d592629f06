"""The gated delta rule token by token, which its form in chunks is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxgrpo.models import recurrence
from jaxgrpo.models.recurrence import DeltaInputs, DeltaState


def token_by_token(inputs: DeltaInputs, real: Array, start: DeltaState) -> tuple[Array, DeltaState]:
    """`recurrence.over_sequences` of one segment each, as a loop of `recurrence.step`."""

    def body(state: DeltaState, xs: tuple[Array, ...]) -> tuple[DeltaState, Array]:
        *leaves, is_real = xs
        out, new = recurrence.step(inputs.with_tokens(leaves), state)
        mask = lambda leaf: is_real.reshape(*is_real.shape, *[1] * (leaf.ndim - axis))  # noqa: E731
        return jax.tree.map(lambda new, old: jnp.where(mask(new), new, old), new, state), out

    axis = real.ndim - 1
    tokens = tuple(jnp.moveaxis(leaf, axis, 0) for leaf in (*inputs[:5], real))
    state, out = jax.lax.scan(body, start, tokens)
    return jnp.moveaxis(out, 0, axis), state
