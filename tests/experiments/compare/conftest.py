"""One comparison on known tables, taken once for all tests that read it."""

from __future__ import annotations

from pathlib import Path

import comparisons
import pytest
import tables

from jaxgrpo.cli.main import main
from jaxgrpo.experiments.compare import experiment as experiments
from jaxgrpo.experiments.compare import results


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    tables.write_model(folder / "model", comparisons.RATES)
    tables.write_data(folder / "data.jsonl", len(comparisons.RATES))
    return folder


@pytest.fixture(scope="session")
def compared(model, tmp_path_factory):
    """(experiment, cases, outcomes): an arm, its twin, one that stays, one under full noise."""
    arms = {
        "grpo": {"recipe": "grpo"},
        "twin": {"recipe": "grpo"},
        "frozen": {"recipe": "grpo", "learning_rates": [0.0]},
        "noise": {"recipe": "grpo", "rewards": [{"use": tables.REWARD, "flip": 0.5}]},
    }
    folder = tmp_path_factory.mktemp("compare")
    file = comparisons.write(model, folder, arms=arms, tests=["frozen"])
    with comparisons.one_device():
        assert main(["compare", str(file)]) == 0
    experiment = experiments.load(file)
    cases = experiments.make_cases(experiment)
    return experiment, cases, results.read_all(cases)
