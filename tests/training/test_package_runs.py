"""Runs on tasks and environments that others made: an update with each, from tables as TOML has."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
import small_run

from jaxgrpo.cli import make_base
from jaxgrpo.config import files as configs
from jaxgrpo.data.tasks import calculator, sql
from jaxgrpo.data.tasks.base import END, Worked
from jaxgrpo.data.tasks.templates import TOOL_MARKS
from jaxgrpo.training import loop

pytestmark = pytest.mark.slow

LETTERS = sql.sql._replace(
    name="letters",
    alphabet=(*TOOL_MARKS, *calculator.CALL, *string.printable[:95], "\n"),
    corpus=lambda: [
        Worked(f"<user>Play.{END}<assistant>", text, 0.2)
        for text in ("down", "right", "I go up", "[4]", "<answer>7</answer>")
    ],
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that writes any character, hardly trained."""
    path = tmp_path_factory.mktemp("letters") / "base"
    make_base.make_base(path, LETTERS, steps=40, batch=16, hidden_size=32)
    return path


def train(folder: Path, base: Path, **changes):
    tables = {
        "model.path": str(base),
        "data.path": "task:sums:train",
        "rollout.max_prompt_tokens": 600,
        "rollout.max_completion_tokens": 400,
        "rollout.prompts_per_step": 4,
        "train.steps": 3,
        **changes,
    }
    run = loop.train(configs.from_dict(small_run.tables(folder / "run", **tables)))
    return small_run.metrics(run.path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("package", "name"),
    [("gymnasium", "FrozenLake-v1?is_slippery=false"), ("textarena", "GuessTheNumber-v0")],
)
def test_an_environment_of_a_package_answers_a_run(package, name, base, tmp_path):
    pytest.importorskip(package, reason=f"{package} is in the extra envs")
    lines = train(tmp_path, base, environment=f"{package}:{name}", **{"rollout.max_turns": 3})
    assert len(lines) == 3
    for line in lines:
        assert 1 < line["turns/mean"] <= 3
        assert line["environment/broken"] == 0
        assert np.isfinite(line["loss"])


@pytest.mark.full
def test_a_generator_of_reasoning_gym_is_trained_on(base, tmp_path):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is in the extra envs")
    path = "task:reasoning_gym:spell_backward:{}?size=16&max_word_len=4"
    changes = {"data.path": path.format("train"), "eval.data": path.format("test")}
    changes |= {"rewards": [{"use": "reasoning_gym"}], "rollout.max_completion_tokens": 24}
    lines = train(tmp_path, base, **changes)
    steps = [line for line in lines if line["step"]]
    assert [line["reasoning_gym/unscored"] for line in steps] == [0.0] * 3


@pytest.mark.full
def test_the_shipped_config_of_sql_takes_a_step(tmp_path):
    make_base.make_base(tmp_path / "base", "sql", steps=60, batch=32)
    changes = {"model.path": str(tmp_path / "base"), "run.dir": str(tmp_path / "run")}
    changes |= {"train.steps": 2, "eval.prompts": 8, "rollout.prompts_per_step": 4}
    run = loop.train(configs.make_config("sql", changes))
    *_, line = small_run.metrics(run.path)
    assert line["step"] == 2
    assert line["environment/broken"] == 0
