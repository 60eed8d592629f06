"""What the shipped configs of teachers teach: OPSD and SDPO by the policy itself, MOPD by two."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import small_run

SHORTER = ["--set", "train.steps=40", "eval.every=40", "eval.samples=4", "run.report=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working directory of all commands."""
    return tmp_path_factory.mktemp("taught")


@pytest.fixture(scope="module")
def jaxgrpo(folder, python, environment):
    """jaxgrpo(words): what a command prints, which may not fail."""

    def run(*words):
        process = subprocess.run(
            [python, "-m", "jaxgrpo", *words],
            cwd=folder, env=environment(XLA_FLAGS=""), capture_output=True, text=True,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run


@pytest.fixture(scope="module")
def base(jaxgrpo):
    """The base that reads solutions, as the heads of the configs say."""
    return jaxgrpo("make-base", "demonstrated", "runs/demonstrated-base")


def evaluations(run: Path) -> tuple[dict, dict]:
    """(before, after) the run."""
    first, *_, last = [line for line in small_run.metrics(run) if "eval/pass@1" in line]
    return first, last


@pytest.mark.full
@pytest.mark.parametrize("name", ["opsd", "sdpo"])
def test_a_policy_that_sees_a_solution_teaches_itself_without_one(base, jaxgrpo, folder, name):
    """Sums with one carry, which its base gets wrong unless it is shown how, become right."""
    jaxgrpo("train", name, *SHORTER)
    before, after = evaluations(folder / "runs" / name)
    assert before["eval/pass@1"] < 0.6
    assert after["eval/pass@1"] > 0.7
    assert before["eval/accuracy/level_2"] < 0.2
    assert after["eval/accuracy/level_2"] > 0.8
    distance = [line["kl"] for line in small_run.metrics(folder / "runs" / name) if "kl" in line]
    assert sum(distance[-5:]) < 0.6 * sum(distance[:5])


@pytest.mark.full
def test_rows_learn_from_the_teacher_that_is_best_at_them(jaxgrpo, folder):
    """Were the two exchanged, sums with a carry would be taught by a model that cannot do them."""
    jaxgrpo("make-base", "arithmetic", "runs/base")
    jaxgrpo("train", "quickstart", *SHORTER)
    small = "make-base arithmetic runs/small --hidden-size 48 --steps 400"
    jaxgrpo(*small.split())
    jaxgrpo("train", "mopd", *SHORTER)
    before, after = evaluations(folder / "runs" / "mopd")
    assert before["eval/pass@1"] < 0.6
    assert after["eval/pass@1"] > 0.7
    assert after["eval/accuracy/level_1"] > 0.95
    assert after["eval/accuracy/level_2"] > max(0.7, before["eval/accuracy/level_2"] + 0.3)
