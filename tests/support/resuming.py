"""Runs that die between two saves and go on, and states that have to be equal in every bit."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxgrpo.config.files import Config
from jaxgrpo.training import loop
from jaxgrpo.training.processes import process


class Killed(Exception):
    """Stands for the end of a process between two saves."""


def died_and_resumed(config: Config, step: int) -> loop.Run:
    """The run of a config that died after a step, before that step was saved, and went on."""

    def die(number: int) -> bool:
        if number == step:
            raise Killed
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "stop_requested", die)
        with pytest.raises(Killed):
            loop.train(config)
    return loop.train(config, resume="auto")


def assert_same_bits(before: Any, after: Any) -> None:
    """Two trees of host arrays are equal in structure, dtypes and every bit."""
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()
