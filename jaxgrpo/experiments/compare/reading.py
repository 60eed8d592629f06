"""From the tables of an experiment file to checked values, with every problem found on the way."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxgrpo.config.reading import HINTS, SECTIONS, show

MAY_DIFFER = (
    *("recipe", "advantage", "rewards", "loss", "reference", "optimizer"),
    *("rollout.group_size", "rollout.prompts"),
)
"""The keys of a config, and whole tables, that arms may differ in. All else is locked."""

GIVEN = {
    "optimizer.learning_rate": "is what `learning_rates` is for",
    "train.seed": "is what `seeds` is for",
    "run": "is the comparison's own: `dir` says where everything is kept",
    "tracking": "is not for the runs of a comparison",
}
"""Keys that the experiment itself gives to every run."""

Problems = list[str]


def read(raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """The values of an Experiment by name; those that are wrong become problems."""
    values: dict[str, Any] = {}
    near = {name: difflib.get_close_matches(name, KEYS, n=1) for name in raw if name not in KEYS}
    meant = {keys[0] for keys in near.values() if keys}
    for name, keys in near.items():
        problems.append(f"{name}: unknown key; {_hint(name, keys)}")
    for name, (reader, expected, needed) in KEYS.items():
        if name not in raw:
            if needed and name not in meant:  # a key that is merely misspelt is one problem
                problems.append(f"{name}: missing; expected {expected}")
            continue
        value = reader(raw[name])
        if value is None:
            problems.append(f"{name} = {show(raw[name])}: expected {expected}")
        else:
            values[name] = value
    problems += _set_problems(values.get("set", {}))
    values["own_rates"] = {}
    for arm, table in values.get("arms", {}).items():
        problems += _arm_problems(arm, table)
        if "learning_rates" in table:
            values["own_rates"][arm] = _rates(table["learning_rates"]) or ()
    for arm in values.get("arms", {}):
        table = values["arms"][arm]
        values["arms"][arm] = {k: v for k, v in table.items() if k != "learning_rates"}
    problems += _together(values)
    return values


def _hint(name: str, near: list[str]) -> str:
    if near:
        return f"did you mean {near[0]}?"
    if name in HINTS:
        return f"a key of a config; write set.{name} to change it for every arm"
    return f"the keys here are {', '.join(KEYS)}"


def _together(values: Mapping[str, Any]) -> Iterator[str]:
    arms = values.get("arms", {})
    for name in ("control", "tests"):
        asked = values.get(name, ())
        for arm in [asked] if isinstance(asked, str) else asked:
            if arms and arm not in arms:
                near = difflib.get_close_matches(arm, arms, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                yield f"{name} = {show(asked)}: no arm {arm!r}; {hint}arms: {', '.join(arms)}"
            elif name == "tests" and arm == values.get("control"):
                yield f"tests = {show(asked)}: {arm!r} is the control; it is not compared to itself"
    both = sorted({*values.get("seeds", ())} & {*values.get("tuning_seeds", ())})
    if both:
        yield (
            f"tuning_seeds = {show(both)}: among seeds too; a rate must be chosen on other seeds "
            "than those that it is judged on"
        )


def _arm_problems(arm: str, table: Mapping[str, Any]) -> Iterator[str]:
    where = f"arms.{arm}"
    if "learning_rates" in table and not _rates(table["learning_rates"]):
        expected = KEYS["learning_rates"][1]
        yield f"{where}.learning_rates = {show(table['learning_rates'])}: expected {expected}"
    for key in _names(table):
        if key == "learning_rates":
            continue
        if key == "optimizer.learning_rate":
            yield f"{where}.{key}: give the arm rates of its own, {where}.learning_rates = [...]"
        elif not _within(key, MAY_DIFFER):
            known = key.partition(".")[0] in HINTS
            allowed = ", ".join([*MAY_DIFFER, "learning_rates"])
            near = difflib.get_close_matches(key, MAY_DIFFER, n=1)
            why = "locked, the same in every arm" if known else "unknown key"
            hint = f"did you mean {near[0]}? " if near and not known else ""
            also = f"; set.{key} changes it for all of them" if known else ""
            yield f"{where}.{key}: {why}; {hint}arms may differ in {allowed}{also}"


def _set_problems(table: Mapping[str, Any]) -> Iterator[str]:
    for key in _names(table):
        for given, why in GIVEN.items():
            if _within(key, (given,)):
                yield f"set.{key}: {why}; take it out"


def _names(table: Mapping[str, Any]) -> Iterator[str]:
    """Full names of the keys of a table: "recipe", "loss.kl"; nested or dotted as they stand."""
    for name, value in table.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def _within(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _choice(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: value if value in choices else None


def _table(value: Any) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) else None


def _arms(value: Any) -> dict[str, dict[str, Any]] | None:
    if not isinstance(value, Mapping) or len(value) < 2:
        return None
    if not all(isinstance(table, Mapping) and _is_name(name) for name, table in value.items()):
        return None
    return {name: dict(table) for name, table in value.items()}


def _is_name(name: str) -> bool:
    """It names a folder, and a column of results.csv."""
    return bool(name) and all(letter.isalnum() or letter in "-_+" for letter in name)


def _seeds(value: Any) -> tuple[int, ...] | None:
    if type(value) is int:
        return tuple(range(value)) if value >= 1 else None
    right = isinstance(value, list) and value and len(set(map(repr, value))) == len(value)
    if not right or not all(type(seed) is int and seed >= 0 for seed in value):
        return None
    return tuple(value)


def _rates(value: Any) -> tuple[float, ...] | None:
    numbers = isinstance(value, list) and value and all(type(v) in (int, float) for v in value)
    if not numbers or not all(v >= 0 and math.isfinite(v) for v in value):
        return None
    return tuple(map(float, value)) if len(set(value)) == len(value) else None


def _names_list(value: Any) -> tuple[str, ...] | None:
    right = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
    return tuple(dict.fromkeys(value)) if right else None


def _share(value: Any) -> float | None:
    return float(value) if type(value) is float and 0 < value < 1 else None


_SEEDS = "a number of seeds, 7 (for 0 to 6), or a list of different ones, [3, 5]"
KEYS: dict[str, tuple[Callable[[Any], Any], str, bool]] = {
    "base": (_text, 'a config, by path or shipped name, as "quickstart"', True),
    "dir": (_text, 'the folder that holds everything, as "runs/compare"', True),
    "arms": (_arms, "at least two tables [arms.NAME], NAME of letters, digits, - _ +", True),
    "control": (_text, "the arm that the others are compared with", True),
    "learning_rates": (_rates, "a list of different rates, 0 or more, as [1e-4, 3e-4]", True),
    "seeds": (_seeds, _SEEDS, True),
    "tuning_seeds": (_seeds, _SEEDS, False),
    "tests": (_names_list, "a list of arms", False),
    "metric": (_text, 'a metric of evaluation, as "eval/accuracy"', False),
    "better": (_choice("higher", "lower"), '"higher" or "lower"', False),
    "level": (_share, "a number between 0 and 1, as 0.05", False),
    "hold": (_choice("samples", "prompts"), '"samples" or "prompts"', False),
    "set": (_table, "a table of keys for every arm", False),
}
"""The keys of an experiment file: how each is read, what is expected, whether it must be given."""
