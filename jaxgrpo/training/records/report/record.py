"""A run folder as data: what a report shows, read without disturbing the run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import tomllib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxgrpo.config.own_code import short_name
from jaxgrpo.core.errors import InputError, refusing
from jaxgrpo.data import mirror, sources, storage
from jaxgrpo.data.storage import Place
from jaxgrpo.evaluation.intervals import read_interval
from jaxgrpo.training.records import alarms
from jaxgrpo.training.records.lock import LOCK
from jaxgrpo.training.records.reading import (
    evaluation_metrics,
    is_number,
    read_metrics,
    read_samples,
)

TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
ADDING = ("like_trl", "sum_scored")
"""The recipe and the part that add up what was scored."""
UNDER_WAY, FINISHED, STOPPED = "under way", "finished", "stopped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """All that is known of a run."""

    name: str
    status: str  # UNDER_WAY, FINISHED or STOPPED
    config: dict[str, Any]  # as TOML tables; {} where there is none
    lines: list[dict[str, Any]]  # of metrics.jsonl
    summary: dict[str, Any]  # {} until the run ends
    samples: list[dict[str, Any]]  # rows of the latest samples file
    warnings: list[alarms.Alarm]
    active: frozenset[str]  # warnings that hold at the last step

    @property
    def step(self) -> int:
        """Finished steps."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def steps(self) -> int | None:
        """Steps that the run is to take."""
        return self.config.get("train", {}).get("steps")

    @property
    def evaluations(self) -> list[tuple[int, dict[str, float]]]:
        """(step, metrics without "eval/") of each evaluation."""
        evaluations = []
        for line in self.lines:
            measured = evaluation_metrics(line).items()
            values = {name: float(value) for name, value in measured if is_number(value)}
            if values:
                evaluations.append((line["step"], values))
        return evaluations

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """(steps, values) where the metric is a finite number."""
        lines = [line for line in self.lines if is_number(line.get(metric))]
        return [line["step"] for line in lines], alarms.finite_values(lines, metric)

    def last(self, metric: str) -> float | None:
        """Its last finite value."""
        _, values = self.series(metric)
        return values[-1] if values else None

    def names(self) -> list[str]:
        """Every metric that some line holds, in order."""
        return sorted({name for line in self.lines for name in line} - {"step"})


def read_run(folder: Place, status: str | None = None) -> Record:
    """Reads a run folder; what the run has not written yet is empty.

    Args:
      status: of the run, where the caller knows; None looks for a trainer that holds the folder.
    Raises: InputError where the folder holds no run, or a line before the last cannot be read.
    """
    if not (folder / "config.toml").is_file() and not (folder / "metrics.jsonl").is_file():
        reason = "there is no such folder" if not folder.is_dir() else "it holds no run"
        raise InputError(
            f"{folder}: {reason}; give the folder that run.dir names, with its config.toml and "
            "metrics.jsonl"
        )
    mend = "is no config ({reason}): put back the run's own file"
    config = _read(folder / "config.toml", _parse_config, mend)
    lines = read_metrics(folder)
    state, warnings = alarms.replay(lines)
    mend = "is no JSON object ({reason}): remove it"
    summary = _read(folder / "summary.json", sources.parse_json, mend)
    return Record(
        name=folder.resolve().name,
        status=status or _status(folder, summary, lines),
        config=config,
        lines=lines,
        summary=summary,
        samples=read_samples(folder),
        warnings=warnings,
        active=state.active,
    )


class RewardSum(NamedTuple):
    """How a run adds up the rewards of a sample."""

    weights: Mapping[str, float] = MappingProxyType({})  # by a reward's name; 1 where it has none
    adds_scored: bool = False  # what a reward could not score counts 0, as in `sum_scored`


def total_reward(row: Mapping[str, Any], summing: RewardSum) -> float | None:
    """The sum of a sample's `weighted_rewards`; None where there are none."""
    terms = weighted_rewards(row, summing)
    return None if terms is None else sum(terms, 0.0)


def weighted_rewards(row: Mapping[str, Any], summing: RewardSum) -> list[float] | None:
    """A sample's rewards by their weights; None where one that weighs could not be scored, or,
    where what was scored is added up, where none could."""
    weighed = [
        (weight, value)
        for name, value in row["rewards"].items()
        if (weight := summing.weights.get(name, 1.0))
    ]
    terms = [weight * value for weight, value in weighed if is_number(value)]
    return terms if len(terms) == len(weighed) or (terms and summing.adds_scored) else None


def mean_advantage(value: Any) -> float | None:
    """A sample's advantage: the number, or the mean of those of its tokens; None if it has none."""
    if isinstance(value, list):
        finite = [entry for entry in value if is_number(entry)]
        value = sum(finite) / len(finite) if finite else None
    return float(value) if is_number(value) else None


def reward_sum(tables: Mapping[str, Any]) -> RewardSum:
    """How a config says that rewards are added up. Of a chain from Python the name alone is known:
    one that has `sum_scored` and is not called `like_trl` is taken for one that has not."""
    weights = {
        str(entry.get("name") or short_name(str(entry.get("use", "")))): entry.get("weight", 1.0)
        for entry in tables.get("rewards", [])
    }
    parts = [tables.get("recipe"), *tables.get("advantage", [])]
    uses = [part.get("use") if isinstance(part, Mapping) else part for part in parts]
    return RewardSum(weights, any(short_name(str(use)) in ADDING for use in uses))


def strongest_first(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Whole groups, those with the largest advantage first: the step learnt most from them."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["ordinal"], []).append(row)

    def strength(group: Sequence[Mapping[str, Any]]) -> float:
        return max(abs(mean_advantage(row["advantage"]) or 0.0) for row in group)

    return [row for group in sorted(groups.values(), key=strength, reverse=True) for row in group]


def shown(value: Any) -> str:
    """A prompt or a completion as text: a list of messages as "role: content" lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return "\n".join(
            f"{item.get('role', '?')}: {shown(item.get('content', ''))}" for item in value
        )
    return json.dumps(value, ensure_ascii=False, default=str)


def visible(text: str) -> str:
    """The text with what a terminal would obey, or a reader could not see, written out.

    Those are control characters but for line end and tab, halves of surrogate pairs, and marks
    that turn the direction of writing.

    >>> visible("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(repr(c)[1:-1] if _acts(c) else c for c in text)


def _acts(character: str) -> bool:
    if character in "\n\t":
        return False
    return character in TURNS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def natural(name: str) -> list[tuple[str, int]]:
    """Sorts pass@4 before pass@16."""
    pieces = re.findall(r"(\D+)(\d*)", f" {name}")
    return [(text, int(number or 0)) for text, number in pieces]


def accuracy_first(name: str) -> tuple[Any, ...]:
    """Sorts the metrics of an evaluation: accuracy, pass@k by k, then the others."""
    return (not name.startswith("accuracy"), not name.startswith("pass@"), natural(name))


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """A number of an evaluation and its interval, if it has one; a dash for none.

    >>> with_interval({"pass@4": 0.5, "pass@4/low": 0.4375, "pass@4/high": 0.625}, "pass@4")
    '0.500 (0.438 to 0.625)'
    """
    if name not in metrics:
        return "–"
    ends = read_interval(metrics, name)
    return f"{metrics[name]:.3f}" + (" ({:.3f} to {:.3f})".format(*ends) if ends else "")


def _parse_config(text: str) -> dict[str, Any]:
    """The tables of a config.toml, whose own code is not imported to check them.

    Raises: ValueError where it is no TOML, or what is read of it here is something else.
    """
    tables = tomllib.loads(text)
    for name in ("model", "rollout", "train"):
        if not isinstance(tables.get(name, {}), dict):
            raise ValueError(f"{name} is no table")
    rewards = tables.get("rewards", [])
    if not isinstance(rewards, list) or not all(isinstance(entry, dict) for entry in rewards):
        raise ValueError("rewards is no list of tables")
    if not isinstance(tables.get("advantage", []), list):
        raise ValueError("advantage is no list")
    if not all(is_number(entry.get("weight", 1.0)) for entry in rewards):
        raise ValueError("a weight of rewards is no number")
    return tables


def _read(file: Place, parse: Callable[[str], Any], problem: str) -> dict[str, Any]:
    """The tables of a file; {} where it is missing."""
    with refusing(f"{file} {problem}"):
        return dict(parse(file.read_text(encoding="utf-8-sig"))) if file.is_file() else {}


def _status(folder: Place, summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    is_running = mirror.is_held(str(folder)) if storage.is_url(folder) else _is_held(folder / LOCK)
    if is_running:
        return UNDER_WAY
    last = lines[-1]["step"] if lines else 0
    return FINISHED if summary.get("step") == last else STOPPED


def _is_held(lock: Place) -> bool:
    """Whether a trainer holds the folder. The file is opened for reading and left as it is."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock yet, or a file system without them
        return False
    return False
