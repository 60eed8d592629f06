"""The file of a comparison: read, checked as a whole, and turned into one config per run."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config, config_of, replace
from jaxgrpo.config.keys import HINTS, SECTIONS, SHIPPED, folder_of, show
from jaxgrpo.core.errors import ConfigError, suggest

SHIPPED_EXPERIMENTS = SHIPPED / "experiments"
MAY_DIFFER = (
    *("recipe", "advantage", "rewards", "loss", "reference", "optimizer"),
    *("rollout.group_size", "rollout.prompts"),
)
"""The keys of a config, and whole tables, that arms may differ in. All others are locked."""

GIVEN = {
    "optimizer.learning_rate": "is what `learning_rates` is for",
    "train.seed": "is what `seeds` is for",
    "run": "is the comparison's own: `dir` says where everything is kept",
    "tracking": "is not for the runs of a comparison",
}
"""Keys that the experiment itself gives to every run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is compared: the keys of an experiment file and all their defaults."""

    base: str  # a config, by path or shipped name
    arms: dict[str, dict[str, Any]]  # name -> tables of keys that it changes
    control: str  # the arm that every other one is compared with
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    dir: str
    tuning_seeds: tuple[int, ...] = ()  # on which rates are chosen; (): on `seeds` themselves
    own_rates: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    tests: tuple[str, ...] = ()  # arms whose difference is tested; (): all but the control
    metric: str = "eval/accuracy"
    better: str = "higher"
    level: float = 0.05
    hold: str | None = None  # if group sizes differ: what a step keeps, "samples" or "prompts"
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # in every arm
    source: Path | None = dataclasses.field(default=None, compare=False)

    @property
    def folder(self) -> Path:
        """Where relative paths in it begin."""
        shipped = self.source is not None and SHIPPED in self.source.parents
        return Path.cwd() if shipped else folder_of(self.source)

    @property
    def tested(self) -> tuple[str, ...]:
        return self.tests or tuple(name for name in self.arms if name != self.control)

    def rates(self, arm: str) -> tuple[float, ...]:
        """The learning rates of an arm."""
        return tuple(self.own_rates.get(arm, self.learning_rates))


class Case(NamedTuple):
    """One run of a comparison."""

    arm: str
    rate: float
    seed: int
    config: Config

    @property
    def path(self) -> Path:
        return Path(self.config.run.dir)


def load(path: str | Path) -> Experiment:
    """Reads an experiment file, or a shipped one by its name. Raises: ConfigError, all problems."""
    path = Path(path)
    known = {file.stem: file for file in SHIPPED_EXPERIMENTS.glob("*.toml")}
    if not path.is_file() and not path.suffix and len(path.parts) == 1:
        if path.name not in known:
            problem = f"no shipped experiment: {suggest(path.name, known)}"
            raise ConfigError(str(path), [problem])
        path = known[path.name]
    raw, source = configs.read_tables(path)
    problems: list[str] = []
    values = read(raw, problems)
    if problems:
        raise ConfigError(str(source), problems)
    return Experiment(**values, source=source)


def cases_of(experiment: Experiment) -> list[Case]:
    """Every run, seed by seed, as `jaxgrpo train` would take its config.

    Raises: ConfigError with the problems of the base, else with those of every arm.
    """
    name = str(experiment.source or "experiment")
    try:
        base = _base(experiment)
        common = _config(experiment, base, {}, experiment.learning_rates[0])
    except ConfigError as error:
        where = f"base = {show(experiment.base)} with set"
        raise ConfigError(name, [f"{where}: {item}" for item in error.problems]) from None
    problems = []
    if common.eval.data is None:
        problems = [
            "eval.data: missing, and nothing could be compared; name it in the base or in set"
        ]
    at_first: dict[str, Config] = {}
    for arm, changes in experiment.arms.items():
        try:
            config = _config(experiment, base, changes, experiment.rates(arm)[0])
            found = tuple(_arm_problems(experiment, config, common))
        except ConfigError as error:
            found = error.problems
        else:
            at_first[arm] = config
        problems += [f"arms.{arm}: {item}" for item in found]
    if problems:
        raise ConfigError(name, problems)
    return list(_cases(experiment, at_first))


def differences(cases: Sequence[Case]) -> dict[str, dict[str, str]]:
    """Every key that is not the same in all arms -> its value in each; seeds apart.

    An arm's learning rates are one key, `learning_rates`, in which their order does not count.
    """
    flat = {case.arm: _entries(configs.tables_of(case.config)) for case in cases}
    for arm, entries in flat.items():
        rates = {case.rate for case in cases if case.arm == arm}
        entries["learning_rates"] = json.dumps(sorted(rates))
    swept = {"optimizer.learning_rate", "train.seed", "run.dir"}
    rows = {}
    for key in sorted(set().union(*flat.values()) - swept):
        values = {arm: keys.get(key, "–") for arm, keys in flat.items()}
        if len(set(values.values())) > 1:
            rows[key] = values
    return rows


def read(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The values of an Experiment by name; those that are wrong become problems."""
    values: dict[str, Any] = {}
    near = {name: difflib.get_close_matches(name, KEYS, n=1) for name in raw if name not in KEYS}
    meant = {keys[0] for keys in near.values() if keys}
    problems += [f"{name}: unknown key; {_hint(name, keys)}" for name, keys in near.items()]
    for name, (reader, expected) in KEYS.items():
        if name not in raw:
            if name in REQUIRED and name not in meant:  # a merely misspelt key is one problem
                problems.append(f"{name}: missing; expected {expected}")
        elif (value := reader(raw[name])) is None:
            problems.append(f"{name} = {show(raw[name])}: expected {expected}")
        else:
            values[name] = value
    arms = values.get("arms", {})
    problems += _set_problems(values.get("set", {}))
    problems += (item for arm, table in arms.items() for item in _table_problems(arm, table))
    values["own_rates"] = {
        arm: _rates(table.pop("learning_rates"))
        for arm, table in arms.items()
        if "learning_rates" in table
    }
    problems += _together(values)
    return values


def _entries(value: Any, name: str = "") -> dict[str, str]:
    """Every number and text under its full name, as JSON; rewards.0.flip: of the first one."""
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        inside = ((str(place), entry) for place, entry in enumerate(value))
    else:
        return {name: json.dumps(value, ensure_ascii=False)}
    found: dict[str, str] = {}
    for key, entry in inside:
        found |= _entries(entry, f"{name}.{key}".lstrip("."))
    return found


def _base(experiment: Experiment) -> dict[str, Any]:
    """The tables of the base config, with absolute paths; without tracking, which stays its own."""
    beside = experiment.folder / experiment.base
    tables, source = configs.read_tables(beside if beside.is_file() else experiment.base)
    tables.pop("tracking", None)
    return configs.absolute(tables, folder_of(source))


def _config(
    experiment: Experiment, base: Mapping[str, Any], changes: Mapping[str, Any], rate: float
) -> Config:
    """One arm's config, with seed 0 and a folder that `_cases` replaces."""
    common = _changed(base, experiment.set, experiment.folder)
    tables = _changed(common, changes, experiment.folder)
    if experiment.hold == "samples":
        _hold_samples(common, tables)
    of_every_run = {
        "optimizer.learning_rate": rate,
        "train.seed": 0,
        "run": {"dir": experiment.dir, "samples_every": 0, "report": False},
        "tracking": {"tensorboard": False},
    }
    return config_of(_changed(tables, of_every_run, experiment.folder))


def _changed(tables: Mapping[str, Any], changes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    result = copy.deepcopy(dict(tables))
    # A recipe is a whole chain: it replaces `advantage`, and is replaced by it.
    for one, other in (("recipe", "advantage"), ("advantage", "recipe")):
        if one in changes:
            result.pop(other, None)
    replace(result, changes, folder)
    return result


def _hold_samples(common: Mapping[str, Any], tables: dict[str, Any]) -> None:
    """Sets prompts_per_step, so that a step has as many samples as without the arm's group size."""
    before, after = common.get("rollout", {}), tables.get("rollout", {})
    sizes = [before.get("prompts_per_step"), before.get("group_size"), after.get("group_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return  # reading the config reports it
    prompts, size, wanted = sizes
    if prompts * size % wanted:
        problem = (
            f"rollout.group_size = {wanted}: a step has {prompts} x {size} = {prompts * size} "
            'samples, which is no multiple of it; change one of them, or take hold = "prompts"'
        )
        raise ConfigError("arm", [problem])
    after["prompts_per_step"] = prompts * size // wanted


def _cases(experiment: Experiment, configs_of: Mapping[str, Config]) -> Iterator[Case]:
    for seed in (*experiment.seeds, *experiment.tuning_seeds):
        for arm in experiment.arms:
            for rate in experiment.rates(arm):
                config = configs_of[arm]
                folder = Path(experiment.dir) / "runs" / arm / f"lr_{rate!r}" / f"seed_{seed}"
                config = dataclasses.replace(
                    config,
                    optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
                    train=dataclasses.replace(config.train, seed=seed),
                    run=dataclasses.replace(config.run, dir=str(folder)),
                )
                yield Case(arm, rate, seed, config)


def _arm_problems(experiment: Experiment, config: Config, common: Config) -> Iterator[str]:
    """What is valid in a config but not in a comparison."""
    if config.rollout.group_size != common.rollout.group_size and experiment.hold is None:
        yield (
            'rollout.group_size: say what a step keeps where it differs, hold = "samples" '
            '(prompts_per_step follows) or hold = "prompts"'
        )
    ours, theirs = config.rewards[0], common.rewards[0]
    if config.eval.scorer is None and (ours.use, ours.options) != (theirs.use, theirs.options):
        yield (
            "rewards: the first one judges success in evaluation too, which must be the same in "
            "every arm; name the judge, set.eval.scorer"
        )


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


def _table_problems(arm: str, table: Mapping[str, Any]) -> Iterator[str]:
    where = f"arms.{arm}"
    if "learning_rates" in table and not _rates(table["learning_rates"]):
        yield f"{where}.learning_rates = {show(table['learning_rates'])}: expected {RATES}"
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


def _list(right: Callable[[Any], bool]) -> Callable[[Any], tuple[Any, ...] | None]:
    """Reads a list of `right` entries that is not empty; equal ones are one."""

    def read(value: Any) -> tuple[Any, ...] | None:
        whole = isinstance(value, list) and value and all(map(right, value))
        return tuple(dict.fromkeys(value)) if whole else None

    return read


def _distinct(value: Any, right: Callable[[Any], bool]) -> tuple[Any, ...] | None:
    """A list as `_list` reads it, in which no two entries are equal."""
    found = _list(right)(value)
    return found if found and len(found) == len(value) else None


def _seeds(value: Any) -> tuple[int, ...] | None:
    if type(value) is int:
        return tuple(range(value)) or None
    return _distinct(value, lambda seed: type(seed) is int and seed >= 0)


def _rates(value: Any) -> tuple[float, ...] | None:
    found = _distinct(value, lambda rate: type(rate) in (int, float) and 0 <= rate < math.inf)
    return found and tuple(map(float, found))


def _arms(value: Any) -> dict[str, dict[str, Any]] | None:
    if not isinstance(value, Mapping) or len(value) < 2:
        return None
    if not all(isinstance(table, Mapping) and _is_name(name) for name, table in value.items()):
        return None
    return {name: dict(table) for name, table in value.items()}


def _is_name(name: str) -> bool:
    """It names a folder, and a column of results.csv."""
    return bool(name) and all(letter.isalnum() or letter in "-_+" for letter in name)


def _share(value: Any) -> float | None:
    return value if type(value) is float and 0 < value < 1 else None


def _table(value: Any) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _choice(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: value if value in choices else None


RATES = "a list of different rates, 0 or more, as [1e-4, 3e-4]"
SEEDS = "a number of seeds, 7 (for 0 to 6), or a list of different ones, [3, 5]"
REQUIRED = ("base", "dir", "arms", "control", "learning_rates", "seeds")
KEYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "base": (_text, 'a config, by path or shipped name, as "quickstart"'),
    "dir": (_text, 'the folder that holds everything, as "runs/compare"'),
    "arms": (_arms, "at least two tables [arms.NAME], NAME of letters, digits, - _ +"),
    "control": (_text, "the arm that the others are compared with"),
    "learning_rates": (_rates, RATES),
    "seeds": (_seeds, SEEDS),
    "tuning_seeds": (_seeds, SEEDS),
    "tests": (_list(lambda name: isinstance(name, str)), "a list of arms"),
    "metric": (_text, 'a metric of evaluation, as "eval/accuracy"'),
    "better": (_choice("higher", "lower"), '"higher" or "lower"'),
    "level": (_share, "a number between 0 and 1, as 0.05"),
    "hold": (_choice("samples", "prompts"), '"samples" or "prompts"'),
    "set": (_table, "a table of keys for every arm"),
}
"""The keys of an experiment file: how each is read (None: it is wrong), and what is expected."""
