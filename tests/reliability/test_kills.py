"""Killed at any moment and continued, a run ends as if nothing had happened."""

from __future__ import annotations

import itertools
import random
import signal
import time
from pathlib import Path
from typing import Any

import faulty_runs
import pytest

pytestmark = [pytest.mark.full, pytest.mark.fault(8)]

KILLS, IN_A_SAVE = 40, 10
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


@pytest.mark.parametrize("seed", range(4))
def test_kills_at_random_moments_and_within_saves_change_nothing(
    seed, base, tmp_path, start, straight, tries
):
    draw = random.Random(seed)
    moments: list[str] = ["any"] * (KILLS // 4 - IN_A_SAVE // 4) + ["save"] * (IN_A_SAVE // 4)
    moments += ["save"] * (seed < IN_A_SAVE % 4) + ["any"] * (seed >= IN_A_SAVE % 4)
    draw.shuffle(moments)
    lives = itertools.count()
    home = tmp_path / f"life {next(lives)}"
    for moment in moments[: KILLS // 4]:
        file = home / "run.toml" if home.exists() else write(base, home)
        run = start("train", file, "--resume", "auto")
        kill(run, moment, home / "r", draw)
        if run.wait(faulty_runs.SECONDS) == 0:  # it ended before its moment came
            run = start("train", write(base, home := tmp_path / f"life {next(lives)}"))
            kill(run, "any", home / "r", random.Random(0))
            run.wait(faulty_runs.SECONDS)
        assert run.returncode == -signal.SIGKILL, run.communicate()[0]
        tries()
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
