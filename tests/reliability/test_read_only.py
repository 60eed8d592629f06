"""A file system that may only be read, from the start or from the middle of a run on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty_runs
import pytest

from jaxgrpo.training.checkpoints import Checkpoints

pytestmark = [
    pytest.mark.full,
    pytest.mark.fault(13),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts, and makes files immutable"),
]

STEPS, SAVED = 5, 3
REPAIRED = ("--resume", "auto", "--set", "run.allow_changes=['code']")

# What is opened by its path from then on is on a mount that may only be read; the lock stays open.
TURN = """
if step == 2 and not is_called_to_try:
    subprocess.run(["mount", "--bind", {folder!r}, {folder!r}], check=True)
    turn = ["mount", "-o", "remount,bind,ro", {folder!r}, {folder!r}]
    while subprocess.run(turn, capture_output=True).returncode:  # busy: a step is being saved
        time.sleep(0.01)
"""
FAIL = """
if step == 2 and not is_called_to_try:
    with open("/sys/fs/ext4/{device}/trigger_fs_error", "w") as file:
        file.write("a fault of the disk")
"""


def write(base: Path, home: Path, harm: str = "", /, **changes: Any) -> Path:
    changes = {"train.steps": STEPS, "run.rollouts_every": 1, **changes}
    return faulty_runs.write(base, home, harm, "import subprocess, time", **changes)


def mount(*options: Any) -> None:
    try:
        subprocess.run(["mount", *map(str, options)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine mounts nothing: {error}")


def make_ext4(image: Path) -> None:
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-qF", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no ext4: {error}")


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,bind,ro", folder)
        yield
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def end(run: Any, code: int) -> str:
    """What it wrote on stderr."""
    _, errors = run.communicate(timeout=faulty_runs.SECONDS)
    assert run.returncode == code, errors
    assert faulty_runs.disorder(errors) == []
    return errors


def continue_to_the_end(start: Any, file: Path, folder: Path, expected: dict[str, Any]) -> None:
    """Once the fault is over."""
    end(start("train", file, *REPAIRED, merged=False), 0)
    assert faulty_runs.differences(expected, folder) == []


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory, fork_server, environment) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("straight")
    end(fork_server.start("train", write(base, home), env=environment(), merged=False), 0)
    return faulty_runs.outcome(home / "r")


@pytest.fixture(scope="module")
def saved_run(base, tmp_path_factory, fork_server, environment) -> Path:
    """The folder of a run that has taken SAVED of its steps."""
    home = tmp_path_factory.mktemp("saved")
    file = write(base, home, **{"train.steps": SAVED})
    end(fork_server.start("train", file, env=environment(), merged=False), 0)
    return home / "r"


def copied(base: Path, home: Path, saved_run: Path) -> Path:
    """A config whose run folder is a copy of it."""
    rewards = [{"use": f"{saved_run.parent}/mine.py:digits"}]
    file = write(base, home, rewards=rewards)
    subprocess.run(["cp", "-a", str(saved_run), str(home / "r")], check=True)
    return file


def test_commands_that_write_into_a_run_are_refused_and_those_that_read_do_their_work(
    base, tmp_path, saved_run, start
):
    file, folder = copied(base, tmp_path, saved_run), tmp_path / "r"
    with read_only(folder):
        for command in (["train", file, *REPAIRED], ["report", folder]):
            errors = end(start(*command, merged=False), 2)
            assert len(errors.splitlines()) == 1
            assert str(folder) in errors
        for command in (
            ["report", folder, "--text"],
            ["samples", folder],
            ["export", folder, tmp_path / "out"],
        ):
            end(start(*command, merged=False), 0)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("every", [1, STEPS])
def test_a_run_whose_folder_becomes_read_only_says_where_and_continues(
    every, base, tmp_path, start, straight
):
    harm = TURN.format(folder=str(tmp_path / "r"))
    changes = {"checkpoint.every": every, "run.report": True, "tracking": {"tensorboard": True}}
    file = write(base, tmp_path, harm, **changes)
    try:
        errors = end(start("train", file, merged=False), 74)
    finally:
        unmount(tmp_path / "r")
    last = errors.splitlines()[-1]
    assert str(tmp_path / "r") in last
    assert "Read-only file system; let it be written" in last
    assert "make space" not in last
    file = write(base, tmp_path, **changes)
    continue_to_the_end(start, file, tmp_path / "r", straight)


def test_a_disk_that_fails_under_a_run_is_named_and_it_continues_once_it_is_repaired(
    base, tmp_path, start, straight
):
    """ext4 turns read-only by itself where it finds a fault; the kernel can be asked for one."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    make_ext4(image)
    mount("-o", "loop,errors=remount-ro", image, disk)
    try:
        source = subprocess.check_output(["findmnt", "-no", "SOURCE", str(disk)], text=True)
        device = Path(source.strip()).name
        if not Path(f"/sys/fs/ext4/{device}/trigger_fs_error").exists():
            pytest.skip("this kernel triggers no faults")
        run_folder = {"run.dir": str(disk / "r")}
        config = write(base, tmp_path, FAIL.format(device=device), **run_folder)
        errors = end(start("train", config, merged=False), 74)
        assert f"{disk / 'r'}" in errors
        assert "Read-only file system" in errors
        subprocess.run(["umount", str(disk)], check=True)
        subprocess.run(["fsck.ext4", "-fy", str(image)], capture_output=True)
        mount("-o", "loop", image, disk)
        config = write(base, tmp_path, **run_folder)
        continue_to_the_end(start, config, disk / "r", straight)
    finally:
        unmount(disk)


CUT = """
import shutil, sys
import numpy as np
from pathlib import Path
from jaxgrpo.training.checkpoints import Checkpoints

disk, image, copy = map(Path, sys.argv[1:])
with Checkpoints(disk / "checkpoints", keep=1) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, {"weight": np.arange(50_000.0)}, {})
        checkpoints.wait()
    shutil.copyfile(image, copy)
"""


def test_a_power_cut_right_behind_a_save_leaves_it_whole(tmp_path, python, environment):
    """The image of a file system is then what has been written to its disk, and no more."""
    image, copy, disk = (tmp_path / name for name in ("image", "copy", "disk"))
    disk.mkdir()
    make_ext4(image)
    mount("-o", "loop", image, disk)
    try:
        command = [python, "-c", CUT, *map(str, (disk, image, copy))]
        subprocess.run(command, env=environment(), check=True)
    finally:
        unmount(disk)
    mount("-o", "loop", copy, disk)
    try:
        with Checkpoints(disk / "checkpoints") as checkpoints:
            assert checkpoints.latest() == 3
            assert checkpoints.choose() == 3
    finally:
        unmount(disk)


def test_a_file_system_without_a_place_for_one_more_file_is_a_full_one(
    base, tmp_path, start, straight
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "nr_inodes=30", "tmpfs", disk)
    try:
        file = write(base, tmp_path, **{"run.dir": str(disk / "r")})
        assert "No space left on device" in end(start("train", file, merged=False), 74)
        mount("-o", "remount,nr_inodes=3000", disk)
        continue_to_the_end(start, file, disk / "r", straight)
    finally:
        unmount(disk)


PLACES = {
    "config.toml": 2,
    "metrics.jsonl": 2,
    "code/mine.py": 2,
    ".lock": 2,
    "checkpoints": 74,
    "checkpoints/3": 0,
    "summary.json": 74,
    "model": 74,
    "samples": 0,
}
"""What of a run folder may not be changed -> the exit code of a start that continues there."""


def test_what_of_a_run_may_not_be_changed_is_named(
    base, tmp_path, saved_run, series, straight, tries
):
    """As by `chattr +i`, which stops root too. Without samples, and beside a step that cannot be
    removed, a run goes on and says so."""
    for number, (place, code) in enumerate(PLACES.items()):
        home = tmp_path / str(number)
        file = copied(base, home, saved_run)
        locked = home / "r" / place
        if subprocess.run(["chattr", "+i", str(locked)], capture_output=True).returncode:
            pytest.skip("this file system knows no immutable files")
        try:
            ended, output = series.run("train", file, *REPAIRED)
        finally:
            subprocess.run(["chattr", "-i", str(locked)], check=True)
        assert ended == code, (place, output)
        assert "Operation not permitted" in output
        assert "make space" not in output
        assert place == ".lock" or Path(place).name in output
        assert faulty_runs.disorder(output) == []
        if code:
            ended, output = series.run("train", file, *REPAIRED)
            assert (ended, faulty_runs.disorder(output)) == (0, []), (place, output)
            assert faulty_runs.differences(straight, home / "r") == []
        tries()
