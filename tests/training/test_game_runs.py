"""What the shipped games teach: fewer questions, and right sums."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
import quick

from jaxgrpo.data.tasks.number_guess import FEWEST

STEPS = 20  # whose samples are taken together


@pytest.fixture(scope="module")
def play(python, environment, tmp_path_factory):
    """play(task): the lines of metrics of its steps and the summary of its run, as shipped."""

    def run(task):
        folder, variables = tmp_path_factory.mktemp(task), environment(XLA_FLAGS="")
        for command in (["make-base", task, f"runs/{task}-base"], ["train", task]):
            process = subprocess.run(
                [python, "-m", "jaxgrpo", *command],
                cwd=folder, env=variables, capture_output=True, text=True,
            )  # fmt: skip
            assert process.returncode == 0, process.stderr
        path = folder / "runs" / task
        lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "reward" in line], json.loads(
            (path / "summary.json").read_text()
        )

    return run


@quick.long
def test_a_number_is_found_with_few_more_questions_than_by_halves(play):
    lines, summary = play("number_guess")
    questions = [line["turns/mean"] for line in lines]
    assert questions[0] > FEWEST + 1.8
    assert np.mean(questions[-STEPS:]) < FEWEST + 1.3
    assert summary["trained"]["pass@1"] > max(0.9, summary["base"]["pass@1"])


@quick.long
def test_sums_become_right(play):
    lines, summary = play("modular_sum")
    rewards = [line["reward"] for line in lines]
    assert np.mean(rewards[-STEPS:]) > max(0.93, 0.1 + np.mean(rewards[:5]))
    assert summary["trained"]["pass@1"] > max(0.88, summary["base"]["pass@1"])
