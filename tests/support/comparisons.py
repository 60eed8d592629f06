"""Comparisons on models that are known tables: their files, and one that is taken."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import pytest
import tables
import tomli_w
from jax.sharding import Mesh

from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.models import sharding

RATES = (0.2, 0.3, 0.4, 0.45)  # below a half: greedily the base answers nothing right


@contextlib.contextmanager
def one_device():
    """Many steps of almost no work: waiting for four devices would be most of the time."""
    make_mesh = sharding.make_mesh

    def alone(*sizes: int, devices: Any = None, **axes: int) -> Mesh:
        return make_mesh(*sizes, devices=devices or jax.devices()[:1], **axes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", alone)
        yield


def write(model: Path, folder: Path, steps: int = 6, **changes: Any) -> Path:
    """An experiment on the tables; returns its file."""
    data = str(model / "data.jsonl")
    base = {
        "model": {"path": str(model / "model")},
        "data": {"path": data, "chat_template": "none"},
        "rewards": [{"use": tables.REWARD}],
        "optimizer": {"use": "sgd", "learning_rate": 1.0, "clip_norm": 0.0},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 8,
            "max_prompt_tokens": 1,
            "max_completion_tokens": 2,
        },
        "train": {"steps": steps},
        "eval": {"data": data, "samples": 16, "kl_to_base": False},
        "checkpoint": {"every": 5},
        "run": {"dir": "nowhere"},
    }
    folder.mkdir(exist_ok=True)
    (folder / "base.toml").write_text(tomli_w.dumps(base))
    comparison = {
        "base": "base.toml",
        "dir": str(folder / "out"),
        "control": "grpo",
        "learning_rates": [0.5],
        "seeds": 6,
        **changes,
    }
    (folder / "x.toml").write_text(tomli_w.dumps(comparison))
    return folder / "x.toml"


def arm_tables(experiment: experiments.Experiment) -> dict[str, Any]:
    """The arms as its file has them."""
    arm_rates = experiment.own_rates
    return {
        arm: {**table, **({"learning_rates": list(arm_rates[arm])} if arm in arm_rates else {})}
        for arm, table in experiment.arms.items()
    }
