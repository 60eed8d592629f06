"""Configs from TOML files and from Python: read, changed, written, and compared to resume a run.

`load` reads a file and `make_config` what a call from Python gives; both report everything that is
wrong in one message. The keys are in keys.py, changes of tables in changes.py, the checks of single
values in reading.py, those of several together in checks.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgrpo.advantages import AdvantageTransform
from jaxgrpo.config import checks, keys, reading
from jaxgrpo.config.changes import absolute, override, replace
from jaxgrpo.config.keys import SECTIONS, Config, config_folder
from jaxgrpo.config.own_code import python_name
from jaxgrpo.config.reading import show
from jaxgrpo.core.errors import ConfigError, InputError, differing_names, no_text, suggest
from jaxgrpo.rewards import callable_name

RESUMABLE = {
    "train.steps": "train longer, or less; not with a schedule that ends at train.steps",
    "eval": "what is measured does not act on training",
    "checkpoint": "when to save and what to keep",
    "mesh": "how devices share the work acts on the rounding of sums alone",
    "plan": "what is planned does not act on training",
    "tracking": "who else sees the metrics does not act on training",
    "run": "the folder may have moved",
}
"""Keys, and whole tables, that may change when a run is resumed, and why."""


def load(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, is_stored: bool = False
) -> Config:
    """Reads a config file, or a shipped config by its name.

    Args:
      path: a TOML file; or "quickstart" for the shipped quickstart.toml.
      overrides: "table.key=value", applied in turn; the value is TOML, or plain text.
        In a list an entry is named by its number: "rewards.0.weight=2". Relative paths in them
        begin at the working directory, those in the file at its folder.
      is_stored: as in `from_dict`.

    Raises: ConfigError with all problems.
    """
    raw, source = read_tables(path)
    return from_dict(raw, overrides, source=source, is_stored=is_stored)


def read_tables(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Path]:
    """The tables of a config file, or of a shipped config by its name, and the file.

    Raises: ConfigError if there is none, or it is no TOML.
    """
    source, configs = Path(os.path.expanduser(path)), shipped()
    if source.is_file():
        source = source.resolve()
    elif source.is_dir() and (len(source.parts) > 1 or source.name not in configs):
        file = source / "config.toml"
        remedy = f"the config of the run in it is {file}" if file.is_file() else "give a TOML file"
        raise ConfigError(str(source), [f"is a folder; {remedy}"])
    elif source.suffix or len(source.parts) > 1 or source.name not in configs:
        is_path, near = source.suffix or len(source.parts) > 1, source.with_suffix(".toml")
        problem = "there is no such file" if is_path else "no shipped config: "
        hint = "" if is_path else suggest(source.name, configs)
        if near.is_file():
            problem, hint = "there is no such file; ", f"did you mean {near}?"
        raise ConfigError(str(source), [problem + hint])
    else:
        source = configs[source.name]
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(str(source), [f"not TOML: {error}"]) from None
    except OSError as error:
        raise ConfigError(str(source), [f"cannot be read ({error.strerror})"]) from None
    return parse_tables(text, str(source)), source


def parse_tables(text: str, where: str) -> dict[str, Any]:
    """The tables that a text describes. Raises: ConfigError if it is no TOML.

    Args:
      where: it is from.
    """
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # as editors of Windows begin files
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits, lists of 1,000 levels
        reason = str(error).replace("Cannot overwrite a value", "a key stands twice")
        raise ConfigError(where, [f"not TOML: {reason}"]) from None


def from_text(text: str, where: str) -> Config:
    """The config that a run folder holds. Raises: ConfigError. Args: where: the text is from."""
    return from_dict(parse_tables(text, where), name=where, is_stored=True)


def from_dict(
    raw: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: Path | None = None,
    name: str = "config",
    is_stored: bool = False,
) -> Config:
    """A config from tables as `tomllib` reads them. Raises: ConfigError with all problems.

    Args:
      source: the file they came from; relative paths begin at its folder, or if None at the
        working directory.
      name: what messages call it, if there is no source.
      is_stored: whether a run has stored them. Files and packages that it names may be on another
        machine, or gone: who needs them looks for them.
    """
    tables: dict[str, Any] = absolute(raw, config_folder(source))
    problems = list(override(tables, overrides))
    values: reading.Values = {}
    unusable = list(wrong_values(tables))
    problems += [*unusable, *reading.read(tables, values)]
    if not unusable:  # which the checks of single parts would refuse again, in other words
        problems += checks.check(values)
    if is_stored:
        problems = [problem for problem in problems if not isinstance(problem, checks.Absent)]
    if problems:
        raise ConfigError(str(source or name), [*dict.fromkeys(problems)])
    sections = {name: reading.make(cls, values, f"{name}.") for name, cls in SECTIONS.items()}
    method: Any = {name: values.get(name) for name in ("recipe", "advantage")}
    lists = {name: values[name] for name in ("rewards", "scores", "tools", "environment")}
    return Config(**sections, **method, **lists, source=source)


def wrong_values(value: Any, where: str = "") -> Iterator[str]:
    """Texts, at any depth, that no file and no path can hold, and numbers that are not finite: NaN
    is unequal to itself, so that a run with it would differ from its config for ever."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from wrong_values(entry, f"{where}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from wrong_values(entry, f"{where}[{index}]")
    elif isinstance(value, str) and (problem := no_text(value)):
        yield f"{where} = {show(value)}: {problem}"
    elif isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:
        number = math.inf if isinstance(value, int) else value  # as a float reads it
        yield f"{where} = {number}: expected a finite number"


def shipped() -> dict[str, Path]:
    """The configs that come with the package, by name."""
    return {file.stem: file for file in sorted(keys.SHIPPED.glob("*.toml"))}


def to_toml(config: Config) -> str:
    """The whole config with every default and absolute paths; `load` gives an equal one back."""
    return write_toml(to_tables(config))


def write_toml(tables: Mapping[str, Any]) -> str:
    """TOML that `tomllib` reads as these tables. They hold texts, numbers, booleans, lists, tables.

    Python reads TOML and does not write it; so a run needs no package for its own config, which a
    machine may lack.

    >>> print(write_toml({"recipe": "grpo", "train": {"steps": 2, "learning_rate": 1e-05}}), end="")
    recipe = "grpo"
    <BLANKLINE>
    [train]
    steps = 2
    learning_rate = 1e-05
    """
    return "\n".join([*_toml_lines(tables, ""), ""]).lstrip("\n")


def _toml_lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """The lines of a table, and of those in it, which have headings of their own."""
    inner = {key: entry for key, entry in table.items() if isinstance(entry, Mapping)}
    if name and (len(inner) < len(table) or not table):
        yield from ("", f"[{name}]")
    for key, entry in table.items():
        if key not in inner:
            yield f"{_toml_key(key)} = {_toml_value(entry)}"
    for key, entry in inner.items():
        yield from _toml_lines(entry, f"{name}.{_toml_key(key)}".lstrip("."))


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    """A value on one line; a list of tables, as `rewards`, with each on a line of its own."""
    if isinstance(value, Mapping):
        entries = [f"{_toml_key(key)} = {_toml_value(entry)}" for key, entry in value.items()]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    if isinstance(value, (list, tuple)):
        has_tables = any(isinstance(entry, Mapping) for entry in value)
        texts = [*map(_toml_value, value)]
        lines = "".join(f"\n  {text}," for text in texts)
        return f"[{lines}\n]" if has_tables else f"[{', '.join(texts)}]"
    if isinstance(value, str):  # as JSON writes it, which leaves this sign as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    raise TypeError(f"{value!r}: TOML has no {type(value).__name__} as configs hold it")


def resume_difference(old: Config, new: Config) -> list[str]:
    """Why a run begun with `old` cannot be resumed with `new`: one line per key, [] if it can.

    >>> begun = load("quickstart")
    >>> resume_difference(begun, load("quickstart", ["train.seed=1", "train.steps=90"]))
    ['train.seed: 0 -> 1']
    """
    old_values, new_values = (flat(_scoring(to_tables(config))) for config in (old, new))
    locked = old.optimizer.schedule != "constant", bool(old.reference.reset_patience)
    return [
        f"{name}: {_value_text(old_values, name)} -> {_value_text(new_values, name)}"
        for name in differing_names(old_values, new_values)
        if not _may_change(name, *locked)
    ]


def _scoring(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables without what rewards do if they fail, which acts on no score."""
    rewards = [
        {name: value for name, value in entry.items() if name not in ("on_error", "timeout")}
        for entry in tables["rewards"]
    ]
    return {**tables, "rewards": rewards}


def _value_text(values: Mapping[str, Any], name: str) -> str:
    return show(values[name]) if name in values else "not set"


def _may_change(name: str, ends_with_steps: bool, resets_by_evaluation: bool) -> bool:
    """Whether a key may differ when a run is resumed, by how its schedule and its resets go."""
    if name == "train.steps" and ends_with_steps:
        return False
    if name.startswith("eval.") and resets_by_evaluation:
        return False
    return any(name == key or name.startswith(f"{key}.") for key in RESUMABLE)


def to_tables(config: Config) -> dict[str, Any]:
    """The config as TOML would have it: no None, options among the keys of their table."""
    return {name: value for name, value in as_toml(config).items() if name != "source"}


def as_toml(value: Any) -> Any:
    """A config, one of its tables or a value in it, as TOML would have it."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        options = fields.pop("options", {})
        return as_toml({**fields, **options})
    if isinstance(value, Mapping):
        return {name: as_toml(entry) for name, entry in value.items() if entry is not None}
    return [as_toml(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def flat(tables: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Every value under its full name; lists are one value."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        inner = isinstance(value, Mapping)
        values |= flat(value, f"{path}{name}.") if inner else {f"{path}{name}": value}
    return values


def named_keys(overrides: Sequence[str]) -> set[str]:
    """The full names of the keys that options of `--set` name; of a table those that it holds.

    >>> sorted(named_keys(["eval={ data = 'x.jsonl', samples = 8 }", "run . dir=x"]))
    ['eval.data', 'eval.samples', 'run.dir']
    """
    tables: dict[str, Any] = {}
    list(override(tables, overrides))  # its problems are those of `from_dict`
    return {*flat(tables)}


def entries(value: Any, name: str = "") -> dict[str, str]:
    """Every number and text of tables under its full name, as JSON; of lists of tables too.

    >>> entries({"recipe": "grpo", "rewards": [{"use": "math", "flip": 0.1}]})
    {'recipe': '"grpo"', 'rewards.0.use': '"math"', 'rewards.0.flip': '0.1'}
    """
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {name: json.dumps(value, ensure_ascii=False, default=str)}
    texts: dict[str, str] = {}
    for key, entry in value.items():
        texts |= entries(entry, f"{name}.{key}".lstrip("."))
    return texts


def make_config(
    config: Config | Mapping[str, Any] | str | Path,
    changes: Mapping[str, Any] | None = None,
    rewards: Iterable[Any] | None = None,
    advantage: AdvantageTransform | None = None,
    tools: Sequence[Any] = (),
    environment: Any = None,
    dataset: Any = None,
    *,
    is_stored: bool = False,
) -> Config:
    """The config that a call from Python means.

    Args:
      config: a Config, its tables as dicts, a TOML file, or a shipped config's name.
      changes: keys to replace, nested ({"train": {"steps": 3}}) or dotted ({"train.steps": 3});
        relative paths in them begin at the working directory.
      rewards, advantage, tools, environment: objects of the call; the config records their names.
      dataset: rows of the call; the config then names no other ones.
      is_stored: as in `from_dict`; also for a replay, which reads no data.

    Raises: ConfigError with all problems; InputError as `refuse_other_objects`.
    """
    refuse_other_objects(rewards, advantage, tools)
    source = None
    if isinstance(config, Config):
        tables, source = to_tables(config), config.source
    elif isinstance(config, Mapping):
        tables = absolute(config, Path.cwd())  # dicts alone: others would not be merged
    else:
        tables, source = read_tables(config)
    replace(tables, changes or {}, Path.cwd())
    if rewards is not None:
        tables["rewards"] = list(_reward_entries(rewards))
    if advantage is not None:
        tables.pop("recipe", None)
        tables["advantage"] = [{"use": python_name(advantage.name)}]
    if tools:
        tables["tools"] = [_code_name(tool) for tool in tools]
    if isinstance(environment, Mapping):
        tables["environment"] = {name: _code_name(make) for name, make in environment.items()}
    elif environment is not None:
        tables["environment"] = _code_name(environment)
    if dataset is not None:
        _forget_source(tables)
    return from_dict(tables, source=source, is_stored=is_stored)


def _forget_source(tables: dict[str, Any]) -> None:
    """Leaves data.path out of `tables`, which are changed, and how it is read, but for what an
    evaluation on the same source reads of that."""
    values: dict[str, Any] = flat(tables)
    path, evaluated = values.get("data.path"), values.get("eval.data")
    changes: dict[str, Any] = {"data.path": None}
    if path not in (None, evaluated):
        changes |= {"data.subset": None, "data.revision": None}
    if not str(evaluated).endswith(".csv"):
        changes["data.delimiter"] = keys.DataKeys().delimiter
    replace(tables, changes, Path.cwd())


def refuse_other_objects(rewards: Any, advantage: Any, tools: Any) -> None:
    """Raises: InputError where a single reward or tool stands where a list does, or a list can be
    read only once, and where the advantage is no chain."""
    for name, value in {"rewards": rewards, "tools": tools}.items():
        if value is None:
            continue
        is_single = isinstance(value, str) or not isinstance(value, Iterable)
        if is_single or isinstance(value, Iterator):
            shown = repr(value) if isinstance(value, str) else callable_name(value)
            raise InputError(
                f"{name} is a {type(value).__name__}: give a list, "
                + (f"{name}=[{shown}]" if is_single else f"{name}=[*{name}]")
            )
        if not isinstance(value, Mapping) and any(isinstance(entry, Mapping) for entry in value):
            raise InputError(
                f"{name} holds a table: give functions and names; tables with options and weights "
                f"are entries of {name} in the config"
            )
    if advantage is not None and not isinstance(advantage, AdvantageTransform):
        raise InputError(
            f"advantage is a {type(advantage).__name__}: give a chain, as "
            "jaxgrpo.chain(jaxgrpo.sum_rewards(), jaxgrpo.subtract_group_mean()), or name a recipe "
            'by recipe="grpo"'
        )


def _code_name(code: Any) -> str:
    """How a config names own code that may be its name already."""
    return code if isinstance(code, str) else python_name(callable_name(code))


def _reward_entries(rewards: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Entries of a config for rewards given as objects; {name: function} names them."""
    has_names = isinstance(rewards, Mapping)
    for name, function in rewards.items() if has_names else ((None, reward) for reward in rewards):
        use = (
            function if isinstance(function, str) else python_name(name or callable_name(function))
        )
        yield {"use": use, "name": name} if has_names else {"use": use}
