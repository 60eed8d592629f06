"""Reading a config, writing it, and comparing it with the one that a run began with.

The keys stand in config_keys.py. A config is TOML; `load` reads it, checks it as a whole and says
everything that is wrong in one message.

A config put together in Python: from objects, dicts and files, with keys replaced.
"""

from __future__ import annotations

import copy
import dataclasses
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import checks, reading
from jaxgrpo.config.keys import SHIPPED, Config, folder_of, is_path
from jaxgrpo.config.own_code import file_of, python_name
from jaxgrpo.config.reading import SECTIONS
from jaxgrpo.core.errors import ConfigError, suggest
from jaxgrpo.data.chat import CHOICES
from jaxgrpo.rewards import name_of

__all__ = ["RESUMABLE", "Config", "from_dict", "load", "resume_difference", "shipped", "to_toml"]

RESUMABLE = {
    "train.steps": "train longer, or less; not with a schedule that ends at train.steps",
    "eval": "what is measured does not act on training",
    "checkpoint": "when to save and what to keep",
    "tracking": "who else sees the metrics does not act on training",
    "run": "the folder may have moved",
}
"""Keys, and whole tables, that may change when a run goes on, and why."""

_INPUTS = ("model.path", "data.path", "eval.data")  # paths that begin at the config's folder
_NAMES = ("use", "recipe")  # keys that may name own code


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file, or a shipped config by its name.

    Args:
      path: a TOML file; or "quickstart" for the shipped quickstart.toml.
      overrides: "table.key=value", applied in turn; the value is TOML, or plain text as it stands.
        In a list an entry is named by its number: "rewards.0.weight=2". Relative paths in them
        begin at the working directory, those in the file at its folder.

    Raises: ConfigError with all problems.
    """
    raw, source = read_tables(path)
    return from_dict(raw, overrides, source=source)


def read_tables(path: str | Path) -> tuple[dict[str, Any], Path]:
    """The tables of a config file, or of a shipped config by its name, and the file.

    Raises: ConfigError where there is none, or it is no TOML.
    """
    source = _find(Path(path))
    try:
        return tomllib.loads(source.read_text(encoding="utf-8")), source
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(source), [f"not TOML: {error}"]) from None


def from_dict(
    raw: Mapping[str, Any], overrides: Sequence[str] = (), *, source: Path | None = None
) -> Config:
    """A config from tables as `tomllib` reads them. Raises: ConfigError with all problems.

    Args:
      source: the file they came from, where relative paths begin; None: the working directory.
    """
    problems: list[str] = []
    tables: dict[str, Any] = absolute(raw, folder_of(source))
    for override in overrides:
        _override(tables, override, problems)
    values = reading.read(tables, problems)
    problems.extend(checks.check(values))
    if problems:
        raise ConfigError(str(source or "config"), problems)
    return _build(values, source)


def shipped() -> dict[str, Path]:
    """The configs that come with the package, by name."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.toml"))}


def to_toml(config: Config) -> str:
    """The whole config with every default and absolute paths; `load` gives an equal one back."""
    import tomli_w

    return tomli_w.dumps(tables_of(config))


def resume_difference(old: Config, new: Config) -> list[str]:
    """What forbids a run begun with `old` to go on with `new`: one line per key, [] if nothing.

    >>> resume_difference(config, config)  # doctest: +SKIP
    []
    """
    before, after = flat(tables_of(old)), flat(tables_of(new))
    allowed = {name for name in before.keys() | after.keys() if _may_change(name)}
    if old.optimizer.schedule != "constant":
        allowed.discard("train.steps")
    if old.reference.reset_patience:
        # The evaluation says when the reference is reset, and so acts on training.
        allowed = {name for name in allowed if not name.startswith("eval.")}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in allowed and before.get(name) != after.get(name):
            was, now = (
                reading.show(keys[name]) if name in keys else "not set" for keys in (before, after)
            )
            lines.append(f"{name}: {was} -> {now}")
    return lines


def _may_change(name: str) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in RESUMABLE)


def _find(path: Path) -> Path:
    if path.is_file():
        return path.resolve()
    known = shipped()
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(str(path), ["there is no such file"])
    if path.name not in known:
        raise ConfigError(str(path), [f"no shipped config: {suggest(path.name, known)}"])
    return known[path.name]


def absolute(value: Any, folder: Path, where: str = "") -> Any:
    """A copy in which paths of inputs and of own code are absolute."""
    if isinstance(value, Mapping):
        return {
            name: absolute(entry, folder, f"{where}.{name}".lstrip("."))
            for name, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [absolute(entry, folder, where) for entry in value]
    is_input = where in _INPUTS and is_path(str(value), folder)
    is_input |= where == "data.chat_template" and value not in CHOICES
    is_file = where.rpartition(".")[2] in _NAMES and file_of(str(value)) is not None
    if isinstance(value, str) and value and (is_input or is_file):
        return str(folder / Path(value).expanduser())
    return copy.copy(value)


def _override(raw: dict[str, Any], text: str, problems: list[str]) -> None:
    """Sets one key of `raw`, which is changed."""
    name, equals, written = text.partition("=")
    path = [part.strip() for part in name.split(".")]
    if not equals or not all(path):
        problems.append(f"--set {text}: expected table.key=value")
        return
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError as error:
        if written.strip().startswith(("[", "{", '"', "'")):
            problems.append(f"--set {text}: the value is not TOML: {error}")
            return
        value = written.strip()
    table: Any = raw
    try:
        for part in path[:-1]:
            table = table[int(part)] if isinstance(table, list) else table.setdefault(part, {})
        last: Any = int(path[-1]) if isinstance(table, list) else path[-1]
        names = ".".join(part for part in path if not part.isdigit())
        drop_options(raw, path, value)
        table[last] = absolute(value, Path.cwd(), names)
    except (TypeError, AttributeError, ValueError, IndexError):
        problems.append(f"--set {text}: {name} does not lead to a key of the config")


def drop_options(raw: Mapping[str, Any], path: Sequence[str], value: Any) -> None:
    """Empties the table of a part, loss.surrogate or the like, before its `use` changes.

    Options belong to the part that was named before: a clip's bounds are nothing to GSPO. Of
    optimizer its own keys stay, clip_norm and the like, whatever is used.
    """
    section = reading.SECTIONS.get(path[0])
    if section is None or path[-1] != "use":
        return
    if len(path) == 2:
        _drop_factory_options(raw.get(path[0]), section, value)
        return
    if len(path) != 3:
        return
    types = {field.name: str(field.type) for field in dataclasses.fields(section)}
    tables = raw.get(path[0])
    table = tables.get(path[1]) if isinstance(tables, dict) else None
    if "Part" in types.get(path[1], "") and isinstance(table, dict) and table.get("use") != value:
        table.clear()


def _drop_factory_options(table: Any, section: type, value: Any) -> None:
    """What stands in the table beside the keys of its section, where `use` changes."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    if not isinstance(table, dict) or "use" not in fields or "options" not in fields:
        return
    if table.get("use", fields["use"].default) != value:
        for name in table.keys() - fields.keys():
            del table[name]


def _build(values: reading.Values, source: Path | None) -> Config:
    tables: dict[str, Any] = {name: values.get(name) for name in ("recipe", "advantage")}
    for section, cls in reading.SECTIONS.items():
        names = [field.name for field in dataclasses.fields(cls)]
        tables[section] = cls(**{name: values[f"{section}.{name}"] for name in names})
    return Config(**tables, rewards=values["rewards"], source=source)


def tables_of(config: Config) -> dict[str, Any]:
    """The config as TOML would have it: no None, options beside the keys of their table."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            options = fields.pop("options", {})
            return plain({**fields, **options})
        if isinstance(value, Mapping):
            return {name: plain(entry) for name, entry in value.items() if entry is not None}
        return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    return {name: value for name, value in plain(config).items() if name != "source"}


def flat(tables: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Every value under its full name; lists are one value."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        inner = isinstance(value, Mapping)
        found |= flat(value, f"{path}{name}.") if inner else {f"{path}{name}": value}
    return found


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
        tables, source = tables_of(config), config.source
    elif isinstance(config, Mapping):
        tables = copy.deepcopy(dict(config))
    else:
        tables, source = read_tables(config)
    replace(tables, changes or {}, Path.cwd())
    if rewards is not None:
        tables["rewards"] = list(_recorded(rewards))
    if advantage is not None:
        tables.pop("recipe", None)
        tables["advantage"] = [{"use": python_name(advantage.name)}]
    return from_dict(tables, source=source)


def replace(tables: dict[str, Any], changes: Mapping[str, Any], folder: Path) -> None:
    """Replaces keys of `tables`, which are changed, by nested or dotted ones.

    Of a table of the config, optimizer or the like, only the keys given are replaced; another `use`
    drops the options of what was named before.

    Args:
      folder: where relative paths in `changes` begin.
    """
    for key, value in absolute(dict(changes), folder).items():
        path = key.split(".")
        table = tables.setdefault(key, {}) if key in SECTIONS else None
        if isinstance(table, dict) and isinstance(value, Mapping) and "use" in value:
            drop_options(tables, [key, "use"], value["use"])
            for name, entry in value.items():
                _set(tables, [key, name], entry)
        else:
            drop_options(tables, path, value)
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
