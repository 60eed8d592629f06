"""Changes of a config's tables, before they are read: options of commands, and keys from Python.

A value becomes what TOML has for it, and the path of an input absolute.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrpo.config import keys
from jaxgrpo.config.keys import SECTIONS, input_folder
from jaxgrpo.config.own_code import named_file, with_absolute_files
from jaxgrpo.config.reading import show
from jaxgrpo.core.errors import ConfigError, suggest
from jaxgrpo.core.scores import POLICIES
from jaxgrpo.data.chat import CHOICES
from jaxgrpo.data.storage import is_url
from jaxgrpo.data.written import as_json, text_of_value

_INPUTS = ("model.path", "data.path", "data.path.path", "eval.data")
"""Paths that begin at the config's folder; the third is that of a list's entries."""
_LOCAL = "lora.path"  # one that is no name on the hub
_NAMES = ("use", "recipe")  # keys that may name own code
_CODE = (  # other keys that may
    *("model.family", "eval.scorer", "scores.prompt"),
    *("tools", "environment", "rollout.call_format"),
)
_NAME = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[^.=]*?)\s*([.=]|\Z)""")
"""A name of a key, with or without quotes, and what separates it from the next."""
_ENTRIES: dict[str, Any] = {
    "rewards": keys.RewardKeys,
    "scores": keys.ScoreKeys,
    "data.path": keys.PartKeys,
}
"""Lists -> the keys of their entries."""
REMOVED = object()
"""What "table.key=" sets in place of a value, where the key is to be deleted."""


def absolute(value: Any, folder: Path, where: str = "") -> Any:
    """A copy in which paths of inputs and of own code are absolute, dates of TOML, which JSON does
    not know, are texts, and values of Python are as TOML has them, see `_plain`."""
    value = _plain(value)
    if isinstance(value, Mapping):
        return {
            name: absolute(entry, folder, f"{where}.{name}".lstrip("."))
            for name, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [absolute(entry, folder, where) for entry in value]
    is_policy = where == "scores.policy" or where.startswith("scores.policies.")
    is_input = where in _INPUTS or (is_policy and value not in POLICIES)
    begin = input_folder(str(value), folder) if is_input else None
    is_input = begin is not None
    is_input |= where == "data.chat_template" and value not in CHOICES
    is_input |= where == _LOCAL and not is_url(str(value))
    names_code = where.rpartition(".")[2] in _NAMES or where in _CODE
    names_code |= where.startswith("environment.")
    is_file = names_code and named_file(str(value)) is not None
    if isinstance(value, str) and value and (is_input or is_file):
        return str((begin or folder) / os.path.expanduser(value))
    if isinstance(value, str) and where == "atlas.methods":
        return with_absolute_files(value, folder)
    if isinstance(value, str) and where == "run.dir":  # relative to the working directory
        return os.path.expanduser(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return copy.copy(value)


def drop_rivals(tables: dict[str, Any], names: Iterable[str]) -> None:
    """A recipe is a whole chain: it replaces `advantage` of `tables`, which are changed, and is
    replaced by it. Where both are given they stay, and are a problem.

    Args:
      names: of the keys that are about to be set.
    """
    first_names = {name.partition(".")[0].strip() for name in names}
    for key, rival in (("recipe", "advantage"), ("advantage", "recipe")):
        if key in first_names and rival not in first_names:
            tables.pop(rival, None)


def _plain(value: Any) -> Any:
    """A value from Python as TOML has it: paths as texts, numbers and arrays of NumPy and JAX as
    numbers and lists, with floats of few bits as their shortest numbers.

    >>> _plain(Path("runs", "x")), _plain(np.float32(0.1)), _plain(np.arange(2))
    ('runs/x', 0.1, [0, 1])
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not hasattr(value, "tolist"):
        return value
    array = np.asarray(value)
    is_number = array.ndim == 0 and array.dtype.kind == "f"
    return float(text_of_value(array[()])) if is_number else array.tolist()


def override(tables: dict[str, Any], options: Sequence[str]) -> Iterator[str]:
    """Changes `tables` by each "table.key=value" in turn. Yields: problems."""
    pairs = [_split(text) for text in options]
    drop_rivals(tables, (path[0] for path, value in pairs if value and value.strip()))
    for text, (path, value_text) in zip(options, pairs, strict=True):
        yield from (f"--set {text}: {problem}" for problem in _override(tables, path, value_text))


def _split(text: str) -> tuple[list[str], str | None]:
    """The names before the first =, and what is behind it; None: there is no =. A name in quotes
    may hold a point or a =, as in TOML.

    >>> _split('rollout.goals."a.b" = 0.5')
    (['rollout', 'goals', 'a.b'], ' 0.5')
    """
    path: list[str] = []
    separator, end = ".", 0
    while separator == "." and (match := _NAME.match(text, end)):
        name, separator = match.groups()
        if name[:1] in ("'", '"'):
            with contextlib.suppress(ValueError):  # a quote that nothing closes is a letter
                (name,) = tomllib.loads(f"{name} = 0")
        path.append(name)
        end = match.end()
    return path, text[end:] if separator == "=" else None


def _override(tables: dict[str, Any], path: list[str], value_text: str | None) -> Iterator[str]:
    """Sets a key of `tables`, which are changed; nothing but spaces unsets it. Yields a problem."""
    if value_text is None or not all(path):
        yield "expected table.key=value"
        return
    plain, name = value_text.strip(), ".".join(path)
    try:
        parsed = tomllib.loads(f"value = {value_text}") if plain else {"value": _nothing(path)}
    except (ValueError, RecursionError) as error:
        if plain.startswith(("[", "{", '"', "'")):
            field = keys.KEYS.get(name)
            takes_text = field is not None and field.type in ("str", "str | None")
            is_template = takes_text and plain.startswith(("[", "{"))
            hint = f"""; a text is quoted twice, --set '{name}="{plain}"'""" if is_template else ""
            yield f"the value is not TOML: {error}{hint}"
            return
        right = as_json(plain)
        if "null" in (plain, right):
            right = "nothing behind the =, which leaves the key unset"
        if right:
            yield f"{plain} would be a text; write {right}"
            return
        parsed = {"value": plain}
    if len(parsed) > 1:
        yield "behind the value is a line break, and more: give each key its --set"
        return
    try:
        if parsed["value"] is REMOVED:
            yield from _remove(tables, path)
        else:
            put(tables, path, parsed["value"], Path.cwd())
    except (TypeError, AttributeError, ValueError, IndexError):
        hint = _dead_end(tables, path, parsed["value"])
        yield f"{name} does not lead to a key of the config{hint}"


def _nothing(path: Sequence[str]) -> Any:
    """What "table.key=" sets: None, where a key is unset by default and takes no empty text, and a
    whole table, or another key beside the tables; REMOVED for an option of a part and an entry of a
    table of any names; else an empty text, which is refused where it is no value."""
    *places, last = path
    if not places:
        return None if last in keys.HINTS else ""
    is_entry = places[-1].isdigit()
    table = ".".join(places[:-1] if is_entry else places)
    cls = (_ENTRIES if is_entry else SECTIONS).get(table)
    fields = {} if cls is None else cls.__dataclass_fields__
    if last in fields and last != "options":
        field = fields[last]
        is_unset = field.default is None and not field.metadata["range"].may_be_empty
        return None if is_unset else ""
    has_any = "options" in fields or (cls is None and places[0] in keys.HINTS)
    return REMOVED if has_any and last != "use" and not last.isdigit() else ""


def _remove(tables: dict[str, Any], path: Sequence[str]) -> Iterator[str]:
    """Deletes an entry of a table within `tables`. Yields a problem if there is none.

    Raises: TypeError and the like where the path leads through what is no table.
    """
    table: Any = tables
    for name in path[:-1]:
        table = table[int(name)] if isinstance(table, list) else table.get(name, {})
    if not isinstance(table, dict):
        raise TypeError
    if path[-1] in table:
        del table[path[-1]]
    else:
        hint = f"; {suggest(path[-1], table)}" if table else ""
        yield f"{'.'.join(path)} is not set, so that nothing can be unset{hint}"


def _dead_end(tables: Mapping[str, Any], path: Sequence[str], value: Any) -> str:
    """Behind ": ", where a path ends that leads to no key, and what to write; "" if it leads on."""
    table: Any = tables
    for count, name in enumerate(path):
        where, rest = ".".join(path[:count]), ".".join(path[count:])
        if isinstance(table, list):
            if not name.isdigit() or int(name) >= len(table):
                entries = f"{len(table)} entr{'y' if len(table) == 1 else 'ies'}"
                names = "".join(f", {where}.{number}" for number in range(len(table)))
                return f": {where} has {entries}{names}; for more give the list, {where} = [...]"
            table = table[int(name)]
        elif isinstance(table, Mapping):
            if name not in table:
                return ""
            table = table[name]
        elif isinstance(table, str) and _takes_part(where) and value is not REMOVED:
            part = f"{{ use = {show(table)}, {rest} = {show(value)} }}"
            return f": {where} = {show(table)} is a text; write {where} = {part}"
        else:
            return f": {where} = {show(table)} has no entries"
    return ""


def _takes_part(where: str) -> bool:
    """Whether a key, by its full name without numbers, holds a part."""
    holds_part = where in keys.KEYS and keys.KEYS[where].type in ("Part", "Part | None")
    return holds_part or where in ("recipe", "advantage")


def put(
    tables: dict[str, Any], path: Sequence[str], value: Any, folder: Path, merge: bool = False
) -> None:
    """Sets one key of `tables`, which are changed; missing tables are added.

    Another `use` of a part, loss.surrogate or the like, drops the options of the part before: a
    clip's bounds mean nothing to GSPO. In the table optimizer and in rewards their own keys stay,
    clip_norm or weight, whatever is used.

    Args:
      path: names of tables and keys; the entry of a list by its number, ["rewards", "0", "weight"].
      folder: where relative paths in `value` begin.
      merge: a table as value replaces only the keys that it has, unless it names a part. An empty
        one empties a table within a section.
    """
    table: Any = tables
    for name in path[:-1]:
        table = table[int(name)] if isinstance(table, list) else table.setdefault(name, {})
    last = path[-1]
    if merge and isinstance(value, Mapping) and isinstance(table, dict):
        names_no_part = "use" not in value or last in SECTIONS
        empties = not value and len(path) > 1
        if names_no_part and not empties and isinstance(table.get(last), dict):
            for name in sorted(value, key=lambda name: name != "use"):
                put(tables, [*path, name], value[name], folder, merge=True)
            return
    if last == "use":
        _drop_options(table, path, value)
    place: Any = int(last) if isinstance(table, list) else last
    table[place] = absolute(value, folder, ".".join(name for name in path if not name.isdigit()))


def _drop_options(table: Any, path: Sequence[str], use: Any) -> None:
    """Deletes the options in the table of a part, at `path`, if its `use` is about to change."""
    place = ".".join(name for name in path[:-1] if not name.isdigit())
    cls: Any = {"optimizer": keys.OptimizerKeys, "rewards": keys.RewardKeys}.get(place)
    table_keys = {} if cls is None else cls.__dataclass_fields__
    if not isinstance(table, dict) or not (table_keys or _takes_part(place)):
        return
    if table.get("use", table_keys["use"].default if table_keys else None) != use:
        for name in table.keys() - table_keys.keys() - {"use"}:
            del table[name]


def replace(tables: dict[str, Any], changes: Mapping[str, Any], folder: Path) -> None:
    """Replaces keys of `tables`, which are changed, by nested or dotted ones; see `put`.

    Args:
      folder: where relative paths in `changes` begin.

    Raises: ConfigError where a name leads through what is no table.
    """
    drop_rivals(tables, (name for name, value in changes.items() if value is not None))
    for key, value in changes.items():
        try:
            put(tables, key.split("."), value, folder, merge=True)
        except (TypeError, AttributeError, ValueError, IndexError):
            hint = _dead_end(tables, key.split("."), value)
            problem = f"{key}: does not lead to a key of the config{hint}"
            raise ConfigError("changes", [problem]) from None
