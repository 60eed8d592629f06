"""The entropy control: how its coefficient moves, and when it acts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.core.metrics import Mean, finalise
from jaxgrpo.losses import Tokens, adaptive_entropy, policy_loss


def state_after(penalty, *entropies):
    state = penalty.init()
    for entropy in entropies:
        weight = jnp.float32(0 if entropy is None else 2)
        state = penalty.observe(
            state, {"entropy": Mean(total=jnp.float32(2 * (entropy or 0)), weight=weight)}
        )
    return {name: float(value) for name, value in state.items()}


def test_the_adaptive_coefficient_moves_towards_the_target_within_its_bounds():
    penalty = adaptive_entropy(1.0, coefficient=0.02, delta=0.01, low=0.01, high=0.04)
    coefficients = [
        state_after(penalty, *entropies)["coefficient"]
        for entropies in ([], [0.5], [0.5] * 5, [1.0], [1.5], [1.5] * 5, [0.5, None])
    ]
    np.testing.assert_allclose(coefficients, [0.02, 0.03, 0.04, 0.02, 0.01, 0.01, 0.03], rtol=1e-6)
    assert state_after(penalty, 0.5, None)["entropy"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measured", "applied"), [(np.inf, 0.0), (1.1, 0.0), (1.0, 0.3), (0.2, 0.3)]
)
def test_the_adaptive_bonus_acts_while_the_entropy_is_at_most_the_target(measured, applied):
    penalty = adaptive_entropy(1.0, coefficient=0.3)
    state = {"coefficient": jnp.float32(0.3), "entropy": jnp.float32(measured)}
    mask = jnp.array([[True, True, False]])
    entropy = jnp.array([[0.5, 0.7, jnp.nan]])

    def run(entropy):
        tokens = Tokens.from_ratios(jnp.ones((1, 3)), policy_entropy=entropy)
        value, metrics = penalty.compute(dataclasses.replace(tokens, mask=mask), state)
        return value.sum(), metrics

    (value, metrics), gradient = jax.value_and_grad(run, has_aux=True)(entropy)
    assert float(value) == pytest.approx(-applied * 1.2)
    np.testing.assert_allclose(gradient, [[-applied, -applied, 0]], rtol=1e-6)
    assert finalise(metrics) == pytest.approx({"entropy": 0.6, "entropy_coefficient": applied})


def seen_on_plain_arrays(penalty, entropies):
    """(loss, coefficient after it) of updates whose policy has these entropies."""
    unit, mask = jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    state, history = penalty.init(), []
    for entropy in entropies:
        loss, metrics = policy_loss(
            *("clip", "token_mean", unit, unit, jnp.zeros(1), mask),
            penalties=[penalty],
            states={penalty.name: state},
            policy_entropy=entropy * unit,
        )
        state = penalty.observe(state, metrics)
        history.append((float(loss), float(state["coefficient"])))
    return history


@pytest.mark.full
@pytest.mark.slow
def test_on_plain_arrays_the_adaptive_bonus_acts_from_the_second_update_on():
    penalty = adaptive_entropy(1.0, coefficient=0.3, delta=0.1)
    history = seen_on_plain_arrays(penalty, (0.5, 0.7, 0.2))
    np.testing.assert_allclose(history, [(0, 0.4), (-0.4 * 0.7, 0.5), (-0.5 * 0.2, 0.6)], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("states", [None, {}, {"adaptive": 1}])
def test_a_bonus_that_would_never_act_for_lack_of_its_state_is_refused(states):
    unit, mask = jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(InputError, match=r"adaptive_entropy remembers .* penalty\.init\(\)"):
        policy_loss(
            *("clip", "token_mean", unit, unit, jnp.zeros(1), mask),
            penalties=[adaptive_entropy(1.0)],
            states=states,
            policy_entropy=unit,
        )
