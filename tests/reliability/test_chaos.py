"""Under random faults, continued until it ends, a run ends as the undisturbed one, bit for bit."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import faulty_runs
import pytest

CHAOS = Path(__file__).with_name("chaos.py")
SEEDS = [f"{seed}" for seed in range(10)]
STEPS, EVERY = "60", "6"  # of each, and seconds between faults; as a command it takes 100 and 3


def disturb(environment: dict[str, str], *arguments: str) -> str:
    """What the command prints."""
    command = [sys.executable, str(CHAOS), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.full
@pytest.mark.fault(8)
def test_ten_seeds_of_random_faults_end_with_equal_bits(environment, repository, tries):
    printed = disturb(environment(), "--steps", STEPS, "--every", EVERY, "--seeds", *SEEDS)
    (repository / ".cache" / "chaos.txt").write_text(printed)
    assert printed.count(": equal") == len(SEEDS)
    kinds = {kind for text in re.findall(r"\((.*?)\)", printed) for kind in text.split(", ")}
    names = {kind.partition(" ")[2] for kind in kinds}
    assert len(names) >= 8, names
    faults = sum(map(int, re.findall(r": (\d+) faults", printed)))
    assert faults >= 3 * len(SEEDS)
    tries(faults)


@pytest.mark.full
@pytest.mark.fault(8)
def test_a_users_own_config_is_disturbed_and_one_that_draws_by_itself_is_said(
    base, tmp_path, environment
):
    """Its rewards draw random numbers, so no two runs are equal."""
    file = faulty_runs.write(base, tmp_path, **{"train.steps": 20})
    printed = disturb(environment(), str(file), "--seeds", "3", "--every", "5")
    assert "1 of 1 seeds equal" in printed
    assert not (tmp_path / "r").exists()
    unsteady = tmp_path / "unsteady"
    file = faulty_runs.write(base, unsteady, "return [random.random() for _ in completions]",
                             "import random", **{"train.steps": 2})  # fmt: skip
    command = [sys.executable, str(CHAOS), str(file), "--seeds", "0"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert "two undisturbed runs differ in " in run.stdout


@pytest.mark.parametrize("name", ["flip_a_bit", "cut_a_file", "tear_a_line"])
def test_what_comes_upon_a_folder_changes_it_and_leaves_the_step_before(name, tmp_path, repository):
    scope: dict = {"__file__": str(CHAOS), "__name__": "chaos"}
    exec(compile(CHAOS.read_text("utf-8"), str(CHAOS), "exec"), scope)
    damage, draw = scope[name], random.Random(0)
    assert not damage(tmp_path, draw)
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}" * 20)
        (folder / "state").write_bytes(os.urandom(99))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    contents = lambda: {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}  # noqa: E731
    before = contents()
    assert damage(tmp_path, draw)
    changed = {str(f.relative_to(tmp_path)) for f, data in contents().items() if before[f] != data}
    assert len(changed) == 1
    assert not any(place.startswith("checkpoints/1") for place in changed)
