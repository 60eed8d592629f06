"""Runs of seconds that faults come upon, and how far two runs are from having done the same."""

from __future__ import annotations

import json
import resource
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tomli_w

from jaxgrpo.cli.make_base import base_config
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders

SECONDS = 120.0  # that anything here may take
REWARD = '''
"""Rewards of texts: one that any model earns something of, and what a test adds."""

{setup}


def digits(completions, trainer_state, **columns):
    step = trainer_state.global_step + 1
    is_called_to_try = len(completions) <= 2
{harm}
    return [(1 + sum(c.isdigit() for c in text)) / (2 + len(text)) for text in completions]
'''
LONGEST_ERRORS = 50  # lines on stderr of a run that ends in order


def limit_files(size: int = resource.RLIM_INFINITY) -> None:
    """Files of more than `size` bytes fail as on a full disk; by default none do."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make_base(path: Path) -> Path:
    """A model of one layer that was not trained, for the arithmetic task."""
    tokenizer = character_tokenizer(tasks.find("arithmetic").alphabet)
    model = decoder.build(base_config(len(tokenizer), 32, 1))
    folders.save_model(model, jax.jit(model.init)(jax.random.key(0)), path, tokenizer)
    return path


def tables(base: Path, home: Path, **changes: Any) -> dict[str, Any]:
    """The config of a small run in home/r; changes are dotted keys."""
    values: dict[str, Any] = {
        "model": {"path": str(base)},
        "data": {"path": "task:arithmetic:train"},
        "rewards": [{"use": f"{home}/mine.py:digits"}],
        "optimizer": {"learning_rate": 1e-3},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 4,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 16,
            "segment_tokens": 8,
            "slots": 8,
        },
        "train": {"steps": 6},
        "checkpoint": {"every": 1, "keep": 2},
        "eval": {"kl_to_base": False},
        "tracking": {"tensorboard": False},
        "run": {"dir": str(home / "r"), "report": False, "samples_every": 1},
    }
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        (values.setdefault(table, {}) if table else values)[name] = value
    return values


def write(base: Path, home: Path, harm: str = "", setup: str = "", /, **changes: Any) -> Path:
    """Writes a config and its reward into `home`, and returns the config's path.

    Args:
      harm: Python that the reward runs in each call; it knows `step`, from 1 on, and
        `is_called_to_try`, before the first step.
      setup: Python that its file begins with.
    """
    home.mkdir(parents=True, exist_ok=True)
    text = REWARD.format(setup=setup, harm=textwrap.indent(harm or "pass", "    "))
    (home / "mine.py").write_text(text)
    file = home / "run.toml"
    file.write_text(tomli_w.dumps(tables(base, home, **changes)))
    return file


class Folders(NamedTuple):
    """A run of a few steps, one of another seed, and what the first comes to with more steps."""

    run: Path
    stranger: Path
    outcome: dict[str, Any]


def train(server: Any, file: Path, environment: Mapping[str, str]) -> Path:
    """The folder of a run that a config of `write` describes, once it has ended well."""
    run = server.start("train", file, env=environment)
    output, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, output
    return file.parent / "r"


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says; a torn last line is left out."""
    file, result = run / "metrics.jsonl", []
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:
            break
        result.append({n: value for n, value in line.items() if not n.startswith("time/")})
    return result


def outcome(run: Path) -> dict[str, Any]:
    """What a finished run came to: weights, metrics, samples, and its summary's hash."""
    files = {"weights": run / "model" / "model.safetensors"}
    files |= {f"samples of {file.stem}": file for file in (run / "samples").glob("*.jsonl")}
    contents: dict[str, Any] = {n: file.read_bytes() for n, file in files.items() if file.is_file()}
    summary = run / "summary.json"
    digest = json.loads(summary.read_text())["parameter_hash"] if summary.exists() else None
    logged = {f"metrics of step {line['step']}": line for line in lines(run)}
    return {**contents, **logged, "hash": digest, "number of lines": len(lines(run))}


def differences(straight: Mapping[str, Any], run: Path) -> list[str]:
    """In what a run differs from the outcome of the one that nothing disturbed."""
    return compare(straight, outcome(run))


def compare(straight: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """In what two outcomes differ."""
    names = sorted(straight.keys() | run.keys())
    return [name for name in names if straight.get(name) != run.get(name)]


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS, tick: float = 0.002) -> None:
    """Raises: AssertionError where it does not come true in time."""
    over = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < over, condition
        time.sleep(tick)


def disorder(output: str) -> list[str]:
    """What a command must not write, however it ends."""
    problems = [word for word in ("Traceback", "Exception ignored", "Fatal") if word in output]
    count = len(output.splitlines())
    return problems + [f"{count} lines"] * (count > LONGEST_ERRORS)
