"""An optimizer's moments, held in fewer bits than they are computed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxgrpo.core.types import GENERATOR


class Bfloat16State(NamedTuple):
    """The state of an optimizer whose moments are held in bfloat16."""

    count: Array  # [] int32, updates made since the moments were empty
    inner: Any  # the optimizer's own


def in_bfloat16(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Holds the moments in bfloat16 from one update to the next; each update computes in float32.

    Moments are the leaves of the state that have shape and place of a parameter. Counts,
    hyperparameters, and statistics of another shape, as a row or column of adafactor's, stay as
    they are.

    They are rounded up or down at random, with chances that make the mean exact. To the nearest a
    second moment would stand still: with b2 = 0.999 it changes by 0.1% or less in an update, and
    bfloat16 has steps of 0.4 to 0.8%. The draws are folds of a constant key with the number of the
    update and the leaf, so that a resumed run makes the same ones.
    """

    def init(params: Any) -> Bfloat16State:
        state = _on_moments(optimizer, _nearest, optimizer.init(params), params)
        return Bfloat16State(jnp.zeros((), jnp.int32), state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("in_bfloat16 needs the parameters: update(gradients, state, params)")
        wide = _on_moments(optimizer, _wide, state.inner, params)
        updates, new_state = optimizer.update(updates, wide, params)
        constant, number = jax.random.key(0, impl=GENERATOR), iter(range(2**31))
        key = jax.random.fold_in(constant, state.count)

        def narrow(leaf: Array, param: Array) -> Array:
            return _at_random(leaf, jax.random.fold_in(key, next(number)))

        new_state = _on_moments(optimizer, narrow, new_state, params)
        return updates, Bfloat16State(jnp.asarray(optax.safe_increment(state.count)), new_state)

    return optax.GradientTransformation(init, update)


def map_params(
    optimizer: optax.GradientTransformation,
    change: Callable[..., Any],
    state: Any,
    *trees: Any,
    transform_non_params: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """The state with `change` (leaf, one of each of `trees`) where it has a leaf per parameter.

    As `optax.tree_utils.tree_map_params`, also where a part of the optimizer, as muon's adam, has
    leaves for some parameters only.

    Args:
      trees: each as that of the parameters.
      transform_non_params: what becomes of leaves that belong to no parameter.
    """

    def is_left_out(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, *leaves: leaf if is_left_out(leaf) else change(leaf, *leaves),
        state,
        *trees,
        transform_non_params=transform_non_params,
        is_leaf=is_left_out,
    )


def _on_moments(optimizer: optax.GradientTransformation, change: Any, state: Any, params: Any):
    """The state with `change` (leaf, parameter) of its moments."""

    def change_moment(leaf: Array, param: Array) -> Array:
        is_moment = leaf.shape == param.shape and jnp.issubdtype(leaf.dtype, jnp.floating)
        return change(leaf, param) if is_moment else leaf

    return map_params(optimizer, change_moment, state, params)


def _nearest(leaf: Array, param: Array) -> Array:
    del param
    return leaf.astype(jnp.bfloat16)


def _wide(leaf: Array, param: Array) -> Array:
    return leaf.astype(param.dtype)


def _at_random(leaf: Array, key: Array) -> Array:
    """One of the two nearest numbers of bfloat16, its first 16 bits, or those with a carry."""
    raw = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    carried = raw + jax.random.bits(key, leaf.shape, jnp.uint16)
    first = (carried >> 16).astype(jnp.uint16)
    drawn = jax.lax.bitcast_convert_type(first, jnp.bfloat16)
    return jnp.where(jnp.isfinite(leaf), drawn, leaf.astype(jnp.bfloat16))
