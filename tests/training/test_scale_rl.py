"""configs/scale_rl.toml: all of ScaleRL is in it, and each part of it acts in a run."""

from __future__ import annotations

import numpy as np
import pytest
import small_run

from jaxgrpo.cli.main import main
from jaxgrpo.config import files as configs
from jaxgrpo.training import loop
from jaxgrpo.training.records import rollout_files

pytestmark = pytest.mark.slow

SMALL = {
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 4,
    "rollout.staleness": 1,
    "train.steps": 3,
    "eval.prompts": 4,
    "eval.samples": 1,
    "run.rollouts_every": 1,
    "run.report": "false",
}


@pytest.fixture(scope="module")
def overrides():
    # A second reward that a base of 40 steps gets a part of, so that groups are live.
    digits = f'{{ use = "{small_run.__file__}:digits", weight = 0.2 }}'
    changes = {"model.path": f'"{small_run.base()}"', **SMALL}
    changes["rewards"] = f'[{{ use = "arithmetic" }}, {digits}]'
    return [f"{key}={value}" for key, value in changes.items()]


@pytest.mark.full
def test_the_config_as_it_is_shipped_would_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "scale_rl", "--dry-run", "--set", f"model.path={small_run.base()}"]) == 0
    assert "staleness = 8" in capsys.readouterr().out


@pytest.mark.full
def test_each_part_of_the_recipe_acts_in_a_run(overrides, tmp_path):
    config = configs.load("scale_rl", [*overrides, f"run.dir={tmp_path / 'run'}"])
    run = loop.train(config)
    lines = [line for line in small_run.metrics(run.path) if "reward" in line]
    assert [line["sampling/staleness"] for line in lines] == [0, 1, 1]
    for line in lines:
        assert 0 < line["sampling/interrupted"] <= 1  # the base after 40 steps rambles
        assert 0 <= line["mask_zero_variance/masked_groups"] < 1
        assert 0 < line["prompts/eligible"] <= 1
        assert line["clip_ratio/low_mean"] == 0  # CISPO without a lower bound
        assert np.isfinite(line["loss"])
    assert all(line["grad_norm"] > 0 for line in lines)
    rollouts = rollout_files.load(run.path / "rollouts" / "00000001.safetensors")
    lengths = rollouts.token_mask.sum(-1)
    assert not rollouts.token_mask[..., 20].any()  # the text is no choice of the policy
    assert lengths.max() <= 24
