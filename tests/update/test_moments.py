"""Moments held in bfloat16: their dtypes, the updates they make, and how they are rounded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxgrpo.core.errors import InputError
from jaxgrpo.update.moments import in_bfloat16
from jaxgrpo.update.optimizer import current_rate, fresh_moments, make_optimizer

ADAMW = {"weight_decay": 0.1, "b2": 0.99}


def optimizer(state_dtype, use="adamw", options=ADAMW):
    return make_optimizer(
        tiny.model().axes,
        use=use,
        learning_rate=0.1,
        updates=8,
        clip_norm=1.0,
        schedule="linear",
        state_dtype=state_dtype,
        options=options,
    )


def gradients(number):
    rng = np.random.default_rng(number)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f"), tiny.params())


def after(transform, number):
    """(the last update, the optimizer's state) after so many updates by random gradients."""
    params = tiny.params()
    state, update = transform.init(params), jax.jit(transform.update)
    for index in range(number):
        updates, state = update(gradients(index), state, params)
    return updates, state


def moments(state):
    shapes = {leaf.shape for leaf in jax.tree.leaves(tiny.params())}
    return [leaf for leaf in jax.tree.leaves(state) if leaf.shape in shapes]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "options"),
    [("adamw", ADAMW), pytest.param("muon", {"beta": 0.9}, marks=pytest.mark.full)],
)
def test_moments_are_held_in_half_the_bytes_and_make_the_same_updates_but_for_rounding(
    use, options
):
    (wide, exact), (narrow, rounded) = (
        after(optimizer(dtype, use, options), 5) for dtype in ("float32", "bfloat16")
    )
    assert {leaf.dtype for leaf in moments(exact)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in moments(rounded)} == {jnp.dtype("bfloat16")}
    size, half = (sum(leaf.nbytes for leaf in moments(state)) for state in (exact, rounded))
    assert half == size / 2
    halved = [leaf for leaf in jax.tree.leaves(rounded) if leaf.dtype == jnp.bfloat16]
    assert len(halved) == len(moments(rounded))
    assert current_rate(rounded) == current_rate(exact)
    assert current_rate(rounded).dtype == jnp.float32
    for wide_leaf, narrow_leaf in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        error = np.linalg.norm(wide_leaf - narrow_leaf) / np.linalg.norm(wide_leaf)
        # Newton-Schulz turns small errors of small singular values into larger ones.
        assert 0 < error < (2**-7 if use == "adamw" else 2**-4)


@pytest.mark.full
def test_a_second_moment_moves_by_steps_that_rounding_to_the_nearest_would_lose():
    transform = in_bfloat16(optax.adam(1e-3, b2=0.999))
    params = {"w": jnp.zeros(4096)}

    def body(state, _):
        return transform.update({"w": jnp.ones(4096)}, state, params)[1], None

    state, _ = jax.jit(lambda state: jax.lax.scan(body, state, length=2000))(transform.init(params))
    moment = state.inner[0].nu["w"]  # pyright: ignore[reportAttributeAccessIssue]
    assert moment.dtype == jnp.bfloat16
    # To the nearest it stands still at 0.25: (1 - 0.25) / 1000 is less than half of 2**-9.
    np.testing.assert_allclose(moment.astype("f").mean(), 1 - 0.999**2000, rtol=0.01)


def test_numbers_of_bfloat16_and_those_that_are_not_finite_stay_as_they_are():
    transform = in_bfloat16(optax.trace(0.5))
    values = jnp.array([0.0, 1.5, -(2.0**-120), jnp.inf, -jnp.inf, jnp.nan])
    for _ in range(20):
        _, state = transform.update({"w": values}, transform.init({"w": values}), {"w": values})
        (trace,) = jax.tree.leaves(state)[1:]
        np.testing.assert_array_equal(trace.astype("f"), values)


@pytest.mark.slow
def test_a_reset_empties_the_moments_and_keeps_the_rate():
    transform = optimizer("bfloat16")
    _, state = after(transform, 3)
    fresh = fresh_moments(transform, tiny.params(), state)
    assert jax.tree.structure(fresh) == jax.tree.structure(state)
    assert all((leaf == 0).all() and leaf.dtype == jnp.bfloat16 for leaf in moments(fresh))
    assert current_rate(fresh) == current_rate(state) < 0.1


@pytest.mark.parametrize("use", ["prodigy", "schedule_free_adamw", "dog"])
def test_a_state_that_holds_weights_is_not_rounded(use):
    optimizer("float32", use, {})
    with pytest.raises(InputError, match=f"the state of optax.contrib.{use} holds weights"):
        optimizer("bfloat16", use, {})
