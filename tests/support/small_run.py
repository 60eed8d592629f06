"""A run of seconds: a barely warm base model and the config that trains it."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from jaxgrpo.cli import make_base
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config


@functools.cache
def base() -> str:
    """A base model for the arithmetic task after 40 steps: it knows the format, hardly more."""
    path = Path(tempfile.mkdtemp(prefix="jaxgrpo-test-base-"))
    make_base.make_base(path / "base", steps=40, batch=64, hidden_size=32)
    return str(path / "base")


def tables(run_dir: Path | str, **changes: Any) -> dict[str, Any]:
    """The config as tables; changes are dotted keys: tables(dir, **{"train.steps": 5})."""
    values: dict[str, Any] = {
        "model": {"path": base()},
        "data": {"path": "task:arithmetic:train"},
        "rewards": [{"use": "arithmetic"}, {"use": f"{__file__}:digits", "weight": 0.2}],
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 4,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 24,
            "segment_tokens": 12,
            "slots": 8,  # few, so that hardly a smaller size needs a program of its own
        },
        "train": {"steps": 3},
        "checkpoint": {"every": 2},
        "run": {"dir": str(run_dir), "report": False},  # it takes longer than the steps
    }
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        (values.setdefault(table, {}) if table else values)[name] = value
    # A second pass over the samples, which few tests are about.
    values["eval"] = {"kl_to_base": False, **values.get("eval", {})}
    return values


def config(run_dir: Path | str, **changes: Any) -> Config:
    return configs.from_dict(tables(run_dir, **changes))


def write(path: Path, run_dir: Path | str, **changes: Any) -> Path:
    """The config as a TOML file."""
    path.write_text(configs.to_toml(config(run_dir, **changes)))
    return path


def metrics(run_dir: Any) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("time/")}
        for line in lines
    ]


def command(python: str, *arguments: Any, **options: Any) -> subprocess.Popen:
    """A started `jaxgrpo` command whose output can be read."""
    return subprocess.Popen(
        [python, "-m", "jaxgrpo", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def digits(completions, **columns):
    """A dense reward: the share of characters that are digits, unscored where there are none."""
    return [sum(c.isdigit() for c in text) / len(text) if text else None for text in completions]


def nothing(completions, **columns):
    return [0.0] * len(completions)


def coin(completion_ids, prompts, **columns):
    """Heads or tails by a hash of the completion's place and tokens: fair, and says nothing."""
    import zlib

    sides = []
    for place, ids in enumerate(completion_ids):
        sides.append(float(zlib.crc32(repr((place, ids)).encode()) & 1))
    return sides


def negated(completions, answer, **columns):
    from jaxgrpo.data.tasks import find

    scores: Any = find("arithmetic").score(completions, answer)
    return [1.0 - score for score in scores]


def logging(completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    """Logs what it sees; fails where the run has come to its second step."""
    log_extra("letters", [len(text) for text in completions])
    log_metric("letters/mean", sum(map(len, completions)) / len(completions))
    log_metric("state/step", trainer_state.global_step)
    if trainer_state.global_step == 1:
        raise OSError("no grader")
    return [0.0] * len(completions)
