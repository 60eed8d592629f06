"""How a run begins, or goes on from its newest checkpoint."""

from __future__ import annotations

import tomllib
from typing import Any

import jax

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import TrainState
from jaxgrpo.models import sharding
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.folder import RunFolder
from jaxgrpo.training.setup import Setup


def begin(folder: RunFolder, config: Config, done: int | None) -> None:
    """Drops what was logged behind the restored step, and records the config and own code."""
    folder.rewind(done)
    folder.write_config(configs.to_toml(config))
    folder.copy_code(config.own_files)


def refuse_other_config(folder: RunFolder, config: Config) -> None:
    """A run goes on only with the config it began with, but for keys that may change."""
    text = folder.config()
    if text is None:
        return
    before = configs.from_dict(tomllib.loads(text))
    difference = configs.resume_difference(before, config)
    if difference:
        raise InputError(
            f"{folder.path}: the run began with another config; these keys may not change:\n  "
            + "\n  ".join(difference)
            + "\nset them back, or set run.dir to another folder"
        )


def first_or_restored(
    parts: Setup, checkpoints: Checkpoints
) -> tuple[TrainState, int, dict[str, Any]]:
    """State, finished steps and what was saved beside it."""
    if checkpoints.latest() is None:
        return parts.state, 0, {}
    wanted = jax.tree.map(_without_values, parts.state)
    # The first state makes room: a device holds one, not two.
    jax.tree.map(lambda leaf: leaf.delete() if isinstance(leaf, jax.Array) else None, parts.state)
    state, meta = checkpoints.restore(wanted)
    return state, int(sharding.to_host(state.step)), meta


def _without_values(leaf: Any) -> Any:
    """The shape of an array on devices, and where it lies; an array of the host as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
