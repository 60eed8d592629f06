"""A config of required keys alone, and reading it with some replaced."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxgrpo.config import files
from jaxgrpo.config import keys as config_keys
from jaxgrpo.core.errors import ConfigError

MINIMAL = """
rewards = [{ use = "arithmetic" }]
[model]
path = "base"
[data]
path = "task:arithmetic:train"
[optimizer]
learning_rate = 1e-4
[rollout]
prompts_per_step = 8
group_size = 4
max_prompt_tokens = 16
max_completion_tokens = 32
[train]
steps = 10
[run]
dir = "runs/x"
"""


def tables(**more: Any) -> dict[str, Any]:
    """The config as tables, with more of them."""
    return {**tomllib.loads(MINIMAL), **more}


def read(*overrides: str) -> files.Config:
    return files.from_dict(tables(), overrides)


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(*overrides)
    return caught.value.problems


def keys() -> Iterator[tuple[str, Any]]:
    """Every key of a config, as the docs write it, with its default or None where it must be."""
    for table in dataclasses.fields(config_keys.Config):
        if table.name == "source":
            continue
        section = getattr(config_keys, f"{table.name.capitalize()}Keys", None)
        if section is None or table.name == "rewards":
            yield table.name, table.default
            continue
        for field in dataclasses.fields(section):
            if field.name != "options":
                yield f"{table.name}.{field.name}", field.default
