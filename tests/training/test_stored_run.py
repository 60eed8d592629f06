"""A run begun by version 0.1.0, before the packages were laid out again, goes on as it would have.

`stored_run/` holds its base model, and its folder after two of four steps: SPO with a KL to the
reference and an adaptive entropy bonus, so that every kind of state is in the checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import small_run

from jaxgrpo.config.files import load
from jaxgrpo.training.checkpoints import Checkpoints, parameter_hash
from jaxgrpo.training.setup import setup

STORED = Path(__file__).with_name("stored_run")
AFTER_2 = "0c2ad7c449c8c99db0f47621ed80c21d3fccda8db8d15f318d80b402627f11e8"
AFTER_4 = "e5c3fc94d828827631e946196bd29ddf61b8fb675c2394f509ea290a05ee998d"
MEASURED = {
    "reward": [-0.04890625178813934, -0.037187498062849045],
    "loss": [0.6371021866798401, 0.6905320882797241],
    "grad_norm": [0.42392539978027344, 0.43622052669525146],
}
"""The metrics of steps 3 and 4 as they were logged then."""


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(STORED, tmp_path / "stored")
    file = tmp_path / "stored" / "run" / "config.toml"
    file.write_text(file.read_text().replace("FOLDER", str(tmp_path / "stored")))
    # The row of a pad token was trained then, as transformers never does; without one all rows are.
    model = tmp_path / "stored" / "base" / "config.json"
    fields = json.loads(model.read_text())
    del fields["pad_token_id"]
    model.write_text(json.dumps(fields))
    return tmp_path / "stored" / "run"


def test_its_checkpoint_is_restored_bit_for_bit(folder):
    run = setup(load(folder / "config.toml"))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state, _ = checkpoints.restore(run.state)
    assert int(state.step) == 2
    assert parameter_hash(state.trainable) == AFTER_2
    assert set(state.objective_state) == {"adaptive_entropy"}


def train(python, environment, file, *arguments):
    """The parameter hash at the end."""
    process = small_run.command(python, "train", file, *arguments, env=environment())
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output.partition("parameter hash ")[2].split()[0]


@pytest.mark.slow
def test_resumed_it_ends_where_the_same_run_ended_then(folder, tmp_path, python, environment):
    resumed = train(
        *(python, environment, folder / "config.toml"),
        *("--resume", "auto", "--set", "train.steps=4"),
    )
    lines = small_run.metrics(folder)[2:]
    for name, values in MEASURED.items():
        np.testing.assert_allclose([line[name] for line in lines], values, rtol=1e-5)
    if resumed != AFTER_4:
        # Processors round differently: bits can be compared where this one repeats the first steps.
        other = f"run.dir={tmp_path / 'other'}"
        again = train(python, environment, folder / "config.toml", "--set", other)
        assert again != AFTER_2
