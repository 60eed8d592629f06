"""A config put together in Python: from objects, dicts and files, with keys replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.own_code import python_name
from jaxgrpo.config.reading import SECTIONS
from jaxgrpo.rewards import name_of


def config_of(
    config: Config | Mapping[str, Any] | str | Path,
    changes: Mapping[str, Any] | None = None,
    rewards: Iterable[Any] | None = None,
    advantage: AdvantageTransform | None = None,
) -> Config:
    """The config that a call from Python means.

    Args:
      config: a Config, its tables as dicts, a TOML file, or a shipped config's name.
      changes: keys to replace, nested ({"train": {"steps": 3}}) or dotted ({"train.steps": 3});
        relative paths in them begin at the working directory.
      rewards, advantage: objects given beside the config; it records their names.

    Raises: ConfigError with all problems.
    """
    source = None
    if isinstance(config, Config):
        tables, source = configs.tables_of(config), config.source
    elif isinstance(config, Mapping):
        tables = copy.deepcopy(dict(config))
    else:
        tables, source = configs.read_tables(config)
    replace(tables, changes or {}, Path.cwd())
    if rewards is not None:
        tables["rewards"] = list(_recorded(rewards))
    if advantage is not None:
        tables.pop("recipe", None)
        tables["advantage"] = [{"use": python_name(advantage.name)}]
    return configs.from_dict(tables, source=source)


def replace(tables: dict[str, Any], changes: Mapping[str, Any], folder: Path) -> None:
    """Replaces keys of `tables`, which are changed, by nested or dotted ones.

    Of a table of the config, optimizer or the like, only the keys given are replaced; another `use`
    drops the options of what was named before.

    Args:
      folder: where relative paths in `changes` begin.
    """
    for key, value in configs.absolute(dict(changes), folder).items():
        path = key.split(".")
        table = tables.setdefault(key, {}) if key in SECTIONS else None
        if isinstance(table, dict) and isinstance(value, Mapping) and "use" in value:
            configs.drop_options(tables, [key, "use"], value["use"])
            for name, entry in value.items():
                _set(tables, [key, name], entry)
        else:
            configs.drop_options(tables, path, value)
            _set(tables, path, value)


def _set(tables: dict[str, Any], path: list[str], value: Any) -> None:
    """Replaces one key; of a table that is given as a dict only the keys it has."""
    for name in path[:-1]:
        tables = tables.setdefault(name, {})
    last = path[-1]
    if isinstance(value, Mapping) and isinstance(tables.get(last), dict) and "use" not in value:
        for name, entry in value.items():
            _set(tables[last], [name], entry)
    else:
        tables[last] = value


def _recorded(rewards: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Entries of a config for rewards given as objects; {name: function} names them."""
    if isinstance(rewards, Mapping):
        for name, function in rewards.items():
            yield {
                "use": function if isinstance(function, str) else python_name(name),
                "name": name,
            }
        return
    for function in rewards:
        name = function if isinstance(function, str) else python_name(name_of(function))
        yield {"use": name}
