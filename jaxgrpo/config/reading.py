"""From the tables of a TOML file to checked values, with every problem found on the way."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxgrpo.config.keys import DEFAULT_RECIPE, Config, Part, Range, RewardKeys

HINTS: dict[str, Any] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if name != "source"
}
SECTIONS: dict[str, Any] = {
    name: hint for name, hint in HINTS.items() if dataclasses.is_dataclass(hint)
}
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: 'a text in quotes, "..."',
    dict: 'a table, {{ {holds} = "..." }}',
    Mapping: "a table, {{ name = value }}",
}

Values = dict[str, Any]
"""Values that are right by themselves, under their full names: {"rollout.group_size": 8, ...}."""


def read(raw: Mapping[str, Any], problems: list[str]) -> Values:
    """The right values of a whole config, defaults filled in; the others become problems."""
    raw = _rename_tables(raw, problems)
    values: Values = {}
    for section, cls in SECTIONS.items():
        table = raw.get(section, {})
        if isinstance(table, Mapping):
            read_keys(cls, table, f"{section}.", values, problems)
        else:
            problems.append(f"{section} = {show(table)}: expected a table, [{section}]")
    if "rewards" in raw:
        _read_list("rewards", raw["rewards"], _read_reward, values, problems)
    else:
        problems.append('rewards: missing; give at least one, rewards = [{ use = "..." }]')
    if "advantage" in raw:
        _read_list("advantage", raw["advantage"], _read_part, values, problems)
    if "recipe" in raw or "advantage" not in raw:
        recipe = raw.get("recipe", DEFAULT_RECIPE)
        kind = dict if isinstance(recipe, Mapping) else str
        _read_value("recipe", recipe, kind, Range(), values, problems)
    return values


def read_keys(
    cls: type, table: Mapping[str, Any], path: str, values: Values, problems: list[str]
) -> None:
    """Reads one table into `values`. What is no key becomes an option if the table takes any."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    has_options = fields.pop("options", None) is not None
    unknown = [name for name in table if name not in fields]
    meant = set()
    if has_options:
        values[f"{path}options"] = {name: table[name] for name in unknown}
        unknown = []
    for name in unknown:
        meant.add(near := _nearest_key(name, path, list(fields)))
        hint = f"did you mean {near}?" if near else f"the keys here are {', '.join(fields)}"
        problems.append(f"{path}{name}: unknown key; {hint}")
    for name, field in fields.items():
        where = path + name
        if name in table:
            value, limits = table[name], field.metadata.get("range", Range())
            if isinstance(value, Mapping) and field.default_factory is not dataclasses.MISSING:
                value = {**field.default_factory(), **value}  # options alone: of the default part
            _read_value(where, value, hints[name], limits, values, problems)
        elif field.default is not dataclasses.MISSING:
            values[where] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[where] = field.default_factory()
        elif where not in meant:  # a key that is merely misspelt is one problem, not two
            problems.append(f"{where}: missing; expected {_expected(hints[name], field)}")


def show(value: Any) -> str:
    """A value as written in the file, cut if it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _rename_tables(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Reports unknown tables, and reads a misspelt one under the name that was meant."""
    tables = dict(raw)
    for name in [name for name in raw if name not in HINTS]:
        near = difflib.get_close_matches(name, HINTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(HINTS)}"
        homes = [section for section, cls in SECTIONS.items() if name in _names(cls)]
        if homes and not near:
            hint = f"did you mean {' or '.join(f'{section}.{name}' for section in homes)}?"
        problems.append(f"{name}: unknown key; {hint}")
        if near and near[0] not in raw:
            tables[near[0]] = tables[name]
    return tables


def _read_value(
    where: str, value: Any, hint: Any, limits: Range, values: Values, problems: list[str]
) -> None:
    kind = _kind(hint)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is Mapping and isinstance(value, Mapping):
        values[where] = dict(value)
    elif type(value) is not kind:
        expected = KINDS[kind].format(holds=limits.holds)
        problems.append(f"{where} = {show(value)}: expected {expected}")
    elif kind is float and not math.isfinite(value):
        problems.append(f"{where} = {value}: expected a finite number")
    elif kind is dict:
        _read_part(where, value, values, problems, limits.holds)
    elif not limits.allows(value):
        expected = "some text" if value == "" and not limits.choices else str(limits)
        problems.append(f"{where} = {show(value)}: expected {expected}")
    else:
        values[where] = value


def _read_part(
    where: str, value: Part, values: Values, problems: list[str], holds: str = "use"
) -> None:
    if holds not in value:
        lacks = "names no part" if holds == "use" else f"has no {holds}"
        problems.append(f'{where} = {show(value)}: {lacks}; add {holds} = "..."')
    elif not isinstance(value[holds], str) or not value[holds]:
        problems.append(f"{where}.{holds} = {show(value[holds])}: expected {KINDS[str]}")
    else:
        values[where] = dict(value)


def _read_reward(where: str, entry: Any, values: Values, problems: list[str]) -> None:
    found: Values = {}
    before = len(problems)
    read_keys(RewardKeys, entry, f"{where}.", found, problems)
    if len(problems) == before:
        values[where] = RewardKeys(**{name.rpartition(".")[2]: found[name] for name in found})


def _read_list(
    where: str,
    entries: Any,
    read_entry: Callable[[str, Any, Values, list[str]], None],
    values: Values,
    problems: list[str],
) -> None:
    """A list of tables; each right one is also a value of its own, "advantage[0]", ..."""
    right = isinstance(entries, (list, tuple)) and all(isinstance(one, Mapping) for one in entries)
    if not right or not entries:
        expected = f'a list of tables, {where} = [{{ use = "..." }}]'
        problems.append(f"{where} = {show(entries)}: expected {expected}")
        return
    names = [f"{where}[{index}]" for index in range(len(entries))]
    for name, entry in zip(names, entries, strict=True):
        read_entry(name, entry, values, problems)
    if all(name in values for name in names):
        values[where] = tuple(values[name] for name in names)


def _nearest_key(name: str, path: str, fields: list[str]) -> str | None:
    """The full name of the key that was probably meant: one of this table, or of another one."""
    near = difflib.get_close_matches(name, fields, n=1)
    if near:
        return path + near[0]
    everywhere = [f"{section}.{key}" for section, cls in SECTIONS.items() for key in _names(cls)]
    homes = {key.rpartition(".")[2]: key for key in reversed(everywhere)}  # the first one counts
    near = difflib.get_close_matches(name, homes, n=1, cutoff=0.75)
    return homes[near[0]] if near else None


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.name != "options"]


def _kind(hint: Any) -> type:
    """int, float, str, dict or Mapping: the type of a hint, which may be optional."""
    if isinstance(hint, types.UnionType):
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def _expected(hint: Any, field: dataclasses.Field) -> str:
    limits = field.metadata.get("range", Range())
    if limits.choices:
        return str(limits)
    text = KINDS[_kind(hint)].format(holds=limits.holds)
    return text if limits == Range() else f"{text}, {limits}"
