"""What runs of one process have in common, made once: inputs read, programs compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.update.step import Share

T = TypeVar("T")

_SAMPLED = ("model", "mesh", "rollout")
_INPUTS = ("model", "mesh", "data", "eval", "rollout.max_prompt_tokens")
_UPDATED = (*_SAMPLED, "loss", "optimizer", "train.steps", "train.rows_per_micro_batch")
DEPENDS = {
    "inputs": _INPUTS,
    "sampler": _SAMPLED,
    "update": _UPDATED,
    "method": (*_UPDATED, "recipe", "advantage", "rewards"),
    "evaluator": (*_SAMPLED, *_INPUTS, "rewards", "train.rows_per_micro_batch"),
}
"""What can be shared, and the keys of a config that it depends on: tables, or keys of one. None of
them depends on the seed, nor on where a run is kept."""


class Shared:
    """Keeps what one run has made for the next. It belongs to one process and one set of devices.

    Only for runs that a config says whole: objects given from Python are not told apart.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def of(self, config: Config) -> Share:
        """The function (name in DEPENDS, make) -> what is shared under that name by this config."""
        flat = configs.flat(configs.tables_of(config))

        def share(name: str, make: Callable[[], T]) -> T:
            keys = DEPENDS[name]
            chosen = {key: flat[key] for key in sorted(flat) if _within(key, keys)}
            place = json.dumps([name, chosen], default=str)
            if place not in self._made:
                self._made[place] = make()
            return self._made[place]

        return share


def _within(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)
