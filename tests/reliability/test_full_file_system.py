"""A file system without room for the next write of a run, whichever it is, that is freed later."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import faulty_runs
import pytest
from series import Series

pytestmark = [pytest.mark.full, pytest.mark.fault(13)]

SIZE = 60 << 20
STEPS = 6


def write(base: Path, home: Path, folder: Path) -> Path:
    changes = {"train.steps": STEPS, "checkpoint.every": 1, "checkpoint.keep": 50}
    changes |= {"run.dir": str(folder), "run.report": True, "run.rollouts_every": 1}
    return faulty_runs.write(base, home, **changes, tracking={"tensorboard": True})


def used(folder: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in folder.rglob("*"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 60 MB; skips where this user may make none."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system: see the limits of sizes below")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_file_system_that_may_only_be_read_is_refused_at_the_start(
    base, tmp_path, start, small_disk
):
    run_folder = small_disk / "r"
    run_folder.mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = start("train", write(base, tmp_path, run_folder), merged=False)
    _, errors = run.communicate(timeout=faulty_runs.SECONDS)
    assert run.returncode == 2, errors
    assert f"run.dir = {run_folder}" in errors
    assert len(errors.splitlines()) == 1
    assert list(run_folder.iterdir()) == []


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory, series) -> tuple[dict[str, Any], Path]:
    home = tmp_path_factory.mktemp("straight")
    code, output = series.run("train", write(base, home, home / "r"))
    assert code == 0, output
    return faulty_runs.outcome(home / "r"), home / "r"


@pytest.mark.parametrize("part", range(3))
def test_wherever_the_disk_is_full_the_run_says_so_and_continues_once_there_is_room(
    part, base, tmp_path, series, straight, small_disk, tries
):
    """The room that is left is cut from nothing to all that the run takes, so that each of its
    writes is the first that fails once."""
    expected, folder = straight
    needed = used(folder)
    assert needed < SIZE
    ballast, problems = small_disk / "ballast", []
    for place in range(part, 18, 3):
        room = int(needed * (place / 17) ** 2)  # most files are written early, and are small
        home = tmp_path / f"room {room}"
        file = write(base, home, small_disk / "r")
        ballast.write_bytes(b"\0" * (SIZE - room))
        code, errors = series.run("train", file, merged=False)
        wrong = faulty_runs.disorder(errors)
        if code not in (0, 2, 74) or (code and len(errors.splitlines()) > 5):
            wrong.append(f"exit code {code}: {errors}")
        ballast.unlink()
        wrong += continued(series, file, expected, small_disk / "r")
        if wrong:
            problems.append(f"{room} of {needed} bytes: {'; '.join(wrong)}")
        else:
            tries()
        subprocess.run(["rm", "-rf", str(small_disk / "r")], check=True)
    assert not problems, "\n".join(problems)


def test_files_that_may_not_be_larger_fail_as_on_a_full_disk(
    base, tmp_path, series, straight, tries
):
    """A limit just below the size of each file of a run, where no file system can be made."""
    expected, folder = straight
    sizes = sorted({file.stat().st_size for file in folder.rglob("*") if file.is_file()})
    limits = [max(1, size - 1) for size in sizes if size][:: max(1, len(sizes) // 8)]
    problems = []
    for limit in limits:
        home = tmp_path / f"limit {limit}"
        file = write(base, home, home / "r")
        code, errors = series.run("train", file, merged=False, limit=limit)
        wrong = faulty_runs.disorder(errors)
        if code not in (0, 2, 74):
            wrong.append(f"exit code {code}: {errors[-500:]}")
        wrong += continued(series, file, expected, home / "r")
        if wrong:
            problems.append(f"files of {limit} bytes: {'; '.join(wrong)}")
        else:
            tries()
    assert not problems, "\n".join(problems)


def continued(series: Series, file: Path, expected: dict[str, Any], folder: Path) -> list[str]:
    """What is wrong with a run that continues, once there is room, and ends: [] if nothing."""
    quick = ("--set", "run.report=false")  # a report is not compared
    code, errors = series.run("train", file, "--resume", "auto", *quick, merged=False)
    wrong = faulty_runs.disorder(errors)
    if code:
        return [*wrong, f"afterwards exit code {code}: {errors[-500:]}"]
    return wrong + faulty_runs.differences(expected, folder)
