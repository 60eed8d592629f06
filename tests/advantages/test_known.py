"""What steps of a chain tell one another of their groups, so that no pass is made twice."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import laws
import numpy as np

from jaxgrpo.advantages import (
    chain,
    divide_by_group_std,
    evaluate,
    mask_zero_variance,
    stats,
    subtract_group_mean,
    transform,
)
from jaxgrpo.core.types import Signal


def test_what_a_step_knows_of_its_groups_is_what_a_pass_over_them_finds():
    random = np.random.default_rng(0)
    value = random.integers(0, 3, (64, 5)) * np.float32(0.1)
    mask = random.random((64, 5)) < 0.6
    signal = Signal(value=jnp.where(mask, value, 0), mask=jnp.asarray(mask))
    rollouts = laws.make_rollouts()
    for part in (mask_zero_variance(), subtract_group_mean()):
        signal, _, _ = part.update(signal, (), rollouts)
        known, found = stats.recall(signal), stats.summary(signal.value, signal.mask)
        assert known is not None
        for name in ("low", "high", "count", "flat"):
            np.testing.assert_array_equal(getattr(known, name), getattr(found, name), name)
        np.testing.assert_allclose(known.mean, found.mean, rtol=0, atol=1e-7)


def test_what_is_known_is_forgotten_once_a_step_changes_the_value_or_the_mask():
    @transform
    def stretch(signal, rollouts):
        return dataclasses.replace(signal, value=signal.value * jnp.arange(1.0, 5.0)[None])

    @transform
    def drop_first(signal, rollouts):
        return dataclasses.replace(signal, mask=signal.mask.at[:, 0].set(False))

    rewards = np.random.default_rng(1).normal(size=(3, 4))
    with jax.enable_x64(True):
        for step in (stretch, drop_first):
            whole = chain(subtract_group_mean(), step, divide_by_group_std(eps=0.0))
            value, mask = evaluate(whole, rewards)
            changed = rewards - rewards.mean(1, keepdims=True)
            changed = changed * np.arange(1, 5) if step is stretch else changed[:, 1:]
            expected = changed / changed.std(1, ddof=1, keepdims=True)
            np.testing.assert_allclose(
                value[mask].reshape(expected.shape), expected, rtol=0, atol=1e-12
            )
