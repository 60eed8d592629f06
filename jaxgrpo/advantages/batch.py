"""Scales taken from the whole batch."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxgrpo.advantages import stats
from jaxgrpo.advantages.base import AdvantageTransform, Scheduled, at_step, stateless
from jaxgrpo.errors import InputError
from jaxgrpo.metrics import Metrics
from jaxgrpo.types import Rollouts, Signal


def divide_by_batch_std(eps: Scheduled = 1e-4, ddof: int = 1) -> AdvantageTransform:
    """Divides each value by the standard deviation of all unmasked values of the batch.

    Exact zeros stay 0. Where all are equal, 0.

    Signal: [P, G] or [P, G, T], mask unchanged.
    """
    _check_ddof("divide_by_batch_std", ddof)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        _, std, flat = _moments(value, signal.mask, ddof)
        divisor = jnp.where(flat, 1, std + at_step(eps, rollouts, value.dtype))
        scaled = jnp.where(flat, 0, value / divisor)
        return dataclasses.replace(signal, value=scaled.astype(signal.value.dtype)), {}

    return stateless("divide_by_batch_std", apply)


def whiten_batch(eps: Scheduled = 1e-4, ddof: int = 1) -> AdvantageTransform:
    """Subtracts the mean of all unmasked values of the batch and divides by their deviation.

    Exact zeros stay 0, though they count in the statistics.

    Signal: [P, G] or [P, G, T], mask unchanged.
    """
    _check_ddof("whiten_batch", ddof)

    def apply(signal: Signal, rollouts: Rollouts) -> tuple[Signal, Metrics]:
        value = stats.widen(signal.value)
        mean, std, flat = _moments(value, signal.mask, ddof)
        divisor = jnp.where(flat, 1, std + at_step(eps, rollouts, value.dtype))
        white = jnp.where(flat | (value == 0), 0, (value - mean) / divisor)
        return dataclasses.replace(signal, value=white.astype(signal.value.dtype)), {}

    return stateless("whiten_batch", apply)


def _moments(value, mask, ddof):
    flat_value, flat_mask = value.reshape(-1), mask.reshape(-1)
    mean = stats.mean(flat_value, flat_mask, axis=0).reshape(())
    std = stats.std(flat_value, flat_mask, axis=0, ddof=ddof).reshape(())
    return mean, std, stats.is_flat(flat_value, flat_mask, axis=0).reshape(())


def _check_ddof(name: str, ddof: int) -> None:
    if ddof not in (0, 1):
        raise InputError(f"{name}: ddof = {ddof}, expected 0 (by n) or 1 (by n - 1)")
