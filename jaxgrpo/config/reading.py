"""Reading the tables of a config into checked values, and every problem found on the way.

The keys are in keys.py. What several of them must fulfil together is in checks.py, files and
writing in files.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxgrpo.config.keys import (
    DEFAULT_RECIPE,
    HINTS,
    KEYS,
    LARGEST,
    SECTIONS,
    TRL_NAMES,
    Part,
    Range,
    RewardKeys,
)

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: 'a text in quotes, "..."',
    dict: 'a table, {{ {holds} = "..." }}',
    Mapping: "a table, {{ name = value }}",
    tuple: 'a list of texts, ["..."], none of them empty',
}

Values = dict[str, Any]
"""Values that are right by themselves, under their full names: {"rollout.group_size": 8, ...}."""


def read(raw: Mapping[str, Any], values: Values) -> Iterator[str]:
    """Reads a whole config: the right ones of its values into `values`, with every default.

    Yields: the problems of the others.
    """
    tables = dict(raw)
    yield from _rename_tables(tables)
    for section, cls in SECTIONS.items():
        table = tables.get(section, {})
        if isinstance(table, Mapping):
            yield from _read_keys(cls, table, f"{section}.", values)
        else:
            yield f"{section} = {show(table)}: expected a table, [{section}]"
    if "rewards" in tables:
        yield from _read_list("rewards", tables["rewards"], _read_reward, values)
    else:
        yield 'rewards: missing; give at least one, rewards = [{ use = "..." }]'
    if "advantage" in tables:
        yield from _read_list("advantage", tables["advantage"], _read_part, values)
    if "recipe" in tables or "advantage" not in tables:
        recipe = tables.get("recipe", DEFAULT_RECIPE)
        kind = dict if isinstance(recipe, Mapping) else str
        yield from _read_value("recipe", recipe, kind, Range(), values)


def make(cls: Any, values: Values, path: str) -> Any:
    """The table of a config, RolloutKeys or another, from values under the names that begin so."""
    names = (field.name for field in dataclasses.fields(cls))
    return cls(**{name: values[path + name] for name in names})


def _read_keys(cls: Any, table: Mapping[str, Any], path: str, values: Values) -> Iterator[str]:
    """Reads one table. What is no key becomes an option if the table takes any."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    has_options = fields.pop("options", None)
    unknown = {name: value for name, value in table.items() if name not in fields}
    meant = set()
    if has_options:
        values[f"{path}options"], unknown = unknown, {}
    for name in unknown:
        meant.add(near := _nearest_key(name, path, list(fields)))
        hint = f"did you mean {near}?" if near else f"the keys here are {', '.join(fields)}"
        yield f"{path}{name}: unknown key; {hint}"
    for name, field in fields.items():
        where, limits = path + name, field.metadata["range"]
        computed: Any = field.default_factory
        has_table = computed is not dataclasses.MISSING
        default: Any = computed() if has_table else field.default
        if name in table:
            value = table[name]
            if isinstance(value, Mapping) and has_table:
                value = {**default, **value}  # options alone: of the default part
            yield from _read_value(where, value, hints[name], limits, values)
        elif default is not dataclasses.MISSING:
            values[where] = default
        elif where not in meant:  # a key that is merely misspelt is one problem, not two
            yield f"{where}: missing; expected {_expected(hints[name], limits)}"


def show(value: Any) -> str:
    """A value as written in the file, cut if it is long."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # Python writes out numbers of at most some 4,000 digits
        return "(a number of thousands of digits)"
    text = text.encode("utf-8", "backslashreplace").decode()  # halves of a surrogate pair
    return text if len(text) <= 60 else text[:57] + "..."


def _rename_tables(tables: dict[str, Any]) -> Iterator[str]:
    """Reports unknown tables, and gives a misspelt one the name that was meant as well."""
    for name in [name for name in tables if name not in HINTS]:
        from_trl = [TRL_NAMES[name]] if name in TRL_NAMES else []
        near = [] if from_trl else difflib.get_close_matches(name, HINTS, n=1)
        homes = from_trl or near or [key for key in KEYS if key.endswith(f".{name}")]
        hint = f"did you mean {' or '.join(homes)}?" if homes else f"there are {', '.join(HINTS)}"
        yield f"{name}: unknown key; {hint}"
        if near:
            tables.setdefault(near[0], tables[name])


def _read_value(where: str, value: Any, hint: Any, limits: Range, values: Values) -> Iterator[str]:
    kind = _kind(hint)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < sys.float_info.max else math.inf
    if kind is str and isinstance(value, datetime.date):  # of TOML, as --set reads 2026-11-25
        value = value.isoformat()
    if kind is tuple:
        yield from _read_texts(where, value, limits, values)
    elif kind is Mapping and isinstance(value, Mapping):
        values[where] = dict(value)
    elif type(value) is not kind:
        yield f"{where} = {show(value)}: expected {KINDS[kind].format(holds=limits.holds)}"
    elif kind is float and not math.isfinite(value):
        yield f"{where} = {value}: expected a finite number"
    elif kind is dict:
        yield from _read_part(where, value, values, limits.holds)
    elif not limits.allows(value):
        expected = "some text" if value == "" and not limits.choices else limits
        if limits.at_most == math.inf and isinstance(value, int) and value > LARGEST:
            expected = f"at most {LARGEST}"
        yield f"{where} = {show(value)}: expected {expected}"
    else:
        values[where] = value


def _read_texts(where: str, value: Any, limits: Range, values: Values) -> Iterator[str]:
    right = isinstance(value, (list, tuple)) and all(isinstance(one, str) and one for one in value)
    if not right:
        yield f"{where} = {show(value)}: expected {KINDS[tuple]}"
    elif limits.choices and (odd := [one for one in value if one not in limits.choices]):
        yield f"{where} = {show(value)}: {show(odd[0])} is not {limits}"
    else:
        values[where] = tuple(value)


def _read_part(where: str, value: Part, values: Values, holds: str = "use") -> Iterator[str]:
    if holds not in value:
        lacks = "names no part" if holds == "use" else f"has no {holds}"
        yield f'{where} = {show(value)}: {lacks}; add {holds} = "..."'
    elif not isinstance(value[holds], str) or not value[holds]:
        yield f"{where}.{holds} = {show(value[holds])}: expected {KINDS[str]}"
    else:
        values[where] = dict(value)


def _read_reward(where: str, entry: Any, values: Values) -> Iterator[str]:
    found: Values = {}
    problems = list(_read_keys(RewardKeys, entry, f"{where}.", found))
    if not problems:
        values[where] = make(RewardKeys, found, f"{where}.")
    yield from problems


def _read_list(
    where: str, entries: Any, read_entry: Callable[..., Iterator[str]], values: Values
) -> Iterator[str]:
    """A list of tables; each right one is also a value of its own, "advantage[0]", ..."""
    right = isinstance(entries, (list, tuple)) and all(isinstance(one, Mapping) for one in entries)
    if not right or not entries:
        expected = f'a list of tables, {where} = [{{ use = "..." }}]'
        yield f"{where} = {show(entries)}: expected {expected}"
        return
    named = {f"{where}[{index}]": entry for index, entry in enumerate(entries)}
    for name, entry in named.items():
        yield from read_entry(name, entry, values)
    if named.keys() <= values.keys():
        values[where] = tuple(values[name] for name in named)


def _nearest_key(name: str, path: str, fields: list[str]) -> str | None:
    """The full name of the key that was probably meant: one of this table, or of another one."""
    if name in TRL_NAMES:
        return TRL_NAMES[name]
    if near := difflib.get_close_matches(name, fields, n=1):
        return path + near[0]
    homes = {key.rpartition(".")[2]: key for key in reversed(KEYS)}  # the first one counts
    near = difflib.get_close_matches(name, homes, n=1, cutoff=0.75)
    return homes[near[0]] if near else None


def _kind(hint: Any) -> type:
    """int, float, str, dict, Mapping or tuple: the type of a hint, which may be optional."""
    if isinstance(hint, types.UnionType):
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def _expected(hint: Any, limits: Range) -> str:
    if limits.choices:
        return str(limits)
    text = KINDS[_kind(hint)].format(holds=limits.holds)
    return text if limits == Range() else f"{text}, {limits}"
