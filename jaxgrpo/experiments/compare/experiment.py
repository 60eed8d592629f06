"""The file of a comparison: read, checked as a whole, and turned into one config per run."""

from __future__ import annotations

import copy
import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.from_python import config_of, replace
from jaxgrpo.config.keys import SHIPPED, folder_of
from jaxgrpo.config.reading import show
from jaxgrpo.core.errors import ConfigError
from jaxgrpo.core.names import suggest
from jaxgrpo.experiments.compare import reading

SHIPPED_EXPERIMENTS = SHIPPED / "experiments"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is compared. Every default of the file stands here."""

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
    hold: str | None = None  # where group sizes differ: "samples" or "prompts" of a step
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
    source = _find(Path(path))
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(source), [f"not TOML: {error}"]) from None
    problems: list[str] = []
    values = reading.read(raw, problems)
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
    problems = list(_evaluation_problems(common))
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


def _find(path: Path) -> Path:
    if path.is_file():
        return path.resolve()
    known = {file.stem: file for file in sorted(SHIPPED_EXPERIMENTS.glob("*.toml"))}
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(str(path), ["there is no such file"])
    if path.name not in known:
        raise ConfigError(str(path), [f"no shipped experiment: {suggest(path.name, known)}"])
    return known[path.name]


def _base(experiment: Experiment) -> dict[str, Any]:
    """The tables of the base config, with absolute paths; without tracking, which stays its own."""
    beside = experiment.folder / experiment.base
    tables, source = configs.read_tables(beside if beside.is_file() else experiment.base)
    tables.pop("tracking", None)
    return configs.absolute(tables, folder_of(source))


def _config(
    experiment: Experiment, base: Mapping[str, Any], changes: Mapping[str, Any], rate: float
) -> Config:
    """One arm's config, of seed 0 and in a folder that is yet to be named."""
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
    # A recipe is a whole chain: what stands in the place of it gives way.
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
        return  # the config says so
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


def _evaluation_problems(config: Config) -> Iterator[str]:
    if config.eval.data is None:
        yield "eval.data: missing, and nothing could be compared; name it in the base or in set"


def _arm_problems(experiment: Experiment, config: Config, common: Config) -> Iterator[str]:
    """What is right in a config and wrong in a comparison."""
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
