"""Killed at any moment and continued, a run ends as if nothing had happened."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import faulty_runs
import pytest

pytestmark = [pytest.mark.full, pytest.mark.fault(8)]

KILLS = {0: (7, 3), 1: (7, 3), 2: (8, 2), 3: (8, 2)}
"""Seed -> kills at random moments, and within a save."""
STEPS = 8
LATEST = 4.5  # seconds after its start at which a run is killed


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory, fork_server, environment) -> dict[str, Any]:
    """What a run comes to that nothing disturbs."""
    home = tmp_path_factory.mktemp("straight")
    file = write(base, home)
    run = fork_server.start("train", file, env=environment())
    output, _ = run.communicate(timeout=faulty_runs.SECONDS)
    assert run.returncode == 0, output
    return faulty_runs.outcome(home / "r")


def write(base: Path, home: Path) -> Path:
    evaluation = {"eval.data": "task:arithmetic:test", "eval.every": 3, "eval.prompts": 4}
    reference = {"loss.kl": {"use": "k2", "beta": 0.01}, "eval.samples": 2}
    return faulty_runs.write(base, home, **{"train.steps": STEPS}, **evaluation, **reference)


def steps_being_saved(run: Path) -> list[Path]:
    """Folders of steps that are not complete yet."""
    folders = (run / "checkpoints").glob("*")
    return [path for path in folders if path.is_dir() and not (path / "manifest.json").exists()]


def folders_being_saved(run: Path) -> set[tuple[str, int]]:
    """The same, told from those of the same name that an earlier start has left."""
    return {(path.name, path.stat().st_ino) for path in steps_being_saved(run)}


def test_there_are_40_kills_10_of_them_within_a_save():
    anywhere, saves = (sum(counts) for counts in zip(*KILLS.values(), strict=True))
    assert (anywhere + saves, saves) == (40, 10)


@pytest.mark.parametrize("seed", KILLS)
def test_kills_at_random_moments_and_within_saves_change_nothing(
    seed, base, tmp_path, start, straight, tries
):
    """A kill is within a save if it leaves a step without a manifest; one that came too late for
    that is one at a random moment, and another one is tried."""
    draw, counts = random.Random(seed), Counter[str]()
    planned = dict(zip(("any", "save"), KILLS[seed], strict=True))
    lives = itertools.count()
    home = tmp_path / f"life {next(lives)}"
    while missing := [moment for moment in planned if counts[moment] < planned[moment]]:
        moment = draw.choice(missing)
        file = home / "run.toml" if home.exists() else write(base, home)
        left = folders_being_saved(home / "r")
        run = start("train", file, "--resume", "auto")
        kill(run, moment, home / "r", draw)
        if run.wait(faulty_runs.SECONDS) == 0:  # it ended before its moment came
            home = tmp_path / f"life {next(lives)}"
            continue
        assert run.returncode == -signal.SIGKILL, run.communicate()[0]
        counts["save" if folders_being_saved(home / "r") - left else "any"] += 1
    assert counts.total() >= sum(planned.values())
    tries(counts.total())
    for life in tmp_path.iterdir():
        run = start("train", life / "run.toml", "--resume", "auto")
        output, _ = run.communicate(timeout=faulty_runs.SECONDS)
        assert run.returncode == 0, output
        assert faulty_runs.disorder(output) == []
        assert faulty_runs.differences(straight, life / "r") == []


def kill(run: Any, moment: str, folder: Path, draw: random.Random) -> None:
    """Kills a run within a save, or at a random moment; not if it ends before that."""
    began, until = time.monotonic(), draw.uniform(0.1, LATEST)
    if moment == "save":
        for _ in range(draw.randrange(1, 4)):  # the first save of a start, or a later one
            faulty_runs.wait_until(lambda: run.poll() is not None or not steps_being_saved(folder))
            faulty_runs.wait_until(
                lambda: run.poll() is not None or steps_being_saved(folder), tick=0.0002
            )
        time.sleep(draw.uniform(0.0, 0.02))
    else:
        faulty_runs.wait_until(lambda: run.poll() is not None or time.monotonic() > began + until)
    run.kill()
