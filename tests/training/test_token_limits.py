"""Token limits of a model that is named without a config, and what a message says of them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import small_run
from minimal_config import MINIMAL

from jaxgrpo.cli.make_base import base_config
from jaxgrpo.config import files
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.models.hf import families, texts
from jaxgrpo.training import pretrained
from jaxgrpo.training.stored_policy import LIMITS, NO_REWARD, config_for

PROMPT, COMPLETION = LIMITS
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 40,
}


def write_model(folder: Path, **fields: Any) -> str:
    """A folder with a config.json alone."""
    model_fields = {**families.plain_fields(base_config(16, 32, 1)), **fields}
    folder.mkdir(exist_ok=True)
    texts.write(folder, model_fields, {})
    return str(folder)


def limits(config: files.Config) -> tuple[int, int]:
    return config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens


@pytest.mark.parametrize(
    ("positions", "changes", "overrides", "expected"),
    [
        (64, {}, [], (32, 32)),
        (1501, {}, [], (750, 750)),
        (2048, {}, [], (1024, 1024)),
        (32_768, {}, [], (1024, 1024)),
        (64, {COMPLETION: 24}, [], (40, 24)),
        (64, {"rollout": {"max_completion_tokens": 24}}, [], (40, 24)),
        (1100, {COMPLETION: 10}, [], (1024, 10)),
        (64, {COMPLETION: None}, [f"{PROMPT} = 8"], (8, 56)),
        (64, {}, [f"{PROMPT}=20", f"{COMPLETION}=30"], (20, 30)),
    ],
)
def test_a_model_is_sampled_within_its_positions(tmp_path, positions, changes, overrides, expected):
    model = write_model(tmp_path / "m", max_position_embeddings=positions)
    config = config_for(model, changes, overrides)
    assert limits(config) == expected
    _, stored = pretrained.find_config(config.model)
    pretrained.check_length(config.rollout, model, stored)


def test_the_length_that_a_rope_was_built_for_counts(tmp_path):
    model = write_model(tmp_path / "m", max_position_embeddings=80, rope_parameters=LONGROPE)
    assert limits(config_for(model)) == (20, 20)


def test_limits_that_are_asked_for_are_not_changed_and_the_message_says_what_fits(tmp_path):
    model = write_model(tmp_path / "m", max_position_embeddings=64)
    config = config_for(model, {}, [f"{PROMPT}=100", f"{COMPLETION}=300"])
    assert limits(config) == (100, 300)
    _, stored = pretrained.find_config(config.model)
    with pytest.raises(InputError) as caught:
        pretrained.check_length(config.rollout, model, stored)
    suggestion = re.search("--set (.*)$", str(caught.value))
    assert suggestion is not None
    fitting = config_for(model, {}, shlex.split(suggestion[1]))
    assert limits(fitting) == (16, 48)
    pretrained.check_length(fitting.rollout, model, stored)
    with pytest.raises(InputError, match=r"set data\.max_answer_tokens, or make them"):
        pretrained.check_length(fitting.rollout, model, stored, answer=10)
    rope = dataclasses.replace(stored, max_positions=10_000, position_limit=64)
    with pytest.raises(InputError, match=r"up to 64: .*--set rollout.max_prompt_tokens=16 "):
        pretrained.check_length(config.rollout, model, rope)


def test_a_shipped_config_is_read_by_its_name_unless_a_folder_has_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_for("quickstart", {"model.path": write_model(tmp_path / "base")})
    assert limits(config) == (8, 24)
    assert ([reward.use for reward in config.rewards], config.data.path) == (
        ["arithmetic"],
        "task:arithmetic:train",
    )
    write_model(tmp_path / "quickstart")
    config = config_for("quickstart")
    assert config.model.path == str(tmp_path / "quickstart")
    assert (config.rewards[0].use, config.data.path) == (NO_REWARD, None)


def test_a_run_keeps_the_limits_of_its_config(tmp_path):
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r")
    assert limits(config_for(str(file))) == (8, 24)


def test_overrides_complete_a_config_as_they_do_where_it_is_trained(tmp_path):
    file, keys = tmp_path / "run.toml", ["model.path=base", "data.path=task:sums:test"]
    incomplete = MINIMAL.replace('path = "base"\n', "").replace("task:arithmetic:train", "a.jsonl")
    file.write_text(incomplete)
    assert config_for(str(file), {"eval.samples": 3}, keys).eval.samples == 3
    assert config_for(str(file), {}, keys) == files.load(file, keys)
    with pytest.raises(ConfigError, match=r"run\.toml: 2 problems"):
        config_for(str(file))
    file.write_text("rollout = 3\n" + incomplete.replace("[rollout]", "[rolled]"))
    with pytest.raises(ConfigError, match="rollout = 3: expected a table"):
        config_for(str(file), {"rollout.top_k": 4}, keys)
