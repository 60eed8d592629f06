"""The file of a comparison: read, checked as a whole, and turned into one config per run."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config, make_config, replace
from jaxgrpo.config.keys import HINTS, SECTIONS, SHIPPED, RewardKeys, config_folder
from jaxgrpo.config.ranges import LARGEST_SEED
from jaxgrpo.config.reading import printed_entry, show
from jaxgrpo.core.errors import ConfigError, suggest
from jaxgrpo.data import storage
from jaxgrpo.experiments.compare.exchanges import seeds_needed

SHIPPED_EXPERIMENTS = SHIPPED / "experiments"
MAY_DIFFER = (
    *("recipe", "advantage", "rewards", "scores", "loss", "reference", "optimizer"),
    *("tree", "experience"),
    *("rollout.group_size", "rollout.prompts", "rollout.prefixes", "train.on_no_live_sample"),
)
"""The keys of a config, and whole tables, that arms may differ in. All others are locked."""

RESERVED_KEYS = {
    "optimizer.learning_rate": "is what `learning_rates` is for",
    "train.seed": "is what `seeds` is for",
    "run": "is the comparison's own: `dir` says where everything is kept",
    "tracking": "is not for the runs of a comparison",
}
"""Keys that the experiment itself gives to every run."""


Reader = Callable[[Any], Any]
"""What the file says -> the value of a key; None if it is wrong"""


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _table(value: Any) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) else None


def _share(value: Any) -> float | None:
    return value if type(value) is float and 0 < value < 1 else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _choice(*choices: str) -> Reader:
    return lambda value: value if value in choices else None


def _list(value: Any, is_entry: Callable[[Any], bool]) -> tuple[Any, ...] | None:
    """A list that is not empty, of what `is_entry` accepts; equal entries are one."""
    if not isinstance(value, list) or not all(map(is_entry, value)):
        return None
    return tuple(dict.fromkeys(value)) or None


def _arm_names(value: Any) -> tuple[str, ...] | None:
    return _list(value, lambda name: isinstance(name, str))


def _seeds(value: Any) -> tuple[int, ...] | None:
    if type(value) is int:
        return tuple(range(value)) or None if value <= MOST_SEEDS else None
    seeds = _list(value, lambda seed: type(seed) is int and 0 <= seed <= LARGEST_SEED)
    return seeds if seeds and len(seeds) == len(value) else None


def _tuning(value: Any) -> tuple[int, ...] | None:
    return () if value == [] else _seeds(value)


def _rates(value: Any) -> tuple[float, ...] | None:
    largest = sys.float_info.max
    rates = _list(value, lambda rate: type(rate) in (int, float) and 0 <= rate <= largest)
    return tuple(map(float, rates)) if rates and len(rates) == len(value) else None


def _arms(value: Any) -> dict[str, dict[str, Any]] | None:
    def is_arm(name: str, table: Any) -> bool:  # a name is that of a folder and of a column
        letters = (letter.isalnum() or letter in "-_+" for letter in name)
        return isinstance(table, Mapping) and bool(name) and all(letters)

    if not isinstance(value, Mapping) or len(value) < 2:
        return None
    are_arms = all(is_arm(name, table) for name, table in value.items())
    return {name: dict(table) for name, table in value.items()} if are_arms else None


def _key(reader: Reader, expected: str, **default: Any) -> Any:
    """A key of the file, with its default (none: the key must be given)."""
    metadata = {"reader": reader, "expected": expected, "required": not default}
    return dataclasses.field(**default, metadata=metadata)


RATES = "a list of different rates, 0 or more, as [1e-4, 3e-4]"
TUNING = "as seeds; [] to choose rates on the seeds that are judged"
SPARE = 3
"""Rates are chosen on seeds of their own by default where at least so many can be spared."""

MOST_SEEDS = 1000
"""Of a number: a larger one is rather a seed, and a list is meant."""
SEEDS = (
    f"a number of seeds, 7 (for 0 to 6), {MOST_SEEDS} at most; or a list of different ones up to "
    f"{LARGEST_SEED}, [3, 5], also of a single seed, [20261128]"
)
ARMS = "at least two tables [arms.NAME], NAME of letters, digits, - _ +"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is compared: the keys of an experiment file and all their defaults."""

    base: str = _key(_text, 'a config, by path or shipped name, as "quickstart"')
    dir: str = _key(_text, 'the folder that holds everything, as "runs/compare"')
    arms: Mapping[str, dict[str, Any]] = _key(_arms, ARMS)  # name -> tables of keys that it changes
    control: str = _key(_text, "the arm that the others are compared with")
    learning_rates: tuple[float, ...] = _key(_rates, RATES)
    seeds: tuple[int, ...] = _key(_seeds, SEEDS)
    # on which rates are chosen; (): on `seeds` themselves. A file without the key: `set_apart`
    tuning_seeds: tuple[int, ...] = _key(_tuning, TUNING, default=())
    # at which rates `seeds` are run: "all", or "best", the one that the tuning seeds chose
    judge_rates: str = _key(_choice("all", "best"), '"all" or "best"', default="all")
    keep_models: bool = _key(_flag, "true or false", default=True)  # of finished runs
    # whose difference from the control is tested; (): all but the control
    tests: tuple[str, ...] = _key(_arm_names, "a list of arms", default=())
    metric: str = _key(_text, 'a metric of evaluation, as "eval/accuracy"', default="eval/accuracy")
    better: str = _key(_choice("higher", "lower"), '"higher" or "lower"', default="higher")
    level: float = _key(_share, "a number between 0 and 1, as 0.05", default=0.05)
    # if group sizes differ: what a step keeps
    hold: str | None = _key(_choice("samples", "prompts"), '"samples" or "prompts"', default=None)
    set: Mapping[str, Any] = _key(_table, "a table of keys for every arm", default_factory=dict)
    own_rates: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    source: Path | None = dataclasses.field(default=None, compare=False)

    @property
    def folder(self) -> Path:
        """Where relative paths in it begin."""
        shipped = self.source is not None and SHIPPED in self.source.parents
        return Path.cwd() if shipped else config_folder(self.source)

    @property
    def tested(self) -> tuple[str, ...]:
        return self.tests or tuple(name for name in self.arms if name != self.control)

    def rates(self, arm: str) -> tuple[float, ...]:
        """The learning rates of an arm."""
        return tuple(self.own_rates.get(arm, self.learning_rates))

    @property
    def direction(self) -> float:
        """1 if higher values of the metric are better, else -1."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def number_of_runs(self) -> int:
        rates = sum(len(self.rates(arm)) for arm in self.arms)
        runs_per_seed = len(self.arms) if self.judge_rates == "best" else rates
        return len(self.tuning_seeds) * rates + len(self.seeds) * runs_per_seed


KEYS = {field.name: field for field in dataclasses.fields(Experiment) if field.metadata}
"""The keys of an experiment file."""


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
    shipped = {file.stem: file for file in SHIPPED_EXPERIMENTS.glob("*.toml")}
    if not path.is_file() and not path.suffix and len(path.parts) == 1:
        if path.name not in shipped:
            problem = f"no shipped experiment: {suggest(path.name, shipped)}"
            raise ConfigError(str(path), [problem])
        path = shipped[path.name]
    raw, source = configs.read_tables(path)
    problems: list[str] = []
    values = read(raw, problems)
    if problems:
        raise ConfigError(str(source), problems)
    storage.on_host(values["dir"], "a comparison")
    values["dir"] = os.path.expanduser(values["dir"])
    return Experiment(**values, source=source)


def make_cases(experiment: Experiment, base: Mapping[str, Any] | None = None) -> list[Case]:
    """Every run, seed by seed, as `jaxgrpo train` would take its config.

    Args:
      base: the tables of the base config; None: of the file that the experiment names.

    Raises: ConfigError with the problems of the base, else with those of every arm.
    """
    name = str(experiment.source or "experiment")
    try:
        base = _base(experiment) if base is None else base
        common = _config(experiment, base, {}, experiment.learning_rates[0])
    except ConfigError as error:
        where = f"base = {show(experiment.base)} with set"
        raise ConfigError(name, [f"{where}: {item}" for item in error.problems]) from None
    problems = []
    if common.eval.data is None:
        reason = "missing, and nothing could be compared; name it in the base or in set"
        problems.append(f"eval.data: {reason}")
    first_configs: dict[str, Config] = {}
    for arm, changes in experiment.arms.items():
        try:
            first_configs[arm] = _config(experiment, base, changes, experiment.rates(arm)[0])
            config = first_configs[arm]
            sizes = config.rollout.group_size, common.rollout.group_size
            first_rewards = config.rewards[:1], common.rewards[:1]
            scorer = config.eval.scorer
            arm_problems = _arm_problems(sizes, experiment.hold, first_rewards, scorer)
        except ConfigError as error:
            arm_problems = error.problems
        problems += [f"arms.{arm}: {item}" for item in arm_problems]
    if problems:
        raise ConfigError(name, problems)
    cases: list[Case] = []
    for seed in (*experiment.seeds, *experiment.tuning_seeds):
        for arm, config in first_configs.items():
            for rate in experiment.rates(arm):
                folder = Path(experiment.dir) / "runs" / arm / f"lr_{rate!r}" / f"seed_{seed}"
                run_config = dataclasses.replace(
                    config,
                    optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
                    train=dataclasses.replace(config.train, seed=seed),
                    run=dataclasses.replace(config.run, dir=str(folder)),
                )
                cases.append(Case(arm, rate, seed, run_config))
    return cases


def differences(cases: Sequence[Case]) -> dict[str, dict[str, str]]:
    """Every key that is not the same in all arms -> its value in each, to print; seeds apart.

    An arm's learning rates are one key, `learning_rates`, in which their order does not count.
    """
    flat = {case.arm: configs.entries(configs.to_tables(case.config)) for case in cases}
    for arm, entries in flat.items():
        rates = {case.rate for case in cases if case.arm == arm}
        entries["learning_rates"] = json.dumps(sorted(rates))
    swept = {"optimizer.learning_rate", "train.seed", "run.dir"}
    rows = {
        key: {arm: keys.get(key, "–") for arm, keys in flat.items()}
        for key in sorted(set().union(*flat.values()) - swept)
    }
    return {
        key: {arm: printed_entry(text) for arm, text in values.items()}
        for key, values in rows.items()
        if len({*values.values()}) > 1
    }


def read(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The values of an Experiment by name; those that are wrong become problems."""
    values: dict[str, Any] = {}
    nearest_keys = {name: _nearest(name, KEYS) for name in raw if name not in KEYS}
    problems += [f"{name}: unknown key; {_hint(name, near)}" for name, near in nearest_keys.items()]
    for name, field in KEYS.items():
        rules = field.metadata
        if name not in raw:
            if rules["required"] and name not in nearest_keys.values():  # misspelt: one problem
                problems.append(f"{name}: missing; expected {rules['expected']}")
        elif (value := rules["reader"](raw[name])) is None:
            problems.append(f"{name} = {show(raw[name])}: expected {rules['expected']}")
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
    problems += _joint_problems(values)
    if not problems and "tuning_seeds" not in raw:
        values["seeds"], values["tuning_seeds"] = set_apart(values)
    if values.get("judge_rates") == "best" and not problems and not values["tuning_seeds"]:
        problems.append(
            'judge_rates = "best": no seeds choose the best rates; name some, tuning_seeds = [9]'
        )
    return values


def set_apart(values: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(seeds that are judged, seeds that rates are chosen on) of a file without `tuning_seeds`.

    The last third of the seeds is for tuning, but no seed that the tests need to reach the level;
    none if that leaves fewer than SPARE, if no number of seeds reaches it, or if no arm has several
    rates.
    """
    seeds, arms = values["seeds"], values["arms"]
    arm_rates = [values["own_rates"].get(arm, values["learning_rates"]) for arm in arms]
    comparisons = len(values.get("tests", ())) or len(arms) - 1
    level = values.get("level", KEYS["level"].default)
    needed_seeds = seeds_needed(comparisons, level)
    if needed_seeds is None or max(map(len, arm_rates)) == 1:
        return seeds, ()
    spare = min(len(seeds) - needed_seeds, max(SPARE, len(seeds) // 3))
    if spare < SPARE:
        return seeds, ()
    return seeds[:-spare], seeds[-spare:]


def _base(experiment: Experiment) -> dict[str, Any]:
    """The tables of the base config, with absolute paths; without tracking, which stays its own."""
    local_path = experiment.folder / experiment.base
    tables, source = configs.read_tables(local_path if local_path.is_file() else experiment.base)
    tables.pop("tracking", None)
    return configs.absolute(tables, config_folder(source))


def _config(
    experiment: Experiment, base: Mapping[str, Any], changes: Mapping[str, Any], rate: float
) -> Config:
    """One arm's config, with seed 0 and a folder that `_cases` replaces."""
    common = _apply_changes(base, experiment.set, experiment.folder)
    tables = _apply_changes(common, changes, experiment.folder)
    if experiment.hold == "samples":
        _hold_samples(common, tables)
    run_keys = {
        "optimizer.learning_rate": rate,
        "train.seed": 0,
        "run": {"dir": experiment.dir, "samples_every": 0, "report": False},
        "tracking": {"tensorboard": False},
    }
    return make_config(_apply_changes(tables, run_keys, experiment.folder))


def _apply_changes(
    tables: Mapping[str, Any], changes: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    result = copy.deepcopy(dict(tables))
    replace(result, changes, folder)
    return result


def _hold_samples(common: Mapping[str, Any], tables: dict[str, Any]) -> None:
    """Sets prompts_per_step, so that a step has as many samples as without the arm's group size."""
    common_rollout, rollout = common.get("rollout", {}), tables.get("rollout", {})
    sizes = [
        common_rollout.get("prompts_per_step"),
        common_rollout.get("group_size"),
        rollout.get("group_size"),
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return  # reading the config reports it
    prompts, size, arm_size = sizes
    if prompts * size % arm_size:
        problem = (
            f"rollout.group_size = {arm_size}: a step has {prompts} x {size} = {prompts * size} "
            'samples, which is no multiple of it; change one of them, or take hold = "prompts"'
        )
        raise ConfigError("arm", [problem])
    rollout["prompts_per_step"] = prompts * size // arm_size


def _arm_problems(
    group_sizes: Collection[int],
    hold: str | None,
    first_rewards: Iterable[Sequence[RewardKeys]],
    scorer: str | None,
) -> Iterator[str]:
    """What is valid in a config but not in a comparison.

    Args:
      group_sizes, first_rewards: of an arm, and of all arms without what it changes; () where the
        environment rewards.
      hold, scorer: of the experiment, and `eval.scorer` of the arm.
    """
    if len({*group_sizes}) > 1 and hold is None:
        yield (
            'rollout.group_size: say what a step keeps where it differs, hold = "samples" '
            '(prompts_per_step follows) or hold = "prompts"'
        )
    arm_judge, common_judge = ([(r.use, r.options) for r in rewards] for rewards in first_rewards)
    if scorer is None and arm_judge != common_judge:
        yield (
            "rewards: the first one judges success in evaluation too, which must be the same in "
            "every arm; name the judge, set.eval.scorer"
        )


def _nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that was probably meant; "" if there is none."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), "")


def _hint(name: str, near: str) -> str:
    if near:
        return f"did you mean {near}?"
    if name in HINTS:
        return f"a key of a config; write set.{name} to change it for every arm"
    return f"the keys here are {', '.join(KEYS)}"


def _joint_problems(values: Mapping[str, Any]) -> Iterator[str]:
    arms = values.get("arms", {})
    for name in ("control", "tests"):
        value = values.get(name, ())
        for arm in [value] if isinstance(value, str) else value:
            if arms and arm not in arms:
                near = _nearest(arm, arms)
                hint = f"did you mean {near!r}? " if near else ""
                yield f"{name} = {show(value)}: no arm {arm!r}; {hint}arms: {', '.join(arms)}"
            elif name == "tests" and arm == values.get("control"):
                yield f"tests = {show(value)}: {arm!r} is the control; it is not compared to itself"
    shared_seeds = sorted({*values.get("seeds", ())} & {*values.get("tuning_seeds", ())})
    if shared_seeds:
        yield (
            f"tuning_seeds = {show(shared_seeds)}: among seeds too; a rate must be chosen on "
            "other seeds than those that it is judged on"
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
            rule = f"arms may differ in {', '.join(MAY_DIFFER)}, learning_rates"
            if key.partition(".")[0] in HINTS:
                reason = f"locked, the same in every arm; {rule}"
                yield f"{where}.{key}: {reason}; set.{key} changes it for all of them"
            else:
                near = _nearest(key, MAY_DIFFER)
                hint = f"did you mean {near}? " if near else ""
                yield f"{where}.{key}: unknown key; {hint}{rule}"


def _set_problems(table: Mapping[str, Any]) -> Iterator[str]:
    for key, reserved_key in itertools.product(_names(table), RESERVED_KEYS):
        if _within(key, [reserved_key]):
            yield f"set.{key}: {RESERVED_KEYS[reserved_key]}; take it out"


def _names(table: Mapping[str, Any]) -> Iterator[str]:
    """Full names of the keys of a table: "recipe", "loss.kl"; nested or dotted as they stand."""
    for name, value in table.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def _within(key: str, tables: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{table}.") for table in tables)
